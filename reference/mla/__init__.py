"""Multi-head Latent Attention: weights, choice of path, builder, prefill, decode, context parallelism, layer."""

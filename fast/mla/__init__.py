"""Multi-head Latent Attention: weights, choice of paths, plans, prefill, decode, context parallelism, layer."""

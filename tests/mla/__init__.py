"""Multi-head Latent Attention."""

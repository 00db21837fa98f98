"""Multi-head Latent Attention (MLA): the layer, its weights, the plan of a step, prefill and decode."""

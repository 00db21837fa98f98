"""Tests of Multi-head Latent Attention: layer, builder, weights, cascade, context parallelism."""

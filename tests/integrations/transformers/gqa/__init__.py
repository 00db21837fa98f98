"""Tests of ordinary models of transformers under `use_attention`."""

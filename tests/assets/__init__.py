"""Tests of the files in `fast/assets`: the checkpoint tiny-mla and the prompts."""

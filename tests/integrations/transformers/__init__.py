"""Tests of DeepSeek models of transformers under `use_mla`."""

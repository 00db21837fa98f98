"""Tests of the contract of grouped-query attention: configs, caches, groups of layers, argument checks."""

"""Identities in float64 that one package must fulfil, without comparison to the other."""

"""Identities in float64; each test uses one package only."""

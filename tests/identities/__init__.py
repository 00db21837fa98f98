"""Identities in float64, of one package by itself."""

"""Tests of the contract `reference.interfaces`: configurations, metadata, formulas for integers, argument checks."""

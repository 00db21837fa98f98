"""Tests of the contract: configurations, metadata, formulas for integers, checks of arguments."""

"""Planted mistakes, and the tool that plants more."""

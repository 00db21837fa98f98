"""Adapters between the twins and other people's models, one package an engine. Nothing here is imported by `fast`."""

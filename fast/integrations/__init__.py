"""Adapters for models of other projects, one package for each project. `import fast` imports none of them."""

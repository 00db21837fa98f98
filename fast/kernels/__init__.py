"""Kernels and their launchers, in one package for each backend: `cpu`, `triton`, `hopper` and `torch`.

A launcher is a Python function that takes tensors and numbers and launches the kernels of one op. `import fast` imports
no kernels; `fast.backends` imports the package of a backend when the backend is first used. The backends `triton` and
`hopper` both use the package `combine`. `torch` uses the online softmax of `cpu`.
"""

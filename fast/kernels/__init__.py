"""Kernels and their launchers: one package for each backend. No module of this package depends on a model.

`fast.backends` declares the ops and devices of each backend. `import fast` imports no backend. The package `combine`
is used by two backends.
The module `rotation` is not part of a backend, because the public function `fast.rotate` needs it too.
"""

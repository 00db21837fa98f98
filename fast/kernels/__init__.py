"""Kernels and their launchers; each backend has a package here, and nothing here depends on a model.

`fast.backends` declares what each backend can serve. `import fast` imports no backend. `combine` serves two backends.
The module `rotation` is not part of a backend, because the public function `fast.rotate` needs it too.
"""

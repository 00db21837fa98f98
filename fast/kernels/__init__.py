"""Kernel sets, one folder each: kernels and their launchers, nothing about models.

`fast.backends` lists them with what each can serve; `cpu` is vectorised PyTorch. `import fast` imports none of them;
`rotation` is beside them, for the public `rotate` needs it too.
"""

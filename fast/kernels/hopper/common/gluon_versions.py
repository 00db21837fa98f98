"""What differs between the versions of Triton that these kernels compile with: 3.6 and 3.7."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# 3.7 calls it barrier
partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

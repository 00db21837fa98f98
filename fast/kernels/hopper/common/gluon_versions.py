"""Names of Gluon that differ between the versions of Triton that these kernels support: 3.6 and 3.7."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# The barrier of the warps of one partition of `warp_specialize` is `thread_barrier` in Triton 3.6 and `barrier` in 3.7.
partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

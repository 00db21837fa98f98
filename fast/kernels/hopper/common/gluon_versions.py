"""Names of Gluon that differ between the versions of Triton that these kernels support: 3.6 and 3.7."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# A partition is the warps that run one function of `gl.warp_specialize`. The barrier of all threads of a partition is
# called `thread_barrier` in Triton 3.6 and `barrier` in Triton 3.7.
partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

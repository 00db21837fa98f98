"""Hopper (sm_90a): decode in Gluon with the chip's own means; for every other op the portable Triton kernels."""

from .. import triton
from .decode import decode_programs, mla_decode, mla_decode_parts

KERNELS = {
    **triton.KERNELS,
    "decode_programs": decode_programs,
    "mla_decode": mla_decode,
    "mla_decode_parts": mla_decode_parts,
}

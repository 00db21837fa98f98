"""Hopper (sm_90a): decode in Gluon with the chip's own means.

The partial outputs of these kernels lie as those of portable Triton do, so one combine kernel of
`fast.kernels.combine` serves both. `mla_decode` launches it too: it belongs to this decode.
"""

from .decode import decode_programs, mla_decode

KERNELS = {
    "decode_programs": decode_programs,
    "mla_decode": mla_decode,
}

"""Hopper (sm_90a): decode in Gluon with the chip's own means.

The partial outputs of these kernels lie as those of portable Triton do, so one combine kernel of
`fast.kernels.triton.decode_merge` serves both. `mla_decode` launches it too: it belongs to this decode.
"""

from ..triton.decode_merge import merge_decode_parts
from .decode import decode_programs, mla_decode, mla_decode_parts

KERNELS = {
    "decode_programs": decode_programs,
    "merge_decode_parts": merge_decode_parts,
    "mla_decode": mla_decode,
    "mla_decode_parts": mla_decode_parts,
}

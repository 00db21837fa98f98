"""Kernels in Gluon for Hopper GPUs (sm_90a). They use TMA (bulk copies), mbarriers and warp-group products.

The package `common` has the functions that several kernels use. `mla_decode` is the only op with kernels here.
"""

from .. import compile_log
from .mla_decode.launch import decode_programs, mla_decode, schedule_costs

compile_log.install_once()

KERNELS = {
    "decode_programs": decode_programs,
    "mla_decode": mla_decode,
    "schedule_costs": schedule_costs,
}

"""Kernels in Gluon for Hopper GPUs (sm_90a): they use TMA (bulk copies), mbarriers and warp-group products.

`common` has the functions that several kernels use. Each op has its own package; so far there is `mla_decode`.
"""

from .. import compile_log
from .mla_decode.launch import decode_programs, mla_decode, schedule_costs

compile_log.install_once()

KERNELS = {
    "decode_programs": decode_programs,
    "mla_decode": mla_decode,
    "schedule_costs": schedule_costs,
}

"""Hopper (sm_90a): kernels in Gluon with the chip's own means. `common` has what they share, a folder has each op."""

from .. import compile_log
from .mla_decode.launch import decode_programs, mla_decode, schedule_costs

compile_log.install_once()

KERNELS = {
    "decode_programs": decode_programs,
    "mla_decode": mla_decode,
    "schedule_costs": schedule_costs,
}

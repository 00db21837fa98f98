"""The backend `hopper`: kernels for Hopper GPUs (sm_90a) in Gluon, Triton's lower-level language.

The kernels use TMA (the GPU's bulk copy engine), mbarriers (barriers in shared memory) and warp-group products. The
package `common` has the functions that several kernels use. `mla_decode` is the only op with kernels here.
"""

from .. import compile_log
from .mla_decode.launch import decode_programs, mla_decode, schedule_costs

compile_log.install_once()

KERNELS = {
    "decode_programs": decode_programs,
    "mla_decode": mla_decode,
    "schedule_costs": schedule_costs,
}

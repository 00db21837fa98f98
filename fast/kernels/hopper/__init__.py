"""The backend `hopper`: kernels for Hopper GPUs (sm_90a) in Gluon, Triton's lower-level language.

The kernels use TMA (the GPU's bulk copy engine), mbarriers (barriers in shared memory) and warp-group products. The
package `common` has the functions that several kernels use, `mla_decode` has the kernels of the absorbed decode, and
`varlen` has the kernel of the attention over packed requests.
"""

from .. import compile_log
from .mla_decode.launch import decode_programs, mla_decode, schedule_costs
from .varlen.launch import flash_attn_varlen

compile_log.install_once()

KERNELS = {
    "decode_programs": decode_programs,
    "flash_attn_varlen": flash_attn_varlen,
    "mla_decode": mla_decode,
    "schedule_costs": schedule_costs,
}

"""Adapters: kernels of other libraries, each behind the name of a backend.

Each module has the adapters for one library. An adapter is a `Backend`, which declares what the library's kernels
support, and a launcher. The launcher converts the arguments to the library's layout, and the library's result to an
`AttentionState`: natural-log LSE, [N, T], output 0 and LSE -inf for a row without keys. To import an adapter does not
import its library.
"""

from ..registry import register
from .flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4
from .flashinfer import FLASHINFER
from .flashinfer_cudnn import FLASHINFER_CUDNN
from .flashinfer_mla import FLASHINFER_MLA
from .flashmla import FLASHMLA
from .flex import FLEX
from .torch_sdpa import TORCH_CUDNN, TORCH_FLASH
from .torch_varlen import TORCH_VARLEN
from .trtllm_ragged import TRTLLM_RAGGED

ADAPTERS = (
    TORCH_FLASH, TORCH_CUDNN, TORCH_VARLEN, FLEX, FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, FLASHMLA, FLASHINFER,
    FLASHINFER_MLA, FLASHINFER_CUDNN, TRTLLM_RAGGED,
)  # fmt: skip


def register_adapters() -> None:
    """Register all adapters, whether or not their libraries are installed."""
    for backend in ADAPTERS:
        register(backend)

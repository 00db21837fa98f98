"""Backend "torch": PyTorch operations on a GPU, which never wait for a value on the host.

Sizes that the host does not know are replaced by their upper bounds, and the surplus is masked. A CUDA graph can
therefore capture every call. The functions also run on CPU tensors, where tests compare them with the backend "cpu".
"""

from .attention import gqa_paged_attention, gqa_varlen_attention
from .cache import reshape_and_cache

KERNELS = {
    "gqa_paged_attention": gqa_paged_attention, "gqa_varlen_attention": gqa_varlen_attention,
    "reshape_and_cache": reshape_and_cache,
}  # fmt: skip

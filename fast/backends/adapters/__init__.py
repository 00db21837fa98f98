"""Adapters: kernels of other libraries, each behind the name of a backend.

Each module has the adapters for one library. An adapter is a `Backend`, which declares what the library's kernels
support, and a launcher. The launcher converts the arguments to the library's layout, and the library's result to an
`AttentionState`: natural-log LSE, [N, T], output 0 and LSE -inf for a row without keys. To import an adapter does not
import its library.
"""

from ..registry import register
from .torch_sdpa import TORCH_FLASH

ADAPTERS = (TORCH_FLASH,)


def register_adapters() -> None:
    """Register all adapters, whether or not their libraries are installed."""
    for backend in ADAPTERS:
        register(backend)

"""Remember which plans a layer has checked, so that the ops of the layer do not check their values again.

On a CPU, the check of a plan's values (`check_paged_values`) reads every length, every visible key and every block. The
layer must check the values before it writes the cache. The ops that it calls afterwards get the same plans.
"""

from __future__ import annotations

import operator
import threading

from torch import Tensor

from reference.interfaces import DecodeMetadata
from reference.interfaces.gqa import PagedAttentionMetadata


class CheckedPlans:
    """Context manager for attention over one cache with plans whose values (`check_paged_values`) were checked.

    Inside, `gqa_paged_attention` on CPU tensors does not check the values of these plans again. A plan is recognised by
    its tensors. The values of all other plans are checked, such as those of a kernel that calls `gqa_paged_attention`.

    Args:
        kv_cache: the cache.
        plans: the plans.
    """

    __slots__ = ("_checked", "_outer")

    def __init__(self, kv_cache: Tensor, *plans: DecodeMetadata):
        self._checked = kv_cache, plans

    def __enter__(self) -> None:
        self._outer, _PER_THREAD.checked = _PER_THREAD.checked, self._checked

    def __exit__(self, *_: object) -> None:
        _PER_THREAD.checked = self._outer


class _PerThread(threading.local):
    """State of the current thread: the cache and the plans of the innermost `CheckedPlans`."""

    checked: tuple[Tensor | None, tuple[DecodeMetadata, ...]] = None, ()


_PER_THREAD = _PerThread()
_CHECKED_TENSORS = operator.attrgetter("block_table", "seq_lens", "query_start_loc", "visible_lens")


def is_checked(plan: PagedAttentionMetadata, kv_cache: Tensor) -> bool:
    """Return whether the values of a plan over a cache were checked (`CheckedPlans`)."""
    cache, plans = _PER_THREAD.checked
    return cache is kv_cache and any(
        plan.max_query_len == known.max_query_len
        and plan.max_seq_len == known.max_seq_len
        and plan.first_visible is getattr(known, "first_visible", None)
        and all(map(operator.is_, _CHECKED_TENSORS(plan), _CHECKED_TENSORS(known)))
        for known in plans
    )

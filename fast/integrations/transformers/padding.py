"""Checks of the padding mask and the positions of a padded batch.

A padded batch has B rows, each with Q new tokens and with tokens that are already cached. A `BatchRecord` says which
cached tokens are padding.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from reference.interfaces import check, check_tensor

from .cache import BatchRecord


def read_mask(attention_mask: Any, rows: int, queries: int, record: BatchRecord) -> Bool[Tensor, "B S"] | None:
    """Return the padding mask [B, cached tokens + Q] on the CPU, or None if no token is padding.

    Args:
        attention_mask: mask that the caller of the model passed, or None.
        rows: B.
        queries: Q.
        record: record of the cached tokens.

    Raises:
        ValueError: the mask has another shape, or marks other cached tokens as padding than earlier calls did.
    """
    wanted = f"a padding mask [{rows}, {record.length + queries}]"
    if attention_mask is None:
        check(record.mask is None, "attention_mask", f"{wanted}, because past_key_values holds padding", None)
        return None
    check(isinstance(attention_mask, Tensor), "attention_mask", f"{wanted} or None", type(attention_mask).__name__)
    shape = list(attention_mask.shape)
    check(shape == [rows, record.length + queries], "attention_mask", f"{wanted} or None", f"shape {shape}")
    mask = attention_mask.to(torch.bool).cpu()
    if record.mask is None:
        if mask.all():
            return None
        check(bool(mask[:, : record.length].all()), "attention_mask", "every cached token visible", "a hidden token")
    else:
        same = torch.equal(mask[:, : record.length], record.mask)
        check(same, "attention_mask", "the padding that past_key_values was filled with", "other padding")
    return mask


def read_positions(position_ids: Any, rows: int, queries: int, length: int, device: torch.device) -> Int[Tensor, "B Q"]:
    """Return the positions [B, Q] of the new tokens, padding included; without `position_ids`, count from `length`."""
    if position_ids is None:
        position_ids = torch.arange(length, length + queries, device=device)[None]
    check_tensor("position_ids", position_ids, ("1 or B", queries), (torch.int64, torch.int32), device)
    check(position_ids.shape[0] in (1, rows), "position_ids", f"shape [{rows}, {queries}]", list(position_ids.shape))
    return position_ids.expand(rows, queries)

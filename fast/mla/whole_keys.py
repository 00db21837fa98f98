"""Expand latents into keys and values, with whole keys for a backend whose kernel does not take keys in two parts.

A whole key has its part without rope and then the rope part, which all heads share. The product of the latents and W_UK
is written into whole keys directly, so that nothing copies it; only the rope part is written for each head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from reference.interfaces import check_expanded_pair, split_for_keys
from reference.interfaces.support import constant_when_traced

from ..backends import BackendChoice, registered
from ..backends.adapters.conversion import write_shared_columns
from ..backends.selection import name_for
from .head_products import INVARIANT_ROWS, bmm_into
from .weights import check_expansion_once, expand_into

OP = "flash_attn_varlen"


def takes_whole_keys(backend: BackendChoice) -> bool:
    """Return whether attention of prefills is bound to a backend that declares whole keys.

    Args:
        backend: a name, a mapping from op to name, or None. The result for None is False, because each call then
            chooses its backend.
    """
    name = name_for(OP, backend)
    return name is not None and _declares_whole_keys(name)


@constant_when_traced
def _declares_whole_keys(name: str) -> bool:
    """Return whether a registered backend declares whole keys; False for an unknown name, which an op refuses later."""
    declared = next((each.ops.get(OP) for each in registered() if each.name == name), None)
    return declared is not None and declared.whole_keys


def expand_whole(
    kv_c_normed: Float[Tensor, "S Lkv"],
    k_pe: Float[Tensor, "S R"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    workspace: Float[Tensor, " elements"] | None = None,
    block_rows: int = 0,
) -> tuple[Float[Tensor, "S N D"], Float[Tensor, "S N V"]]:
    """Expand latents into whole keys and values of every head; D = P + R.

    Args:
        kv_c_normed: [S, Lkv], RMS-normed latents.
        k_pe: [S, R], rotated rope part of the keys.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        workspace: contiguous vector for the results of `expand_kv`; here it receives the values alone, because whole
            keys are longer than its part for keys. None allocates a tensor for the values too.
        block_rows: number of rows that one product multiplies (`bmm_into`); 0 means all rows.

    Returns:
        Keys [S, N, P + R], contiguous, and values [S, N, V], of which v[:, n] of each head n is contiguous.
    """
    check_expansion_once(kv_c_normed, w_uk, w_uv, workspace)
    (tokens, _), (_, heads, nope), value = kv_c_normed.shape, w_uk.shape, w_uv.shape[2]
    by_head = kv_c_normed.expand(heads, -1, -1)  # [N, S, Lkv], no copy
    keys = kv_c_normed.new_empty(tokens, heads, nope + k_pe.shape[1])
    bmm_into(by_head, w_uk.transpose(0, 1), keys[..., :nope].transpose(0, 1), block_rows)
    write_shared_columns(keys, k_pe)
    if workspace is None:
        v = kv_c_normed.new_empty(heads, tokens, value)
    else:
        v = split_for_keys(workspace, tokens, heads, nope, value)[1].view(heads, tokens, value)
    bmm_into(by_head, w_uv.transpose(0, 1), v, block_rows)
    return keys, v.transpose(0, 1)


class ExpandedKeys(NamedTuple):
    """Keys and values of the heads.

    Attributes:
        keys: [S, N, P], keys without their rope part, or whole keys [S, N, P + R].
        rope: [S, R], rope part of the keys; None for whole keys.
        v: [S, N, V].
    """

    keys: Float[Tensor, "S N columns"]
    rope: Float[Tensor, "S R"] | None
    v: Float[Tensor, "S N V"]


def expanded_keys(
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None, whole: bool, latents: Tensor, k_pe: Tensor,
    w_uk: Tensor, w_uv: Tensor, workspace: Tensor | None, batch_invariant: bool,
) -> ExpandedKeys:  # fmt: skip
    """Return the keys and values of latents, from `expand`, or from products with the weights if `expand` is None.

    Args:
        expand: function that expands latents, as for `forward_prefill`; None multiplies by the weights.
        whole: whether the keys are whole; False if `expand` is given.
        latents: [S, Lkv].
        k_pe: [S, R], rotated rope part of the keys.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        workspace: memory for the results, as for `expand_whole`; None allocates it.
        batch_invariant: whether the bits of a key and value must not depend on the other latents.
    """
    block_rows = INVARIANT_ROWS if batch_invariant else 0
    if whole:
        keys, v = expand_whole(latents, k_pe, w_uk, w_uv, workspace, block_rows)
        return ExpandedKeys(keys, None, v)
    made = None if expand is None else check_expanded_pair(expand(latents), latents, w_uk, w_uv)
    k_nope, v = made or expand_into(latents, w_uk, w_uv, workspace, block_rows)
    return ExpandedKeys(k_nope, k_pe, v)

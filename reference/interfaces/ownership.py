"""Decode context parallelism in integers: which rank owns which token of a sequence, and what crosses the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int32
from torch import Tensor

from .checks import check, check_int, check_tensor

MERGES = ("ag_rs", "a2a")  # how ranks merge: cp_lse_ag_out_rs, cp_lse_a2a


def check_rank(size: int, rank: int | None, interleave: int, argument: str = "context_parallel_size") -> None:
    """Check D (which the caller calls `argument`), a rank of it (None for all) and I."""
    check_int(argument, size)
    inside = rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < size)
    check(inside, "rank", f"an int in [0, {size})", rank)
    check_int("interleave", interleave)
    check(size * interleave < 2**31, "interleave", f"fewer than 2^31 tokens in a turn of {size} ranks", interleave)


def check_interleave(interleave: int, block_size: int) -> None:
    """Check that blocks hold whole turns of a rank: so a block of the cache is filled in the order of its tokens."""
    check_int("block_size", block_size)
    check(block_size % interleave == 0, "interleave", f"a divisor of the block size {block_size}", interleave)


@dataclass(frozen=True)
class TokenOwnership:
    """Which tokens of every sequence a rank holds: token i lies on rank (i // I) mod D, in order.

    Attributes:
        size: D, ranks that share each sequence.
        rank: of them, which.
        interleave: I, tokens in a row on one rank.

    Raises:
        ValueError: a number out of range.
    """

    size: int
    rank: int
    interleave: int = 1

    def __post_init__(self):
        check_rank(self.size, self.rank, self.interleave, "size")
        check_int("rank", self.rank, 0, f"an int in [0, {self.size})")

    def count(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a sequence lie here."""
        check_int("num_tokens", num_tokens, 0)
        turns, rest = divmod(num_tokens, self.size * self.interleave)
        return turns * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)


def get_dcp_local_seq_lens(
    seq_lens: Int32[Tensor, " B"], context_parallel_size: int, rank: int | None = None, interleave: int = 1
) -> Int32[Tensor, " B *D"]:
    """How many of the first S tokens of each request lie on a rank: the (i // I) mod D = rank of i < S.

    Elementwise, so it serves visible lengths as well, on any device and inside a captured graph.

    Args:
        seq_lens: [B], lengths.
        context_parallel_size: D.
        rank: which; None for all of them.
        interleave: I.

    Returns:
        [B], or [B, D] where `rank` is None.

    Raises:
        ValueError: a number out of range.
    """
    check_rank(context_parallel_size, rank, interleave)
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    turn = context_parallel_size * interleave
    whole = seq_lens.div(turn, rounding_mode="floor")
    rest = seq_lens - whole * turn
    if rank is None:
        first = interleave * torch.arange(context_parallel_size, dtype=seq_lens.dtype, device=seq_lens.device)
        return whole[:, None] * interleave + (rest[:, None] - first).clamp_(0, interleave)
    return whole * interleave + (rest - rank * interleave).clamp_(0, interleave)


def dcp_wire_bytes(
    num_tokens: int,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    context_parallel_size: int,
    merge: str,
    element_size: int,
    lse_size: int = 4,
) -> dict[str, int]:
    """Bytes that each rank receives in one decode step of one layer, by collective.

    With n = N / D heads of its own, a rank receives from each of the D - 1 others: their queries, T n (Lkv + R)
    elements; then "ag_rs" all LSE of the other, T N float32, and its share of the outputs, T n Lkv elements (a
    reduce-scatter in its least traffic); "a2a" the same outputs and the LSE of its own heads alone, T n float32.

    Args:
        num_tokens: T, query tokens of the step.
        num_heads: N, heads that the group gathers (N D / TP of a model whose heads are sharded over TP ranks).
        kv_lora_rank: Lkv.
        qk_rope_head_dim: R.
        context_parallel_size: D.
        merge: "ag_rs" or "a2a".
        element_size: bytes of a query or output element.
        lse_size: bytes of an LSE, 4, or 8 in float64.

    Returns:
        Bytes by collective: "all_gather" and "reduce_scatter", or "all_gather" and "all_to_all".

    Raises:
        ValueError: another merge, or heads that D does not divide.
    """
    size = context_parallel_size
    check_rank(size, None, 1)
    check(merge in MERGES, "merge", f"one of {', '.join(MERGES)}", repr(merge))
    sizes = {"num_heads": num_heads, "kv_lora_rank": kv_lora_rank, "element_size": element_size, "lse_size": lse_size}
    for name, value in sizes.items():
        check_int(name, value)
    for name, value in (("num_tokens", num_tokens), ("qk_rope_head_dim", qk_rope_head_dim)):
        check_int(name, value, 0)
    check(num_heads % size == 0, "num_heads", f"a multiple of {size} ranks", num_heads)
    others, own = size - 1, num_tokens * (num_heads // size)
    queries = others * own * (kv_lora_rank + qk_rope_head_dim) * element_size
    outputs = others * own * kv_lora_rank * element_size
    if merge == "ag_rs":
        return {"all_gather": queries + others * num_tokens * num_heads * lse_size, "reduce_scatter": outputs}
    return {"all_gather": queries, "all_to_all": outputs + others * own * lse_size}

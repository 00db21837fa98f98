"""Decode context parallelism in numbers: the tokens that each rank owns, and the bytes that ranks exchange.

D ranks own the tokens of a sequence in turn, I consecutive tokens at a time (I is called the interleave). A round has I
tokens of each rank, D * I tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int32
from torch import Tensor

from .cache_format import COMPUTE_FORMAT, CacheFormat, check_format
from .checks import check, check_dtype, check_int, check_tensor
from .support import CAUSAL, CAUSAL_OVER_RANKS, VISIBLE_LENS

MERGES = ("ag_rs", "a2a")  # names of the merges `cp_lse_ag_out_rs` and `cp_lse_a2a`


def check_rank(size: int, rank: int | None, interleave: int, argument: str = "context_parallel_size") -> None:
    """Check the number of ranks D, a rank and the interleave I.

    Args:
        size: D.
        rank: rank in [0, D), or None if the caller means all ranks.
        interleave: I.
        argument: name of D in error messages.

    Raises:
        ValueError: a number is out of range.
    """
    check_int(argument, size)
    inside = rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < size)
    check(inside, "rank", f"an int in [0, {size})", rank)
    check_int("interleave", interleave)
    check(size * interleave < 2**31, "interleave", f"fewer than 2^31 tokens in a round of {size} ranks", interleave)


def check_interleave(interleave: int, block_size: int) -> None:
    """Check that the block size is a multiple of the interleave I, so that I consecutive tokens are in one block.

    Raises:
        ValueError: the block size is below 1, or not a multiple of the interleave.
    """
    check_int("block_size", block_size)
    check(block_size % interleave == 0, "interleave", f"a divisor of the block size {block_size}", interleave)


@dataclass(frozen=True)
class TokenOwnership:
    """The tokens of every sequence that one context-parallel rank owns.

    Rank (i // I) mod D owns token i of a sequence. Each rank keeps its tokens in the order of the sequence.

    Attributes:
        size: D, number of ranks that share each sequence.
        rank: this rank, in [0, D).
        interleave: I, number of consecutive tokens on one rank.

    Raises:
        ValueError: a number is out of range.
    """

    size: int
    rank: int
    interleave: int = 1

    def __post_init__(self):
        check_rank(self.size, self.rank, self.interleave, "size")
        check_int("rank", self.rank, 0, f"an int in [0, {self.size})")

    def count(self, num_tokens: int) -> int:
        """Return the number of tokens that this rank owns among the first `num_tokens` tokens of a sequence."""
        check_int("num_tokens", num_tokens, 0)
        rounds, rest = divmod(num_tokens, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def most(self, num_tokens: int) -> int:
        """Return the largest `count(num_tokens)` of all ranks, which is the count of rank 0."""
        return TokenOwnership(self.size, 0, self.interleave).count(num_tokens)


ONE_RANK = TokenOwnership(1, 0)  # one rank owns all tokens: the meaning of `ownership=None`


def get_dcp_local_seq_lens(
    seq_lens: Int32[Tensor, " B"], context_parallel_size: int, rank: int | None = None, interleave: int = 1
) -> Int32[Tensor, " B *D"]:
    """Return how many tokens of each request a rank owns: the tokens i in [0, S) with (i // I) mod D = rank.

    The function works on any device, and inside a captured CUDA graph.

    Args:
        seq_lens: [B], sequence lengths S.
        context_parallel_size: D.
        rank: rank in [0, D); None computes the numbers of all ranks.
        interleave: I.

    Returns:
        [B] int32, or [B, D] if `rank` is None.

    Raises:
        ValueError: a number is out of range; `seq_lens` has a wrong shape or dtype.
    """
    check_rank(context_parallel_size, rank, interleave)
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    round_tokens = context_parallel_size * interleave
    whole = seq_lens.div(round_tokens, rounding_mode="floor")
    rest = seq_lens - whole * round_tokens
    if rank is None:
        first = interleave * torch.arange(context_parallel_size, dtype=seq_lens.dtype, device=seq_lens.device)
        return whole[:, None] * interleave + (rest[:, None] - first).clamp_(0, interleave)
    return whole * interleave + (rest - rank * interleave).clamp_(0, interleave)


def visible_lens_of_tokens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    num_tokens: int,
    context_parallel_size: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> Int32[Tensor, " num_tokens"]:
    """Return how many keys of one rank each query token attends, computed without a loop over the requests.

    The query token with index i in a request of Sq query tokens attends the first S - Sq + i + 1 tokens of the
    sequence; the result is the number of these tokens that the rank owns. A token of a padding row (S = 0) attends no
    token.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], lengths S of the whole sequences after this step.
        num_tokens: query_start_loc[-1].
        context_parallel_size: D.
        rank: rank in [0, D).
        interleave: I.

    Returns:
        [num_tokens] int32.
    """
    before = torch.repeat_interleave(seq_lens - query_start_loc[1:], query_start_loc.diff(), output_size=num_tokens)
    tokens = torch.arange(1, num_tokens + 1, dtype=torch.int32, device=seq_lens.device)
    visible = before.add_(tokens).clamp_(min=0)  # S - Sq + i + 1; set to 0 for padding rows
    if context_parallel_size == 1:
        return visible
    return get_dcp_local_seq_lens(visible, context_parallel_size, rank, interleave)


def dcp_wire_bytes(
    num_tokens: int,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    context_parallel_size: int,
    merge: str,
    element_size: int,
    lse_size: int = 4,
    query_size: int | None = None,
) -> dict[str, int]:
    """Return the bytes that each rank receives in one decode step of one layer, for each collective operation.

    Before the step, each rank has the queries of n = N / D heads. From each of the other D - 1 ranks, a rank receives:

    | what | merge "ag_rs" | merge "a2a" |
    |---|---|---|
    | queries (all-gather) | T n (Lkv + R) elements | T n (Lkv + R) elements |
    | LSE | T N float32 values, of all heads | T n float32 values, of this rank's heads |
    | outputs of this rank's heads | T n Lkv elements | T n Lkv elements |

    With "ag_rs", a reduce-scatter exchanges the outputs. The table has the smallest number of bytes with which a
    reduce-scatter is possible.

    Args:
        num_tokens: T, query tokens of the step.
        num_heads: N, number of heads that the D ranks have together. If K ranks in all divide the heads of a model, N
            is D / K times the number of heads of the model.
        kv_lora_rank: Lkv.
        qk_rope_head_dim: R.
        context_parallel_size: D.
        merge: "ag_rs" or "a2a".
        element_size: bytes of an output element.
        lse_size: bytes of one LSE value: 4, or 8 in float64.
        query_size: bytes of a query element, 1 for queries in e4m3; None means `element_size`.

    Returns:
        Mapping from the name of a collective operation to bytes: "all_gather" and "reduce_scatter", or "all_gather" and
        "all_to_all".

    Raises:
        ValueError: `merge` is neither "ag_rs" nor "a2a"; N is not a multiple of D; a number is out of range.
    """
    size = context_parallel_size
    check_rank(size, None, 1)
    check(merge in MERGES, "merge", f"one of {', '.join(MERGES)}", repr(merge))
    query_size = element_size if query_size is None else query_size
    sizes = {"num_heads": num_heads, "kv_lora_rank": kv_lora_rank, "element_size": element_size, "lse_size": lse_size,
             "query_size": query_size}  # fmt: skip
    for name, value in sizes.items():
        check_int(name, value)
    for name, value in (("num_tokens", num_tokens), ("qk_rope_head_dim", qk_rope_head_dim)):
        check_int(name, value, 0)
    check(num_heads % size == 0, "num_heads", f"a multiple of {size} ranks", num_heads)
    others, local_rows = size - 1, num_tokens * (num_heads // size)
    queries = others * local_rows * (kv_lora_rank + qk_rope_head_dim) * query_size
    outputs = others * local_rows * kv_lora_rank * element_size
    if merge == "ag_rs":
        return {"all_gather": queries + others * num_tokens * num_heads * lse_size, "reduce_scatter": outputs}
    return {"all_gather": queries, "all_to_all": outputs + others * local_rows * lse_size}


def dcp_gather_bytes(
    padded_tokens: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    context_parallel_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Return the bytes that each rank receives when it gathers one chunk of context (`dcp_gather_context`).

    A rank receives the stored cache entries of each of the other D - 1 ranks. Every rank sends the same number of
    entries: a rank with fewer tokens appends padding.

    Args:
        padded_tokens: entries that each rank sends, `ContextParallelChunk.padded_tokens`.
        kv_lora_rank: Lkv.
        qk_rope_head_dim: R.
        context_parallel_size: D.
        cache_format: format of the cache.
        dtype: dtype of the queries. The entries have the same dtype if the format has no `storage_dtype`.

    Raises:
        TypeError: `cache_format` is not a `CacheFormat`.
        ValueError: a number is out of range; the format does not support the dtype or (Lkv, R).
    """
    check_rank(context_parallel_size, None, 1)
    check_int("padded_tokens", padded_tokens, 0)
    check_format(cache_format)
    check_dtype("dtype", dtype)
    return (context_parallel_size - 1) * padded_tokens * cache_format.entry_bytes(kv_lora_rank, qk_rope_head_dim, dtype)


def decode_mask(max_query_len: int, ownership: TokenOwnership | None, has_window: bool = False) -> str:
    """Return the mask that a plan can promise for its `visible_lens` (`DecodeMetadata.mask`).

    A kernel that has only a causal mask can serve a decode whose plan promises this mask. Under context parallelism, a
    rank has a part of a request's keys. With several query tokens in a request, `visible_lens` is then no causal mask
    of these keys: with 10 keys, 3 query tokens and 2 ranks, the tokens see 4, 5 and 5 of the 5 keys of rank 0. A window
    has other numbers of keys on each rank, too.

    Args:
        max_query_len: upper bound of the query tokens of a request.
        ownership: the tokens that this rank owns; None if one rank owns all tokens.
        has_window: whether the layers have a sliding window.
    """
    one_rank = ownership is None or ownership.size == 1
    return CAUSAL if one_rank or (max_query_len <= 1 and not has_window) else VISIBLE_LENS


def absorbed_decode_mask(max_query_len: int, ownership: TokenOwnership | None) -> str:
    """Return the mask of a plan of MLA, which keeps the lengths of whole sequences (`DecodeMetadata.total_seq_lens`).

    With an interleave of 1, local key j is token j * D + rank of its sequence. A kernel that knows D, the rank and the
    length of the whole sequence can then compute the mask that `decode_mask` cannot promise.

    Args:
        max_query_len: upper bound of the query tokens of a request.
        ownership: the tokens that this rank owns; None if one rank owns all tokens.
    """
    mask = decode_mask(max_query_len, ownership)
    return CAUSAL_OVER_RANKS if mask == VISIBLE_LENS and ownership.interleave == 1 else mask

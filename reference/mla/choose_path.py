"""Choose the absorbed or the expanded path for each request, from counted FLOPs and bytes."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int32
from torch import Tensor

from ..interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    MLAConfig,
    PathCosts,
    QueryLenSupport,
    check_config,
    check_costs,
    check_dtype,
    check_format,
    check_int,
    check_not_negative,
    check_tensor,
    check_type,
    element_bytes,
)


def choose_path(
    query_len: int,
    context_len: int,
    config: MLAConfig,
    costs: PathCosts | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Return the path on which a request is estimated to be faster.

    The absorbed path attends the cached latents themselves. The expanded path first computes keys and values of every
    head from the latents, with the weights W_UK and W_UV. Let a request have q new tokens and c cached tokens. Its
    query tokens attend n = q c + q (q + 1) / 2 keys in total. The paths need this work:

    | | absorbed path | expanded path |
    |---|---|---|
    | FLOPs of attention, for each head | 2 n (2 Lkv + R) | 2 n (P + R + V) |
    | FLOPs of W_UK and W_UV, for each head | 2 q Lkv (P + V) | 2 (c + q) Lkv (P + V) |
    | cache entries read | c + q | c + q |
    | elements written and read, for each head | q (2 Lkv + R) | (c + q) (P + V) |

    The letters Lkv, R, P and V are the dims of `MLAConfig`. The estimated time of a path is its time for FLOPs or its
    time for bytes, whichever is longer, plus fixed costs.

    If 2 Lkv > P + V, as in every published model, the table gives two rules:

    - With a context much longer than the query, n is about q c. Both paths then need the same FLOPs at
      q = Lkv (P + V) / (2 Lkv - P - V), which is 171 query tokens for DeepSeek-V3. Shorter queries need fewer FLOPs on
      the absorbed path.
    - Without context (c = 0) the expanded path always needs fewer FLOPs.

    The estimate is the same for every fp8 mode of a decode (`mla_decode`): the modes read the same bytes of the cache,
    and `PathCosts` has no cost for a product in e4m3.

    Args:
        query_len: q, new tokens of the request.
        context_len: c, cached tokens of the request.
        config: config of the layer.
        costs: time for each FLOP, byte and request; None means the defaults of `PathCosts`.
        cache_format: format of the cache.
        dtype: dtype of queries, keys and values.

    Returns:
        "absorbed" or "expanded"; "absorbed" if the estimates are equal.

    Raises:
        ValueError: a length is negative; the format does not support the dtype or the dims.
    """
    check_int("query_len", query_len, 0)
    check_int("context_len", context_len, 0)
    check_config(config)
    check_costs(costs)
    check_format(cache_format)
    check_dtype("dtype", dtype)
    c, costs = config, costs or PathCosts()
    heads, both = float(c.num_heads), float(c.qk_nope_head_dim + c.v_head_dim)
    q, context = float(query_len), float(context_len)
    keys = context + q
    pairs = q * context + q * (q + 1.0) * 0.5
    entry_bytes = cache_format.entry_bytes(c.kv_lora_rank, c.qk_rope_head_dim, dtype)

    absorbed_attention = 2.0 * heads * pairs * (2.0 * c.kv_lora_rank + c.qk_rope_head_dim)
    absorbed_projection = 2.0 * heads * q * c.kv_lora_rank * both
    absorbed_elements = 2.0 * heads * q * (2.0 * c.kv_lora_rank + c.qk_rope_head_dim)  # written and read
    absorbed_bytes = keys * entry_bytes + absorbed_elements * element_bytes(dtype)
    absorbed = costs.absorbed_request + max(
        costs.absorbed_flop * absorbed_attention + costs.projection_flop * absorbed_projection,
        costs.byte * absorbed_bytes,
    )

    expanded_attention = 2.0 * heads * pairs * (both + c.qk_rope_head_dim)
    expanded_projection = 2.0 * heads * keys * c.kv_lora_rank * both
    expanded_elements = 2.0 * heads * keys * both  # written and read
    expanded_bytes = keys * entry_bytes + expanded_elements * element_bytes(dtype)
    fixed = costs.expanded_request + (costs.expanded_context if context_len > 0 else 0.0)
    expanded = fixed + max(
        costs.expanded_flop * expanded_attention + costs.projection_flop * expanded_projection,
        costs.byte * expanded_bytes,
    )
    return "absorbed" if absorbed <= expanded else "expanded"


def choose_paths(
    query_lens: Int32[Tensor, " B"],
    context_lens: Int32[Tensor, " B"],
    decode_threshold: int,
    config: MLAConfig | None = None,
    costs: PathCosts | None = None,
    query_len_support: QueryLenSupport = QueryLenSupport.VARLEN,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
) -> Bool[Tensor, " B"]:
    """Return for each request of a batch whether it may take the absorbed path.

    - A request with at most `decode_threshold` new tokens may always take the absorbed path. CUDA graphs need this
      rule, because a captured graph cannot change the path.
    - A request with more new tokens may take the absorbed path if `choose_path` returns "absorbed" for it, and if
      `query_len_support` is VARLEN (the decode kernel supports any query lengths). The result is the same for every
      fp8 mode, because `choose_path` does not depend on the mode.

    Args:
        query_lens: [B], new tokens of each request, on the CPU.
        context_lens: [B], cached tokens of each request, on the CPU.
        decode_threshold: number of new tokens up to which a request may always take the absorbed path. With 0,
            `choose_path` decides for every request with new tokens.
        config: config passed to `choose_path`; with None the threshold alone decides.
        costs: costs passed to `choose_path`.
        query_len_support: query lengths that the decode kernel supports.
        cache_format: format of the cache, passed to `choose_path`.
        dtype: dtype of queries, keys and values, passed to `choose_path`.

    Returns:
        [B] bool on the CPU, True = absorbed.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device; a length or the threshold is negative; the format does
            not support the dtype or the dims.
    """
    check_tensor("query_lens", query_lens, ("B",), (torch.int32,), torch.device("cpu"))
    check_tensor("context_lens", context_lens, (query_lens.shape[0],), (torch.int32,), torch.device("cpu"))
    check_int("decode_threshold", decode_threshold, 0)
    check_config(config, optional=True)
    check_costs(costs)
    check_type("query_len_support", query_len_support, QueryLenSupport)
    check_format(cache_format)
    check_dtype("dtype", dtype)
    for name, lens in (("query_lens", query_lens), ("context_lens", context_lens)):
        check_not_negative(name, lens)
    asked = config is not None and query_len_support is QueryLenSupport.VARLEN
    settings = (config, costs, cache_format, dtype)
    absorbed = []
    for query_len, context_len in zip(query_lens.tolist(), context_lens.tolist(), strict=True):
        short = query_len <= decode_threshold
        absorbed.append(short or (asked and choose_path(query_len, context_len, *settings) == "absorbed"))
    return torch.tensor(absorbed, dtype=torch.bool, device="cpu")

"""Which of the two paths a request takes through attention: absorbed or expanded. Counted, request by request."""

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
    """Absorbed (attend the latents themselves) or expanded (keys and values of every head first).

    With q new tokens over c cached ones there are n = q c + q (q + 1) / 2 pairs of a query and a key. Per head:

    - absorbed: 2 n (2 Lkv + R) FLOPs of attention, and 2 q Lkv (P + V) to bring queries and outputs into the latent;
    - expanded: 2 n (P + R + V) FLOPs of attention, and 2 (c + q) Lkv (P + V) to expand every key and value.

    The projections of the q new tokens cost the same on both sides. What is left is 2 n (2 Lkv - P - V) against 2 c Lkv
    (P + V): for c >> q, where n = q c, the FLOPs are even at q = Lkv (P + V) / (2 Lkv - P - V) query tokens, 171 for
    DeepSeek-V3. Without context the expanded path always computes less. Both hold where 2 Lkv > P + V, as in every
    model.

    Bytes: both read c + q entries of the cache once, in its format. The absorbed path writes and reads 2 Lkv + R
    elements of `dtype` a query and head; the expanded one writes and reads P + V elements a key and head. A path takes
    as long as the longer of its computing and its moving.

    Args:
        query_len: new tokens, q.
        context_len: cached tokens, c.
        config: the layer.
        costs: constants measured on a device; None counts.
        cache_format: format of the cache.
        dtype: dtype of queries, keys and values.

    Returns:
        "absorbed" or "expanded"; absorbed where they cost the same.

    Raises:
        ValueError: a length below 0; a dtype or dims that the format does not exist for.
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
    """Which requests of a batch may take the absorbed path.

    Queries up to `decode_threshold` always do, for captured graphs rely on it; longer ones where `choose_path` says so
    and the decode kernel takes any lengths.

    Args:
        query_lens: [B], on the CPU.
        context_lens: [B], on the CPU.
        decode_threshold: longest query that always decodes; 0 asks `choose_path` about all.
        config: the layer; None leaves the choice to the threshold.
        costs: of `choose_path`.
        query_len_support: of the decode kernel.
        cache_format: of `choose_path`.
        dtype: of `choose_path`.

    Returns:
        [B] bool on the CPU, True = absorbed.

    Raises:
        ValueError: tensors that do not fit; a length or threshold below 0; a dtype or dims that the format does not
            exist for.
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

"""Which of the two paths a request takes through attention: absorbed or expanded. All requests at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Bool, Int32
from torch import Tensor

from reference.interfaces import (
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

COUNTED = PathCosts()


COSTS = Path(__file__).parents[1] / "assets" / "costs"


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
    entry_bytes = cache_format.entry_bytes(config.kv_lora_rank, config.qk_rope_head_dim, dtype)
    lens = (float(query_len), float(context_len))
    least = _absorbed_costs_least(*lens, config, costs, entry_bytes, element_bytes(dtype), max)
    return "absorbed" if least else "expanded"


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
    absorbed = query_lens <= decode_threshold
    if config is None or query_len_support is not QueryLenSupport.VARLEN:
        return absorbed
    longer = (~absorbed).nonzero().flatten()  # the choice is asked for these alone
    if longer.numel():
        lens = (lens[longer].to(torch.float64) for lens in (query_lens, context_lens))
        entry_bytes = cache_format.entry_bytes(config.kv_lora_rank, config.qk_rope_head_dim, dtype)
        sizes = (entry_bytes, element_bytes(dtype))
        absorbed[longer] = _absorbed_costs_least(*lens, config, costs, *sizes, torch.maximum)
    return absorbed


def _absorbed_costs_least(
    q,
    context,
    config: MLAConfig,
    costs: PathCosts | None,
    entry_bytes: int,
    bytes_per_element: int,
    maximum: Callable,
):
    """The reference's arithmetic in the reference's order, so that float64 rounds alike; of floats or of [B] each."""
    c, costs = config, costs or COUNTED
    heads, both = float(c.num_heads), float(c.qk_nope_head_dim + c.v_head_dim)
    keys = context + q
    pairs = q * context + q * (q + 1.0) * 0.5
    wide = 2.0 * c.kv_lora_rank + c.qk_rope_head_dim
    cache_bytes = keys * entry_bytes

    attention, projection = 2.0 * heads * pairs * wide, 2.0 * heads * q * c.kv_lora_rank * both
    computed = costs.absorbed_flop * attention + costs.projection_flop * projection
    elements = 2.0 * heads * q * wide  # written and read
    moved = costs.byte * (cache_bytes + elements * bytes_per_element)
    absorbed = costs.absorbed_request + maximum(computed, moved)

    attention = 2.0 * heads * pairs * (both + c.qk_rope_head_dim)
    projection = 2.0 * heads * keys * c.kv_lora_rank * both
    computed = costs.expanded_flop * attention + costs.projection_flop * projection
    elements = 2.0 * heads * keys * both  # written and read
    moved = costs.byte * (cache_bytes + elements * bytes_per_element)
    fixed = costs.expanded_request + costs.expanded_context * (context > 0)
    expanded = fixed + maximum(computed, moved)
    return absorbed <= expanded


def short_name(gpu: str) -> str:
    """What files of measurements call a GPU: "NVIDIA H200" is "h200"."""
    return "-".join(word for word in re.split(r"[^a-z0-9]+", gpu.lower()) if word and word != "nvidia")


def costs_file(gpu: str, num_heads: int) -> str:
    """Name of the file of constants of a GPU and a number of heads: "NVIDIA H200", 16 gives "h200-16.json"."""
    return f"{short_name(gpu)}-{num_heads}.json"


def measured_path_costs(config: MLAConfig, device: torch.device | str) -> PathCosts | None:
    """The constants that were measured on a device of this kind, for the number of heads next to the layer's.

    Args:
        config: the layer.
        device: a CUDA device.

    Returns:
        What `choose_path` takes as `costs`; None for a device that nobody has measured, where counts decide.
    """
    if torch.device(device).type != "cuda":
        return None
    pattern = costs_file(torch.cuda.get_device_name(device), 0).replace("-0.json", "-*.json")
    found = {int(path.stem.rsplit("-", 1)[1]): path for path in COSTS.glob(pattern)}
    if not found:
        return None
    nearest = min(sorted(found), key=lambda heads: abs(math.log(heads / config.num_heads)))
    return PathCosts.load(found[nearest])

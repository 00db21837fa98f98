"""Choice between the absorbed and the expanded path of attention, for one request or for a batch.

docs/glossary.md explains both paths.
"""

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
    """Choose between the absorbed path (attend the latents) and the expanded path (compute keys and values first).

    `reference.mla.choose_path.choose_path` lists the FLOPs and bytes that are compared.

    The estimate is the same for every fp8 mode of a decode (`mla_decode`): the modes read the same bytes of the cache,
    and `PathCosts` has no cost for a product in e4m3.

    Args:
        query_len: number of new tokens of the request.
        context_len: number of context tokens of the request.
        config: config of the layer.
        costs: cost of a FLOP, a byte and a request on each path, for example from `measured_path_costs`; None means the
            defaults of `PathCosts`.
        cache_format: format of the cache.
        dtype: dtype of queries, keys and values.

    Returns:
        "absorbed" or "expanded"; "absorbed" if both cost the same.

    Raises:
        ValueError: a length is negative, or the format does not support the dtype or the dimensions.
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
    """Return which requests of a batch may take the absorbed path.

    `reference.mla.choose_path.choose_paths` explains the rule. The result is the same for every fp8 mode, because
    `choose_path` does not depend on the mode.

    Args:
        query_lens: [B], new tokens of each request, on the CPU.
        context_lens: [B], context tokens of each request, on the CPU.
        decode_threshold: a request with at most this number of new tokens takes the absorbed path, whatever
            `choose_path` returns for it. With 0, `choose_path` decides for every request.
        config: config of the layer; with None, `decode_threshold` alone decides.
        costs: costs for `choose_path`; None means the defaults of `PathCosts`.
        query_len_support: query lengths that the decode kernel supports. With another value than VARLEN,
            `decode_threshold` alone decides.
        cache_format: format of the cache, for `choose_path`.
        dtype: dtype of queries, keys and values, for `choose_path`.

    Returns:
        [B] bool on the CPU; True for the absorbed path.

    Raises:
        ValueError: shapes, dtypes or devices do not match; a length or the threshold is negative; the format does not
            support the dtype or the dimensions.
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
    longer = (~absorbed).nonzero().flatten()  # the function compares costs for these requests only
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
    """Return whether the absorbed path costs at most as much as the expanded path.

    The query length `q` and the context length `context` are floats, or float64 tensors [B]. The operations have the
    same order as in `reference`, so that both packages get the same float64 values.
    """
    c, costs = config, costs or COUNTED
    heads, both = float(c.num_heads), float(c.qk_nope_head_dim + c.v_head_dim)
    keys = context + q
    pairs = q * context + q * (q + 1.0) * 0.5
    wide = 2.0 * c.kv_lora_rank + c.qk_rope_head_dim
    cache_bytes = keys * entry_bytes

    attention, projection = 2.0 * heads * pairs * wide, 2.0 * heads * q * c.kv_lora_rank * both
    computed = costs.absorbed_flop * attention + costs.projection_flop * projection
    elements = 2.0 * heads * q * wide  # every element is written and read
    moved = costs.byte * (cache_bytes + elements * bytes_per_element)
    absorbed = costs.absorbed_request + maximum(computed, moved)

    attention = 2.0 * heads * pairs * (both + c.qk_rope_head_dim)
    projection = 2.0 * heads * keys * c.kv_lora_rank * both
    computed = costs.expanded_flop * attention + costs.projection_flop * projection
    elements = 2.0 * heads * keys * both  # every element is written and read
    moved = costs.byte * (cache_bytes + elements * bytes_per_element)
    fixed = costs.expanded_request + costs.expanded_context * (context > 0)
    expanded = fixed + maximum(computed, moved)
    return absorbed <= expanded


def short_name(gpu: str) -> str:
    """Return the short name of a GPU, for file names: "h200" for "NVIDIA H200"."""
    return "-".join(word for word in re.split(r"[^a-z0-9]+", gpu.lower()) if word and word != "nvidia")


def costs_file(gpu: str, num_heads: int) -> str:
    """Return the name of the costs file of a GPU and a number of heads: "h200-16.json" for "NVIDIA H200" and 16."""
    return f"{short_name(gpu)}-{num_heads}.json"


def measured_path_costs(config: MLAConfig, device: torch.device | str) -> PathCosts | None:
    """Return path costs measured on the GPU model of `device`, for the number of heads nearest to that of `config`.

    Args:
        config: config of the layer.
        device: device of the layer.

    Returns:
        A value for `costs=` of `choose_path`; None if no costs were measured on this GPU model, or if `device` is not a
        CUDA device.
    """
    if torch.device(device).type != "cuda":
        return None
    pattern = costs_file(torch.cuda.get_device_name(device), 0).replace("-0.json", "-*.json")
    found = {int(path.stem.rsplit("-", 1)[1]): path for path in COSTS.glob(pattern)}
    if not found:
        return None
    nearest = min(sorted(found), key=lambda heads: abs(math.log(heads / config.num_heads)))
    return PathCosts.load(found[nearest])

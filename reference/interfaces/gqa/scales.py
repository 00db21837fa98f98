"""The scales of a layer of grouped-query attention whose cache is in e4m3: of the keys, of the values and of queries.

The scales of the keys and of the values are two `KVScale` buffers of the layer, `k_scale` and `v_scale`. Each has the
sources and rules of the scale of a latent cache (`reference.interfaces.kv_scales`): an argument; the checkpoint; a
calibration; the first step with a prefill; otherwise 1.0, with a warning. The first write to the cache fixes both.

A layer that reads the cache of another layer uses the two `KVScale` objects of this layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..cache_format import CacheFormat
from ..checkpoint_scheme import check_checkpoint_scheme
from ..checks import check, check_int, check_tensor, check_type
from ..kv_scales import KVScale, ScaleSource, scale_number
from ..quantization import e4m3_scale
from ..query_scales import QueryScale
from ..support import is_capturing
from .config import GQAConfig


@dataclass(frozen=True, eq=False)
class Descales:
    """Scales of queries, keys and values with one element for each request and KV head, or None for each.

    The names are those of the arguments of FlashAttention-3. The object unpacks in this order.
    """

    q_descale: Float[Tensor, "B Nkv"] | None
    k_descale: Float[Tensor, "B Nkv"] | None
    v_descale: Float[Tensor, "B Nkv"] | None

    def __iter__(self) -> Iterator[Tensor | None]:
        """Yield the fields in their order."""
        yield self.q_descale
        yield self.k_descale
        yield self.v_descale


def make_key_value_scale(
    name: str, config: GQAConfig, cache_format: CacheFormat, value: float | Tensor | KVScale | None,
    device: torch.device | None,
) -> KVScale | None:  # fmt: skip
    """Return the `KVScale` of a layer for the keys or for the values, or None if the format of its cache has no scales.

    Args:
        name: "k_scale" or "v_scale".
        config: config of the layer.
        cache_format: format of the layer's cache.
        value: the argument of the layer. A `KVScale` is returned itself; a layer that reads the cache of another layer
            needs the `KVScale` of this layer.
        device: device of a new buffer; None means the device of `value` if it is a tensor, otherwise the CPU.

    Raises:
        TypeError: `value` is neither a number, a tensor, a `KVScale` nor None.
        ValueError: `value` is given for a format without scales, or is not finite and positive; a layer that reads the
            cache of another layer has no `KVScale` of this layer.
    """
    if not cache_format.layer_scale:
        check(value is None, name, f"None for format {cache_format.name}", type(value).__name__)
        return None
    if isinstance(value, KVScale):
        return value
    if config.kv_sharing_layer is not None:
        check(False, name, f"the KVScale of the layer {config.kv_sharing_layer!r}", type(value).__name__)
    if device is None:
        device = value.device if isinstance(value, Tensor) else torch.device("cpu")
    number = None if value is None else scale_number(name, value)
    return KVScale(number, ScaleSource.ARGUMENT, device, name)


def make_gqa_query_scale(
    cache_format: CacheFormat, value: float | Tensor | None, device: torch.device | None
) -> QueryScale | None:
    """Return the `QueryScale` of a layer, or None for queries in the dtype of the layer.

    Args:
        cache_format: format of the layer's cache.
        value: the argument of the layer: one number for all heads, or None.
        device: device of the buffer; None means the device of `value` if it is a tensor, otherwise the CPU.

    Raises:
        TypeError: `value` is neither a number, a tensor nor None.
        ValueError: `value` is given for a format without scales, or is not one finite and positive number.
    """
    if value is None:
        return None
    check(cache_format.layer_scale, "q_scale", f"None for format {cache_format.name}", type(value).__name__)
    number = scale_number("q_scale", value)
    if device is None:
        device = value.device if isinstance(value, Tensor) else torch.device("cpu")
    return QueryScale(number, 1, device=device)


def checkpoint_key_value_scales(module: nn.Module) -> tuple[Tensor | float | None, Tensor | float | None]:
    """Return the scales that a checkpoint stores for the cached keys and values of a module, or None for each.

    Quantisation tools such as compressed-tensors store the attributes `k_scale` and `v_scale`. A module with `kv_scale`
    alone has one scale for both.

    Raises:
        ValueError: a scale is not one finite and positive number; the checkpoint stores scales for another scheme than
            e4m3 with one static scale.
    """
    names = ("k_scale", "v_scale", "kv_scale")
    found = {name: getattr(module, name, None) for name in names}
    found = {name: value for name, value in found.items() if isinstance(value, Tensor | float | int)}
    used = ["k_scale" if "k_scale" in found else "kv_scale", "v_scale" if "v_scale" in found else "kv_scale"]
    for name in dict.fromkeys(name for name in used if name in found):
        check_checkpoint_scheme(name, module)
        scale_number(name, found[name])
    return found.get(used[0]), found.get(used[1])


def choose_key_value_scales(
    layer: nn.Module, slot_mapping: Tensor, has_prefill: bool, key: Tensor, value: Tensor
) -> None:
    """Choose the scales of a layer's cache before the first write to it.

    During a calibration, also record the largest absolute key and value of the step. Call this function after all
    checks of the step and before the write. Under context parallelism, all ranks get the same largest values.

    Args:
        layer: the `GQAAttention`, with the attributes `k_scale`, `v_scale`, `observed`, `observed_values` and
            `context_parallel`.
        slot_mapping: slot of each key; keys with slot -1 are ignored.
        has_prefill: whether the step has tokens of a prefill. In cross attention, every step with keys has.
        key: [S, Nkv, Dh], the keys that the step writes.
        value: [S, Nkv, Dh], the values that the step writes.

    Raises:
        ValueError: `torch.compile` traces the layer, and a scale has no source yet; the buffer of a scale was changed
            in place.
    """
    pairs = (layer.k_scale, layer.observed, key), (layer.v_scale, layer.observed_values, value)
    for scale, observed, entries in pairs:
        if scale is not None:
            scale.check_unchanged()
        if entries.shape[0] == 0 or (observed is None and (scale is None or scale.written)):
            continue
        largest = _largest_written(layer, slot_mapping, entries)
        if observed is not None:
            found = largest()
            observed.append(found)
            largest = found.clone  # so that `before_write` does not compute the value again
        if scale is not None:
            scale.before_write(has_prefill, largest)


def scales_of_write(
    layer: nn.Module, slot_mapping: Tensor, has_prefill: bool, key: Tensor, value: Tensor
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the scales of keys and values that `choose_key_value_scales` would choose; leave the layer as it is.

    A layer calls this function before a write, for a kernel that refuses some scales.

    Args:
        layer: the `GQAAttention`, whose cache has scales.
        slot_mapping: slot of each key; keys with slot -1 are ignored.
        has_prefill: whether the step has tokens of a prefill. In cross attention, every step with keys has.
        key: [S, Nkv, Dh], the keys that the step writes.
        value: [S, Nkv, Dh], the values that the step writes.

    Returns:
        Two float32 tensors [].
    """
    found = []
    for scale, entries in ((layer.k_scale, key), (layer.v_scale, value)):
        chosen = scale.value  # 1.0 if the scale has no source yet
        if scale.source is None and has_prefill and entries.shape[0] > 0 and not is_capturing(chosen.device):
            trial = KVScale(device=chosen.device, name=scale.name)
            chosen = trial.before_write(has_prefill, _largest_written(layer, slot_mapping, entries))
        found.append(chosen)
    return found[0], found[1]


def _largest_written(layer: nn.Module, slot_mapping: Tensor, entries: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes the largest absolute number among the entries with a slot, of all ranks."""

    def largest() -> Tensor:
        written = slot_mapping[: entries.shape[0], None, None] >= 0
        found = largest_number(entries.masked_fill(~written, 0))
        return found if layer.context_parallel is None else layer.context_parallel.largest_of_heads(found)

    return largest


def largest_number(x: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor with elements, float32 []; NaN and infinity are ignored."""
    return torch.nan_to_num(x.float().abs(), nan=0.0, posinf=0.0).amax()


def expand_scale(
    argument: str, scale: Float[Tensor, ""], num_requests: int, num_kv_heads: int
) -> Float[Tensor, "B Nkv"]:
    """Return the scale of a layer with one element for each request and KV head, without a copy.

    Some kernels take one scale for each request and KV head: `q_descale`, `k_descale` and `v_descale` of
    FlashAttention-3. All elements of the result are the memory of `scale`, because both strides are 0. A captured graph
    that reads the result therefore reads each later value of the scale.

    Args:
        argument: name of the scale in errors, such as "k_scale".
        scale: float32 [], such as `KVScale.value` or the `QueryScale.value` of this family.
        num_requests: B.
        num_kv_heads: Nkv.

    Returns:
        float32 [B, Nkv], with the strides (0, 0).

    Raises:
        TypeError: `scale` is not a tensor, such as the None of a cache format without scales.
        ValueError: `scale` has another shape or dtype; `num_requests` is negative; `num_kv_heads` is below 1.
    """
    check_tensor(argument, scale, (), (torch.float32,))
    check_int("num_requests", num_requests, 0)
    check_int("num_kv_heads", num_kv_heads)
    return scale.expand(num_requests, num_kv_heads)


def scale_without_cache(scale: KVScale, entries: Tensor) -> Tensor:
    """Return the scale with which a step without a cache rounds its keys or values to e4m3, float32 [].

    It is the scale of the layer. If this scale has no source yet, the step uses the scale that it would choose for a
    write, and the scale of the layer stays as it is, because nothing is written.

    Args:
        scale: the `KVScale` of the layer.
        entries: [S, Nkv, Dh], the keys or the values.
    """
    check_type("scale", scale, KVScale)
    if scale.source is not None or entries.numel() == 0:
        return scale.value
    return e4m3_scale(largest_number(entries)).clamp(min=torch.finfo(torch.float32).tiny)


def observe_gqa_queries(layer: nn.Module, num_tokens: int, q: Tensor) -> None:
    """Record the largest absolute query of a step, if a calibration of the layer runs.

    Args:
        layer: the `GQAAttention`, with the attributes `observed_queries` and `context_parallel`.
        num_tokens: number of query tokens without padding.
        q: [T, N, Dh].
    """
    if layer.observed_queries is None or num_tokens == 0:
        return
    found, ranks = largest_number(q[:num_tokens]), layer.context_parallel
    layer.observed_queries.append(found if ranks is None else ranks.largest_of_heads(found))

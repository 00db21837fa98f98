"""Read the scales of `use_attention`, and make the options of planning.

Scales belong to layers with a cache in a format with one scale for each layer. Such a layer has a scale for its keys, a
scale for its values and optionally a scale for its queries.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from reference.interfaces import (
    CacheFormat,
    CalibratedScales,
    KVScale,
    ScaleSource,
    check,
    check_type,
    load_kv_scales,
)
from reference.interfaces.gqa import GQAConfig, checkpoint_key_value_scales

Scale = float | Tensor
NAMES = ("k_scale", "v_scale")


def read_layer_scales(
    kv_scales: Mapping[str, tuple[Scale, Scale]] | CalibratedScales | str | os.PathLike | None,
    q_scales: Mapping[str, Scale] | CalibratedScales | str | os.PathLike | None,
    cache_format: CacheFormat,
    modules: Mapping[str, nn.Module],
    configs: Mapping[str, GQAConfig],
) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments `k_scale`, `v_scale` and `q_scale` of `ops.GQAAttention` for each layer.

    The scales of a layer's cache come from the first of these sources that has them: a mapping, the checkpoint, a file,
    the first prefill. A layer that reads the cache of another layer gets the scales of this layer.

    Args:
        kv_scales: the argument of `use_attention`. A mapping has a pair for each layer with a cache of its own: the
            scale of its keys and the scale of its values.
        q_scales: the argument of `use_attention`. A mapping has a scale for each layer with a cache. None means queries
            in the dtype of the model.
        cache_format: format of the caches.
        modules: attention modules by name.
        configs: configs of the layers, by the same names.

    Raises:
        TypeError: an argument has another type.
        OSError: a file cannot be read.
        ValueError: scales are given for a format without scales, for a name that is no layer, or not for every layer.
            The error is also raised if a value of `kv_scales` is not a pair, and if a calibration has no scales of
            values or of queries.
    """
    cached = [name for name, config in configs.items() if config.attention_type.cached]
    own = [name for name in cached if configs[name].kv_sharing_layer is None]
    pairs, from_file = _read("kv_scales", kv_scales, cache_format, own)
    queries, _ = _read("q_scales", q_scales, cache_format, cached)
    scales: dict[str, dict[str, Any]] = {name: {} for name in configs}
    if not cache_format.layer_scale:
        return scales
    for name in own:
        device = next(modules[name].parameters()).device
        given = pairs.get(name, (None, None))
        first = name in pairs and not from_file  # a mapping comes before the checkpoint
        stored = (None, None) if first else checkpoint_key_value_scales(modules[name])
        for key, value, checkpoint in zip(NAMES, given, stored, strict=True):
            source = ScaleSource.ARGUMENT if checkpoint is None else ScaleSource.CHECKPOINT
            scales[name][key] = KVScale(value if checkpoint is None else checkpoint, source, device, key)
    for name in cached:
        if (source := configs[name].kv_sharing_layer) is not None:
            scales[name] |= {key: scales[source][key] for key in NAMES}
        if name in queries:
            device = next(modules[name].parameters()).device
            scales[name]["q_scale"] = torch.as_tensor(queries[name], dtype=torch.float32, device=device)
    return scales


def _read(
    argument: str, given: object, cache_format: CacheFormat, names: Collection[str]
) -> tuple[Mapping[str, Any], bool]:
    """Return the scales that an option gives by the names of layers, and whether they come from a file.

    The values are pairs for `kv_scales`, and single scales for `q_scales`.
    """
    check_type(argument, given, (Mapping, str, os.PathLike, type(None)), "a mapping, the path of a calibration file, "
               "or None")  # fmt: skip
    if given is None:
        return {}, False
    from_file = not isinstance(given, Mapping)
    check(cache_format.layer_scale, argument, f"None for format {cache_format.name}",
          given if from_file else "a mapping")  # fmt: skip
    scales = load_kv_scales(given, cache_format) if from_file else given
    pairs = argument == "kv_scales"
    if isinstance(scales, CalibratedScales):
        extra = scales.cached_values if pairs else scales.queries
        check(len(extra) > 0, argument, f"a calibration with scales of {'values' if pairs else 'queries'}", "none")
        scales = {name: (scale, extra.get(name)) for name, scale in scales.items()} if pairs else extra
    missing = [name for name in names if name not in scales]
    check(not missing, argument, f"a scale for each of {len(names)} layers", f"none for {', '.join(missing[:3])}")
    unknown = [str(name) for name in scales if name not in names]
    check(not unknown, argument, f"the {len(names)} layers with a cache", f"a scale for {', '.join(unknown[:3])}")
    if pairs:
        for name, pair in scales.items():
            good = isinstance(pair, tuple | list) and len(pair) == 2 and None not in pair
            check(good, f"kv_scales[{name!r}]", "the scale of the keys and the scale of the values", pair)
    return scales, from_file


def planning_options(ops: ModuleType, layers: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return keyword arguments for `ops.build_gqa_metadata` that suit the layers: `backend`, if `ops` has backends."""
    if "backend" not in inspect.signature(ops.build_gqa_metadata).parameters:  # `reference` has no backends
        return {}
    return {"backend": getattr(next(iter(layers.values())), "backend", None)}

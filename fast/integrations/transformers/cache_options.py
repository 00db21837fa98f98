"""Read the options `cache_format`, `kv_scales` and `q_scales` of `use_mla`, and make the options of planning.

Scales belong to layers. A layer has the name of its attention module inside the base model, such as
"layers.0.self_attn" (`models.attention_modules`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from reference.interfaces import (
    CACHE_FORMATS,
    CONVERTED,
    CacheFormat,
    CalibratedScales,
    check,
    check_format,
    check_type,
    checkpoint_query_scale,
    checkpoint_scale,
    load_kv_scales,
)


def read_format(cache_format: CacheFormat | str) -> CacheFormat:
    """Return a cache format that is given as a record or by its name.

    Raises:
        TypeError: the argument is neither a `CacheFormat` nor a name.
        ValueError: the format is unknown.
    """
    check_type("cache_format", cache_format, (CacheFormat, str), "a CacheFormat or the name of a format")
    if isinstance(cache_format, CacheFormat):
        check_format(cache_format)
        return cache_format
    check(cache_format in CACHE_FORMATS, "cache_format", f"one of {', '.join(CACHE_FORMATS)}", cache_format)
    return CACHE_FORMATS[cache_format]


def read_scales(
    kv_scales: str | os.PathLike | Mapping[str, float | Tensor] | None,
    cache_format: CacheFormat,
    modules: Mapping[str, nn.Module],
) -> dict[str, float | Tensor]:
    """Return the scales that `kv_scales` gives to the layers of a model: a dict from the name of a layer to its scale.

    A scale in a mapping has priority over the scale of the checkpoint. The scale of the checkpoint has priority over a
    scale in a file: the result leaves out each layer that has a scale in the checkpoint.

    Args:
        kv_scales: mapping from the name of a layer to its scale, path of a file that `save_kv_scales` wrote, or None.
        cache_format: format of the caches.
        modules: attention modules of the model by name.

    Raises:
        TypeError: `kv_scales` has another type.
        OSError: the file cannot be read.
        ValueError: the format does not have one scale for each layer; the file is for another format or is invalid; a
            layer has no scale in the file or mapping; a name belongs to no layer.
    """
    if kv_scales is None:
        return {}
    known = (str, os.PathLike, Mapping)
    check_type("kv_scales", kv_scales, known, "a mapping, the path of a calibration file, or None")
    from_file = not isinstance(kv_scales, Mapping)
    check(cache_format.layer_scale, "kv_scales", f"None for format {cache_format.name}",
          kv_scales if from_file else "a mapping")  # fmt: skip
    given = load_kv_scales(kv_scales, cache_format) if from_file else kv_scales
    _check_layers("kv_scales", given, modules)
    return {name: given[name] for name in modules if not from_file or checkpoint_scale(modules[name]) is None}


def read_query_scales(
    q_scales: str | os.PathLike | Mapping[str, float | Tensor] | None,
    kv_scales: str | os.PathLike | Mapping[str, float | Tensor] | None,
    fp8_mode: str,
    modules: Mapping[str, nn.Module],
) -> dict[str, float | Tensor]:
    """Return the scales of queries in e4m3 (8 bits) that the options give to the layers of a model.

    If `q_scales` is None and `kv_scales` comes from a calibration, the scales of queries in `kv_scales` are used. As in
    `read_scales`, scales in a mapping have priority over the scales of the checkpoint, which have priority over scales
    in a file.

    Args:
        q_scales: mapping from the name of a layer to its scale, path of a file that `save_kv_scales` wrote, or None.
        kv_scales: the option `kv_scales` of `use_mla`.
        fp8_mode: fp8 mode of the decodes.
        modules: attention modules of the model by name.

    Raises:
        TypeError: `q_scales` has another type.
        OSError: the file cannot be read.
        ValueError: `q_scales` is given for the mode `converted`; the file is invalid or has no scales of queries; a
            layer has no scale in the file or mapping; a name belongs to no layer.
    """
    known = (str, os.PathLike, Mapping, type(None))
    check_type("q_scales", q_scales, known, "a mapping, the path of a calibration file, or None")
    if fp8_mode == CONVERTED:
        got = "a mapping" if isinstance(q_scales, Mapping) else q_scales
        check(q_scales is None, "q_scales", f"None for fp8_mode {CONVERTED}", got)
        return {}
    source = kv_scales if q_scales is None else q_scales
    from_file = isinstance(source, (str, os.PathLike))
    calibrated = load_kv_scales(source) if from_file else source
    if isinstance(calibrated, CalibratedScales):
        given = calibrated.queries
        check(bool(given) or q_scales is None, "q_scales", "a calibration with scales of queries", "none")
    else:
        given = {} if q_scales is None else q_scales
    if q_scales is None and not given:
        return {}
    _check_layers("q_scales", given, modules)
    return {name: given[name] for name in modules if not from_file or checkpoint_query_scale(modules[name]) is None}


def _check_layers(argument: str, given: Mapping[str, float | Tensor], modules: Mapping[str, nn.Module]) -> None:
    """Check that scales are given for all layers of a model, and for no other name."""
    missing = [name for name in modules if name not in given]
    check(not missing, argument, f"a scale for each of {len(modules)} layers", f"none for {', '.join(missing[:3])}")
    unknown = [str(name) for name in given if name not in modules]
    check(not unknown, argument, f"the {len(modules)} layers of the model", f"a scale for {', '.join(unknown[:3])}")


def planning_options(ops: ModuleType, attention: nn.Module) -> dict[str, Any]:
    """Return keyword arguments for `ops.build_mla_metadata` that suit a layer, with `backend` if `ops` has backends."""
    options: dict[str, Any] = {"dtype": attention.kv_a_layernorm.weight.dtype, "cache_format": attention.cache_format}
    if (fp8_mode := getattr(attention, "fp8_mode", CONVERTED)) != CONVERTED:
        options["fp8_mode"] = fp8_mode
    if "backend" in inspect.signature(ops.build_mla_metadata).parameters:  # `reference` has no backends
        options["backend"] = getattr(attention, "backend", None)
    return options

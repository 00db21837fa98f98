"""Read the options `cache_format` and `kv_scales` of `use_mla`.

Scales belong to layers. A layer has the name of its attention module inside the base model, such as
"layers.0.self_attn" (`models.attention_modules`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor, nn

from reference.interfaces import (
    CACHE_FORMATS,
    CacheFormat,
    check,
    check_format,
    check_type,
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
    """Return the scales that `kv_scales` gives to the layers of a model, by the name of the layer.

    A scale in a mapping has priority over the scale of the checkpoint. The scale of the checkpoint has priority over a
    file: the result then leaves out the layer.

    Args:
        kv_scales: mapping from the name of a layer to its scale, path of a file of `save_kv_scales`, or None.
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
    missing = [name for name in modules if name not in given]
    check(not missing, "kv_scales", f"a scale for each of {len(modules)} layers", f"none for {', '.join(missing[:3])}")
    unknown = [str(name) for name in given if name not in modules]
    check(not unknown, "kv_scales", f"the {len(modules)} layers of the model", f"a scale for {', '.join(unknown[:3])}")
    return {name: given[name] for name in modules if not from_file or checkpoint_scale(modules[name]) is None}

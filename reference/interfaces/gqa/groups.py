"""Read the parameters of each layer of a model, and find the layers that can use one plan.

A model may alternate between layers with and without a window (Gemma, gpt-oss) or attention chunks (Llama 4). The
layers of each group then need a plan of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..cache_format import COMPUTE_FORMAT, CacheFormat
from ..checks import check, check_type
from ..layer_parameters import LayerParameters
from .arguments import check_key_value_format
from .config import GQAConfig


def _config_of(name: object, layer: Any) -> tuple[GQAConfig, CacheFormat]:
    """Return the config and the cache format of a layer. A config alone stands for a layer with `compute_dtype`."""
    check_type("layers", name, str, "names of layers as keys")
    config = layer if isinstance(layer, GQAConfig) else getattr(layer, "config", None)
    check(isinstance(config, GQAConfig), "layers", f"a GQAConfig, or a layer with a GQAConfig, at {name!r}",
          type(layer).__name__)  # fmt: skip
    cache_format = getattr(layer, "cache_format", COMPUTE_FORMAT)
    check_key_value_format(cache_format)
    return config, cache_format


def _check_kv_sharing(found: Mapping[str, tuple[GQAConfig, CacheFormat]]) -> None:
    """Check each layer that reads the cache of another layer against the layer that it names.

    Args:
        found: config and cache format of each layer by name.

    Raises:
        ValueError: no layer has the name; the named layer has no cache of its own; the two layers differ in the
            attention type, the KV heads, the head dim or the cache format.
    """
    for name, (config, cache_format) in found.items():
        source = config.kv_sharing_layer
        if source is None:
            continue
        check(source in found, "layers", f"a layer {source!r}, the kv_sharing_layer of {name!r}", "no such layer")
        owner, stored = found[source]
        check(owner.kv_sharing_layer is None, "layers", f"a cache of its own at {source!r}, the kv_sharing_layer of "
              f"{name!r}", f"kv_sharing_layer {owner.kv_sharing_layer!r}")  # fmt: skip
        pairs = {
            "attention_type": (config.attention_type.value, owner.attention_type.value),
            "num_kv_heads": (config.num_kv_heads, owner.num_kv_heads),
            "head_dim": (config.head_dim, owner.head_dim),
            "cache_format": (cache_format.name, stored.name),
        }
        for field, (own, wanted) in pairs.items():
            check(own == wanted, "layers", f"{field} {wanted} of {source!r} at {name!r}, which reads its cache", own)


def get_per_layer_parameters(layers: Mapping[str, Any], kind: type) -> dict[str, LayerParameters]:
    """Return the parameters of each layer of a class.

    Args:
        layers: mapping from names to layers, for example `dict(model.named_modules())`. A layer has its `GQAConfig` as
            `.config`, and may have its cache format as `.cache_format`. A `GQAConfig` itself is legal too.
        kind: class of the layers. Objects of other classes are ignored.

    Returns:
        The parameters of each layer, in the order of `layers`.

    Raises:
        TypeError: `layers` is not a mapping, a name is not a str, or `kind` is not a class.
        ValueError: `layers` has no object of this class, or a layer has no `GQAConfig`.
        UnsupportedConfiguration: the cache format of a layer is for the latent cache alone.
    """
    check_type("layers", layers, Mapping)
    check_type("kind", kind, type, "a class")
    found = {name: _config_of(name, layer) for name, layer in layers.items() if isinstance(layer, kind)}
    check(len(found) > 0, "layers", f"at least one {kind.__name__}", "none")
    names = [field.name for field in fields(LayerParameters)]
    values = {name: config.hyperparameters(cache_format) for name, (config, cache_format) in found.items()}
    return {name: LayerParameters(*(getattr(value, each) for each in names)) for name, value in values.items()}


def group_layers(layers: Mapping[str, Any]) -> dict[GQAConfig, tuple[str, ...]]:
    """Return the groups of layers whose configs agree. The layers of a group can use one plan.

    The field `kv_sharing_layer` does not count, because it decides which cache a layer reads and not what it attends.

    Args:
        layers: mapping from the name of each layer to its `GQAConfig`, or to a layer with a config as `.config`. It
            has the layers that `kv_sharing_layer` names.

    Returns:
        The names of the layers of each group. The key of a group is the config of its layers, with `kv_sharing_layer`
        None. Groups and names are in the order in which they appear in `layers`.

    Raises:
        TypeError: `layers` is not a mapping, or a name is not a str.
        ValueError: in one of these cases:

            - a layer has no `GQAConfig`;
            - layers of a group have different cache formats, so that no plan is for all of them;
            - the `kv_sharing_layer` of a layer is no name in `layers`, or names a layer that reads the cache of another
              layer itself;
            - a layer and its `kv_sharing_layer` differ in the attention type, the KV heads, the head dim or the cache
              format.
        UnsupportedConfiguration: the cache format of a layer is for the latent cache alone.
    """
    check_type("layers", layers, Mapping)
    found = {name: _config_of(name, layer) for name, layer in layers.items()}
    _check_kv_sharing(found)
    groups: dict[GQAConfig, list[str]] = {}
    for name, (config, got) in found.items():
        group = groups.setdefault(replace(config, kv_sharing_layer=None), [])
        group.append(name)
        wanted = found[group[0]][1]
        check(wanted == got, "layers", f"cache_format {wanted.name} of {group[0]!r} in all layers of its group",
              f"{got.name} at {name!r}")  # fmt: skip
    return {config: tuple(names) for config, names in groups.items()}

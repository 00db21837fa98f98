"""The quantisation scheme for which a checkpoint stores the scales of a cache or of queries.

A scale in a checkpoint is legal only if it was made for numbers in e4m3 (8 bits) with one static scale. The attribute
`quantization_config` of a config of transformers says for which numbers the scale was made:

- `kv_cache_scheme` of compressed-tensors and of ModelOpt: a mapping with `num_bits`, `type`, `strategy`, `symmetric`
  and `dynamic`. AutoFP8 stores the word "static" instead.
- `config_groups` of compressed-tensors: the entry `input_activations` of a group whose `targets` contain the attention
  module is the scheme of the queries, and also of the cache; it replaces `kv_cache_scheme`. A target that also matches
  a module inside or around the attention module, such as a projection, does not mean the attention module.
- `kv_cache_quant_algo` of ModelOpt and `kv_cache_dtype`: the name of a dtype.

A checkpoint that names none of these schemes is assumed to store scales for e4m3. So is a module whose config has no
`quantization_config`, such as the config of the text model inside a multimodal model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .checks import check

# names of e4m3 in checkpoints, in lower case; the FNUZ variants and e5m2 have other names
_NAMES_OF_E4M3 = ("fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn")
_NO_NAMES = ("auto", "none", "")  # values that name no dtype
# for each field of a scheme: the legal value, and the value of a scheme without this field
_FIELDS: dict[str, tuple[Any, Any]] = {
    "num_bits": (8, 8), "type": ("float", "int"), "strategy": ("tensor", "tensor"), "group_size": (None, None),
    "symmetric": (True, True), "dynamic": (False, False),
}  # fmt: skip
_DTYPES = ("kv_cache_quant_algo", "kv_cache_dtype")  # fields of `quantization_config` that name a dtype
_PATH = "model.layers.{}.self_attn"  # name of an attention module in a model of transformers


def check_checkpoint_scheme(argument: str, module: nn.Module, queries: bool = False) -> None:
    """Check that a checkpoint stores the scales of an attention module for e4m3, with one static scale.

    Args:
        argument: name of the scale, for messages.
        module: the attention module; the function reads `module.config.quantization_config`.
        queries: whether the scale is for queries. Such a scale may be one number for each head.

    Raises:
        ValueError: the checkpoint names another scheme, such as 8-bit integers, e5m2, 4 bits, an e4m3 of the FNUZ
            variants, a scale for each channel, or scales that are computed at run time; or its `config_groups` have a
            regular expression that is not legal.
    """
    config = _fields(getattr(getattr(module, "config", None), "quantization_config", None))
    if not config:
        return
    attention = _attention_scheme(argument, config, module)
    if attention:
        _check_scheme(argument, attention, queries)
        return
    if config.get("kv_cache_scheme"):
        _check_scheme(argument, config["kv_cache_scheme"], queries)
    for fields in (config, _fields(config.get("quantization"))):  # ModelOpt has the names inside `quantization`
        for name in _DTYPES:
            _check_dtype(argument, name, fields.get(name))


def _fields(value: Any) -> Mapping[str, Any]:
    """Return the fields of a config, which is a mapping or an object of transformers or of compressed-tensors."""
    if value is None or isinstance(value, Mapping):
        return value or {}
    for name in ("to_dict", "model_dump"):
        if callable(convert := getattr(value, name, None)):
            return convert()
    return getattr(value, "__dict__", {})


def _plain(value: Any) -> Any:
    """Return the value of a member of an enum, a string in lower case, and any other value as it is."""
    value = getattr(value, "value", value)
    return value.lower() if isinstance(value, str) else value


def _attention_scheme(argument: str, config: Mapping[str, Any], module: nn.Module) -> Any:
    """Return the scheme of the inputs of attention in `config_groups`, or None if no group has the module as target."""
    path = _PATH.format(getattr(module, "layer_idx", 0))
    itself = (path, type(module).__name__)
    others = [(f"{path}.{name}", type(child).__name__) for name, child in module.named_children()]
    others.append((path.rpartition(".")[0], ""))

    def matches(targets: Any, names: tuple[str, str]) -> bool:
        return any(_is_target(argument, target, *names) for target in targets or ())

    if matches(config.get("ignore"), itself):
        return None
    for group in map(_fields, _fields(config.get("config_groups")).values()):
        targets = [t for t in group.get("targets") or () if not any(matches([t], names) for names in others)]
        if group.get("input_activations") and matches(targets, itself):
            return group["input_activations"]
    return None


def _is_target(argument: str, target: str, path: str, kind: str) -> bool:
    """Return whether a target is the path or the class of a module, or has a regular expression for the path."""
    if not target.startswith("re:"):
        return target in (path, kind)
    try:
        return re.match(target[3:], path) is not None
    except re.error as reason:
        raise ValueError(f"{argument}: expected legal expressions in config_groups, got {target!r}: {reason}") from None


def _check_scheme(argument: str, scheme: Any, queries: bool) -> None:
    """Check a scheme: the word "static", the name of a dtype, or a mapping with the fields of `_FIELDS`."""
    if isinstance(_plain(scheme), str):
        if _plain(scheme) != "static":  # AutoFP8
            _check_dtype(argument, "kv_cache_scheme", scheme)
        return
    fields = _fields(scheme)
    check(bool(fields), argument, "a scale of a checkpoint with a mapping as its scheme", type(scheme).__name__)
    _check_dtype(argument, "dtype", fields.get("dtype"))
    for name, found in _found(fields, named="dtype" in fields):
        wanted = _FIELDS[name][0]
        legal = (wanted, "attn_head") if queries and name == "strategy" else (wanted,)
        check(found in legal, argument, f"a scale of a checkpoint with {name} {wanted} in its scheme", found)


def _found(fields: Mapping[str, Any], named: bool) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each field of `_FIELDS`; a scheme that names its dtype needs no field `type`."""
    for name, (wanted, default) in _FIELDS.items():
        value = _plain(fields.get(name))
        yield name, (wanted if named and name == "type" else default) if value is None else value


def _check_dtype(argument: str, field: str, name: Any) -> None:
    """Check that a name of a dtype in a checkpoint is a name of e4m3; no name is legal too."""
    known = name is None or str(_plain(name)) in (*_NO_NAMES, *_NAMES_OF_E4M3)
    check(known, argument, f"a scale of a checkpoint with {field} fp8_e4m3", getattr(name, "value", name))

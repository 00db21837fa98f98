"""Check the layers of a model against backends that hold one set of parameters for all layers.

Some backends plan a step once for all layers, with one window, one soft cap and one scale. FlashInfer's wrapper for a
paged key/value cache is an example. Such a backend cannot serve a model whose layers alternate, for example between a
window and all keys. It declares this with `OpSupport.one_set_of_parameters`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    QueryLenSupport,
    UnsupportedConfiguration,
    check,
    check_device,
    check_int,
    check_type,
    infer_global_hyperparameters,
)
from reference.interfaces.gqa import GQAConfig

from .environment import bind_with_environment
from .explanation import choice_of, layer_requests
from .kernel_request import KernelRequest
from .registry import registered
from .selection import BackendChoice, BoundOps, labelled_by_part


def check_one_set_of_parameters(
    layers: Mapping[str, Any],
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    backend: BackendChoice = None,
) -> None:
    """Raise if layers that differ would be served by a backend that holds one set of parameters for all layers.

    Call this function once for a model, where one plan is made for each group of layers (`group_layers`). Layers agree
    if `infer_global_hyperparameters` accepts them. Layers that different backends serve need not agree.

    Args:
        layers: mapping from the name of each layer of a step to its `GQAConfig` or `MLAConfig`, or to a layer with such
            a config as `.config`.
        device: device of the layers.
        dtype: dtype of queries and keys.
        block_size: tokens of a cache block.
        backend: the layers' `backend=`: a name, a mapping from op to name, or None (`fast.backends`).

    Raises:
        TypeError: an argument has another type.
        ValueError: there is no layer, or a layer has no config; `backend` has an unknown name or an unknown op.
        UnsupportedConfiguration: layers differ that such a backend would serve. Each reason names the backend, the op,
            both layers, and the parameter in which they differ.
    """
    check_type("layers", layers, Mapping)
    check(len(layers) > 0, "layers", "at least one layer", "none")
    for name, layer in layers.items():
        infer_global_hyperparameters({name: layer})  # raises for a layer without a config
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    bound = bind_with_environment(backend)
    declared = {
        (candidate.name, op)
        for candidate in registered()
        for op, support in candidate.ops.items()
        if support.one_set_of_parameters
    }
    if not declared:
        return
    ops, chosen = {op for _, op in declared}, {}
    served: dict[tuple[str, str], dict[str, Any]] = {}
    for name, layer in layers.items():
        config, cache_format = getattr(layer, "config", layer), getattr(layer, "cache_format", COMPUTE_FORMAT)
        for request in layer_requests(config, device, dtype, block_size, cache_format, _fp8_mode(layer, config)):
            if request.op not in ops:
                continue
            if request not in chosen:
                kinds = {dataclasses.replace(request, query_lens=kind) for kind in QueryLenSupport}
                chosen[request] = {each for kind in kinds for each in _backends_of(kind, bound)}
            for each in chosen[request]:
                served.setdefault((each, request.op), {})[name] = layer
    reasons = []
    for each, op in sorted(declared & served.keys()):
        try:
            infer_global_hyperparameters(served[each, op])
        except ValueError as error:
            reasons.append(f"{each}: holds one set of parameters for {op} of all layers; {error}")
    if reasons:
        raise UnsupportedConfiguration(reasons)


def _fp8_mode(layer: Any, config: Any) -> str:
    """Return the fp8 mode of a layer."""
    if isinstance(config, GQAConfig):
        return CONVERTED if getattr(layer, "q_scale", None) is None else "fp8_query"
    return getattr(layer, "fp8_mode", CONVERTED)


def _backends_of(request: KernelRequest, bound: BoundOps | None) -> set[str]:
    """Return the backends that may serve calls with the properties of a request; several if measured times choose."""
    found: set[str] = set()
    for named_backends in labelled_by_part(request.op, request.op, bound).values():
        choice = choice_of(request, named_backends)
        found |= set(choice.shapes) | ({choice.name} if choice.name is not None else set())
    return found

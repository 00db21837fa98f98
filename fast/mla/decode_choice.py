"""Choose the backend of a builder's decodes, and check that it can serve the step of a layer.

The three backends of this package share their plans, so the kernel of a decode is chosen in each call. A library has
plans of its own. If such a backend serves the decodes of a builder, it does so for the life of the builder: the builder
takes its limits from the backend, and every plan with decodes names the backend. The caller names this backend, or it
has the highest priority of all backends that can serve the decodes of the builder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reference.interfaces import (
    DECODE_MASKS,
    CacheFormat,
    GraphSupport,
    MLAConfig,
    MLAMetadata,
    QueryLenSupport,
    TokenOwnership,
    UnsupportedConfiguration,
    absorbed_decode_mask,
    check_device,
    check_graph_support,
    check_type,
    reorder_batch_threshold,
)

from .. import backends
from ..backends import DECODES, Backend, BackendChoice, BoundOps, KernelRequest, registered
from ..backends.devices import check_present_device
from ..backends.own import OWN_BACKENDS
from ..backends.registry import by_priority
from ..backends.selection import check_same_backend, name_for, named, reasons_against
from .device_choices import DecodeLayer

OP = "mla_decode"


class DecodeLimits(NamedTuple):
    """What the decodes of a builder may be.

    Attributes:
        backend: name of the backend that the plans name; None for the backends of this package.
        query_len_support: query lengths of the decodes.
        graph_support: batches for which a captured graph can be replayed.
        masks: masks that the backend can apply.
        ops: backends of the ops of planning, as `bind` returns them. If the backend of the decodes was chosen
            automatically, this mapping binds the ops of a decode to it.
    """

    backend: str | None
    query_len_support: QueryLenSupport
    graph_support: GraphSupport
    masks: tuple[str, ...] = DECODE_MASKS
    ops: BoundOps | None = None


def decode_limits(
    layer: DecodeLayer,
    backend: BoundOps | None,
    query_len_support: QueryLenSupport | None,
    graph_support: GraphSupport | None,
    num_speculative_tokens: int,
    ownership: TokenOwnership | None,
    batch_invariant: bool,
) -> DecodeLimits:
    """Return the limits of a builder's decodes.

    If `backend` names no backend for decodes, the backend with the highest priority that can serve all decodes of the
    builder determines the limits. Between the backends of this package, each call still chooses.

    Args:
        layer: properties of the layers. Its device may be the device type alone if the caller knows no device; such a
            device finds no backend of another project unless `backend` names it.
        backend: mapping from op to name that `bind` returned, or None.
        query_len_support: query lengths that the caller asks for; None takes those of the backend. Under context
            parallelism, a backend that serves no mask of the plans then decodes one token of each request only.
        graph_support: batches of a graph that the caller asks for; None takes those of the backend.
        num_speculative_tokens: number of drafted tokens of a request in one step.
        ownership: the tokens that this rank owns; None if one rank owns all tokens.
        batch_invariant: whether the decodes must be batch-invariant.

    Raises:
        ValueError: `graph_support` does not fit `query_len_support`.
        UnsupportedConfiguration: the backend cannot serve the layers, or `query_len_support` or `graph_support`
            promises more than the backend.
    """
    check_type("query_len_support", query_len_support, (QueryLenSupport, type(None)), "a QueryLenSupport or None")
    name = name_for(OP, backend)
    asked = query_len_support, graph_support, num_speculative_tokens, ownership, batch_invariant
    if name is not None and name not in OWN_BACKENDS:
        return _limits_of(named(name), layer, backend, *asked)
    lens = QueryLenSupport.VARLEN if query_len_support is None else query_len_support
    own = DecodeLimits(None, lens, check_graph_support(graph_support, lens), ops=backend)
    if name is not None or not libraries_for_decodes() or not _is_known(layer.device):
        return own
    longest = reorder_batch_threshold(lens, num_speculative_tokens)
    request = decode_request_of(
        layer, lens, GraphSupport.NONE if graph_support is None else graph_support,
        absorbed_decode_mask(longest, ownership), batch_invariant,
    )  # fmt: skip
    for candidate in by_priority(OP, layer.device):
        if candidate.name in OWN_BACKENDS:
            if not candidate.validate_configuration(request):
                return own
        elif OP in candidate.ops:
            chosen = BoundOps((op, candidate.name) for op in DECODES if op in candidate.ops)
            chosen.update(backend or {})
            chosen.variables = {} if backend is None else dict(backend.variables)
            try:
                return _limits_of(candidate, layer, chosen, *asked)
            except (UnsupportedConfiguration, ValueError):  # the next backend may serve what the caller asks for
                continue
    return own


def libraries_for_decodes() -> bool:
    """Return whether an automatic choice may find a backend of another project for decodes; look for no artifacts."""
    return any(
        each.name not in OWN_BACKENDS and OP in each.ops and not each.is_only_named(OP) and each.missing_package is None
        for each in registered()
    )


def _is_known(device: torch.device) -> bool:
    """Return whether a device is one device, and not the type of several devices."""
    return device.index is not None or device.type == "cpu"


def _limits_of(
    chosen: Backend, layer: DecodeLayer, ops: BoundOps, query_len_support: QueryLenSupport | None,
    graph_support: GraphSupport | None, num_speculative_tokens: int, ownership: TokenOwnership | None,
    batch_invariant: bool,
) -> DecodeLimits:  # fmt: skip
    """Return `decode_limits` of a backend of another project, or raise if it cannot serve what the caller asks for."""
    name, support = chosen.name, chosen.ops[OP]
    lens = support.query_lens if query_len_support is None else query_len_support
    threshold = reorder_batch_threshold(lens, num_speculative_tokens)
    # with VARLEN, `choose_path` may also send longer queries to the decodes
    longest = 2 if lens is QueryLenSupport.VARLEN else threshold
    if query_len_support is None and not support.serves_mask(absorbed_decode_mask(longest, ownership)):
        lens, longest = QueryLenSupport.SINGLE_ONLY, 1
    graph = check_graph_support(graph_support, lens)
    if graph_support is None and not support.graph.covers(graph):
        graph = support.graph
    request = decode_request_of(
        layer, lens, graph if graph_support is not None else GraphSupport.NONE,
        absorbed_decode_mask(longest, ownership), batch_invariant,
    )  # fmt: skip
    if _is_known(layer.device):
        if layer.device.type == chosen.device_type:
            check_present_device("device", layer.device)
        reasons = reasons_against(chosen, request, is_named=True)
    else:  # only the type of the device is known
        reasons = [f"{name}: {reason}" for reason in support.reasons(request)]
    if reasons:
        raise UnsupportedConfiguration(reasons)
    return DecodeLimits(name, lens, graph, support.masks, ops)


def decode_request_of(
    layer: DecodeLayer, query_lens: QueryLenSupport, graph: GraphSupport, mask: str, batch_invariant: bool,
    head_scales: bool = False,
) -> KernelRequest:  # fmt: skip
    """Return the request for the decodes of a layer, over a cache of aligned 16-byte words."""
    config = layer.config
    return backends.decode_request(
        layer.device, layer.dtype, config.kv_lora_rank, config.qk_rope_head_dim, layer.block_size, query_lens,
        cache_format=layer.cache_format, batch_invariant=batch_invariant, graph=graph, fp8_mode=layer.fp8_mode,
        mask=mask, head_scales=head_scales,
    )  # fmt: skip


def check_decode_backend(
    metadata: MLAMetadata, config: MLAConfig, dtype: torch.dtype, block_size: int, cache_format: CacheFormat,
    fp8_mode: str, backend: BackendChoice, q_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Check that the library's backend that a plan or its layer names can serve the decodes of the layer.

    If the plan names no backend, and the layer none or one of this package, there is nothing to check.

    Args:
        metadata: plan of the step.
        config: config of the layer.
        dtype: dtype of the layer.
        block_size: tokens per block of the cache.
        cache_format: format of the cache.
        fp8_mode: fp8 mode of the layer.
        backend: backend of the layer: a name, a mapping from op to name, or None.
        q_scale: float32 scale of the layer's queries in e4m3, [] or [N]; None for queries in the dtype of the layer.

    Raises:
        ValueError: the layer is bound to another backend, or no backend has the name.
        UnsupportedConfiguration: the backend cannot serve the layer.
    """
    decode = metadata.decode
    name = name_for(OP, backend) if decode.backend is None else decode.backend
    if name is None or metadata.num_decode_tokens == 0 or (decode.backend is None and name in OWN_BACKENDS):
        return
    check_same_backend(OP, decode.backend, backend, "metadata.decode.backend", "the backend of the layer")
    chosen = named(name, "metadata.decode.backend")
    layer = DecodeLayer(config, decode.seq_lens.device, dtype, block_size, cache_format, fp8_mode)
    lens = backends.query_lens_of(metadata.num_decode_tokens, metadata.num_decodes, decode.max_query_len)
    if decode.graph is GraphSupport.ANY:
        lens = QueryLenSupport.VARLEN
    schedule = metadata.schedule
    request = decode_request_of(
        layer, lens, decode.graph, decode.mask, schedule is not None and schedule.batch_invariant,
        q_scale is not None and q_scale.numel() > 1,
    )  # fmt: skip
    reasons = reasons_against(chosen, request, is_named=True)
    if reasons:
        source = "" if decode.backend is None else "metadata.decode.backend: "
        raise UnsupportedConfiguration([f"{source}{reason}" for reason in reasons])


def device_to_check(device: torch.device | str | None, backend: BackendChoice) -> torch.device:
    """Return the device on which a decode backend is chosen and checked; only its type if none is given.

    Without a device and without a name, the result is the CPU if PyTorch sees no GPU, because only then there is one
    device.
    """
    if device is not None:
        device = check_device("device", device)
        return torch.device("cuda", 0) if device == torch.device("cuda") else device
    name = name_for(OP, backend)
    if name is not None:
        return torch.device(named(name).device_type)
    return torch.device("cuda" if libraries_for_decodes() and torch.cuda.is_available() else "cpu")

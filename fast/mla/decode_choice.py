"""Choose the backend of a builder's decodes, and check that it can serve the step of a layer.

The three backends of this package share their plans, so the kernel of a decode is chosen in each call. A library has
plans of its own. If such a backend serves the decodes of a builder, it does so for the life of the builder: the builder
takes its limits from the backend, and every plan with decodes names the backend.
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
from ..backends import BackendChoice, KernelRequest
from ..backends.devices import check_present_device
from ..backends.own import OWN_BACKENDS
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
    """

    backend: str | None
    query_len_support: QueryLenSupport
    graph_support: GraphSupport
    masks: tuple[str, ...] = DECODE_MASKS


def decode_limits(
    layer: DecodeLayer,
    backend: BackendChoice,
    query_len_support: QueryLenSupport | None,
    graph_support: GraphSupport | None,
    num_speculative_tokens: int,
    ownership: TokenOwnership | None,
    batch_invariant: bool,
) -> DecodeLimits:
    """Return the limits of a builder's decodes.

    Args:
        layer: properties of the layers. Its device may be the device type alone if the caller knows no device.
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
    if name is None or name in OWN_BACKENDS:
        asked = QueryLenSupport.VARLEN if query_len_support is None else query_len_support
        return DecodeLimits(None, asked, check_graph_support(graph_support, asked))
    chosen = named(name)
    support = chosen.ops[OP]  # `bind` binds an op to a backend that declares it
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
    if layer.device.index is not None or layer.device.type == "cpu":
        if layer.device.type == chosen.device_type:
            check_present_device("device", layer.device)
        reasons = reasons_against(chosen, request, is_named=True)
    else:  # only the type of the device is known
        reasons = [f"{name}: {reason}" for reason in support.reasons(request)]
    if reasons:
        raise UnsupportedConfiguration(reasons)
    return DecodeLimits(name, lens, graph, support.masks)


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
    """Return the device on which a decode backend is checked; if none is given, only the type that it needs."""
    if device is not None:
        device = check_device("device", device)
        return torch.device("cuda", 0) if device == torch.device("cuda") else device
    name = name_for(OP, backend)
    return torch.device("cpu" if name is None else named(name).device_type)

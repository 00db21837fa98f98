"""Write keys and values into a paged key/value cache.

A slot is the place of one token in the cache. `reference.cache.key_value` gives the block and the offset of a slot.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    GraphSupport,
    check_scale_values,
    check_slots,
    check_type,
    format_named,
)
from reference.interfaces.gqa import check_key_value_write

from .. import backends
from ..backends import BackendChoice


def reshape_and_cache(
    key: Float[Tensor, "T Nkv Dh"],
    value: Float[Tensor, "T Nkv Dh"],
    kv_cache: Shaped[Tensor, "2 num_blocks block_size Nkv Dh"],
    slot_mapping: Int64[Tensor, " slots"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Float[Tensor, ""] | None = None,
    v_scale: Float[Tensor, ""] | None = None,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> None:
    """Write the key and the value of each token to the slot of the token.

    `reference.cache.key_value.reshape_and_cache` explains the scales of the format `fp8_e4m3`.

    Args:
        key: [T, Nkv, Dh], keys, rotated if they have rope.
        value: [T, Nkv, Dh], values.
        kv_cache: cache with any strides, written in place.
        slot_mapping: [at least T], slot of each token. A token with slot -1 is not written. Slots after the first T
            are ignored.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale.
        v_scale: float32 scale of the values; None if the format has no such scale.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: a slot is outside the cache, or a
            scale is not finite and positive. Nothing has been written when the error is raised.
        UnsupportedConfiguration: the format is for the latent cache alone, such as `fp8_ds_mla`; no backend that
            `backend` allows can serve the call.
    """
    scales = k_scale, v_scale
    signature = _WRITES.signature(key, value, kv_cache, slot_mapping, cache_format, *scales, graph, backend)
    chosen = _WRITES.backend_of(signature)
    if chosen is None:
        check_key_value_write(key, value, kv_cache, slot_mapping, cache_format, *scales)
        check_type("graph", graph, GraphSupport)
        request = backends.key_value_write_request(
            key.device, key.dtype, key.shape[2], kv_cache.shape[2], cache_format, graph, backend
        )
        chosen = backends.select(request, backend).name
    _WRITES.run(signature, chosen, key, value, kv_cache, slot_mapping, cache_format.name, *scales)


def _launch_write(key, value, kv_cache, slot_mapping, cache_format, k_scale, v_scale, backend):
    if kv_cache.device.type == "cpu":
        check_slots(slot_mapping[: key.shape[0]], kv_cache.shape[1] * kv_cache.shape[2])
        check_scale_values("k_scale", k_scale)
        check_scale_values("v_scale", v_scale)
    backends.check_ignored_scales(backend, "reshape_and_cache", k_scale=k_scale, v_scale=v_scale)
    backends.kernel(backend, "reshape_and_cache")(
        key, value, kv_cache, slot_mapping, format_named(cache_format), k_scale, v_scale
    )


_reshape_and_cache = torch.library.custom_op(
    "mla_twins::reshape_and_cache",
    _launch_write,
    mutates_args=("kv_cache",),
    schema="(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, str cache_format, Tensor? k_scale,"
    " Tensor? v_scale, str backend) -> ()",
)
_WRITES = backends.CheckedCalls(torch.ops.mla_twins.reshape_and_cache, _launch_write, mutates=(2,))


@_reshape_and_cache.register_fake
def _(key, value, kv_cache, slot_mapping, cache_format, k_scale, v_scale, backend):
    return None

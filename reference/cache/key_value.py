"""Write keys and values to a paged key/value cache.

A key/value cache is a tensor [2, num_blocks, block_size, Nkv, Dh] with any strides: index 0 of the first axis has the
keys, and index 1 has the values. The place of a token in the cache is its slot: slot s is in block s // block_size, at
the offset s % block_size.
"""

from __future__ import annotations

from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from ..interfaces import COMPUTE_FORMAT, CacheFormat, check_scale_values, check_slots, to_e4m3
from ..interfaces.gqa import check_key_value_write


def reshape_and_cache(
    key: Float[Tensor, "T Nkv Dh"],
    value: Float[Tensor, "T Nkv Dh"],
    kv_cache: Shaped[Tensor, "2 num_blocks block_size Nkv Dh"],
    slot_mapping: Int64[Tensor, " slots"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Float[Tensor, ""] | None = None,
    v_scale: Float[Tensor, ""] | None = None,
) -> None:
    """Write the key and the value of each token to the slot of the token.

    For the format `fp8_e4m3`, a key is stored as key / k_scale and a value as value / v_scale, in e4m3 (8 bits). For
    the format `compute_dtype`, the elements are copied bit for bit.

    Args:
        key: [T, Nkv, Dh], keys of T tokens; their rope part, if any, is rotated.
        value: [T, Nkv, Dh], values of these tokens.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh], the cache of the layer, written in place.
        slot_mapping: [at least T], slot of each token; -1 = the token is not written. Elements from index T on are
            ignored.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale (`CacheFormat.layer_scale`).
        v_scale: float32 scale of the values; None like `k_scale`.

    Raises:
        ValueError: shapes, dtypes or devices do not match; a slot is outside the cache; a scale is not finite and
            positive. If the function raises, it has written nothing.
        UnsupportedConfiguration: the format is for the latent cache alone, such as `fp8_ds_mla`.
    """
    check_key_value_write(key, value, kv_cache, slot_mapping, cache_format, k_scale, v_scale)
    check_scale_values("k_scale", k_scale)
    check_scale_values("v_scale", v_scale)
    slots = slot_mapping[: key.shape[0]]
    _, num_blocks, block_size, _, _ = kv_cache.shape
    check_slots(slots, num_blocks * block_size)
    for half, entries, scale in ((kv_cache[0], key, k_scale), (kv_cache[1], value, v_scale)):
        stored = entries if scale is None else to_e4m3(entries, scale)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                half[slot // block_size, slot % block_size] = stored[token]

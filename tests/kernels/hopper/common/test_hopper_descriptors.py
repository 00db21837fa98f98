"""Tests of the cache of TMA descriptors: a descriptor belongs to an address in GPU memory and keeps no tensor alive.

TMA is the GPU's bulk copy engine. A descriptor states the address, dtype, shape and strides of the tensor to copy.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")

import fast
from fast.kernels.hopper.common.descriptors import descriptor
from reference.interfaces import CommonAttentionMetadata

from ....support.triton_mode import ON_HOPPER


def described(tensor):
    return descriptor(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), (1, 64, 64), 128)


def test_one_descriptor_for_each_view_of_memory():
    """Views with equal address, dtype, shape and strides share a descriptor; other views get another descriptor."""
    cache = torch.zeros(4, 64, 128, dtype=torch.bfloat16, device="cpu")
    first = described(cache)
    assert described(cache) is first and described(cache.view_as(cache)) is first
    assert first.base.data_ptr() == cache.data_ptr() and first.base.dtype == torch.bfloat16
    others = [cache[1:], cache.view(torch.float16), cache[..., :64], cache[:2]]
    assert len({id(described(other)) for other in others} | {id(first)}) == 5


def test_a_descriptor_keeps_no_memory():
    cache = torch.zeros(4, 64, 128, dtype=torch.bfloat16, device="cpu")
    kept = weakref.ref(cache)
    described(cache)
    del cache
    gc.collect()
    assert kept() is None


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_another_cache_at_the_same_address():
    """A decode reads the given cache, even if this cache has the address of an earlier cache that was freed."""
    with torch.device("cuda"):
        table = torch.arange(8, dtype=torch.int32)[None]
        common = CommonAttentionMetadata.from_lens([1], [500], table, 64)
        plan = fast.build_mla_metadata(common, 64, 64).decode
        q, q_pe = (torch.randn(1, 16, width, dtype=torch.bfloat16) for width in (512, 64))
        addresses = []
        for blocks in (8, 8, 16, 8):
            cache = torch.randn(blocks, 64, 576, dtype=torch.bfloat16)
            addresses.append(cache.data_ptr())
            found = fast.mla_decode(q, q_pe, cache, plan, 0.1)
            with fast.backends.check_every_call():
                wanted = fast.mla_decode(q, q_pe, cache.clone(), plan, 0.1)
            assert found.out.equal(wanted.out) and found.lse.equal(wanted.lse)
            del cache
        assert len(set(addresses)) < len(addresses), "the allocator gave no address twice"

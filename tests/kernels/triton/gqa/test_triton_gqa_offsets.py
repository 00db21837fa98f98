"""Tests of grouped-query attention with the Triton kernels over tensors whose offsets exceed 2^31 elements (pitfall 8).

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter. A large tensor
there needs only virtual memory, because the tests write few of its pages. "Pitfall 8" is entry 8 of the list in
`tests/__init__.py`.

The budgets are those of `fast.parity`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces.gqa import GQAConfig

from ....gqa.test_fast_attention import attend, doubled, in_float64, verdict
from ....gqa.test_fast_cache import written
from ....support.factories import assert_same_bits, offsets
from ....support.gqa import MHA, gqa_batch
from ....support.triton_mode import INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter
from .test_triton_gqa import FORMATS, on_device, schedule_for, triton  # noqa: F401  fixtures

if ON_GPU or INTERPRETED:
    from fast.kernels.triton.gqa import paged

FORMS = ("whole", "split", "scheduled", "batch-invariant")
BLOCKS, TOKENS, HEADS = 1, 2, 3  # dims of a cache [2, num_blocks, block_size, Nkv, Dh]
DECODES = ((1, 100), (2, 67), (1, 0), (0, 9), (3, 150))
COPIED = GQAConfig(6, 3, 64)  # TMA loads the tiles of prompts if the GPU has TMA
PROMPTS = ((40, 130), (1, 20), (33, 33))  # more rows than a decode; some tiles need no mask
NEW = ((40, 40), (1, 1), (17, 17))  # every token is new, so every block is written


def cases(*dims: int) -> list[tuple[str, int]]:
    """Return pairs of form and dim: all of them on a GPU; in the interpreter each form and each dim at least once."""
    return [(form, dim) for form in FORMS for dim in dims if ON_GPU or form == "whole" or dim == dims[0]]


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def far(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a copy of `x` in which the last index of a dim begins behind element 2^31.

    The stride of the dim fits into 32 bits, and it is a multiple of 16 elements, so that TMA can load tiles of the
    copy. Memory between the numbers stays unwritten. Skip the test if the GPU has too little memory.
    """
    rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
    strides = list(torch.empty(rest, device="meta").stride())
    strides.insert(dim, 16 * (2**31 // (16 * (x.shape[dim] - 1)) + 1))
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    if ON_GPU and torch.cuda.mem_get_info()[0] < 1.1 * elements * x.itemsize:
        pytest.skip("too little memory")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        storage = torch.empty(elements, dtype=x.dtype)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
    assert (x.shape[dim] - 1) * strides[dim] > 2**31 > strides[dim] > x.numel() // x.shape[dim]
    return storage.as_strided(x.shape, strides).copy_(x)


def options_of(form: str, batch, monkeypatch) -> dict:
    """Return the schedule of a form of decodes; with "split", each request gets three splits."""
    monkeypatch.setattr(paged, "_num_splits", lambda *_: 3 if form == "split" else 1)
    schedules = {"scheduled": (3, False), "batch-invariant": (0, True)}
    return {"schedule": schedule_for(batch, *schedules[form])} if form in schedules else {}


def check_far(batch, moved, **options) -> None:
    """Attend `moved`, which has the numbers of `batch` at other addresses -> within the budgets of `batch`."""
    gold, low = attend(reference, in_float64(batch)), attend(reference, batch)
    verdict("gqa_paged_attention", attend(fast, moved, **options), low, gold)


@runs
@pytest.mark.parametrize("form, dim", cases(BLOCKS, TOKENS, HEADS))
def test_offsets_beyond_32_bit(form, dim, triton, monkeypatch):  # noqa: F811
    """Decode over a cache whose blocks, tokens or KV heads are far apart -> within the budgets, in both formats."""
    for cache_format in FORMATS:
        batch = gqa_batch(MHA, DECODES, 16, torch.float16, cache_format=cache_format, padding=2, spare_blocks=0)
        moved = replace(batch, kv_cache=far(batch.kv_cache, dim))
        check_far(batch, moved, **options_of(form, batch, monkeypatch), backend=triton)
        del moved  # the next cache needs the memory


@runs
@pytest.mark.parametrize("dim", [BLOCKS, TOKENS, HEADS], ids=["blocks", "tokens", "heads"])
def test_offsets_of_prompts_beyond_32_bit(dim, triton):  # noqa: F811
    """Attend prompts over a cache whose blocks, tokens or KV heads are far apart -> within the budgets."""
    batch = gqa_batch(COPIED, PROMPTS, 64, torch.float16, spare_blocks=0)
    check_far(batch, replace(batch, kv_cache=far(batch.kv_cache, dim)), backend=triton)


@runs
@pytest.mark.parametrize("form, dim", cases(0, 1))
def test_query_strides_beyond_32_bit(form, dim, triton, monkeypatch):  # noqa: F811
    """Attend queries, and write an output, whose tokens or heads are far apart -> within the budgets."""
    batch = gqa_batch(MHA, DECODES, 16, torch.float16, padding=2 * dim)
    options = options_of(form, batch, monkeypatch) | {"backend": triton}
    check_far(batch, replace(batch, q=far(batch.q, dim)), **options)
    check_far(batch, batch, **options, out=far(torch.zeros_like(batch.q), dim))


@runs
@pytest.mark.parametrize("dim", [0, 1], ids=["tokens", "heads"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_packed_strides_beyond_32_bit(name, dim, triton):  # noqa: F811
    """Attend packed keys if the tokens or heads of one tensor are far apart -> within the budgets."""
    query_lens, key_lens = (33, 5), (70, 20)
    q, k, v = (torch.randn(sum(lens), heads, 64).half()
               for lens, heads in ((query_lens, 6), (key_lens, 3), (key_lens, 3)))  # fmt: skip
    rest = offsets(query_lens), offsets(key_lens), max(query_lens), max(key_lens), COPIED
    gold = reference.gqa_varlen_attention(*doubled((q, k, v)), *rest)
    low = reference.gqa_varlen_attention(q, k, v, *rest)
    given = {"q": q, "k": k, "v": v, "out": torch.zeros_like(q)}
    given[name] = far(given[name], dim)
    found = fast.gqa_varlen_attention(*(given[each] for each in "qkv"), *rest, out=given["out"], backend=triton)
    verdict("gqa_varlen_attention", found, low, gold)


@runs
@pytest.mark.parametrize("dim", [BLOCKS, TOKENS, HEADS], ids=["blocks", "tokens", "heads"])
def test_writes_beyond_32_bit(dim, triton):  # noqa: F811
    """Write to a cache whose blocks, tokens or KV heads are far apart -> the bits of the reference."""
    for cache_format in FORMATS:
        batch = gqa_batch(MHA, NEW, 16, torch.float16, cache_format=cache_format, new_tokens=False, spare_blocks=0)
        cache = far(batch.kv_cache, dim)
        fast.reshape_and_cache(batch.new_k, batch.new_v, cache, batch.slot_mapping, **batch.scales, backend=triton)
        assert_same_bits(cache, written(reference, batch))
        del cache  # the next cache needs the memory


@runs
@pytest.mark.parametrize("dim", [0, 1], ids=["tokens", "heads"])
@pytest.mark.parametrize("number", [0, 1], ids=["keys", "values"])
def test_new_keys_beyond_32_bit(number, dim, triton):  # noqa: F811
    """Write keys or values whose tokens or heads are far apart -> the bits of the reference."""
    for cache_format in FORMATS:
        batch = gqa_batch(MHA, NEW, 16, torch.float16, cache_format=cache_format, new_tokens=False)
        new, cache = [batch.new_k, batch.new_v], batch.kv_cache.clone()
        new[number] = far(new[number], dim)
        fast.reshape_and_cache(*new, cache, batch.slot_mapping, **batch.scales, backend=triton)
        assert_same_bits(cache, written(reference, batch))
        del new  # the next keys need the memory

"""Tests of the ops of grouped-query attention that `fast` registers with torch.library: schemas and fake results.

tests/twins/test_ops.py tests the other ops. tests/gqa/test_fast_layer.py compiles a layer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

import fast
from fast.backends import GQA_OPS, Backend, paged_attention_request, select
from fast.backends.own import TORCH as TORCH_BACKEND
from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3, wide_dtype
from reference.interfaces.gqa import GQAConfig

from ..support.backends import registered
from ..support.factories import assert_same_bits, offsets
from ..support.gqa import GROUPED, SLOPES, gqa_batch
from .test_ops import LAYOUTS, check_op, is_data, overload

OPS = sorted(f"mla_twins::{op}" for op in (*GQA_OPS, "gqa_paged_attention_out", "gqa_varlen_attention_out"))
FULL = replace(GROUPED, sliding_window=19, logits_soft_cap=1.1, alibi_slopes=SLOPES, attention_sinks=True)
LENS = ((1, 20), (2, 33), (1, 0))
SCHEDULE = fast.DecodeSchedule(None, None, True)


def backend_here(dtype: torch.dtype) -> str:
    """Return the name of the backend that serves grouped-query attention on the default device."""
    return select(paged_attention_request(GROUPED, torch.get_default_device(), dtype, 16)).name


def paged_samples(
    dtype: torch.dtype, config: GQAConfig, out_dtype: torch.dtype, cache_format, lens=LENS, block_size: int = 16,
    schedule: fast.DecodeSchedule | None = None,
) -> tuple:  # fmt: skip
    """Return the arguments of one call of `gqa_paged_attention`; the bytes of no token are 0, as opcheck wants it."""
    batch = gqa_batch(
        config, lens, block_size, dtype, cache_format=cache_format, padding=1, free_behind_window=False
    )  # fmt: skip
    if not cache_format.scaled:
        batch.kv_cache.nan_to_num_(0)
    plan, slopes = batch.metadata, config.alibi_slopes
    longest = [max(each) for each in zip(*lens, strict=True)]
    ranges = (None, None) if schedule is None else (schedule.tile_ranges, schedule.split_offsets)
    return (
        batch.q, batch.kv_cache, plan.block_table, plan.seq_lens, plan.query_start_loc, plan.visible_lens,
        plan.first_visible, *longest, longest[1], 0.3, config.logits_soft_cap,
        None if slopes is None else list(slopes), batch.sinks, out_dtype, *ranges,
        schedule is not None and schedule.batch_invariant, list(SCHEDULE.split_rule.numbers), cache_format.name,
        batch.k_scale, batch.v_scale, batch.k_scale, [], backend_here(dtype),
    )  # fmt: skip


def varlen_samples(
    dtype: torch.dtype, config: GQAConfig, out_dtype: torch.dtype, lens=((4, 5), (0, 2), (3, 0))
) -> tuple:
    """Return the arguments of one call of `gqa_varlen_attention`; `lens` has the tokens and keys of each request."""
    query_lens, key_lens = zip(*lens, strict=True)
    tokens = keys = max(sum(query_lens), sum(key_lens))  # some tokens or keys belong to no request
    q = torch.randn(tokens, config.num_heads, config.head_dim).to(dtype)
    k, v = (torch.randn(keys, config.num_kv_heads, config.head_dim).to(dtype) for _ in range(2))
    slopes, sinks = config.alibi_slopes, torch.randn(config.num_heads).to(dtype) if config.attention_sinks else None
    return (
        q, k, v, offsets(query_lens), offsets(key_lens), max(query_lens), max(key_lens), 0.3,
        config.attention_type.value, config.sliding_window, config.attention_chunk_size, config.logits_soft_cap,
        None if slopes is None else list(slopes), sinks, out_dtype, backend_here(dtype),
    )  # fmt: skip


def samples(dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Return arguments of every op of grouped-query attention."""
    paged = [
        paged_samples(dtype, config, out_dtype, cache_format)
        for config in (GROUPED, FULL) for out_dtype in (dtype, wide_dtype(dtype))
        for cache_format in (COMPUTE_FORMAT, FP8_E4M3)
    ]  # fmt: skip
    packed = [
        varlen_samples(dtype, config, out_dtype)
        for config in (GROUPED, FULL, replace(GROUPED, attention_chunk_size=2))
        for out_dtype in (dtype, wide_dtype(dtype))
    ]  # fmt: skip
    batches = [gqa_batch(GROUPED, LENS, dtype=dtype, cache_format=each) for each in (COMPUTE_FORMAT, FP8_E4M3)]
    batches[0].kv_cache.nan_to_num_(0)
    return {
        "mla_twins::gqa_paged_attention": paged,
        "mla_twins::gqa_paged_attention_out": [
            (*given[:-1], torch.zeros(given[0].shape, dtype=given[14]), given[-1]) for given in paged
        ],
        "mla_twins::gqa_varlen_attention": packed,
        "mla_twins::gqa_varlen_attention_out": [
            (*given[:-1], torch.zeros(given[0].shape, dtype=given[14]), given[-1]) for given in packed
        ],
        "mla_twins::reshape_and_cache": [
            (torch.randn(3, 2, 80).to(dtype), torch.randn(3, 2, 80).to(dtype), each.kv_cache,
             torch.tensor([3, -1, 20, 7]), each.cache_format.name, each.k_scale, each.v_scale, backend_here(dtype))
            for each in batches
        ],
    }  # fmt: skip


def test_every_op_has_a_sample():
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mla_twins::")]
    assert sorted(samples(torch.float32)) == OPS
    assert set(OPS) == {name for name in registered if "gqa" in name or "reshape" in name}


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    """Run opcheck on an op -> no error in its schema, its fake implementation and its tracing."""
    for arguments in samples(torch.float32)[name]:
        check_op(name, arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_fake_results(name, layout, dtype):
    """Call an op with real and with fake tensors of several layouts -> the same shapes, dtypes and strides."""
    for arguments in samples(dtype)[name]:
        arguments = tree_map(lambda x: layout(x) if is_data(x) and x.dtype == dtype else x, arguments)
        real = overload(name)(*arguments)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = overload(name)(*tree_map(
                lambda x: mode.from_tensor(x, static_shapes=True) if torch.is_tensor(x) else x, arguments))  # fmt: skip
        for r, f in zip(tree_leaves(real), tree_leaves(fake), strict=True):
            if isinstance(r, torch.Tensor):
                assert (r.shape, r.dtype, r.device, r.stride()) == (f.shape, f.dtype, f.device, f.stride())


@pytest.mark.parametrize("name", OPS)
def test_kernels_for_gpus_return_what_the_fakes_promise(name):
    """Run an op with the kernels of the backend "torch" on CPU tensors -> the fake results, and it writes in place."""
    written = {"reshape_and_cache": 2, "gqa_paged_attention_out": -2, "gqa_varlen_attention_out": -2}
    index = written.get(name.split("::")[1])
    with registered(Backend("padded", -1, torch.get_default_device().type, TORCH_BACKEND.ops)):
        for *arguments, own in samples(torch.bfloat16)[name]:
            given, others = [*arguments, "padded"], [*arguments, own]
            if index is not None:
                given[index], others[index] = (torch.full_like(given[index].float(), torch.nan).to(given[index].dtype)
                                               for _ in range(2))  # fmt: skip
            with FakeTensorMode() as mode:
                fake = overload(name)(*tree_map(lambda x: mode.from_tensor(x) if torch.is_tensor(x) else x, given))
            real = overload(name)(*given)
            for r, f in zip(tree_leaves(real), tree_leaves(fake), strict=True):
                if isinstance(f, torch.Tensor):
                    assert (r.shape, r.dtype, r.device, r.stride()) == (f.shape, f.dtype, f.device, f.stride())
            if name.endswith("reshape_and_cache"):
                overload(name)(*others)
                assert_same_bits(given[index], others[index])
                assert not given[index].isnan().all()
            elif index is not None:
                assert given[index].isfinite().all()

"""Tests that kernels of other libraries get softmax scales above 0 alone, and that the results stay the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fast
from fast.backends import Backend
from fast.backends.own import CPU
from fast.backends.positive_scales import with_positive_scale
from fast.mla.backend_hooks import BackendHooks
from reference.interfaces import E4M3, QueryLenSupport

from ..support.backends import registered
from ..support.decode_inputs import make_inputs
from ..support.factories import DIRECT, assert_close64, make_batch, offsets

GOTTEN: list[float] = []  # the scales that the library of these tests has got
SCALES = [0.0, -0.3]
POSITIONS = {"flash_attn_varlen": 8, "mla_decode": 9}


class Hooks(BackendHooks):
    """Hooks that attend on their own, as those of a library with a plan."""

    def run_prefill_new_tokens(self, inputs, metadata, softmax_scale, *rest):
        GOTTEN.append(softmax_scale)
        return super().run_prefill_new_tokens(inputs, metadata, softmax_scale, *rest)

    def run_prefill_context_chunk(self, inputs, metadata, chunk, softmax_scale):
        GOTTEN.append(softmax_scale)
        return super().run_prefill_context_chunk(inputs, metadata, chunk, softmax_scale)


def recorded(op):
    """Return the declaration of the CPU kernel of an op with a launcher that notes its scale."""
    launch = fast.backends.kernel("cpu", op)

    def launcher(*given, **options):
        GOTTEN.append(given[POSITIONS[op]])
        return launch(*given, **options)

    return replace(CPU.ops[op], launcher=launcher)


@pytest.fixture(autouse=True)
def library():
    """Register "library", which has the kernels of "cpu" and belongs to another project."""
    GOTTEN.clear()
    with registered(Backend("library", -100, "cpu", {op: recorded(op) for op in POSITIONS}, hooks=Hooks)):
        yield


def same(attend):
    """Assert that a library gets only scales above 0, and that the result is that of "cpu"."""
    wanted = attend("cpu")
    for _ in range(2):  # the second call has a signature that is known
        found = attend("library")
        for one, other in zip(found, wanted, strict=True):
            assert_close64(one, other)
    assert len(GOTTEN) >= 2 and min(GOTTEN) > 0


@pytest.mark.parametrize("scale", SCALES)
def test_packed_attention(scale):
    q, k, v = (torch.randn(9, 2, 16, dtype=torch.float64) for _ in range(3))
    q[2, 1, 3] = math.nan  # the row of this query and head stays NaN
    starts = offsets([4, 5])
    same(lambda name: fast.flash_attn_varlen(q, k, v, starts, starts, 5, 5, scale, True, backend=name))


@pytest.mark.parametrize("scale", SCALES)
def test_hooks_of_a_prefill(scale):
    """Attend new tokens and a chunk of context by the hooks of a plan."""
    options = dict(query_len_support=QueryLenSupport.SINGLE_ONLY, workspace_tokens=64, dtype=torch.float64)
    config, batch = DIRECT, make_batch([5, 3], [25, 19])
    tensors = {
        tokens: [
            torch.randn(tokens, config.num_heads, config.qk_nope_head_dim, dtype=torch.float64),
            torch.randn(tokens, config.qk_rope_head_dim, dtype=torch.float64),
            torch.randn(tokens, config.num_heads, config.v_head_dim, dtype=torch.float64),
        ]
        for tokens in (8, 36)
    }
    q = torch.randn(8, config.num_heads, config.qk_head_dim, dtype=torch.float64)

    def attend(name):
        bound = {"flash_attn_varlen": name}
        plan = fast.MLAMetadataBuilder(config, 16, 128, 4, **options, backend=bound).build(0, batch.common).prefill
        (chunk,) = plan.context_chunks
        new = fast.run_prefill_new_tokens(q, *tensors[8], plan, scale)
        context = fast.run_prefill_context_chunk(q, *tensors[chunk.num_tokens], plan, chunk, scale)
        return *new, *context

    same(attend)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("into", [False, True], ids=["new output", "given output"])
def test_decode(scale, into):
    *given, plan = make_inputs([1, 1, 1], [20, 0, 7], dtype=torch.float64, widths=(32, 8))
    out = torch.empty_like(given[0]) if into else None

    def attend(name):
        state = fast.mla_decode(*given, plan, scale, out=out, backend=name)
        return state.out.clone(), state.lse

    same(attend)


def test_queries_in_e4m3():
    """Convert all numbers of e4m3 -> their negatives, or zeros; NaN stays NaN. Own backends get scales as they are."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).view(16, 16).T
    scale, (negated,) = with_positive_scale("library", -0.5, every)
    assert scale == 0.5 and torch.equal(negated.float().nan_to_num(500), (-every.float()).nan_to_num(500))
    scale, (zeros, other) = with_positive_scale("library", 0.0, every, every.float())
    assert scale == 1.0 and torch.equal(zeros.float().isnan(), every.float().isnan())
    assert torch.equal(zeros.float().nan_to_num(0).abs(), torch.zeros(16, 16))
    assert torch.equal(other.isnan(), every.float().isnan()) and other.nan_to_num(0).eq(0).all()
    for name, given in (("hopper", -0.5), ("library", 0.5)):
        scale, (same_queries,) = with_positive_scale(name, given, every)
        assert scale == given and same_queries is every

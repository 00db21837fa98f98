"""Tests of `StoredDecode`, with which tests of the Hopper decodes serve all fp8 modes; here a CPU decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from fast.kernels.cpu import decode
from reference.interfaces import CONVERTED, E4M3, FP8_E4M3, FP8_MODES, AttentionState

from ...support.decode_inputs import rising_inputs
from ...support.factories import assert_same_bits, integers
from ...support.fp8_modes import StoredDecode
from ...support.triton_mode import ON_GPU

BF16 = torch.bfloat16
if ON_GPU:
    pytest.skip("on a GPU, the inputs are on the GPU", allow_module_level=True)


@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("mode", FP8_MODES)
def test_a_decode_is_within_its_budget(mode, heads):
    """Decode in each mode -> within the budget; an output times 1.1 is not within the budget."""
    case = StoredDecode.make(mode, [1, 4, 0, 1], [66, 130, 5, 0], heads, BF16)
    assert case.queries[0].dtype == (BF16 if mode == CONVERTED else E4M3)
    state = case.launch(decode)
    case.verdict(state)
    with pytest.raises(AssertionError):
        case.verdict(AttentionState(state.out * 1.1, state.lse))
    other = replace(case, plan=replace(case.plan, visible_lens=integers(64, 0, 130, 1, 7, 0)))
    other.verdict(other.launch(decode))
    if heads > 1:
        with pytest.raises(AssertionError):  # the masks differ
            other.verdict(state)


@pytest.mark.parametrize("mode", FP8_MODES)
def test_signs_and_scales(mode):
    """Negate the queries and the softmax scale -> the same bits; the softmax scale 0 gives all keys equal weights."""
    case = StoredDecode.make(mode, [1, 2], [250, 70], 3, BF16)
    assert_same_bits(
        replace(case, queries=case.negated).launch(decode, scale=-0.13).out, case.launch(decode, scale=0.13).out
    )
    state = case.launch(decode, scale=0.0)
    assert torch.allclose(state.lse[:, 0], torch.tensor(250.0).log().expand(3), atol=1e-5)


@pytest.mark.parametrize("mode", FP8_MODES)
def test_rising_scores(mode):
    """Decode inputs whose scores rise from tile to tile -> within the budget.

    The queries of some heads are 4096 times smaller than those of the others. The scale of each head maps its largest
    query to 448, so no query becomes 0.
    """
    ql, q_pe, cache, plan = rising_inputs(4, BF16)
    kv_scale, entries = torch.tensor(2.0), cache.flatten(0, 1)
    codes = reference.quantize_entries(entries[:, :512], entries[:, 512:], FP8_E4M3, kv_scale).view(cache.shape)
    case = StoredDecode.of(mode, ql, q_pe, codes, plan, kv_scale)
    case.verdict(case.launch(decode))
    if mode != CONVERTED:
        largest = [x.float().abs().amax((0, 2)) for x in case.queries]
        assert torch.stack(largest).amax(0).eq(448).all()


@pytest.mark.parametrize("mode", FP8_MODES)
def test_many_keys(mode):
    case = StoredDecode.make(mode, [1], [2000], 2, BF16)
    case.verdict(case.launch(decode))

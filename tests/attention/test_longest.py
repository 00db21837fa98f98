"""Tests of the upper bounds of lengths, `max_seqlen_q` and `max_seqlen_k`, and of numbers of other types."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import fast
from fast.attention.varlen import flash_attn_varlen_shared_rope
from reference.interfaces import check_longest

from ..support.factories import DIRECT, assert_same_bits, integers, make_batch, offsets

Q, K, V = torch.randn(6, 3, 8), torch.randn(9, 3, 8), torch.randn(9, 3, 5)


def attend(ops, longest_q=4, longest_k=5, scale=0.3, **options):
    """Attend queries of 2 and 4 tokens over 4 and 5 keys."""
    starts = offsets([2, 4]), offsets([4, 5])
    return ops.flash_attn_varlen(Q, K, V, *starts, longest_q, longest_k, scale, True, **options)


def test_every_valid_bound_gives_the_same_bits(ops):
    wanted = attend(ops)
    for bounds in ((4, 100), (6, 5), (1000, 1000)):
        for one, other in zip(attend(ops, *bounds), wanted, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("argument, bounds, most", [("q", (3, 5), 4), ("k", (4, 0), 5), ("q", (0, 0), 4)])
def test_a_bound_below_the_longest_request(ops, argument, bounds, most, plain_errors):
    """A bound that is smaller than the longest request raises one line, in the first call and in later calls."""
    wanted = f"^max_seqlen_{argument}: expected at least {most}, the length of the longest request, got "
    for _ in range(2):
        with pytest.raises(ValueError, match=wanted):
            attend(ops, *bounds)


def test_a_later_call_with_other_lengths(plain_errors):
    """After a valid call, the same bounds with a longer request are refused, although the signature is known."""
    arguments = Q, K, V
    rest = 4, 5, 0.3, True
    fast.flash_attn_varlen(*arguments, offsets([2, 4]), offsets([4, 5]), *rest)
    with pytest.raises(
        ValueError, match="^max_seqlen_q: expected at least 5, the length of the longest request, got 4"
    ):
        fast.flash_attn_varlen(*arguments, offsets([1, 5]), offsets([4, 5]), *rest)


def test_keys_in_two_parts(plain_errors):
    arguments = Q, K[..., :6].contiguous(), K[:, 0, 6:].contiguous(), V, offsets([2, 4]), offsets([4, 5])
    for bounds, name in (((3, 5), "q"), ((4, 4), "k")):
        with pytest.raises(ValueError, match=f"^max_seqlen_{name}: expected at least"):
            flash_attn_varlen_shared_rope(*arguments, *bounds, 0.3, True)


def test_a_chunk_with_a_wrong_length(plain_errors):
    """A chunk of context whose `max_seq_len` is too small is refused."""
    plan = fast.build_mla_metadata(make_batch([5, 4], [45, 4]).common, 16, 64).prefill
    chunk = plan.context_chunks[0]
    rows, heads = chunk.num_tokens, DIRECT.num_heads
    tensors = (
        torch.randn(9, heads, 20),
        torch.randn(rows, heads, 12),
        torch.randn(rows, 8),
        torch.randn(rows, heads, 10),
    )
    fast.run_prefill_context_chunk(*tensors, plan, chunk, 0.2)
    with pytest.raises(
        ValueError, match="^max_seqlen_k: expected at least 40, the length of the longest request, got 0"
    ):
        fast.run_prefill_context_chunk(*tensors, plan, replace(chunk, max_seq_len=0), 0.2)


def test_no_request():
    check_longest("max_seqlen_q", 0, integers(0))


@pytest.mark.parametrize("value, said", [
    (np.int64(4), "4 of type int64"), (Fraction(4), "4 of type Fraction"), (4.0, r"4\.0"), (True, "True"),
    (torch.tensor(4), "Tensor"), (np.arange(2), r"\[0 1\]"),
])  # fmt: skip
def test_an_error_names_the_type_of_other_numbers(ops, value, said, plain_errors):
    """Give a number that is no int -> an error that does not contradict itself."""
    with pytest.raises(ValueError, match=f"^max_seqlen_q: expected an int >= 0, got {said}$"):
        attend(ops, value)


def test_a_scale_of_another_type(ops, plain_errors):
    with pytest.raises(ValueError, match="^softmax_scale: expected a finite number, got 0.5 of type float32$"):
        attend(ops, scale=np.float32(0.5))

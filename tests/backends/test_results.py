"""Tests of the check of what backends of other projects return, for every op that returns something."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends import Backend, OpSupport
from fast.backends.own import CPU, OPS
from fast.backends.results import kernel
from fast.kernels import cpu
from fast.mla.cache_write import rope_norm_and_cache
from reference.interfaces import FP8_E4M3, NEUTRAL_COSTS, ScheduleCosts

from ..support.backends import registered
from ..support.factories import DIRECT, assert_same_bits, integers, offsets
from ..support.gqa import GROUPED

LAYER = dict(device="cpu", dtype=torch.float32, block_size=16)
SCALE = torch.tensor(0.5)


def merge(**options):
    torch.manual_seed(0)
    states = [fast.AttentionState(torch.randn(2, 3, 4), torch.randn(3, 2)) for _ in range(2)]
    return fast.merge_attn_states(*states, **options)


def rotate(**options):
    torch.manual_seed(0)
    return fast.apply_rope(torch.arange(3), torch.randn(3, 2, 8), torch.randn(3, 8), fast.RopeConfig(), **options)


def write(**options):
    torch.manual_seed(0)
    dtype = torch.float8_e4m3fn if options else torch.float32
    return rope_norm_and_cache(
        torch.arange(3), torch.randn(3, 2, 8), torch.randn(3, 16), torch.randn(3, 8),
        torch.zeros(1, 16, 24).to(dtype), torch.arange(3), torch.ones(16), 1e-6, fast.RopeConfig(), **options,
    )  # fmt: skip


def merge_over_ranks():
    def program(ranks):
        torch.manual_seed(0)
        state = fast.AttentionState(torch.randn(3, 4, 8), torch.randn(4, 3))
        return tuple(fast.cp_lse_ag_out_rs(state, ranks.cp_group))

    return fast.simulate(2, 1, program)[0]


CALLS = {  # op, or op and case: a call that returns a tensor or several tensors
    "plan_decode": lambda: tuple(vars(fast.plan_decode(integers(5, 900, 0), 2)).values())[:2],
    "compute_visible_lens": lambda: fast.compute_visible_lens(offsets([1, 2]), integers(5, 9), 4),
    "merge_attn_states": merge,
    "apply_rope": rotate,
    "apply_rope, e4m3": lambda: rotate(q_scale=SCALE),
    "rope_norm_and_cache": write,
    "rope_norm_and_cache, e4m3": lambda: write(cache_format=FP8_E4M3, kv_scale=SCALE, q_scale=SCALE),
    "weight_attn_out": merge_over_ranks,
}
PARTS = {op: 1 if op == "compute_visible_lens" else 3 if op.startswith("rope_norm") else 2 for op in CALLS}
FAULTS = {  # what a backend returns in place of a tensor
    "shape": lambda tensor: torch.cat((tensor, tensor)),
    "dtype": lambda tensor: tensor.to(torch.float64),
    "device": lambda tensor: tensor.to("meta"),
    "None": lambda tensor: None,
}


def lying(op, change) -> Backend:
    """Return a backend that calls the kernel of "cpu" for an op, and returns what `change` makes of the result."""

    def launch(*arguments, **options):
        return change(cpu.KERNELS[op](*arguments, **options))

    return Backend("liar", 50, "cpu", {op: replace(CPU.ops[op], launcher=launch)})


def tensors_of(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("case", CALLS)
def test_right_results(case):
    """Register a backend that returns what "cpu" returns -> its results pass, and have the same bits."""
    wanted, calls = tensors_of(CALLS[case]()), []
    with registered(lying(case.split(",")[0], lambda result: calls.append(1) or result)):
        found = tensors_of(CALLS[case]())
    assert calls and len(found) == len(wanted) == PARTS[case]
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case, part", [(case, part) for case, count in PARTS.items() for part in range(count)])
def test_a_wrong_tensor(case, part, fault, plain_errors):
    """Let a backend return one wrong tensor -> the call raises, and the error has the names of the backend and the op.

    The error comes in the first call and in a later one.
    """
    op = case.split(",")[0]

    def change(result):
        if isinstance(result, torch.Tensor):
            return FAULTS[fault](result)
        return tuple(FAULTS[fault](each) if number == part else each for number, each in enumerate(result))

    with registered(lying(op, change)):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=f"^the result of the backend liar for {op}: ?") as error:
                CALLS[case]()
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", [case for case, count in PARTS.items() if count > 1])
@pytest.mark.parametrize("made", [None, (), (torch.zeros(2),), [torch.zeros(2)] * 2], ids=["None", "()", "one", "list"])
def test_no_tuple(case, made, plain_errors):
    op = case.split(",")[0]
    message = f"^the result of the backend liar for {op}: expected a tuple"
    with registered(lying(op, lambda result: made)), pytest.raises(ValueError, match=message):
        CALLS[case]()


@pytest.mark.parametrize(
    "op, call, made",
    [
        ("decode_programs", lambda: fast.decode_programs(DIRECT, **LAYER), ["seven", -3, None, 2.0, True]),
        ("schedule_costs", lambda: fast.schedule_costs(DIRECT, **LAYER), [3, None, (1, 2)]),
    ],
)
def test_wrong_numbers(op, call, made, plain_errors):
    """Let a backend return no number of programs or no costs -> an error with its name; a right value passes."""
    for value in made:
        with registered(lying(op, lambda _, value=value: value)):
            with pytest.raises((TypeError, ValueError), match=f"^the result of the backend liar for {op}: expected"):
                call()
            with pytest.raises((TypeError, ValueError), match=f"^the result of the backend liar for {op}: expected"):
                fast.MLAMetadataBuilder(DIRECT, 16, 128, 4, dtype=torch.float32)._programs_and_costs(1, "cpu")
    right = {"decode_programs": 7, "schedule_costs": ScheduleCosts(request_cost=9)}[op]
    with registered(lying(op, lambda _: right)):
        assert call() == right != NEUTRAL_COSTS


def test_wrong_programs_of_grouped_query_attention(plain_errors):
    for value in ("seven", -3):
        support = replace(CPU.ops["gqa_paged_attention"], schedule_programs=lambda *_, value=value: value)
        with registered(Backend("liar", 50, "cpu", {"gqa_paged_attention": support})):
            builder = fast.GQAMetadataBuilder(GROUPED, 16, 128, 4)
            with pytest.raises(ValueError, match="^the result of the backend liar for schedule_programs: expected"):
                builder.build_for_cudagraph_capture(
                    fast.CommonAttentionMetadata.from_lens([1], [9], torch.zeros(1, 8, dtype=torch.int32), 16)
                )


def test_ops_that_write():
    """Return something from an op that writes into tensors -> the call ignores it."""
    out = fast.AttentionState(torch.zeros(2, 3, 4), torch.zeros(3, 2))
    with registered(lying("merge_attn_states", lambda _: "done")):
        merge(out=out)
    wanted = merge()
    assert_same_bits(out.out, wanted.out)


def test_own_backends_are_not_checked():
    """Take the launchers of this package -> the functions themselves, without a check around them."""
    for op in OPS:
        assert kernel("cpu", op) is cpu.KERNELS[op]
    with registered(Backend("other", -1, "cpu", {"copy_blocks": OpSupport(print)})):
        assert backends.kernel("other", "copy_blocks") is print

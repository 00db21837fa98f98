"""Tests of repeated calls: a second call with the same signature skips most checks of its arguments.

The *signature* of a call consists of everything that these checks read: shapes, strides, dtypes and devices of the
tensors, and all other arguments.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends import Backend, OpSupport, checked_calls, signatures
from fast.backends.checked_calls import signature_of
from fast.backends.repeated_launches import Launches, launch
from reference.interfaces import AttentionState, ScheduleCosts

from ..support.backends import registered
from ..support.factories import DIRECT, make_batch, make_cache, make_entries, make_layer, make_weights, new_cache


def decode_inputs(dtype=torch.float32):
    batch = make_batch([1, 1], [20, 33])
    cache = new_cache(batch, DIRECT.head_size, dtype)
    queries = (torch.randn(2, 3, width).to(dtype) for width in (DIRECT.kv_lora_rank, DIRECT.qk_rope_head_dim))
    return (*queries, cache, fast.build_mla_metadata(batch.common, 16, 64).decode, 0.3)


@pytest.fixture
def selections(monkeypatch):
    """Return a list to which every choice of a backend appends the name of its op."""
    chosen, right = [], backends.select
    monkeypatch.setattr(backends, "select", lambda request, *given: chosen.append(request.op) or right(request, *given))
    return chosen


def test_a_second_call_is_not_checked_again(selections):
    """A second call with the same signature chooses no backend, and gives the same bits as a call that is checked."""
    inputs = decode_inputs()
    first, second = (fast.mla_decode(*inputs) for _ in range(2))
    assert selections == ["mla_decode"]
    with backends.check_every_call():
        third = fast.mla_decode(*inputs)
    assert selections == ["mla_decode"] * 2
    for state in (second, third):
        assert state.out.equal(first.out) and state.lse.equal(first.lse)
    fast.mla_decode(*decode_inputs(torch.float64))
    assert selections == ["mla_decode"] * 3


def test_bad_input_after_good_input(plain_errors):
    """After a valid call, an invalid call is refused, because it has another signature and is checked.

    The values of CPU tensors do not belong to the signature. They are checked in every call.
    """
    q, q_pe, cache, plan, scale = decode_inputs()
    fast.mla_decode(q, q_pe, cache, plan, scale)
    bad = [
        ((q.double(), q_pe, cache, plan, scale), "^q_pe: "),
        ((q[:, :, 1:], q_pe, cache, plan, scale), "^kv_cache: "),
        ((q, q_pe, cache, replace(plan, block_size=32), scale), "^metadata.block_size: "),
        ((q, q_pe, cache, replace(plan, max_query_len=True), scale), "^metadata.max_query_len: "),
        ((q, q_pe, cache, replace(plan, seq_lens=plan.seq_lens + 10_000), scale), "^metadata.seq_lens: "),
        ((q, q_pe, cache, plan, True), "^softmax_scale: "),
        ((q.to_sparse(), q_pe, cache, plan, scale), "^ql_nope: "),
    ]
    for arguments, message in bad:
        with pytest.raises((TypeError, ValueError), match=message):
            fast.mla_decode(*arguments)
    plan.seq_lens[0] = -1  # changed in place: the signature stays the same
    with pytest.raises(ValueError, match="^metadata.seq_lens: expected lengths >= 0"):
        fast.mla_decode(q, q_pe, cache, plan, scale)


def test_overlap_is_checked_in_every_call(plain_errors):
    """A call whose `out` overlaps an input is refused even after a valid call with the same signature."""
    q, q_pe, cache, plan, scale = decode_inputs()
    fast.mla_decode(q, q_pe, cache, plan, scale, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="^out: "):
        fast.mla_decode(q, q_pe, cache, plan, scale, out=q)


def test_another_backend_is_chosen_again():
    """After a new backend is registered, the next call chooses a backend again, even if its signature is known."""
    state = AttentionState(torch.randn(2, 3, 4), torch.randn(3, 2))
    fast.merge_attn_states(state, state)
    zeros = AttentionState(torch.zeros(2, 3, 4), torch.zeros(3, 2))
    late = Backend("late", 50, "cpu", {"merge_attn_states": OpSupport(lambda *_: tuple(zeros))})
    with registered(late):
        assert fast.merge_attn_states(state, state).out.equal(zeros.out)
    assert not fast.merge_attn_states(state, state).out.equal(zeros.out)


def test_the_dispatcher_sees_what_only_it_can_serve():
    """A call that torch's dispatcher must see goes through the dispatcher; every other call is launched directly.

    The dispatcher must see two groups of calls. Calls of the first group have an unusual tensor: a tensor with
    gradients, a negated view or a meta tensor. Calls of the second group run under a profiler or a dispatch mode. Calls
    with a plain mapping as `backend`, or under `check_every_call`, are launched directly, but are checked every time.
    """
    calls = checked_calls.CheckedCalls(lambda *_: "dispatched", lambda *_: "launched")

    def way(*arguments):
        return calls.run(calls.signature(*arguments), "cpu", *arguments)

    x = torch.randn(4)
    assert way(x) == "launched"
    assert way(x.clone().requires_grad_()) == "dispatched"
    with torch.no_grad():
        assert way(x.clone().requires_grad_()) == "launched"
    assert way(torch.complex(x, x).conj().imag) == "dispatched"
    assert way(x, {"mla_decode": "cpu"}) == way(x, backends.bind("cpu")) == "launched"
    assert calls.signature(x, {"mla_decode": "cpu"}) is None is not calls.signature(x, backends.bind("cpu"))
    assert way(torch.empty(4, device="meta")) == "dispatched"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert way(x) == "dispatched"
    with backends.check_every_call():
        assert calls.signature(x) is None and way(x) == "launched"
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert way(x) == "dispatched"


def test_number_of_kept_signatures(monkeypatch):
    """If more than MOST_SIGNATURES signatures were seen, the oldest signatures are forgotten."""
    monkeypatch.setattr(checked_calls, "MOST_SIGNATURES", 3)
    calls = checked_calls.CheckedCalls(lambda *_: None, lambda *_: None)
    signatures = [calls.signature(torch.zeros(size)) for size in range(5)]
    for size, signature in enumerate(signatures):
        calls.run(signature, "cpu", torch.zeros(size))
    assert [calls.backend_of(signature) for signature in signatures] == [None, None, "cpu", "cpu", "cpu"]


def test_a_plan_is_not_kept_alive():
    """A stored signature keeps neither tensors nor the plan of its call alive."""
    inputs = decode_inputs()
    fast.mla_decode(*inputs)
    kept = [weakref.ref(each) for each in inputs[:4]]
    del inputs
    gc.collect()
    assert [each() for each in kept] == [None] * 4


def test_a_write_counts_as_a_change():
    """An op that writes a tensor increases the tensor's version, also in a call that skips torch's dispatcher."""
    batch = make_batch([1, 1], [20, 33])
    cache = new_cache(batch, DIRECT.head_size, torch.float32)
    arguments = torch.zeros(2, DIRECT.kv_lora_rank), torch.zeros(2, DIRECT.qk_rope_head_dim), cache
    versions = [cache._version]
    for _ in range(2):
        fast.concat_and_cache_mla(*arguments, batch.common.slot_mapping)
        versions.append(cache._version)
    assert versions[0] < versions[1] < versions[2]


def test_layer_that_checks_every_call(selections):
    """With `check_every_call`, the ops of a layer choose backends in every call; without it, only in the first call."""
    batch = make_batch([1, 1], [20, 33])
    weights, plan = make_weights(DIRECT, torch.float32), fast.build_mla_metadata(batch.common, 16, 64)
    x, positions = torch.randn(2, DIRECT.hidden_size), torch.tensor([19, 32])
    outputs, numbers = [], []
    for wanted in (False, True):
        layer = make_layer(fast, DIRECT, weights, torch.float32, check_every_call=wanted)
        torch.manual_seed(0)
        entries = make_entries(batch, DIRECT.head_size, torch.float32)
        for _ in range(2):
            selections.clear()
            outputs.append(layer(x, positions, make_cache(batch, entries, DIRECT.head_size, torch.float32), plan))
            numbers.append(len(selections))
    assert numbers[0] == numbers[2] == numbers[3] > 0 == numbers[1]
    assert all(output.equal(outputs[0]) for output in outputs)


class FakeKernel:
    """A fake Triton kernel that counts searches for a compiled kernel, and records launches."""

    arg_names = ("pointer", "number", "WIDTH")

    def __init__(self):
        self.searches, self.launches = 0, []
        self.packed_metadata = ()

    def __getitem__(self, grid):
        def search(*arguments, **constants):
            self.searches += 1
            self.launches.append((grid, arguments, constants))
            return Compiled(self)

        return search


class Compiled:
    packed_metadata = ()

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launches.append((grid, arguments, None))


def test_repeated_launches():
    """A second call launches the compiled kernels of the first call, but with its own new grids and arguments."""
    kernel, launches = FakeKernel(), Launches()

    def call(first, second):
        launch(kernel, (first,), "a", first, WIDTH=4, num_warps=2)
        launch(kernel, (second, 2), "b", second, WIDTH=8)

    launches.run(call, 1, 2)
    launches.run(call, 3, 4)
    assert kernel.searches == 2
    assert kernel.launches[2:] == [((3, 1, 1), ("a", 3, 4), None), ((4, 2, 1), ("b", 4, 8), None)]
    call(5, 6)  # outside of `launches.run`, each launch searches for its compiled kernel
    assert kernel.searches == 4


def test_a_check_runs_once_for_each_signature():
    """A check that passed is not repeated for the same signature; a check that failed is repeated.

    Another shape or another plan object gives another signature.
    """
    seen = []

    def refuse_long(x, plan):
        seen.append(x.shape[0])
        if x.shape[0] > 4:
            raise ValueError("x: expected at most 4 rows")
        return x.shape[0]

    check, plan = backends.CheckedOnce(refuse_long), decode_inputs()[3]
    assert [check(torch.zeros(rows), plan) for rows in (3, 3, 4, 3)] == [3, 3, 4, 3] and seen == [3, 4]
    for _ in range(2):
        with pytest.raises(ValueError, match="^x: expected at most 4 rows$"):
            check(torch.zeros(5), plan)
    check(torch.zeros(3), replace(plan))  # equal fields, but another plan
    assert seen == [3, 4, 5, 5, 3]
    with backends.check_every_call():
        check(torch.zeros(3), plan)
    checked_calls.forget_calls()
    check(torch.zeros(3), plan)
    assert seen == [3, 4, 5, 5, 3, 3, 3]


def test_a_checked_plan_is_not_kept_alive():
    """`CheckedOnce` keeps neither tensors nor plans alive."""
    check, (q, _, _, plan, _) = backends.CheckedOnce(lambda *_: None), decode_inputs()
    check(q, plan)
    kept = weakref.ref(q), weakref.ref(plan)
    del q, plan, _
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_a_layer_checks_bad_input_after_good_input(plain_errors):
    """A layer that accepted a step refuses a later step with invalid arguments.

    The layer also refuses the accepted plan after one of its slots was changed to an invalid value.
    """
    layer = make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32)
    batch = make_batch([1, 5], [20, 33])
    cache = torch.zeros(batch.num_blocks, 16, DIRECT.head_size)
    hidden, positions = torch.randn(6, DIRECT.hidden_size), torch.arange(6)
    plan = fast.build_mla_metadata(batch.common, 16, 64)
    for _ in range(2):
        layer(hidden, positions, cache, plan)
    for given, message in (
        ((hidden[:5], positions[:5], cache, plan), "^metadata: "),
        ((hidden, positions[:5], cache, plan), "^positions: "),
        ((hidden, positions, cache[:, :8], plan), "^metadata.decode.block_size: "),
        ((hidden, positions, cache, replace(plan, num_decodes=2)), "^metadata.num_decodes: "),
        ((hidden, positions, cache.double(), plan), "^kv_cache: "),
    ):
        with pytest.raises(ValueError, match=message):
            layer(*given)
    plan.slot_mapping[0] = 10_000
    with pytest.raises(ValueError, match="^metadata.slot_mapping: "):
        layer(hidden, positions, cache, plan)


def test_equal_configs_share_signatures(monkeypatch):
    """A new `ScheduleCosts` object with equal values counts as the same argument.

    At most MOST_CONFIGS objects are remembered. A further object makes `fast` forget all calls, so a check runs again.
    """
    monkeypatch.setattr(signatures, "MOST_CONFIGS", 5)
    seen = []
    check = backends.CheckedOnce(lambda costs: seen.append(costs.request_cost))
    for _ in range(20):
        check(ScheduleCosts(request_cost=3))
    assert 1 <= len(seen) <= 20 // 5 + 1
    check(ScheduleCosts(request_cost=4))
    assert seen[-1] == 4


def test_signatures_of_plans(monkeypatch):
    """Plans with equal shapes and numbers have equal signatures; a plan with another number or shape has another one.

    At most MOST_RECORDS signatures of plans are remembered. A plan whose signature was dropped keeps its own.
    """
    monkeypatch.setattr(signatures, "MOST_RECORDS", 4)
    monkeypatch.setattr(signatures, "_RECORD_TOKENS", {})
    plans = [decode_inputs()[3] for _ in range(2)]
    one, same = (signature_of((plan,)) for plan in plans)
    assert one == same
    others = [replace(plans[0], max_seq_len=plans[0].max_seq_len + number) for number in range(1, 9)]
    found = {signature_of((plan,)) for plan in others} | {one}
    assert len(found) == 9 and len(signatures._RECORD_TOKENS) == 4
    assert signature_of((plans[0],)) == one
    assert signature_of((replace(plans[0], block_table=plans[0].block_table[:, :-1]),)) not in found


def test_a_freed_plan_leaves_no_token():
    """The token that stands for a plan is forgotten with the plan, so that a new plan at its address gets another."""
    before, tokens = set(signatures._TOKENS), set()
    for _ in range(20):
        plan = decode_inputs()[3]
        tokens.add(signatures.identity_of((plan,)))
        assert len(set(signatures._TOKENS) - before) == 1
        del plan
        gc.collect()
        assert set(signatures._TOKENS) <= before
    assert len(tokens) == 20


def test_prepared_tensors_are_in_the_signature():
    """Take plans with other prepared tensors -> equal signatures for equal shapes and dtypes, and not by identity."""
    one, same = (signature_of(((torch.zeros(3), torch.zeros(2)),)) for _ in range(2))
    assert one == same
    for other in ((torch.zeros(4), torch.zeros(2)), (torch.zeros(3).int(), torch.zeros(2)), (torch.zeros(3),)):
        assert signature_of((other,)) != one
    assert signature_of(((1, 2),)) == signature_of(((1, 2),)) != signature_of(((1, 3),))

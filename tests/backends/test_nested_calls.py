"""Tests of repeated calls of a function that itself calls ops of `fast`, such as the forward of a layer.

The *signature* of a call consists of everything that checks read: shapes, strides and dtypes of tensors, and all other
arguments. The first call of a function makes *notes*: a list of its inner calls in their order, with the outcomes of
their checks. A later call of the function with the same signature *follows* these notes: its inner calls compute no
signatures and skip their checks.
"""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends import checked_calls
from fast.backends.checked_calls import CallsInside, CheckedOnce, confirm
from fast.backends.nested_calls import PER_THREAD
from reference.interfaces import ContextWorkspace

from ..support.backends import registered
from ..support.factories import DIRECT, LOW_RANK, make_batch, make_layer, make_weights, new_cache


@pytest.fixture
def signatures(monkeypatch):
    """Return a list to which each computation of a signature appends the arguments of the call."""
    computed, right = [], checked_calls.signature_of
    monkeypatch.setattr(checked_calls, "signature_of", lambda given: computed.append(given) or right(given))
    return computed


class Step:
    """A layer with a mixed batch: two decodes, a prefill with context, and a prefill without context.

    Attributes:
        layer: the layer.
        plan: plan of the batch.
        cache: cache before the step.
        inputs: hidden states and positions.
    """

    def __init__(self, config=DIRECT, **options):
        query_lens, lens = [1, 1, 5, 4], [20, 33, 45, 4]
        batch = make_batch(query_lens, lens)
        self.layer = make_layer(fast, config, make_weights(config, torch.float64), torch.float64, **options)
        self.plan = fast.build_mla_metadata(batch.common, 16, 32)
        self.cache = new_cache(batch, config.head_size, torch.float64)
        positions = [torch.arange(end - count, end) for count, end in zip(query_lens, lens, strict=True)]
        hidden_states = torch.randn(sum(query_lens), config.hidden_size, dtype=torch.float64)
        self.inputs = hidden_states, torch.cat(positions)

    def __call__(self):
        return self.layer(*self.inputs, self.cache.clone(), self.plan)


class Wrapped(torch.nn.Module):
    """A module that calls the projection `right` and changes its output with the function `change`."""

    def __init__(self, right, change):
        super().__init__()
        self.right, self.change = [right], change

    def forward(self, x):
        """Return the changed output."""
        return self.change(self.right[0](x))


def checked(step):
    """Return the output of a step in which every call is checked."""
    with backends.check_every_call():
        return step()


def test_a_later_step_computes_no_signature_inside(signatures):
    """Later steps with the same plan object follow the notes of the first step, and give the same output.

    A step with another plan object, even with equal fields, computes signatures again.
    """
    step = Step()
    first = step()
    assert len(signatures) > 5
    signatures.clear()
    for _ in range(3):
        assert step().equal(first)
    assert signatures == []
    assert checked(step).equal(first)
    step.plan = replace(step.plan)  # an engine makes a new plan for each step
    assert step().equal(first)
    assert signatures


def test_forward_attention_and_forward_prefill(signatures):
    """`forward_attention` and `forward_prefill`, called directly, make and follow notes too."""
    step = Step()
    q, kv_c, k_pe = step.layer.project(*step.inputs)
    w_uk, w_uv = step.layer.up_projections()
    split, end = step.plan.num_decode_tokens, step.plan.num_actual_tokens
    output = q.new_empty(q.shape[0], DIRECT.num_heads, DIRECT.v_head_dim)
    cache = step.cache.clone()

    def attend():
        step.layer.forward_attention(q, kv_c, k_pe, cache, step.plan, output.zero_())
        return output.clone()

    def prefill():
        given = (x[split:end] for x in (q, kv_c, k_pe))
        return fast.forward_prefill(*given, cache, step.plan.prefill, w_uk, w_uv, 0.3, return_lse=False)

    for call in (attend, prefill):
        first = call()
        signatures.clear()
        assert call().equal(first) and call().equal(first)
        assert signatures == []


def test_an_output_of_a_projection_may_change(plain_errors):
    """If a projection returns another dtype, shape or strides, the step does not follow the notes.

    The checks then run again: they accept other strides, and refuse another dtype or shape.
    """
    step = Step()
    first = step()
    right = step.layer.kv_a_proj_with_mqa

    step()
    step.layer.kv_a_proj_with_mqa = Wrapped(right, lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]])
    assert step().equal(first)  # other strides
    step.layer.kv_a_proj_with_mqa = Wrapped(right, torch.Tensor.float)
    with pytest.raises(ValueError, match=r"^kv_c_normed: expected dtype torch.float64"):
        step()
    step.layer.kv_a_proj_with_mqa = Wrapped(right, lambda x: x[:-1])
    with pytest.raises(ValueError, match=r"^(kv_c_normed|k_pe|q): "):
        step()
    step.layer.kv_a_proj_with_mqa = right
    assert step().equal(first)
    assert PER_THREAD.order is None


def test_calls_of_a_projection_are_checked(plain_errors):
    """Calls of `fast` in a user's projection are checked in every step, because their arguments can differ."""
    step = Step()
    right, extra = step.layer.kv_a_proj_with_mqa, []

    class Normed(torch.nn.Module):
        def forward(self, x):
            for width in extra:
                fast.rms_norm(x, torch.ones(width, dtype=x.dtype), 1e-6)
            return right(x)

    step.layer.kv_a_proj_with_mqa = Normed()
    extra.append(DIRECT.hidden_size)
    first = step()
    assert step().equal(first)
    extra.append(DIRECT.hidden_size)
    assert step().equal(first)
    extra[1] = 3
    with pytest.raises(ValueError, match="^weight: "):
        step()
    extra.clear()
    assert step().equal(first)


def test_values_are_checked_in_every_step(plain_errors):
    """Values of CPU tensors are checked in every step, also in a step that follows notes.

    After a refused step, the next valid step gives the right output.
    """
    step = Step()
    first = step()
    step()
    kept = step.plan.decode.seq_lens.clone()
    step.plan.decode.seq_lens[0] = -1
    with pytest.raises(ValueError, match=r"^metadata.seq_lens: expected lengths >= 0"):
        step()
    assert PER_THREAD.order is None
    step.plan.decode.seq_lens.copy_(kept)
    assert step().equal(first)


def test_bad_input_after_good_input(plain_errors):
    """After valid steps, a step with another shape or dtype of an argument is checked, and refused if invalid."""
    step = Step()
    step()
    step()
    hidden_states, positions = step.inputs
    for inputs, cache, message in (
        ((hidden_states.float(), positions), step.cache, "^hidden_states: "),
        ((hidden_states, positions[:-1]), step.cache, "^positions: "),
        ((hidden_states, positions), step.cache.float(), "^kv_cache: "),
        ((hidden_states, positions), step.cache[:, :8], "^metadata.decode.block_size: "),
    ):
        with pytest.raises(ValueError, match=message):
            step.layer(*inputs, cache, step.plan)


def test_a_workspace_may_be_replaced():
    """A step gives the right output after the memory of the workspace was replaced by memory with another alignment."""
    memory = torch.zeros(1 << 20, dtype=torch.float64)
    step = Step(workspace=ContextWorkspace(memory))
    first = step()
    step()
    step.layer.workspace.memory = memory[1:]  # another alignment
    torch.testing.assert_close(step(), first)


def test_weights_may_change():
    """A layer uses the current weights after they were changed in place, replaced or converted.

    The layer keeps views of its weights. After a conversion of the layer, the old memory is freed.
    """
    step = Step()
    first = step()
    step()
    up, norm = step.layer.kv_b_proj, step.layer.kv_a_layernorm
    old = up.weight.data.clone()
    changes = (
        lambda: up.weight.data.mul_(2),
        lambda: setattr(up.weight, "data", old * 3),
        lambda: setattr(up, "weight", torch.nn.Parameter(old * 4)),
        lambda: norm.weight.data.mul_(2),
        lambda: setattr(norm, "weight", torch.nn.Parameter(norm.weight.data * 2)),
        lambda: setattr(up.weight, "data", up.weight.data.as_strided(up.weight.shape, (1, up.weight.shape[0]))),
        lambda: step.layer.double(),
    )
    with torch.no_grad():
        for change in changes:
            change()
            output = step()
            assert not output.equal(first)
            assert output.equal(checked(step)) and output.equal(step())
    kept = weakref.ref(up.weight.data.untyped_storage())
    step.layer.to(torch.float32)
    gc.collect()
    assert step.layer._weight_views._kept is None and kept() is None


def test_modules_may_be_replaced(plain_errors):
    """A layer uses its current projections and its current query norm after they were replaced.

    A query norm of a wrong width is refused, although notes exist.
    """
    step = Step(LOW_RANK)
    layer, seen = step.layer, [step(), step()]
    assert seen[0].equal(seen[1])
    norm, low, up, out = layer.q_a_layernorm, layer.q_a_proj, layer.q_b_proj, layer.o_proj
    half = torch.nn.RMSNorm(norm.weight.shape[0], dtype=torch.float64)
    half.weight.data.copy_(norm.weight.data / 2)
    with torch.no_grad():
        for change in (
            lambda: setattr(norm, "weight", torch.nn.Parameter(norm.weight.data * 2)),
            lambda: norm.weight.data.mul_(2),
            lambda: setattr(layer, "q_a_layernorm", half),
            lambda: setattr(layer, "q_a_proj", Wrapped(low, lambda x: x.flip(0))),
            lambda: setattr(layer, "q_b_proj", Wrapped(up, lambda x: 2 * x)),
            lambda: setattr(layer, "o_proj", Wrapped(out, lambda x: 3 * x)),
        ):
            change()
            output = step()
            assert not any(output.equal(each) for each in seen)
            assert output.equal(checked(step)) and output.equal(step())
            seen.append(output)
    half.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="^weight: "):
        step()
    half.weight = torch.nn.Parameter(norm.weight.data / 8)
    assert step().equal(seen[-1])


def test_settings_of_a_layer_may_change(plain_errors):
    """A changed `workspace_tokens` or `backend` of a layer takes effect in the next step, although notes exist."""
    step = Step()
    first = step()
    step()
    step.layer.workspace_tokens = 1
    with pytest.raises(ValueError, match="chunks of at most 1 tokens"):
        step()
    step.layer.workspace_tokens = 1 << 16
    step.layer.backend = backends.bind("triton")
    with pytest.raises(fast.UnsupportedConfiguration, match="triton: serves device cuda"):
        step()
    step.layer.backend = None
    assert step().equal(first)


def test_copies_have_no_views():
    """A deep copy of a layer keeps no views of the original's weights, but makes views of its own weights."""
    step = Step()
    first = step()
    twin = copy.deepcopy(step.layer)
    assert twin._weight_views._kept is None
    step.layer = twin
    assert step().equal(first)
    assert twin._weight_views._kept.w_uk.untyped_storage().data_ptr() == twin.kv_b_proj.weight.data_ptr()


def test_subclasses_and_autocast_make_no_notes():
    """A step whose projection returns a subclass of `Tensor` follows no notes, and a call under autocast follows none.

    Autocast changes the dtypes of products inside `forward_prefill`, so a check refuses the call of `forward_prefill`.
    """
    step = Step()
    first = step()

    class Marked(torch.Tensor):
        pass

    right = step.layer.kv_a_proj_with_mqa
    step.layer.kv_a_proj_with_mqa = Wrapped(right, lambda x: x.as_subclass(Marked))
    for _ in range(4):
        assert torch.equal(step().as_subclass(torch.Tensor), first)
    step.layer.kv_a_proj_with_mqa = right
    step.layer.float()
    single = tuple(x.float() if x.is_floating_point() else x for x in step.inputs)
    for _ in range(2):
        step.layer(*single, step.cache.float(), step.plan)
    w_uk, w_uv = step.layer.up_projections()
    split, end = step.plan.num_decode_tokens, step.plan.num_actual_tokens
    q, kv_c, k_pe = (x[split:end] for x in step.layer.project(*single))

    def prefill():
        return fast.forward_prefill(
            q, kv_c, k_pe, step.cache.float(), step.plan.prefill, w_uk, w_uv, 0.3, return_lse=False
        )

    prefill()
    prefill()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="^k_nope: expected dtype"):
        prefill()


def test_outputs_of_other_backends_are_compared(plain_errors):
    """A step raises if the launcher of a registered backend returns another dtype than in the first step."""
    changes: list[torch.dtype] = []

    def decode(*arguments):
        out, lse = fast.backends.kernel("cpu", "mla_decode")(*arguments)
        return out, lse.to(changes[0]) if changes else lse

    support = backends.OpSupport(decode)
    with registered(backends.Backend("mine", 0, "cpu", {"mla_decode": support})):
        batch = make_batch([1, 1], [40, 37])
        layer = make_layer(
            fast, DIRECT, make_weights(DIRECT, torch.float64), torch.float64, backend={"mla_decode": "mine"}
        )
        plan = fast.build_mla_metadata(batch.common, 16, 64)
        plan = replace(plan, cascade=fast.split_shared_prefix(plan.decode, 16, 16))
        cache = new_cache(batch, DIRECT.head_size, torch.float64)
        inputs = torch.randn(2, DIRECT.hidden_size, dtype=torch.float64), torch.tensor([39, 36])
        for _ in range(3):
            layer(*inputs, cache, plan)
        changes.append(torch.float32)
        with pytest.raises(ValueError, match="mine for mla_decode: lse: expected dtype torch.float64"):
            layer(*inputs, cache, plan)


def test_a_new_backend_ends_the_notes(signatures):
    """Registration of a backend calls `forget_calls`, which also drops the notes, because notes name backends."""
    step = Step()
    first = step()
    step()
    checked_calls.forget_calls()
    signatures.clear()
    assert step().equal(first)
    assert signatures


def test_another_order_of_calls():
    """If the inner calls of a function come in another order than in its notes, every call still gets its own result.

    The notes are dropped, and the next call of the function makes new notes.
    """
    inside, x = CallsInside(), torch.zeros(3)
    ran: list[str] = []
    first, second = (CheckedOnce(lambda *_, name=name: ran.append(name) or name) for name in ("first", "second"))

    def call(order):
        with inside.given(x):
            return [check(x) for check in order]

    assert call((first, second)) == ["first", "second"]
    assert call((first, second)) == ["first", "second"]
    assert call((second, first)) == ["second", "first"]  # must not return the result of `first` for `second`
    assert inside._orders == {}
    assert call((second, first)) == ["second", "first"]
    (entries,) = inside._orders.values()
    assert [entry.owner for entry in entries] == [second, first]
    assert ran == ["first", "second"]
    assert call((second, first, first)) == ["second", "first", "first"]  # more calls than notes
    assert inside._orders == {}


def test_functions_inside_each_other():
    """If a function with notes calls another function with notes, only the outer function keeps notes.

    The notes of the outer function contain the inner calls of both functions.
    """
    outer, inner, x = CallsInside(), CallsInside(), torch.zeros(3)
    check = CheckedOnce(lambda *_: 7)

    def call():
        with outer.given(x):
            confirm(x)
            with inner.given(x):
                return check(x)

    assert [call(), call()] == [7, 7]
    assert inner._orders == {}
    (entries,) = outer._orders.values()
    assert len(entries) == 2


def test_no_notes_of_a_call_that_is_checked_in_full():
    """A call makes no notes if it raises, runs under `check_every_call`, or has an argument without a signature."""
    inside, x = CallsInside(), torch.zeros(3)
    check = CheckedOnce(lambda *_: 7)

    def fail():
        with inside.given(x):
            check(x)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with backends.check_every_call(), inside.given(x):
        check(x)
    with inside.given(x), backends.check_every_call():
        check(x)
    with inside.given(x):
        check({})  # an argument without a signature
    assert PER_THREAD.order is None
    assert all(not entries for entries in inside._orders.values())
    for changed in (x[1:], torch.nn.Parameter(x).t()):
        with inside.given(x):
            confirm(changed)
    assert len(inside._orders) <= 1

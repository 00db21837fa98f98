"""Tests of kept calls: later calls with one signature go straight to a function that a backend has made for them.

The backend of these tests computes with the reference, and raises an error if a function gets tensors other than those
for which it was made.
"""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.attention.varlen import flash_attn_varlen_shared_rope
from fast.backends import Backend, OpSupport, checked_calls, signatures
from fast.backends.adapters import flashinfer
from fast.backends.kept_calls import KeptCall
from reference.interfaces import AttentionState, ContextChunk, PrefillMetadata

from ..support.backends import registered
from ..support.factories import offsets

NEW, KEYS = (4, 1), (6, 3)  # new tokens of two requests, and the keys of their context
LENS, SCALE, OP = (*NEW, *KEYS), 0.3, "flash_attn_varlen"


def attention(q, k, k_pe, v, starts_q, starts_k, longest_q, longest_k, scale, causal, out_dtype, out=None, lse=None):
    """Serve as the launcher of the backend: compute attention with the reference."""
    if k_pe is not None:
        k = torch.cat((k, k_pe[:, None].expand(-1, k.shape[1], -1)), dim=-1)
    k, v = k[: starts_k[-1]], v[: starts_k[-1]]
    state = reference.flash_attn_varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, scale, causal, out_dtype)
    if out is None:
        return state.out, state.lse
    out.data.copy_(state.out)  # as a kernel writes: PyTorch does not see the change
    return out, None if lse is None else lse.copy_(state.lse)


def properties(arguments):
    """Return what all calls of a kept function must have in common."""
    return [
        (each.shape, each.stride(), each.dtype, each.device, each.data_ptr() % 16)
        if isinstance(each, torch.Tensor)
        else each
        for each in arguments
    ]


class Toy:
    """The launcher and the kept functions of a backend, with the number of their calls."""

    def __init__(self, compute=attention, later=attention):
        self.compute, self.later, self.launched, self.made, self.kept = compute, later, 0, 0, 0

    def launch(self, *arguments):
        self.launched += 1
        return self.compute(*arguments)

    def keep(self, *first):
        self.made += 1
        wanted = properties(first)

        def again(*arguments):
            self.kept += 1
            found = properties(arguments)
            assert found == wanted, f"made for {wanted}, called with {found}"
            return self.later(*arguments)

        return again

    def backend(self, name="toy", priority=-50, **declared):
        support = OpSupport(self.launch, kept_call=self.keep, masks=("causal",), **declared)
        return Backend(name, priority, "cpu", {OP: support})

    @property
    def counts(self):
        return self.launched, self.made, self.kept


@pytest.fixture
def toy():
    """Return a registered backend."""
    found = Toy()
    with registered(found.backend()):
        yield found


def plan():
    """Return the plan of a prefill with one chunk of context, and this chunk."""
    starts, keys = offsets(NEW), offsets(KEYS)
    chunk = ContextChunk(torch.zeros(2, dtype=torch.int32), keys, max(KEYS), sum(KEYS))
    table = torch.zeros(2, 1, dtype=torch.int32)
    return PrefillMetadata(table, starts, max(NEW), (chunk,), 16), chunk


def tensors(keys, dtype=torch.float32):
    """Return queries, keys without rope, rope parts and values."""
    shapes = (sum(NEW), 2, 24), (keys, 2, 16), (keys, 8), (keys, 2, 16)
    return [torch.randn(*shape, dtype=torch.float32).to(dtype) for shape in shapes]


def calls():
    """Return the public functions that run the op: name, number of keys, and a function of the four tensors."""
    metadata, chunk = plan()
    starts, keys = offsets(NEW), offsets(KEYS)
    return {
        "new tokens": (sum(NEW), lambda *x, **o: fast.run_prefill_new_tokens(*x, metadata, SCALE, backend="toy", **o)),
        "without LSE": (sum(NEW), lambda *x, **o: fast.run_prefill_new_tokens(
            *x, metadata, SCALE, return_lse=False, backend="toy", **o)),
        "context": (sum(KEYS), lambda *x: fast.run_prefill_context_chunk(
            *x, metadata, chunk, SCALE, backend="toy")),
        "two parts": (sum(KEYS), lambda *x, **o: flash_attn_varlen_shared_rope(
            *x, starts, keys, max(NEW), max(KEYS), SCALE, False, backend="toy", **o)),
        "whole keys": (sum(KEYS), lambda q, k, _, v: fast.flash_attn_varlen(
            q, k.repeat(1, 1, 2)[..., :24], v, starts, keys, max(NEW), max(KEYS), SCALE, True, backend="toy")),
    }  # fmt: skip


def parts_of(result):
    return (result.out, result.lse) if isinstance(result, AttentionState) else (result,)


def new_tokens(given, **options):
    return fast.run_prefill_new_tokens(*given, plan()[0], SCALE, backend="toy", **options)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", calls())
def test_later_calls_take_the_kept_function(name, whole):
    """Call twice more, with other values in new tensors -> no launcher, and the bits of a call that is checked."""
    toy, (keys, call) = Toy(), calls()[name]
    with registered(toy.backend(whole_keys=whole)):
        for number in range(3):
            given = tensors(keys)
            found = parts_of(call(*given))
            assert toy.counts == (1, 1, number)
            with backends.check_every_call():
                wanted = parts_of(call(*given))
            toy.launched -= 1
            assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", ["new tokens", "without LSE", "two parts"])
def test_given_output(name, toy):
    """Give `out` with padding between its rows -> each call writes into it, counts as a change, and leaves the rest."""
    keys, call = calls()[name]
    for number in range(3):
        given, memory = tensors(keys), torch.full((sum(NEW), 2, 20), torch.nan)
        out = memory[..., :16]
        version = out._version
        found = parts_of(call(*given, out=out))
        assert found[0] is out and out._version > version and memory[..., 16:].isnan().all()
        with backends.check_every_call():
            assert torch.equal(parts_of(call(*given))[0], out)
        assert toy.counts == (2 + number, 1, number)


@pytest.mark.parametrize("name", ["dtype", "heads", "strides", "address", "scale", "out", "its strides", "mask"])
def test_another_signature_makes_a_new_decision(name, toy):
    """Change one property of a known call -> the launcher, and a function of its own; the first function stays."""
    given, keys = tensors(sum(NEW)), offsets(NEW)

    def call(given, scale=SCALE, causal=True, **options):
        options = {"return_lse": False} | options
        return flash_attn_varlen_shared_rope(
            *given, keys, keys, max(NEW), max(NEW), scale, causal, backend="toy", **options
        )

    def changed():
        q, k, k_pe, v = given
        if name == "dtype":
            return call([each.double() for each in given])
        if name == "heads":
            return call([q[:, :1].contiguous(), k[:, :1].contiguous(), k_pe, v[:, :1].contiguous()])
        if name == "strides":
            return call([q.transpose(0, 1).contiguous().transpose(0, 1), k, k_pe, v])
        if name == "address":
            moved = torch.empty(v.numel() + 1)[1:].view(v.shape).copy_(v)
            assert moved.data_ptr() % 16
            return call([q, k, k_pe, moved])
        out = torch.empty(sum(NEW), 2, 32)[..., ::2] if name == "its strides" else torch.empty(sum(NEW), 2, 16)
        options = {"scale": {"scale": 0.4}, "mask": {"causal": False}}.get(name, {"out": out})
        return call(given, **options)

    first = call(given)
    assert torch.equal(call(given), first) and toy.counts == (1, 1, 1)
    found = changed()
    assert toy.counts == (2, 2, 1)
    assert torch.equal(changed(), found) and toy.counts == (2, 2, 2)
    assert torch.equal(call(given), first) and toy.counts == (2, 2, 3)
    with backends.check_every_call():
        assert torch.equal(changed(), found)


def test_device_and_gradients_are_in_the_signature(toy):
    x = tensors(3)[0]
    assert signatures.part_of(x) != signatures.part_of(x.to("meta"))
    given = tensors(sum(NEW))
    first, _ = new_tokens(given), new_tokens(given)
    assert toy.counts == (1, 1, 1)
    given[0].requires_grad_()
    assert torch.equal(new_tokens(given).out, first.out)
    assert toy.counts == (2, 1, 1)  # torch's dispatcher serves the call
    with torch.no_grad():
        new_tokens(given)
    assert toy.counts == (3, 2, 1)


def test_calls_that_are_never_kept(toy):
    """Check every call, use autocast, or pass a plain mapping -> the launcher serves a known call."""
    given, (metadata, _) = tensors(sum(NEW)), plan()

    def call(backend="toy"):
        return fast.run_prefill_new_tokens(*given, metadata, SCALE, backend=backend)

    call(), call()
    assert toy.counts == (1, 1, 1)
    with backends.check_every_call():
        call()
    call({OP: "toy"})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        call()
    assert toy.counts == (4, 1, 1)


def test_bad_input(toy, plain_errors):
    """Make bad calls before and after good calls -> the same one line both times."""
    given, (metadata, _) = tensors(sum(NEW)), plan()
    q, k, k_pe, v = given
    wrong_plan = replace(metadata, max_query_len=True)
    bad = [
        ("k_pe", (q.double(), k, k_pe, v, metadata, SCALE), {}),
        ("k_nope", (q[:, :1], k, k_pe, v, metadata, SCALE), {}),
        ("k_nope", (q, k, k_pe[:3], v, metadata, SCALE), {}),
        ("softmax_scale", (q, k, k_pe, v, metadata, True), {}),
        ("return_lse", (q, k, k_pe, v, metadata, SCALE), {"return_lse": 1}),
        ("out", (q, k, k_pe, v, metadata, SCALE), {"return_lse": False, "out": v}),
        ("out", (q, k, k_pe, v, metadata, SCALE), {"return_lse": False, "out": q[..., :16]}),
        ("out", (q, k, k_pe, v, metadata, SCALE), {"return_lse": False, "out": torch.empty(3, 2, 16)}),
        ("metadata.max_query_len", (q, k, k_pe, v, wrong_plan, SCALE), {}),
        ("backend", (q, k, k_pe, v, metadata, SCALE), {"backend": "toi"}),
    ]

    def messages():
        for argument, arguments, options in bad:
            with pytest.raises((TypeError, ValueError)) as error:
                fast.run_prefill_new_tokens(*arguments, **({"backend": "toy"} | options))
            text = str(error.value)
            assert text.startswith(f"{argument}: expected ") and "\n" not in text
            yield text

    before = list(messages())
    for options in ({}, {"return_lse": False}, {"return_lse": False, "out": torch.empty_like(v)}):
        for _ in range(2):
            fast.run_prefill_new_tokens(*given, metadata, SCALE, **options, backend="toy")
    assert list(messages()) == before and toy.counts == (3, 3, 3)
    metadata.query_start_loc[1] = 99  # changed in place: the signature stays the same
    for options in ({}, {"return_lse": False}):
        with pytest.raises(ValueError, match="^cu_seqlens_k: "):
            fast.run_prefill_new_tokens(*given, metadata, SCALE, **options, backend="toy")


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_offsets_are_checked_in_every_call(toy, bounded, return_lse, plain_errors):
    """Change offsets in place after good calls -> the error that names them, on a CPU."""
    given, starts, keys = tensors(sum(KEYS)), offsets(NEW), offsets(KEYS)

    def call():
        return flash_attn_varlen_shared_rope(
            *given, starts, keys, max(NEW), max(KEYS), SCALE, False, bounded=bounded, return_lse=return_lse,
            backend="toy",
        )  # fmt: skip

    call(), call()
    for argument, wrong in (("cu_seqlens_q", starts), ("cu_seqlens_k", keys)):
        right = wrong.clone()
        wrong[1] = 99
        with pytest.raises(ValueError, match=f"^{argument}: "):
            call()
        wrong.copy_(right)
    call()
    assert toy.counts == (1, 1, 2)


def test_memory_that_is_freed_and_used_again(toy):
    """Free the tensors of each call before the next call -> each result belongs to the values of its own call."""
    metadata, _ = plan()
    addresses = set()
    for _ in range(5):
        given = tensors(sum(NEW))
        addresses.add(given[0].data_ptr())
        found = fast.run_prefill_new_tokens(*given, metadata, SCALE, backend="toy")
        wanted = reference.run_prefill_new_tokens(*given, metadata, SCALE)
        assert torch.equal(found.out, wanted.out) and torch.equal(found.lse, wanted.lse)
        del given, found, wanted
    assert toy.counts == (1, 1, 4)


LIES = {
    "another shape": (lambda *x: (attention(*x)[0][:, :, 1:], attention(*x)[1]), "out: expected "),
    "another dtype": (lambda *x: (attention(*x)[0].double(), attention(*x)[1]), "out: expected "),
    "no LSE": (lambda *x: (attention(*x)[0], None), "lse: expected "),
    "an LSE [T, N]": (lambda *x: (attention(*x)[0], attention(*x)[1].T), "lse: expected "),
    "nothing": (lambda *x: None, "expected a pair"),
    "a list": (lambda *x: list(attention(*x)), "expected a pair"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("later", [False, True], ids=["launcher", "kept function"])
def test_a_backend_that_lies(lie, later, plain_errors):
    """Return a wrong result from the launcher or from the kept function -> an error in the first call of it."""
    wrong, message = LIES[lie]
    toy = Toy(later=wrong) if later else Toy(compute=wrong)
    given = tensors(sum(NEW))
    with registered(toy.backend()):
        if later:
            new_tokens(given)
        for _ in range(2):  # the result of the backend stays under suspicion
            with pytest.raises((TypeError, ValueError), match=f"^the result of the backend toy for {OP}.*{message}"):
                new_tokens(given)
        assert toy.counts == ((1, 1, 2) if later else (2, 0, 0))


@pytest.mark.parametrize("wrong", ["another tensor", "nothing"])
def test_a_kept_function_that_leaves_out_alone(wrong, plain_errors):
    """Return another tensor than `out`, or nothing -> an error in the first call of the kept function."""

    def later(*arguments):
        out, lse = attention(*arguments)
        return {"another tensor": (out.clone(), lse), "nothing": None}[wrong]

    toy, given = Toy(later=later), tensors(sum(NEW))
    with registered(toy.backend()):
        options = {"return_lse": False, "out": torch.empty(sum(NEW), 2, 16)}
        new_tokens(given, **options)
        with pytest.raises((TypeError, ValueError), match="^the result of the backend toy"):
            new_tokens(given, **options)


def test_registered_backends_change(toy):
    """Register a better backend, remove it, and replace the first one -> the next call takes the right one."""
    given, better, other = tensors(sum(NEW)), Toy(), Toy()
    metadata, _ = plan()
    for _ in range(2):
        fast.run_prefill_new_tokens(*given, metadata, SCALE)  # the project's own backend
    with registered(better.backend("better", 90)):
        for _ in range(3):
            fast.run_prefill_new_tokens(*given, metadata, SCALE)
        assert better.counts == (1, 1, 2)
    fast.run_prefill_new_tokens(*given, metadata, SCALE)
    assert better.counts == (1, 1, 2)
    new_tokens(given), new_tokens(given)
    backends.unregister("toy")
    with pytest.raises(ValueError, match="^backend: "):
        new_tokens(given)
    backends.register(other.backend())
    new_tokens(given), new_tokens(given)
    assert toy.counts == (1, 1, 1) and other.counts == (1, 1, 1)


def test_a_newly_compiled_kernel_of_flashinfer(toy, monkeypatch):
    """Compile a kernel -> a known call chooses its backend again, because another backend may serve it now."""
    given = tensors(sum(NEW))
    new_tokens(given), new_tokens(given)
    module = type("Module", (), {"build_and_load": lambda self: None})()
    monkeypatch.setattr(flashinfer, "_module", lambda *_: module)
    monkeypatch.setattr(flashinfer, "kernel_of", lambda _: "fa3")
    flashinfer.compile_kernel(torch.bfloat16, 192, 128, torch.device("cpu"))
    new_tokens(given)
    assert toy.counts == (2, 2, 1)


def test_each_call_must_be_checked():
    """Return None in place of a kept function -> the launcher serves each call, and is asked for a function once."""
    toy, asked = Toy(), []
    toy.keep = lambda *_: asked.append(1)
    with registered(toy.backend()):
        for _ in range(3):
            new_tokens(tensors(sum(NEW)))
    assert toy.launched == 3 and len(asked) == 1


def test_an_output_of_the_library(plain_errors):
    """A kept function that allocates the output gets no tensor -> its own tensor is the result, without a copy."""
    made = []

    class Allocating(Toy):
        def keep(self, *first):
            def again(*arguments):
                assert arguments[11:] == (None, None)
                self.kept += 1
                made.append(attention(*arguments)[0])
                return made[-1], None

            again.allocates = True
            return again

    toy, given, (metadata, _) = Allocating(), tensors(sum(NEW)), plan()
    with registered(toy.backend()):
        first, second = (
            fast.run_prefill_new_tokens(*given, metadata, SCALE, return_lse=False, backend="toy") for _ in range(2)
        )
    assert torch.equal(first, second) and second is made[0] and toy.launched == 1


def test_number_of_kept_calls_and_memory(toy, monkeypatch):
    """Call with more signatures than are kept -> a bounded number; no tensor and no plan of a call stays alive."""
    monkeypatch.setattr(checked_calls, "MOST_SIGNATURES", 3)
    before = {id(each): len(each._known) for each in checked_calls._ALL_CALLS if hasattr(each, "_known")}
    alive = []
    for number in range(6):
        given, (metadata, _) = tensors(sum(NEW)), plan()
        for _ in range(2):
            state = fast.run_prefill_new_tokens(*given, metadata, SCALE + number, backend="toy")
        alive += [weakref.ref(each) for each in (*given, metadata, state.out, state.lse)]
    for each in checked_calls._ALL_CALLS:
        if hasattr(each, "_known"):
            assert len(each._known) <= max(3, before[id(each)])
        if hasattr(each, "_single"):
            assert len(each._single) <= 3
    assert toy.counts == (6, 6, 6)
    del given, metadata, state
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_threads_that_share_a_kept_call():
    """Run the first call of a signature in several threads -> each gets its result, and one function is kept."""
    barrier, results, errors = threading.Barrier(4), [], []

    def keep(number):
        barrier.wait(10)  # all threads are in their first call
        return lambda given: given + 1

    shared = KeptCall(keep)

    def run(number):
        try:
            results.append(shared.run(lambda given: given + 1, number))
            results.append(shared.run(lambda given: given + 1, number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors and sorted(results) == sorted([1, 2, 3, 4] * 2)

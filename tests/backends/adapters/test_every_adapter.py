"""The same differential tests for every backend of another library that can serve the machine.

`pytest --device cuda --backend NAME tests/backends/adapters/test_every_adapter.py` runs them for one backend on a GPU.
If this backend cannot serve the machine, the run fails with every reason. Without `--backend`, all backends run that
can serve the machine, and no other backend. On a CPU this is "torch_flash".

Each backend is tested as far as it declares support. Budgets are computed from the reference, which rounds where the
backend declares that it rounds.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.attention.varlen import flash_attn_varlen_shared_rope
from fast.parity import compare, compare_states
from reference.interfaces import (
    CAUSAL,
    COMPUTE_FORMAT,
    CONVERTED,
    FP8_E4M3,
    VISIBLE_LENS,
    AttentionState,
    MLAConfig,
    QueryLenSupport,
    RopeConfig,
    UnsupportedConfiguration,
)

from ...support.adapters import (
    DIMS,
    LENGTHS,
    Report,
    adapters_of,
    attend,
    check_state,
    expected,
    judge,
    make_call,
    out_dtypes_of,
    planted,
)
from ...support.backends import registered
from ...support.decode_inputs import SCALE, make_inputs, make_stored_inputs
from ...support.factories import (
    GARBAGE,
    make_batch,
    make_layer,
    make_weights,
    new_cache,
    offsets,
    positions_of,
)
from ...support.fp8_modes import quantised, rounded_decode

PREFILL, DECODE = "flash_attn_varlen", "mla_decode"
STEPS = {  # query lengths and sequence lengths of a decode; equal query lengths first
    "one token": ([1] * 6, [1, 63, 64, 65, 129, 521]),
    "two tokens": ([2] * 4, [2, 64, 65, 257]),
    "empty requests": ([1] * 4, [0, 7, 0, 131]),
    "ragged": ([3, 1, 5], [131, 20, 70]),
}
DECODE_HEADS = (16, 64, 128)


@pytest.fixture(autouse=True)
def one_thread():
    """Run the operations on the CPU in one thread: the tensors are small, and waiting for a second thread is slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dtypes_of(backend, device):
    """Return the dtypes that a backend declares for a device; a backend may declare others for another device."""
    requests = [backends.KernelRequest(PREFILL, torch.device(device), each) for each in backend.ops[PREFILL].dtypes]
    return [each.dtype for each in requests if not backend.validate_configuration(each)]


def lse_of(backend):
    return (False, True) if backend.ops[PREFILL].lse else (False,)


def pytest_generate_tests(metafunc):
    """Give each test the backends of `adapters_of`, with the dtypes, results and steps that they declare."""
    names, config = metafunc.fixturenames, metafunc.config
    if "adapter" not in names:
        return
    on_cpu = config.getoption("--device") == "cpu"
    if "dims" in names:  # on a CPU, which is slow, each pattern of lengths gets one of the widths
        some = [(lengths, list(DIMS)[number % len(DIMS)]) for number, lengths in enumerate(LENGTHS)]
        metafunc.parametrize(("lengths", "dims"), some if on_cpu else list(itertools.product(LENGTHS, DIMS)))
    op = DECODE if metafunc.function.__name__.startswith("test_decode") else PREFILL
    found, device = adapters_of(config, op), config.getoption("--device")
    if "step" in names:
        cases = [(each.name, *case) for each in found for case in decode_cases(each)]
        metafunc.parametrize(("adapter", "step", "dtype", "cache_format", "fp8_mode"), cases, ids=_id_of)
    elif "needs_lse" in names:
        cases = [(e.name, dtype, lse) for e in found for dtype in dtypes_of(e, device) for lse in lse_of(e)]
        metafunc.parametrize(("adapter", "dtype", "needs_lse"), cases, ids=_id_of)
    else:
        metafunc.parametrize("adapter", [each.name for each in found])


def _id_of(value):
    return getattr(value, "name", None) or str(value).removeprefix("torch.")


def decode_cases(backend):
    """Return (step, dtype, cache format, fp8 mode) for the decodes that a backend declares."""
    support = backend.ops[DECODE]
    steps = [name for name, (query_lens, _) in STEPS.items() if support.query_lens.covers(kind_of(query_lens))]
    cases = [(step, dtype, COMPUTE_FORMAT, CONVERTED) for step in steps for dtype in support.dtypes]
    if FP8_E4M3.name in support.cache_formats:
        cases += [(step, torch.bfloat16, FP8_E4M3, mode) for step in steps for mode in support.fp8_modes]
    return [
        case for case in cases
        if case[2].name in support.cache_formats
        and case[3] in support.format_modes.get(case[2].name, support.fp8_modes)
    ]  # fmt: skip


def kind_of(query_lens):
    return backends.query_lens_of(sum(query_lens), len(query_lens), max(query_lens))


def backend_named(name):
    return next(each for each in backends.registered() if each.name == name)


def served(name, call, out_dtype, lse):
    """Skip the test if the backend declares that it does not serve the call; the skip has every reason."""
    reasons = backend_named(name).validate_configuration(call.request(out_dtype, lse))
    if reasons:
        pytest.skip("; ".join(reasons))
    return call


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_within_the_budget(adapter, dtype, needs_lse, lengths, dims, causal):
    """Attend packed requests -> output and LSE are within the budget; rows without keys are exactly 0 and -inf."""
    for out_dtype in out_dtypes_of(backend_named(adapter), dtype, needs_lse):
        call = served(adapter, make_call(*LENGTHS[lengths], DIMS[dims], dtype, causal), out_dtype, needs_lse)
        check_state(call, *attend(call, adapter, needs_lse, out_dtype), out_dtype)


@pytest.mark.parametrize("scale", [0.0, -0.7])
@pytest.mark.parametrize("lengths", ["new tokens", "longer keys"])
def test_scales_that_are_not_positive(adapter, dtype, needs_lse, lengths, scale):
    """Attend with a scale of 0 or below -> within the budget; a NaN in a query stays in the rows of its token."""
    call = served(adapter, make_call(*LENGTHS[lengths], DIMS["192/128"], dtype, True), dtype, needs_lse)
    call = call._replace(softmax_scale=scale)
    check_state(call, *attend(call, adapter, needs_lse, dtype), dtype)
    call.q[5, :, 3] = torch.nan
    rows = attend(call, adapter, needs_lse, dtype)[0].isnan()
    assert rows[5].all() and not rows[:5].any() and not rows[6:].any()


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_numbers_of_heads(adapter, dtype, needs_lse, heads):
    call = make_call([2, 5], [9, 5], (128, 64, 128, heads), dtype, True)
    served(adapter, call, dtype, needs_lse)
    check_state(call, *attend(call, adapter, needs_lse, dtype), dtype)


@pytest.mark.parametrize("lengths", ["new tokens", "longer keys"])
def test_outputs_with_other_strides(adapter, dtype, needs_lse, lengths):
    """Write into a tensor with gaps and in another order of dimensions -> the same bits; the gaps keep their NaN."""
    call = served(adapter, make_call(*LENGTHS[lengths], DIMS["192/128"], dtype, True), dtype, needs_lse)
    tokens, heads, width = call.q.shape[0], call.q.shape[1], call.v.shape[2]
    made = torch.full((heads, tokens, width + 8), torch.nan, dtype=dtype)
    out = made[..., :width].transpose(0, 1)
    found, lse = attend(call, adapter, needs_lse, dtype, out)
    plain, plain_lse = attend(call, adapter, needs_lse, dtype)
    assert found is out and torch.equal(out, plain) and made[..., width:].isnan().all()
    assert lse is None or torch.equal(lse, plain_lse)


@pytest.mark.parametrize("lengths", ["new tokens", "longer keys"])
def test_later_calls(adapter, dtype, needs_lse, lengths):
    """Attend three times, with other values and in other memory each time -> each result is within its budget.

    The calls have one signature. A backend with kept calls serves the second and the third call by its kept function.
    """
    for out_dtype in out_dtypes_of(backend_named(adapter), dtype, needs_lse):
        kept = []
        for _ in range(3):
            call = served(adapter, make_call(*LENGTHS[lengths], DIMS["192/128"], dtype, True), out_dtype, needs_lse)
            state = attend(call, adapter, needs_lse, out_dtype)
            check_state(call, *state, out_dtype)
            kept.append((call, state))
        for call, state in kept:  # no later call has written into an earlier result
            check_state(call, *state, out_dtype)


def test_inputs_with_other_strides(adapter, dtype, needs_lse):
    """Attend slices of wider tensors, with NaN beside the slices and at odd addresses -> a result within the budget."""
    call = served(adapter, make_call(*LENGTHS["new tokens"], DIMS["192/128"], dtype, True), dtype, needs_lse)
    wide = [torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=dtype) for x in call[:4]]
    for whole, part in zip(wide, call[:4], strict=True):
        whole[..., 1:-2] = part
    given = call.__class__(*[whole[..., 1:-2] for whole in wide], *call[4:])
    check_state(call, *attend(given, adapter, needs_lse, dtype), dtype)


def test_keys_that_no_request_owns(adapter, dtype, needs_lse):
    """Attend with NaN keys and values after the last request -> a result within the budget, without NaN."""
    call = served(adapter, make_call([5, 70], [33, 131], DIMS["192/128"], dtype, False), dtype, needs_lse)
    spare = ("k_nope", "k_pe") if mixes_nan(adapter) else ("k_nope", "k_pe", "v")
    longer = {
        name: torch.cat((getattr(call, name), torch.full_like(getattr(call, name)[:37], torch.nan))) for name in spare
    } | ({} if "v" in spare else {"v": torch.cat((call.v, torch.full_like(call.v[:37], 1e3)))})
    found = flash_attn_varlen_shared_rope(
        *call._replace(**longer), dtype, bounded=True, return_lse=needs_lse, backend=adapter
    )
    check_state(call, *((found.out, found.lse) if needs_lse else (found, None)), dtype)


@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("lengths", [([20, 9, 30], [20, 9, 30]), ([20, 9, 30], [40, 19, 70])], ids=["equal", "longer"])
def test_nan_stays_in_its_request(adapter, dtype, needs_lse, place, lengths):
    """Plant NaN in the middle request -> NaN in its rows; the other requests keep their bits."""
    if place == "value" and mixes_nan(adapter):
        pytest.skip(f"{adapter}: declares that a NaN in a value may reach other requests")
    call = served(adapter, make_call(*lengths, DIMS["192/128"], dtype, True), dtype, needs_lse)
    clean, clean_lse = attend(call, adapter, needs_lse, dtype)
    at = int(call.cu_seqlens_k[1]) + 1 if place != "query" else 23
    for tensor in {"query": [call.q], "key": [call.k_nope, call.k_pe], "value": [call.v]}[place]:
        tensor[at] = torch.nan
    out, lse = attend(call, adapter, needs_lse, dtype)
    own = torch.zeros(59, dtype=torch.bool)
    own[20:29] = True
    assert torch.equal(out[~own], clean[~own]) and out[own].isnan().any()
    if place == "query":
        assert out[23].isnan().all()
    if needs_lse:
        assert torch.equal(lse[:, ~own], clean_lse[:, ~own])
        assert place == "value" or lse[:, own].isnan().any()


def mixes_nan(adapter):
    """Return whether a backend declares that a NaN in a value of one request may reach another request."""
    return backend_named(adapter).ops["flash_attn_varlen"].mixes_nan


def test_batch_invariance(adapter, dtype, needs_lse):
    """Attend each request alone and in a batch -> the same bits, if the backend declares batch invariance."""
    query_lens, key_lens = [130, 1, 7], [257, 65, 7]
    call = served(adapter, make_call(query_lens, key_lens, DIMS["192/128"], dtype, True), dtype, needs_lse)
    reasons = backend_named(adapter).validate_configuration(
        replace(call.request(dtype, needs_lse), batch_invariant=True)
    )
    if reasons:
        pytest.skip("; ".join(reasons))
    whole, whole_lse = attend(call, adapter, needs_lse, dtype)
    for number, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        first, key = sum(query_lens[:number]), sum(key_lens[:number])
        own, keys_of = slice(first, first + queries), slice(key, key + keys)
        one = call._replace(
            q=call.q[own], k_nope=call.k_nope[keys_of], k_pe=call.k_pe[keys_of], v=call.v[keys_of],
            cu_seqlens_q=offsets([queries]), cu_seqlens_k=offsets([keys]), max_seqlen_q=queries, max_seqlen_k=keys,
        )  # fmt: skip
        out, lse = attend(one, adapter, needs_lse, dtype)
        assert torch.equal(out, whole[own])
        assert lse is None or torch.equal(lse, whole_lse[:, own])


def test_refusals(adapter):
    """Ask for calls outside the declaration -> an error with every reason that the declaration gives."""
    backend, device = backend_named(adapter), torch.empty(0).device
    support = backend.ops[PREFILL]
    outside = [each for each in (torch.float64, torch.float32, torch.float16) if each not in support.dtypes]
    calls = [(make_call([4], [4], DIMS["192/128"], dtype, True), dtype, True) for dtype in outside]
    calls += [
        (make_call([4], [4], (128, 64, 128, 2), torch.bfloat16, True), torch.float64, True),
        (make_call([4], [4], (501, 11, 513, 1), torch.bfloat16, True), torch.bfloat16, True),
        (make_call([4], [4], (501, 11, 513, 1), torch.float64, True), torch.float16, False),
    ]
    refused = 0
    for call, out_dtype, lse in calls:
        reasons = backend.validate_configuration(call.request(out_dtype, lse))
        if reasons:
            with pytest.raises(UnsupportedConfiguration) as error:
                attend(call, adapter, lse, out_dtype)
            assert all(reason in str(error.value) for reason in reasons) and adapter in str(error.value)
            refused += 1
    assert refused >= 2, f"{adapter} serves on {device} what no kernel of a library serves"


@pytest.mark.parametrize("with_context", [False, True], ids=["prompts", "context"])
def test_steps_of_a_layer(adapter, with_context):
    """Run a step through a builder and a layer that bind the prefill -> an output within the budget.

    The context is attended in two chunks. A backend without an LSE refuses this step in the builder.
    """
    backend, dtype, bound = backend_named(adapter), torch.bfloat16, {PREFILL: adapter}
    config = MLAConfig(96, 4, None, 64, 128, 64, 128, 1e-5, RopeConfig(interleaved=False))
    weights = make_weights(config, dtype)
    query_lens, seq_lens = [19, 33, 5], [50, 33, 41] if with_context else [19, 33, 5]
    batch = make_batch(query_lens, seq_lens)
    cache = new_cache(batch, config.head_size, dtype, new_tokens=False)
    hidden, positions = torch.randn(57, config.hidden_size).to(dtype), positions_of(query_lens, seq_lens)
    options = dict(query_len_support=QueryLenSupport.SINGLE_ONLY, workspace_tokens=48, dtype=dtype)
    builder = fast.MLAMetadataBuilder(config, 16, 128, 4, **options, backend=bound)
    if with_context and not backend.ops[PREFILL].lse:
        with pytest.raises(UnsupportedConfiguration, match=f"{adapter}: .*returns no LSE"):
            builder.build(0, batch.common)
        return
    plan = builder.build(0, batch.common)
    assert plan.prefill.backend == adapter and plan.num_prefills == 3
    assert len(plan.prefill.context_chunks) == (2 if with_context else 0)
    layer = make_layer(fast, config, weights, dtype, backend=bound)
    found = layer(hidden, positions, cache.clone(), plan)
    again = layer(hidden, positions, cache.clone(), builder.build(0, batch.common))
    assert not backend.ops[PREFILL].batch_invariant or torch.equal(found, again)
    expectations = []
    for each in (dtype, torch.float64):
        theirs = reference.MLAMetadataBuilder(config, 16, 128, 4, **options | {"dtype": each}).build(0, batch.common)
        expectations.append(
            make_layer(reference, config, weights, each)(hidden.to(each), positions, cache.to(each), theirs)
        )
    parity = compare("layer", found, *expectations)
    assert parity.passed, parity


def half_scale(launch):
    """Mutant: half of the softmax scale."""
    return lambda *given: launch(*given[:8], given[8] / 2, *given[9:])


def one_key_less(launch):
    """Mutant: a causal mask that is off by one; each query sees one key less (for one request)."""

    def mutant(q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, *rest):
        fewer = torch.tensor([0, k.shape[0] - 1], dtype=torch.int32, device=q.device)
        k_pe = None if k_pe is None else k_pe[:-1]
        return launch(q, k[:-1], k_pe, v[:-1], cu_seqlens_q, fewer, *rest)

    return mutant


def base_2_lse(launch):
    """Mutant: an LSE in base 2."""

    def mutant(*given):
        out, lse = launch(*given)
        return out, lse / torch.tensor(2.0).log()

    return mutant


def swapped_axes(launch):
    """Mutant: an LSE [T, N] in the memory of an LSE [N, T]."""

    def mutant(*given):
        out, lse = launch(*given)
        return out, lse.T.contiguous().view(lse.shape)

    return mutant


@pytest.mark.parametrize("mutant", [half_scale, one_key_less, base_2_lse, swapped_axes])
def test_mutants(adapter, dtype, needs_lse, mutant, monkeypatch):
    """Plant a mistake in the launcher -> the comparison is red; without the mistake, it is green."""
    if not needs_lse and mutant in (base_2_lse, swapped_axes):
        pytest.skip("the mutant changes the LSE, and the call has no LSE")
    call = served(adapter, make_call([33], [33], (128, 64, 128, 4), dtype, True), dtype, needs_lse)
    low, gold = expected(call, dtype)
    if dtype == torch.float64:
        low = reference.flash_attn_varlen(call.q.float(), call.keys.float(), call.v.float(), *call[4:])
        low = AttentionState(low.out.double(), low.lse.double())
    assert all(parity.passed for parity in judge(*attend(call, adapter, needs_lse, dtype), low, gold))
    planted(monkeypatch, mutant)
    verdicts = judge(*attend(call, adapter, needs_lse, dtype), low, gold)
    assert not all(parity.passed for parity in verdicts), verdicts


# Decodes


def on(device, *tensors):
    return [None if each is None else each.to(device) for each in tensors]


def causal_plan(plan, device):
    """Return a plan on a device; its mask is declared causal, as in plans of a builder."""
    tensors = {name: value.to(device) for name, value in vars(plan).items() if isinstance(value, torch.Tensor)}
    return replace(plan, mask=CAUSAL, **tensors)


def block_size_of(backend):
    sizes = backend.ops[DECODE].block_sizes
    return 64 if sizes is None or 64 in sizes else sizes[0]


def decode(adapter, given, plan, device, scale=SCALE, **options):
    """Decode on a device with CPU tensors as input; return the state on the CPU."""
    tensors = on(device, *given)
    options = {name: on(device, each)[0] if torch.is_tensor(each) else each for name, each in options.items()}
    state = fast.mla_decode(*tensors, causal_plan(plan, device), scale, backend=adapter, **options)
    return AttentionState(*on("cpu", state.out, state.lse))


def decode_case(backend, step, dtype, cache_format, fp8_mode, heads, scale=SCALE):
    """Return (queries and cache, plan, options, low, gold) of a decode; the tensors are on the CPU."""
    lens, block_size = STEPS[step], block_size_of(backend)
    if fp8_mode == CONVERTED and cache_format is COMPUTE_FORMAT:
        *given, plan = make_inputs(*lens, heads, dtype, block_size=block_size)
        low = reference.mla_decode(*given, plan, scale)
        gold = reference.mla_decode(*[x.double() for x in given], plan, scale)
        return given, plan, {}, low, gold
    (*queries, cache, plan), kv_scale = make_stored_inputs(
        cache_format, *lens, heads, torch.float32 if fp8_mode != CONVERTED else dtype, block_size=block_size
    )
    options = dict(cache_format=cache_format, kv_scale=kv_scale)
    if fp8_mode == CONVERTED:
        low = reference.mla_decode(*queries, cache, plan, SCALE, **options)
        gold = reference.mla_decode(*[x.double() for x in queries], cache, plan, SCALE, **options)
        return [*queries, cache], plan, options, low, gold
    q_scale = torch.tensor(0.006)
    queries = quantised(*queries, q_scale)
    low = rounded_decode(queries, cache, plan, cache_format, kv_scale, fp8_mode, q_scale, dtype, True)
    options |= dict(fp8_mode=fp8_mode, q_scale=q_scale)
    gold = reference.mla_decode(*queries, cache, plan, SCALE, None, torch.float64, **options)
    return [*queries, cache], plan, options | dict(out_dtype=dtype), low, gold


@pytest.mark.parametrize("heads", DECODE_HEADS)
def test_decode_within_the_budget(adapter, step, dtype, cache_format, fp8_mode, heads):
    """Decode over a paged cache whose other bytes are NaN -> within the budget; rows without keys are 0 and -inf."""
    device = torch.empty(0).device
    with torch.device("cpu"):
        given, plan, options, low, gold = decode_case(
            backend_named(adapter), step, dtype, cache_format, fp8_mode, heads
        )
        assert plan.block_table.eq(GARBAGE).any()
        state = decode(adapter, given, plan, device, **options)
        for parity in compare_states(DECODE, state, low, gold):
            assert parity.passed, parity
        unseen = plan.visible_lens == 0
        assert state.out[unseen].eq(0).all() and state.lse[:, unseen].eq(-torch.inf).all()
        wide = options | dict(out_dtype=torch.float32)
        if torch.float32 in (backend_named(adapter).ops[DECODE].out_dtypes or ()):  # for states that are merged
            low = AttentionState(low.out.float(), low.lse)
            for parity in compare_states(DECODE, decode(adapter, given, plan, device, **wide), low, gold):
                assert parity.passed, parity


@pytest.mark.parametrize("scale", [0.0, -SCALE])
def test_decode_scales_that_are_not_positive(adapter, scale):
    backend, device = backend_named(adapter), torch.empty(0).device
    with torch.device("cpu"):
        case = "one token", backend.ops[DECODE].dtypes[0], COMPUTE_FORMAT, CONVERTED, 16, scale
        given, plan, _, low, gold = decode_case(backend, *case)
        for parity in compare_states(DECODE, decode(adapter, given, plan, device, scale), low, gold):
            assert parity.passed, parity


def test_decode_nan_stays_in_its_request(adapter):
    """Plant NaN in a key of one request -> NaN in its row; the other requests keep their bits."""
    backend, device = backend_named(adapter), torch.empty(0).device
    with torch.device("cpu"):
        ql, q_pe, cache, plan = make_inputs(
            [1] * 3, [70, 130, 9], 16, backend.ops[DECODE].dtypes[0], block_size=block_size_of(backend)
        )
        clean = decode(adapter, (ql, q_pe, cache), plan, device)
        cache[plan.block_table[1, 0], 3] = torch.nan
        found = decode(adapter, (ql, q_pe, cache), plan, device)
        assert torch.equal(found.out[::2], clean.out[::2]) and torch.equal(found.lse[:, ::2], clean.lse[:, ::2])
        assert found.out[1].isnan().any() and found.lse[:, 1].isnan().any()


def test_decode_refusals(adapter):
    """Ask for a mask of any visible lengths, or for ragged queries, where not declared -> an error with the reason."""
    backend, device = backend_named(adapter), torch.empty(0).device
    support, refused = backend.ops[DECODE], []
    with torch.device("cpu"):
        size = block_size_of(backend)
        *given, plan = make_inputs(*STEPS["ragged"], 16, support.dtypes[0], block_size=size)
        if not support.query_lens.covers(QueryLenSupport.VARLEN):
            refused.append((given, causal_plan(plan, device), "query lengths"))
        if "visible_lens" not in support.masks:
            other = replace(causal_plan(plan, device), mask=VISIBLE_LENS)
            refused.append((given, other, "applies the masks causal.*, got visible_lens"))
    for tensors, each, reason in refused:
        with pytest.raises(UnsupportedConfiguration, match=reason):
            fast.mla_decode(*on(device, *tensors), each, SCALE, backend=adapter)
    if not refused:
        pytest.skip(f"{adapter}: serves every mask and any query lengths")


def test_decode_later_calls(adapter):
    """Decode three times, with other values and in other memory each time -> each result is within its budget."""
    backend, device = backend_named(adapter), torch.empty(0).device
    with torch.device("cpu"):
        case = "one token", backend.ops[DECODE].dtypes[0], COMPUTE_FORMAT, CONVERTED, 16
        for _ in range(3):
            given, plan, options, low, gold = decode_case(backend, *case)
            state = decode(adapter, given, plan, device, **options)
            for parity in compare_states(DECODE, state, low, gold):
                assert parity.passed, parity


@pytest.mark.parametrize("mutant", ["scale", "base 2", "swapped axes", "one key less"])
def test_decode_mutants(adapter, mutant, monkeypatch):
    """Plant a mistake in the launcher of a decode -> the comparison is red; without the mistake, it is green."""
    backend, device = backend_named(adapter), torch.empty(0).device

    def change(launch):
        def mutated(*given, **options):
            given = list(given)
            if mutant == "scale":
                given[9] = given[9] * 576**-0.5 / 192**-0.5
            if mutant == "one key less":  # the schedule in `prepared` is for the right lengths
                given[4], given[6] = given[4] - 1, given[6] - 1
                options.pop("prepared", None)
            out, lse = launch(*given, **options)
            if mutant == "base 2":
                lse = lse / torch.tensor(2.0).log()
            return out, lse.T.contiguous().view(lse.shape) if mutant == "swapped axes" else lse

        return mutated

    with torch.device("cpu"):
        given, plan, options, low, gold = decode_case(
            backend, "one token", backend.ops[DECODE].dtypes[0], COMPUTE_FORMAT, CONVERTED, 16
        )
        plain = decode(adapter, given, plan, device, **options)
        assert all(parity.passed for parity in compare_states(DECODE, plain, low, gold))
        planted(monkeypatch, change)
        state = decode(adapter, given, plan, device, **options)
        assert not all(parity.passed for parity in compare_states(DECODE, state, low, gold))


# The option `--backend` and the report


def config_of(**options):
    """Return an object with the one method of pytest's config that the helpers use."""
    return SimpleNamespace(getoption=lambda name, default=None: options.get(name.strip("-").replace("-", "_"), default))


def test_a_named_backend_runs_or_fails():
    """Name a backend -> it runs alone; an unknown name, or a backend that cannot serve the machine, fails the run."""
    library = replace(backend_named("cpu"), name="library", library="a library")
    absent = replace(library, name="absent", missing_package="nowhere", install="pip install nowhere")
    with registered(library), registered(absent):
        assert [each.name for each in adapters_of(config_of(backend="library"), PREFILL)] == ["library"]
        everything = [each.name for each in adapters_of(config_of(), PREFILL)]
        assert "library" in everything and not {"absent", "cpu"} & set(everything)
        assert adapters_of(config_of(backend="torch_flash"), DECODE) == []
        with pytest.raises(pytest.UsageError, match="^--backend: expected one of .*library, absent, got cpu$"):
            adapters_of(config_of(backend="cpu"), PREFILL)
        with pytest.raises(pytest.UsageError) as error:
            adapters_of(config_of(backend="absent", device="cuda"), PREFILL)
        assert "absent: needs the package nowhere, which is not installed (pip install nowhere)" in str(error.value)
        assert "absent: serves device cpu, got cuda" in str(error.value)


def test_the_report(tmp_path):
    """Run tests of two backends -> the file has their counts and messages, and why other backends are absent."""
    file = tmp_path / "adapters.json"
    config = config_of(adapter_report=str(file), device="cpu")
    report = Report(config)
    items = [
        SimpleNamespace(nodeid=f"test[{name}]", callspec=SimpleNamespace(params={"adapter": name}))
        for name in ("torch_flash", "mine")
    ]
    report.pytest_collection_finish(SimpleNamespace(items=[*items, SimpleNamespace(nodeid="test of nothing")]))

    def log(nodeid, outcome, when="call", longrepr=None):
        states = {each: outcome == each for each in ("passed", "failed", "skipped")}
        report.pytest_runtest_logreport(
            SimpleNamespace(nodeid=nodeid, outcome=outcome, when=when, longrepr=longrepr, **states)
        )

    for when in ("setup", "call", "teardown"):
        log("test[torch_flash]", "passed", when)
    log("test[torch_flash]", "skipped", longrepr=("file", 3, "Skipped: returns no LSE"))
    log("test[mine]", "failed", longrepr="a wrong result")
    log("test of nothing", "failed")
    absent = replace(backend_named("cpu"), name="absent", library="a library", missing_package="nowhere")
    with registered(absent):
        report.pytest_sessionfinish()
    found = json.loads(file.read_text())
    assert found["backends"]["torch_flash"] == {
        "passed": 1, "failed": 0, "skipped": 1, "reasons": {"returns no LSE": 1}, "errors": []
    }  # fmt: skip
    assert found["backends"]["mine"]["errors"] == ["test[mine]: a wrong result"] and len(found["backends"]) == 2
    assert found["not_run"]["absent"] == ["absent: needs the package nowhere, which is not installed"]

"""Tests of the decode backend of a builder: its limits, the name in the plans, and the tensors that it prepares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends import AttentionSizes, Backend, OpSupport, measured
from fast.backends.measured import MeasuredRow, MeasuredTable
from fast.backends.own import CPU, DECODES
from fast.mla.backend_hooks import BackendHooks
from reference.interfaces import (
    CAUSAL,
    CAUSAL_OVER_RANKS,
    NEUTRAL_COSTS,
    VISIBLE_LENS,
    CascadeCosts,
    DecodeMetadata,
    GraphSupport,
    QueryLenSupport,
    TokenOwnership,
    UnsupportedConfiguration,
    absorbed_decode_mask,
    decode_mask,
)

from ..support.backends import registered, with_backends
from ..support.context_parallel import of_rank
from ..support.factories import (
    DIRECT,
    assert_same_bits,
    integers,
    make_batch,
    make_layer,
    make_weights,
    new_cache,
    offsets,
    positions_of,
)
from ..support.ranks import RANK_CONFIG

NAME = "library"
CALLS: list[tuple] = []
SINGLE, UNIFORM, VARLEN = QueryLenSupport.SINGLE_ONLY, QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN


def launch(*arguments, prepared=(), **options):
    """Decode with the backend "cpu", and note the prepared tensors."""
    CALLS.append(("decode", *(tensor.tolist() for tensor in prepared)))
    from fast.kernels.cpu import mla_decode

    return mla_decode(*arguments, **options)


class Hooks(BackendHooks):
    """Hooks of a library that computes the sum of the lengths ahead, as its schedule."""

    def create_builder_state(self, config, cache_format, layer_names, device):
        CALLS.append(("state", config.num_heads))
        return config.num_heads

    def finalize_metadata(self, metadata, state):
        decode = metadata.decode
        prepared = (decode.seq_lens.sum(0, keepdim=True, dtype=torch.int32) * state,)
        return replace(metadata, decode=replace(decode, prepared=prepared))


def library(hooks=f"{__name__}:Hooks", **changes) -> Backend:
    """Return a library's backend whose decode has a causal mask alone, and batches of one query length."""
    limits = {"masks": (CAUSAL,), "query_lens": UNIFORM, "graph": GraphSupport.ONE_QUERY_LEN, **changes}
    ops = {
        "mla_decode": replace(CPU.ops["mla_decode"], launcher=launch, **limits),
        "decode_programs": replace(CPU.ops["decode_programs"], launcher=lambda *_, **__: 0, **limits),
        "schedule_costs": replace(CPU.ops["schedule_costs"], launcher=lambda *_, **__: NEUTRAL_COSTS, **limits),
    }
    assert set(ops) == set(DECODES)
    return Backend(NAME, -100, "cpu", ops, library="Library", hooks=hooks)


def make_builder(config=DIRECT, **options):
    return fast.MLAMetadataBuilder(config, 16, 128, 8, **{"dtype": torch.float32, "backend": NAME, **options})


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def test_limits_come_from_the_backend():
    """Name the library's backend -> its query lengths and graphs; without a name -> those of this package."""
    with registered(library()):
        builder = make_builder(num_speculative_tokens=2)
        assert builder.query_len_support is UNIFORM and builder.graph_support is GraphSupport.ONE_QUERY_LEN
        assert builder.reorder_batch_threshold == 3
        assert make_builder(query_len_support=SINGLE).reorder_batch_threshold == 1
        own = make_builder(backend=None)
        assert own.query_len_support is VARLEN and own.graph_support is GraphSupport.ANY
    with registered(library(graph=GraphSupport.NONE)):
        builder = make_builder()
        assert builder.graph_support is GraphSupport.NONE
        assert not builder.can_run_in_cudagraph(make_batch([1], [9]).common)


def one_step(builder):
    """Build the plan of two decodes of one token, and decode with it -> the plan and the output."""
    torch.manual_seed(0)
    common = make_batch([1, 1], [9, 5]).common
    plan = builder.build(0, common)
    dims = DIRECT.num_heads, DIRECT.kv_lora_rank, DIRECT.qk_rope_head_dim
    inputs = [torch.randn(2, dims[0], width) for width in dims[1:]]
    cache = torch.randn(int(common.slot_mapping.max()) // 16 + 1, 16, dims[1] + dims[2])
    return plan, fast.mla_decode(*inputs, cache, plan.decode, 0.3, plan.schedule)


@pytest.mark.parametrize("device", ["cpu"] if torch.cuda.is_available() else ["cpu", None])
def test_an_automatic_choice_is_kept(device):
    """Register a library with the highest priority -> a builder without a name works as if it named the library.

    Its limits, its plans, also those of a graph, and the calls of the hooks are the same. On a machine with a GPU, a
    builder without a device binds no library (`test_an_automatic_choice_needs_the_device`).
    """
    limits = dict(query_lens=SINGLE, graph=GraphSupport.ONE_QUERY_LEN)
    found = {}
    with registered(replace(library(**limits), priority=50)):
        for backend in (NAME, None):
            CALLS.clear()
            builder = make_builder(backend=backend, device=device, num_speculative_tokens=2, num_programs=None)
            plan, state = one_step(builder)
            captured = builder.build_for_cudagraph_capture(make_batch([1, 1], [9, 5]).common)
            longer = builder.build(0, make_batch([2, 2], [9, 5]).common)
            found[backend] = (
                plan.decode.backend, captured.decode.backend, [each.tolist() for each in plan.decode.prepared],
                plan.schedule, captured.schedule, longer.num_decodes, builder.reorder_batch_threshold,
                builder.query_len_support, builder.graph_support, list(CALLS), state.out.tolist(),
            )  # fmt: skip
    assert found[None] == found[NAME] and found[None][0] == NAME and ("state", DIRECT.num_heads) in found[None][-2]


@pytest.mark.parametrize(
    "changes, options",
    [
        (dict(priority=-50), {}),  # the backend "cpu" comes first
        (dict(only_named=True), {}),
        (dict(missing_package="nosuch"), {}),
        ({}, dict(backend="cpu")),
        ({}, dict(query_len_support=VARLEN)),  # more than the library serves
        ({}, dict(graph_support=GraphSupport.ANY)),
        (dict(device_type="cuda"), {}),
    ],
)
def test_an_automatic_choice_of_this_package(changes, options):
    """Register a library that cannot be chosen for a builder -> the limits and the plans of this package."""
    with registered(replace(library(), **{"priority": 50, **changes})):
        builder = make_builder(**{"backend": None, "device": "cpu", **options})
        assert builder.build(0, make_batch([1, 1], [9, 5]).common).decode.backend is None
        assert builder.query_len_support is VARLEN and builder.graph_support is GraphSupport.ANY
    assert not [call for call in CALLS if call[0] == "state"]


def test_an_automatic_choice_without_a_backend_of_this_package(monkeypatch):
    """Remove the backends of this package -> a library of low priority serves a builder, or the next library does."""
    lowest = replace(library(), name="lowest", priority=-200)
    with_backends(monkeypatch, replace(library(block_sizes=(64,))), lowest)
    builder = make_builder(backend=None, device="cpu")
    assert builder._limits.backend == "lowest" and builder.query_len_support is UNIFORM
    with_backends(monkeypatch, replace(library(block_sizes=(64,))))
    assert make_builder(backend=None, device="cpu")._limits.backend is None


def test_an_automatic_choice_needs_the_device(monkeypatch):
    """Make a builder without a device on a machine with a GPU -> it binds no library, which may be the wrong one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with registered(replace(library(), priority=50)):
        assert make_builder(backend=None, cascade_costs=CascadeCosts())._limits.backend is None
        assert make_builder(backend=None, cascade_costs=CascadeCosts(), device="cpu")._limits.backend == NAME


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, dict(query_len_support=VARLEN), "serves uniform query lengths, got varlen"),
        (dict(query_lens=SINGLE), dict(query_len_support=UNIFORM), "serves single_only query lengths, got uniform"),
        (dict(query_lens=VARLEN), dict(graph_support=GraphSupport.ANY), "has graph support 'one', got .*'any'"),
        (dict(batch_invariant=False), dict(batch_invariant=True), "is not batch-invariant"),
        (dict(block_sizes=(64,)), {}, r"serves block sizes \(64,\), got 16"),
        (dict(dtypes=(torch.bfloat16,)), {}, "serves torch.bfloat16, got torch.float32"),
        (dict(cache_formats=("fp8_e4m3",)), {}, "reads caches in fp8_e4m3, got compute_dtype"),
        (dict(head_dims={"kv_lora_rank": (512,)}), {}, r"serves kv_lora_rank in \(512,\), got 24"),
        ({}, dict(device="cuda:0"), "serves device cpu, got cuda"),
    ],
)
@pytest.mark.parametrize("by_mapping", [False, True])
def test_promises_beyond_the_backend(changes, options, reason, by_mapping):
    """Ask for more than the backend has -> the constructor raises with the backend's reason."""
    with registered(library(**changes)):
        backend = {"mla_decode": NAME} if by_mapping else NAME
        with pytest.raises(UnsupportedConfiguration, match=f"{NAME}: {reason}"):
            make_builder(**options, backend=backend)


def test_devices_that_do_not_exist(monkeypatch, plain_errors):
    """Name a device that torch does not know or does not see -> an error of one line that names the argument."""
    for device, error in (("gpu", ValueError), ("cuda:x", ValueError), (3, TypeError)):
        with pytest.raises(error, match="^device: expected a torch.device or its name, got [^\n]*$"):
            fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, device=device)

    def absent(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_capability", absent)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wanted = "^device: expected another device, or one of the 1 CUDA devices that torch sees, got cuda:9$"
    library = Backend("elsewhere", -100, "cuda", {"mla_decode": OpSupport(print)}, library="L", capability=(9, 0))
    with registered(library), pytest.raises(ValueError, match=wanted):
        fast.MLAMetadataBuilder(
            DIRECT, 16, 128, 8, device="cuda:9", dtype=torch.float32, backend={"mla_decode": "elsewhere"}
        )
    for config in (DIRECT, fast.GQAConfig(4, 2, 32)):
        with pytest.raises(ValueError, match=wanted):
            backends.explain(config, device="cuda:9", dtype=torch.float32)


def test_mask_under_context_parallelism():
    """10 keys, 3 query tokens, 2 ranks -> 4, 5 and 5 local keys, which are no causal mask of rank 0's 5 keys."""
    two = TokenOwnership(2, 0)
    seen = fast.compute_visible_lens(offsets([3]), integers(10), 3, two)
    assert seen.tolist() == [4, 5, 5]
    assert decode_mask(3, two) == VISIBLE_LENS and decode_mask(1, two) == CAUSAL
    assert decode_mask(3, None) == CAUSAL and decode_mask(3, TokenOwnership(1, 0)) == CAUSAL
    assert absorbed_decode_mask(3, two) == CAUSAL_OVER_RANKS and absorbed_decode_mask(1, two) == CAUSAL
    assert absorbed_decode_mask(3, TokenOwnership(2, 0, 4)) == VISIBLE_LENS

    def build(ranks, mask):
        options = dict(config=RANK_CONFIG, context_parallel=ranks, num_speculative_tokens=2)
        with registered(library()):
            builder = make_builder(**options)
            found = [builder.reorder_batch_threshold, builder.query_len_support]
            with pytest.raises(UnsupportedConfiguration, match=f"{NAME}: applies the masks causal, got {mask}"):
                make_builder(**options, query_len_support=UNIFORM)
        for masks in ((CAUSAL, VISIBLE_LENS), (CAUSAL, CAUSAL_OVER_RANKS)):
            with registered(library(masks=masks)):
                found.append(make_builder(**options).reorder_batch_threshold)
        return found

    for interleave, mask, wanted in ((1, CAUSAL_OVER_RANKS, [1, SINGLE, 3, 3]), (2, VISIBLE_LENS, [1, SINGLE, 3, 1])):
        found = fast.simulate(
            2, interleave, lambda ranks, mask=mask: build(ranks, mask) if ranks.ownership.rank == 0 else None
        )
        assert found[0] == wanted


def decoded_of_rank(ownership, query_lens, seq_lens, plan_of=lambda plan: plan, **options):
    """Return the state of one rank's decode, and the arguments of a launcher that declares CAUSAL_OVER_RANKS."""
    batch, seen = make_batch(query_lens, seq_lens), {}
    generator = torch.Generator().manual_seed(1)
    ql, q_pe, cache = (
        torch.randn(*shape, generator=generator)
        for shape in ((batch.num_tokens, 3, 24), (batch.num_tokens, 3, 8), (batch.num_blocks, 16, 32))
    )
    common = of_rank(batch.common, 16, ownership)
    plan = plan_of(fast.build_mla_metadata(common, 16, 4096, max(query_lens), ownership=ownership).decode)

    def noting(*given, total_seq_lens=None, ownership=None, **rest):
        seen.update(total_seq_lens=total_seq_lens, ownership=ownership)
        return launch(*given, **rest)

    over_ranks = library(masks=(CAUSAL, CAUSAL_OVER_RANKS), query_lens=VARLEN)
    ops = {**over_ranks.ops, "mla_decode": replace(over_ranks.ops["mla_decode"], launcher=noting)}
    with registered(replace(over_ranks, ops=ops)):
        found = fast.mla_decode(ql, q_pe, cache, plan, 0.3, backend=NAME, **options)
    wanted = fast.mla_decode(ql, q_pe, cache, plan, 0.3, backend="cpu")
    return found, wanted, seen


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_lengths_reach_the_launcher(rank):
    """Decode 3 tokens over 10 keys on 2 ranks -> the launcher gets the whole lengths and the rank's tokens."""
    owned = TokenOwnership(2, rank)
    found, wanted, seen = decoded_of_rank(owned, [3, 1], [10, 33])
    assert seen["total_seq_lens"].tolist() == [10, 33] and seen["ownership"] == owned
    assert_same_bits(found.out, wanted.out)
    found, wanted, seen = decoded_of_rank(owned, [1, 1], [10, 33])  # a causal mask, which needs no whole lengths
    assert seen == {"total_seq_lens": None, "ownership": None}


def test_promise_of_a_plan_over_ranks(plain_errors):
    """Promise CAUSAL_OVER_RANKS without whole lengths, for another interleave or other visible lengths -> errors."""
    owned = TokenOwnership(2, 0)
    for changes, message in (
        (
            dict(total_seq_lens=None),
            "^metadata.total_seq_lens: expected a tensor for the mask causal_over_ranks, got None",
        ),
        (dict(total_seq_lens=integers(10)), r"^metadata.total_seq_lens: expected shape \[2\], got \[1\]"),
        (dict(ownership=TokenOwnership(2, 0, 4)), "^metadata.ownership: expected a TokenOwnership with interleave 1"),
        (dict(ownership=(2, 0)), "^metadata.ownership: expected a TokenOwnership or None, got"),
        (dict(total_seq_lens=integers(12, 33)), "^metadata.visible_lens: expected 5, the causal mask, at row 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            decoded_of_rank(owned, [3, 1], [10, 33], lambda plan, changes=changes: replace(plan, **changes))


def test_captured_plans_over_ranks():
    """Update a captured plan of one of two ranks -> its whole lengths are new, the batch is unchanged."""
    batches = [make_batch([3, 3], lens) for lens in ([20, 35], [10, 4])]

    def build(ranks):
        if ranks.ownership.rank:
            return None
        options = dict(config=RANK_CONFIG, context_parallel=ranks, num_speculative_tokens=2)
        commons = [of_rank(batch.common, 16, ranks.ownership) for batch in batches]
        with registered(library(masks=(CAUSAL, CAUSAL_OVER_RANKS))):
            builder = make_builder(**options)
            captured = builder.build_for_cudagraph_capture(commons[0])
            held = captured.decode.total_seq_lens
            builder.update_captured(captured, commons[1])
        assert captured.decode.mask == CAUSAL_OVER_RANKS and captured.decode.total_seq_lens is held
        return held.tolist(), commons[0].seq_lens.tolist()

    assert fast.simulate(2, 1, build)[0] == ([10, 4], [20, 35])


def test_promise_of_a_plan(plain_errors):
    """Promise a causal mask for other visible lengths -> an error with the row; a causal kernel refuses other masks."""
    queries = torch.randn(2, 3, 24), torch.randn(2, 3, 8)
    cache = torch.randn(2, 16, 32)
    plan = DecodeMetadata(integers(0, 1)[None], integers(20), offsets([2]), 2, integers(19, 20), 32, 16, mask=CAUSAL)
    out, _ = fast.mla_decode(*queries, cache, plan, 1.0)
    with registered(library()):
        assert torch.equal(fast.mla_decode(*queries, cache, plan, 1.0, backend=NAME).out, out)
        assert torch.equal(fast.mla_decode(*queries, cache, replace(plan, backend=NAME), 1.0).out, out)
        assert [call[0] for call in CALLS] == ["decode", "decode"]
        with pytest.raises(UnsupportedConfiguration, match="applies the masks causal, got visible_lens"):
            fast.mla_decode(*queries, cache, replace(plan, mask=VISIBLE_LENS), 1.0, backend=NAME)
        with pytest.raises(ValueError, match="^metadata.backend: expected cpu, the backend of the call, got library$"):
            fast.mla_decode(*queries, cache, replace(plan, backend=NAME), 1.0, backend="cpu")
        for wrong in (integers(20, 20), integers(18, 20)):
            with pytest.raises(ValueError, match=r"^metadata.visible_lens: expected 19, the causal mask, at row 0"):
                fast.mla_decode(*queries, cache, replace(plan, visible_lens=wrong), 1.0, backend=NAME)


def run(builder, layer, query_lens, seq_lens):
    batch = make_batch(query_lens, seq_lens)
    torch.manual_seed(1)
    cache = new_cache(batch, DIRECT.head_size, torch.float32)
    plan = builder.build(0, batch.common)
    hidden = torch.randn(sum(query_lens), DIRECT.hidden_size)
    return plan, layer(hidden, positions_of(query_lens, seq_lens), cache, plan)


def test_plans_name_the_backend():
    """Run a step of two layers -> one schedule for both; a layer of another backend refuses before the cache write."""
    weights = make_weights(DIRECT, torch.float32)
    plain = make_layer(fast, DIRECT, weights, torch.float32)
    _, wanted = run(make_builder(backend=None), plain, [1, 1], [20, 35])
    with registered(library()):
        builder = make_builder()
        plan, found = run(builder, plain, [1, 1], [20, 35])  # the layer names no backend; the plan does
        assert plan.decode.backend == NAME and plan.schedule is None
        assert [("state", DIRECT.num_heads), ("decode", [55 * DIRECT.num_heads])] == CALLS
        assert_same_bits(found, wanted)
        other = make_layer(fast, DIRECT, weights, torch.float32, backend="cpu")
        cache = new_cache(make_batch([1, 1], [20, 35]), DIRECT.head_size, torch.float32)
        before = cache.clone()
        with pytest.raises(ValueError, match="^metadata.decode.backend: expected cpu, the backend of the layer"):
            other(torch.randn(2, DIRECT.hidden_size), positions_of([1, 1], [20, 35]), cache, plan)
        assert_same_bits(cache, before)
        prompts, _ = run(builder, plain, [7], [7])
        assert prompts.decode.backend is None and len(CALLS) == 2


def test_no_cascade_for_a_causal_mask():
    """Ask about a prefix that all decodes share -> no cascade, because all its queries see all its keys."""
    lens = torch.ones(8, dtype=torch.int32), torch.full((8,), 127, dtype=torch.int32)
    assert make_builder(backend=None).use_cascade_attention(112, *lens)
    with registered(library()):
        assert not make_builder().use_cascade_attention(112, *lens)
    with registered(library(masks=(CAUSAL, VISIBLE_LENS))):
        assert make_builder().use_cascade_attention(112, *lens)


def test_captured_plans_are_prepared_again():
    """Update a captured plan -> its prepared tensor has the new values in the same memory."""
    with registered(library()):
        builder = make_builder()
        captured = builder.build_for_cudagraph_capture(make_batch([1, 1], [20, 35]).common)
        held = captured.decode.prepared[0]
        assert captured.decode.backend == NAME and held.tolist() == [55 * DIRECT.num_heads]
        builder.update_captured(captured, make_batch([1, 1], [3, 4]).common)
        assert captured.decode.prepared[0] is held and held.tolist() == [7 * DIRECT.num_heads]
        with pytest.raises(ValueError, match=r"^captured.decode.prepared\[0\]: expected the tensor of the capture"):
            other = replace(captured, decode=replace(captured.decode, prepared=(held.clone(),)))
            builder.update_captured(other, make_batch([1, 1], [3, 4]).common)
        with pytest.raises(ValueError, match="^captured.decode.prepared: expected 1 tensors, got 0$"):
            other = replace(captured, decode=replace(captured.decode, prepared=()))
            builder.update_captured(other, make_batch([1, 1], [3, 4]).common)


def test_states_of_both_packages():
    """Plan a step without libraries in both packages -> plans that promise the same mask, and name no backend."""
    import reference

    for lens in (([1, 1], [5, 9]), ([1, 7], [5, 9])):
        plans = [ops.MLAMetadataBuilder(DIRECT, 16, 128, 8).build(0, make_batch(*lens).common)
                 for ops in (reference, fast)]  # fmt: skip
        assert [plan.decode.mask for plan in plans] == [CAUSAL, CAUSAL]
        assert all(plan.decode.backend is None and plan.decode.prepared == () for plan in plans)


def test_prefills_of_a_batch_invariant_builder():
    """Build for a batch-invariant engine, with a backend for prefills that is not batch-invariant.

    The constructor refuses the backend if it is named. An automatic choice never takes it, although it has the highest
    priority.
    """
    op = "flash_attn_varlen"
    backend = Backend("varying", 5, "cpu", {op: replace(CPU.ops[op], batch_invariant=False)}, library="Library")
    common = make_batch([7], [7]).common
    with registered(backend):
        for name in ("varying", {op: "varying"}):
            with pytest.raises(UnsupportedConfiguration, match="^varying: is not batch-invariant$"):
                make_builder(backend=name, batch_invariant=True)
        for invariant, wanted in ((False, "varying"), (True, "cpu")):
            assert make_builder(backend=None, batch_invariant=invariant).build(0, common).prefill.backend == wanted
        assert make_builder(backend={op: "varying"}).build(0, common).prefill.backend == "varying"


def test_the_sizes_of_a_step_do_not_choose_for_a_batch_invariant_builder(monkeypatch):
    """Measure a backend as faster for long prompts -> a batch-invariant builder takes the other backend for all steps.

    If the sizes of the step chose the backend, a request could get other bits in a batch with a longer prompt.
    """
    op, rows = "flash_attn_varlen", []
    dims = ("qk_head_dim", DIRECT.qk_head_dim), ("v_head_dim", DIRECT.v_head_dim)
    for tokens, times in ((16, {"cpu": 2.0, "other": 1.0}), (64, {"cpu": 1.0, "other": 2.0})):
        sizes = AttentionSizes.rounded(1, DIRECT.num_heads, tokens, tokens)
        rows.append(MeasuredRow(True, sizes, times, torch.float32, dims))
    monkeypatch.setattr(measured, "table_of", lambda device: MeasuredTable("a CPU", tuple(rows)))
    with registered(Backend("other", 5, "cpu", {op: CPU.ops[op]}, library="Library")):
        for invariant, wanted in ((False, ["other", "cpu"]), (True, ["other", "other"])):
            builder = make_builder(backend=None, batch_invariant=invariant)
            steps = [builder.build(0, make_batch([tokens], [tokens]).common) for tokens in (16, 64)]
            assert [step.prefill.backend for step in steps] == wanted

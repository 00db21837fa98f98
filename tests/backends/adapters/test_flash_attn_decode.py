"""Tests of the decode of flash-attn 3: with the library on a GPU, and with its unmodified Python without a GPU."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import fields, replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends.adapters import flash_attn, flash_attn_decode, sources
from fast.backends.adapters.flash_attn import FLASH_ATTN_3
from fast.parity import compare_states
from reference.interfaces import (
    CAUSAL_OVER_RANKS,
    COMPUTE_FORMAT,
    FP8_E4M3,
    AttentionState,
    CommonAttentionMetadata,
    DecodeMetadata,
    GraphSupport,
    QueryLenSupport,
    TokenOwnership,
    UnsupportedConfiguration,
)

from ...support.backends import registered
from ...support.decode_inputs import SCALE, arguments, make_inputs, on_device, verdict
from ...support.factories import make_batch, make_cache, moved
from ...support.libraries import (
    FA3_FWD,
    VLLM_FA3,
    VLLM_FA3_SCHEDULE,
    entries_in_pages,
    imported_python,
    paged_attention,
    recorded_operators,
)
from ...support.triton_mode import DEVICE, ON_GPU

DTYPES = (torch.bfloat16, torch.float16)
LENS = {  # query lengths, sequence lengths
    "one token": ([1] * 7, [0, 1, 63, 64, 65, 129, 521]),
    "two tokens": ([2] * 5, [0, 2, 64, 65, 131]),
    "ragged": ([3, 0, 1, 5], [131, 20, 0, 70]),
    "long": ([1] * 4, [3001, 0, 7, 1024]),
    "no requests": ([], []),
}
MASKS = FLASH_ATTN_3.ops["mla_decode"].masks if "mla_decode" in FLASH_ATTN_3.ops else ()
PACKAGES = {source.package: source for source in flash_attn.SOURCES_3_OF_ALL}
UPSTREAM_SCHEDULE = VLLM_FA3_SCHEDULE.replace("bool has_softcap", "int attention_chunk, bool has_softcap")


def compiled_decode(given):
    """Compute what the compiled decode of flash-attn 3 computes."""
    pages = torch.cat((given["v"], given["k"]), -1).squeeze(2)
    assert pages.shape[1] <= 32  # with larger pages, the library multiplies NaN of free entries by 0
    q = torch.cat((given["q_v"], given["q"]), -1)
    lens = given["cu_seqlens_q"].diff().tolist()
    assert given["max_seqlen_q"] >= max(lens) and (given["max_seqlen_k"] or 10**6) >= int(given["seqused_k"].max())
    table = given["page_table"]
    assert table.stride(-1) == 1
    rows = (given["seqused_k"].tolist(), lens)
    ranks = None
    if given.get("cp_world_size", 1) > 1:
        totals = given["cp_tot_seqused_k"]
        assert totals.dtype == torch.int32 and totals.is_contiguous() and totals.shape == given["seqused_k"].shape
        ranks = given["cp_world_size"], given["cp_rank"], totals.tolist()
    out, lse = paged_attention(
        q, entries_in_pages(pages, table), *rows, given["softmax_scale"], 512, given["is_causal"], ranks
    )
    out = out.to(q.dtype)
    return (out if given["out"] is None else given["out"].copy_(out)), lse.float()


@contextlib.contextmanager
def recorded(package):
    """Import a package's own Python of flash-attn 3 with recorded operators; return the recorders."""

    def schedule(given):
        return given["seqused_k"].repeat(2) + given["num_heads"]

    if package == "vllm":
        functions = {
            VLLM_FA3: lambda given: [*compiled_decode(given), torch.empty(0), torch.empty(0)],
            VLLM_FA3_SCHEDULE: schedule,
        }
        compiled = [f"vllm.vllm_flash_attn._vllm_fa{each}_C" for each in (2, 3)]
        python = imported_python(PACKAGES[package].module, *compiled, bare="vllm")
        with recorded_operators("_vllm_fa3_C", functions) as recorders, python:
            yield recorders
        return
    functions = {
        FA3_FWD: lambda given: (*compiled_decode(given), torch.empty(0), torch.empty(0)),
        UPSTREAM_SCHEDULE: schedule,
    }
    python = imported_python(PACKAGES[package].module, "flash_attn_3._C", "flash_attn_3")
    with recorded_operators("flash_attn_3", functions) as recorders, python as module:
        module._flash_attn_forward.register_kernel("cpu")(module._flash_attn_forward._init_fn)
        yield recorders


@pytest.fixture(params=PACKAGES)
def library(request, monkeypatch):
    """Provide flash-attn 3: on a GPU the library, and else one package's own Python; return the recorders or None."""
    if not sources.is_installed(PACKAGES[request.param].module):
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.setattr(flash_attn_decode, "SOURCES_3_OF_ALL", (PACKAGES[request.param],))
    if not ON_GPU:
        with recorded(request.param) as recorders:
            yield recorders
        return
    if not FLASH_ATTN_3.supports_compute_capability(torch.cuda.get_device_capability()):
        pytest.skip("flash-attn 3 does not serve this GPU")
    if reasons := sources.missing_artifacts((PACKAGES[request.param],)):
        pytest.skip("; ".join(reasons))
    yield None


@pytest.fixture
def library_of_ranks(monkeypatch):
    """Provide vLLM's copy of flash-attn 3, which serves context parallelism; return the recorders, or None on a GPU."""
    vllm = flash_attn.SOURCES_3_OF_RANKS
    if not sources.is_installed(vllm[0].module):
        pytest.skip("vllm is not installed")
    if not ON_GPU:
        with recorded("vllm") as recorders:
            yield recorders
        return
    if not FLASH_ATTN_3.supports_compute_capability(torch.cuda.get_device_capability()):
        pytest.skip("flash-attn 3 does not serve this GPU")
    if reasons := sources.missing_artifacts(vllm):
        pytest.skip("; ".join(reasons))
    yield None


def decode(inputs, prepared=(), out=None, **options):
    """Launch the decode on DEVICE; return the state on the CPU."""
    out, lse = flash_attn_decode.mla_decode(*arguments(*inputs, **options), out, prepared=prepared)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    return AttentionState(out.cpu(), lse.cpu())


def check_decode(lens, dtype, heads, block_size, library):
    inputs = make_inputs(*LENS[lens], heads, dtype, block_size=block_size)
    state = decode(inputs)
    verdict(state, *inputs)
    wide = decode(inputs, out_dtype=torch.float32)
    assert torch.equal(wide.out, state.out.float()) and torch.equal(wide.lse, state.lse)
    if not inputs[3].seq_lens.shape[0]:
        return
    prepared = flash_attn_decode.prepare(on_device(inputs[3]), heads)
    out = torch.full(inputs[0].shape, torch.nan, dtype=dtype, device=DEVICE)
    ahead = decode(inputs, prepared, out)
    verdict(ahead, *inputs)
    assert torch.equal(out.cpu(), ahead.out)
    if library is None:
        return
    call, made = library["fwd"].calls[-1], library["get_scheduler_metadata"].calls[-1]
    assert torch.equal(call["scheduler_metadata"], prepared[0]) and call["num_splits"] == made["num_splits"]
    assert library["fwd"].calls[0]["scheduler_metadata"] is None
    longest = call["max_seqlen_k"] or call["page_table"].shape[1] * call["k"].shape[1]
    assert (made["batch_size"], made["max_seqlen_q"]) == (inputs[3].seq_lens.shape[0], call["max_seqlen_q"])
    assert (made["max_seqlen_k"], made["page_size"]) == (longest, call["k"].shape[1])
    assert (made["num_heads"], made["num_heads_k"], made["headdim"], made["headdim_v"]) == (heads, 1, 64, 512)
    assert made["is_causal"] is call["is_causal"] is True
    assert torch.equal(made["cu_seqlens_q"], inputs[3].query_start_loc)


@pytest.mark.parametrize("heads", [16, 64, 128] if ON_GPU else [16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENS)
def test_within_the_budget(lens, dtype, heads, library):
    """Decode over a cache with NaN in free entries, and numbers out of range in the block table -> within the budget.

    The schedule of the library is made in the call or ahead, and the output goes to new or to given memory.
    """
    check_decode(lens, dtype, heads, 64, library)


def inputs_of_ranks(query_lens, seq_lens, size, heads, dtype):
    """Return the inputs of the decode of each of `size` ranks, and the inputs of one rank with all keys."""
    whole = make_inputs(query_lens, seq_lens, heads, dtype)
    ql, q_pe, cache, plan = whole
    entries = [
        cache[table[: -(-length // 64)].long()].flatten(0, 1)[:length]
        for table, length in zip(plan.block_table, seq_lens, strict=True)
    ]
    ranks = []
    for rank in range(size):
        owned = TokenOwnership(size, rank)
        local = [owned.count(length) for length in seq_lens]
        batch = make_batch([0] * len(local), local, 64)
        held = make_cache(batch, [own[rank::size] for own in entries], 576, dtype)
        starts = plan.query_start_loc
        common = CommonAttentionMetadata.make(
            starts, plan.seq_lens, batch.common.block_table, torch.full((int(starts[-1]),), -1)
        )
        of_rank = reference.build_mla_metadata(common, 64, 4096, max(query_lens), ownership=owned).decode
        ranks.append((ql, q_pe, held, of_rank))
    return ranks, whole


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lens", [([3], [10]), ([3, 0, 1, 5], [131, 20, 0, 70]), ([2] * 4, [1025, 2, 0, 640])])
def test_over_ranks(lens, size, library_of_ranks):
    """Decode several query tokens over keys that ranks share -> each rank, and the merged state, within the budget.

    The rank of every call gets the lengths of the whole sequences. In the first case with two ranks, the three query
    tokens see 4, 5 and 5 of rank 0's keys, so a causal mask over these keys would be wrong.
    """
    ranks, (ql, q_pe, cache, whole) = inputs_of_ranks(*lens, size, 128 if ON_GPU else 16, torch.bfloat16)
    states = []
    for inputs in ranks:
        plan = inputs[3]
        assert plan.mask == CAUSAL_OVER_RANKS
        given = arguments(*inputs)
        over = {"ownership": plan.ownership, "total_seq_lens": plan.total_seq_lens.to(DEVICE)}
        out, lse = (x.cpu() for x in flash_attn_decode.mla_decode(*given, **over))
        verdict(AttentionState(out, lse), *inputs)
        prepared = flash_attn_decode.prepare(on_device(plan), ql.shape[1])
        ahead, _ = flash_attn_decode.mla_decode(*given, prepared=prepared, **over)
        verdict(AttentionState(ahead.cpu(), lse), *inputs)
        wide = flash_attn_decode.mla_decode(*given[:10], torch.float32, *given[11:], **over)
        states.append(AttentionState(*(x.cpu() for x in wide)))
    if size == 2 and lens[1] == [10]:
        assert ranks[0][3].visible_lens.tolist() == [4, 5, 5]
    merged = functools.reduce(reference.merge_attn_states, states)
    gold = reference.mla_decode(ql.double(), q_pe.double(), cache.double(), whole, SCALE)
    low = reference.mla_decode(ql, q_pe, cache, whole, SCALE)
    for parity in compare_states("mla_decode", merged, AttentionState(low.out.float(), low.lse), gold):
        assert parity.passed, parity


def test_over_ranks_with_a_causal_mask_is_wrong(library_of_ranks):
    """Leave out the whole lengths of the example with 10 keys -> the state of rank 0 is over its budget."""
    ranks, _ = inputs_of_ranks([3], [10], 2, 16, torch.bfloat16)
    out, lse = flash_attn_decode.mla_decode(*arguments(*ranks[0]))
    with pytest.raises(AssertionError):
        verdict(AttentionState(out.cpu(), lse.cpu()), *ranks[0])


def test_ranks_of_a_call(library_of_ranks):
    """Plan and decode a step of two simulated ranks with flash-attn 3 -> the merged states are within the budget.

    The builder keeps its threshold of 3 query tokens, and its plan has the prepared schedule of flash-attn 3.
    """
    name = "flash_attn_3" if ON_GPU else "recorded"
    ranks, (ql, q_pe, cache, whole) = inputs_of_ranks([3, 1], [74, 130], 2, 16, torch.bfloat16)
    config = reference.MLAConfig.from_preset("deepseek-v2-lite")
    halves = [slice(0, 8), slice(8, 16)]  # heads of each rank

    def step(groups):
        _, _, held, plan = ranks[groups.ownership.rank]
        options = dict(num_speculative_tokens=2, context_parallel=groups, backend={"mla_decode": name})
        builder = fast.MLAMetadataBuilder(config, 64, 512, 8, **options)
        assert builder.reorder_batch_threshold == 3
        common = CommonAttentionMetadata.make(
            plan.query_start_loc, plan.total_seq_lens, plan.block_table, torch.full((4,), -1)
        )
        made = builder.build(0, moved(common, DEVICE)).decode
        assert made.backend == name and len(made.prepared) == 2
        mine = [x[:, halves[groups.ownership.rank]].to(DEVICE) for x in (ql, q_pe)]
        state = fast.dcp_decode(*mine, held.to(DEVICE), made, SCALE, groups, out_dtype=torch.float32)
        return AttentionState(state.out.cpu(), state.lse.cpu())

    stand_in = replace(FLASH_ATTN_3, name="recorded", device_type="cpu", capability=None, capability_end=None)
    with contextlib.nullcontext() if ON_GPU else registered(stand_in):
        found = fast.simulate(2, 1, step)
    gold = reference.mla_decode(ql.double(), q_pe.double(), cache.double(), whole, SCALE)
    low = reference.mla_decode(ql, q_pe, cache, whole, SCALE)
    for heads, state in zip(halves, found, strict=True):
        exact, rounded = (AttentionState(each.out[:, heads], each.lse[heads]) for each in (gold, low))
        for parity in compare_states("mla_decode", state, AttentionState(rounded.out.float(), rounded.lse), exact):
            assert parity.passed, parity
    if library_of_ranks is not None:
        calls = library_of_ranks["fwd"].calls
        assert {call["cp_rank"] for call in calls} == {0, 1} and {call["cp_world_size"] for call in calls} == {2}
        assert all(call["cp_tot_seqused_k"].tolist() == [74, 130] for call in calls)


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("lens", ["ragged", "long"])
def test_block_sizes(lens, block_size, library):
    check_decode(lens, torch.bfloat16, 128 if ON_GPU else 16, block_size, library)


def test_blocks_that_do_not_follow_each_other(library):
    """Decode over every second block of a larger tensor: blocks of 64 are refused, blocks of 32 are served."""
    for block_size in (64, 32):
        ql, q_pe, cache, plan = make_inputs(*LENS["ragged"], 16, torch.bfloat16, block_size=block_size)
        given = list(arguments(ql, q_pe, cache, plan))
        given[2] = torch.stack((given[2], torch.full_like(given[2], torch.nan)), 1)[:, 0]
        if block_size == 64:
            with pytest.raises(UnsupportedConfiguration, match="flash_attn_3: serves blocks of more than 32 tokens"):
                flash_attn_decode.mla_decode(*given)
        else:
            out, lse = flash_attn_decode.mla_decode(*given)
            verdict(AttentionState(out.cpu(), lse.cpu()), ql, q_pe, cache, plan)


def test_nan_stays_in_its_request(library):
    """Put NaN into a key and into a query -> the other requests get the same bits as before."""
    inputs = make_inputs(*LENS["one token"], 16, torch.bfloat16)
    plain = decode(inputs)
    ql, _, cache, plan = inputs
    cache[plan.block_table[5, 1], 3] = torch.nan
    ql[6] = torch.nan
    state = decode(inputs)
    assert torch.equal(state.out[:5], plain.out[:5]) and torch.equal(state.lse[:, :5], plain.lse[:, :5])


def test_padding_tokens(library):
    """Decode with NaN in rows after the last request -> the rows of the requests are unchanged."""
    inputs = make_inputs(*LENS["ragged"], 16, torch.bfloat16)
    plain = decode(inputs)
    ql, q_pe, cache, plan = inputs
    longer = [torch.cat((x, torch.full_like(x[:3], torch.nan))) for x in (ql, q_pe)]
    if not ON_GPU:
        pytest.skip("the recorder has no rows after the last request")
    state = decode((*longer, cache, plan))
    assert torch.equal(state.out[:9], plain.out) and torch.equal(state.lse[:, :9], plain.lse)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_replay_with_new_lengths(library):
    """Capture a decode, write new lengths and a new schedule in place, and replay -> the state for the new lengths."""
    ql, q_pe, cache, plan = make_inputs([2] * 4, [700, 130, 64, 300], 16, torch.bfloat16)
    given = arguments(ql, q_pe, cache, plan)
    prepared = tuple(x.clone() for x in flash_attn_decode.prepare(on_device(plan), 16))
    flash_attn_decode.mla_decode(*given, prepared=prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_decode.mla_decode(*given, prepared=prepared)
    for lens in ([699, 2, 0, 299], [5, 130, 64, 2]):
        visible = torch.tensor([max(length - 1 + i, 0) if length else 0 for length in lens for i in (0, 1)])
        now = replace(plan, seq_lens=torch.tensor(lens, dtype=torch.int32), visible_lens=visible.int())
        given[4].copy_(now.seq_lens)
        for mine, new in zip(prepared, flash_attn_decode.prepare(on_device(now), 16), strict=True):
            mine.copy_(new)
        graph.replay()
        verdict(AttentionState(out.cpu(), lse.cpu()), ql, q_pe, cache, now)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(), None),
        (dict(query_lens=QueryLenSupport.VARLEN, graph=GraphSupport.ANY), None),
        (dict(dtype=torch.float32), "serves torch.bfloat16, torch.float16, got torch.float32"),
        (dict(block_size=48), "serves block sizes (16, 32, 64, 128), got 48"),
        (dict(head_dims=(("kv_lora_rank", 256),)), "serves kv_lora_rank in (512,), got 256"),
        (dict(head_dims=(("qk_rope_head_dim", 32),)), "serves qk_rope_head_dim in (64,), got 32"),
        (dict(mask="visible_lens"), f"applies the masks {', '.join(MASKS)}, got visible_lens"),
        (dict(batch_invariant=True), "is not batch-invariant"),
        (dict(cache_format=FP8_E4M3), "reads caches in compute_dtype, got fp8_e4m3"),
    ],
)
def test_refusals(change, reason):
    """Ask for a decode that flash-attn 3 cannot serve -> the declaration gives the one reason."""
    if "mla_decode" not in FLASH_ATTN_3.ops:
        pytest.skip("fa3-fwd alone has no decode")
    options = dict(
        dtype=torch.bfloat16, head_dims=(("kv_lora_rank", 512), ("qk_rope_head_dim", 64)), block_size=64,
        out_dtype=torch.bfloat16, cache_format=COMPUTE_FORMAT, mask="causal", lse=True,
    )  # fmt: skip
    request = backends.KernelRequest("mla_decode", torch.device("cpu"), **(options | change))
    assert FLASH_ATTN_3.ops["mla_decode"].reasons(request) == ([] if reason is None else [reason])
    assert all(FLASH_ATTN_3.is_only_named(op) for op in backends.DECODES)
    assert not FLASH_ATTN_3.is_only_named("flash_attn_varlen")


@pytest.mark.skipif(
    "prepared" not in {each.name for each in fields(DecodeMetadata)}, reason="plans of decodes have no prepared tensors"
)
def test_hooks(library):
    """Finish the plan of a step -> prepared tensors if flash-attn 3 decodes, and else the same plan."""
    from fast.mla.decode_hooks import FlashAttn3Hooks

    from ...support.factories import make_batch

    step = make_batch([1, 1], [70, 200], 64)
    metadata = reference.build_mla_metadata(step.common, 64, 4096, 1)
    metadata = replace(metadata, decode=on_device(replace(metadata.decode, backend="flash_attn_3")))
    hooks = FlashAttn3Hooks("flash_attn_3")
    found = hooks.finalize_metadata(metadata, 16)
    expected = flash_attn_decode.prepare(metadata.decode, 16)
    assert all(torch.equal(x, y) for x, y in zip(found.decode.prepared, expected, strict=True))
    other = replace(metadata, decode=replace(metadata.decode, backend="triton"))
    assert hooks.finalize_metadata(other, 16) is other

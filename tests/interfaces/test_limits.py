"""Tests of the limits of arguments: a value on a limit is accepted, and the next value beyond the limit is refused.

If a limit changes by one, a case of ACCEPTED or of REFUSED fails. The last tests check the staging memory: pinned host
memory from which plans are copied to a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from reference.interfaces import (
    NEUTRAL_SPLIT_RULE,
    CommonAttentionMetadata,
    ContextChunk,
    MLAConfig,
    PathCosts,
    PrefillMetadata,
    QueryLenSupport,
    ScheduleCosts,
    TokenOwnership,
    check_interleave,
)

from ..support.factories import DIRECT, integers, make_batch, offsets

V3 = MLAConfig.from_preset("deepseek-v3")


@pytest.fixture(autouse=True)
def _plain(plain_errors):
    """Turn off the run-time check of annotations, so that the tests see the error messages that a user sees."""


def slots(ops, block_size=4, tokens=3, ranks=None, table=((5, 2**31 - 1),), lens=(6,)):
    """Return the slots of one request's last two tokens; further slots, up to `tokens` in all, belong to no request.

    `ranks` is None, or (size, rank, interleave) of a rank that shares the request with other ranks.
    """
    arguments = integers(0, 2), integers(*lens), torch.tensor(table, dtype=torch.int32), block_size, tokens
    return (ops.slot_mapping(*arguments) if ranks is None else ops.dcp_slot_mapping(*arguments, *ranks)).tolist()


def paths(ops, query_lens=(0, 1), context_lens=(0, 7), threshold=0):
    return ops.choose_paths(integers(*query_lens).cpu(), integers(*context_lens).cpu(), threshold).tolist()


def local(ops, chunk, block_size=4):
    return ops.make_local_attention_virtual_batches(make_batch([2], [9], 4).common, chunk, block_size).seq_lens.tolist()


def cascade(ops, prefix, row, block_size=4):
    plan = ops.build_mla_metadata(make_batch([1, 1], [20, 30], 4).common, 4, 64).decode
    parts = ops.split_shared_prefix(plan, prefix, block_size, row)
    assert parts.prefix.block_table.equal(plan.block_table[row : row + 1, : prefix // 4])
    return parts.suffix.seq_lens.tolist()


def worthwhile(ops, prefix):
    return ops.use_cascade_attention(prefix, integers(1, 1).cpu(), integers(9, 9).cpu(), DIRECT)


def schedule(ops, programs=1, **costs):
    return ops.plan_decode(integers(65), programs, ScheduleCosts(**costs)).tile_ranges.tolist()


def cut(**numbers):
    return dataclasses.replace(NEUTRAL_SPLIT_RULE, **numbers)


def built(ops, requests=2, tokens=30, **options):
    options = {"block_size": 16, "max_model_len": 30, "max_num_seqs": 2} | options
    common = make_batch([1] * requests, [tokens, *[4] * (requests - 1)]).common
    return ops.MLAMetadataBuilder(DIRECT, **options).build(0, common).num_decodes


def wire(ops, tokens=0, heads=4, rope=0, size=4, merge="a2a", **sizes):
    return ops.dcp_wire_bytes(tokens, heads, 8, rope, size, merge, **{"element_size": 2} | sizes)


def ownership(_, size=1, rank=0, interleave=1):
    return TokenOwnership(size, rank, interleave).count(5)


# name: (function that makes a call with values on the limits, expected result)
ACCEPTED = {
    "slots of blocks of one token": (lambda ops: slots(ops, 1, 2, table=[[7, 8, 9]], lens=[3]), [8, 9]),
    "the last block that int32 can name": (slots, [(2**31 - 1) * 4, (2**31 - 1) * 4 + 1, -1]),
    "as many slots as tokens": (lambda ops: slots(ops, tokens=2), [(2**31 - 1) * 4, (2**31 - 1) * 4 + 1]),
    "slots of one rank": (lambda ops: slots(ops, ranks=(1, 0, 4)), [(2**31 - 1) * 4, (2**31 - 1) * 4 + 1, -1]),
    "slots of the last rank": (
        lambda ops: slots(ops, 2, 2, (2, 1, 1), [[5, 2**31 - 1]]), [-1, (2**31 - 1) * 2]
    ),
    "slots without columns": (lambda ops: slots(ops, table=[[]], lens=[0]), [-1] * 3),
    "slots of a rank without columns": (lambda ops: slots(ops, ranks=(2, 1), table=[[]], lens=[0]), [-1] * 3),
    "a chunk of one block": (lambda ops: local(ops, 4), [4, 1]),
    "a prefix of one block, the first row": (lambda ops: cascade(ops, 4, 0), [16, 26]),
    "a prefix of the whole table, the last row": (lambda ops: cascade(ops, 40, 1), [0, 0]),
    "nothing shared": (lambda ops: worthwhile(ops, 0), False),
    "threshold 0": (paths, [True, False]),
    "one program, one head, no overhead": (schedule, [[0, 0, 0, 2, 0]]),
    "the most requests, of the largest length": (built, 2),
    "a function that gives 0 programs": (lambda ops: built(ops, num_programs=lambda _: 0), 2),
    "a step without tokens": (wire, {"all_gather": 0, "all_to_all": 0}),
    "one rank receives nothing": (lambda ops: wire(ops, 3, size=1), {"all_gather": 0, "all_to_all": 0}),
    "one of each size": (
        lambda ops: wire(ops, 1, 2, 0, 2, "ag_rs", element_size=1, lse_size=1),
        {"all_gather": 8 + 2, "reduce_scatter": 8},
    ),
    "the only rank": (ownership, 5),
    "the last rank": (lambda ops: ownership(ops, 4, 3), 1),
    "an interleave of a whole block": (lambda ops: check_interleave(4, 4), None),
    "no tokens and no context": (lambda ops: ops.choose_path(0, 0, V3), "absorbed"),
}  # fmt: skip
# name: (function that makes a call with a value beyond a limit, beginning of the message)
REFUSED = {
    "blocks of no token": (lambda ops: slots(ops, 0), "block_size: expected at least 1, got 0"),
    "fewer slots than tokens": (lambda ops: slots(ops, tokens=1), "num_tokens: expected at least 2, got 1"),
    "fewer slots of a rank": (lambda ops: slots(ops, tokens=1, ranks=(1, 0, 4)),
                              "num_tokens: expected at least 2, got 1"),
    "a rank past the last": (lambda ops: slots(ops, ranks=(2, 2)), r"rank: expected an int in \[0, 2\), got 2"),
    "a rank below 0": (lambda ops: ownership(ops, 2, -1), r"rank: expected an int in \[0, 2\), got -1"),
    "a rank that is a bool": (lambda ops: ownership(ops, 2, True), r"rank: expected an int in \[0, 2\), got True"),
    "no ranks": (lambda ops: ownership(ops, 0), "size: expected a positive int, got 0"),
    "an interleave of no tokens": (lambda ops: ownership(ops, 2, 1, 0), "interleave: expected a positive int, got 0"),
    "a block size of 0": (lambda ops: check_interleave(1, 0), "block_size: expected a positive int, got 0"),
    "two blocks": (lambda ops: check_interleave(8, 4), "interleave: expected a divisor of the block size 4, got 8"),
    "1.5 interleaves": (lambda ops: check_interleave(4, 6), "interleave: expected a divisor of the block size 6"),
    "no chunk": (lambda ops: local(ops, 0), "attention_chunk_size: expected a multiple of the block size 4, got 0"),
    "a negative chunk": (lambda ops: local(ops, -4), "attention_chunk_size: expected a multiple of the block size 4"),
    "a chunk of half a block": (lambda ops: local(ops, 6), "attention_chunk_size: expected a multiple of the block"),
    "half a block shared": (lambda ops: cascade(ops, 2, 0), "common_prefix_len: expected a positive multiple of the"),
    "a block more than the table": (lambda ops: cascade(ops, 44, 0), "common_prefix_len: expected at most the 10 b"),
    "a row below 0": (lambda ops: cascade(ops, 4, -1), r"row: expected a request in \[0, 2\), got -1"),
    "a row past the last": (lambda ops: cascade(ops, 4, 2), r"row: expected a request in \[0, 2\), got 2"),
    "blocks of no token shared": (lambda ops: cascade(ops, 4, 0, 0), "block_size: expected a positive int, got 0"),
    "a negative shared length": (lambda ops: worthwhile(ops, -1), "common_prefix_len: expected an int >= 0, got -1"),
    "a threshold below 0": (lambda ops: paths(ops, threshold=-1), "decode_threshold: expected an int >= 0, got -1"),
    "a negative query length": (lambda ops: ops.choose_path(-1, 0, V3), "query_len: expected an int >= 0, got -1"),
    "a negative context length": (lambda ops: ops.choose_path(0, -1, V3), "context_len: expected an int >= 0, got -1"),
    "a negative query of several": (lambda ops: paths(ops, (0, -1)), "query_lens: expected lengths >= 0, got -1 at"),
    "a negative context of several": (lambda ops: paths(ops, context_lens=(0, -1)), "context_lens: expected lengths"),
    "no program": (lambda ops: schedule(ops, 0), "num_programs: expected at least 1, got 0"),
    "a cost below 0": (lambda ops: schedule(ops, request_cost=-1), "request_cost: expected an int >= 0, got -1"),
    "no splits for a tile": (
        lambda ops: schedule(ops, splits_per_tile=0), "splits_per_tile: expected a positive int, got 0",
    ),
    "too many splits for a tile": (
        lambda ops: schedule(ops, splits_per_tile=2**20), "splits_per_tile: expected less than 2.20, got 1048576",
    ),
    "a split cost below 0": (lambda ops: schedule(ops, split_cost=-1), "split_cost: expected an int >= 0, got -1"),
    "splits of an odd number of tiles": (lambda ops: cut(small_tiles=3), "small_tiles: expected an even number, got 3"),
    "no splits": (lambda ops: cut(small_splits=0), "small_splits: expected a positive int, got 0"),
    "large splits below small ones": (lambda ops: cut(large_tiles=6), "large_tiles: expected at least 8, got 6"),
    "fewer splits than small ones": (lambda ops: cut(max_splits=15), "max_splits: expected at least 16, got 15"),
    "too many requests": (lambda ops: built(ops, 3), "common: expected at most 2 requests, got 3"),
    "too many tokens": (lambda ops: built(ops, 2, 31), "common: expected at most 30 tokens a request, got 31 at re"),
    "a function below 0": (lambda ops: built(ops, num_programs=lambda _: -1),
                           "num_programs: expected a function that gives at least 0, got -1"),
    "a negative number of tokens": (lambda ops: wire(ops, -1), "num_tokens: expected an int >= 0, got -1"),
    "a negative rope dim": (lambda ops: wire(ops, rope=-1), "qk_rope_head_dim: expected an int >= 0, got -1"),
    "6 heads, 4 ranks": (lambda ops: wire(ops, heads=6), "num_heads: expected a multiple of 4 ranks, g"),
    "no head to gather": (lambda ops: wire(ops, heads=0), "num_heads: expected a positive int, got 0"),
    "elements of no byte": (lambda ops: wire(ops, element_size=0), "element_size: expected a positive int, got 0"),
    "an LSE of no byte": (lambda ops: wire(ops, lse_size=0), "lse_size: expected a positive int, got 0"),
    "an unknown merge": (lambda ops: wire(ops, merge="rs"), "merge: expected one of ag_rs, a2a, got 'rs'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_on_the_bound(ops, case):
    call, wanted = ACCEPTED[case]
    assert call(ops) == wanted


@pytest.mark.parametrize("case", REFUSED)
def test_past_the_bound(ops, case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{message}"):
        call(ops)


def test_a_table_without_columns(ops):
    """A batch in which no request has keys gets a plan from a block table without columns."""
    table, lens = torch.zeros(2, 0, dtype=torch.int32), integers(0, 0)
    common = CommonAttentionMetadata.make(
        integers(0, 2, 2).cpu(), lens.cpu(), table, torch.full((2,), -1, dtype=torch.int64)
    )
    virtual = ops.make_local_attention_virtual_batches(common, 8, 4)
    assert virtual.block_table.shape == (1, 0) and virtual.seq_lens.tolist() == [0]
    assert virtual.query_start_loc.tolist() == [0, 2] and virtual.max_query_len == virtual.num_actual_tokens == 2
    assert ops.common_prefix_len(common, 4) == 0
    plan = ops.build_mla_metadata(common, 4, 64, 2)
    assert plan.num_decodes == 2 and plan.decode.visible_lens.tolist() == [0, 0]
    empty = CommonAttentionMetadata.make(integers(0).cpu(), integers().cpu(), table[:0], common.slot_mapping[:0])
    virtual = ops.make_local_attention_virtual_batches(empty, 8, 4)
    assert virtual.block_table.shape == (0, 0) and virtual.max_query_len == virtual.num_reqs == 0


def test_a_workspace_larger_than_needed(ops):
    """`dcp_gather_context` accepts a workspace with more rows than it needs, and does not change the unused rows."""
    chunk = ops.plan_context_chunks(integers(50).cpu(), 64, 4, 2, 1)[0]
    cache, table = torch.randn(9, 4, 6), torch.arange(8, dtype=torch.int32)[None]
    plan = PrefillMetadata(table, offsets([1]), 1, (), 4)

    def program(ranks):
        local_chunk = ops.rank_local_chunk(chunk, ranks.ownership)
        workspace = torch.full((3 * local_chunk.padded_tokens + 5, 6), 7.0)
        found = ops.dcp_gather_context(cache, plan, local_chunk, ranks, workspace=workspace)
        plain = ops.dcp_gather_context(cache, plan, local_chunk, ranks)
        return found.equal(plain), bool(workspace[-5:].eq(7).all()), bool(workspace[:-5].eq(7).any())

    assert ops.simulate(2, 1, program) == [(True, True, False)] * 2


def test_the_choice_of_one_is_the_choice_of_many(ops):
    """The decodes of a batch are all requests before the first request that takes the expanded path.

    In these batches, a request with one query token takes the absorbed path. A request with several query tokens takes
    the expanded path in two cases: the expanded path is cheaper, or `query_len_support` is UNIFORM or SINGLE_ONLY.
    """
    absorb_all, expand_all = PathCosts(expanded_request=1e15), PathCosts(absorbed_request=1e15)
    for lens in ([9], [1, 9], [9, 12, 7], [1, 9, 1, 12]):
        common = make_batch(lens, [n + 20 for n in lens]).common
        assert ops.build_mla_metadata(common, 16, 256, config=V3, costs=absorb_all).num_decodes == len(lens)
        first = next(request for request, n in enumerate(lens) if n > 1)
        assert ops.build_mla_metadata(common, 16, 256, config=V3, costs=expand_all).num_decodes == first
        for support in (QueryLenSupport.UNIFORM, QueryLenSupport.SINGLE_ONLY):
            decodes = ops.build_mla_metadata(common, 16, 256, config=V3, costs=absorb_all, query_len_support=support)
            assert decodes.num_decodes == first
    common = make_batch([9, 600, 9], [5000, 600, 5000]).common  # the cheaper paths are absorbed, expanded, absorbed
    assert ops.build_mla_metadata(common, 16, 8192, config=V3).num_decodes == 1


def test_a_tie_is_no_gain(ops):
    """A cascade, which reads a shared prefix once, is not chosen if it saves exactly as many bytes as it costs.

    There are 76 requests with one query token each. The prefix is read once instead of 76 times, which saves 75 x
    prefix x 32 elements of 2 bytes. The additional attention states cost 16 bytes x 76 requests x 3 heads x 25
    elements: two states are written and read in float32, and each has 24 outputs and an LSE for each head. The two
    numbers of bytes are equal for a prefix of 19 tokens.
    """
    lens = integers(*[1] * 76).cpu(), integers(*[40] * 76).cpu()
    assert 16 * 76 * DIRECT.num_heads * (DIRECT.kv_lora_rank + 1) == 75 * 19 * 32 * 2
    assert [ops.use_cascade_attention(prefix, *lens, DIRECT) for prefix in (18, 19, 20)] == [False, False, True]


@pytest.mark.parametrize("threshold", [1, 2, 3])
@pytest.mark.parametrize("chosen", [False, True], ids=["by threshold", "by costs"])
def test_every_small_batch(ops, threshold, chosen):
    """The plan is right for every batch of up to 3 requests with 0 to 3 query tokens each.

    Some of these batches have as many tokens as requests, but not one token for each request.
    """
    options = dict(config=DIRECT, costs=PathCosts(expanded_request=1e15)) if chosen else {}
    for lens in (lens for requests in range(4) for lens in itertools.product(range(4), repeat=requests)):
        ends = [5 + 2 * request + query_len for request, query_len in enumerate(lens)]
        common = make_batch(lens, ends, 4).common
        plan = ops.build_mla_metadata(common, 4, 64, threshold, **options)
        decodes = next((request for request, n in enumerate(lens) if n > threshold and not chosen), len(lens))
        rows = [range(end - n + 1, end + 1) for n, end in zip(lens[:decodes], ends, strict=False)]
        assert (plan.num_decodes, plan.num_prefills) == (decodes, len(lens) - decodes), lens
        assert plan.decode.visible_lens.tolist() == [visible for own in rows for visible in own], lens
        assert plan.decode.seq_lens.tolist() == ends[:decodes] and plan.num_decode_tokens == sum(lens[:decodes])
        assert plan.decode.max_query_len == max(lens[:decodes], default=0), lens
        assert plan.prefill.max_query_len == max(lens[decodes:], default=0), lens
        assert plan.prefill.query_start_loc.tolist() == offsets(lens[decodes:]).tolist(), lens


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_chunks_begin_at_multiples_of_d_i(ops, size, interleave):
    """`rank_local_chunk` refuses a chunk in which a request does not begin at a multiple of D x I tokens.

    D ranks share each sequence, and each rank in turn holds I tokens (`size`, `interleave`).
    """
    period, ownership = size * interleave, TokenOwnership(size, 0, interleave)
    for start in range(3 * period + 1):
        chunk = ContextChunk(integers(0, start, period), offsets([3, 2, 5]), 10, 5)
        if start % period == 0:
            owned = [[sum(token // interleave % size == rank for token in range(n)) for n in (3, 2, 5)]
                     for rank in range(size)]  # fmt: skip
            for rank in range(size):
                local_chunk = ops.rank_local_chunk(chunk, TokenOwnership(size, rank, interleave))
                assert local_chunk.local_starts.tolist() == [0, start // size, interleave]
                assert local_chunk.local_cu_seq_lens.tolist() == [offsets(own).tolist() for own in owned]
                assert (local_chunk.local_tokens, local_chunk.padded_tokens) == (sum(owned[rank]), sum(owned[0]))
        else:
            wanted = f"^chunk.starts: expected multiples of {period}, got {start} at reque"
            with pytest.raises(ValueError, match=wanted):
                ops.rank_local_chunk(chunk, ownership)


# Tests of the pinned memory from which plans are copied to a GPU. They need no GPU. They check that the host does not
# overwrite memory before a copy from this memory has run.


class Event:
    """A fake CUDA event that logs its creation and each record; a test sets `ran` to pretend that the copy has run."""

    def __init__(self, log):
        self.log, self.ran = log, True
        log.append(("new", self))

    def record(self, stream):
        assert stream == "stream"
        self.ran = False
        self.log.append(("record", self))

    def query(self):
        return self.ran


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Replace CUDA events by `Event`, and do not pin memory; `pinned` lists the tensors that would be pinned."""
    found, empty = SimpleNamespace(log=[], pinned=[]), torch.empty

    def unpinned(*shape, pin_memory=False, **options):
        tensor = empty(*shape, **options)
        found.pinned += [tensor] if pin_memory else []
        return tensor

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(found.log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    return found


def test_staging_writes_only_what_has_been_copied(without_a_gpu):
    """`StagingBuffer.send` uses memory whose last copy has run, or new memory, and never waits.

    Each piece of memory has an event, which is recorded after each copy from this memory.
    """
    from fast.mla.builder import StagingBuffer

    staging, log, made = StagingBuffer(), without_a_gpu.log, []
    # for each plan: the sizes of its tensors, the events whose copies have run before `send`, and the event that `send`
    # uses for the plan (None: a new event)
    for number, (sizes, ran, taken) in enumerate([
        ((3, 2), (), None), ((1,), (), None), ((4,), (0,), 0), ((2,), (), None), ((11,), (1, 2), 1), ((9,), (), 2)
    ]):  # fmt: skip
        for event in ran:
            made[event].ran = True
        log.clear()
        tensors = [torch.full((size,), number, dtype=torch.int32) for size in sizes]
        assert staging.send(tensors, torch.device("cpu")).tolist() == [number] * sum(sizes)
        recorded = [event for what, event in log if what == "record"]
        assert len(recorded) == 1 and log[-1][0] == "record", "the event is not recorded after the copy"
        made += recorded if taken is None else []
        assert recorded == [made[-1 if taken is None else taken]]
    # New memory has twice as many elements as its plan. The plans with a new event (5, 1 and 2 elements) got new
    # memory. The last two plans (11 and 9 elements) got new memory for an old event, whose memory was too small.
    assert [memory.shape[0] for memory in without_a_gpu.pinned] == [10, 2, 4, 22, 18]


def test_staging_in_and_outside_of_inference_mode(without_a_gpu):
    """Memory that was allocated in inference mode can be written outside of inference mode."""
    from fast.mla.builder import StagingBuffer

    staging, piece = StagingBuffer(), torch.arange(3, dtype=torch.int32)
    with torch.inference_mode():
        staging.send([piece], torch.device("cpu"))
    for _, event in without_a_gpu.log:
        event.ran = True
    assert staging.send([piece], torch.device("cpu")).tolist() == [0, 1, 2]
    assert len(without_a_gpu.pinned) == 1


def test_plans_go_to_a_device_in_one_copy(without_a_gpu):
    """`to_device` sends all tensors in one copy, with or without staging memory, and keeps their names and shapes."""
    from fast.mla.staging import to_device

    tensors = [integers(1, 2, 3), integers(4), torch.arange(6, dtype=torch.int32).view(2, 3), integers()]
    sent = []

    class Staging:
        def send(self, flat, device):
            sent.append(device)
            return torch.cat(flat)

    elsewhere = torch.device("meta")  # any device that is not the CPU
    tensors = dict(zip("abcd", tensors, strict=True))
    found = to_device(tensors, elsewhere, Staging())
    assert [*found] == [*tensors] and sent == [elsewhere]
    assert [tensor.tolist() for tensor in found.values()] == [tensor.tolist() for tensor in tensors.values()]
    found = to_device(tensors, elsewhere, None)
    assert [tensor.shape for tensor in found.values()] == [tensor.shape for tensor in tensors.values()]
    assert all(tensor.device == elsewhere and tensor.dtype == torch.int32 for tensor in found.values())
    assert [memory.tolist() for memory in without_a_gpu.pinned] == [[1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]
    assert to_device(tensors, torch.device("cpu"), None) is tensors
    assert to_device({}, elsewhere, None) == {}

"""Tests of `advance_step` with grouped-query attention: several steps on the device equal steps from the host.

`advance_step` turns the batch of a step into the batch of the next step: the sampled token of each request becomes its
one query token. The window of each request moves with its tokens, and so does its attention chunk. Before each step,
the blocks that the window or the attention chunk no longer reaches are freed: their table entries are no blocks
(NO_BLOCKS), and their numbers in the cache are NaN.

Of the GPU backends of `fast`, only "torch" supports float64. On a GPU, `fast` therefore runs in float32 and bfloat16,
which the Triton kernels serve. `check_outputs` compares the outputs with `reference` in float64, within the budgets of
`fast.parity`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from fast.parity import compare
from reference.interfaces import CommonAttentionMetadata, GraphSupport, TokenOwnership
from reference.interfaces.gqa import CrossAttentionBatch

from ..support.factories import assert_close64, assert_same_bits, integers, make_batch, table_without_blocks
from ..support.gqa import CONFIGS as ORDINARY
from ..support.gqa import GROUPED, dtypes_of, visible_ranges
from ..support.gqa_layers import GQAStep, width_of
from ..support.gqa_plans import CROSS, PLAIN, cross_batch, wanted_ranges
from ..support.planning import PACKAGES, same
from ..support.properties import given, st

BLOCK, WIDTH, VOCABULARY, STEPS = 16, 4, 50, 6
LENS, IDS = [14, 0, 1, 33, 47], [3, 0, 9, 41, 7]
NAMES = ("grouped", "window 1", "window of a page", "window of a page + 1", "all of them")
CHUNKS = {
    "chunks of a page": replace(GROUPED, attention_chunk_size=16),
    "chunks of two pages": replace(GROUPED, attention_chunk_size=32, attention_sinks=True),
    "chunks and a window": replace(GROUPED, attention_chunk_size=32, sliding_window=7, logits_soft_cap=1.1),
}
CONFIGS = {name: ORDINARY[name] for name in NAMES} | CHUNKS


class Loop:
    """Decode steps of one layer: embed the tokens, attend, and take the most likely token of each request.

    Args:
        ops: the package.
        config: config of the layer.
        programs: number of programs of the schedule.
        dtype: dtype of the layer.
        rounded: dtype to which all numbers are rounded first; None means `dtype`.

    Attributes:
        ids: the tokens that each step of the last run embedded.
    """

    def __init__(self, ops, config, programs, dtype=torch.float64, rounded=None):
        torch.manual_seed(7)

        def random(*shape):
            return torch.randn(*shape, dtype=torch.float64).to(rounded or dtype).to(dtype)

        self.ops, self.config, self.ids = ops, config, []
        sinks = random(config.num_heads) if config.attention_sinks else None
        self.step = GQAStep.of(ops, config, len(LENS) * WIDTH, dtype, sinks, BLOCK)
        self.table = torch.randperm(len(LENS) * WIDTH).view(len(LENS), WIDTH).int()
        self.embedding = random(VOCABULARY, width_of(config))
        self.context = random(*self.step.kv_cache.shape)
        self.builder = ops.GQAMetadataBuilder(
            config, BLOCK, BLOCK * WIDTH, len(LENS), num_programs=programs, dtype=dtype
        )

    def sample(self, hidden):
        return (hidden @ self.embedding.T).argmax(-1)

    def free(self, table, lens):
        """Free the blocks whose keys no query token of a step attends: change the table, and the bytes in the cache."""
        freed = table_without_blocks(*table.shape)
        for request, length in enumerate(lens):
            first, _ = visible_ranges(self.config, 1, length)[0]
            for column in range(first // BLOCK):
                self.step.kv_cache[:, int(self.table[request, column])] = torch.nan
                table[request, column] = freed[request, column]

    def from_host(self, steps, captured=True, ids_of_steps=None):
        """Run steps whose batches are made on the host from the lengths; return the outputs and the plans.

        Without `ids_of_steps`, each step embeds the tokens that the step before sampled.
        """
        self.step.kv_cache.copy_(self.context)
        build = self.builder.build_for_cudagraph_capture if captured else lambda common: self.builder.build(0, common)
        lens, ids, outputs, plans, self.ids = list(LENS), list(IDS), [], [], []
        for number in range(steps):
            ids = ids if ids_of_steps is None else ids_of_steps[number]
            self.ids.append(ids)
            table = self.table.clone()
            self.free(table, lens)
            common = CommonAttentionMetadata.from_lens([1] * len(lens), lens, table, BLOCK)
            plans.append(build(common))
            hidden = self.step(self.embedding[torch.tensor(ids)], (common.seq_lens.long() - 1).clamp(min=0), plans[-1])
            outputs.append(hidden)
            ids = [token if length else 0 for token, length in zip(self.sample(hidden).tolist(), lens, strict=True)]
            lens = [length + (length > 0) for length in lens]
        return outputs, plans

    def on_device(self, steps):
        """Run the same steps with `advance_step`, over upper bounds of the lengths on the CPU."""
        self.step.kv_cache.copy_(self.context)
        lens, table = list(LENS), self.table.clone()
        exact = CommonAttentionMetadata.from_lens([1] * len(LENS), LENS, table, BLOCK)
        bounds = torch.full((len(LENS),), BLOCK * WIDTH, dtype=torch.int32, device="cpu")
        common = replace(
            exact, seq_lens=exact.seq_lens.clone(), query_start_loc=exact.query_start_loc.clone(), seq_lens_cpu=bounds,
            max_seq_len=BLOCK * WIDTH,
        )  # fmt: skip
        ids, positions, outputs, plans = torch.tensor(IDS), (common.seq_lens.long() - 1).clamp(min=0), [], []
        self.ids = []
        options = {"graph": GraphSupport.ANY} if self.ops.__name__ == "fast" else {}
        for _ in range(steps):
            self.free(table, lens)
            plan = self.builder.build_for_cudagraph_capture(common)
            self.ids.append(ids.tolist())
            hidden = self.step(self.embedding[ids], positions, plan)
            outputs.append(hidden)
            # the next step overwrites the lengths, blocks, offsets and slots that the plan shares with the batch
            held = {name: getattr(plan.decode, name).clone() for name in ("seq_lens", "block_table")}
            plans.append(replace(plan, decode=replace(plan.decode, **held), slot_mapping=plan.slot_mapping.clone()))
            common = self.ops.advance_step(self.sample(hidden), ids, positions, common, BLOCK, **options)
            lens = [length + (length > 0) for length in lens]
        return outputs, plans


def check_outputs(loop, outputs, dtype):
    """Assert that the outputs of a run of `fast` are within the budget; `reference` embeds the same tokens."""
    runs = [Loop(reference, loop.config, 0, wide, dtype) for wide in (dtype, torch.float64)]
    low, gold = (torch.cat(run.from_host(STEPS, ids_of_steps=loop.ids)[0]) for run in runs)
    parity = compare("steps", torch.cat(outputs), low, gold)
    assert parity.passed, parity


@pytest.mark.parametrize("programs", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps(ops, name, programs):
    """k steps on the device give the bits of k steps from the host; window and attention chunk follow the tokens."""
    for dtype in dtypes_of(ops, name == "chunks and a window"):
        loop = Loop(ops, CONFIGS[name], programs, dtype)
        wanted, plans = loop.from_host(STEPS)
        found, advanced = loop.on_device(STEPS)
        for one, other, plan, own in zip(wanted, found, plans, advanced, strict=True):
            assert_same_bits(other, one)
            for field in ("seq_lens", "visible_lens", "first_visible", "block_table", "query_start_loc"):
                same(getattr(own.decode, field), getattr(plan.decode, field), field)
            same(own.schedule, plan.schedule)
            same(own.slot_mapping, plan.slot_mapping)
        if name == "window of a page":
            assert [int(plan.decode.first_visible[3]) for plan in advanced] == [17, 18, 19, 20, 21, 22]
            assert [plan.decode.block_table[4, 0] < 0 for plan in advanced] == [True] * 6, "no block was freed"
        if name == "chunks of a page":
            assert [int(plan.decode.first_visible[0]) for plan in advanced] == [0, 0, 0, 16, 16, 16]
        if dtype != torch.float64:
            check_outputs(loop, found, dtype)


@pytest.mark.parametrize("name", CHUNKS)
def test_captured_attention_chunks(ops, name):
    """Steps with captured plans give the results of steps with virtual requests, for the same freed blocks."""
    for dtype in dtypes_of(ops, name == "chunks and a window"):
        loop = Loop(ops, CONFIGS[name], 0, dtype)
        wanted, virtual = loop.from_host(STEPS, captured=False)
        if dtype == torch.float64:
            found, captured = loop.on_device(STEPS)
            for one, other in zip(found, wanted, strict=True):
                assert_close64(one, other)
        else:  # results that differ by rounding may sample other tokens, so each run is compared with `reference`
            check_outputs(loop, wanted, dtype)
            found, captured = loop.on_device(STEPS)
            check_outputs(loop, found, dtype)
        for one, other in zip(captured, virtual, strict=True):
            assert one.decode.block_table.shape[1] == WIDTH and other.decode.block_table.shape[1] < WIDTH
        whole = Loop(ops, replace(CONFIGS[name], attention_chunk_size=None), 0, dtype)
        outputs = whole.from_host(STEPS)[0]
        assert any((one - other).abs().max() > 0.1 for one, other in zip(outputs, wanted, strict=True))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70)), min_size=1, max_size=5), st.integers(1, 30),
       st.sampled_from([None, TokenOwnership(2, 1), TokenOwnership(3, 0, 4)]), PACKAGES)  # fmt: skip
def test_windows_follow(pairs, window, ownership, ops):
    """After `advance_step`, the plan of the new batch has the window of each new token; earlier blocks are freed."""
    query_lens, seq_lens = [q for q, _ in pairs], [s and s + q for q, s in pairs]
    config = replace(PLAIN, sliding_window=window)
    table = torch.arange(6 * len(pairs), dtype=torch.int32).view(len(pairs), 6)
    freed, column_tokens = table_without_blocks(*table.shape), BLOCK * (1 if ownership is None else ownership.size)
    for request, (query_len, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        left_behind = max(0, length - max(1, query_len) + 1 - window) // column_tokens
        table[request, :left_behind] = freed[request, :left_behind]
    common = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, BLOCK, ownership)
    tokens = common.slot_mapping.shape[0]
    sampled, ids, positions = torch.arange(len(pairs)), torch.zeros(tokens).long(), torch.zeros(tokens).long()
    for _ in range(3):
        common = ops.advance_step(sampled, ids, positions, common, BLOCK, ownership)
        ids, positions = ids[: common.num_actual_tokens], positions[: common.num_actual_tokens]
        seq_lens = [s + (s > 0 and q > 0) for q, s in zip(query_lens, seq_lens, strict=True)]
        query_lens = [min(q, 1) for q in query_lens]
        plan = ops.build_gqa_metadata(common, BLOCK, config, ownership=ownership)
        ranges = wanted_ranges(config, query_lens, seq_lens, ownership)
        assert plan.decode.first_visible.tolist() == [first for first, _ in ranges]
        assert plan.decode.visible_lens.tolist() == [end for _, end in ranges]


def test_cross_attention_advances(ops):
    """The next step of an encoder-decoder keeps the keys of its encoders, and writes none of them."""
    batch = make_batch([1, 5], [4, 5])
    common = cross_batch(batch, [30, 17], ran=(1,))
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    common = replace(common, block_table=table, slot_mapping=torch.arange(6))
    before = ops.build_gqa_metadata(common, BLOCK, CROSS)
    assert before.slot_mapping.shape[0] == 17
    sampled, ids, positions = torch.tensor([5, 6]), torch.zeros(6).long(), torch.zeros(6).long()
    following = ops.advance_step(sampled, ids, positions, common, BLOCK)
    assert type(following) is CrossAttentionBatch and following.encoder_slot_mapping.shape[0] == 0
    plan = ops.build_gqa_metadata(following, BLOCK, CROSS)
    assert plan.num_decodes == 2 and plan.decode.visible_lens.tolist() == [30, 17] and plan.slot_mapping.numel() == 0
    assert_same_bits(plan.decode.block_table, common.encoder_block_table)
    own = ops.build_gqa_metadata(following, BLOCK, replace(PLAIN, sliding_window=3))
    assert own.decode.visible_lens.tolist() == [5, 6] and own.decode.first_visible.tolist() == integers(2, 3).tolist()

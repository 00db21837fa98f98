"""Tests of `advance_step` inside CUDA graphs.

`advance_step` turns the batch of a step into the batch of the next step, on the device: the sampled token of each
request becomes its query token. So one CUDA graph can contain several decode steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces import CommonAttentionMetadata

from ..support.decode_loop import buffers, check_against_the_host, loop_cache, make_loop
from ..support.factories import DIRECT, LOW_RANK, moved
from ..support.synchronisation import no_synchronisation
from ..support.triton_mode import DEVICE, ON_GPU, ON_HOPPER

if not ON_GPU:
    pytest.skip("needs a GPU", allow_module_level=True)

WIDE = replace(LOW_RANK, kv_lora_rank=512, qk_rope_head_dim=64)
LAYERS = [(DIRECT, torch.float32), (LOW_RANK, torch.bfloat16)] + ([(WIDE, torch.bfloat16)] if ON_HOPPER else [])
BLOCK, STEPS = 4, 4
LENS, IDS = [14, 0, 1, 33, 16], [3, 0, 9, 41, 7]


def captured(call):
    """Return a CUDA graph of a call; the call runs twice before the capture, so that its kernels are compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


@pytest.mark.parametrize("programs", [0, 3])
@pytest.mark.parametrize("config, dtype", LAYERS, ids=["direct", "low-rank", "wide"][: len(LAYERS)])
@torch.no_grad()
def test_steps_in_one_graph(config, dtype, programs):
    """Run 4 steps in one graph -> the same bits as 4 replays of a graph of one step.

    `check_against_the_host` compares the outputs with the outputs of steps whose batches the host made.
    """
    loop = make_loop(fast, config, dtype, DEVICE, len(LENS), STEPS, programs)
    held = loop_cache(config, dtype, len(LENS)).to(DEVICE)
    loop.load(LENS, IDS, held)
    several, one = captured(lambda: loop.run(STEPS)), captured(lambda: loop.run(1))
    loop.load(LENS, IDS, held)
    several.replay()
    found, outputs = loop.state(), loop.outputs.clone()
    assert outputs.isfinite().all() and outputs.abs().max() > 0.01
    assert found[0].tolist() == [length + STEPS * (length > 0) for length in LENS]
    loop.load(LENS, IDS, held)
    for step in range(STEPS):
        one.replay()
        assert loop.outputs[0].equal(outputs[step]), step
    assert all(ours.equal(theirs) for ours, theirs in zip(loop.state(), found, strict=True))
    check_against_the_host(loop, LENS, IDS, held, outputs)


@torch.no_grad()
def test_a_graph_runs_past_the_end():
    """Let two requests fill their rows of the block table in a graph -> both stop, and write no more entries."""
    config, dtype = DIRECT, torch.float32
    loop = make_loop(fast, config, dtype, DEVICE, 3, STEPS)
    held = loop_cache(config, dtype, 3).to(DEVICE)
    loop.load([62, 20, 64], [1, 2, 3], held)
    graph = captured(lambda: loop.run(STEPS))
    loop.load([62, 20, 64], [1, 2, 3], held)
    graph.replay()
    assert loop.batch.seq_lens.tolist() == [64, 20 + STEPS, 64]
    assert loop.positions.tolist() == [63, 20 + STEPS - 1, 63]
    assert loop.batch.slot_mapping.tolist()[::2] == [-1, -1] and loop.batch.slot_mapping[1] >= 0
    written = (loop.kv_cache != held).any(-1).flatten().nonzero().flatten()
    table = loop.batch.block_table.tolist()
    places = [(0, at) for at in (61, 62, 63)] + [(1, at) for at in range(19, 19 + STEPS)] + [(2, 63)]
    assert set(written.tolist()) == {table[request][at // 16] * 16 + at % 16 for request, at in places}


def test_no_synchronisation():
    """Call `advance_step` twice -> the host never waits for the device, on one rank and on several ranks."""
    for ownership in (None, fast.TokenOwnership(2, 1, 2)):
        with torch.device("cpu"):
            *tensors, common = buffers([1, 1, 5, 7, 0], [9, 0, 9, 7, 3], 6)
        mine, common_gpu = [x.to(DEVICE) for x in tensors], moved(common, DEVICE)
        fast.advance_step(*(x.clone() for x in mine), moved(common, DEVICE), BLOCK, ownership)  # compiles the kernel
        torch.cuda.synchronize()
        with no_synchronisation():
            following = fast.advance_step(*mine, common_gpu, BLOCK, ownership)
            again = fast.advance_step(mine[0], mine[1][:4], mine[2][:4], following, BLOCK, ownership)
        wanted = reference.advance_step(*tensors, common, BLOCK, ownership)
        wanted = reference.advance_step(tensors[0], tensors[1][:4], tensors[2][:4], wanted, BLOCK, ownership)
        assert [x.cpu().tolist() for x in mine] == [x.tolist() for x in tensors]
        for name in ("seq_lens", "query_start_loc", "slot_mapping", "seq_lens_cpu", "query_start_loc_cpu"):
            assert getattr(again, name).cpu().equal(getattr(wanted, name)), name


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_a_captured_mixed_batch(ids):
    """Replay a captured `advance_step` 3 times -> the results of `reference` for a mixed batch, then for decodes."""
    with torch.device("cpu"):
        *tensors, common = buffers([1, 1, 5, 7, 0], [9, 0, 9, 7, 3], 6, 2, ids)
    mine, common_gpu = [x.to(DEVICE) for x in tensors], moved(common, DEVICE)
    held = [x.clone() for x in (*mine[1:], common_gpu.seq_lens, common_gpu.query_start_loc, common_gpu.slot_mapping)]
    graph = captured(lambda: fast.advance_step(*mine, common_gpu, BLOCK))
    targets = (*mine[1:], common_gpu.seq_lens, common_gpu.query_start_loc, common_gpu.slot_mapping)
    for target, values in zip(targets, held, strict=True):
        target.copy_(values)
    for _ in range(3):
        graph.replay()
        reference.advance_step(*tensors, common, BLOCK)  # as in the graph, each call gets the same batch object
        wanted = (*tensors[1:], common.seq_lens, common.query_start_loc, common.slot_mapping)
        assert all(target.cpu().equal(values) for target, values in zip(targets, wanted, strict=True))


def test_from_lens_of_the_next_step():
    """Advance a batch on the GPU -> the same slots and lengths as `from_lens`, which computes them on the host."""
    query_lens, seq_lens = [1, 1, 5, 0], [9, 0, 9, 3]
    with torch.device("cpu"):
        *tensors, common = buffers(query_lens, seq_lens, 6)
    following = fast.advance_step(*(x.to(DEVICE) for x in tensors), moved(common, DEVICE), BLOCK)
    wanted = CommonAttentionMetadata.from_lens([1, 1, 1, 0], [10, 0, 10, 3], common.block_table, BLOCK)
    for name in ("seq_lens", "query_start_loc", "slot_mapping"):
        assert getattr(following, name).is_cuda and getattr(following, name).cpu().equal(getattr(wanted, name)), name
    assert following.seq_lens_cpu.tolist() == [10, 0, 10, 3] and following.num_actual_tokens == 3

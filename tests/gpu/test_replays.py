"""Tests of replayed calls on a GPU: their results must have the same bits as the results of ordinary calls.

If an op of `fast` is called again with the same shapes, strides and dtypes, `fast` skips its own checks and PyTorch's
dispatch. It replays the recorded kernel launches with the new tensors.
"""

from __future__ import annotations

import pytest
import torch

import fast
from fast.backends import checked_calls
from fast.backends.repeated_launches import Launches
from reference.interfaces import E4M3, MLAConfig

from ..support.factories import make_batch, make_layer, make_weights
from ..twins.test_ops import samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_the_gpu(default_device):
    """Make tensors on the GPU, whatever `--device` is."""
    with torch.device("cuda"):
        yield


def launch_functions():
    """Return a mapping from op to launch function, for all ops of MLA whose repeated calls skip checks."""
    named = {str(each._dispatched): each._launch for each in checked_calls._ALL_CALLS
             if isinstance(each, checked_calls.CheckedCalls)}  # fmt: skip
    # On a GPU, PyTorch functions serve grouped-query attention. There is no launch of a kernel to record.
    return {name: launch for name, launch in named.items()
            if name.split(".")[1].removesuffix("_out") not in fast.backends.GQA_OPS}  # fmt: skip


def copied(arguments: tuple) -> tuple:
    """Return the arguments with copies of all tensors; the copies have the strides of the originals."""
    return tuple([
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).copy_(each)
        if isinstance(each, torch.Tensor) else each for each in arguments
    ])  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_op_is_replayed(dtype):
    """Make five calls of each op with equal shapes and new values -> the same bits as without replays."""
    found, replayed = launch_functions(), set()
    for name, many in samples(dtype).items():
        function = found.get(name.replace("::", "."))
        if function is None:
            continue
        for arguments in many:
            launches = Launches()
            for _ in range(5):
                expected, given = copied(arguments), copied(arguments)
                for old, new in zip(expected, given, strict=True):  # new values, which a replay must use
                    if isinstance(old, torch.Tensor) and old.is_floating_point():
                        new.copy_(old.copy_(torch.randn(old.shape).to(old.dtype)))
                wanted, result = function(*expected), launches.run(function, *given)
                torch.cuda.synchronize()
                pairs = [*zip(expected, given, strict=True), *zip(as_tuple(wanted), as_tuple(result), strict=True)]
                for old, new in pairs:
                    assert not isinstance(old, torch.Tensor) or torch.equal(comparable(old), comparable(new)), name
            # A Hopper decode is not replayed if it must copy queries whose rows are not aligned to 16 bytes. A call
            # without a launch is not replayed either: `quantize_entries` without scales calls only PyTorch functions.
            own = launches.compiled and launches.no_replay != "aten.clone.default"
            assert launches.replay is not None or not own, (name, launches.no_replay)
            replayed |= {name} if launches.replay is not None else set()
    assert len(replayed) == len(found), sorted(replayed)


def comparable(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with NaN replaced by a number; return an e4m3 tensor as bytes, because PyTorch cannot compare e4m3."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x.nan_to_num(7)


def as_tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("query_lens, lens", [([1, 1, 1], [300, 65, 1]), ([64, 100], [64, 300]), ([1, 50], [90, 50])])
def test_a_layer_of_replays(query_lens, lens):
    """Run a layer that replays its ops, and a layer that checks every call -> the same outputs and caches."""
    config = MLAConfig.from_preset("deepseek-v2-lite")
    weights = make_weights(config, torch.bfloat16)
    layers = [make_layer(fast, config, weights, torch.bfloat16, check_every_call=wanted) for wanted in (False, True)]
    batch = make_batch(query_lens, lens, block_size=64)
    plan = fast.build_mla_metadata(batch.common, 64, 256)
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, lens, strict=True)])
    for _ in range(4):
        hidden_states = torch.randn(sum(query_lens), config.hidden_size).bfloat16()
        cache = torch.randn(batch.num_blocks, 64, config.head_size).bfloat16()
        caches = cache.clone(), cache.clone()
        with torch.inference_mode():
            outputs = [layer(hidden_states, positions, own, plan) for layer, own in zip(layers, caches, strict=True)]
        assert torch.equal(*outputs) and torch.equal(*caches)
    replays = [known[1] for each in checked_calls._ALL_CALLS for known in getattr(each, "_known", {}).values()]
    assert any(each.replay is not None for each in replays)

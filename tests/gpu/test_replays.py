"""Tests of replayed calls on a GPU: their results must have the same bits as the results of ordinary calls.

If an op of `fast` is called again with the same shapes, strides and dtypes, `fast` skips its own checks and PyTorch's
dispatch. It replays the recorded kernel launches with the new tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fast
from fast.backends import checked_calls
from fast.backends.repeated_launches import Launches
from reference.interfaces import COMPUTE_FORMAT, E4M3, FP8_E4M3, MLAConfig
from reference.interfaces.gqa import GQAConfig

from ..support.factories import make_batch, make_layer, make_weights
from ..support.gqa import CONFIGS
from ..twins.test_gqa_ops import paged_samples, varlen_samples
from ..twins.test_gqa_ops import samples as gqa_samples
from ..twins.test_ops import samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_the_gpu(default_device):
    """Make tensors on the GPU, whatever `--device` is."""
    with torch.device("cuda"):
        yield


def launch_functions():
    """Return a mapping from op to launch function, for all ops whose repeated calls skip checks."""
    return {str(each._unkept._dispatched): each._launch for each in checked_calls._ALL_CALLS
            if isinstance(each, checked_calls.CheckedCalls)}  # fmt: skip


def all_samples(dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Return arguments of every op of both attention families.

    For grouped-query attention, `gqa_samples` has no schedules and no head dim whose tiles TMA, the GPU's bulk copy
    engine, can load. This function adds calls with every kind of schedule, and prompts with such a head dim.
    """
    config = GQAConfig(16, 2, 128)
    featured = replace(CONFIGS["all of them"], alibi_slopes=None)  # a call with ALiBi slopes is not replayed
    decodes, prompts = ((1, 300), (2, 67), (1, 33)), ((40, 130), (1, 20), (33, 33))
    lens = torch.tensor([length for _, length in decodes], dtype=torch.int32)
    schedules = (
        None,
        fast.DecodeSchedule(None, None, True),
        fast.plan_decode(lens, 3),
        fast.plan_decode(lens, 3, batch_invariant=True),
    )
    paged = [paged_samples(dtype, config, dtype, COMPUTE_FORMAT, decodes, 64, schedule) for schedule in schedules]
    paged += [paged_samples(dtype, featured, dtype, each) for each in (COMPUTE_FORMAT, FP8_E4M3)]
    paged.append(paged_samples(dtype, config, dtype, COMPUTE_FORMAT, prompts, 64))
    packed = [varlen_samples(dtype, featured, dtype), varlen_samples(dtype, config, dtype, prompts)]
    found = samples(dtype) | gqa_samples(dtype)
    for name, more in (("mla_twins::gqa_paged_attention", paged), ("mla_twins::gqa_varlen_attention", packed)):
        found[name] += more
        found[f"{name}_out"] += [(*given[:-1], torch.zeros(given[0].shape, dtype=dtype), given[-1]) for given in more]
    return found


def has_slopes(arguments: tuple) -> bool:
    """Return whether the arguments of an op contain ALiBi slopes, which are a list of floats."""
    return any(isinstance(each, list) and each and isinstance(each[0], float) for each in arguments)


def copied(arguments: tuple) -> tuple:
    """Return the arguments with copies of all tensors; the copies have the strides of the originals."""
    return tuple([
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).copy_(each)
        if isinstance(each, torch.Tensor) else each for each in arguments
    ])  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_op_is_replayed(dtype):
    """Make five calls of each op with equal shapes and new values -> the same bits as without replays."""
    from fast.kernels.triton.gqa.sizes import DIRECT_GENERATIONS  # needs Triton

    found, replayed, copied_in_bulk = launch_functions(), set(), set()
    for name, many in all_samples(dtype).items():
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
            # ALiBi slopes are kept on the GPU between calls, so their tensor is neither an input nor a new tensor.
            known = ["aten.clone.default"] + ["a tensor of unknown origin"] * has_slopes(arguments)
            own = launches.compiled and launches.no_replay not in known
            assert launches.replay is not None or not own, (name, launches.no_replay)
            if launches.replay is not None:
                replayed.add(name)
                copied_in_bulk |= {name} if copies_in_bulk(launches.replay) else set()
    assert len(replayed) == len(found), sorted(replayed)
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in DIRECT_GENERATIONS:
        attention = {f"mla_twins::gqa_{op}_attention{out}" for op in ("paged", "varlen") for out in ("", "_out")}
        assert attention <= copied_in_bulk


def copies_in_bulk(replay):
    """Return whether a replay gives a kernel a descriptor for TMA (the GPU's bulk copy engine)."""
    arguments = itertools.chain.from_iterable(each._arguments for each in replay._launches)
    return any(type(each).__name__ == "_Described" for each in arguments)


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

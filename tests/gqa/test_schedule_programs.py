"""Tests of the number of programs that plans of grouped-query attention take from the backend of the layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.backends import Backend
from fast.backends.own import CPU
from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3, UnsupportedConfiguration

from ..support.backends import registered
from ..support.factories import make_batch
from ..support.gqa import GROUPED


def test_programs_of_the_backend(plain_errors):
    """Build plans with the number of programs that a backend declares -> the schedule has it; a name must fit."""
    asked = []

    def programs(*arguments):
        asked.append(arguments)
        return 5

    config, batch = GROUPED, make_batch([1, 1], [600, 40]).common
    declared = replace(CPU.ops["gqa_paged_attention"], schedule_programs=programs)
    with registered(Backend("planned", 1, "cpu", {"gqa_paged_attention": declared})):
        builder = fast.GQAMetadataBuilder(config, 16, 1000, 2, dtype=torch.float32)
        assert builder.build_for_cudagraph_capture(batch).schedule.tile_ranges.shape == (5, 5)
        given = torch.device("cpu"), torch.float32, config.num_heads, config.num_kv_heads, config.head_dim, 16, 1
        assert asked == [(*given, builder.cache_format)]
        builder = fast.GQAMetadataBuilder(config, 16, 1000, 2, dtype=torch.float32, backend="cpu")
        assert builder.build_for_cudagraph_capture(batch).schedule.tile_ranges.shape == (1, 5)
        choice = {"gqa_paged_attention": "planned"}
        named = fast.GQAMetadataBuilder(config, 16, 1000, 2, dtype=torch.float32, backend=choice)
        assert named.build_for_cudagraph_capture(batch).schedule.tile_ranges.shape == (5, 5)
    builder = fast.GQAMetadataBuilder(config, 16, 1000, 2, dtype=torch.float32)
    assert builder.build_for_cudagraph_capture(batch).schedule.tile_ranges.shape == (1, 5)
    builder = fast.GQAMetadataBuilder(config, 16, 1000, 2, backend={"gqa_paged_attention": "torch"})
    with pytest.raises(UnsupportedConfiguration, match="^torch: serves device cuda, got cpu"):
        builder.build_for_cudagraph_capture(batch)
    with pytest.raises(ValueError, match="^schedule_programs: expected a function or "):
        replace(declared, schedule_programs=5)


def test_programs_of_a_plan(plain_errors):
    """Plan ragged decodes without `num_programs` -> the schedule has the programs that the backend declares.

    The backend gets the dtype of the call. Without such a backend, and in `reference`, the number is 1.
    """
    asked = []

    def programs(*arguments):
        asked.append(arguments)
        return 5

    config, batch = GROUPED, make_batch([1] * 6, [8000, 9, 100, 40, 1, 64]).common
    declared = replace(CPU.ops["gqa_paged_attention"], schedule_programs=programs)
    with registered(Backend("planned", 1, "cpu", {"gqa_paged_attention": declared})):
        plan = fast.build_gqa_metadata(batch, 16, config, dtype=torch.float32)
        assert plan.schedule_choice.planned and plan.schedule.tile_ranges.shape == (5, 5)
        given = torch.device("cpu"), torch.float32, config.num_heads, config.num_kv_heads, config.head_dim, 16, 1
        assert asked == [(*given, COMPUTE_FORMAT)]
        for choice in ("planned", {"gqa_decode": "planned"}, {"gqa_paged_attention": "planned"}):
            named = fast.build_gqa_metadata(batch, 16, config, dtype=torch.float32, backend=choice)
            assert named.schedule.tile_ranges.shape == (5, 5)
        assert fast.build_gqa_metadata(batch, 16, config, num_programs=3).schedule.tile_ranges.shape == (3, 5)
        assert fast.build_gqa_metadata(batch, 16, config, num_programs=0).schedule is None
        assert fast.build_gqa_metadata(batch, 16, config, backend="cpu").schedule_choice.num_programs == 1
        assert len(asked) == 2  # one call for the automatic choice, and one call for the named backend
    for ops in (reference, fast):
        assert ops.build_gqa_metadata(batch, 16, config).schedule_choice.num_programs == 1
    with pytest.raises(UnsupportedConfiguration, match="^torch: serves device cuda, got cpu"):
        fast.build_gqa_metadata(batch, 16, config, backend={"gqa_paged_attention": "torch"})


@pytest.mark.parametrize("query_len", [1, 2, 30])
@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
def test_programs_of_the_triton_kernels(cache_format, query_len, monkeypatch):
    """Ask for the programs of a schedule on an H200 -> the row blocks of the programs fill whole waves of programs."""
    sizes = pytest.importorskip("fast.kernels.triton.gqa.sizes")
    facts = sizes.DeviceFacts(132, (9, 0), 232448)
    monkeypatch.setattr(sizes, "device_facts", lambda _: facts)
    programs = sizes.schedule_programs(torch.device("cpu"), torch.bfloat16, 64, 8, 128, 16, query_len, cache_format)
    given = (8, 8, 128, query_len, 16, False, False, torch.bfloat16, cache_format, False, facts, True)
    launch = sizes.launch_sizes(*given)
    row_blocks = 8 * -(-8 * query_len // launch.shape.rows)
    waves = programs * row_blocks / launch.resident
    assert launch.resident // 132 in (1, 2, 4) and not launch.finds_requests
    assert 0.9 <= waves / -(-waves // 1) <= 1

"""Tests of the benchmarks `planning` and `crossover`.

`planning` times the planning of a step. `crossover` times the absorbed and the expanded path over a grid of lengths,
and fits the constants (`PathCosts`) with which `choose_path` predicts the faster path.
"""

from __future__ import annotations

import json

import pytest
import torch

import fast
from fast.parity import compare
from reference.interfaces import MLAConfig, PathCosts

from ..benchmarks import crossover, planning
from ..support.factories import DIRECT, integers

V3 = MLAConfig.from_preset("deepseek-v3")
TRUE = PathCosts(4.0, 9.0, 3.0, 3.5e-9, 3.1e-9, 2.4e-9, 5e-7)


def grid(config, noise: float = 0.0):
    """Return the grid with the times that TRUE predicts, each changed at random by at most the fraction `noise`."""
    lens = [(q, c) for q in crossover.QUERY_LENS for c in crossover.CONTEXT_LENS]
    points = [crossover.Point(config.num_heads, q, c, 1.0, 1.0) for q, c in lens]
    constants = torch.tensor([getattr(TRUE, name) for name in crossover.CONSTANTS], dtype=torch.float64)
    times = [crossover.model(constants, work) for work in crossover.features(points, config)]
    times = [t * (1 + noise * (2 * torch.rand_like(t) - 1)) for t in times]
    return [
        crossover.Point(config.num_heads, q, c, float(a), float(e))
        for (q, c), a, e in zip(lens, *times, strict=True)
    ]  # fmt: skip


def test_model_is_what_choose_path_compares():
    """Compute times with the model that `fit` uses -> at every point `choose_path` chooses the path with less time."""
    points = grid(V3)
    for point in points:
        better = "absorbed" if point.absorbed_us <= point.expanded_us else "expanded"
        assert fast.choose_path(point.query_len, point.context_len, V3, TRUE) == better
        assert crossover.lost(point, V3, TRUE) == 0


def test_fit():
    """Fit constants to times with 3 % of noise -> the chosen path is at most 7 % slower than the faster path.

    Without constants, `choose_path` counts operations. For some lengths, it then chooses a path that is more than 20 %
    slower than the faster path.
    """
    points = grid(V3, 0.03)
    costs = crossover.fit(points, V3, steps=800, trials=2000)
    assert max(crossover.lost(p, V3, costs) for p in points) < 0.07
    assert max(crossover.lost(p, V3, None) for p in points) > 0.2


def test_both_paths_compute_the_same(monkeypatch):
    """Run both timed paths on the same requests -> the same outputs."""
    monkeypatch.setattr(crossover, "REQUESTS", 2)
    monkeypatch.setattr(crossover, "BLOCK_SIZE", 16)
    paths = crossover.Paths(DIRECT, 3, 40, torch.float32, "cpu")
    wide = {name: value.double() for name, value in vars(paths).items() if torch.is_tensor(value)}
    gold = object.__new__(crossover.Paths)
    gold.__dict__ |= vars(paths) | wide
    # the absorbed path reads the entries of the new tokens from the cache; the expanded path gets them as arguments
    for which in (paths, gold):
        entries = torch.cat((which.latents, which.k_pe), -1).view(2, 3, -1)
        for request, table in enumerate(which.decode.block_table.tolist()):
            for token in range(3):
                which.cache[table[(40 + token) // 16], (40 + token) % 16] = entries[request, token]
    torch.testing.assert_close(gold.absorbed(), gold.expanded(), rtol=0, atol=1e-12)
    assert compare("absorbed", paths.absorbed(), paths.expanded(), gold.expanded()).passed


def test_advance_is_compared(monkeypatch):
    """Make the timed call of `advance_step` wrong -> `advance_call` raises, because results differ from `reference`."""
    planning.advance_call(integers(5, 16, 4000))()
    right = fast.advance_step

    def wrong(sampled, input_ids, positions, common, block_size):
        right(sampled, input_ids, positions, common, block_size)
        common.slot_mapping[0] += 1

    monkeypatch.setattr(fast, "advance_step", wrong)
    with pytest.raises(AssertionError, match="^advance_step of 3 requests differs from the reference$"):
        planning.advance_call(integers(5, 16, 4000))


@pytest.mark.parametrize("module", [planning, crossover])
def test_without_a_gpu(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main(["--device", "cuda"] if module is planning else []) == 2
    assert capsys.readouterr().err == "error: needs a CUDA device, and torch sees none\n"


def test_planning_on_a_cpu(tmp_path, capsys):
    """Run the benchmark `planning` on a CPU -> times of both packages and of a builder for every batch."""
    assert planning.main(["--json", str(tmp_path / "planning.json"), "--time", "0.01"]) == 0
    report = json.loads((tmp_path / "planning.json").read_text())
    assert {"hardware", "versions", "date", "fast_sha256", "command"} <= report.keys()
    assert [row["dims"]["decodes"] for row in report["batches"]] == [256, 960, 1920, 3840, 7680]
    for row in report["batches"]:
        assert set(row["host_us"]) == {"fast", "builder", "reference"}
        assert all(spread["median_us"] > 0 for spread in row["host_us"].values())
    assert "Planning a step" in capsys.readouterr().out

"""Tests of the benchmark `fp8_loss`: bits per byte over fp8 caches, errors of random models, results file."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("transformers", reason="the benchmark runs models of transformers")
from ..benchmarks import fp8_loss
from ..benchmarks.fp8_loss import (
    CACHES,
    EXACT,
    FP8,
    FP8_CACHE,
    HALF,
    LATENT_ONLY,
    compare,
    in_e4m3,
    make_job,
    prompt_bits,
    random_errors,
    score_deviations,
    window_bits,
)
from ..benchmarks.report import fast_digest
from ..support.stdlib_sample import BOS, windows
from ..support.transformers_models import WITHOUT_SHAPE_CHECKS

pytestmark = WITHOUT_SHAPE_CHECKS


@pytest.fixture(scope="module")
def job():
    """Return the main job in float32 with its two shortest prompts."""
    job = make_job("float32")
    job.prompt_ids = job.prompt_ids[:2]
    return job


def test_bits_of_windows_and_of_prompts(job):
    """Measure one text as a window and as a prompt -> the same bits per byte, without and with quantisation."""
    targets = windows()[:1, :96]
    prompts, job.prompt_ids = job.prompt_ids, [[BOS, *targets[0].tolist()]]
    try:
        for cache in (EXACT, HALF, FP8_CACHE):
            assert window_bits(job, cache, targets, True) == pytest.approx(prompt_bits(job, cache), rel=1e-5)
    finally:
        job.prompt_ids = prompts


def test_every_cache_differs(job, monkeypatch):
    """Measure windows over each cache -> each cache gives other bits; a first step reads no cache."""
    monkeypatch.setattr(fp8_loss, "STEP", 64)
    targets = windows()[:2, :128]
    found = {name: window_bits(job, cache, targets, True) for name, cache in CACHES["float32"].items()}
    assert len({tuple(each) for each in found.values()}) == len(CACHES["float32"])
    changes = {name: abs(each[0] - found["float32"][0]) for name, each in found.items()}
    assert changes["bfloat16"] < changes[FP8] and changes[LATENT_ONLY] < 0.05
    exact, stored = (window_bits(job, cache, targets[:, :64], False) for cache in (EXACT, FP8_CACHE))
    assert exact == stored
    assert window_bits(job, EXACT, targets, False) != window_bits(job, FP8_CACHE, targets, False)


def test_compare():
    """Compare bits of pieces of different sizes -> the increase of all bits together; no error if pieces agree."""
    found = compare([1.1, 2.2, 3.3], [1.0, 2.0, 3.0], [10, 20, 5])
    assert found["increase"] == pytest.approx(0.1) and found["standard_error"] == pytest.approx(0, abs=1e-12)
    assert found["quartiles"] == pytest.approx([0.1, 0.1]) and found["more"] == 3
    found = compare([1.0, 2.0], [1.0, 1.0], [3, 1])
    assert found["increase"] == pytest.approx(0.25) and found["more"] == 1
    # the residuals of 3 of 3 bits and 2 of 1 bits are -0.75 and 0.75
    assert found["standard_error"] == pytest.approx(math.sqrt(2) * 0.75 * math.sqrt(2) / 4)


def test_latents_in_e4m3():
    """Quantise numbers and zeros -> the largest number is exact, the others have a relative error of at most 1/16."""
    x = torch.randn(9, 64)
    rounded = in_e4m3(x)
    assert rounded.abs().max() == pytest.approx(float(x.abs().max()))
    large = x.abs() > x.abs().max() / 1000
    assert ((rounded - x).abs()[large] <= x.abs()[large] / 16 * 1.001).all() and not torch.equal(rounded, x)
    assert torch.equal(in_e4m3(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_score_deviations(job):
    """Measure the scores of two short prompts -> a row for each layer; an error is less than 1/8 of its product.

    Products and errors are compared by their standard deviations.
    """
    rows = score_deviations(job)
    assert [row["layer"] for row in rows] == list(range(6))
    for row in rows:
        assert 0 < row["latent_error"] < row["latent"] / 8 and 0 < row["rope_error"] < row["rope"] / 8


def test_errors_of_a_random_model():
    """Measure a random model -> over bfloat16 the smallest error, and no comparison of a cache with itself."""
    found = random_errors(0, 8.0)
    assert found["float32"].keys() == {"bfloat16", FP8, "fp8_ds_mla"} and found["bfloat16"].keys() == {
        FP8,
        "fp8_ds_mla",
    }
    assert 0 < found["float32"]["bfloat16"] < found["float32"]["fp8_ds_mla"] < found["float32"][FP8]


def test_a_small_run(tmp_path, monkeypatch, capsys):
    """Run the benchmark on short windows -> a results file with its sources, all measures, and their comparisons."""
    short = windows()[:, :80]
    monkeypatch.setattr(fp8_loss, "windows", lambda: short)
    monkeypatch.setattr(fp8_loss, "STEP", 40)

    def short_job(dtype):
        job = make_job(dtype)
        job.prompt_ids = job.prompt_ids[:2]
        return job

    monkeypatch.setattr(fp8_loss, "make_job", short_job)
    path, threads = tmp_path / "loss.json", torch.get_num_threads()
    options = ["--windows", "3", "--draws", "2", "--threads", "1", "--json", str(path)]
    assert fp8_loss.main(options) == 0
    report = json.loads(path.read_text())
    assert report["command"] == " ".join(["python -m tests.benchmarks.fp8_loss", *options])
    assert report["fast_sha256"] == fast_digest() and report["threads"] == 1 and torch.get_num_threads() == threads
    assert [(row["model"], row["text"], row["keys"]) for row in report["bits"]] == [
        (dtype, *measure) for dtype in CACHES for measure in fp8_loss.MEASURES
    ]
    for row in report["bits"]:
        assert FP8 in row["over"]["bfloat16"] and ("float32" in row["over"]) == (row["model"] == "float32")
        assert (LATENT_ONLY in row["bits_per_byte"]) == (row["model"] == "float32" and row["keys"] == "cache")
        for base, found in row["over"].items():
            for name, each in found.items():
                assert each["increase"] == pytest.approx(row["bits_per_byte"][name] / row["bits_per_byte"][base] - 1)
    assert [row["rope_size"] for row in report["random_models"]] == [1, 8]
    assert "fp8_e4m3 over bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--windows", "1"], "--windows and --draws: expected at least 2, because the report has quartiles"),
        (["--draws", "1"], "--windows and --draws: expected at least 2, because the report has quartiles"),
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--json", "nosuch/loss.json"], "--json: expected a file in a folder that exists, got nosuch/loss.json"),
    ],
)
def test_bad_options(options, message, monkeypatch, tmp_path, capsys):
    """Give an invalid option -> one line on stderr and status 2, before anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp8_loss, "make_job", None)
    assert fp8_loss.main(options) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")

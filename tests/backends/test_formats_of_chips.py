"""Tests of fp8 formats and modes that the kernels of a GPU cannot serve. The tests need no GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fast import backends
from fast.backends import fp8_mode_times
from reference.interfaces import CACHE_FORMATS, FP8_MODES, MLAConfig, QueryLenSupport

from ..benchmarks import fp8_mode_times as results_of_modes
from .test_backends import GPU, capability, refusal  # noqa: F401

FORMATS = ("fp8_e4m3", "fp8_ds_mla")


def decode(name: str, fp8_mode: str = "converted"):
    """Return the request of a decode on a GPU over a cache in a format."""
    return backends.decode_request(
        GPU, torch.bfloat16, 512, 64, 64, QueryLenSupport.VARLEN, cache_format=CACHE_FORMATS[name], fp8_mode=fp8_mode
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("chip", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
def test_chips_with_the_formats(chip, name, capability):  # noqa: F811
    """From Ampere on, the backend `triton` serves both formats in every mode.

    On Hopper, the backend `hopper` serves the format `fp8_e4m3` in every mode.
    """
    capability(*chip)
    for mode in FP8_MODES:
        by_hopper = chip == (9, 0) and name == "fp8_e4m3"
        assert backends.select(decode(name, mode)).name == ("hopper" if by_hopper else "triton")
        assert backends.select(decode(name, mode), "triton").name == "triton"


@pytest.mark.parametrize("name", FORMATS)
def test_chips_without_the_formats(name, capability):  # noqa: F811
    """A GPU before Ampere is refused by name, with the capability that the backend needs."""
    capability(7, 5)
    reason = "triton: needs a compute capability of at least (8, 0), got (7, 5)"
    assert refusal(lambda: backends.select(decode(name), "triton")) == [reason]
    assert reason in refusal(lambda: backends.select(decode(name)))


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_is_refused_by_name(name, capability):  # noqa: F811
    """Name `hopper` for a decode that it does not serve -> every reason; no other backend replaces it."""
    capability(9, 0)
    for mode in FP8_MODES:
        if name == "fp8_e4m3":
            assert backends.select(decode(name, mode), "hopper").name == "hopper"
            continue
        reasons = refusal(lambda mode=mode: backends.select(decode(name, mode), "hopper"))
        assert all(reason.startswith("hopper: ") for reason in reasons)
        assert any(f"got {name}" in reason for reason in reasons), reasons
    reasons = refusal(lambda: backends.select(decode("compute_dtype", "fp8_query"), "hopper"))
    assert reasons == ["hopper: decodes caches in compute_dtype in the fp8 modes converted, got fp8_query"]


def test_hopper_serves_other_widths_and_pages_with_triton(capability):  # noqa: F811
    """Over `fp8_e4m3`, `triton` serves the dtypes, widths and block sizes that `hopper` refuses over every format."""
    capability(9, 0)
    wanted = decode("fp8_e4m3")
    for mode in FP8_MODES[1:]:  # the layer's dtype does not limit decodes with queries in e4m3
        in_mode = decode("fp8_e4m3", mode)
        assert backends.select(replace(in_mode, head_scales=True, out_dtype=torch.float32)).name == "hopper"
        request = replace(in_mode, block_size=48)
        assert backends.select(request).name == "triton"
        reasons = ["hopper: serves block sizes (16, 32, 64, 128), got 48"]
        assert refusal(lambda request=request: backends.select(request, "hopper")) == reasons
    for change, reason in (
        ({"dtype": torch.float32}, "hopper: serves torch.bfloat16, torch.float16, got torch.float32"),
        ({"head_dims": (("kv_lora_rank", 64),)}, "hopper: serves kv_lora_rank in (256, 512), got 64"),
        ({"block_size": 48}, "hopper: serves block sizes (16, 32, 64, 128), got 48"),
        ({"cache_in_words": False}, "hopper: needs a cache of whole, aligned 16-byte words, with at least one block"),
    ):
        request = replace(wanted, **change)
        assert backends.select(request).name == "triton"
        assert refusal(lambda request=request: backends.select(request, "hopper")) == [reason]


def test_recorded_times_of_modes(monkeypatch, tmp_path, capsys):
    """`explain` reports the times of the committed results; results of other sources of `fast` are refused.

    The times over 16 bits and over `fp8_e4m3` of the committed results come from different sources.
    """
    recorded, results = fp8_mode_times.recorded_times(), results_of_modes.read_results()
    assert recorded == results_of_modes.times_of_modes(results)
    assert [(row["rows"], len(row["shapes"])) for row in recorded["rows"]] == [(64, 2), (128, 11)]
    new = tmp_path / "times.json"
    monkeypatch.setattr(results_of_modes, "TIMES", new)
    for digest, status in (("other", 2), (results["fp8_e4m3"]["fast_sha256"], 0)):
        results[fp8_mode_times.PLAIN]["fast_sha256"] = digest
        monkeypatch.setattr(results_of_modes, "read_results", lambda: results)
        assert results_of_modes.main([]) == status and new.exists() == (status == 0)
        text = "error: fast_sha256: expected results of the same sources of fast, got other ("
        assert capsys.readouterr().err.startswith(text if status else "")
    monkeypatch.setattr(fp8_mode_times, "recorded_times", lambda: json.loads(new.read_text()))
    text = fp8_mode_times.cost_of_conversion(CACHE_FORMATS["fp8_e4m3"], "converted", 128)
    assert text.endswith(f"on NVIDIA H200 on {results['fp8_e4m3']['date']}")  # all times are from the same sources


@pytest.mark.parametrize("heads, rows, since", [
    (128, 128, ""), (192, 128, ""), (96, 64, ""), (64, 64, ""), (20, 64, "from 4 query tokens of a request on, "),
])  # fmt: skip
def test_what_conversion_costs(heads, rows, since, capability, monkeypatch):  # noqa: F811
    """Over `fp8_e4m3` with 64 rows, `explain` says what `converted` costs, and names the fastest measured mode.

    It states the range over all shapes, the range of batch-invariant decodes, and the runs from which the times come.
    """
    capability(9, 0)
    config = MLAConfig.from_preset("deepseek-v3", num_heads=heads)
    recorded = fp8_mode_times.recorded_times()
    runs = recorded["runs"]
    shapes = next(row["shapes"] for row in recorded["rows"] if row["rows"] == rows)

    def line(**options) -> str:
        given = {"cache_format": CACHE_FORMATS["fp8_e4m3"]} | options
        lines = backends.explain(config, device=GPU, dtype=torch.bfloat16, **given).splitlines()
        return next(each for each in lines if each.startswith("mla_decode: "))

    def spread(mode: str, which: str = "times_us") -> str:
        found = [shape[which][mode] / shape[which]["compute_dtype"] for shape in shapes]
        return f"{min(found):.2f} to {max(found):.2f} x"

    text = (
        f"; {since}fp8_mode converted takes {spread('converted')} the time of a decode over a cache in 16 bits "
        f"({spread('converted', 'invariant_us')} if batch-invariant), and fp8_mode fp8_product takes "
        f"{spread('fp8_product')}{' (most with one request of 8192 keys)' if rows == 128 else ''}. Measured in "
        f"{len(shapes)} shapes with {rows} rows for each request on NVIDIA H200 on {runs['fp8_e4m3']['date']}; the "
        f"times over 16 bits are from another run on {runs['compute_dtype']['date']}, with other sources of fast"
    )
    text += "; 33 to 63 rows were not measured" if since else ""
    assert line().endswith(text) and line(backend="hopper").endswith(text)
    for other in (
        {"backend": "triton"}, {"fp8_mode": "fp8_query"}, {"cache_format": CACHE_FORMATS["fp8_ds_mla"]},
        {"cache_format": CACHE_FORMATS["compute_dtype"]},
    ):  # fmt: skip
        assert "x the time" not in line(**other)

    def change(**times) -> None:
        """Let every measured shape have other times."""
        rows_of = [
            row | {"shapes": [{**shape, "times_us": shape["times_us"] | times} for shape in row["shapes"]]}
            for row in recorded["rows"]
        ]
        monkeypatch.setattr(fp8_mode_times, "recorded_times", lambda: recorded | {"rows": rows_of})

    change(compute_dtype=100.0, fp8_query=70.0, fp8_product=80.0)
    assert "and fp8_mode fp8_query takes 0.70 x. Measured" in line()
    change(compute_dtype=1000.0)
    assert "x the time" not in line()

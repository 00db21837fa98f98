"""Tests of the benchmarks against transformers: `decode_vs_transformers` and `gqa_vs_transformers`."""

from __future__ import annotations

import datetime
import json

import pytest
import torch

import fast

pytest.importorskip("transformers", reason="the benchmarks compare with transformers")
from fast.integrations.transformers import use_attention

from ..benchmarks import decode_vs_transformers, gqa_vs_transformers, versus_transformers
from ..benchmarks.report import fast_digest

BOTH = {"decode_vs_transformers": decode_vs_transformers, "gqa_vs_transformers": gqa_vs_transformers}
WHO = ("transformers", "reference", "fast")
CONTEXTS, STEPS = (20, 33), 2


@pytest.fixture(params=BOTH)
def module(request, monkeypatch):
    """Return the module of a benchmark; its model is small."""
    for name, size in (("HEADS", 4), ("KV_HEADS", 2), ("HEAD_DIM", 32)):
        monkeypatch.setattr(gqa_vs_transformers, name, size)
    dims = {
        "hidden_size": 64, "num_heads": 2, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32,
    }  # fmt: skip
    monkeypatch.setattr(fast, "PRESETS", {"deepseek-v2-lite": dims})
    return BOTH[request.param]


def whos(module) -> list[str]:
    return [*WHO, gqa_vs_transformers.SCATTERED] if module is gqa_vs_transformers else [*WHO]


def test_a_small_run(module, tmp_path, capsys):
    """Run a benchmark with two short contexts -> rows of each implementation, and a results file that the site reads.

    The file has the command, the hardware, the versions, the date and the sha256 of `fast`. The number of threads of
    torch is as before.
    """
    name, path, threads = module.__name__.rpartition(".")[2], tmp_path / "times.json", torch.get_num_threads()
    options = ["--contexts", *map(str, CONTEXTS), "--steps", str(STEPS), "--reference-steps", "1", "--threads", "1",
               "--json", str(path)]  # fmt: skip
    assert module.main(options) == 0
    report = json.loads(path.read_text())
    assert report["command"] == " ".join([f"python -m tests.benchmarks.{name}", *options])
    assert report["hardware"] and report["threads"] == 1 and torch.get_num_threads() == threads
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    assert report["date"] == datetime.date.today().isoformat() and report["fast_sha256"] == fast_digest()
    assert [(row["context"], row["who"]) for row in report["rows"]] == [(c, w) for c in CONTEXTS for w in whos(module)]
    for row in report["rows"]:
        assert row["steps"] == (1 if row["who"] == "reference" else STEPS)
        low, high = row["ms_quartiles"]
        assert 0 < row["ms_least"] <= row["ms_median"] and low <= row["ms_median"] <= high
        assert row["max_error"] <= row["max_budget"]
        if row["who"] == "transformers":
            assert row["times_faster_than_transformers"] == pytest.approx(1)
    assert any(row["max_error"] > 0 for row in report["rows"])
    out = capsys.readouterr().out
    assert all(text in out for text in ("One decoded token", "transformers", "fast", *map(str, CONTEXTS)))


def test_the_caches_are_in_order_and_scattered(monkeypatch):
    """Fill the two caches of `fast` -> blocks in order and in another order, the same tokens, also after a step."""
    for name, size in (("HEADS", 4), ("KV_HEADS", 2), ("HEAD_DIM", 32)):
        monkeypatch.setattr(gqa_vs_transformers, name, size)
    model, entries, tables = gqa_vs_transformers.one_layer_model(), torch.randn(2, 100, 2, 32), []
    use_attention(model, block_size=gqa_vs_transformers.BLOCK_SIZE)
    for scattered in (False, True):
        torch.manual_seed(3)
        cache = gqa_vs_transformers.filled_paged_cache(model, fast, entries, 9, scattered)
        layer = cache.layers[0]
        tables.append(layer.record.block_table[0].tolist())
        slots = [block * 16 + offset for block in tables[-1] for offset in range(16)][:100]
        assert torch.equal(layer.kv_cache.flatten(1, 2)[:, slots], entries)
        versus_transformers.stepper(model, cache)()
        assert layer.record.block_table.tolist() == tables[-1:] and layer.record.lens.tolist() == [101]
    assert tables[0] == list(range(7)) and sorted(tables[1]) == tables[0] and tables[1] != tables[0]


def test_a_wrong_output_is_not_timed(module, monkeypatch, capsys):
    """Change the first output of `fast` -> an error that names the implementation; nothing is printed."""
    right, made = versus_transformers.stepper, []

    def stepper(model, cache):
        step, number = right(model, cache), len(made)
        made.append(step)
        wanted = whos(module).index("fast") + 1  # the first stepper computes gold
        return (lambda: step() + 0.01) if number == wanted else step

    monkeypatch.setattr(module, "stepper", stepper)
    with pytest.raises(RuntimeError, match="^Parity.*'fast'.*so nothing was timed$"):
        module.main(["--contexts", "20", "--steps", "1", "--reference-steps", "1"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "20", "0"], "--contexts: expected at least 1, got 0"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--reference-steps", "-1"], "--reference-steps: expected at least 1, got -1"),
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--json", "nosuch/times.json"], "--json: expected a file in a folder that exists, got nosuch/times.json"),
    ],
)
def test_bad_options(module, options, message, monkeypatch, tmp_path, capsys):
    """Give an invalid option -> one line on stderr and status 2, before anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "measure", None)
    assert module.main(options) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_unknown_option(module):
    with pytest.raises(SystemExit) as caught:
        module.main(["--nosuch"])
    assert caught.value.code == 2

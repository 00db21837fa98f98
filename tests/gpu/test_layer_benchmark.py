"""Tests of `python -m tests.benchmarks.step --layer`, which times the stages of one attention layer.

Most tests run on a CPU with tiny dims. The tests on a GPU count kernels, and run the benchmark with few heads.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the benchmark compares with transformers")

from reference.interfaces import MLAConfig

from ..benchmarks import layer_stages, layer_work, step
from ..benchmarks.contest import Contender
from ..benchmarks.kernel_times import Marker
from ..benchmarks.layers import Batch
from ..benchmarks.recorded_ops import record
from ..benchmarks.timing import Ceilings

ROOT = Path(__file__).resolve().parents[2]
RATES = Ceilings(copy_gb_s=4000.0, read_gb_s=4400.0, matmul_tflops=800.0, sustained_matmul_tflops=700.0)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_work_of_a_decode():
    """Count the work of a decode of 64 requests over 4096 tokens in DeepSeek-V3 -> the numbers computed by hand."""
    config, batch = MLAConfig.from_preset("deepseek-v3"), Batch(64, 4096, 0, 0)
    work = layer_work.work_of(config, batch)
    assert list(work) == ["projections", "write", "output", "query_to_latent", "attention", "latent_to_value"]
    weights = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576
    assert work["projections"] == (2 * 64 * weights, 2 * (weights + 64 * (7168 + 128 * 192 + 576)))
    assert work["attention"] == (2 * 128 * 64 * 4096 * 1088, 2 * (64 * 4096 * 576 + 64 * 128 * 1088))
    assert work["query_to_latent"].flops == work["latent_to_value"].flops == 2 * 64 * 128 * 128 * 512
    assert work["output"] == (2 * 64 * 128 * 128 * 7168, 2 * (128 * 128 * 7168 + 64 * (128 * 128 + 7168)))
    assert work["write"] == (0, 2 * 64 * (2 * 128 * 64 + 2 * 576))
    plain = layer_work.work_of(MLAConfig.from_preset("deepseek-v2-lite"), batch)
    assert plain["projections"].flops == 2 * 64 * 2048 * (16 * 192 + 576)


def test_work_of_a_prefill():
    """Count the work of 2 prompts of 1024 tokens behind 8192 -> the numbers computed by hand; no context, no merge."""
    config = MLAConfig.from_preset("deepseek-v3")
    work = layer_work.work_of(config, Batch(0, 0, 2, 1024, 8192))
    assert set(work) == {"projections", "write", "expansion", "attention", "merge", "output"}
    keys, pairs = 2 * 9216, 2 * (1024 * 8192 + 512 * 1024)
    assert work["expansion"].flops == 2 * keys * 512 * 128 * 256
    assert work["attention"].flops == 2 * 128 * pairs * 320
    assert work["merge"] == (0, 2 * 3 * 2048 * 128 * 128)
    assert "merge" not in layer_work.work_of(config, Batch(0, 0, 2, 1024))


def test_floors():
    """Compute floors -> the longer of the times for the FLOPs and for the bytes; moving stages use the copy rate."""
    work = layer_work.Work(8 * 10**9, 44 * 10**6)
    assert layer_work.floor_us("attention", work, RATES) == pytest.approx(10.0)
    assert layer_work.floor_us("attention", work._replace(flops=16 * 10**9), RATES) == pytest.approx(20.0)
    assert layer_work.floor_us("write", layer_work.Work(0, 40 * 10**6), RATES) == pytest.approx(10.0)


def test_stages_of_ops():
    """Assign the ops of both kinds of layers to stages; a layer without a fused write is an error."""
    decode = ["aten::mm", "aten::_fused_rms_norm", "aten::mm", "mla_twins::rope_norm_and_cache", "aten::bmm",
              "mla_twins::mla_decode", "aten::bmm", "mla_twins::zero_padding_tokens", "aten::mm"]  # fmt: skip
    assert layer_stages.stages_of(decode) == [
        "projections", "projections", "projections", "write", "query_to_latent", "attention", "latent_to_value",
        "latent_to_value", "output",
    ]  # fmt: skip
    prefill = ["aten::mm", "mla_twins::rope_norm_and_cache", "aten::copy_", "aten::bmm", "mla_twins::flash_attn_varlen",
               "mla_twins::gather_cache_out", "aten::bmm", "mla_twins::flash_attn_varlen",
               "mla_twins::merge_attn_states_out", "aten::mm"]  # fmt: skip
    assert layer_stages.stages_of(prefill) == [
        "projections", "write", "write", "expansion", "attention", "expansion", "expansion", "attention", "merge",
        "output",
    ]  # fmt: skip
    for wrong in (decode[:3] + decode[4:], decode[:-1]):
        with pytest.raises(AssertionError, match="expected a fused write and an output projection"):
            layer_stages.stages_of(wrong)


def test_share_of_products():
    """Compute the share of attention and the expansion product -> the rest are gathers, merges and copies.

    The projections, the fused write and the copy of the rotated parts do not count. A decode has no share.
    """
    names = ["aten::mm", "mla_twins::rope_norm_and_cache", "aten::copy_", "aten::bmm", "mla_twins::flash_attn_varlen",
             "mla_twins::gather_cache_out", "aten::mm", "mla_twins::flash_attn_varlen",
             "mla_twins::merge_attn_states_out", "aten::copy_", "aten::mm"]  # fmt: skip
    times = [1000.0, 500.0, 200.0, 10.0, 20.0, 3.0, 30.0, 30.0, 5.0, 2.0, 4000.0]
    ops = [{"op": name, "median_us": time} for name, time in zip(names, times, strict=True)]
    assert layer_stages.product_share(ops) == pytest.approx(90 / 100)
    assert layer_stages.product_share(ops[:2] + ops[3:]) == pytest.approx(90 / 100)  # without rotated queries
    decode = [op if "varlen" not in op["op"] else op | {"op": "mla_twins::mla_decode"} for op in ops]
    assert layer_stages.product_share(decode) is None


def small_layers(preset: str, batch: str, count: int = 1) -> layer_stages.Layers:
    torch.manual_seed(1)
    dims = layer_stages.dims_of(preset, "cpu", None)
    model = layer_stages.make_model(preset, dims, count, torch.float32, "cpu")
    return layer_stages.Layers.make(model, layer_stages.BATCHES["cpu"][batch], "cpu")


@pytest.mark.parametrize("batch", layer_stages.BATCHES["cpu"])
@pytest.mark.parametrize("preset", layer_stages.MODELS)
@torch.no_grad()
def test_outputs_are_compared(preset, batch, monkeypatch):
    """Compare the outputs -> both are within the budget; a wrong output of `fast` is an error.

    The faults are a factor of 1.001, positions shifted by 1, and one cached entry that is zero.
    """
    layers = small_layers(preset, batch)
    stock = layer_stages.Stock(layers.model, layers.rows())
    parity = layer_stages.check_outputs("here", layers, stock)
    assert set(parity) == {"fast", "transformers"} and all(each.passed for each in parity.values())
    assert torch.equal(stock(), stock())  # a call forgets the tokens of the call before
    run = layers.run
    shifted = replace(layers, positions=layers.positions + 1)
    emptied = replace(layers, caches=[cache.clone() for cache in layers.caches])
    emptied.caches[0][layers.block_table[0, 0].long(), 3] = 0
    for wrong in (lambda number: run(number) * 1.001, shifted.run, emptied.run):
        monkeypatch.setattr(layers, "run", wrong)
        with pytest.raises(RuntimeError, match="^here: .*so nothing was timed$"):
            layer_stages.check_outputs("here", layers, stock)


@torch.no_grad()
def test_first_outputs_are_compared(monkeypatch):
    """Allow fewer pairs than the long prefill has -> its first outputs are compared, and transformers is not timed.

    A wrong value in these outputs, and a NaN anywhere, is an error. The reason for the lack of transformers is given.
    """
    layers = small_layers("deepseek-v3", layer_stages.LONG)
    tokens = layers.batch.new_tokens
    assert layer_stages.checked_tokens(layers.batch) == tokens
    assert layer_stages.checked_tokens(layer_stages.BATCHES["cuda"]["chunked prefill"]) == 1024
    assert layer_stages.checked_tokens(layer_stages.BATCHES["cuda"][layer_stages.LONG]) == layer_stages.CHECKED_TOKENS
    whole = layer_stages.gold_output(layers)
    monkeypatch.setattr(layer_stages, "MOST_CHECKED_PAIRS", tokens * layers.batch.seq_lens[0] - 1)
    monkeypatch.setattr(layer_stages, "CHECKED_TOKENS", 5)
    first = layer_stages.gold_output(layers)
    assert first.shape[0] == 5 and torch.allclose(first, whole[:5], rtol=0, atol=1e-12)
    row = layer_stages.measure("here", layers, None, None, None)
    assert set(row["whole_us"]) == {"fast"} and "stores every pair" in row["absent"]["transformers"]
    assert set(row["parity"]) == {"fast"} and row["parity"]["fast"]["passed"] and 0 < row["product_share"] < 1
    run = layers.run

    def changed(number: int, token: int, factor: float) -> torch.Tensor:
        output = run(number)
        output[token, 3] *= factor
        return output

    for token, factor, error in ((4, 1.5, "exceeds the budget"), (tokens - 1, torch.nan, "is not finite")):
        monkeypatch.setattr(layers, "run", partial(changed, token=token, factor=factor))
        with pytest.raises(RuntimeError, match=f"^here: .*{error}, so nothing was timed$"):
            layer_stages.check_outputs("here", layers, None)


@torch.no_grad()
def test_versions_that_cache_keys_and_values(monkeypatch):
    """Let transformers cache expanded keys and values, as older versions do -> the keys and values of the module."""
    layers = small_layers("deepseek-v3", "decode")
    rows, kind = layers.rows(), type(layers.model.layers[0].self_attn)
    stock = layer_stages.Stock(layers.model, rows)
    if not hasattr(stock.module, "expand_kv"):
        pytest.skip("this version of transformers caches keys and values itself, so the other tests cover them")
    keys, values = stock.module.expand_kv(stock.keys, stock.values)
    monkeypatch.delattr(kind, "expand_kv")
    older = layer_stages.Stock(layers.model, rows)
    assert torch.allclose(older.keys, keys) and torch.allclose(older.values, values)


@torch.no_grad()
def test_a_run_on_a_cpu(tmp_path, capsys):
    """Run the benchmark -> a row for each layer and batch; each stage has a time of `fast` and, with peers, of peers.

    The file of the run is drawn on the site: two charts and two tables.
    """
    path = tmp_path / "layer.json"
    assert step.main(["--layer", "--device", "cpu", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report.keys() >= {"command", "hardware", "versions", "date", "fast_sha256", "layers_in_a_graph", "targets"}
    assert "transformers" in report["versions"]
    found = [(row["layer"], row["batch"]) for row in report["rows"]]
    assert found == [(name, batch) for name in layer_stages.MODELS for batch in layer_stages.BATCHES["cpu"]]
    for row in report["rows"]:
        stages = set(row["stages"])
        assert stages == set(layer_work.work_of(MLAConfig.from_preset(row["layer"]), Batch(**row["dims"])))
        assert all(stage["fast_us"] > 0 for stage in row["stages"].values())
        assert layer_stages.total_us(row, "fast") == pytest.approx(sum(op["median_us"] for op in row["ops"]))
        assert layer_stages.total_us(row, "peers") is None and row["kernels"] is None
        assert (row["product_share"] is None) == (row["batch"] == "decode")
        assert {who for who, spread in row["whole_us"].items() if spread["median_us"] > 0} == {"fast", "transformers"}
    assert "One attention layer" in capsys.readouterr().out


def test_peers_of_a_layer(monkeypatch):
    """Time attention of peers -> the fastest peer of each call; a peer that raises is absent with the reason."""
    layers = SimpleNamespace(
        batch=Batch(0, 0, 2, 8, 64), config=SimpleNamespace(num_heads=2), hidden_states=torch.zeros(1)
    )
    seen = []

    def contenders(row, inputs, peers):
        seen.append((row.B, row.Sq, row.Skv, row.N, row.mask))
        broken = Contender([lambda: 1 / 0])
        return {"A": Contender([lambda: None]), "B": broken}, {"C": "its library could not be loaded"}

    monkeypatch.setattr(layer_stages.prefill, "peer_contenders", contenders)
    found = layer_stages.attention_of_peers(None, layers, SimpleNamespace())
    assert seen == [(2, 8, 8, 2, "causal"), (2, 8, 64, 2, "full")]
    assert found.who == "A" and found.us > 0
    assert found.absent == {
        "C": "its library could not be loaded", "B": "ZeroDivisionError: division by zero",
    }  # fmt: skip
    monkeypatch.setattr(layer_stages.prefill, "peer_contenders", lambda *arguments: ({}, {"C": "gone"}))
    assert layer_stages.attention_of_peers(None, layers, SimpleNamespace()) == (None, 0.0, {"C": "gone"})


def test_refusals(tmp_path, capsys):
    for options, message in (
        (["--layer", "--device", "cpu", "--peers", str(tmp_path)], "--peers: expected a folder with peers.py"),
        (["--layer", "--device", "cpu", "--heads", "0"], "--heads: expected at least 1, got 0"),
    ):
        assert step.main(options) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "peers.py").touch()
    assert step.main(["--device", "cpu", "--peers", str(tmp_path)]) == 2
    assert "--peers: expected together with --layer" in capsys.readouterr().err


def layer_row(**changes) -> dict:
    """Return a row of a results file; every stage took 10 us, and its floor is 8 us."""
    stages = {stage: {"fast_us": 10.0, "peers_us": 12.0, "floor_us": 8.0, "share_of_floor": 0.8, "flops": 1, "bytes": 1}
              for stage in ("projections", "write", "attention", "output")}  # fmt: skip
    whole = {who: {"median_us": time, "quartiles_us": [time, time], "runs": 3}
             for who, time in (("fast", 41.0), ("transformers", 410.0))}  # fmt: skip
    row = {
        "layer": "deepseek-v3", "batch": "decode", "dims": vars(Batch(64, 4096, 0, 0)), "stages": stages,
        "heads": 128,
        "whole_us": whole, "kernels": ["a"] * 5, "attention_peer": "FlashMLA", "absent": {}, "not_captured": {},
        "parity": {"fast": {"passed": True}, "transformers": {"passed": False}},
    }  # fmt: skip
    return row | changes


def test_table_and_verdicts(capsys):
    """Draw rows -> times, shares and sums; a decode with more than 6 kernels misses the target."""
    rows = [layer_row(), layer_row(layer="deepseek-v2-lite", kernels=["a"] * 7), layer_row(batch="chunked prefill")]
    step.wide_console(190).print(layer_stages.draw(rows))
    shown = capsys.readouterr().out
    assert "80%" in shown and "48.0" in shown and "410.0" in shown
    found = layer_stages.verdicts(rows)
    assert [(each["kernels"], each["met"]) for each in found] == [(5, True), (7, False)]
    assert found[0]["text"] == "deepseek-v3, decode: 5 kernels between the projections, at most 6: met"
    long = [layer_row(batch=layer_stages.LONG, product_share=share) for share in (0.9, 0.899)]
    found = layer_stages.verdicts([*long, long[0] | {"kernels": None}])  # a run on a CPU has no verdict
    assert [each["met"] for each in found] == [True, False]
    assert found[1]["text"] == (
        "deepseek-v3, long prefill, N 128: share of attention and the expansion product: 0.899, at least 0.9: missed"
    )


def test_long_prefill():
    """Read the long prefill -> 8192 new tokens behind 65536, with 128 heads and with 16 heads."""
    assert layer_stages.BATCHES["cuda"][layer_stages.LONG] == Batch(0, 0, 1, 8192, 65536)
    assert {layer_stages.dims_of(preset, "cuda", None)["num_heads"] for preset in layer_stages.MODELS} == {16, 128}


def test_section_of_the_site(monkeypatch, tmp_path):
    """Draw the section -> a note while its file is missing; then charts for each batch, and tables.

    A bar of peers that lack the time of a stage is left out. Every stage has a name and a colour in both schemes.
    """
    pytest.importorskip("mkdocs")  # the hooks of the site import it
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    performance = importlib.import_module("performance")
    drawn = importlib.import_module("layer_stages")  # docs/hooks/layer_stages.py
    assert tuple(drawn.STAGES) == layer_stages.STAGES
    css = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
    for stage in layer_stages.STAGES:
        assert css.count(f"--part-{stage}: #") == 2 and f".chart .part.{stage} {{" in css
    docs, marker = tmp_path / "docs", "<!-- results: layers h200-layer.json -->"
    (docs / "results").mkdir(parents=True)
    assert "step --layer --peers .peers --json docs/results/h200-layer.json" in performance.filled(marker, docs)
    second = layer_row(batch="chunked prefill", dims=vars(Batch(0, 0, 2, 1024, 8192)), kernels=["a"] * 9)
    second["stages"] = {**second["stages"], "attention": {"fast_us": 20.0, "floor_us": 8.0, "share_of_floor": 0.4}}
    report = {
        "command": "python -m tests.benchmarks.step --layer", "hardware": "NVIDIA H200", "driver": "1", "threads": 1,
        "versions": {"torch": "2.13"}, "date": "2031-02-03", "layers_in_a_graph": 8, "rows": [layer_row(), second],
    }  # fmt: skip
    (docs / "results" / "h200-layer.json").write_text(json.dumps(report))
    page = performance.filled(marker, docs)
    assert page.count('<svg class="wide"') == 2 and "Not measured" not in page
    assert "deepseek-v3, best kernels of others, attention: 12.0 us" in page
    assert "| deepseek-v3 | 64 decodes over 4096 tokens | 10.0 | 41.0 | 410.0 | 1.17 | 5 |" in page
    assert "| deepseek-v3 | 2 prompts of 1024 tokens behind 8192 | 10.0 | 41.0 | 410.0 | - | 9 |" in page
    assert "The error of transformers exceeds the budget" in page and "that of FlashMLA" in page
    assert "| **all stages** | 40.0 | 48.0 | 32.0 | 80% |" in page
    assert "not timed" not in page and "Share of attention" not in page
    report["rows"][0]["absent"] = second["absent"] = {"FA4": "its library could not be loaded"}
    second["product_share"] = 0.934
    second["not_captured"] = {"FlashInfer": "RuntimeError: Cannot find include path."}
    (docs / "results" / "h200-layer.json").write_text(json.dumps(report))
    page = performance.filled(marker, docs)
    named = "deepseek-v3, decode; deepseek-v3, chunked prefill"
    assert "in the time of `forward_prefill`: 93% (deepseek-v3, chunked prefill)." in page
    assert (
        f"were not timed:\n\n- FA4: its library could not be loaded ({named})\n- FlashInfer: RuntimeError: Cannot"
        in page
    )


@on_gpu
@pytest.mark.parametrize("preset", layer_stages.MODELS)
@torch.no_grad()
def test_kernels_of_a_decode(preset):
    """Count the kernels of a decode between its projections -> at most 6, among them the write and the decode."""
    torch.manual_seed(2)
    dims = layer_stages.dims_of(preset, "cuda", None)
    model = layer_stages.make_model(preset, dims, 1, torch.bfloat16, "cuda")
    layers = layer_stages.Layers.make(model, Batch(8, 512, 0, 0), None)
    layers.run(0)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling takes kernels, which only tests launch
    try:
        kernels = layer_stages.kernels_between(record(partial(layers.run, 0), "cuda"), Marker())
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert 4 <= len(kernels) <= layer_stages.MOST_KERNELS, kernels
    assert any("_rope_norm_cache" in name for name in kernels), kernels


@on_gpu
@torch.no_grad()
def test_a_run_on_a_gpu(monkeypatch, tmp_path):
    """Run the benchmark with few heads and short requests -> floors, shares, kernels, and graphs of both packages."""
    small = {"decode": Batch(4, 256, 0, 0), "chunked prefill": Batch(0, 0, 2, 128, 256)}
    monkeypatch.setitem(layer_stages.BATCHES, "cuda", small)
    monkeypatch.setattr(step, "measure_ceilings", lambda clock: RATES)
    path = tmp_path / "layer.json"
    assert step.main(["--layer", "--heads", "16", "--json", str(path)]) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert set(row["whole_us"]) == {"fast", "transformers"}, row["not_captured"]
        assert row["kernels"] and all(stage["share_of_floor"] > 0 for stage in row["stages"].values())

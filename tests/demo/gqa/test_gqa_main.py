"""Tests of the main job for grouped-query attention, `python -m fast --family gqa`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fast
import reference

pytest.importorskip("transformers", reason="the main job runs a transformers model")
pytest.importorskip("matplotlib", reason="the main job draws a picture")
from fast.__main__ import main
from fast.demo import measure
from fast.demo.gqa.serving import GQAServingLoop
from fast.integrations.transformers import gqa_layers, restore, use_attention

from ...support.gqa_models import build

ASSETS = Path(fast.__file__).parent / "assets"
PROMPTS = ("import os\n", "class Tree:\n    def __init__(self, root):\n        self.root = root\n" * 2)
SMALL = ["--family", "gqa", "--device", "cpu", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-new-tokens", "3",
         "--token-budget", "64"]  # fmt: skip
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 4, 2, 32, 48  # of tiny-gqa
EXACT = {"slot_mapping", "compute_visible_lens", "compute_first_visible", "advance_step", "build_gqa_metadata",
         "GQAMetadataBuilder.build", "plan_decode", "reshape_and_cache", "copy_blocks", "swap_blocks"}  # fmt: skip
COMPARED = {"gqa_paged_attention", "gqa_varlen_attention", "gqa_cascade_attention", "GQAAttention.forward"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, plain_errors):
    """Return a function that runs `main` in this process and returns exit status, JSON figures, stdout and stderr.

    To save time, `main` compares `fast` with `reference` on only 160 tokens in these tests. The longest requests then
    have more tokens than the window.
    """
    monkeypatch.setattr(measure, "PARITY_TOKENS", 160)
    figures = tmp_path / "f.json"

    def call(*options: str, **packages):
        status = main([*SMALL, "--picture", str(tmp_path / "p.png"), "--json", str(figures), *options], **packages)
        out, err = capsys.readouterr()
        written = json.loads(figures.read_text()) if figures.exists() else None
        return SimpleNamespace(status=status, figures=written, out=out, err=err)

    return call


def module_like(ops, **replaced):
    names = {name: getattr(ops, name) for name in ops.__all__}
    return SimpleNamespace(**{**names, **replaced, "__name__": "planted"})


def save_random(kind: str, folder: Path, **changes) -> None:
    """Write a checkpoint with random weights and the tokenizer of tiny-gqa; `changes` are fields of its config."""
    fields = {"vocab_size": 264, "max_position_embeddings": 256, **changes}
    if kind == "gemma3n":
        fields["vocab_size_per_layer_input"] = 264
    build(kind, **fields).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tiny-gqa" / name, folder)


def failed_rows(done) -> set[str]:
    return {row["op"] for row in done.figures["parity"] if not row["passed"]}


def op_of(row: dict) -> str:
    return row["op"].split(":")[0].split(" (")[0]


def test_both_packages_and_transformers_agree(run, tmp_path):
    """Run the job -> three runs generate the same tokens, every op is compared, and the picture is drawn."""
    done = run()
    figures = done.figures
    assert done.status == 0, done.out + done.err
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert figures["settings"]["family"] == "gqa" and figures["settings"]["model"] == str(ASSETS / "tiny-gqa")
    assert figures["compared"] == ["reference", "fast", "transformers"]
    for prompt, text in zip(figures["prompts"], PROMPTS, strict=True):
        tokens = prompt["tokens"]
        assert prompt["text"] == text and prompt["identical"] and len(tokens["fast"]) == 3
        assert tokens["reference"] == tokens["fast"] == tokens["transformers"]
    assert figures["prompts"][0]["tokens"]["fast"] != figures["prompts"][1]["tokens"]["fast"]
    assert set(figures["speed"]) == {"reference", "fast", "transformers"}
    assert all(row["mixed_steps"] > 0 for row in figures["schedule"].values())
    for row in figures["parity"]:
        assert row["passed"] and row["max_error"] <= row["max_budget"]
        assert (op_of(row) in EXACT) == (row["max_budget"] == 0), row["op"]
    assert {op_of(row) for row in figures["parity"]} == EXACT | COMPARED
    assert any(row["max_error"] > 0 for row in figures["parity"]), "all errors are 0: was fast compared with itself?"
    for said in ("identical for 2 of 2 prompts", "cpu: serves", "parity of fast with reference", "have no meaning"):
        assert said in done.out
    assert "latent" not in done.out and "chunks of cached context" not in done.out

    rows = {row["op"] for row in figures["parity"]}  # attention is compared for each of the two configs of layers
    for words in ("decode", "3 tokens", "scheduled", "prefill"):
        for label in (f"window {WINDOW}", "full"):
            assert {f"gqa_paged_attention ({words}, {label}): {part}" for part in ("out", "lse")} <= rows
    assert f"compute_first_visible (window {WINDOW})" in rows and "compute_first_visible (full)" not in rows
    assert "gqa_cascade_attention (full): out" in rows  # a window has no cascade
    assert not any(f"gqa_cascade_attention (window {WINDOW})" in row for row in rows)


def test_cache_bytes_are_those_of_the_config(run):
    """Run the job in float32 -> a token has keys and values of 2 KV heads in the cache, not of 4 query heads."""
    cache = run("--ops", "fast").figures["cache"]
    assert cache["grouped_bytes_per_1000_tokens"] == 1000 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert cache["every_head_bytes_per_1000_tokens"] == 1000 * LAYERS * 2 * HEADS * HEAD_DIM * 4
    assert cache["ratio"] == HEADS / KV_HEADS
    blocks = -(-(len(PROMPTS[0]) + 3) // 16) + -(-(len(PROMPTS[1]) + 3) // 16)
    assert cache["peak_bytes"] <= blocks * 16 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def test_a_cache_in_e4m3(run):
    """Serve over fp8_e4m3 -> both packages generate the same tokens, with the same scales of keys and of values."""
    done = run("--cache-format", "fp8_e4m3", "--no-picture")
    figures = done.figures
    assert done.status == 0, done.out + done.err
    assert figures["compared"] == ["reference", "fast"] and figures["verdict"]["tokens_identical"]
    assert {op_of(row) for row in figures["parity"]} == EXACT | COMPARED and not failed_rows(done)
    assert list(figures["kv_scales"]) == [f"layers.{index}.self_attn" for index in range(LAYERS)]
    assert all(len(pair) == 2 and pair[0] != pair[1] for pair in figures["kv_scales"].values())
    assert figures["cache"]["grouped_bytes_per_1000_tokens"] == 1000 * LAYERS * 2 * KV_HEADS * HEAD_DIM
    bits = figures["bits_per_byte"]
    assert bits["cache_format"] == "fp8_e4m3" and bits["over_format"] != bits["compute_dtype"]


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_one_package_alone(run, package):
    done = run("--ops", package, "--dtype", "bfloat16", "--no-picture")
    assert done.status == 0 and done.figures["served"] == [package] and done.figures["parity"] == []
    assert "parity table: left out" in done.out


def test_bfloat16_and_a_named_backend(run):
    done = run("--dtype", "bfloat16", "--backend", "cpu", "--no-picture")
    assert done.status == 0 and not failed_rows(done), done.out + done.err


# Models with other attention.


@pytest.mark.parametrize(
    "kind, changes, labels",
    [
        ("gpt_oss", {}, {"window 7", "full"}),  # attention sinks
        ("gemma3n", {}, {"window 7", "full"}),  # layers that read the cache of another layer
        ("llama4", {"attn_temperature_tuning": False}, {"chunk 16", "full"}),  # chunked local attention
        ("llama", {}, {""}),  # all layers have one config
    ],
)
def test_other_models(run, tmp_path, kind, changes, labels):
    """Serve a random model of another kind -> the same tokens, and every op passes for each kind of its layers."""
    folder = tmp_path / kind
    save_random(kind, folder, **changes)
    done = run("--model", str(folder), "--no-picture")
    assert done.status == 0, done.out + done.err
    assert done.figures["verdict"]["tokens_identical"] and done.figures["note"] is None
    attended = {row["op"] for row in done.figures["parity"] if op_of(row) == "GQAAttention.forward"}
    assert attended == {f"GQAAttention.forward ({label})" if label else "GQAAttention.forward" for label in labels}


# Mistakes that the job must find.


def test_a_wrong_scale_in_one_op_fails_parity(run):
    def gqa_paged_attention(q, kv_cache, metadata, config, *arguments, **options):
        config = dataclasses.replace(config, scale=config.softmax_scale * 1.01)
        return fast.gqa_paged_attention(q, kv_cache, metadata, config, *arguments, **options)

    done = run("--no-picture", ops=module_like(fast, gqa_paged_attention=gqa_paged_attention))
    failed = failed_rows(done)
    assert done.status == 1 and "FAILED: gqa_paged_attention" in done.out
    for words in ("decode", "3 tokens", "scheduled", "prefill"):
        assert f"gqa_paged_attention ({words}, full): out" in failed
    assert all(op.startswith("gqa_paged_attention") for op in failed), "an op without the planted mistake failed"


def test_a_window_with_one_key_too_many_fails_parity(run):
    """Let `fast` plan windows of 49 keys -> the plans of layers with a window differ, and no other plan."""

    def build_gqa_metadata(common, block_size, config, *arguments, **options):
        plan = fast.build_gqa_metadata(common, block_size, config, *arguments, **options)
        if config.sliding_window is None:
            return plan
        wider = {
            part: dataclasses.replace(each, first_visible=(each.first_visible - 1).clamp(min=0))
            for part, each in (("decode", plan.decode), ("prefill", plan.prefill))
        }
        return dataclasses.replace(plan, **wider)

    done = run("--no-picture", ops=module_like(fast, build_gqa_metadata=build_gqa_metadata))
    assert done.status == 1 and failed_rows(done) == {f"build_gqa_metadata (window {WINDOW})"}


def test_exchanged_keys_and_values_fail_parity(run):
    def reshape_and_cache(key, value, *arguments, **options):
        fast.reshape_and_cache(value, key, *arguments, **options)

    done = run("--no-picture", ops=module_like(fast, reshape_and_cache=reshape_and_cache))
    assert done.status == 1 and failed_rows(done) == {"reshape_and_cache"}


def test_sinks_that_are_left_out_fail(run, tmp_path):
    """Let the layer of `fast` ignore its sinks -> the rows of the layer fail, and no other row."""
    folder = tmp_path / "gpt_oss"
    save_random("gpt_oss", folder)

    class WithoutSinks(fast.GQAAttention):
        def forward(self, *arguments, **options):
            sinks = self.sinks
            self.sinks = torch.nn.Parameter(torch.full_like(sinks, -1e9))
            try:
                return super().forward(*arguments, **options)
            finally:
                self.sinks = sinks

    done = run("--model", str(folder), "--no-picture", ops=module_like(fast, GQAAttention=WithoutSinks))
    assert done.status == 1
    assert failed_rows(done) == {"GQAAttention.forward (window 7)", "GQAAttention.forward (full)"}


def test_other_tokens_fail(run, monkeypatch):
    plain_greedy = measure.plain_greedy

    def altered(job, prompt_ids, max_new_tokens):
        ids = plain_greedy(job, prompt_ids, max_new_tokens)
        return [*ids[:-1], ids[-1] ^ 1] if prompt_ids == job.prompt_ids[1] else ids

    monkeypatch.setattr(measure, "plain_greedy", altered)
    done = run("--ops", "fast", "--no-picture")
    assert done.status == 1
    assert [prompt["differs_at"] for prompt in done.figures["prompts"]] == [None, 2]


# Bad input.

BAD = [
    (["--context-parallel", "2"], "--context-parallel: expected --family mla, got --family gqa"),
    (["--interleave", "1"], "--interleave: expected --family mla, got --family gqa"),
    (["--merge", "a2a"], "--merge: expected --family mla, got --family gqa"),
    (["--workspace-tokens", "256"], "--workspace-tokens: expected --family mla, got --family gqa"),
    (["--block-size", "8"], "--block-size: expected a positive multiple of 16, got 8"),
    (["--cache-format", "fp8_ds_mla"], "--cache-format: expected compute_dtype or fp8_e4m3 for a "
                                       "key/value cache, got fp8_ds_mla"),
    (["--backend", "abacus"], "backend: expected one of "),
    (["--backend", "hopper"], "hopper: "),
    (["--backend", "torch"], "torch: serves device cuda, got cpu"),
    (["--model", str(ASSETS / "tiny-mla")], "config.kv_lora_rank: latent attention is not implemented in this family"),
    (["--family", "mla", "--model", str(ASSETS / "tiny-gqa")],
     "config: expected a Multi-head Latent Attention model, got 'qwen3'"),
    (["--prompt", "x" * 4093], "--max-new-tokens: expected prompt and new tokens within the model's 4096 positions"),
]  # fmt: skip


@pytest.mark.parametrize("family, model", [("mla", "gqa"), ("gqa", "mla")])
def test_a_model_of_the_other_family(run, family, model):
    """Name the checkpoint of the other family -> the error ends with the option that serves it."""
    done = run("--family", family, "--model", str(ASSETS / f"tiny-{model}"))
    assert done.status == 2 and done.err.endswith(f"; use --family {model}\n") and done.err.count("\n") == 1


def test_a_model_of_neither_family(run, tmp_path):
    """Name a model that neither family serves -> the error has the reasons of the chosen family and no other family."""
    import transformers

    transformers.FalconMambaConfig().save_pretrained(tmp_path / "mamba")
    for family in ("mla", "gqa"):
        done = run("--family", family, "--model", str(tmp_path / "mamba"))
        assert done.status == 2 and done.err.count("\n") == 1 and "use --family" not in done.err, done.err


@pytest.mark.parametrize("options, message", BAD, ids=[" ".join(options)[:30] for options, _ in BAD])
def test_bad_input_is_one_line(run, options, message):
    done = run(*options)
    assert done.status == 2 and done.figures is None and done.out == ""
    assert done.err.startswith(f"error: {message}") and done.err.count("\n") == 1, done.err


def test_an_encoder_is_refused(run, tmp_path):
    """Name a model without a decoder -> an error of one line before any weight is read."""
    import transformers

    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    done = run("--model", str(tmp_path / "bert"))
    assert done.status == 2 and done.err.startswith("error: --model: expected a causal language model, got attention")


def test_a_model_that_counts_the_tokens_of_a_row_is_refused(run, tmp_path):
    """Name a Llama 4 with temperature tuning -> an error: its layers count rows, and the job packs requests in one."""
    save_random("llama4", tmp_path / "llama4")
    done = run("--model", str(tmp_path / "llama4"))
    assert done.status == 2 and done.figures is None and done.err.count("\n") == 1
    assert done.err.startswith("error: --model: expected a model that takes the positions of tokens from position_ids")


def test_an_unknown_family(run):
    with pytest.raises(SystemExit) as caught:
        run("--family", "mha")
    assert caught.value.code == 2


# The serving loop.


@pytest.fixture(scope="module")
def model():
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-gqa", dtype=torch.float32).eval()


def serve(model, ops, prompts: list[list[int]], new_tokens: int, **sizes):
    """Serve prompts with a loop, and return the loop and the reports of its steps; unused slots of caches are NaN."""
    reports = []
    use_attention(model, ops=ops, block_size=16)
    try:
        loop = GQAServingLoop(
            model, gqa_layers(model), ops, **{"block_size": 16, "max_num_seqs": 3, "token_budget": 32, **sizes}
        )
        for kv_cache in loop.kv_caches.values():
            kv_cache.fill_(torch.nan)
        for prompt in prompts:
            loop.add(prompt, new_tokens)
        loop.run(reports.append)
    finally:
        restore(model)
    return loop, reports


def greedy(model, prompt: list[int], new_tokens: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("ops", [reference, fast], ids=["reference", "fast"])
def test_loop_with_too_few_blocks(model, ops, plain_errors):
    """Serve three requests in a cache for two -> a request is preempted, and all tokens are those of transformers."""
    prompts = [list(range(1, 46)), list(range(100, 130)), list(range(7, 47))]
    loop, reports = serve(model, ops, prompts, 8, num_blocks=8, block_order=list(range(8))[::-1])
    assert any(report.preempted for report in reports)
    assert any(report.num_decodes and report.num_prefills for report in reports)
    for request, prompt in zip(loop.requests, prompts, strict=True):
        assert request.generated_ids == greedy(model, prompt, 8)
    assert loop.cache_bytes_in_use == 0
    largest = max(report.cache_bytes for report in reports)
    assert largest == 8 * 16 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def test_bad_arguments_of_the_loop(model, plain_errors):
    use_attention(model)
    try:
        layers = gqa_layers(model)
        sizes = dict(num_blocks=4, block_size=16, max_num_seqs=2, token_budget=4)
        for changes, message in (
            (dict(block_size=8), "block_size: expected a positive multiple of 16, got 8"),
            (dict(num_blocks=0), "num_blocks: expected at least 1, got 0"),
            (dict(token_budget=1), "token_budget: expected at least max_num_seqs, 2, got 1"),
            (dict(eos="a"), "eos: expected a token, tokens or None, got "),
            (dict(layers={}), "layers: expected at least one layer, got none"),
        ):
            with pytest.raises(ValueError, match=f"^{message}"):
                GQAServingLoop(**{"model": model, "layers": layers, "ops": fast, **sizes, **changes})
        with pytest.raises(ValueError, match="^ops: expected a module .* without allocate_key_value_cache"):
            GQAServingLoop(model, layers, SimpleNamespace(), **sizes)
    finally:
        restore(model)

"""Tests of the main job, `python -m fast`: its files, its exit status, and its messages about bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fast
import reference

pytest.importorskip("transformers", reason="the main job runs a transformers model")
pytest.importorskip("matplotlib", reason="the main job draws a picture")
from fast.__main__ import main, make_parser
from fast.demo import measure

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "fast" / "assets" / "tiny-mla"
PROMPTS = (
    "def read(path):\n",
    "import os\n\n\nclass Tree:\n    def __init__(self, root):\n        self.root = root\n" * 2,
)
SMALL = ["--device", "cpu", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-new-tokens", "3",
         "--block-size", "8",
         "--workspace-tokens", "16", "--token-budget", "32"]  # fmt: skip
EXACT = {"advance_step", "slot_mapping", "choose_paths", "plan_context_chunks", "plan_decode", "build_mla_metadata",
         "concat_and_cache_mla", "copy_blocks", "swap_blocks", "gather_and_maybe_dequant_cache"}  # fmt: skip
COMPARED = {"apply_rope", "rms_norm", "query_to_latent", "latent_to_value", "expand_kv", "flash_attn_varlen",
            "merge_attn_states", "mla_decode", "forward_prefill", "MLAAttention.forward"}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, plain_errors):
    """Return a function that runs `main` in this process and returns exit status, JSON figures, stdout and stderr.

    To save time, `main` compares `fast` with `reference` on only 96 tokens in these tests.
    """
    monkeypatch.setattr(measure, "PARITY_TOKENS", 96)
    picture, figures = tmp_path / "p.png", tmp_path / "f.json"

    def call(*options: str, **packages):
        status = main([*SMALL, "--picture", str(picture), "--json", str(figures), *options], **packages)
        out, err = capsys.readouterr()
        written = json.loads(figures.read_text()) if figures.exists() else None
        assert picture.exists() == (written is not None and "--no-picture" not in options)
        return SimpleNamespace(status=status, figures=written, out=out, err=err)

    return call


def module_like(ops, **replaced):
    names = {name: getattr(ops, name) for name in ops.__all__}
    return SimpleNamespace(**{**names, **replaced, "__name__": "planted"})


def places(text: str, *words: str) -> list[int]:
    """Return the first position of each word in the text; every word must occur."""
    assert all(word in text for word in words), text
    return [text.index(word) for word in words]


def test_as_a_newcomer_runs_it(tmp_path):
    """Run `python -m fast` in a new process, without a terminal -> it prints results, and writes picture and JSON."""
    picture, path = tmp_path / "p.png", tmp_path / "f.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "fast", *SMALL, "--picture", str(picture), "--json", str(path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "\x1b" not in done.stdout
    for said in ("continuations", "parity of fast with reference", "identical for 2 of 2 prompts", "kernels on cpu",
                 "expanded keys and values", "cpu: serves 22 of 22 ops"):  # fmt: skip
        assert said in done.stdout
    order = places(done.stdout, "verdict", "greedy tokens: identical", "tokens/s", "kernels on cpu", "continuations",
                   "parity of fast with reference", "expanded keys and values")  # fmt: skip
    assert order == sorted(order), "the order must be verdict, speeds, backends, details"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000

    figures = json.loads(path.read_text())
    assert figures["verdict"]["passed"] and figures["verdict"]["tokens_identical"]
    for row in figures["parity"]:
        assert row["passed"] and row["max_error"] <= row["max_budget"]
        assert (row["op"] in EXACT) == (row["max_budget"] == 0), row["op"]
    assert {row["op"].split(":")[0].split(" (")[0] for row in figures["parity"]} == EXACT | COMPARED
    assert any(row["max_error"] > 0 for row in figures["parity"]), "all errors are 0: was fast compared with itself?"
    assert set(figures["speed"]) == {"reference", "fast", "transformers"}
    for prompt, text in zip(figures["prompts"], PROMPTS, strict=True):
        assert prompt["text"] == text and prompt["identical"]
        assert prompt["tokens"]["reference"] == prompt["tokens"]["fast"] == prompt["tokens"]["transformers"]
        assert len(prompt["tokens"]["fast"]) == prompt["new_tokens"] == 3
    for schedule in figures["schedule"].values():
        assert schedule["mixed_steps"] > 0 and schedule["most_chunks_in_a_step"] > 1
    assert figures["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert figures["hardware"]["cpu"] and figures["settings"]["dtype"] == "float32"


def kernel_lines(out: str) -> list[str]:
    """Return the printed lines about backends."""
    told = out[out.index("kernels on cpu") :].splitlines()[1:]
    return [line.strip() for line in told[: next(i for i, line in enumerate(told) if "continuations" in line)]]


def test_kernel_sets_in_three_lines(run):
    """Run the job -> one line for each backend: how many ops the backend serves, or why the backend serves no op.

    With --verbose, the output has a line for each op, with all reasons.
    """
    said = kernel_lines(run("--max-new-tokens", "2").out)
    assert said == [
        "cpu: serves 22 of 22 ops",
        "triton: serves none: serves device cuda, got cpu",
        # the 4 more reasons are: dtype, two dimensions, block size
        "hopper: serves none: serves device cuda, got cpu and 4 more reasons",
    ]
    verbose = run("--max-new-tokens", "2", "--verbose")
    words = " ".join(kernel_lines(verbose.out))
    assert all(" ".join(line.split()) in words for line in verbose.figures["kernels"]["lines"])
    assert len(verbose.figures["kernels"]["lines"]) == 22
    assert "hopper: serves kv_lora_rank in (256, 512), got 64" in words


@pytest.fixture
def no_work(monkeypatch):
    """Make the main job fail if it loads a model or joins other ranks, which it does after the check of the options."""

    def unreachable(*args, **kwargs):
        raise AssertionError("the work began")

    monkeypatch.setattr("fast.__main__.prepare", unreachable)
    monkeypatch.setattr("fast.demo.parallel.prepare", unreachable)
    monkeypatch.setattr("fast.demo.parallel.dist.init_process_group", unreachable)


def bad_places(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Return for each case the output options, which must be refused, and the beginning of the error message."""
    there = folder / "there.json"
    there.write_text("kept")
    (folder / "link.png").symlink_to(there)
    (folder / "dangling").symlink_to(folder / "gone" / "f.json")
    (folder / "loop").symlink_to(folder / "loop")
    os.link(there, folder / "hard.png")
    missing, written = "expected a file in a folder that exists", "expected a path that can be written"
    return {
        "no folder": (["--json", str(folder / "gone" / "f.json")], f"--json: {missing}"),
        "a folder": (["--json", str(folder)], f"--json: {missing}"),
        "a file as folder": (["--json", str(there / "f.json")], f"--json: {missing}"),
        "a link into no folder": (["--json", str(folder / "dangling")], f"--json: {missing}"),
        "a folder for the picture": (["--picture", str(folder)], f"--picture: {missing}"),
        "a loop": (["--json", str(folder / "loop")], f"--json: {written}"),
        "a long name": (["--json", str(folder / ("x" * 300))], f"--json: {written}"),
        "read-only for root": (["--json", "/proc/mla-twins.json"], f"--json: {written}"),
        "one file": (["--json", str(there), "--picture", str(there)], "--json: expected another file than --picture"),
        "one file by a link": (["--json", str(there), "--picture", str(folder / "link.png")],
                               "--json: expected another file than --picture"),
        "one file by two names": (["--json", str(there), "--picture", str(folder / "hard.png")],
                                  "--json: expected another file than --picture"),
    }  # fmt: skip


PLACES = ("no folder", "a folder", "a file as folder", "a link into no folder", "a folder for the picture", "a loop",
          "a long name", "read-only for root", "one file", "one file by a link", "one file by two names")  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_output_places_are_tested_before_any_work(tmp_path, capsys, plain_errors, no_work, case):
    """Give an output path that cannot be written -> an error of one line before any work, and no file is changed."""
    options, message = bad_places(tmp_path)[case]
    before = sorted(tmp_path.iterdir())
    picture = [] if "--picture" in options else ["--picture", str(tmp_path / "p.png")]
    assert main([*SMALL, *picture, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1, err
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "there.json").read_text() == "kept"


def test_output_places_of_a_rank(tmp_path, capsys, plain_errors, no_work, monkeypatch):
    """Give rank 0 of a torchrun job a bad output path -> an error before rank 0 waits for other ranks."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    bad = ["--json", str(tmp_path / "gone" / "f.json")]
    assert main([*SMALL, "--context-parallel", "2", *bad]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --json: expected a file in a folder that exists") and err.count("\n") == 1, err
    (tmp_path / "mla-twins.png").mkdir()  # no error at the default path of `--picture`: several ranks draw no picture
    with pytest.raises(AssertionError, match="the work began"):
        main([*SMALL, "--context-parallel", "2", "--json", str(tmp_path / "f.json")])
    assert [path.name for path in tmp_path.iterdir()] == ["mla-twins.png"]


def test_a_picture_that_nobody_asked_for_has_no_place(tmp_path, plain_errors, no_work):
    """Run with --no-picture -> the path of the picture is not checked, even if it is the path of the JSON file."""
    place = str(tmp_path / "f.json")
    with pytest.raises(AssertionError, match="the work began"):
        main([*SMALL, "--no-picture", "--json", place, "--picture", place])


def test_ctrl_c_ends_it_in_one_line(tmp_path):
    """Send Ctrl-C during the generation -> status 130 and one line on stderr, without a traceback."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    options = ["--device", "cpu", "--no-picture", "--prompt", "import os", "--max-new-tokens", "4000",
               "--json", str(tmp_path / "f.json")]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "fast", *options], env=environment, cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert any("serving with" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert err == "interrupted\n"
    assert process.returncode == 130 and not list(tmp_path.iterdir())


def test_the_duration_is_the_measured_one():
    """Read --help and README.md -> both give the measured duration in docs/results/README.md, rounded to 5 s."""
    told = " ".join((ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8").split())
    (measured,) = re.findall(r"`time python -m fast` took ([\d.]+) s on two CPU cores", told)
    said = f"about {5 * round(float(measured) / 5)} s on two CPU cores"
    assert said in " ".join(make_parser().format_help().split())
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_cache_bytes_are_those_of_the_config(run):
    """Run the job -> the reported cache bytes follow from the config, with 6 layers and 4 bytes for each element.

    The cache entry of a token has 64 latent and 16 rope elements. In an expanded cache, a token would have a key of
    32 + 16 elements and a value of 24 elements for each of 8 heads.
    """
    cache = run("--ops", "fast").figures["cache"]
    assert cache["latent_bytes_per_1000_tokens"] == 1000 * 6 * 4 * (64 + 16)
    assert cache["expanded_bytes_per_1000_tokens"] == 1000 * 6 * 4 * (8 * (32 + 16) + 8 * 24)


def test_default_prompts_are_eight_lengths_some_beyond_the_workspace():
    paths = sorted((ROOT / "fast" / "assets" / "prompts").glob("*.py.txt"))
    lengths = [len(path.read_bytes()) for path in paths]
    workspace = make_parser().get_default("workspace_tokens")
    assert len(set(lengths)) == 8 and sum(length > 2 * workspace for length in lengths) >= 3


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_one_package_alone_says_that_parity_is_left_out(run, package):
    done = run("--ops", package)
    assert done.status == 0 and done.figures["served"] == [package] and done.figures["parity"] == []
    assert "parity table: left out" in done.out and "parity: not run" in done.out


def test_bfloat16_and_a_named_backend(run):
    done = run("--dtype", "bfloat16", "--backend", "cpu")
    assert done.status == 0 and done.figures["verdict"]["parity_passed"]
    assert done.figures["cache"]["latent_bytes_per_1000_tokens"] == 1000 * 6 * 2 * 80


def test_a_cache_in_e4m3(run):
    """Serve over fp8_e4m3 -> both packages generate the same tokens, and the job reports the bits per byte.

    An entry has one byte for each element. The job reports where the tokens differ from the tokens of transformers, but
    equal tokens are not required.
    """
    done = run("--cache-format", "fp8_e4m3")
    figures = done.figures
    assert done.status == 0, done.out
    assert figures["settings"]["cache_format"] == "fp8_e4m3" and figures["compared"] == ["reference", "fast"]
    assert figures["cache"]["latent_bytes_per_1000_tokens"] == 1000 * 6 * (64 + 16)
    assert {row["op"].split(":")[0].split(" (")[0] for row in figures["parity"]} == EXACT | COMPARED
    assert all(row["passed"] for row in figures["parity"]) and figures["verdict"]["tokens_identical"]
    assert list(figures["kv_scales"]) == [f"layers.{index}.self_attn" for index in range(6)]
    bits = figures["bits_per_byte"]
    assert bits["cache_format"] == "fp8_e4m3" and bits["over_format"] != bits["compute_dtype"]
    assert abs(bits["increase"]) < 0.1, bits  # the prompts are too short to measure one percent
    for prompt in figures["prompts"]:
        assert prompt["tokens"]["reference"] == prompt["tokens"]["fast"] and prompt["identical"]
        at = prompt["differs_from_transformers_at"]
        assert (at is None) == (prompt["tokens"]["fast"] == prompt["tokens"]["transformers"])
    assert "bits per byte of the prompts: " in done.out and "not required" in done.out
    assert "cache format fp8_e4m3" in " ".join(done.out.split())


def modes_of_decodes(monkeypatch) -> dict[str, set[str]]:
    """Return a dict that gets, for each package, the fp8 modes in which its layers call `mla_decode`."""
    modes: dict[str, set[str]] = {"reference": set(), "fast": set()}

    def noting(name, original):
        def mla_decode(*args, **options):
            modes[name].add(options.get("fp8_mode", "converted"))
            return original(*args, **options)

        return mla_decode

    for name in modes:
        module = sys.modules[f"{name}.mla.absorbed_path"]
        monkeypatch.setattr(module, "mla_decode", noting(name, module.mla_decode))
    return modes


@pytest.mark.parametrize("mode", ["fp8_query", "fp8_product"])
def test_fp8_modes(run, monkeypatch, mode):
    """Serve over fp8_e4m3 in an fp8 mode -> both packages decode in this mode, and the parity table compares it.

    Different tokens are a failure with `fp8_query`, because on a CPU both packages then round alike. `fp8_product`
    rounds probabilities, which `reference` does not.
    """
    modes = modes_of_decodes(monkeypatch)
    done = run("--cache-format", "fp8_e4m3", "--fp8-mode", mode)
    figures = done.figures
    assert done.status == 0, done.out
    assert figures["settings"]["fp8_mode"] == figures["bits_per_byte"]["fp8_mode"] == mode
    # the calibration, and the bits per byte over the dtype of the model, decode in the mode `converted`
    assert modes["fast"] == {"converted", mode} and mode in modes["reference"]
    assert list(figures["q_scales"]) == list(figures["kv_scales"]) and min(figures["q_scales"].values()) > 0
    assert {row["op"].split(":")[0].split(" (")[0] for row in figures["parity"]} == EXACT | COMPARED
    assert all(row["passed"] for row in figures["parity"])
    (error,) = (row["max_error"] for row in figures["parity"] if row["op"] == "mla_decode (1 token): out")
    assert (error > 1e-4) == (mode == "fp8_product"), "only rounded probabilities cause a large error"
    assert f"fp8_e4m3 in the fp8 mode {mode}" in " ".join(done.out.split())
    figures["prompts"][0]["identical"] = False
    found = measure.verdict(figures)
    assert found["passed"] == (mode == "fp8_product")
    assert ("not required in float32 and fp8_product" in " ".join(found["lines"])) == (mode == "fp8_product")


def test_where_tokens_must_agree():
    """Different tokens fail in float32, except in a mode in which the kernels of the device round probabilities."""
    modes = ("converted", "fp8_query", "fp8_product")
    for dtype, device, wanted in (("float32", "cpu", (True, True, False)), ("float32", "cuda:0", (True, False, False)),
                                  ("bfloat16", "cpu", (False, False, False))):  # fmt: skip
        assert tuple(measure.tokens_must_agree(dtype, device, mode) for mode in modes) == wanted


@pytest.mark.parametrize("mode", ["fp8_query", "fp8_product"])
def test_a_wrong_scale_of_queries_fails_parity(run, mode):
    """Let `fast` decode with a scale of queries that is 2 percent too large -> the job ends with status 1."""

    def mla_decode(*args, q_scale=None, **options):
        return fast.mla_decode(*args, q_scale=None if q_scale is None else q_scale * 1.02, **options)

    options = "--cache-format", "fp8_e4m3", "--fp8-mode", mode, "--no-picture", "--max-new-tokens", "1"
    done = run(*options, ops=module_like(fast, mla_decode=mla_decode))
    assert done.status == 1 and "FAILED: mla_decode" in done.out


def test_one_package_over_e4m3(run):
    """Serve over fp8_e4m3 with one package -> the verdict says that the tokens were not compared."""
    done = run("--cache-format", "fp8_e4m3", "--ops", "fast", "--dtype", "bfloat16", "--no-picture")
    assert done.status == 0 and done.figures["compared"] == ["fast"]
    assert "greedy tokens: not compared, because only fast ran" in done.out


def test_other_tokens_over_e4m3_fail(run):
    """Let `fast` decode with a wrong scale of the cache -> parity fails, and the job ends with status 1."""

    def mla_decode(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule=None, kv_scale=None, **options):
        scale = None if kv_scale is None else kv_scale * 2
        return fast.mla_decode(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule, kv_scale=scale, **options)

    done = run("--cache-format", "fp8_e4m3", "--no-picture", ops=module_like(fast, mla_decode=mla_decode))
    assert done.status == 1 and "FAILED: mla_decode" in done.out


def test_a_wrong_scale_in_one_op_fails_parity(run):
    def mla_decode(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule=None):
        return fast.mla_decode(ql_nope, q_pe, kv_cache, metadata, softmax_scale * 1.01, schedule)

    done = run(ops=module_like(fast, mla_decode=mla_decode))
    failed = {row["op"] for row in done.figures["parity"] if not row["passed"]}
    assert done.status == 1 and "mla_decode (1 token): out" in failed
    assert all(op.startswith("mla_decode") for op in failed), "an op without the planted mistake failed"
    assert done.figures["verdict"]["tokens_identical"] and "FAILED: mla_decode" in done.out


def test_a_plan_of_another_length_fails_parity(run):
    def plan_context_chunks(*args, **kwargs):
        return fast.plan_context_chunks(*args, **kwargs)[:-1]

    done = run(ops=module_like(fast, plan_context_chunks=plan_context_chunks))
    assert done.status == 1
    assert [row["op"] for row in done.figures["parity"] if not row["passed"]] == ["plan_context_chunks"]


def test_other_tokens_fail_in_float32_alone(run, monkeypatch):
    plain_greedy = measure.plain_greedy

    def altered(job, prompt_ids, max_new_tokens):
        ids = plain_greedy(job, prompt_ids, max_new_tokens)
        return [*ids[:-1], ids[-1] ^ 1] if prompt_ids == job.prompt_ids[1] else ids

    monkeypatch.setattr(measure, "plain_greedy", altered)
    done = run("--ops", "fast")
    assert done.status == 1
    assert [prompt["differs_at"] for prompt in done.figures["prompts"]] == [None, 2]
    assert "differ at token 2" in done.out and "identical for 1 of 2 prompts; differ for 2" in done.out
    assert run("--ops", "fast", "--dtype", "bfloat16").status == 0


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    for option in ("--model", "--prompt", "--max-new-tokens", "--ops", "--device", "--dtype", "--backend",
                   "--cache-format", "--fp8-mode", "--block-size", "--workspace-tokens", "--token-budget", "--json",
                   "--picture", "--verbose"):  # fmt: skip
        assert option in told
    assert all(action.help for action in make_parser()._actions)


BAD = [
    (["--model", "no/such/folder"], "--model: expected a folder with a checkpoint, or a hub name owner/name, got"),
    (["--model", "./nothing"], "--model: expected a folder with a checkpoint, or a hub name owner/name, got"),
    (["--model", "nothing"], "--model: expected a folder with a checkpoint, or a hub name owner/name, got"),
    (["--device", "toaster"], "--device: expected cpu, cuda or cuda:N, got 'toaster'"),
    (["--device", "meta"], "--device: expected cpu, cuda or cuda:N, got meta"),
    (["--device", "cuda:99"], "--device: expected a CUDA device of this machine ("),
    (["--backend", "abacus"], "backend: expected one of "),
    (["--device", "cpu", "--backend", "hopper"], "hopper: serves device cuda, got cpu"),
    (
        ["--cache-format", "fp8_ds_mla"],
        "--cache-format: expected (Lkv, R) = (512, 64) for format fp8_ds_mla, got",
    ),
    (["--fp8-mode", "fp8_query"], "--fp8-mode: expected converted for format compute_dtype, got fp8_query"),
    (["--block-size", "0"], "--block-size: expected at least 1 and less than 2^31, got 0"),
    (["--workspace-tokens", "7"], "--workspace-tokens: expected at least one block of 8, got 7"),
    (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
    (["--token-budget", "1"], "--token-budget: expected at least one token for each of 2 prompts, got 1"),
    (
        ["--prompt", "x" * 4093],
        "--max-new-tokens: expected prompt and new tokens within the model's 4096 positions, got",
    ),
    (["--max-new-tokens", "1000000000000"], "--max-new-tokens: expected prompt and new tokens within the model's 4096"),
    (["--block-size", str(1 << 50)], "--block-size: expected at least 1 and less than 2^31, got 1125899906842624"),
    (["--model", "~nosuchuser/x"], "--model: expected a folder with a checkpoint, or a hub name owner/name, got"),
    (["--prompt", "\udcff"], "--prompt: expected valid UTF-8, got"),
    (["--ops", "reference", "--backend", "cpu"], "--backend: expected no backend with --ops reference, got cpu"),
    (["--json", "f.png", "--picture", "f.png"], "--json: expected another file than --picture, got f.png"),
    (["--json", "no/such/folder/f.json"], "--json: expected a file in a folder that exists, got no/such/folder/f.json"),
    (["--picture", "no/such/folder/p.png"], "--picture: expected a file in a folder that exists, got"),
]


def one_error(done, message: str) -> None:
    assert done.status == 2 and done.figures is None and done.out == ""
    assert done.err.startswith(f"error: {message}") and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize("options, message", BAD, ids=[" ".join(options)[:40] for options, _ in BAD])
def test_bad_input_is_one_line(run, options, message):
    one_error(run(*options), message)


def test_a_cache_that_does_not_fit(run, monkeypatch):
    def no_room(*_, **__):
        raise MemoryError("no room for it")

    for package in (reference, fast):
        monkeypatch.setattr(package, "allocate_kv_cache", no_room)
    one_error(run(), "--block-size: expected a cache that fits in memory, got: no room for it")


def test_an_option_that_argparse_refuses(run):
    with pytest.raises(SystemExit) as caught:
        run("--ops", "slow")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "name, text",
    [("config.json", '{"model_type": "deepseek_v3", "hidden_size": "abc"}'), ("tokenizer.json", '{"a": 1}')],
)
def test_a_checkpoint_with_a_broken_file(run, tmp_path, name, text):
    """Read a checkpoint with a broken file -> the error of transformers becomes an error of one line."""
    folder = tmp_path / "broken"
    shutil.copytree(Path(fast.__file__).parent / "assets" / "tiny-mla", folder)
    (folder / name).write_text(text)
    one_error(run("--model", str(folder)), "--model: expected a checkpoint that can be read, got: ")


def test_a_place_that_takes_no_figures(tmp_path, capsys, plain_errors):
    """Write the JSON file to a full disk -> an error of one line with status 2; status 1 would mean wrong results."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    options = ["--ops", "fast", "--max-new-tokens", "2", "--json", "/dev/full", "--picture", str(tmp_path / "p.png")]
    assert main([*SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_the_longest_prompt_with_one_token(run):
    """Give a prompt that leaves one position of the model free, and ask for one token -> the job succeeds."""
    done = run("--prompt", "x" * 4094, "--max-new-tokens", "1", "--ops", "fast", "--token-budget", "4096")
    assert done.status == 0 and [prompt["new_tokens"] for prompt in done.figures["prompts"]] == [1, 1, 1]


def test_a_checkpoint_that_is_not_mla(run, tmp_path):
    import transformers

    transformers.LlamaConfig().save_pretrained(tmp_path / "llama")
    one_error(
        run("--model", str(tmp_path / "llama")), "config: expected a Multi-head Latent Attention model, got 'llama'"
    )


def test_a_folder_without_a_checkpoint(run, tmp_path):
    (tmp_path / "empty").mkdir()
    one_error(run("--model", str(tmp_path / "empty")), "--model: expected a checkpoint that can be read, got: ")


def test_weights_that_are_missing_or_cut_short(run, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(CHECKPOINT, copy)
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.2.self_attn.kv_b_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    one_error(run("--model", str(copy)), "--model: expected a checkpoint with all weights, got 1 missing, such as")
    whole = (CHECKPOINT / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    one_error(run("--model", str(copy)), "--model: expected a checkpoint that can be read, got: ")


@pytest.mark.parametrize("name", ["transformers", "matplotlib"])
def test_a_missing_extra_is_named(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    one_error(
        run(), 'python -m fast: expected transformers and matplotlib (pip install "mla-twins[hf]"), got no ' + name
    )


def test_without_a_picture(run, monkeypatch):
    """Run with --no-picture and without matplotlib -> the job succeeds."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("--no-picture", "--ops", "fast", "--max-new-tokens", "2")
    assert done.status == 0 and done.figures is not None and "picture:" not in done.out

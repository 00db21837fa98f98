"""Tests of the command `python -m fast backends`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fast import backends
from fast.__main__ import main
from fast.backends import Backend, OpSupport
from fast.backends.own import CPU
from fast.demo.backend_table import FAMILY_PRESETS, GQA_PRESETS

from ..support.backends import registered


def run(capsys, *options) -> tuple[int, str, str]:
    status = main(["backends", *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json(capsys):
    """Print the table as JSON -> every backend with its reasons, and the choice that `select` makes."""
    status, out, err = run(capsys, "--device", "cpu", "--preset", "minicpm3", "--dtype", "bfloat16", "--json")
    found = json.loads(out)
    assert status == 0 and not err
    assert (found["preset"], found["device"], found["dtype"]) == ("minicpm3", "cpu", "bfloat16")
    assert set(found["chosen"].values()) == {"cpu"} and found["environment"] == {}
    rows = {row["name"]: row for row in found["backends"]}
    assert set(rows) == {each.name for each in backends.registered()}
    assert not any(rows["cpu"]["ops"].values()) and set(rows["cpu"]["ops"]) == set(found["chosen"])
    named = json.loads(run(capsys, "--device", "cpu", "--backend", "torch_flash", "--json")[1])["chosen"]
    assert named["flash_attn_varlen"] is None and named["flash_attn_varlen, without context"] == "torch_flash"
    assert rows["hopper"]["ops"]["mla_decode"] == ["serves device cuda, got cpu"]
    assert rows["torch_flash"]["library"] == "PyTorch" and rows["torch_flash"]["only_named"]
    assert rows["torch_flash"]["ops"] == {
        "flash_attn_varlen": ["returns no LSE"], "flash_attn_varlen, without context": [],
    }  # fmt: skip


def test_grouped_query_attention(capsys, monkeypatch):
    """Print the table of the other family -> its ops and the choices of `explain`; it does not read the environment."""
    monkeypatch.setenv("MLA_DECODE_BACKEND", "nosuch")
    status, out, err = run(capsys, "--family", "gqa", "--device", "cpu", "--preset", "gpt-oss-120b", "--json")
    found = json.loads(out)
    assert status == 0 and not err
    assert (found["family"], found["preset"], found["environment"]) == ("gqa", "gpt-oss-120b", {})
    monkeypatch.delenv("MLA_DECODE_BACKEND")
    config = GQA_PRESETS["gpt-oss-120b"]
    assert config.attention_sinks and config.sliding_window == 128
    lines = backends.explain(config, device="cpu", dtype=torch.float32).splitlines()
    assert {op: f"{name}, {found['chosen_by'][op]['in_words']}" for op, name in found["chosen"].items()} == {
        op: how.split(" (")[0] for op, how in (line.split(": ", 1) for line in lines)
    }
    assert set(backends.GQA_OPS) < set(found["chosen"]) and "mla_decode" not in found["chosen"]
    rows = {row["name"]: row["ops"] for row in found["backends"]}
    assert not any(rows["cpu"].values()) and set(rows["cpu"]) == set(found["chosen"])
    assert set(rows["torch"]) == set(backends.GQA_OPS) and not rows["hopper"]
    assert all(reasons == ["serves device cuda, got cpu"] for reasons in rows["torch"].values())

    # a backend without the features of the model, which the user names
    plain = Backend("plain", -1, "cpu", {"gqa_paged_attention": OpSupport(print, features=("window",))})
    with registered(plain):
        options = "--family", "gqa", "--device", "cpu", "--preset", "gpt-oss-120b", "--backend", "plain"
        found = json.loads(run(capsys, *options, "--json")[1])
        status, out, err = run(capsys, *options)
    assert found["chosen"]["gqa_paged_attention"] is None and found["chosen"]["reshape_and_cache"] == "cpu"
    [reasons] = [row["ops"]["gqa_paged_attention"] for row in found["backends"] if row["name"] == "plain"]
    assert len(reasons) == 1 and "sinks" in reasons[0]
    text = " ".join(out.replace("│", " ").split())
    assert status == 0 and not err
    assert "gpt-oss-120b on cpu, float32" in text and "gqa_paged_attention none can serve it bound to plain" in text
    assert "backends without an op of the family gqa: hopper, flash_attn_4" in text


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_every_preset(family, capsys):
    """Print the table of every model of a family -> a backend serves each of its ops; the default is one of them."""
    for preset in FAMILY_PRESETS[family]:
        found = json.loads(run(capsys, "--family", family, "--device", "cpu", "--preset", preset, "--json")[1])
        assert found["preset"] == preset and set(found["chosen"].values()) == {"cpu"}
    assert json.loads(run(capsys, "--family", family, "--json")[1])["preset"] in FAMILY_PRESETS[family]


def test_tables(capsys, monkeypatch):
    """Print tables with a backend whose package is missing -> its install hint, and what the environment binds."""
    monkeypatch.setenv("MLA_DECODE_BACKEND", "cpu")
    absent = Backend(
        "absent", 99, "cpu", {"mla_decode": OpSupport(print)}, missing_package="nosuch", library="No Such",
        install="pip install nosuch",
    )  # fmt: skip
    with registered(absent):
        status, out, err = run(capsys, "--device", "cpu")
    text = " ".join(out.replace("│", " ").split())
    assert status == 0 and not err
    assert "deepseek-v3 on cpu, float32" in text and "backends without an op of the family mla: torch " in text
    assert "No Such 0 of 1 ops" in text and "needs the package nosuch" in text and "pip install nosuch" in text
    assert "mla_decode cpu bound by MLA_DECODE_BACKEND" in text and text.count("bound by") == 3


def test_missing_artifacts(capsys):
    """Register a backend whose library lacks a file -> the reason of its function, which is called once."""
    asked = []
    lacking = Backend(
        "lacking", 99, "cpu", {"mla_decode": OpSupport(print)}, library="L",
        missing_artifacts=lambda: asked.append(1) or ["needs the file kernels.so"],
    )  # fmt: skip
    with registered(lacking):
        assert not lacking.is_available()
        request = backends.KernelRequest("mla_decode", torch.device("cpu"), torch.float32)
        assert backends.select(request).name == "cpu"
        assert lacking.validate_configuration(request) == ["lacking: needs the file kernels.so"]
        status, out, _ = run(capsys, "--device", "cpu", "--json")
    row = next(row for row in json.loads(out)["backends"] if row["name"] == "lacking")
    assert status == 0 and row["missing"] == ["needs the file kernels.so"] and asked == [1]


def test_counts_and_reasons(capsys, monkeypatch):
    """Print backends with two entries for one op -> the op counts once; reasons stand beside what is missing."""
    monkeypatch.setenv("COLUMNS", "400")
    decode = replace(CPU.ops["mla_decode"], only_named=True)
    prefill = OpSupport(print, dtypes=(torch.bfloat16,), lse=False)
    lacking = Backend(
        "lacking", 5, "cpu", {"flash_attn_varlen": prefill}, library="Lib", missing_artifacts=lambda: ["z"]
    )
    mixed = Backend("mixed", -5, "cpu", {"flash_attn_varlen": CPU.ops["flash_attn_varlen"], "mla_decode": decode})
    hidden = Backend("hidden", -5, "cpu", {"mla_decode": decode})
    with registered(lacking), registered(mixed), registered(hidden):
        assert run(capsys, "--device", "cpu", "--json")[1].count('"ops_only_named"') == len(backends.registered())
        out = run(capsys, "--device", "cpu")[1]
    text = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    ops = len(CPU.ops.keys() - set(backends.GQA_OPS))
    assert f"cpu mla-twins {ops} of {ops} ops" in text
    assert "torch_flash PyTorch 1 of 1 ops, if named returns no LSE" in text
    reasons = "serves torch.bfloat16, got torch.float32; returns no LSE; writes torch.bfloat16, got torch.float32"
    assert f"lacking Lib 0 of 1 ops z; {reasons}" in text
    assert "mixed mla-twins 2 of 2 ops, 1 of them if named" in text
    assert "hidden mla-twins 1 of 1 ops, if named" in text


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["tables", "JSON"])
def test_a_reader_that_ends_early(options):
    """Close the pipe before the command writes -> status 1, and no traceback."""
    command = [sys.executable, "-m", "fast", "backends", "--device", "cpu", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.wait(120), process.stderr.read()) == (1, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "tritn"], "backend: expected one of"),
        (["--block-size", "0"], "--block-size: expected at least 1, got 0"),
        (["--device", "cuda:9"], "--device: expected cpu or one of the 0 CUDA devices that torch sees, got cuda:9"),
        (["--device", "meta"], "torch sees, got meta"),
        (["--device", "nosuch"], "--device: expected cpu, cuda or cuda:N, got 'nosuch'"),
        (["--backend", "torch"], "--backend: expected a backend that declares an op of --family mla, got torch"),
        (["--preset", "llama-3-8b"], "longcat-flash for --family mla, got llama-3-8b"),
        (["--family", "gqa", "--preset", "deepseek-v3"], "--preset: expected one of llama-3-8b, "),
        (["--family", "gqa", "--block-size", "8"], "--block-size: expected a positive multiple of 16, got 8"),
        (["--family", "gqa", "--cache-format", "fp8_ds_mla"],
         "--cache-format: expected compute_dtype or fp8_e4m3 for a key/value cache, got fp8_ds_mla"),
        (["--family", "gqa", "--backend", "hopper"],
         "--backend: expected a backend that declares an op of --family gqa, got hopper"),
    ],
)  # fmt: skip
def test_errors(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = run(capsys, *options)
    assert status == 2 and not out and err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hooks="nocolon"), 'hooks: expected None, a class or "package.module:Class", got nocolon'),
        (dict(hooks=7), 'hooks: expected None, a class or "package.module:Class", got 7'),
        (
            dict(missing_artifacts="lib"),
            'missing_artifacts: expected None, a function or "package.module:function", got',
        ),
        (dict(only_named=1), "only_named: expected True or False, got int"),
        (dict(install=3), "install: expected a str or None, got int"),
    ],
)
def test_malformed_backends(changes, message, plain_errors):
    with pytest.raises((TypeError, ValueError)) as error:
        Backend("odd", 1, "cpu", {}, **changes)
    assert str(error.value).startswith(message)


def test_families(monkeypatch):
    """Declare a priority for one family of GPUs -> it counts on this family alone."""
    monkeypatch.setattr(backends.Backend, "validate_configuration", lambda self, request: [])
    usual = {"mla_decode": OpSupport(print, family_priorities={"10.x": 99})}
    with registered(Backend("newer", 1, "cuda", usual)):
        request = backends.KernelRequest("mla_decode", torch.device("cuda"), torch.bfloat16)
        for capability, wanted in (((9, 0), "hopper"), ((10, 0), "newer"), ((10, 3), "newer"), ((12, 0), "hopper")):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
            assert backends.select(request).name == wanted
    with pytest.raises(ValueError, match=r'^family_priorities: expected families such as "9.x", got 10$'):
        OpSupport(print, family_priorities={"10": 1})

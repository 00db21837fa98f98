"""Tests of backends whose look-ups fail: other calls are served, and a refusal by name has every reason."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fast
from fast import backends
from fast.backends import Backend, OpSupport
from fast.backends.adapters import flashinfer, flashinfer_cudnn, flashinfer_mla, sources
from fast.backends.adapters.flash_attn import FLASH_ATTN_3
from fast.backends.adapters.flashinfer import FLASHINFER
from fast.backends.adapters.flashinfer_mla import FLASHINFER_MLA
from fast.backends.adapters.torch_sdpa import TORCH_CUDNN
from reference.interfaces import CAUSAL_OVER_RANKS, UnsupportedConfiguration

from ..support.backends import registered
from ..support.factories import DIRECT

OP = "flash_attn_varlen"


def attend(**options):
    q, starts = torch.randn(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    return fast.flash_attn_varlen(q, q, q, starts, starts, 3, 3, 1.0, True, **options)


def fail(error):
    """Return a function that raises `error`."""

    def look(*arguments):
        raise error

    return look


@pytest.mark.parametrize(
    "look, reason",
    [
        (fail(OSError("libx.so\nis missing")), "OSError: libx.so is missing"),
        (fail(AssertionError()), "AssertionError"),
        (fail(SystemExit(3)), "SystemExit: 3"),
        ("nosuch.module:look", "ModuleNotFoundError: No module named 'nosuch'"),
        (lambda: "a text", "TypeError: the result of missing_artifacts: expected a list of reasons, got str"),
        (lambda: [3], "TypeError: the result of missing_artifacts: expected a list of reasons, got int"),
    ],
    ids=["OSError", "without a text", "SystemExit", "no such path", "a text", "a number"],
)
@pytest.mark.parametrize("priority", [50, -50])
def test_a_lookup_that_fails(priority, look, reason, plain_errors):
    """Look for artifacts with a function that fails -> one reason in one line; calls without the name are served."""
    odd = Backend("odd", priority, "cpu", {OP: OpSupport(print)}, missing_artifacts=look)
    reason = f"cannot look for its artifacts: {reason}"
    with registered(odd):
        attend()
        assert odd.missing() == (reason,) and not odd.is_available()
        [line] = [each for each in backends.explain(DIRECT, device="cpu", dtype=torch.float32).splitlines()
                  if each.startswith(OP)]  # fmt: skip
        assert f"odd: {reason}" in line
        with pytest.raises(UnsupportedConfiguration) as error:
            attend(backend="odd")
        assert error.value.reasons == (f"odd: {reason}",)


def test_a_broken_flashinfer(tmp_path):
    """Install a FlashInfer whose import raises an AttributeError -> the table has the reason, and prefills are served.

    Automatic prefills on a GPU of compute capability 9.0 ask FlashInfer first.
    """
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\ntorch.nosuch_attribute\n")
    program = (
        "import sys, torch\nfrom fast import backends\nfrom fast.__main__ import main\n"
        "main(['backends', '--device', 'cpu', '--json'])\n"
        "torch.cuda.get_device_capability = lambda *_: (9, 0)\n"
        "dims = ('qk_head_dim', 256), ('v_head_dim', 256)\n"
        "request = backends.KernelRequest('flash_attn_varlen', torch.device('cuda'), torch.bfloat16, dims)\n"
        "print('chosen', backends.select(request).name)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cannot import flashinfer: AttributeError: module 'torch' has no attribute 'nosuch_attribute'" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("chosen ")


@pytest.mark.parametrize("declared", [FLASHINFER, FLASHINFER_MLA], ids=lambda each: each.name)
def test_a_kernel_that_cannot_be_looked_for(declared, monkeypatch):
    """Let FlashInfer raise an unusual error while it describes a kernel -> one reason in one line."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for adapter in (flashinfer, flashinfer_mla):
        monkeypatch.setattr(adapter, "_module", fail(KeyError("no\nsuch kernel")))
    available = replace(declared, missing_package=None, missing_artifacts=None)
    op, dims = next(iter(declared.ops)), (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))
    if declared is FLASHINFER:
        op, dims = OP, (("qk_head_dim", 256), ("v_head_dim", 256))
    request = backends.KernelRequest(op, torch.device("cuda"), torch.bfloat16, dims)
    [found] = available.validate_configuration(request)
    assert found.startswith(f"{declared.name}: cannot look for its compiled kernel: KeyError: ") and "\n" not in found


def test_a_cudnn_that_exits(monkeypatch):
    monkeypatch.setattr(flashinfer_cudnn, "missing_library", lambda: [])
    monkeypatch.setitem(sys.modules, "cudnn", type("Cudnn", (), {"backend_version": fail(SystemExit(3))}))
    entry = type("Entry", (), {"cudnn_batch_prefill_with_kv_cache": print})
    monkeypatch.setitem(sys.modules, "flashinfer", type("FlashInfer", (), {"cudnn": entry}))
    monkeypatch.setitem(sys.modules, "flashinfer.cudnn", entry)
    assert flashinfer_cudnn.missing_parts() == ["cannot load cuDNN: SystemExit: 3"]


def test_a_module_without_its_function(tmp_path, monkeypatch):
    """Install a module that lacks the library's function, and one that exits -> both reasons, each in one line."""
    (tmp_path / "empty_attention.py").write_text("")
    (tmp_path / "exiting_attention.py").write_text("raise SystemExit('no\\nGPU')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tried = tuple(sources.Source(each, f"{each}_attention", parameters=("q",)) for each in ("empty", "exiting"))
    empty, exiting = sources.missing_artifacts(tried)
    assert empty.startswith("the module empty_attention cannot be imported: AttributeError: ")
    assert exiting == "the module exiting_attention cannot be imported: SystemExit: no GPU"


# Refusals by name


def test_a_refusal_by_name_has_the_artifacts():
    """Name a backend that lacks artifacts and cannot serve the call -> both reasons; without a name it is not asked."""
    asked = []
    lacking = Backend(
        "lacking", 50, "cpu", {OP: OpSupport(print, dtypes=(torch.float16,))},
        missing_artifacts=lambda: asked.append(1) or ["needs the file kernels.so"],
    )  # fmt: skip
    with registered(lacking):
        attend()
        assert not asked
        with pytest.raises(UnsupportedConfiguration) as error:
            attend(backend="lacking")
        wanted = ("lacking: needs the file kernels.so", "lacking: serves torch.float16, got torch.float32",
                  "lacking: writes torch.float16, got torch.float32")  # fmt: skip
        assert error.value.reasons == wanted
        lines = backends.explain(DIRECT, device="cpu", dtype=torch.float32, backend="lacking").splitlines()
        assert [each for each in lines if each.startswith(OP) and all(reason in each for reason in wanted[:2])]


def test_cudnn_by_name(monkeypatch):
    """Name "torch_cudnn" for a call in float32 on a CPU without cuDNN -> the missing cuDNN is one of the reasons."""
    monkeypatch.setattr(sys.modules["fast.backends.registry"], "_ARTIFACTS", {})
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    with pytest.raises(UnsupportedConfiguration) as error:
        attend(backend="torch_cudnn")
    [absent] = TORCH_CUDNN.missing()
    assert error.value.reasons[0] == f"torch_cudnn: {absent}" and "without cuDNN" in absent
    assert any("got torch.float32" in each for each in error.value.reasons)


@pytest.mark.parametrize(
    "declared, op, dims, wanted",
    [
        (FLASHINFER, OP, (("qk_head_dim", 192), ("v_head_dim", 128)), "has no compiled kernel"),
        (FLASHINFER_MLA, "mla_decode", (("kv_lora_rank", 512), ("qk_rope_head_dim", 64)), "has no compiled kernel"),
        (FLASH_ATTN_3, "mla_decode", (("kv_lora_rank", 512), ("qk_rope_head_dim", 64)), "no copy of vLLM"),
    ],
    ids=lambda value: value.name if isinstance(value, Backend) else "",
)
def test_parts_of_a_library_by_name(declared, op, dims, wanted, monkeypatch):
    """Name a library without the part for a call that it also refuses for the mask or the LSE -> both reasons."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(flashinfer, "is_compiled", lambda *key: False)
    monkeypatch.setattr(flashinfer_mla, "is_compiled", lambda *key: False)
    monkeypatch.setattr(sys.modules[type(FLASH_ATTN_3).__module__], "missing_artifacts", lambda _: ["no copy of vLLM"])
    available = replace(declared, name="other", missing_package=None, missing_artifacts=None)
    request = backends.KernelRequest(
        op, torch.device("cuda"), torch.bfloat16, dims, batch_invariant=declared is not FLASHINFER,
        mask="visible_lens" if declared is FLASHINFER else CAUSAL_OVER_RANKS,
    )  # fmt: skip
    with registered(available), pytest.raises(UnsupportedConfiguration) as error:
        backends.select(request, "other")
    assert error.value.reasons[0].startswith(f"other: {wanted}") and len(error.value.reasons) > 1, error.value.reasons

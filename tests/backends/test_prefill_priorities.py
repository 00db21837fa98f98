"""Tests of the automatic choice for prefills on a GPU of compute capability 9.0, if all libraries are installed.

The choice reads only the compute capability of the GPU, so the tests need no GPU and no library.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import fast
from fast import backends
from fast.backends import Backend, KernelRequest, OpSupport
from fast.backends.adapters.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3
from fast.backends.adapters.flashinfer import FLASHINFER
from fast.backends.own import CPU, HOPPER, TORCH, TRITON
from fast.mla.prefill_choice import choose_prefill_backend
from reference.interfaces import QueryLenSupport, UnsupportedConfiguration

from ..support.backends import registered, with_backends
from ..support.factories import DIRECT, make_batch

OP = "flash_attn_varlen"
WIDTHS = ((192, 128), (64, 64), (256, 256))


def installed(backend: Backend) -> Backend:
    """Return a declaration with the same ops and priorities that lacks nothing on this machine."""
    values = {each.name: getattr(backend, each.name) for each in fields(Backend)}
    return Backend(**{**values, "missing_package": None, "missing_artifacts": None})


@pytest.fixture
def all_installed(monkeypatch):
    """Report compute capability 9.0, and register the backends of prefills as if all libraries were installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with_backends(monkeypatch, *map(installed, (CPU, TRITON, HOPPER, FLASH_ATTN_2, FLASH_ATTN_3, FLASHINFER)))


def request(widths=(192, 128), **options) -> KernelRequest:
    """Return a call of `flash_attn_varlen` without sizes, in bfloat16."""
    defaults = dict(query_lens=QueryLenSupport.VARLEN, out_dtype=torch.bfloat16, mask="causal", lse=True)
    names = ("qk_head_dim", "v_head_dim")
    dtype = options.pop("dtype", torch.bfloat16)
    return KernelRequest(OP, torch.device("cuda"), dtype, tuple(zip(names, widths, strict=True)),
                         **{**defaults, **options})  # fmt: skip


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("invariant", [False, True])
def test_hopper_leads_where_sizes_do_not_decide(widths, mask, invariant, all_installed):
    """Choose without sizes, as torch.compile and batch-invariant builders do -> "hopper", planned or not."""
    for direct in (False, True):
        asked = request(widths, mask=mask, batch_invariant=invariant, direct=direct)
        assert backends.select(asked).name == "hopper"


def test_the_order_of_priorities(all_installed):
    """On capability 9.0: hopper, the libraries that were measured, portable Triton, and the other libraries."""
    found = [each.name for each in backends.registry.by_priority(OP, torch.device("cuda"))]
    assert [name for name in found if name != "cpu"] == ["hopper", "flash_attn_3", "flashinfer", "triton",
                                                          "flash_attn_2"]  # fmt: skip


def test_batch_invariant_choices_take_no_backend_that_mixes_nan(all_installed):
    """Ask for widths that "hopper" does not serve -> flash-attn 3; portable Triton for a batch-invariant call."""
    wide = request((80, 80))
    assert backends.select(wide).name == "flash_attn_3"
    invariant = replace(wide, batch_invariant=True)
    assert backends.select(invariant).name == "triton"
    assert backends.select(invariant, "flash_attn_3").name == "flash_attn_3"


def test_the_error_names_what_may_be_named(all_installed, monkeypatch):
    """Leave only backends that mix NaN -> the error of a batch-invariant call says that they must be named."""
    with_backends(monkeypatch, installed(FLASH_ATTN_3), installed(FLASHINFER))
    with pytest.raises(UnsupportedConfiguration) as error:
        backends.select(request(batch_invariant=True))
    why = "a NaN of one request may reach another request, which a batch-invariant call excludes; name it to use it"
    assert list(error.value.reasons) == [f"flash_attn_3: {why}", f"flashinfer: {why}"]


def test_the_page_has_the_priorities_and_the_limits():
    """Read the page Backends -> the declared priorities, and batch invariance as a limit where an op lacks it."""
    page = (Path(fast.__file__).parents[1] / "docs" / "use" / "backends.md").read_text()
    listed = re.search(r"priorities for the attention of prefills are: (.*?)\.", page, re.DOTALL).group(1)
    found = {name: int(value) for name, value in re.findall(r"`(\w+)` (\d+)", listed)}
    assert found == {each.name: each.priority_of(OP, "9.x") for each in (HOPPER, FLASH_ATTN_3, FLASHINFER, TRITON)}
    for backend in (HOPPER, TRITON, TORCH, CPU):
        row = re.search(rf"^\| `{backend.name}` \| {backend.priority} \|.*$", page, re.MULTILINE).group()
        limited = not all(support.batch_invariant for support in backend.ops.values())
        assert limited == ("batch-invariant" in row), backend.name


@pytest.mark.parametrize("invariant, wanted", [(False, "mixing"), (True, "cpu")])
def test_a_builder_and_a_direct_call(invariant, wanted, plain_errors):
    """Give a backend that mixes NaN the highest priority -> batch-invariant steps and calls take another backend."""
    called = []

    def attend(*arguments, **options):
        called.append("mixing")
        return fast.kernels.cpu.flash_attn_varlen(*arguments, **options)

    support = OpSupport(attend, dtypes=CPU.ops[OP].dtypes, mixes_nan=True)
    with registered(Backend("mixing", 40, "cpu", {OP: support}, library="Library")):
        builder = fast.MLAMetadataBuilder(DIRECT, 16, 128, 2, batch_invariant=invariant, dtype=torch.float32)
        plan = builder.build(0, make_batch([12], [12]).common).prefill
        assert plan.backend == wanted
        assert choose_prefill_backend(plan, DIRECT, torch.float32, None, invariant) == wanted
        q, starts = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
        fast.flash_attn_varlen(q, q, q, starts, starts, 4, 4, 0.5, True, batch_invariant=invariant)
        assert bool(called) == (wanted == "mixing")

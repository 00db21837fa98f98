"""Tests of what an adapter does besides the call of its library, with the reference in place of the library.

`VarlenCall` and `StateConversion` serve all calls with one signature.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from fast.backends.adapters import conversion
from fast.backends.adapters.conversion import Convention
from fast.backends.adapters.varlen_calls import VarlenCall

from ...support.factories import offsets

LENS, SCALE, NATURAL = (4, 1, 7), 0.3, Convention()


class Ops(TorchDispatchMode):
    """Record the names of PyTorch's operations, except those of the library; `aten::empty` launches nothing."""

    def __init__(self):
        super().__init__()
        self.names, self.in_library = [], False

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if not self.in_library and name not in ("empty", "new_empty", "detach"):
            self.names.append(name)
        return function(*arguments, **(options or {}))


class LibraryCall(VarlenCall):
    """A library that computes with the reference, and that pads values and writes into `out` if asked to."""

    def __init__(self, ops, pads, takes_out, convention, *arguments):
        self.ops, self.pads, self.takes_out, self.convention = ops, pads, takes_out, convention
        super().__init__(*arguments)

    def columns_of_values(self, dim, value):
        return dim if self.pads else value

    def prepare(self, dtype, longest_q, longest_k, scale, causal):
        self.rest = longest_q, longest_k, scale, causal
        return self.takes_out

    def attend(self, q, k, v, starts_q, starts_k, out):
        self.ops.in_library = True
        made, lse = reference.flash_attn_varlen(q, k, v, starts_q, starts_k, *self.rest)
        self.made = made if out is None else out.copy_(made)
        self.ops.in_library = False
        return self.made, lse


def run(pads=False, takes_out=False, convention=NATURAL, out_dtype=torch.bfloat16, out=True, lse=False, later=None):
    """Return the output of a later call, the operations of the adapter in this call, and the object that serves it.

    `later` says whether the later call gets an `out`; None means the same as in the first call.
    """
    tokens, starts = sum(LENS), offsets(LENS)
    q, k, v = (torch.randn(tokens, 2, width).bfloat16() for width in (24, 24, 16))
    arguments = q, k, None, v, starts, starts, max(LENS), max(LENS), SCALE, True, out_dtype
    written = torch.empty(tokens, 2, 16, dtype=out_dtype) if out else None, torch.empty(2, tokens) if lse else None
    ops = Ops()
    call = LibraryCall(ops, pads, takes_out, convention, *arguments, *written)
    call(*arguments, *written)
    if later is False:
        written = None, None
    with ops:
        found = call(*arguments, *written)
    wanted = reference.flash_attn_varlen(q, k, v, starts, starts, max(LENS), max(LENS), SCALE, True)
    assert torch.equal(found[0].bfloat16(), wanted.out) and found[0].is_contiguous()
    assert found[0].dtype == out_dtype and (written[0] is None or found[0] is written[0])
    if not out or lse:
        assert torch.equal(found[1], wanted.lse)
    else:
        assert found[1] is None
    return found[0], ops.names, call


@pytest.mark.parametrize(
    "given",
    [
        dict(takes_out=True),  # the library writes into `out`
        dict(takes_out=True, later=False),  # the library allocates the output
        dict(later=False),
        dict(later=False, convention=Convention(poison=True)),  # an LSE that nobody wants is not converted
        dict(out=False),  # the library's state is the result
    ],
    ids=str,
)
def test_nothing_besides_the_library(given):
    """Attend with values that are not padded, in the dtype of the library -> no operation besides the library's."""
    found, names, call = run(**given)
    assert names == []
    if given.get("later") is False or not given.get("out", True):
        assert found is call.made


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (dict(), ["copy_"]),  # the library allocates the output, but the caller has one
        (dict(takes_out=True, out_dtype=torch.float32), ["copy_"]),
        (dict(pads=True, takes_out=True), ["constant_pad_nd", "slice", "copy_"]),
        (dict(pads=True, later=False), ["constant_pad_nd", "slice", "copy_"]),
    ],
    ids=str,
)
def test_operations_that_are_needed(given, wanted):
    """Pad the values, or convert or copy the output -> these operations and no others."""
    assert run(**given)[1] == wanted


class KernelStandIn:
    """Stand-in for `convert_state` of Triton, with formulas in PyTorch; it counts first and repeated launches."""

    def __init__(self):
        self.first, self.repeated, self.repeats = 0, 0, True

    def __call__(self, made, made_lse, out, lse, *flags_and_lens):
        *flags, visible_lens = flags_and_lens
        self.first += 1

        def convert(made, made_lse, target, lse, seen):
            target = None if out is None else target
            seen = None if visible_lens is None else seen
            conversion._lawful_state(made, made_lse, Convention(*flags), target, lse, seen, made)

        convert(made, made_lse, out, lse, visible_lens)

        def again(tensors):
            if self.repeats:
                self.repeated += 1
                convert(*tensors)
            return self.repeats

        return SimpleNamespace(again=again)


@pytest.mark.parametrize("given", ["nothing", "output", "both"])
@pytest.mark.parametrize(
    ("convention", "out_dtype", "columns"),
    [
        (Convention(base_2=True), torch.float32, 16),
        (Convention(empty_is_inf=True), torch.bfloat16, 12),
        (Convention(poison=True), torch.bfloat16, 16),  # the output needs no conversion
    ],
)
@pytest.mark.parametrize("with_lens", [False, True])
def test_kept_conversions(given, convention, out_dtype, columns, with_lens, monkeypatch):
    """Convert with a kept launch, in another layout, and where the launch cannot be repeated -> the right state."""
    kernel = KernelStandIn()
    monkeypatch.setattr(conversion, "_own_launcher", lambda name, tensor: kernel)
    keep = conversion.StateConversion(convention, out_dtype, columns)
    lens = torch.tensor([1, 0, 2, 3, 1], dtype=torch.int32) if with_lens else None

    def convert(order=(0, 1)):
        """Convert new values; the LSE of the library is [N, T] with strides in this order."""
        made = torch.randn(5, 3, 16).bfloat16()
        made_lse = torch.randn(*[(3, 5)[each] for each in order]).permute(order)
        made_lse[1, 2], made[2, 1] = torch.inf, 0
        made[4, 0, 0] = torch.nan
        out = None if given == "nothing" else torch.zeros(5, 3, columns, dtype=out_dtype)
        lse = torch.zeros(3, 5) if given == "both" else None
        found = keep(made, made_lse, out, lse, lens)
        with monkeypatch.context() as without_kernel:
            without_kernel.setattr(conversion, "_own_launcher", lambda name, tensor: None)
            wanted = conversion.lawful_state(made, made_lse, convention, out_dtype, columns, visible_lens=lens)
        assert (out is None or found[0] is out) and (lse is None or found[1] is lse)
        for mine, right in zip(found, wanted, strict=True):
            assert mine.is_contiguous() and torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))

    convert(), convert(), convert()
    assert (kernel.first, kernel.repeated) == (1, 2)
    convert(order=(1, 0))  # the library returns another layout
    convert(order=(1, 0))
    assert (kernel.first, kernel.repeated) == (2, 3)
    kernel.repeats = False  # as on another device than the current one
    convert(order=(1, 0))
    assert (kernel.first, kernel.repeated) == (3, 3)

"""Tests of the run-time checks of annotations, which every test has, and of what an import of the packages loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fast
import reference
from reference.interfaces.checks import check_int
from reference.interfaces.support import constant_when_traced

beartype = pytest.importorskip("beartype")
from ..support.runtime_types import has_shapes, kind_of, once_for_each_kind  # noqa: E402  needs beartype

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", [reference, fast], ids=["reference", "fast"])
def test_shapes_are_checked(package):
    """Pass up-projections of another number of heads -> an error of the run-time checks."""
    with pytest.raises(Exception, match="(?i)type-?check"):
        package.query_to_latent(torch.randn(5, 3, 8), torch.randn(4, 8, 16))


def test_types_without_shapes_are_checked():
    """Pass a number in the place of a name to a function without tensors -> an error of the run-time checks."""
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        check_int(5, 5)


def test_the_checks_can_be_switched_off(plain_errors):
    with pytest.raises(ValueError, match="^5: expected "):
        check_int(5, 0)


def test_shapes_are_checked_after_good_calls():
    """Pass good shapes twice, then wrong shapes -> an error of the run-time checks."""
    for _ in range(2):
        reference.query_to_latent(torch.randn(5, 4, 8), torch.randn(4, 8, 16))
    with pytest.raises(Exception, match="(?i)type-?check"):
        reference.query_to_latent(torch.randn(5, 3, 8), torch.randn(4, 8, 16))


def test_once_for_each_kind():
    """Call with equal and with other kinds of arguments -> the check runs in the first call of each kind."""
    checked = []

    def plain(*arguments, **options):
        return "result"

    function = once_for_each_kind(plain, lambda *arguments, **options: checked.append(arguments) or "result")
    x = torch.zeros(2, 3)
    kinds = [(x,), (x.double(),), (x[:1],), (x, 1), (x, 2), (x, True), ([x],), ((x,),), (x, x), ({"a": x},)]
    for _ in range(2):
        assert [function(*each) for each in kinds] == ["result"] * len(kinds)
    assert len(checked) == len(kinds)
    function(torch.ones(2, 3))  # other values of the same kind
    assert len(checked) == len(kinds)
    function(x, option=1)
    assert len(checked) == len(kinds) + 1
    state, out = reference.interfaces.AttentionState, torch.zeros(2, 3, 4)
    assert kind_of(state(out, x.T)) == kind_of(state(out + 1, x.T)) != kind_of(state(out[:1], x.T[:, :1]))
    assert kind_of(state) == kind_of(state) != kind_of(reference.interfaces.MLAConfig)


def test_annotations_with_shapes():
    def shaped(x: torch.Tensor, y: Float[torch.Tensor, T]) -> int: ...  # noqa: F821

    def plain(x: torch.Tensor, floats: dict[str, int]) -> Floats: ...  # noqa: F821

    assert has_shapes(shaped) and not has_shapes(plain)
    assert has_shapes(reference.mla_decode) and not has_shapes(check_int)


def test_marks_for_tracing():
    """Mark a function -> it has the mark that PyTorch's own decorator sets."""

    def one(): ...

    def other(): ...

    assert constant_when_traced(one) is one
    assert vars(one) == vars(torch.compiler.assume_constant_result(other)) != {}


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_an_import_does_not_load_the_compiler(package):
    names = ("torch._dynamo", "triton", "transformers")
    code = f"import sys, {package}; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr

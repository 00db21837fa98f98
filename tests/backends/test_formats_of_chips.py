"""Tests of fp8 formats and modes that the kernels of a GPU cannot serve. The tests need no GPU."""

from __future__ import annotations

import pytest
import torch

from fast import backends
from reference.interfaces import CACHE_FORMATS, FP8_MODES, QueryLenSupport

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
    """From Ampere on, the backend `triton` serves both formats in every mode, also on Hopper."""
    capability(*chip)
    for mode in FP8_MODES:
        assert backends.select(decode(name, mode)).name == "triton"


@pytest.mark.parametrize("name", FORMATS)
def test_chips_without_the_formats(name, capability):  # noqa: F811
    """A GPU before Ampere is refused by name, with the capability that the backend needs."""
    capability(7, 5)
    reason = "triton: needs a compute capability of at least (8, 0), got (7, 5)"
    assert refusal(lambda: backends.select(decode(name), "triton")) == [reason]
    assert reason in refusal(lambda: backends.select(decode(name)))


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_is_refused_by_name(name, capability):  # noqa: F811
    """Name `hopper` for a decode over an fp8 format or in an fp8 mode -> every reason; no other backend replaces it."""
    capability(9, 0)
    for mode in FP8_MODES:
        reasons = refusal(lambda mode=mode: backends.select(decode(name, mode), "hopper"))
        assert all(reason.startswith("hopper: ") for reason in reasons)
        assert any(name in reason for reason in reasons), reasons
        assert any(mode in reason for reason in reasons) == (mode != "converted"), reasons

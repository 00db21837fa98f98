"""Fixtures for tests that change how a launcher chooses its sizes: no call may use what an earlier call kept."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from fast.backends import checked_calls

KEPT = {"fast.kernels.hopper.mla_decode.launch": "_launch_sizes", "fast.kernels.triton.attention": "_launch_of"}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Dispatch every call, let Triton find each compiled kernel, and compute the sizes of each launch."""
    monkeypatch.setattr(checked_calls, "must_be_dispatched", lambda: True)
    if importlib.util.find_spec("triton") is not None:
        for module in KEPT.keys() & sys.modules.keys():
            function = getattr(sys.modules[module], KEPT[module])
            monkeypatch.setattr(sys.modules[module], KEPT[module], function.__wrapped__)

"""A fixture for tests that change how a launcher chooses launch sizes, such as the number of splits.

In such a test, a call must not reuse the launch sizes of earlier calls.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

from fast.backends import checked_calls

LAUNCHERS = {"fast.kernels.hopper.mla_decode.launch", "fast.kernels.triton.attention"}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Make every call check its arguments, search its compiled kernel and choose its launch sizes anew."""
    monkeypatch.setattr(checked_calls, "must_be_dispatched", lambda: True)
    if importlib.util.find_spec("triton") is not None:
        for name in LAUNCHERS & sys.modules.keys():
            launcher = sys.modules[name]
            monkeypatch.setattr(launcher, "_launch_sizes", launcher._launch_sizes.__wrapped__)

"""A fixture for tests that change how a launcher chooses launch sizes, such as the number of splits.

In such a test, a call must not reuse the launch sizes of earlier calls.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

from fast.backends import checked_calls

LAUNCHERS = {  # module: its function that chooses launch sizes
    "fast.kernels.hopper.mla_decode.launch": "_launch_sizes", "fast.kernels.hopper.varlen.launch": "_launch_sizes",
    "fast.kernels.triton.attention": "launch_sizes",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Make every call check its arguments, search its compiled kernel and choose its launch sizes anew."""
    monkeypatch.setattr(checked_calls, "must_be_checked", lambda: True)
    if importlib.util.find_spec("triton") is not None:
        for name in LAUNCHERS.keys() & sys.modules.keys():
            launcher = sys.modules[name]
            monkeypatch.setattr(launcher, LAUNCHERS[name], getattr(launcher, LAUNCHERS[name]).__wrapped__)

"""The commits that changed results on purpose since the modules were moved into folders, for `tests.recorded_bits`."""

from __future__ import annotations

import re
from typing import NamedTuple

BEFORE = "a9e0d0c3"  # last commit that changed sources before the modules were moved into folders (2026-11-23)


class Change(NamedTuple):
    """One intended change of results.

    Attributes:
        cases: regular expression; the change holds for the cases whose names contain a match.
        devices: devices on which the commit changed results.
        commit: commit that changed the results.
        reason: what the commit changed.
    """

    cases: str
    devices: tuple[str, ...]
    commit: str
    reason: str

    def holds(self, name: str, device: str) -> bool:
        """Return whether this change is the reason if the digest of a case differs."""
        return device in self.devices and re.search(self.cases, name) is not None


CHANGES = (
    Change(
        r"^(fast|reference)\.plan_decode .* False$|^mla_decode \d+ \S+ \(\d+, \d+\) False \w+ True \|",
        ("cpu", "cuda"),
        "7dec2af1, 275713e2",
        "schedules of `plan_decode` assign whole parts of requests, and count the time of the combine kernel",
    ),
    Change(
        r"^fast layer |^\d ranks$",
        ("cpu",),
        "565280d8, 7981e201",
        "a layer merges a chunk only for the requests of its run, and a merge computes each row in the same way",
    ),
    Change(
        r"^call merge_attn_states ",
        ("cpu",),
        "7981e201",
        "a merge on a CPU computes exp and log of each row in the same way, whatever other rows there are",
    ),
)

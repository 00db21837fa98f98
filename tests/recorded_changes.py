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
    Change(
        r"^call mla_decode \w+ \S+ \(\d+, \d+\) \d+ scheduled \|",
        ("cuda",),
        "0b524c77, 9a58a800",
        "after a decode with a schedule, the combine kernel has other tiles, and adds partial outputs in another order",
    ),
    Change(
        r"^call rope_norm_and_cache torch\.float32 \|",
        ("cuda",),
        "a8f731e9",
        "the fused write has one warp in place of four, so it adds the squares of a latent in another order",
    ),
    Change(
        r"^fast layer \d+ heads$",
        ("cuda",),
        "841a7d00, 565280d8, 7981e201",
        "prefills of these sizes run in the Hopper kernel, and a layer merges a chunk only for the requests of its run",
    ),
)

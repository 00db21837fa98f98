"""Helpers for the tests of the planners: strategies for random batches, and a comparison of plans bit by bit."""

from __future__ import annotations

import dataclasses

from torch import Tensor

import fast
import reference
from reference.interfaces import ContextWorkspace

from .properties import st

PACKAGES = st.sampled_from(["reference", "fast"]).map({"reference": reference, "fast": fast}.get)
QUERY_LENS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 17]), max_size=7)


@st.composite
def batches(draw):
    """Draw query and sequence lengths; padding requests, empty queries and lengths of 16 and 17 tokens are frequent."""
    query_lens = draw(QUERY_LENS)
    seq_lens = [
        draw(st.one_of(st.just(0), st.integers(q, q + 40), st.just(max(q, 16)), st.just(max(q, 17))))
        for q in query_lens
    ]
    return query_lens, seq_lens


def same(ours, theirs, name="metadata"):
    """Assert that two plans are equal, field by field; tensors must have equal dtypes, shapes and values."""
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.equal(theirs), name
    elif dataclasses.is_dataclass(ours):
        assert type(ours) is type(theirs), name
        for field in dataclasses.fields(ours):
            same(getattr(ours, field.name), getattr(theirs, field.name), f"{name}.{field.name}")
    elif isinstance(ours, tuple):
        assert len(ours) == len(theirs), name
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{name}[{index}]")
    elif isinstance(ours, ContextWorkspace):  # memory, which is no part of the numbers of a plan
        assert type(ours) is type(theirs), name
    else:
        assert ours == theirs and type(ours) is type(theirs), name

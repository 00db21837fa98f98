"""Helpers for tests of plans: a hypothesis strategy that draws batches, and functions that make and compare plans."""

from __future__ import annotations

import dataclasses

from torch import Tensor

import fast
import reference
from reference.interfaces import ContextWorkspace, PrefillMetadata

from .factories import Batch, integers
from .properties import st

PACKAGES = st.sampled_from(["reference", "fast"]).map({"reference": reference, "fast": fast}.get)
QUERY_LENS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 17]), max_size=7)


@st.composite
def batches(draw):
    """Draw query lengths and sequence lengths; query length 0, and sequence lengths 0, 16 and 17 are frequent."""
    query_lens = draw(QUERY_LENS)
    seq_lens = [
        draw(st.one_of(st.just(0), st.integers(q, q + 40), st.just(max(q, 16)), st.just(max(q, 17))))
        for q in query_lens
    ]
    return query_lens, seq_lens


def expanding_plan(ops, batch: Batch, workspace: int, parts: bool = False) -> PrefillMetadata:
    """Return a plan in which every request is a prefill, whatever its query length is.

    Args:
        ops: package that plans.
        batch: the requests.
        workspace: largest number of context tokens in a chunk.
        parts: True to fill `PrefillMetadata.parts`, which divides the requests into those without and with context.
    """
    common, contexts = batch.common, integers(*batch.context_lens).cpu()
    chunks = ops.plan_context_chunks(contexts, workspace, batch.block_size)
    chunks = ops.plan_chunk_runs(chunks, common.query_start_loc_cpu)
    longest, device = max(batch.query_lens, default=0), common.block_table.device
    plan = PrefillMetadata(common.block_table, common.query_start_loc_cpu, longest, chunks, batch.block_size)
    split = ops.mla.metadata._split_by_context(plan, contexts) if parts else ()
    return dataclasses.replace(
        plan, query_start_loc=common.query_start_loc, context_chunks=tuple(chunk.to(device) for chunk in chunks),
        parts=tuple(part.to(device) for part in split),
    )  # fmt: skip


def without_lens(common, slack=0, offsets_too=False, bounds=True):
    """Return the batch without lengths on the CPU, but with upper bounds of the lengths on the CPU.

    The upper bound of a request's length is its length + `slack`. The upper bound is 0 if this sum is below the number
    of query tokens, as for padding rows.

    Args:
        common: the batch.
        slack: upper bound - length, in tokens.
        offsets_too: True to remove the query offsets and the upper bounds from the CPU as well.
        bounds: False to remove the upper bounds from the CPU as well.
    """
    loose = common.seq_lens_cpu + slack
    bound = None if offsets_too or not bounds else loose.where(loose >= common.query_start_loc_cpu.diff(), 0)
    return dataclasses.replace(
        common, seq_lens_cpu=None, seq_lens_cpu_upper_bound=bound, max_seq_len=common.max_seq_len + slack,
        query_start_loc_cpu=None if offsets_too else common.query_start_loc_cpu,
    )  # fmt: skip


def same(ours, theirs, name="metadata"):
    """Assert that two plans are equal, field by field; tensors must have equal dtypes, shapes and values."""
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.equal(theirs), name
    elif dataclasses.is_dataclass(ours):
        assert type(ours) is type(theirs), name
        for field in dataclasses.fields(ours):
            if isinstance(ours, PrefillMetadata) and field.name == "backend":
                continue  # only the builders of `fast` name a backend
            same(getattr(ours, field.name), getattr(theirs, field.name), f"{name}.{field.name}")
    elif isinstance(ours, tuple):
        assert len(ours) == len(theirs), name
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{name}[{index}]")
    elif isinstance(ours, ContextWorkspace):  # contents of memory are not compared
        assert type(ours) is type(theirs), name
    else:
        assert ours == theirs and type(ours) is type(theirs), name

"""Capabilities of kernels and builders: the query lengths and the CUDA graphs that they support; marks for tracing."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

CAUSAL, CAUSAL_OVER_RANKS, VISIBLE_LENS = "causal", "causal_over_ranks", "visible_lens"
DECODE_MASKS = (CAUSAL, CAUSAL_OVER_RANKS, VISIBLE_LENS)  # values of `DecodeMetadata.mask`


class QueryLenSupport(enum.Enum):
    """Query lengths that a decode kernel supports.

    Attributes:
        SINGLE_ONLY: one token for every request.
        UNIFORM: one query length for all requests of a batch.
        VARLEN: any query lengths.
    """

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"

    def covers(self, needed: QueryLenSupport) -> bool:
        """Return whether a kernel with this support can serve batches that need the support `needed`."""
        return _WIDTH[self] >= _WIDTH[needed]


class GraphSupport(enum.Enum):
    """Batches for which one captured CUDA graph can be replayed.

    Attributes:
        NONE: no batch; there is no graph.
        ONE_QUERY_LEN: batches in which every request has the query length of the capture. Requests at the end of the
            batch may also have no query token.
        ANY: batches in which every request has at most the query length of the capture, or no query token.
    """

    NONE = "none"
    ONE_QUERY_LEN = "one"
    ANY = "any"

    def covers(self, needed: GraphSupport) -> bool:
        """Return whether this support includes the support `needed`."""
        return _WIDTH[self] >= _WIDTH[needed]


# position of each member in its enum; each member includes the members before it
_WIDTH = {member: width for kind in (QueryLenSupport, GraphSupport) for width, member in enumerate(kind)}


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream of a device; False for a CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def constant_when_traced(function: _Function) -> _Function:
    """Let `torch.compile` call a function while it traces, and take the result as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but imports the compiler for this, which takes more than
    a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

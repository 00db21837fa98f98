"""What kernels and builders can declare: query lengths that they take, CUDA graphs that they serve."""

from __future__ import annotations

import enum


class QueryLenSupport(enum.Enum):
    """Query lengths that a decode kernel takes: one token, one length for the whole batch, or any lengths."""

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"

    def covers(self, needed: QueryLenSupport) -> bool:
        """Return whether a kernel of this support takes what another support asks for."""
        return _WIDTH[self] >= _WIDTH[needed]


class GraphSupport(enum.Enum):
    """Batches that a captured CUDA graph may be replayed with: none, one query length for all requests, or any."""

    NONE = "none"
    ONE_QUERY_LEN = "one"
    ANY = "any"

    def covers(self, needed: GraphSupport) -> bool:
        """Return whether this support includes another one."""
        return _WIDTH[self] >= _WIDTH[needed]


# each support includes those before it
_WIDTH = {member: width for kind in (QueryLenSupport, GraphSupport) for width, member in enumerate(kind)}

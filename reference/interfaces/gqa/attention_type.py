"""Attention types: which keys a layer attends, and whether it has a cache."""

from __future__ import annotations

import enum


class AttentionType(enum.Enum):
    """Which keys a layer attends, and whether it has a cache.

    Attributes:
        DECODER: the tokens of the same request up to the query token; keys and values are cached.
        ENCODER: all tokens of the input of an encoder; no cache.
        ENCODER_ONLY: all tokens of the request, in a model that never decodes; no cache.
        CROSS: all tokens of an encoder's output, whose keys and values are cached once, at prefill.
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    CROSS = "cross"

    @property
    def cached(self) -> bool:
        """Return whether a layer of this type has a key/value cache."""
        return self in (AttentionType.DECODER, AttentionType.CROSS)

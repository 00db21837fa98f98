"""Make the schedule of a library's decode once in a step, for all layers.

The module serves the backends `flash_attn_3` and `flashmla`, whose adapters are in `fast.backends.adapters`. Without
these hooks, the library makes its schedule again in the decode of each layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from reference.interfaces import CacheFormat, MLAConfig, MLAMetadata

from ..backends.adapters import flash_attn_decode, flashmla
from .backend_hooks import BackendHooks


class DecodeHooks(BackendHooks):
    """Hooks of a backend whose decode takes tensors that are made ahead for the step."""

    def prepare(self, metadata: MLAMetadata, state: Any) -> tuple[Tensor, ...]:
        """Return the tensors for `DecodeMetadata.prepared`.

        If the backend declares graphs, the tensors are on the device of the plan, and the method does not wait for the
        device. Their shapes must then be equal for all batches of one captured size, so that new values can be copied
        into the tensors that a CUDA graph reads.

        Args:
            metadata: plan of a step with decodes.
            state: result of `create_builder_state`; by default the number of heads of the decode.
        """
        raise NotImplementedError

    def create_builder_state(
        self, config: MLAConfig, cache_format: CacheFormat, layer_names: tuple[str, ...], device: torch.device
    ) -> Any:
        """Return the number of heads."""
        return config.num_heads

    def finalize_metadata(self, metadata: MLAMetadata, state: Any) -> MLAMetadata:
        """Return the plan with the prepared tensors if this backend decodes in the step, and else the plan itself."""
        decode = metadata.decode
        own = metadata.num_decode_tokens > 0 and decode.backend == self.backend and metadata.cascade is None
        if not own:
            return metadata
        prepared = self.prepare(metadata, state)
        return dataclasses.replace(metadata, decode=dataclasses.replace(decode, prepared=prepared))


class FlashAttn3Hooks(DecodeHooks):
    """Hooks of `flash_attn_3`: the schedule and the page table of the step."""

    def prepare(self, metadata: MLAMetadata, state: int) -> tuple[Tensor, ...]:
        """Return the library's schedule and the page table."""
        return flash_attn_decode.prepare(metadata.decode, state)


class FlashMLAHooks(DecodeHooks):
    """Hooks of `flashmla`: the schedule of the step, and for a cache in e4m3 the padded block table."""

    def prepare(self, metadata: MLAMetadata, state: int) -> tuple[Tensor, ...]:
        """Return the library's schedule, and for a decode in the fp8 mode "fp8_product" the padded block table."""
        return flashmla.prepare(metadata.decode, state, metadata.fp8_mode)

"""Plans of grouped-query attention. A plan has the integers that attention needs in a step, such as lengths and slots.

A decode is a request with one or a few new tokens, a prefill is a request with more new tokens. Both attend keys in the
paged key/value cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int32, Int64
from torch import Tensor

from ..cache_format import COMPUTE_FORMAT, CacheFormat
from ..decode_schedule import NEVER_PLANNED, DecodeSchedule, ScheduleChoice
from ..metadata import CascadeMetadata, CommonAttentionMetadata, DecodeMetadata
from ..ownership import TokenOwnership
from .config import GQAConfig


@dataclass(frozen=True, eq=False)
class PagedAttentionMetadata(DecodeMetadata):
    """Queries of some requests, decodes or prefills, over a paged key/value cache, and the keys that each one attends.

    Query token t attends the keys [`first_visible[t]`, `visible_lens[t]`) of its request. `visible_lens` expresses the
    causal mask (or its absence, in cross attention), and `first_visible` expresses a window. In a captured plan,
    `first_visible` also expresses attention chunks; other plans have virtual requests for the attention chunks.

    Attributes:
        first_visible: [T], first key that each query token attends (`compute_first_visible`). Under context parallelism
            the number of earlier keys that this rank owns. None means 0 for all tokens.
    """

    first_visible: Int32[Tensor, " T"] | None = None


@dataclass(frozen=True, eq=False)
class GQAMetadata:
    """The plan of one step for the layers of one config.

    The tokens of the batch are in this order; each of the three ranges may be empty:

    - tokens [0, num_decode_tokens) decode;
    - tokens [num_decode_tokens, num_actual_tokens) prefill;
    - tokens from num_actual_tokens on are padding and get output 0.

    Attributes:
        config: config for which the step was planned; a layer with another window, attention chunk or attention type
            refuses the plan.
        slot_mapping: cache slot of each key that the step writes; -1 for a key that is not written. In a decoder these
            are the tokens of the batch, in cross attention the tokens of the encoder.
        num_actual_tokens: number of query tokens without padding.
        num_decodes: number of requests that decode; these requests come first in the batch.
        num_decode_tokens: number of query tokens of the decodes.
        decode: the part of the plan for the decodes.
        prefill: the part of the plan for the prefills; its `query_start_loc` starts at 0.
        schedule: optional schedule of the decodes, which assigns their keys to the programs of a kernel. With
            `first_visible`, the tiles of a request are counted from the tile with the first key that its first query
            token attends (`scheduled_lens`).
        prefill_schedule: `UNDIVIDED` if the step is batch-invariant, so that the output of a prefill does not depend on
            the other requests; otherwise None.
        cascade: plans over a shared prefix and over the suffixes, which the layer uses in place of `decode`; None if
            the requests share no prefix, or if a cascade would take longer.
        schedule_choice: the decision whether the decodes have a schedule, and the numbers behind this decision.
        cache_format: format of the caches for which the step was planned.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.
        captured: pairs of name and tensor for the tensors that a CUDA graph reads; None for other plans.
    """

    config: GQAConfig
    slot_mapping: Int64[Tensor, " slots"]
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: PagedAttentionMetadata
    prefill: PagedAttentionMetadata
    schedule: DecodeSchedule | None = None
    prefill_schedule: DecodeSchedule | None = None
    cascade: CascadeMetadata | None = None
    schedule_choice: ScheduleChoice = NEVER_PLANNED
    cache_format: CacheFormat = COMPUTE_FORMAT
    ownership: TokenOwnership | None = None
    captured: tuple[tuple[str, Tensor | None], ...] | None = None

    @property
    def num_prefills(self) -> int:
        """Return the number of requests that prefill."""
        return self.prefill.block_table.shape[0]


@dataclass(frozen=True, eq=False)
class EncoderMetadata:
    """The plan of one step for layers without a cache (attention types ENCODER and ENCODER_ONLY).

    Attributes:
        config: config for which the step was planned.
        query_start_loc: [B + 1], prefix sum of the lengths; queries and keys are the same tokens.
        max_query_len: upper bound of the lengths.
        num_actual_tokens: number of tokens without padding; later tokens get output 0.
    """

    config: GQAConfig
    query_start_loc: Int32[Tensor, " offsets"]
    max_query_len: int
    num_actual_tokens: int


@dataclass(frozen=True, eq=False, kw_only=True)
class CrossAttentionBatch(CommonAttentionMetadata):
    """The batch of one step of an encoder-decoder model, with the encoder's part of each request.

    Layers of cross attention take their plan from the encoder fields; the layers of self attention ignore them.

    Attributes:
        encoder_seq_lens: [B], tokens of the encoder's output of each request; 0 for a padding row.
        encoder_seq_lens_cpu: [B], copy of `encoder_seq_lens` on the CPU.
        encoder_block_table: [B, We], blocks in which the keys of the encoder's output are cached.
        encoder_slot_mapping: cache slot of each token of the encoder that this step writes: the tokens of the requests
            whose encoder ran in this step, packed. Empty in later steps.
    """

    encoder_seq_lens: Int32[Tensor, " B"]
    encoder_seq_lens_cpu: Int32[Tensor, " B"]
    encoder_block_table: Int32[Tensor, "B We"]
    encoder_slot_mapping: Int64[Tensor, " encoder_slots"]

"""Plan a forward of a padded batch: which tokens are real, where the cache stores them, and what each layer attends.

The layers of a model are divided into groups with equal configs (`group_layers`), and each group gets one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn

from fast.backends import check_one_set_of_parameters
from reference.interfaces import CacheFormat, CommonAttentionMetadata, check, check_tensor
from reference.interfaces.gqa import AttentionType, CrossAttentionBatch, EncoderMetadata, GQAConfig, GQAMetadata

from .cache import KeyValueRecord, OpenCache
from .interface import ModelMask, Step
from .models import Stack, entry_of


@dataclass(frozen=True)
class Options:
    """Options of one call of `use_attention`; copies of a model share them, because the module `ops` cannot be copied.

    Attributes:
        ops: the package that plans and computes.
        block_size: tokens per block.
        cache_format: format of the caches.
        groups: config of each group of layers, and the names of its layers.
        planning: further keyword arguments of `ops.build_gqa_metadata`.
        layers: the layers by name.
        dtype: dtype of queries and keys.
        checked: devices for which `check_backends` has accepted the layers.
    """

    ops: ModuleType
    block_size: int
    cache_format: CacheFormat
    groups: Mapping[GQAConfig, tuple[str, ...]]
    planning: Mapping[str, Any]
    layers: Mapping[str, nn.Module]
    dtype: torch.dtype
    checked: set[torch.device] = field(default_factory=set)

    def __deepcopy__(self, memo: dict) -> Options:
        return self

    def check_backends(self, device: torch.device) -> None:
        """Check the layers against backends that hold one set of parameters; do nothing if `ops` has no backends.

        Args:
            device: device of the layers.

        Raises:
            UnsupportedConfiguration: layers differ that such a backend would serve.
        """
        if "backend" in self.planning and device not in self.checked:
            backend = self.planning["backend"]
            check_one_set_of_parameters(self.layers, device, self.dtype, self.block_size, backend)
        self.checked.add(device)

    def plan(self, batch: CommonAttentionMetadata) -> dict[str, GQAMetadata | EncoderMetadata]:
        """Return the plan of each layer by name, one plan for each group."""
        self.check_backends(batch.query_start_loc.device)  # the model may have moved after `use_attention`
        plans = {}
        for config, names in self.groups.items():
            plan = self.ops.build_gqa_metadata(
                batch, self.block_size, config, cache_format=self.cache_format, dtype=self.dtype, **self.planning
            )
            plans.update(dict.fromkeys(names, plan))
        return plans

    @property
    def is_local(self) -> bool:
        """Return whether a layer has a window or attention chunks."""
        return any(config.sliding_window or config.attention_chunk_size for config in self.groups)


class Packed(NamedTuple):
    """The real tokens of a padded batch.

    Attributes:
        starts: [B + 1] int32 on the CPU, prefix sum of the number of new real tokens of each row.
        lens: [B] int32 on the CPU, real tokens of each row after the step.
        table: [B, W] int32 on the CPU, blocks of each row.
        slots: [T] int64 on the CPU, slot of each new real token.
        tokens: [T], indices of the new real tokens among the B x Q new tokens; None if all are real.
    """

    starts: Int32[Tensor, " B+1"]
    lens: Int32[Tensor, " B"]
    table: Int32[Tensor, "B W"]
    slots: Int64[Tensor, " T"]
    tokens: Int64[Tensor, " T"] | None


def pack(
    ops: ModuleType,
    record: KeyValueRecord,
    rows: int,
    queries: int,
    mask: Bool[Tensor, "B S"] | None,
    device: torch.device,
) -> Packed:
    """Return the new real tokens of a padded batch, and reserve slots for them in the record.

    Args:
        ops: package that computes the slots.
        record: record of the cached tokens.
        rows: B.
        queries: Q, new tokens of each row, padding included.
        mask: [B, cached tokens + Q], True for real tokens; None if no token is padding.
        device: device of `tokens`.
    """
    tokens = None
    counts = torch.full((rows,), queries, dtype=torch.int32, device="cpu")
    if mask is not None:
        new = mask[:, record.length :]
        counts = new.sum(1, dtype=torch.int32)
        if not new.all():
            tokens = new.flatten().nonzero().squeeze(1).to(device)
    starts = torch.zeros(rows + 1, dtype=torch.int32, device="cpu")
    starts[1:] = counts.cumsum(0)
    lens = record.lens + counts if record.length else counts
    table = record.reserve(rows, max(lens.tolist(), default=0))
    slots = ops.slot_mapping(starts, lens, table, record.block_size, int(starts[-1]))
    return Packed(starts, lens, table, slots, tokens)


def check_local_padding(mask: Bool[Tensor, "B S"] | None, options: Options) -> None:
    """Check that no padding lies between the tokens of a row, if a layer has a window or attention chunks.

    transformers counts the padding between two tokens as positions of a window. This project stores and counts real
    tokens alone.
    """
    if mask is None or not options.is_local:
        return
    begins = mask[:, 1:] & ~mask[:, :-1]
    several = begins.sum(1) + mask[:, 0] > 1
    check(not several.any(), "attention_mask", "no padding between the tokens of a row, because layers have windows or "
          "attention chunks", f"padding between tokens in row {int(several.int().argmax())}")  # fmt: skip


def check_right_padding(mask: Bool[Tensor, "B S"] | None, cached: int, argument: str) -> None:
    """Check that no row of a call with a cache ends with padding behind a new token (right padding).

    `generate` reads the logits of the last position of each row. If this position is padding, its attention output is
    0, and the generated tokens would be wrong.

    A call with one row may end with padding if tokens are already cached: transformers infers the mask of an assistant
    model from its tokens, and an assistant may get a token that equals the padding token.

    Args:
        mask: [B, cached tokens + Q], True for real tokens; None if no token is padding.
        cached: number of cached tokens of each row, padding included.
        argument: name of the mask in the message.
    """
    if mask is None or (cached > 0 and mask.shape[0] == 1):
        return
    new = mask[:, cached:]
    wrong = new.any(1) & ~new[:, -1]
    check(not wrong.any(), argument, "padding on the left (on the right only with use_cache=False)",
          f"padding behind the last token of row {int(wrong.int().argmax())}")  # fmt: skip


class Planned(NamedTuple):
    """A step, and what the records get if the forward succeeds.

    Attributes:
        step: the step.
        commits: for each record, the record and the arguments of its method `commit`.
    """

    step: Step
    commits: list[tuple[KeyValueRecord, int, Tensor, Tensor | None]]

    def commit(self) -> None:
        """Record which tokens are cached."""
        for record, length, lens, mask in self.commits:
            record.commit(length, lens, mask)


class EncoderOutput(NamedTuple):
    """The output of an encoder, which the decoder attends.

    Attributes:
        length: tokens of a row, padding included.
        mask: [B, length], True for real tokens; None if no token is padding.
        ran: whether the output is new, so that cross attention caches its keys in this step.
    """

    length: int
    mask: Bool[Tensor, "B S"] | None
    ran: bool


def plan_decoder(
    options: Options,
    stack: Stack,
    caches: OpenCache,
    shape: tuple[int, int],
    mask: Bool[Tensor, "B S"] | None,
    encoder: EncoderOutput | None,
    device: torch.device,
) -> Planned:
    """Plan the forward of a decoder, and reserve its caches.

    Args:
        options: options of `use_attention`.
        stack: the decoder.
        caches: the caches of the call.
        shape: (B, Q), rows and new tokens of each row.
        mask: [B, cached tokens + Q], True for real tokens; None if no token is padding.
        encoder: the output of the encoder; None for a model without an encoder.
        device: device of the plan.
    """
    ops, record = options.ops, caches.record
    rows, queries = shape
    packed = pack(ops, record, rows, queries, mask, device)
    table, slots = packed.table.to(device), packed.slots.to(device)
    batch = ops.CommonAttentionMetadata.make(packed.starts, packed.lens, table, slots, options.block_size)
    commits, step = [(record, record.length + queries, packed.lens, mask)], Step({}, {}, packed.tokens)
    widths = {AttentionType.DECODER: packed.table.shape[1]}
    if encoder is not None:
        cross = caches.cross_record
        length = encoder.length if encoder.ran else 0
        keys = pack(ops, cross, rows, length, encoder.mask, device)
        given = {field.name: getattr(batch, field.name) for field in fields(batch)}
        batch = CrossAttentionBatch(
            **given,
            encoder_seq_lens=keys.lens.to(device),
            encoder_seq_lens_cpu=keys.lens,
            encoder_block_table=keys.table.to(device),
            encoder_slot_mapping=keys.slots.to(device),
        )
        step.encoder_ran, step.encoder_tokens = encoder.ran, keys.tokens
        widths[AttentionType.CROSS] = keys.table.shape[1]
        if encoder.ran:
            commits.append((cross, length, keys.lens, encoder.mask))
    step.metadata = options.plan(batch)
    step.kv_caches = _reserve(ops, stack, caches, rows, widths, record.block_size)
    return Planned(step, commits)


def _reserve(
    ops: ModuleType, stack: Stack, caches: OpenCache, rows: int, widths: Mapping[AttentionType, int], block_size: int
) -> dict[str, Tensor]:
    """Return the cache of each layer of a decoder.

    If the call has no cache, the layers use temporary caches one after another. A cache that a later layer shares is a
    cache of its own.

    Args:
        ops: package that allocates.
        stack: the decoder.
        caches: the caches of the call.
        rows: B.
        widths: W, blocks of a row, for each attention type.
        block_size: tokens per block.
    """
    shared = {config.kv_sharing_layer for config in stack.configs.values()}
    temporary: dict[Any, Tensor] = {}
    kv_caches: dict[str, Tensor] = {}
    positions = dict.fromkeys(AttentionType, 0)  # index of the next layer of each attention type
    for name, module in stack.modules.items():
        config = stack.configs[name]
        kind, index = config.attention_type, positions[config.attention_type]
        positions[kind] += 1
        if config.kv_sharing_layer is not None:
            kv_caches[name] = kv_caches[config.kv_sharing_layer]
            continue
        entry = entry_of(module, stack.base.dtype)
        layers = caches.cross_layers if kind is AttentionType.CROSS else caches.layers
        if layers is not None:
            kv_caches[name] = layers[index].reserve(ops, rows, widths[kind], entry)
            continue
        key = name if name in shared else (kind, entry._replace(scales=None))
        if key not in temporary:
            temporary[key] = ops.allocate_key_value_cache(
                rows * widths[kind], block_size, entry.num_kv_heads, entry.head_dim, entry.dtype, entry.device
            )
        kv_caches[name] = temporary[key]
    return kv_caches


class EncoderStep(Step):
    """The forward of an encoder, planned when its first layer runs: only then the number of its tokens is known.

    Args:
        options: options of `use_attention`.
        names: names of the layers.
    """

    def __init__(self, options: Options, names: Iterable[str]):
        super().__init__({}, dict.fromkeys(names))
        self.options = options

    def begin(self, query: Float[Tensor, "B N Q Dh"], mask: ModelMask | None) -> None:
        """Plan the step, if the layer is the first one.

        Args:
            query: [B, N, Q, Dh], queries of the layer.
            mask: mask of the layer, which has the padding; None if no token is padding.

        Raises:
            ValueError: the padding mask has another shape.
        """
        if self.metadata:
            return
        rows, _, queries, _ = query.shape
        padding = mask.padding if isinstance(mask, ModelMask) else None
        if padding is not None:
            shape = (rows, queries)
            check_tensor("attention_mask", padding, shape, (torch.bool,))
            padding = padding.cpu()
        packed = pack(self.options.ops, KeyValueRecord(self.options.block_size), rows, queries, padding, query.device)
        self.tokens = packed.tokens
        table = packed.table[:, :0].to(query.device)
        slots = torch.full_like(packed.slots, -1, device=query.device)
        batch = self.options.ops.CommonAttentionMetadata.make(packed.starts, packed.lens, table, slots)
        self.metadata = self.options.plan(batch)

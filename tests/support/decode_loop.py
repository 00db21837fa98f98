"""Batches for `advance_step`, and a loop of decode steps that stays on the device.

`advance_step` turns the batch of a step into the batch of the next step: the sampled token of each request becomes its
one query token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from reference.interfaces import CommonAttentionMetadata, GraphSupport, MLAConfig, TokenOwnership

from .factories import make_layer, make_weights

BLOCK, WIDTH, VOCABULARY = 16, 4, 50


def buffers(query_lens, seq_lens, width, padding=0, dtype=torch.int64, block_size=4, size=1):
    """Return sampled ids, input ids, positions and a batch.

    The tensors of input ids, positions and slots are filled with one constant each, so that a test notices elements
    that `advance_step` does not write.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request.
        width: columns of the block table.
        padding: number of tokens in the buffers after the tokens of the requests.
        dtype: dtype of the ids.
        block_size: number of tokens in a block.
        size: number of ranks that share the sequences.
    """
    requests, tokens = len(query_lens), sum(query_lens) + padding
    table = torch.randperm(max(1, requests * width))[: requests * width].view(requests, width).int()
    common = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, block_size, TokenOwnership(size, 0))
    common = replace(common, slot_mapping=torch.full((tokens,), 12345))
    sampled = torch.randint(1, 2**31 - 1, (requests,), dtype=dtype)
    return sampled, torch.full((tokens,), 77, dtype=dtype), torch.full((tokens,), 88), common


@dataclass
class DecodeLoop:
    """A model of one layer, and the buffers of a batch with one query token for each of B requests.

    The model embeds the input ids, runs the layer, and multiplies the output by the transposed embedding to get logits.
    H is the hidden size.

    Attributes:
        ops: package of the layer.
        layer: the layer.
        kv_cache: cache of the layer.
        embedding: embedding of the tokens, [VOCABULARY, H].
        builder: builder of the plans; `build_for_cudagraph_capture` makes the plan of every step.
        batch: batch whose device tensors are the buffers; its CPU fields are upper bounds of the lengths.
        input_ids: buffer, [B].
        positions: buffer, [B].
        outputs: outputs of the layer in the steps of the last `run`, [steps, B, H].
    """

    ops: ModuleType
    layer: torch.nn.Module
    kv_cache: Tensor
    embedding: Tensor
    builder: object
    batch: CommonAttentionMetadata
    input_ids: Tensor
    positions: Tensor
    outputs: Tensor

    def load(self, seq_lens: list[int], ids: list[int], kv_cache: Tensor) -> None:
        """Write `kv_cache`, lengths, positions and input ids into the buffers.

        Args:
            seq_lens: length of each request.
            ids: token at the last position of each request.
            kv_cache: contents of the cache.
        """
        common = self.host_batch(seq_lens)
        self.batch.seq_lens.copy_(common.seq_lens)
        self.batch.slot_mapping.copy_(common.slot_mapping)
        self.input_ids.copy_(torch.tensor(ids, device="cpu"))
        self.positions.copy_((common.seq_lens.long() - 1).clamp(min=0))
        self.kv_cache.copy_(kv_cache)

    def host_batch(self, seq_lens: list[int]) -> CommonAttentionMetadata:
        """Return the batch of a step; `from_lens` makes it on the host from the lengths."""
        table = self.batch.block_table
        return CommonAttentionMetadata.from_lens([1] * len(seq_lens), seq_lens, table, BLOCK)

    def run(self, steps: int) -> None:
        """Run steps over the buffers, and write their outputs to `outputs`; a CUDA graph can capture this call."""
        common = self.batch
        options = {"graph": GraphSupport.ANY} if self.ops.__name__ == "fast" else {}
        for step in range(steps):
            plan = self.builder.build_for_cudagraph_capture(common)
            hidden = self.layer(self.embedding[self.input_ids], self.positions, self.kv_cache, plan)
            self.outputs[step].copy_(hidden)
            common = self.ops.advance_step(
                self.sample(hidden), self.input_ids, self.positions, common, BLOCK, **options
            )

    def sample(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.embedding.T).argmax(-1)

    def state(self) -> list[Tensor]:
        """Return copies of all buffers and of the cache."""
        batch = self.batch
        held = (batch.seq_lens, batch.query_start_loc, batch.slot_mapping, self.input_ids, self.positions)
        return [x.clone() for x in (*held, self.kv_cache.nan_to_num(7))]


def make_loop(
    ops: ModuleType, config: MLAConfig, dtype: torch.dtype, device: torch.device, requests: int, steps: int,
    num_programs: int = 0,
) -> DecodeLoop:  # fmt: skip
    """Return a loop for a number of requests; the block table has different blocks in random order."""
    with torch.device("cpu"):
        table = torch.randperm(requests * WIDTH).view(requests, WIDTH).int()
        embedding = torch.randn(VOCABULARY, config.hidden_size, dtype=torch.float64).to(dtype)
        layer = make_layer(ops, config, make_weights(config, dtype), dtype)
    longest = [BLOCK * WIDTH] * requests
    common = CommonAttentionMetadata.from_lens([1] * requests, longest, table.to(device), BLOCK)
    # on a CPU, `from_lens` makes one tensor for a device field and its CPU field; here the CPU field must not change
    common = replace(common, seq_lens=common.seq_lens.clone(), query_start_loc=common.query_start_loc.clone())
    return DecodeLoop(
        ops,
        layer.to(device),
        torch.zeros(requests * WIDTH, BLOCK, config.head_size, dtype=dtype, device=device),
        embedding.to(device),
        ops.MLAMetadataBuilder(config, BLOCK, BLOCK * WIDTH, requests, num_programs=num_programs),
        common,
        torch.zeros(requests, dtype=torch.int64, device=device),
        torch.zeros(requests, dtype=torch.int64, device=device),
        torch.zeros(steps, requests, config.hidden_size, dtype=dtype, device=device),
    )


def loop_cache(config: MLAConfig, dtype: torch.dtype, requests: int) -> Tensor:
    """Return a cache with a random entry in every slot."""
    with torch.device("cpu"):
        return torch.randn(requests * WIDTH, BLOCK, config.head_size, dtype=torch.float64).to(dtype)


def check_against_the_host(loop, lens, ids, held, outputs):
    """Assert that a `DecodeGraph`, with batches made on the host, gives the same bits as the `outputs` of a loop."""
    loop.load(lens, ids, held)
    device, hidden_size = loop.embedding.device, loop.embedding.shape[1]
    graph = loop.ops.DecodeGraph(
        lambda hidden, positions, plan: loop.layer(hidden, positions, loop.kv_cache, plan),
        loop.builder, [len(lens)], loop.batch.block_table.shape[1], hidden_size, loop.embedding.dtype, device,
    )  # fmt: skip
    for step in range(outputs.shape[0]):
        now = [length + step * (length > 0) for length in lens]
        positions = torch.tensor([max(length - 1, 0) for length in now], device=device)
        rows = loop.embedding[torch.tensor(ids, device=device)]
        hidden = graph.run(rows, positions, loop.host_batch(now))
        assert hidden.equal(outputs[step]), step
        ids = [token if length else 0 for token, length in zip(loop.sample(hidden).tolist(), lens, strict=True)]

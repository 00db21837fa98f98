"""Bring context that was gathered from all context-parallel ranks into the order of its tokens.

`reference.distributed.reorg` explains which tokens each rank owns.
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from reference.interfaces import (
    ContextParallelChunk,
    check_eager_offsets,
    check_out,
    check_rank_offsets,
    check_reorg,
)

from .. import backends
from ..backends import BackendChoice


def reorg_kvcache(
    gathered: Shaped[Tensor, "D padded head_size"],
    chunk: ContextParallelChunk,
    *,
    out: Shaped[Tensor, "S head_size"] | None = None,
    backend: BackendChoice = None,
) -> Shaped[Tensor, "S head_size"]:
    """Put the cache entries of a chunk, gathered from D ranks, into the order of requests and of tokens in a request.

    `reference.distributed.reorg.reorg_kvcache` explains the layout, and how vLLM's function of this name differs.

    Args:
        gathered: [D, chunk.padded_tokens, Lkv + R], the cache entries that each rank sent (Lkv: width of a latent, R:
            width of the rope key), or stored cache entries [D, chunk.padded_tokens, columns].
        chunk: the gathered chunk of context.
        out: tensor [chunk.num_tokens, Lkv + R] that receives the result (stored entries: columns instead of Lkv + R);
            `out` must share no memory with the other arguments. None allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        The tensor `out` if it is given; otherwise a new tensor of the same shape.

    Raises:
        TypeError: `chunk` is no chunk.
        ValueError: shapes, dtypes or devices do not match, or `out` overlaps another argument or itself. For CPU
            tensors also: `chunk.cu_seq_lens` and
            `chunk.local_cu_seq_lens` contradict each other.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_reorg(gathered, chunk)
    if not chunk.bounded:
        check_eager_offsets("chunk.cu_seq_lens", chunk.cu_seq_lens, chunk.num_tokens)
    widths = (("head_dim", gathered.shape[2]),)
    request = backends.KernelRequest("reorg_kvcache", gathered.device, gathered.dtype, widths)
    if out is None:
        out = gathered.new_empty(chunk.num_tokens, gathered.shape[2])
    else:
        inputs = gathered, chunk.cu_seq_lens, chunk.local_cu_seq_lens
        check_out("out", out, (chunk.num_tokens, gathered.shape[2]), gathered.dtype, gathered.device, *inputs)
    _REORDERS(
        gathered, chunk.cu_seq_lens, chunk.local_cu_seq_lens, chunk.ownership.interleave, out,
        backends.select(request, backend).name,
    )  # fmt: skip
    return out


def _launch_reorg(gathered, cu_seq_lens, local_cu_seq_lens, interleave, out, backend):
    if gathered.device.type == "cpu":
        check_rank_offsets(cu_seq_lens, local_cu_seq_lens, interleave, out.shape[0], gathered.shape[1])
    backends.kernel(backend, "reorg_kvcache")(gathered, cu_seq_lens, local_cu_seq_lens, interleave, out)


_reorg_kvcache = torch.library.custom_op(
    "mla_twins::reorg_kvcache",
    _launch_reorg,
    mutates_args=("out",),
    schema="(Tensor gathered, Tensor cu_seq_lens, Tensor local_cu_seq_lens, SymInt interleave, Tensor(a!) out,"
    " str backend) -> ()",
)


_REORDERS = backends.DirectCalls(torch.ops.mla_twins.reorg_kvcache, _launch_reorg, mutates=(4,))


@_reorg_kvcache.register_fake
def _(gathered, cu_seq_lens, local_cu_seq_lens, interleave, out, backend):
    return None

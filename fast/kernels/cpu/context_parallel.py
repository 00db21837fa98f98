"""Context parallelism in PyTorch: reorder gathered cache entries, and merge the attention states of all ranks.

D ranks divide the tokens of every request among themselves, and each rank attends its own tokens. The attention states
(output and LSE) of the ranks are then merged. The owner rank of a head is the rank that keeps the head's merged output;
rank r owns the heads [r N / D, (r + 1) N / D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import E4M3

CHUNK_TOKENS = 4096  # tokens reordered at a time


def reorg_kvcache(
    gathered: Tensor, cu_seq_lens: Tensor, local_cu_seq_lens: Tensor, interleave: int, out: Tensor
) -> None:
    """Copy the gathered cache entries of all ranks to `out`, in the order of the tokens of each request.

    Args:
        gathered: [D, padded number of tokens, columns], any dtype. Each rank has a row for each of its tokens, one
            request after another, and then rows of padding.
        cu_seq_lens: [B + 1], first row of each request in `out`.
        local_cu_seq_lens: [D, B + 1], first row of each request in `gathered`, for each rank.
        interleave: number of consecutive tokens that one rank gets before the next rank gets tokens.
        out: [num_tokens, columns], written in place.
    """
    if gathered.dtype == E4M3:  # PyTorch has few operations on 8-bit floats
        gathered, out = gathered.view(torch.uint8), out.view(torch.uint8)
    used = int(cu_seq_lens[-1])
    out[used:] = 0  # rows after the last request
    out = out[:used]
    size, padded, width = gathered.shape
    for first in range(0, out.shape[0], CHUNK_TOKENS):  # in chunks, so that the index tensors stay small
        tokens = torch.arange(first, min(first + CHUNK_TOKENS, out.shape[0]), device=out.device)
        request = torch.searchsorted(cu_seq_lens[1:].long(), tokens, right=True)
        position = tokens - cu_seq_lens[request]
        group = position // interleave
        rank = group % size
        row = local_cu_seq_lens[rank, request] + group // size * interleave + position % interleave
        target = out[first : first + CHUNK_TOKENS]
        if gathered.is_contiguous() and out.is_contiguous():
            torch.index_select(gathered.view(-1, width), 0, rank * padded + row, out=target)
        else:
            target.copy_(gathered[rank, row])


def merge_weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax weight of each rank's state [D, N, T] and the merged LSE [N, T], from the LSEs [D, N, T]."""
    # subtract the largest LSE and not the merged LSE, because exp would magnify the rounding error of the merged LSE
    largest = lses.amax(0)
    shift = largest.masked_fill(largest == -torch.inf, 0)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    return weights.div_(total.masked_fill(total == 0, 1)), total.log_().add_(shift)


def weight_attn_out(out: Tensor, lses: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Multiply `out` [T, N, Dv] by this rank's softmax weights, which follow from `lses` [D, N, T] of all ranks.

    Returns:
        The weighted outputs, sorted by owner rank [D, T, N / D, Dv], and the merged LSE [N / D, T] of the heads that
        this rank owns.
    """
    size, heads, tokens = lses.shape
    weights, lse = merge_weights(lses)
    scaled = torch.where(lses[rank].T[..., None] == -torch.inf, 0, out * weights[rank].T[..., None]).to(out.dtype)
    by_owner = scaled.view(tokens, size, heads // size, out.shape[2]).transpose(0, 1).contiguous()
    return by_owner, lse.view(size, heads // size, tokens)[rank].clone()


def pack_attn_state(out: Tensor, lse: Tensor, message: Tensor, lse_bytes: int) -> None:
    """Write `out` [T, N, Dv] and `lse` [N, T] into `message` [D, bytes], one row for each owner rank.

    A row begins with the LSE of the heads of its owner rank. The output of these heads follows from byte `lse_bytes`
    on.
    """
    size = message.shape[0]
    tokens, heads, value = out.shape
    if lse.numel() == 0:
        return
    own = heads // size
    lses = message[:, : own * tokens * lse.element_size()].view(lse.dtype)
    outs = message[:, lse_bytes : lse_bytes + tokens * own * value * out.element_size()].view(out.dtype)
    lses.view(size, own, tokens).copy_(lse.view(size, own, tokens))
    outs.view(size, tokens, own, value).copy_(out.view(tokens, size, own, value).transpose(0, 1))


def merge_packed_attn_states(message: Tensor, lse_bytes: int, out: Tensor, lse: Tensor) -> None:
    """Merge the states that `pack_attn_state` wrote on all ranks into `out` [T, N / D, Dv] and `lse` [N / D, T]."""
    size = message.shape[0]
    tokens, own, value = out.shape
    if lse.numel() == 0:
        return
    lses = message[:, : own * tokens * lse.element_size()].view(lse.dtype).view(size, own, tokens)
    outs = message[:, lse_bytes : lse_bytes + out.numel() * out.element_size()].view(out.dtype)
    weights, total = merge_weights(lses)
    weighted = outs.view(size, tokens, own, value) * weights.transpose(1, 2)[..., None]
    out.copy_(torch.where(lses.transpose(1, 2)[..., None] == -torch.inf, 0, weighted).sum(0))
    lse.copy_(total)

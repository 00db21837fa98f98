"""Adapter to `torch.nn.functional.scaled_dot_product_attention` (SDPA): the flash attention kernel of PyTorch.

The public function returns no LSE, so the adapter serves prefills without context only. It calls the function once for
each request, because the function takes requests of equal lengths. Its kernel needs values as wide as the keys: the
adapter pads the values with zeros and cuts the output.

PyTorch itself takes the flash kernel for these inputs, unless the process has switched this kernel off. To ask for the
kernel would change a setting of the whole process while the call runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..registry import Backend, OpSupport


def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    k_pe: None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    lse: None = None,
) -> tuple[Tensor, None]:
    """Compute attention of packed requests of different lengths, without an LSE.

    Args:
        q: [T, N, D].
        k: [S, N, D], whole keys.
        k_pe: None, because the declaration asks for whole keys.
        v: [S, N, V], V at most D.
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        softmax_scale: factor of the scores.
        causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than the
            query after it.
        out_dtype: dtype of `q`.
        out: [T, N, V], any strides, written in place; None allocates `out`.
        lse: None, because the declaration says that the kernel returns no LSE.

    Returns:
        out [T, N, V], and None.
    """
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    q_offsets, k_offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    width = q.shape[2] - v.shape[2]
    for request in range(len(q_offsets) - 1):
        rows = slice(q_offsets[request], q_offsets[request + 1])
        keys = slice(k_offsets[request], k_offsets[request + 1])
        queries, seen = rows.stop - rows.start, keys.stop - keys.start
        hidden = max(queries - seen, 0) if causal and seen else (0 if seen else queries)  # rows that see no key
        out[rows.start : rows.start + hidden] = 0
        if hidden == queries:
            continue
        rows = slice(rows.start + hidden, rows.stop)
        mask = None
        if causal and queries - hidden < seen:  # SDPA's own causal mask begins at the first key
            mask = torch.ones(queries, seen, dtype=torch.bool, device=q.device).tril_(seen - queries)
        inputs = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], pad(v[keys], (0, width)))]  # [1, N, tokens, D]
        made = scaled_dot_product_attention(
            *[x if x.stride(-1) == 1 else x.contiguous() for x in inputs], attn_mask=mask,
            is_causal=causal and mask is None, scale=softmax_scale,
        )  # fmt: skip
        out[rows] = made[0, :, :, : v.shape[2]].transpose(0, 1)
    return out, None


TORCH_FLASH = Backend(
    name="torch_flash",
    priority=-10,
    device_type="cpu",
    ops={
        "flash_attn_varlen": OpSupport(
            f"{__name__}:flash_attn_varlen",
            same_out_dtype=True,
            whole_keys=True,
            narrow_values=True,
            masks=("causal",),
            lse=False,
        )
    },
    library="PyTorch",
    only_named=True,
)

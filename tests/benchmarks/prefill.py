"""Time the expanded prefill, bfloat16, head dims 192 and 128: fast, FlashAttention-3 and the kernels of PyTorch.

    python -m tests.benchmarks.prefill
    python -m tests.benchmarks.prefill --peers .peers --rows 1,16384,16384,128,causal --json prefill.json

`fast` gets the tensors of a prefill: keys and values stored head by head, as `expand_kv` returns them, and the rope
part of the keys once for all heads. The other kernels get the layout on which they are fastest: packed keys that
contain the rope part for each head, and packed values. The times do not contain the conversion to this layout.

There are two ways of timing. A rested call starts after the GPU was idle for 0.1 s. Flushed calls follow each other
without a rest, so that the GPU reaches its power limit. For B requests with Sq query tokens, Skv keys and N heads, the
FLOPs are 2 B N Sq Skv (192 + 128), minus the FLOPs of the (query, key) pairs that a causal mask removes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import fast.attention.varlen
import reference
from fast.parity import Parity, compare, compare_states
from reference.interfaces import AttentionState

from .contest import OURS, Case, Contender, finite, run_benchmark
from .decode import spread_out

NOPE, ROPE, VALUE = 128, 64, 128
WIDTH = NOPE + ROPE
SCALE = WIDTH**-0.5
DTYPE = torch.bfloat16
CHECKED_HEADS, CHECKED_ROWS = 3, 128


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        B: number of requests.
        Sq: query tokens of each request.
        Skv: keys of each request.
        N: number of heads.
        mask: "causal" or "full".
    """

    B: int
    Sq: int
    Skv: int
    N: int
    mask: str

    @classmethod
    def parse(cls, *texts: str) -> Row:
        """Return the row of four sizes and a mask, "causal" or "full", all given as text.

        Raises:
            ValueError: a text is not a number, or a value is out of range.
        """
        batch, queries, keys, heads = (int(text) for text in texts[:4])
        mask = texts[4]
        if min(batch, queries, keys, heads) < 1 or queries > keys or mask not in ("causal", "full"):
            raise ValueError("sizes are at least 1, Sq is at most Skv, mask is causal or full")
        return cls(batch, queries, keys, heads, mask)

    @property
    def causal(self) -> bool:
        """True if the keys after each query are masked."""
        return self.mask == "causal"

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products; a causal mask removes Sq^2 / 2 (query, key) pairs."""
        pairs = self.Sq * self.Skv - (self.Sq * self.Sq // 2 if self.causal else 0)
        return 2 * self.B * self.N * pairs * (WIDTH + VALUE)

    @property
    def bytes(self) -> int:
        """Bytes of `q`, `k_nope`, `k_pe` (shared by all heads), `v` and the output, each counted once."""
        per_query, per_key = self.N * (WIDTH + VALUE), self.N * (NOPE + VALUE) + ROPE
        return DTYPE.itemsize * self.B * (self.Sq * per_query + self.Skv * per_key)


ROWS = (
    Row(1, 4096, 4096, 128, "causal"),
    Row(1, 16384, 16384, 128, "causal"),
    Row(1, 4096, 16384, 128, "full"),
    Row(4, 2048, 2048, 128, "causal"),
    Row(1, 8192, 8192, 16, "causal"),
    Row(1, 32768, 32768, 16, "causal"),
)


@dataclass(frozen=True)
class Inputs:
    """Random packed requests.

    Attributes:
        q: [B Sq, N, 192].
        k_nope: [B Skv, N, 128], stored head by head.
        k_pe: [B Skv, 64].
        v: [B Skv, N, 128], stored head by head.
        cu_q: offsets of the requests in the queries, [B + 1].
        cu_k: offsets of the requests in the keys, [B + 1].
    """

    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor


def make_inputs(row: Row, device: torch.device | str) -> Inputs:
    """Return random inputs of a row."""
    kind = dict(dtype=DTYPE, device=device)

    def by_head() -> Tensor:
        return torch.randn(row.N, row.B * row.Skv, NOPE, **kind).transpose(0, 1)

    steps = torch.arange(row.B + 1, dtype=torch.int32, device=device)
    return Inputs(
        torch.randn(row.B * row.Sq, row.N, WIDTH, **kind), by_head(), torch.randn(row.B * row.Skv, ROPE, **kind),
        by_head(),
        row.Sq * steps, row.Skv * steps,
    )  # fmt: skip


def checked_ranges(row: Row) -> list[tuple[int, int, int]]:
    """Return (request, first query, number of queries) of the query ranges that are compared with `reference`.

    The ranges lie at the start, in the middle and at the end of the first and of the last request.
    """
    length = min(row.Sq, CHECKED_ROWS)
    starts = sorted({0, (row.Sq - length) // 2, row.Sq - length})
    return [(request, start, length) for request in sorted({0, row.B - 1}) for start in starts]


def check(row: Row, inputs: Inputs, value: AttentionState | Tensor) -> list[Parity]:
    """Check that the whole output is finite, and compare ranges of queries of a few heads with `reference`.

    A compared range has the n queries a, ..., a + n - 1. With a causal mask, the last query of the range attends the
    first Skv - Sq + a + n keys. `reference` gets these keys only. In `reference`, the causal mask lets the last query
    attend all of these keys.

    Args:
        row: the shape.
        inputs: inputs of the call.
        value: output of the call: an attention state, or only its `out` [B Sq, N, 128].
    """
    out = value.out if isinstance(value, AttentionState) else value
    heads = torch.tensor(spread_out(row.N, CHECKED_HEADS), device=out.device)
    found = [finite("flash_attn_varlen", out)]
    for request, start, length in checked_ranges(row):
        rows = slice(request * row.Sq + start, request * row.Sq + start + length)
        seen = row.Skv - row.Sq + start + length if row.causal else row.Skv
        keys = slice(request * row.Skv, request * row.Skv + seen)
        k_pe = inputs.k_pe[keys, None].expand(-1, len(heads), -1)
        tensors = [
            inputs.q[rows][:, heads], torch.cat((inputs.k_nope[keys][:, heads], k_pe), -1), inputs.v[keys][:, heads]
        ]  # fmt: skip
        cu_q, cu_k = (torch.tensor([0, end], dtype=torch.int32, device=out.device) for end in (length, seen))
        rest = (cu_q, cu_k, length, seen, SCALE, row.causal)
        gold = reference.flash_attn_varlen(*(t.double() for t in tensors), *rest)
        low = reference.flash_attn_varlen(*tensors, *rest)
        op = f"flash_attn_varlen, request {request} from query {start}"
        mine = out[rows][:, heads].contiguous()
        if isinstance(value, AttentionState):
            mine = AttentionState(mine, value.lse[heads][:, rows].contiguous())
            found += compare_states(op, mine, low, gold)
        else:
            found.append(compare(f"{op}: out", mine, low.out, gold.out))
    return found


def attend_by_torch(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attend with one kernel of PyTorch: q [B, N, Sq, 192], k [B, N, Skv, 192], v [B, N, Skv, Dv] -> [B, N, Sq, Dv]."""
    with sdpa_kernel(kernel):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE)


def peer_contenders(row: Row, inputs: Inputs, peers: ModuleType) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return FlashAttention-3, cuDNN and FlashAttention-2 as contenders, and the absent kernels with the reasons.

    cuDNN and FlashAttention-2 are kernels that PyTorch contains.
    """
    k = torch.cat((inputs.k_nope, inputs.k_pe[:, None].expand(-1, row.N, -1)), dim=-1).contiguous()
    values = inputs.v.contiguous()
    contenders, absent = {}, {}
    if peers.available()["fa3"]:
        call = partial(
            peers.fa3_prefill, inputs.q, k, values, inputs.cu_q, inputs.cu_k, row.Sq, row.Skv, SCALE, row.causal
        )
        contenders["FA3"] = Contender([call], lambda output: output[0])
    else:
        absent["FA3"] = "its library could not be loaded"
    torch_kernels = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2 (V padded)": SDPBackend.FLASH_ATTENTION}
    if row.causal and row.Sq != row.Skv:
        return contenders, absent | dict.fromkeys(torch_kernels, "torch aligns a causal mask at the top left")

    def per_head(tensor: Tensor) -> Tensor:
        return tensor.view(row.B, -1, *tensor.shape[1:]).transpose(1, 2)

    def packed(out: Tensor) -> Tensor:
        return out.transpose(1, 2).reshape(row.B * row.Sq, row.N, -1)[..., :VALUE]

    for who, kernel in torch_kernels.items():
        v = values if kernel == SDPBackend.CUDNN_ATTENTION else pad(values, (0, WIDTH - VALUE))
        call = partial(attend_by_torch, kernel, *(per_head(t) for t in (inputs.q, k, v)), row.causal)
        contenders[who] = Contender([call], packed)
    return contenders, absent


def make_case(row: Row, peers: ModuleType | None, backend: str | None, device: str = "cuda") -> Case:
    """Return the inputs of one row and its contenders (the implementations to time)."""
    inputs = make_inputs(row, device)

    def ours() -> AttentionState:
        return fast.attention.varlen.flash_attn_varlen_shared_rope(
            inputs.q, inputs.k_nope, inputs.k_pe, inputs.v, inputs.cu_q, inputs.cu_k, row.Sq, row.Skv, SCALE,
            row.causal, backend=backend,
        )  # fmt: skip

    others, absent = ({}, {}) if peers is None else peer_contenders(row, inputs, peers)
    return Case(
        row.flops, row.bytes, {OURS: Contender([ours]), **others}, lambda value: check(row, inputs, value), absent
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "prefill", __doc__.splitlines()[0], ROWS, make_case, argv, ways=("rested", "flushed"), bandwidth="read_gb_s",
        epilog="A row has B requests of Sq queries and Skv keys each, N heads, and a mask: causal or full.",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""Time the expanded prefill, bfloat16, head dims 192 and 128: fast and its peers.

    python -m tests.benchmarks.prefill
    python -m tests.benchmarks.prefill --peers .peers --rows 1,16384,16384,128,causal,equal --json prefill.json

`fast` gets the tensors of a prefill: keys and values stored head by head, as `expand_kv` returns them, and the rope
part of the keys once for all heads. The variants of `fast` are two backends:

- "fast": the backend that `backend=None` chooses, or the backend of `--backend`; the results file names it.
- "fast, portable Triton": the backend "triton". Only if "fast" is another backend.

The peers get the layout on which they are fastest: packed keys that contain the rope part for each head, and packed
values. Their times do not contain the conversion to this layout. "FA3, with the join" is the exception: its call first
copies both parts of the keys into one tensor, and gets the values as they are.

The peers are FlashAttention-3 ("FA3"), FlashAttention-4 ("FA4"), FlashInfer, and the kernels of cuDNN and of
FlashAttention-2 that PyTorch contains. FlashInfer plans a call before the time begins.

There are three ways of timing. A rested call starts after the GPU was idle for 0.1 s. Flushed calls follow each other
without a rest, so that the GPU reaches its power limit. Replayed calls run from a CUDA graph. For a request with Sq
query tokens, Skv keys and N heads, the FLOPs are 2 N Sq Skv (192 + 128), minus the FLOPs of the (query, key) pairs that
a causal mask removes.

The run compares its times with the targets for an H200 (LEAST_AGAINST_PEERS, LEAST_PORTABLE), and prints a verdict on
each target: "met" or "missed". The results file has the verdicts too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import fast.attention.varlen
import reference
from fast.backends import AttentionSizes, KernelRequest, select
from fast.parity import Parity, compare, compare_states
from reference.interfaces import AttentionState, QueryLenSupport

from .command_line import one_line
from .contest import OURS, Case, Contender, finite, run_benchmark
from .decode import spread_out
from .targets import judged, median, named, peer_ratio

NOPE, ROPE, VALUE = 128, 64, 128
WIDTH = NOPE + ROPE
SCALE = WIDTH**-0.5
DTYPE = torch.bfloat16
CHECKED_HEADS, CHECKED_ROWS = 3, 128
PORTABLE = f"{OURS}, portable Triton"
JOINED = "FA3, with the join"
JOINS = (JOINED,)  # peers whose calls join both parts of the keys
LENS = ("equal", "ragged")


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        B: number of requests.
        Sq: query tokens of the longest request.
        Skv: keys of the longest request.
        N: number of heads.
        mask: "causal" or "full".
        lens: "equal": every request has Sq query tokens. "ragged": random numbers from Sq / 64 to Sq. A request has
            Skv - Sq more keys than query tokens.
    """

    B: int
    Sq: int
    Skv: int
    N: int
    mask: str
    lens: str = "equal"

    @classmethod
    def parse(cls, *texts: str) -> Row:
        """Return the row of four sizes, a mask and a distribution of lengths, all given as text.

        Raises:
            ValueError: a text is not a number, or a value is out of range.
        """
        *sizes, mask, lens = texts
        batch, queries, keys, heads = (int(text) for text in sizes)
        known = mask in ("causal", "full") and lens in LENS
        if min(batch, queries, keys, heads) < 1 or queries > keys or not known:
            raise ValueError("sizes are at least 1, Sq is at most Skv, mask is causal or full, lens is equal or ragged")
        return cls(batch, queries, keys, heads, mask, lens)

    @property
    def causal(self) -> bool:
        """True if the keys after each query are masked."""
        return self.mask == "causal"

    @property
    def query_lens(self) -> list[int]:
        """Number of query tokens of each request."""
        if self.lens == "equal":
            return [self.Sq] * self.B
        draw = random.Random(0)
        return [draw.randint(max(1, self.Sq // 64), self.Sq) for _ in range(self.B)]

    @property
    def key_lens(self) -> list[int]:
        """Number of keys of each request."""
        return [queries + self.Skv - self.Sq for queries in self.query_lens]

    @property
    def flops(self) -> int:
        """Floating-point operations of both products; a causal mask removes half of the pairs of new tokens."""
        lens = zip(self.query_lens, self.key_lens, strict=True)
        pairs = sum(queries * keys - (queries * queries // 2 if self.causal else 0) for queries, keys in lens)
        return 2 * self.N * pairs * (WIDTH + VALUE)

    @property
    def bytes(self) -> int:
        """Bytes of `q`, `k_nope`, `k_pe` (shared by all heads), `v` and the output, each counted once."""
        per_query, per_key = self.N * (WIDTH + VALUE), self.N * (NOPE + VALUE) + ROPE
        return DTYPE.itemsize * (sum(self.query_lens) * per_query + sum(self.key_lens) * per_key)


ROWS = (
    Row(1, 4096, 4096, 128, "causal"),
    Row(1, 16384, 16384, 128, "causal"),
    Row(1, 4096, 16384, 128, "full"),
    Row(4, 2048, 2048, 128, "causal"),
    Row(1, 8192, 8192, 16, "causal"),
    Row(1, 32768, 32768, 16, "causal"),
    Row(32, 4096, 4096, 128, "causal", "ragged"),
    Row(1, 512, 65536, 16, "full"),
)
WAYS = ("flushed", "replayed")  # ways of timing that have targets
LEAST_AGAINST_PEERS = {  # target: least value of (time of the fastest peer) / (time of `fast`)
    ROWS[1]: 0.95, ROWS[3]: 0.98, ROWS[2]: 0.95, ROWS[5]: 0.95, ROWS[6]: 1.05, ROWS[7]: 1.05,
}  # fmt: skip
LEAST_PORTABLE = 0.65  # target: least value of (time of FA3) / (time of portable Triton)


@dataclass(frozen=True)
class Inputs:
    """Random packed requests, with T query tokens and S keys in total.

    Attributes:
        q: [T, N, 192].
        k_nope: [S, N, 128], stored head by head.
        k_pe: [S, 64].
        v: [S, N, 128], stored head by head.
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

    tokens, keys = sum(row.query_lens), sum(row.key_lens)

    def by_head() -> Tensor:
        return torch.randn(row.N, keys, NOPE, **kind).transpose(0, 1)

    def starts(lens: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)

    return Inputs(
        torch.randn(tokens, row.N, WIDTH, **kind), by_head(), torch.randn(keys, ROPE, **kind), by_head(),
        starts(row.query_lens), starts(row.key_lens),
    )  # fmt: skip


def checked_ranges(row: Row) -> list[tuple[int, int, int]]:
    """Return (request, first query, number of queries) of the query ranges that are compared with `reference`.

    The ranges lie at the start, in the middle and at the end of the first and of the last request.
    """
    found = []
    for request in sorted({0, row.B - 1}):
        queries = row.query_lens[request]
        length = min(queries, CHECKED_ROWS)
        starts = sorted({0, (queries - length) // 2, queries - length})
        found += [(request, start, length) for start in starts]
    return found


def check(row: Row, inputs: Inputs, value: AttentionState | Tensor) -> list[Parity]:
    """Check that the whole output is finite, and compare ranges of queries of a few heads with `reference`.

    A compared range has the n queries a, ..., a + n - 1. With a causal mask, the last query of the range attends the
    first Skv - Sq + a + n keys of its request. `reference` gets these keys only. In `reference`, the causal mask lets
    the last query attend all of these keys.

    Args:
        row: the shape.
        inputs: inputs of the call.
        value: output of the call: an attention state, or only its `out` [T, N, 128].
    """
    out = value.out if isinstance(value, AttentionState) else value
    heads = torch.tensor(spread_out(row.N, CHECKED_HEADS), device=out.device)
    found = [finite("flash_attn_varlen", out)]
    for request, start, length in checked_ranges(row):
        first, first_key = sum(row.query_lens[:request]) + start, sum(row.key_lens[:request])
        seen = row.Skv - row.Sq + start + length if row.causal else row.key_lens[request]
        rows, keys = slice(first, first + length), slice(first_key, first_key + seen)
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


def join(inputs: Inputs) -> Tensor:
    """Return whole keys [S, N, 192]: a copy of `k_nope`, and of `k_pe` for each head."""
    heads = inputs.k_nope.shape[1]
    return torch.cat((inputs.k_nope, inputs.k_pe[:, None].expand(-1, heads, -1)), dim=-1)


def library_contenders(
    row: Row, inputs: Inputs, k: Tensor, v: Tensor, peers: ModuleType
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the kernels of FlashAttention-3, FlashAttention-4 and FlashInfer, and the absent kernels with the reasons.

    Args:
        row: the shape.
        inputs: inputs of the call.
        k: [S, N, 192], whole keys, contiguous.
        v: [S, N, 128], contiguous.
        peers: module of the folder of peers.
    """
    q, cu_q, cu_k = inputs.q, inputs.cu_q, inputs.cu_k
    sizes = (cu_q, cu_k, row.Sq, row.Skv, SCALE, row.causal)
    there = {**peers.available(), **getattr(peers, "more_available", dict)()}
    contenders, absent = {}, {}

    def flashinfer() -> Callable:
        planned = peers.flashinfer_ragged(cu_q, cu_k, row.N, row.N, WIDTH, VALUE, SCALE, row.causal)
        return partial(planned, q, k, v)

    def fa4() -> Callable:
        peers.flashinfer()  # puts the loader of FA4's kernels on the path of Python
        return partial(peers.fa4, f"mla_{row.mask}", q, k, v, cu_q, cu_k, scale=SCALE)

    makers: tuple[tuple[str, str, Callable[[], Callable]], ...] = (
        ("FA3", "fa3", lambda: partial(peers.fa3_prefill, q, k, v, *sizes)),
        (JOINED, "fa3", lambda: lambda: peers.fa3_prefill(q, join(inputs), inputs.v, *sizes)),
        ("FA4", "fa4", fa4),
        ("FlashInfer", "flashinfer", flashinfer),
    )
    for who, library, make in makers:
        if not there.get(library, False):
            absent[who] = "its library could not be loaded"
            continue
        try:
            contenders[who] = Contender([make()], lambda output: output[0])
        except Exception as error:  # a peer that cannot plan this row is absent; the other peers are timed
            absent[who] = f"{type(error).__name__}: {one_line(error)}"
    return contenders, absent


def peer_contenders(row: Row, inputs: Inputs, peers: ModuleType) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return all peers as contenders, and the absent kernels with the reasons."""
    k, values = join(inputs), inputs.v.contiguous()
    contenders, absent = library_contenders(row, inputs, k, values, peers)
    torch_kernels = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2 (V padded)": SDPBackend.FLASH_ATTENTION}
    if row.causal and row.Sq != row.Skv:
        return contenders, absent | dict.fromkeys(torch_kernels, "torch aligns a causal mask at the top left")
    if row.lens != "equal":
        return contenders, absent | dict.fromkeys(torch_kernels, "torch needs requests of equal lengths")

    def per_head(tensor: Tensor) -> Tensor:
        return tensor.view(row.B, -1, *tensor.shape[1:]).transpose(1, 2)

    def packed(out: Tensor) -> Tensor:
        return out.transpose(1, 2).reshape(row.B * row.Sq, row.N, -1)[..., :VALUE]

    for who, kernel in torch_kernels.items():
        v = values if kernel == SDPBackend.CUDNN_ATTENTION else pad(values, (0, WIDTH - VALUE))
        call = partial(attend_by_torch, kernel, *(per_head(t) for t in (inputs.q, k, v)), row.causal)
        contenders[who] = Contender([call], packed)
    return contenders, absent


def backend_of(row: Row, device: torch.device, backend: str | None) -> str:
    """Return the name of the backend that serves a row."""
    request = KernelRequest(
        "flash_attn_varlen", device, DTYPE, (("qk_head_dim", WIDTH), ("v_head_dim", VALUE)),
        query_lens=QueryLenSupport.VARLEN, out_dtype=DTYPE, mask="causal" if row.causal else None, lse=True,
        sizes=AttentionSizes.rounded(row.B, row.N, row.Sq, row.Skv), direct=True,
    )  # fmt: skip
    return select(request, backend).name


def make_case(row: Row, peers: ModuleType | None, backend: str | None, device: str = "cuda") -> Case:
    """Return the inputs of one row and its contenders (the implementations to time)."""
    inputs = make_inputs(row, device)

    def ours(name: str | None) -> AttentionState:
        return fast.attention.varlen.flash_attn_varlen_shared_rope(
            inputs.q, inputs.k_nope, inputs.k_pe, inputs.v, inputs.cu_q, inputs.cu_k, row.Sq, row.Skv, SCALE,
            row.causal, backend=name,
        )  # fmt: skip

    served = backend_of(row, inputs.q.device, backend)
    own = {OURS: Contender([partial(ours, backend)])}
    if device == "cuda" and served != "triton":
        own[PORTABLE] = Contender([partial(ours, "triton")])
    others, absent = ({}, {}) if peers is None else peer_contenders(row, inputs, peers)
    return Case(
        row.flops, row.bytes, {**own, **others}, lambda value: check(row, inputs, value), absent, {"backend": served}
    )


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdicts on LEAST_AGAINST_PEERS and LEAST_PORTABLE of each row, flushed and replayed.

    A peer whose call joins the keys does not count.
    """
    found = []
    for row in rows:
        floor = LEAST_AGAINST_PEERS.get(Row(**row["dims"]))
        for way in WAYS:
            about = {"dims": row["dims"], "way": way}
            best = peer_ratio(row, way, [OURS], JOINS)
            if floor is not None and best is not None:
                what = f"{named(row)}: {best[0]}'s time / time of fast, {way}"
                found.append(judged(what, best[1], least=floor, **about))
            fa3, portable = (median(row, way, [who]) for who in ("FA3", PORTABLE))
            if None not in (fa3, portable):
                what = f"{named(row)}: FA3's time / time of portable Triton, {way}"
                found.append(judged(what, fa3 / portable, least=LEAST_PORTABLE, **about))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "prefill", __doc__.splitlines()[0], ROWS, make_case, argv, ways=("rested", "flushed", "replayed"),
        bandwidth="read_gb_s", verdicts=verdicts,
        epilog="A row has B requests of up to Sq queries and Skv keys, N heads, a mask (causal or full), and lengths "
        "(equal or ragged).",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

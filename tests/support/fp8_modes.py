"""Decode with e4m3 queries (8 bits) in PyTorch, with every rounding of the Triton kernels, to compute error budgets.

`StoredDecode` has the inputs of a decode over `fp8_e4m3` in any fp8 mode, so that one test can serve all modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

import reference
from fast.parity import compare_states
from reference.interfaces import (
    CONVERTED,
    E4M3_MAX,
    FP8_E4M3,
    AttentionState,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    to_e4m3,
)

from . import decode_inputs
from .decode_inputs import SCALE, make_stored_inputs
from .factories import integers
from .triton_mode import DEVICE

TILE = 32  # keys in a tile of the kernels; the products (probability x scale) of a tile are divided by one power of two
PRODUCT_COLUMNS = 32  # terms that a Tensor Core adds in one step
BLOCK_COLUMNS = 128  # columns of one e4m3 product; the kernels begin each product with the sum 0
KEPT_DIGITS = 13  # binary digits behind the point of a sum of e4m3 products in a Tensor Core


def quantised(ql: Tensor, q_pe: Tensor, scale: Tensor) -> list[Tensor]:
    """Return both parts of the queries in e4m3."""
    return [to_e4m3(x, scale.view(-1, 1)) for x in (ql, q_pe)]


def rounded_decode(
    queries, cache, plan, cache_format, kv_scale, mode, q_scale, out_dtype, in_e4m3=False, scale=SCALE,
    reference_keys: int | None = None,
) -> AttentionState:  # fmt: skip
    """Decode in float64, but round where the kernels round; the result is `low` in docs/correctness.md.

    Scores are rounded to float32. Probabilities are rounded to float16 (`mode` "fp8_query") or to e4m3 ("fp8_product").
    With `in_e4m3`, sums of products of e4m3 numbers are cut as Tensor Cores cut them (`products`). With
    `reference_keys`, each group of so many keys has a reference score of its own: its largest score. Otherwise a row
    has one reference score, its largest score. Only caches in `fp8_e4m3` have groups.
    """
    q = torch.cat([x.double() for x in queries], -1) * q_scale.double().view(-1, 1)
    tokens, heads, latent = queries[0].shape
    out, lse = torch.zeros(tokens, heads, latent, dtype=torch.float64), torch.full((heads, tokens), -torch.inf)
    starts = plan.query_start_loc.tolist()
    for request, length in enumerate(plan.seq_lens.tolist()):
        entries = reference.gather_and_maybe_dequant_cache(
            cache, plan.block_table[request : request + 1], integers(0, length), integers(0), length, cache_format,
            torch.float64, kv_scale,
        )  # fmt: skip
        scales = _scales(cache, plan.block_table[request], length, cache_format, latent)
        for token in range(starts[request], starts[request + 1]):
            seen = int(plan.visible_lens[token])
            if seen == 0:
                continue
            parts = [q[token, :, :latent], q[token, :, latent:]], [entries[:seen, :latent], entries[:seen, latent:]]
            e4m3_rope = cache_format.rope_dtype is None
            scores = products(parts[0][0], parts[1][0], in_e4m3)
            scores = (scores + products(parts[0][1], parts[1][1], in_e4m3 and e4m3_rope)).float() * scale
            largest = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - largest)
            total = weights.sum(-1)
            columns = latent // scales.shape[1]
            for block, values in enumerate(parts[1][0].split(columns, -1)):
                if reference_keys is None:
                    rounded = _rounded(weights.double(), scales[:seen, block], cache_format.scale_tile > 0, mode)
                else:
                    rounded = _rounded_in_groups(scores, largest, reference_keys, mode)
                product = in_e4m3 and mode == "fp8_product"
                sums = sum(
                    products(w, v.T, product) for w, v in zip(rounded.split(TILE, -1), values.split(TILE), strict=True)
                )
                out[token, :, block * columns : (block + 1) * columns] = sums / total[:, None]
            lse[:, token] = largest[:, 0] + total.log()
    return AttentionState(out.to(out_dtype), lse)


def check(value: AttentionState, low: AttentionState, queries, cache, plan, scale=SCALE, **options) -> None:
    """Assert that a state is within the budget that follows from `low`; rows without keys must be 0 and -inf."""
    gold = reference.mla_decode(*queries, cache, plan, scale, None, torch.float64, **options)
    for parity in compare_states("mla_decode", value, low, gold):
        assert parity.passed, parity
    unseen = plan.visible_lens == 0
    assert value.out[unseen].eq(0).all() and value.lse[:, unseen].eq(-torch.inf).all()


def _scales(cache: Tensor, table: Tensor, length: int, cache_format: CacheFormat, latent: int) -> Tensor:
    """Return the scales [S, column blocks] in the entries of a request; 1 if the entries have no scales."""
    if cache_format.scale_tile == 0:
        return torch.ones(length, 1, dtype=torch.float64)
    blocks, first = latent // cache_format.scale_tile, cache_format.layout(*cache_format.dims).scales
    entries = cache.view(torch.uint8)[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
    return entries[:, first : first + 4 * blocks].contiguous().view(torch.float32).double()


def _rounded(weights: Tensor, scales: Tensor, in_entries: bool, mode: str) -> Tensor:
    """Return probabilities [N, S], rounded as the kernels round them."""
    # the kernels may use another power of two as unit; float16 rounds the same, if no quotient is too small for float16
    if mode == "fp8_query":
        unit = torch.exp2(torch.floor(torch.log2(scales.max())) - 14) if in_entries else torch.tensor(2.0**-13)
        return (weights * scales / unit).to(torch.float16).double() * unit / scales
    if not in_entries:
        return to_e4m3(weights, torch.tensor(2.0**-8)).double() * 2.0**-8
    parts = []
    for part, own in zip(weights.split(TILE, -1), scales.split(TILE), strict=True):
        unit = torch.exp2(torch.ceil(torch.log2(own.max() / 448)))
        parts.append(to_e4m3(part * own, unit).double() * unit / own)
    return torch.cat(parts, -1)


def _rounded_in_groups(scores: Tensor, largest: Tensor, keys: int, mode: str) -> Tensor:
    """Return exp(score - largest) [N, S], rounded as multiples of the largest probability of each group of keys."""
    parts = []
    for group in scores.split(keys, -1):
        top = group.amax(-1, keepdim=True)
        weights = torch.exp(group - top).double()
        parts.append(_rounded(weights, weights.new_ones(group.shape[-1]), False, mode) * torch.exp(top - largest))
    return torch.cat(parts, -1)


def products(q: Tensor, k: Tensor, in_e4m3: bool, columns: int = BLOCK_COLUMNS) -> Tensor:
    """Return q k^T in float64. With `in_e4m3`, sums over `columns` columns are cut as Tensor Cores cut them.

    A Tensor Core adds 32 products to a sum in one step. It gives these 33 numbers the exponent of the largest of them,
    and cuts each number to `KEPT_DIGITS` digits behind the point.
    """
    if not in_e4m3 or q.shape[-1] == 0:
        return q @ k.T
    total = q.new_zeros(q.shape[0], k.shape[0])
    for q_block, k_block in zip(q.split(columns, -1), k.split(columns, -1), strict=True):
        sums = torch.zeros_like(total)
        for one, other in zip(q_block.split(PRODUCT_COLUMNS, -1), k_block.split(PRODUCT_COLUMNS, -1), strict=True):
            products = one[:, None] * other
            largest = torch.maximum(products.abs().amax(-1), sums.abs())
            step = torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-30))) - KEPT_DIGITS)
            cut = torch.trunc(products / step[..., None]).sum(-1) + torch.trunc(sums / step)
            sums = cut * step
        total += sums
    return total


@dataclass(frozen=True)
class StoredDecode:
    """Inputs of a decode over a cache in the format `fp8_e4m3`, on the CPU.

    Attributes:
        queries: absorbed queries [T, N, Lkv] and rope parts [T, N, R], in e4m3 in another mode than `converted`.
        cache: paged cache.
        plan: plan of the decode.
        kv_scale: scale of the cache.
        mode: fp8 mode.
        q_scale: scales of the queries, [N]; None for `converted`.
    """

    queries: tuple[Tensor, Tensor]
    cache: Tensor
    plan: DecodeMetadata
    kv_scale: Tensor
    mode: str
    q_scale: Tensor | None

    @classmethod
    def of(
        cls, mode: str, ql: Tensor, q_pe: Tensor, cache: Tensor, plan: DecodeMetadata, kv_scale: Tensor
    ) -> StoredDecode:
        """Return the inputs in a mode; in another mode than `converted`, the largest query of a head becomes 448."""
        if mode == CONVERTED:
            return cls((ql, q_pe), cache, plan, kv_scale, mode, None)
        largest = [x.float().abs().amax((0, 2)) for x in (ql, q_pe) if x.numel()]
        q_scale = torch.stack(largest).amax(0) / E4M3_MAX
        return cls(tuple(quantised(ql, q_pe, q_scale)), cache, plan, kv_scale, mode, q_scale)

    @classmethod
    def make(cls, mode: str, *lens_and_more) -> StoredDecode:
        """Return inputs of `make_stored_inputs`, which has the arguments behind `mode`."""
        inputs, kv_scale = make_stored_inputs(FP8_E4M3, *lens_and_more)
        return cls.of(mode, *inputs, kv_scale)

    @property
    def negated(self) -> tuple[Tensor, Tensor]:
        """The queries with the other sign, which changes no other bit."""
        return tuple((-x.float()).to(x.dtype) for x in self.queries)

    def launch(
        self,
        kernels: ModuleType,
        schedule: DecodeSchedule | None = None,
        scale: float = SCALE,
        out_dtype: torch.dtype | None = None,
    ) -> AttentionState:
        """Launch the decode of a backend on DEVICE and return the attention state on the CPU.

        By default, the output has the dtype of the queries, or float32 if the queries are in e4m3.
        """
        converted = self.mode == CONVERTED
        out_dtype = out_dtype or (self.queries[0].dtype if converted else torch.float32)
        given = decode_inputs.arguments(
            *self.queries, self.cache, self.plan, scale, schedule, out_dtype, FP8_E4M3, self.kv_scale
        )
        options = {} if converted else {"fp8_mode": self.mode, "q_scale": self.q_scale.to(DEVICE)}
        return AttentionState(*(x.cpu() for x in kernels.mla_decode(*given, **options)))

    def verdict(self, state: AttentionState) -> None:
        """Assert that a state is within the budget of the mode, for the softmax scale `SCALE`."""
        if self.mode == CONVERTED:
            decode_inputs.verdict(state, *self.queries, self.cache, self.plan, FP8_E4M3, self.kv_scale)
            return
        stored = self.cache, self.plan
        modes = FP8_E4M3, self.kv_scale, self.mode, self.q_scale
        low = rounded_decode(self.queries, *stored, *modes, state.out.dtype, DEVICE.type == "cuda")
        names = ("cache_format", "kv_scale", "fp8_mode", "q_scale")
        check(state, low, self.queries, *stored, **dict(zip(names, modes, strict=True)))

"""Compare products of quantised weights with products of bfloat16 weights: time, bytes and error, dims of DeepSeek-V3.

    python -m tests.benchmarks.weights
    python -m tests.benchmarks.weights --rows query_to_latent,16,128 expand_kv,4096,16 --json weights.json

A row is one product, with T tokens and N heads. Each row times several *contenders* (implementations of the product).
There are two kinds of products:

- Absorbed: `query_to_latent` and `latent_to_value` multiply by an absorbed weight, [N, 128, 512] or [N, 512, 128]. The
  contender "fast" multiplies by the weight in bfloat16. The other two contenders multiply by the weight in e4m3
  (`quantize_weight`): "fast, e4m3" with one scale for each head, and "fast, e4m3, one scale" with one scale for the
  weight. The peer "torch.bmm" is the product of cuBLAS with the weight in bfloat16; its output is stored head by head.
- Expansion: `expand_kv` expands latents into keys and values with a module `kv_b_proj` that stores its weight in e4m3.
  The contender "fast" multiplies by a dense copy of the weight in bfloat16 (`expand_kv`). The other two contenders call
  the module (`expand_kv_by_module`): "fast, weight-only module" converts the weight to bfloat16 in every call, and
  "fast, e4m3 module" rounds the latents to e4m3 and multiplies in e4m3.

The bytes of a contender are the least traffic of its product: each input and the stored weight (with its scales) are
read once, and the output is written once. K and M are the rows and columns of the matrix of a head.

- absorbed: 2 T N (K + M) + w N K M + s, where w is 2 for bfloat16 and 1 for e4m3, and s is 0 for bfloat16, 4 N for one
  scale for each head, and 4 for one scale.
- expansion: 2 T 512 + 2 T N 256 + w 512 N 256 + s, where s is 0 for the dense copy and 4 N 256 for a module.

`held_bytes` are the bytes of all weights that a contender keeps in memory. For "fast" in an expansion, these are the
dense copy and the stored weight of the module.

An error is the root mean square of the difference from a float64 product, divided by the root mean square of this
product. The float64 product of an absorbed weight uses the weight before quantisation. The float64 product of an
expansion uses the numbers that the module stores. The check that a row must pass compares with another float64 product,
which uses the numbers that the contender multiplies.

The field "scales" of the results file has the errors of the absorbed weights themselves, with one scale for the weight
and with one scale for each head. These weights are random normal weights, and the weights of the checkpoint that ships
with `fast`.

The run compares the times of absorbed products with the target MOST_OVER_BMM, and prints a verdict on each row: "met"
or "missed". The results file has the verdicts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import fast
import reference
from fast.parity import Parity, compare
from reference.interfaces import E4M3, E4M3_MAX, LEAST_WEIGHT, MLAConfig, QuantizedWeight

from .contest import OURS, Case, Contender, run_benchmark
from .targets import judged, median
from .timing import Call, input_sets

LATENT, NOPE, VALUE = 512, 128, 128
DTYPE = torch.bfloat16
MOST_SETS = 256  # largest number of sets of inputs; a weight of 1 MB (16 heads, e4m3) needs many sets to fill the L2
EXPANSION = "expand_kv"
BMM = "torch.bmm"
OPS = ("query_to_latent", "latent_to_value", EXPANSION)
PER_HEAD, ONE_SCALE = f"{OURS}, e4m3", f"{OURS}, e4m3, one scale"
WEIGHT_ONLY, ROUNDING = f"{OURS}, weight-only module", f"{OURS}, e4m3 module"
# target: the time of `fast` is at most MOST_OVER_BMM x the time of `torch.bmm`, for at most TARGET_TOKENS tokens
MOST_OVER_BMM, TARGET_TOKENS = 1.05, 256
WAYS = ("flushed", "replayed")
CHECKPOINT = Path(fast.__file__).parent / "assets" / "tiny-mla"


@dataclass(frozen=True)
class Row:
    """One product.

    Attributes:
        op: query_to_latent, latent_to_value or expand_kv.
        T: number of tokens.
        N: number of heads.
    """

    op: str
    T: int
    N: int

    @classmethod
    def parse(cls, op: str, tokens: str, heads: str) -> Row:
        """Return the row of an op and two sizes, all given as text.

        Raises:
            ValueError: the op is unknown, or a size is invalid.
        """
        row = cls(op, int(tokens), int(heads))
        if op not in OPS or min(row.T, row.N) < 1:
            raise ValueError(f"op is one of {', '.join(OPS)}; sizes are at least 1")
        return row

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows K and columns M of the matrix of a head."""
        return {"query_to_latent": (NOPE, LATENT), "latent_to_value": (LATENT, VALUE)}.get(
            self.op, (LATENT, NOPE + VALUE)
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of the product."""
        k, m = self.matrix
        return 2 * self.T * self.N * k * m

    def bytes_with(self, weight_bytes: int, scale_bytes: int) -> int:
        """Return the least traffic; each number of the weight has `weight_bytes`, all scales together `scale_bytes`."""
        k, m = self.matrix
        read = self.T * k * (1 if self.op == EXPANSION else self.N)  # all heads read the same latent
        return DTYPE.itemsize * (read + self.T * self.N * m) + weight_bytes * self.N * k * m + scale_bytes


ABSORBED_TOKENS = (1, 4, 16, 64, 128, 256, 512)
ROWS = (
    *(Row(op, tokens, heads) for op in OPS[:2] for heads in (128, 16) for tokens in ABSORBED_TOKENS),
    *(Row(EXPANSION, tokens, heads) for heads in (128, 16) for tokens in (512, 4096)),
)


class WeightOnlyLinear(nn.Module):
    """A linear module with an e4m3 weight and one scale for each output; it multiplies in the dtype of its input."""

    def __init__(self, weight: Tensor):
        super().__init__()
        scale = weight.float().abs().amax(1, keepdim=True).clamp(min=LEAST_WEIGHT) / E4M3_MAX
        self.register_buffer("rows", (weight.float() / scale).to(E4M3))
        self.register_buffer("scale", scale)

    def numbers(self) -> Tensor:
        """Return the float64 numbers that the module stores."""
        return self.rows.double() * self.scale.double()

    def exact(self, x: Tensor) -> Tensor:
        """Return the float64 product of the numbers that `forward` multiplies."""
        return x.double() @ self._converted(x.dtype).double().T

    def _converted(self, dtype: torch.dtype) -> Tensor:
        return self.rows.to(dtype) * self.scale.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Convert the weight and multiply."""
        return nn.functional.linear(x, self._converted(x.dtype))


class RoundingLinear(WeightOnlyLinear):
    """A linear module that rounds its input to e4m3, with one scale for each token, and multiplies in e4m3."""

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(1, keepdim=True).float().clamp(min=LEAST_WEIGHT) / E4M3_MAX
        return (x / scale).to(E4M3), scale

    def exact(self, x: Tensor) -> Tensor:
        """Return the float64 product of the numbers that `forward` multiplies."""
        stored, scale = self._rounded(x)
        return (stored.double() * scale.double()) @ self.numbers().T

    def forward(self, x: Tensor) -> Tensor:
        """Round the input and multiply; on a CPU in float64, as not every version of PyTorch multiplies e4m3 there."""
        if not x.is_cuda:
            return self.exact(x).to(x.dtype)
        stored, scale = self._rounded(x)
        return torch._scaled_mm(stored, self.rows.T, scale_a=scale, scale_b=self.scale.T, out_dtype=x.dtype)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of `found` - `exact`, divided by the root mean square of `exact`."""
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def dense_numbers(weight: QuantizedWeight) -> Tensor:
    """Return the float64 numbers that an absorbed weight in e4m3 stands for."""
    return weight.values.double() * weight.scale.double().reshape(-1, 1, 1)


def random_weight(heads: int, device: str) -> Tensor:
    """Return a random weight of `kv_b_proj`, [N (P + V), Lkv]; its products have the standard deviation 1."""
    return (torch.randn(heads * (NOPE + VALUE), LATENT, device=device) * LATENT**-0.5).to(DTYPE)


@dataclass
class Products:
    """The contenders of a row by name, with everything that the check of their outputs needs.

    Attributes:
        calls: calls of each contender, one for each set of inputs.
        low: for each contender, a function that returns a bfloat16 result for the first set of inputs; the budget is
            computed from the error of this result.
        gold: for each contender, a function that returns the float64 product of the numbers that this contender
            multiplies.
        exact: float64 product; the measured error of each contender is its difference from this product.
        weight_bytes: for each contender, the bytes of one number of the stored weight, and the bytes of all scales.
        held_bytes: for each contender, the bytes of all weights that must be held.
    """

    calls: dict[str, list[Call]]
    low: dict[str, Callable[[], Tensor]]
    gold: dict[str, Callable[[], Tensor]]
    exact: Tensor
    weight_bytes: dict[str, tuple[int, int]]
    held_bytes: dict[str, int]


def absorbed_products(row: Row, sets: int, backend: str | None, device: str) -> Products:
    """Return the products of an absorbed weight: in bfloat16, and in e4m3 with both kinds of scales."""
    ours, theirs = getattr(fast, row.op), getattr(reference, row.op)
    k, m = row.matrix
    xs = [torch.randn(row.T, row.N, k, device=device).to(DTYPE) for _ in range(sets)]
    # the weight of a layer is a view of the weight of `kv_b_proj`
    which = OPS.index(row.op)
    weights = [fast.absorb(*fast.split_kv_b_proj(random_weight(row.N, device), row.N, NOPE, VALUE))[which]
               for _ in range(sets)]  # fmt: skip
    stored = {OURS: weights, **{who: [fast.quantize_weight(weight, per_head) for weight in weights]
                                for who, per_head in ((PER_HEAD, True), (ONE_SCALE, False))}}  # fmt: skip
    numbers = {who: each[0].double() if who == OURS else dense_numbers(each[0]) for who, each in stored.items()}
    numbers[BMM] = numbers[OURS]
    x = xs[0]
    size = row.N * k * m
    weight_bytes = {OURS: (DTYPE.itemsize, 0), PER_HEAD: (1, 4 * row.N), ONE_SCALE: (1, 4), BMM: (DTYPE.itemsize, 0)}
    return Products(
        {
            **{who: [partial(ours, x, weight, backend=backend) for x, weight in zip(xs, each, strict=True)]
               for who, each in stored.items()},
            BMM: [partial(torch.bmm, x.transpose(0, 1), weight) for x, weight in zip(xs, weights, strict=True)],
        },
        {who: partial(theirs, x, (stored | {BMM: weights})[who][0]) for who in numbers},
        {who: partial(theirs, x.double(), each) for who, each in numbers.items()},
        theirs(x.double(), weights[0].double()), weight_bytes,
        {who: each * size + scales for who, (each, scales) in weight_bytes.items()},
    )  # fmt: skip


def expansions(row: Row, sets: int, backend: str | None, device: str) -> Products:
    """Return the expansions of latents by a dense copy, and by modules that store the same weight in e4m3."""
    dims = row.N, NOPE, VALUE
    xs = [torch.randn(row.T, LATENT, device=device).to(DTYPE) for _ in range(sets)]
    originals = [random_weight(row.N, device) for _ in range(sets)]
    modules = {who: [kind(weight) for weight in originals]
               for who, kind in ((WEIGHT_ONLY, WeightOnlyLinear), (ROUNDING, RoundingLinear))}  # fmt: skip
    copies = [fast.dense_weight(module, LATENT, DTYPE) for module in modules[WEIGHT_ONLY]]
    splits = [fast.split_kv_b_proj(copy, *dims) for copy in copies]
    x, copy, (w_uk, w_uv) = xs[0], copies[0], splits[0]

    def by_head(product: Tensor) -> Tensor:
        return product.unflatten(1, (row.N, -1))

    def low(who: str) -> Tensor:
        # `reference` does not have the arithmetic of the module; so low is the module's exact product, rounded once
        return by_head(modules[who][0].exact(x)).to(DTYPE)

    size, scales = copy.numel(), 4 * len(copy)
    return Products(
        {
            OURS: [partial(fast.expand_kv, x, *split) for x, split in zip(xs, splits, strict=True)],
            **{who: [partial(fast.expand_kv_by_module, x, module, *dims) for x, module in zip(xs, each, strict=True)]
               for who, each in modules.items()},
        },
        {
            OURS: lambda: torch.cat(reference.expand_kv(x, w_uk, w_uv), -1),
            **{who: partial(low, who) for who in modules},
        },
        {
            OURS: lambda: by_head(x.double() @ copy.double().T),
            **{who: lambda who=who: by_head(modules[who][0].exact(x)) for who in modules},
        },
        by_head(x.double() @ modules[WEIGHT_ONLY][0].numbers().T),
        {OURS: (DTYPE.itemsize, 0), **dict.fromkeys(modules, (1, scales))},
        {OURS: (DTYPE.itemsize + 1) * size + scales, **dict.fromkeys(modules, size + scales)},
    )  # fmt: skip


def make_case(row: Row, peers: ModuleType | None, backend: str | None, device: str = "cuda") -> Case:
    """Return the inputs of one row and its contenders (the implementations to time).

    The argument `peers` is not used, because no other project offers these products.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 1
    num_bytes = row.bytes_with(DTYPE.itemsize, 0)
    # all sets together must not fit into the L2 cache, not even with the weight in e4m3, which has the fewest bytes
    sets = input_sets(row.bytes_with(1, 0), l2_bytes, MOST_SETS)
    products = (expansions if row.op == EXPANSION else absorbed_products)(row, sets, backend, device)
    errors: dict[str, float] = {}

    def view(who: str, output: Any) -> tuple[str, Tensor]:
        if who == BMM:
            output = output.transpose(0, 1)
        return who, torch.cat(output, -1) if row.op == EXPANSION else output

    def check(viewed: tuple[str, Tensor]) -> list[Parity]:
        who, output = viewed
        errors[who] = relative_error(output, products.exact)
        return [compare(row.op, output, products.low[who](), products.gold[who]())]

    contenders = {who: Contender(calls, partial(view, who)) for who, calls in products.calls.items()}
    figures = {
        "contender_bytes": {who: row.bytes_with(*each) for who, each in products.weight_bytes.items()},
        "held_bytes": products.held_bytes,
        "errors": errors,
    }
    return Case(row.flops, num_bytes, contenders, check, figures=figures)


def absorbed_weights() -> Iterator[tuple[str, Tensor]]:
    """Yield absorbed weights with their names: those of a random layer, and those of every layer of the checkpoint."""
    for name, weight in zip(OPS, _absorbed(random_weight(128, "cpu"), 128, NOPE, VALUE), strict=False):
        yield f"random, {name}", weight
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = MLAConfig.from_hf(AutoConfig.from_pretrained(CHECKPOINT, local_files_only=True))
    tensors = load_file(CHECKPOINT / "model.safetensors")
    for key in sorted(key for key in tensors if key.endswith("kv_b_proj.weight")):
        dims = config.num_heads, config.qk_nope_head_dim, config.v_head_dim
        for name, weight in zip(OPS, _absorbed(tensors[key], *dims), strict=False):
            yield f"tiny-mla, {key.split('.self_attn')[0].removeprefix('model.')}, {name}", weight


def _absorbed(weight: Tensor, *dims: int) -> tuple[Tensor, Tensor]:
    return fast.absorb(*fast.split_kv_b_proj(weight, *dims))


def scale_errors() -> dict[str, list[dict[str, Any]]]:
    """Return the errors of absorbed weights in e4m3 with one scale and with one scale for each head.

    The error "all" is the error of the whole weight, and "worst head" is the largest error of one head.
    """
    torch.manual_seed(0)
    rows = []
    for name, weight in absorbed_weights():
        found: dict[str, Any] = {"weight": name, "N": weight.shape[0]}
        for kind, per_head in (("one scale", False), ("one for each head", True)):
            numbers, exact = dense_numbers(fast.quantize_weight(weight, per_head)), weight.double()
            heads = [relative_error(numbers[head], exact[head]) for head in range(len(exact))]
            found[kind] = {"all": relative_error(numbers, exact), "worst head": max(heads)}
        rows.append(found)
    return {"scales": rows}


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on MOST_OVER_BMM of each absorbed product, flushed and replayed."""
    found = []
    for row in rows:
        op, tokens, heads = row["dims"].values()
        for way in WAYS:
            ours, bmm = (median(row, way, [who]) for who in (OURS, BMM))
            if tokens <= TARGET_TOKENS and None not in (ours, bmm):
                what = f"{op}, T {tokens}, N {heads}: time of fast / time of {BMM}, {way}"
                found.append(judged(what, ours / bmm, most=MOST_OVER_BMM, dims=row["dims"], way=way))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "weights", __doc__.splitlines()[0], ROWS, make_case, argv, ways=WAYS,
        bandwidth="read_gb_s", epilog="A row has an op, T tokens and N heads.", more=scale_errors,
        verdicts=verdicts,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""Measure what fp8 caches cost a model: more bits per byte of a text, and larger errors of its hidden states.

    python -m tests.benchmarks.fp8_loss
    python -m tests.benchmarks.fp8_loss --windows 8 --draws 3 --json fp8_loss.json

The script runs on the CPU and takes about three minutes on two cores. It has three parts.

1. **Bits per byte** of the shipped checkpoint tiny-mla; fewer bits are better. There are two texts: the eight shipped
   prompts, and windows of 1024 bytes of the files in tests/data/stdlib_sample, on which the model was not trained. The
   scales of `fp8_e4m3` come from a calibration on the prompts, as in `python -m fast`. There are two ways to read:

   - "cache": every key is read from the cache, as in a decode.
   - "steps": steps of 256 tokens, as in a server. Each step takes the path that `use_mla` chooses. Both paths read the
     tokens of earlier steps from the cache. The absorbed path also reads the tokens of the step itself from the cache;
     the expanded path reads them before they are stored. With tiny-mla on a CPU, later steps take the absorbed path in
     float32, and all steps take the expanded path in bfloat16.

   A model in float32 runs over caches in float32, bfloat16 and `fp8_e4m3`, and over a cache with only the latents in
   e4m3. A model in bfloat16 runs over caches in bfloat16 and `fp8_e4m3`. The cache of a model in float32 is in float32
   as well: for "bfloat16" and "latent in e4m3", the script rounds the entries before they are written.
2. **Standard deviations of the scores** of each layer, on the prompts: of the product with the latent, and of the
   product with the rope part. A third and a fourth number are the standard deviations of the errors of these products.
3. **Random models** of Lkv 512 and R 64: the error of the last hidden states over each cache, every key read from the
   cache. A second series multiplies the projection to the rope keys by 8.

An increase compares the same pieces of text (prompts or windows) over two caches. Its standard error treats the pieces
as independent draws from a larger text.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache

import fast
import reference
from fast.__main__ import make_parser
from fast.demo.families import DEFAULTS, read_family
from fast.demo.job import Job, prepare
from fast.demo.predictions import bits_per_byte
from fast.integrations.transformers import calibrate_model, restore, use_mla
from fast.kernels.cpu import cache as cpu_cache
from reference.interfaces import COMPUTE_FORMAT, E4M3_MAX, FP8_DS_MLA, FP8_E4M3, CacheFormat, to_e4m3

from ..support.stdlib_sample import BOS, WINDOW, windows
from .command_line import CannotRun, check_at_least_one, run, write_report
from .report import package_version, provenance

LIMIT = 0.01  # largest increase of the bits per byte over bfloat16 that the project accepts
STEP = 256  # tokens of one step of a window
BATCH = 8  # windows of one step
DRAWS, ROPE_SIZES = 12, (1.0, 8.0)
LATENT, ROPE = 512, 64  # dims of the random models
Rounding = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def in_e4m3(x: Tensor) -> Tensor:
    """Return `x` after it was quantised to e4m3, with its largest value at 448, and dequantised."""
    scale = (x.abs().amax() / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return to_e4m3(x, scale).to(x.dtype) * scale


@dataclass(frozen=True)
class Cache:
    """A cache: its format, and a function that rounds latents and rope parts before they are written (None: none)."""

    cache_format: CacheFormat
    rounding: Rounding | None = None


FP8, LATENT_ONLY = "fp8_e4m3", "latent in e4m3"
EXACT, FP8_CACHE = Cache(COMPUTE_FORMAT), Cache(FP8_E4M3)
HALF = Cache(COMPUTE_FORMAT, lambda latent, rope: (latent.bfloat16().to(latent.dtype), rope.bfloat16().to(rope.dtype)))
CACHES = {
    "float32": {
        "float32": EXACT, "bfloat16": HALF, FP8: FP8_CACHE,
        LATENT_ONLY: Cache(COMPUTE_FORMAT, lambda latent, rope: (in_e4m3(latent), rope)),
    },
    "bfloat16": {"bfloat16": EXACT, FP8: FP8_CACHE},
}  # fmt: skip
MEASURES = (("prompts", "cache"), ("windows", "steps"), ("windows", "cache"))  # text, way to read


@contextmanager
def entries_rounded(rounding: Rounding | None) -> Iterator[None]:
    """Let the backend "cpu" round latents and rope parts before it writes them to a cache; None rounds nothing."""
    if rounding is None:
        yield
        return
    write = cpu_cache.concat_and_cache_mla

    def rounded(kv_c_normed: Tensor, k_pe: Tensor, *others) -> None:
        if kv_c_normed.shape[0]:
            kv_c_normed, k_pe = rounding(kv_c_normed, k_pe)
        write(kv_c_normed, k_pe, *others)

    with mock.patch.object(cpu_cache, "concat_and_cache_mla", rounded):
        yield


def make_job(dtype: str) -> Job:
    """Return the main job (`python -m fast`) over `fp8_e4m3`, with the shipped checkpoint and the shipped prompts."""
    options = ["--ops", "fast", "--device", "cpu", "--dtype", dtype, "--cache-format", FP8, "--no-picture"]
    args = make_parser().parse_args(options, argparse.Namespace(**dict.fromkeys(DEFAULTS)))
    return prepare(args, fast, reference, job_type=read_family(args).job_type)


def prompt_bits(job: Job, cache: Cache) -> list[float]:
    """Return the bits per byte of each prompt of a job, every key read from the cache."""
    prompt_ids, found = job.prompt_ids, []
    try:
        with entries_rounded(cache.rounding):
            for ids in prompt_ids:
                job.prompt_ids = [ids]
                found.append(bits_per_byte(job, cache.cache_format))
    finally:
        job.prompt_ids = prompt_ids
    return found


@torch.inference_mode()
def window_bits(job: Job, cache: Cache, targets: Tensor, every_key: bool) -> list[float]:
    """Return the bits per byte of each window.

    Args:
        job: the model, its packages and the scales of its caches.
        cache: the cache.
        targets: [windows, bytes of a window]. A bos token precedes each window, so that each byte is predicted.
        every_key: True reads every key from the cache. False lets `use_mla` choose the path of each step.
    """
    changes = {"cache_format": cache.cache_format}
    if not cache.cache_format.layer_scale:
        changes["kv_scales"] = None
    if every_key:
        changes |= job.options_to_read_the_cache(STEP)
    inputs, found = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=BOS), []
    job.install("fast", **changes)
    try:
        with entries_rounded(cache.rounding):
            for tokens, wanted in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
                past, nats = DynamicCache(config=job.model.config), torch.zeros(len(tokens), dtype=torch.float64)
                for new, next_bytes in zip(tokens.split(STEP, 1), wanted.split(STEP, 1), strict=True):
                    logits = job.model(new, past_key_values=past, use_cache=True).logits.double()
                    losses = torch.nn.functional.cross_entropy(logits.mT, next_bytes, reduction="none")
                    nats += losses.sum(1)
                found += (nats / math.log(2) / targets.shape[1]).tolist()
    finally:
        restore(job.model)
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def compare(found: Sequence[float], base: Sequence[float], sizes: Sequence[int]) -> dict:
    """Compare the bits per byte of the same pieces of text over two caches.

    Args:
        found: bits per byte of each piece over one cache; at least two pieces.
        base: bits per byte of each piece over the other cache.
        sizes: bytes of each piece.

    Returns:
        Dictionary with the relative `increase` of the bits of all pieces together (0.01 is 1 percent), its
        `standard_error` (of a ratio of two sums), the `quartiles` of the increases of single pieces, and the number of
        pieces that need `more` bits.
    """
    bits = [(size * new, size * old) for new, old, size in zip(found, base, sizes, strict=True)]
    total = sum(old for _, old in bits)
    increase = sum(new for new, _ in bits) / total - 1
    residuals = [new - (1 + increase) * old for new, old in bits]
    return {
        "increase": increase,
        "standard_error": math.sqrt(len(bits)) * statistics.stdev(residuals) / total,
        "quartiles": quartiles([new / old - 1 for new, old in bits]),
        "more": sum(new > old for new, old in bits),
    }


def measure_bits(job: Job, dtype: str, text: str, keys: str, targets: Tensor) -> dict:
    """Return the bits per byte of one text, read in one way, over every cache, and the comparisons of the caches."""
    # a token of tiny-mla is a byte; the bos is not predicted
    sizes = [len(ids) - 1 for ids in job.prompt_ids] if text == "prompts" else [targets.shape[1]] * len(targets)
    pieces = {
        name: prompt_bits(job, cache) if text == "prompts" else window_bits(job, cache, targets, keys == "cache")
        for name, cache in CACHES[dtype].items()
        if name != LATENT_ONLY or keys == "cache"
    }
    bits = {
        name: sum(x * size for x, size in zip(each, sizes, strict=True)) / sum(sizes) for name, each in pieces.items()
    }
    over = {
        base: {name: compare(each, pieces[base], sizes) for name, each in pieces.items() if name not in bases}
        for base, bases in (("float32", ("float32",)), ("bfloat16", ("float32", "bfloat16")))
        if base in pieces
    }
    return {"model": dtype, "text": text, "keys": keys, "pieces": len(sizes), "bytes": sum(sizes),
            "bits_per_byte": bits, "over": over, "each": pieces}  # fmt: skip


@torch.no_grad()
def score_deviations(job: Job) -> list[dict]:
    """Return standard deviations of the two products of a score, and of their errors over e4m3, for each layer.

    The scores are those of all heads and of all pairs of a query and a key that it attends, in all prompts of the job.
    """
    parts: list[dict[str, list[Tensor]]] = [
        {name: [] for name in ("latent", "rope", "latent_error", "rope_error")} for _ in job.model.model.layers
    ]
    for ids in job.prompt_ids:
        states = job.model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        for at, (layer, hidden) in enumerate(zip(job.model.model.layers, states[:-1], strict=True)):
            attention = reference.MLAAttention.from_hf(layer.self_attn)
            c = attention.config
            q, latents, ropes = attention.project(layer.input_layernorm(hidden[0]), torch.arange(len(ids)))
            q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
            ql_nope = reference.query_to_latent(q_nope, reference.absorb(*attention.up_projections())[0])
            scale = torch.tensor(job.kv_scales[f"layers.{at}.self_attn"])
            for name, queries, keys in (("latent", ql_nope, latents), ("rope", q_pe, ropes)):
                rounded = to_e4m3(keys, scale).to(keys.dtype) * scale
                for kind, numbers in ((name, keys), (f"{name}_error", rounded - keys)):
                    scores = torch.einsum("tnd,sd->nts", queries, numbers)[:, seen] * c.softmax_scale
                    parts[at][kind].append(scores.flatten())
    return [
        {"layer": at, **{name: torch.cat(each).double().std().item() for name, each in found.items()}}
        for at, found in enumerate(parts)
    ]


# random models with the dims of fp8_ds_mla


def batches_of(tokens: Tensor) -> list[dict[str, Tensor]]:
    """Return one batch of prompts for each row of `tokens`, as `calibrate_model` takes them."""
    return [dict(input_ids=row[None], attention_mask=torch.ones_like(row[None])) for row in tokens]


def random_model(seed: int, rope_size: float = 1.0) -> transformers.PreTrainedModel:
    """Return a random model with Lkv 512 and R 64; its projection to the rope keys is multiplied by `rope_size`."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(
        vocab_size=61, hidden_size=96, intermediate_size=64, num_hidden_layers=2, first_k_dense_replace=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=32,
        qk_rope_head_dim=ROPE, v_head_dim=32, max_position_embeddings=64, initializer_range=0.1, n_routed_experts=2,
        n_group=1, topk_group=1, num_experts_per_tok=1, moe_intermediate_size=8, rope_interleave=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_proj_with_mqa.weight[LATENT:] *= rope_size
    return model


def random_errors(seed: int, rope_size: float) -> dict[str, dict[str, float]]:
    """Return the relative errors of the last hidden states of a random model, every key read from the cache.

    Returns:
        `found[base][cache]` is the norm of the difference between the hidden states over `cache` and over `base`,
        divided by the norm over `base`. A base is a cache in "float32" or in "bfloat16".
    """
    model = random_model(seed, rope_size)
    ids = torch.randint(1, 61, (1, 40))
    scales = calibrate_model(model, batches_of(ids), max_new_tokens=1)

    def hidden(cache: Cache) -> Tensor:
        kv_scales = scales if cache.cache_format.layer_scale else None
        use_mla(model, decode_threshold=64, cache_format=cache.cache_format, kv_scales=kv_scales)
        try:
            with torch.no_grad(), entries_rounded(cache.rounding):
                return model.model(ids, use_cache=False).last_hidden_state.double()
        finally:
            restore(model)

    caches = {"float32": EXACT, "bfloat16": HALF, FP8: FP8_CACHE, "fp8_ds_mla": Cache(FP8_DS_MLA)}
    states = {name: hidden(cache) for name, cache in caches.items()}
    return {
        base: {
            name: float((each - states[base]).norm() / states[base].norm())
            for name, each in states.items()
            if name not in ("float32", base)
        }
        for base in ("float32", "bfloat16")
    }


def measure_random_models(rope_size: float, draws: int) -> dict:
    """Return the errors of random models, and the errors over `fp8_ds_mla` divided by the errors over `fp8_e4m3`."""
    errors = [random_errors(seed, rope_size) for seed in range(draws)]
    ratios = {}
    for base in errors[0]:
        values = sorted(each[base]["fp8_ds_mla"] / each[base][FP8] for each in errors)
        ratios[base] = {"median": statistics.median(values), "quartiles": quartiles(values), "values": values}
    medians = {
        base: {name: statistics.median(each[base][name] for each in errors) for name in errors[0][base]}
        for base in errors[0]
    }
    return {"rope_size": rope_size, "draws": draws, "errors": medians, "ratios": ratios}


def line_of(row: dict) -> str:
    """Return the increases of one row of the bits per byte as one line."""
    said = [
        f"{name} over {base} {found['increase']:+.2%} (standard error {found['standard_error']:.2%})"
        for base, comparisons in row["over"].items()
        for name, found in comparisons.items()
    ]
    return f"{row['text']}, {row['keys']}, model in {row['model']}: {'; '.join(said)}"


def run_main(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Measure, print one line for each measurement, and write the results file if `--json` is given."""
    if (arguments.windows is not None and arguments.windows < 2) or arguments.draws < 2:
        raise CannotRun("--windows and --draws: expected at least 2, because the report has quartiles")
    check_at_least_one(arguments, "threads")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise CannotRun(f"--json: expected a file in a folder that exists, got {arguments.json}")
    started, threads, targets = time.perf_counter(), torch.get_num_threads(), windows()
    if arguments.windows is not None:
        targets = targets[:: -(-len(targets) // arguments.windows)]
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    rows = []
    try:
        head = provenance("fp8_loss", argv, transformers=package_version("transformers"))
        for dtype in CACHES:
            job = make_job(dtype)
            for text, keys in MEASURES:
                rows.append(measure_bits(job, dtype, text, keys, targets))
                print(line_of(rows[-1]), flush=True)
            if dtype == "float32":
                scores = score_deviations(job)
                for each in scores:
                    print(", ".join(f"{name} {value:.3g}" for name, value in each.items()), flush=True)
        random = [measure_random_models(size, arguments.draws) for size in ROPE_SIZES]
    finally:
        torch.set_num_threads(threads)
    for each in random:
        for base, ratio in each["ratios"].items():
            print(f"random models, rope keys x {each['rope_size']:g}, errors over {base}: "
                  f"fp8_ds_mla / fp8_e4m3 {ratio['median']:.2f}")  # fmt: skip
    if arguments.json is not None:
        report = {**head, "window": WINDOW, "step": STEP, "limit": LIMIT, "bits": rows, "scores": scores,
                  "random_models": random, "seconds": time.perf_counter() - started}  # fmt: skip
        write_report(arguments.json, report)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the docstring of the module. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fp8_loss", description="Measure what fp8 caches cost a model, on the CPU.",
        epilog="Exit status: 0 on success, 2 if the benchmark cannot run here.",
    )  # fmt: skip
    parser.add_argument("--windows", type=int, metavar="N", help="at most so many windows (default: all)")
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help="random models (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch decides)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions and results")
    return run(run_main, argv, parser)


if __name__ == "__main__":
    sys.exit(main())

"""Launch every op and all variants of the Hopper kernels under compute-sanitizer, on valid and on hostile indices.

    compute-sanitizer --tool memcheck python -m tests.memory_checks 1/8

Hostile indices are indices out of range. With such indices, a kernel must not read or write outside its tensors. The
launches are divided into equal parts ("shards"), and `1/8` runs the first of eight shards. With
`--every-thread-arrives` the kernels are compiled in a form that the tool racecheck understands (see `sanitizers.py`).

Each shard prints the kernels that Triton compiled. `never_launched` reads the output of all shards, and returns the
kernels and the `VARIANTS` of Hopper kernels that no shard launched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .support.commands import ROOT

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
FAR = (2147480000, -2147480000, -1, 1 << 20)  # values that are out of range for block ids, lengths and slots
HOSTILE = (
    "block_table",
    "block_mapping",
    "slot_mapping",
    "seq_lens",
    "visible_lens",
    "first_visible",
    "tile_ranges",
    "split_offsets",
    "local_cu_seq_lens",
)
# Lengths of the three requests of a batch. A tile is 64 keys. A TINY request has at most one tile. The first SHORT
# request has two splits if there are more than 32 heads. The first LONG request is too long for `two_phases_kernel`.
TINY, SHORT, LONG = [20, 33, 0], [1085, 70, 0], [2950, 70, 0]
DECODES = [  # heads, tokens of a block, (latent, rope) width, dtype of the queries, dtype of the outputs, lengths
    (3, 16, (256, 32), BF16, BF16, TINY), (64, 64, (512, 64), BF16, BF16, TINY),
    (8, 32, (512, 0), FP16, FP16, SHORT), (12, 128, (256, 64), BF16, F32, SHORT), (16, 64, (512, 64), BF16, BF16, LONG),
    (40, 64, (256, 0), BF16, F32, LONG), (64, 64, (512, 64), BF16, BF16, SHORT), (64, 64, (512, 64), BF16, BF16, LONG),
    (100, 128, (512, 64), FP16, FP16, LONG), (128, 16, (512, 32), BF16, BF16, SHORT),
    (128, 32, (256, 64), FP16, BF16, SHORT),
]  # fmt: skip
ALONE_DECODES = [  # the same with one request, and then the programs of its schedule: row blocks of 16 and of 64 rows
    (64, 64, (512, 64), BF16, BF16, [1085], 70), (100, 16, (256, 0), FP16, F32, [300], 40),
    (128, 16, (512, 64), BF16, BF16, [2950], 34),
]  # fmt: skip
E4M3_DECODES = [  # the same, over a cache in the format `fp8_e4m3`
    (3, 16, (256, 32), BF16, BF16, TINY), (8, 32, (512, 0), FP16, FP16, SHORT), (16, 64, (512, 64), BF16, BF16, LONG),
    (40, 128, (256, 64), BF16, F32, SHORT), (128, 64, (512, 64), BF16, BF16, TINY),
]  # fmt: skip
MODE_DECODES = [  # the same with queries in e4m3, and then the fp8 mode
    (3, 16, (256, 32), BF16, BF16, TINY, "fp8_product"), (40, 128, (512, 0), BF16, F32, SHORT, "fp8_query"),
    (64, 32, (256, 64), FP16, FP16, LONG, "fp8_product"), (128, 64, (512, 64), BF16, BF16, SHORT, "fp8_product"),
    (128, 64, (512, 64), BF16, BF16, LONG, "fp8_query"),
]  # fmt: skip
# Prefills of the Hopper kernel: P, R and V, dtype of the queries, dtype of the outputs, (Sq, S) of each request
PREFILLS = [
    ((128, 64, 128), BF16, BF16, ((150, 300), (0, 9), (70, 70), (140, 20))),
    ((128, 64, 128), FP16, FP16, ((1, 257), (3, 0), (129, 128))), ((64, 32, 64), BF16, BF16, ((130, 130), (5, 600))),
    ((192, 0, 128), BF16, BF16, ((130, 190),)), ((256, 0, 256), BF16, F32, ((70, 200), (65, 64))),
    ((128, 64, 128), BF16, BF16, ((70, 2100), (0, 9), (3, 1))),  # keys are divided into splits
]  # fmt: skip
# The grouped-query calls: config, dtype, format of the cache, and (Sq, S) of each request. SPLIT has long requests,
# PROMPTS have row blocks of 64 rows or more, and MIXED has short and long queries.
SPLIT, PROMPTS, MIXED = ((1, 3000), (2, 70)), ((150, 500), (70, 70), (0, 9)), ((1, 90), (200, 230), (3, 40))
PLANS = (
    "BY_LENGTH False, SCHEDULED False, SPLIT False", "BY_LENGTH False, SCHEDULED False, SPLIT True",
    "BY_LENGTH False, SCHEDULED True", "BY_LENGTH True, SCHEDULED False", "BY_LENGTH True, SCHEDULED True",
)  # fmt: skip
PAGES = tuple(f"BLOCK_SIZE {size}," for size in (16, 32, 64, 128))
PREFETCHED = "HEADS 64, LATENT 512, ROPE 64, BLOCK_SIZE 64, BY_LENGTH False, SCHEDULED False, SPLIT False"
SLICED = "HEADS 64, LATENT 512, ROPE 64, BLOCK_SIZE 64, BY_LENGTH True, SCHEDULED False, SPLIT False, SLICES 2"
VARIANTS = {  # kernel: list of texts; on Hopper, each text must occur in the constants of a launch of the kernel
    "row_blocks_16_32_kernel": (
        "ROWS 16,",
        "ROWS 32,",
        "LATENT 256,",
        "LATENT 512,",
        "ROPE 0,",
        "fp16",
        *PLANS,
        *PAGES,
    ),
    "row_blocks_16_32_e4m3_kernel": (
        "ROWS 16,",
        "ROWS 32,",
        "LATENT 256,",
        "LATENT 512,",
        "ROPE 0,",
        "fp16",
        *PLANS,
        *PAGES,
    ),
    "row_blocks_64_e4m3_kernel": (
        "LATENT 256,",
        "LATENT 512,",
        "ROPE 0,",
        "WEIGHTS_E4M3 True,",
        "WEIGHTS_E4M3 False,",
        *PLANS,
        *PAGES,
    ),
    "row_blocks_16_or_64_kernel": ("LATENT 256,", "LATENT 512,", "ROPE 0,", "fp16", *PAGES[::2]),
    "row_blocks_64_kernel": ("LATENT 256,", "ROPE 0,", "fp16", PREFETCHED, SLICED, *PLANS, *PAGES),
    "gqa_paged_kernel": (
        "BULK_COPY True",
        "BULK_COPY False",
        "SPLIT True",
        "E4M3 True",
        "WINDOW True",
        "SOFT_CAP True",
    ),
    "gqa_packed_kernel": ("BULK_COPY True", "WINDOW True", "SOFT_CAP True"),
    "varlen_kernel": (
        "FIRST 64,",
        "FIRST 128,",
        "FIRST 256,",
        "SECOND 0,",
        "SHARED True",
        "SHARED False",
        "VALUE 256,",
        "SPLIT True",
        "SPLIT False",
        "fp16",
    ),
    "combine_splits_kernel": ("(fp32,", "(bf16, fp32,"),  # the dtype of the partial outputs comes first
    "two_phases_kernel": ("HEADS 64,", "HEADS 128,", "ROPE 32,", "ROPE 64,", "BLOCK_SIZE 16,", "BLOCK_SIZE 64,"),
}


def decodes() -> list[tuple]:
    """Return arguments of `mla_decode` for `DECODES`, `ALONE_DECODES`, `E4M3_DECODES` and `MODE_DECODES`.

    For each entry there are decodes with and without a schedule, and batch-invariant or not.
    """
    from .twins.test_ops import decode_samples

    found = [given for in_e4m3, cases in enumerate((DECODES, E4M3_DECODES + MODE_DECODES))
             for heads, block_size, widths, dtype, out_dtype, lens, *mode in cases
             for given in decode_samples(dtype, *widths, heads, block_size, lens, out_dtype, bool(in_e4m3), *mode)
             ]  # fmt: skip
    for heads, block_size, widths, dtype, out_dtype, lens, programs in ALONE_DECODES:
        found += decode_samples(dtype, *widths, heads, block_size, lens, out_dtype, programs=programs)
    return found


def prefills() -> list[tuple]:
    """Return arguments of the launcher `flash_attn_varlen` for `PREFILLS`, with and without a mask."""
    from .support.factories import offsets

    found = []
    for (nope, rope, value), dtype, out_dtype, lens in PREFILLS:
        queries, keys = zip(*lens, strict=True)
        q = torch.randn(sum(queries), 3, nope + rope).to(dtype)
        k, v = (torch.randn(sum(keys), 3, width).to(dtype) for width in (nope, value))
        k_pe = torch.randn(sum(keys), rope).to(dtype) if rope else None
        found += [
            (q, k, k_pe, v, offsets(queries), offsets(keys), max(queries), max(keys), 0.1, causal, out_dtype, "hopper")
            for causal in (True, False)
        ]
    return found


def grouped_query_samples(device: str) -> list[tuple[str, tuple]]:
    """Return (name of an op, arguments) of grouped-query attention, for every kernel and several launch shapes.

    The tensors are made on the CPU, because the sanitizer would make their many small copies slow.
    """
    import fast
    from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3
    from reference.interfaces.gqa import GQAConfig

    from .twins.test_gqa_ops import paged_samples, varlen_samples
    from .twins.test_gqa_ops import samples as small_samples

    found = [(name, given) for dtype in (F32, BF16) for name, many in small_samples(dtype).items() for given in many]
    plain, narrow = GQAConfig(16, 2, 128), GQAConfig(6, 1, 64, sliding_window=100, attention_sinks=True)
    wide, invariant = GQAConfig(4, 2, 256, logits_soft_cap=9.0), fast.DecodeSchedule(None, None, True)
    seq_lens = torch.tensor([length for _, length in SPLIT], dtype=torch.int32)
    schedules = fast.plan_decode(seq_lens, 3), fast.plan_decode(seq_lens, 3, batch_invariant=True), invariant
    for config, dtype, stored in (
        (plain, BF16, COMPUTE_FORMAT), (plain, BF16, FP8_E4M3), (narrow, BF16, COMPUTE_FORMAT),
        (narrow, FP16, FP8_E4M3), (wide, FP16, COMPUTE_FORMAT),
    ):  # fmt: skip
        calls = [(lens, None) for lens in (SPLIT, PROMPTS, MIXED)] + [(SPLIT, schedule) for schedule in schedules]
        found += [
            ("mla_twins::gqa_paged_attention", paged_samples(dtype, config, dtype, stored, lens, 64, schedule))
            for lens, schedule in calls
        ]
        packed = varlen_samples(dtype, config, dtype, ((150, 300), (0, 9), (70, 70)))
        found.append(("mla_twins::gqa_varlen_attention", packed))
    return [(name, tuple(_on_device(value, device) for value in given)) for name, given in found]


def _on_device(value: Any, device: str) -> Any:
    """Return an argument of a call on the CPU for the same call on another device, with the backend "triton"."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return "triton" if value == "cpu" else value


def samples(hopper: bool, device: str = "cuda") -> list[tuple[str, tuple]]:
    """Return (name of an op, arguments on the device) for all ops.

    Args:
        hopper: whether to add `decodes` and `prefills`, whose backend is "hopper".
        device: device of the tensors.
    """
    from .twins import test_ops

    with torch.device(device):
        found = [(name, given) for dtype in (F32, BF16)
                 for name, many in test_ops.samples(dtype).items() for given in many]  # fmt: skip
        if hopper:
            found += [("mla_twins::mla_decode", given) for given in decodes()]
            # the op also gets whether the prefill is batch-invariant
            found += [("mla_twins::flash_attn_varlen", (*given[:-2], False, *given[-2:])) for given in prefills()]
    with torch.device("cpu"):
        return found + grouped_query_samples(device)


def launch_samples(shard: int, shards: int) -> None:
    """Launch a shard of the samples with valid and with hostile indices, and print the kernels that were compiled."""
    from fast.kernels.compile_log import compiling_ahead
    from fast.kernels.prescribed_splits import prescribe_partial_dtype

    from .support.triton_mode import ON_HOPPER
    from .twins.test_ops import overload

    with compiling_ahead() as compiled:
        if shard == 1:
            launch_conversions()
        for name, arguments in samples(ON_HOPPER)[shard - 1 :: shards]:
            op = overload(name)
            op(*arguments)
            if "fp8_product" in [value for value in arguments if isinstance(value, str)]:
                with prescribe_partial_dtype(BF16):
                    op(*arguments)
            names = [argument.name for argument in op._schema.arguments]
            for far in FAR:
                op(*(hostile(n, x, far) for n, x in zip(names, arguments, strict=True)))
            if "max_seq_len" in names:
                op(*beyond_the_bound(dict(zip(names, arguments, strict=True))))
            torch.cuda.synchronize()
    print("\n".join(f"launched: {line}" for line in sorted(set(compiled))))
    print(f"shard {shard} of {shards} has ended")


def launch_conversions() -> None:
    """Launch the conversions of the adapters, which belong to no op, in several shapes and dtypes."""
    from fast.backends.adapters import conversion

    with torch.device("cuda"):
        for tokens, heads, width, padded in ((1, 1, 128, 128), (37, 3, 128, 192), (130, 16, 40, 64)):
            for dtype in (BF16, FP16):
                keys, values = (torch.randn(tokens, heads, width).to(dtype) for _ in range(2))
                conversion.whole_keys(keys, torch.randn(tokens, padded - width + 8).to(dtype))
                made = conversion.pad_columns(values, padded)
                for lse in (torch.randn(heads, tokens), torch.randn(tokens, heads).T):
                    for convention in (conversion.Convention(base_2=True), conversion.Convention(False, True, True)):
                        lens = None if convention.base_2 else torch.arange(tokens, dtype=torch.int32)
                        conversion.lawful_state(made, lse, convention, F32, width, visible_lens=lens)


def hostile(name: str, value: Any, far: int) -> Any:
    """Return the argument `value`, or a copy in which every second element is `far` if `name` is in `HOSTILE`.

    `query_start_loc` is not in `HOSTILE`, because the engine's scheduler computes it. No request of a user can
    make `query_start_loc` wrong.
    """
    if name not in HOSTILE or value is None:
        return value
    changed = value.clone()
    changed.view(-1)[::2] = far
    return changed


def beyond_the_bound(arguments: dict[str, Any]) -> tuple:
    """Return decode arguments with request lengths that exceed `max_seq_len`; all block ids are valid.

    The buffers are allocated for `max_seq_len` keys. A kernel that trusts the lengths writes past its buffers.
    """
    cache = arguments["kv_cache"]
    block_size = cache.shape[2] if cache.dim() == 5 else cache.shape[1]  # [2, blocks, block_size, Nkv, Dh], or a latent
    keys = arguments["block_table"].shape[1] * block_size
    assert keys > arguments["max_seq_len"]
    changed = {name: torch.full_like(arguments[name], keys) for name in ("seq_lens", "visible_lens")}
    return tuple({**arguments, **changed, "block_table": torch.zeros_like(arguments["block_table"])}.values())


def kernels_of(sets: Sequence[str]) -> set[str]:
    """Return the names of the kernels in the given folders of `fast/kernels`, without the leading underscore."""
    files = [file for folder in sets for file in (ROOT / "fast" / "kernels" / folder).rglob("*.py")]
    return {name for file in files for name in re.findall(r"^def _(\w+_kernel)\(", file.read_text(), re.MULTILINE)}


def never_launched(launched: Iterable[str], hopper: bool) -> list[str]:
    """Return the kernels that are in no line of `launched`; with `hopper`, also the `VARIANTS` that are in no line."""
    launched = list(launched)
    missing = kernels_of(["combine", "triton", *(["hopper"] if hopper else [])]) - {
        line.split()[0] for line in launched
    }
    for kernel, variants in VARIANTS.items() if hopper else ():
        mine = [f"{line.removesuffix(')')}," for line in launched if line.startswith(f"{kernel} ")]
        missing |= {f"{kernel} of {what.strip(',')}" for what in variants if not any(what in line for line in mine)}
    return sorted(missing)


if __name__ == "__main__":
    if "--every-thread-arrives" in sys.argv:
        from .hand_over import let_every_thread_arrive

        let_every_thread_arrive()
    launch_samples(*map(int, sys.argv[1].split("/")))

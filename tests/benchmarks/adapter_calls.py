"""Time calls of `fast` that run a kernel of another library, beside the call of the library alone.

    python -m tests.benchmarks.adapter_calls
    python -m tests.benchmarks.adapter_calls --backends flash_attn_3 flashmla --json adapter-calls.json
    python -m tests.benchmarks.adapter_calls --device cpu --dtype float32
    python -m tests.benchmarks.adapter_calls --backends flashmla --profile 12

An adapter converts arguments and results, and calls the library. The benchmark records the calls of the library that
one call of `fast` makes, and times the same calls alone ("library"). Both call the same kernel with the same arguments,
so the difference is what `fast` adds. The plan of a step is made before; the output is checked before the timing.

- host: wall time of one eager call while the GPU is idle, without the time of the GPU. At most TARGET_US are wanted for
  the difference.
- replayed: time of one call from a CUDA graph; missing if a call cannot be captured.

With `--profile N`, the benchmark also prints the N functions in which a call of `fast` spends most time. A profiler
makes every function slower, so only the order of the functions is of use.

Rows are a prefill of new tokens, a prefill over a chunk of context, and a decode, with DeepSeek-V3's dims. A backend
that needs each key in one tensor gets such keys, as from a layer, which expands its keys into one tensor. The rows
"keys in two parts" have the cost of joining the keys in the call.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import fast
from fast import backends
from fast.backends.adapters import flash_attn, flashmla, torch_sdpa, torch_sdpa_calls, torch_varlen
from fast.backends.adapters.sources import loaded
from fast.demo.job import DTYPES
from reference.interfaces import MLAConfig

from . import backends as prefills
from . import decode
from .command_line import CannotRun, check_device, run, wide_console, write_report
from .host import time_calls
from .layers import BLOCK_SIZE, DTYPE
from .report import provenance
from .timing import Call, Clock

TARGET_US = 30.0
PROFILED_CALLS = 200
PYTORCH_KERNELS = {"torch_flash": SDPBackend.FLASH_ATTENTION, "torch_cudnn": SDPBackend.CUDNN_ATTENTION}
HEADS = {"cuda": 16, "cpu": 2}
TOKENS, CONTEXT, DECODES, KEYS = {"cuda": 512, "cpu": 8}, {"cuda": 2048, "cpu": 16}, 16, 4096


class Entry(NamedTuple):
    """A function of a library that an adapter calls: the attribute `name` of `holder`, a module or a class."""

    holder: Any
    name: str


def entries_of(backend: str) -> list[Entry]:
    """Return the functions of the library that the adapter of a backend may call."""
    if backend.startswith("flash_attn_"):
        module = loaded(getattr(flash_attn, f"SOURCES_{backend[-1]}"))[1]
        names = "flash_attn_varlen_func", "flash_attn_with_kvcache"
        return [Entry(module, name) for name in names if hasattr(module, name)]
    if backend == "flashmla":
        return [Entry(loaded(flashmla.SOURCES)[1], "flash_mla_with_kvcache")]
    if backend == "flashinfer":
        import flashinfer

        return [Entry(flashinfer.BatchPrefillWithRaggedKVCacheWrapper, "run")]
    if backend == "torch_varlen":
        import torch.nn.attention.varlen

        return [Entry(torch.nn.attention.varlen, "varlen_attn")]
    if backend in PYTORCH_KERNELS:
        return [Entry(module, "scaled_dot_product_attention") for module in (torch_sdpa, torch_sdpa_calls)]
    return []


@contextlib.contextmanager
def recorded(entries: Sequence[Entry]) -> Iterator[list[Call]]:
    """Record the calls of functions of a library; yield the list that the calls fill until the context ends."""
    calls: list[Call] = []

    def recording(function: Callable) -> Callable:
        def call(*arguments, **options):
            calls.append(partial(function, *arguments, **options))
            return function(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        # this adapter keeps the function of its library: let it look the function up now, and again afterwards
        torch_varlen._library.cache_clear()
        stack.callback(torch_varlen._library.cache_clear)
        for holder, name in entries:
            function = getattr(holder, name)
            setattr(holder, name, recording(function))
            stack.callback(setattr, holder, name, function)
        yield calls


def in_the_library(backend: str, calls: Sequence[Call]) -> Call:
    """Return a function that makes the recorded calls, with the kernel of PyTorch that the adapter chooses."""

    def body() -> None:
        with sdpa_kernel(PYTORCH_KERNELS[backend]) if backend in PYTORCH_KERNELS else contextlib.nullcontext():
            for call in calls:
                call()

    return body


def prefill_call(backend: str, context: int, dtype: torch.dtype, device: str, whole: bool = False) -> Call:
    """Return a prefill of one request with a backend, after a check of its output; `whole` gives it whole keys."""
    row = prefills.Row(1, TOKENS[device], HEADS[device], context)
    inputs = prefills.make_inputs(row, dtype, device)
    plan, scale = prefills.plan_of(row, inputs, dtype, backend), inputs.config.softmax_scale
    q, k, k_pe, v = inputs[:4]
    if whole:
        k, k_pe = prefills.keys_for(backend, inputs)
    if context:
        call = partial(fast.run_prefill_context_chunk, q, k, k_pe, v, plan, plan.context_chunks[0], scale)
        prefills.check(backend, row, inputs, call().out)
        return call
    call = partial(fast.run_prefill_new_tokens, q, k, k_pe, v, plan, scale, False)
    prefills.check(backend, row, inputs, call())
    return call


def decode_call(backend: str, device: str) -> Call:
    """Return a decode with a backend and a plan of a builder, after a check of its output.

    Raises:
        RuntimeError: the output is not within the budget.
    """
    row = decode.Row(DECODES, KEYS, 1, HEADS[device])
    inputs = decode.make_inputs(row, 1, device)
    config = MLAConfig.from_preset("deepseek-v3", num_heads=row.N)
    builder = fast.MLAMetadataBuilder(config, BLOCK_SIZE, KEYS, DECODES, dtype=DTYPE, backend=backend, device=device)
    plan = builder.build(0, decode.batch_of(row, inputs))
    call = partial(
        fast.mla_decode, inputs.ql_nope, inputs.q_pe, inputs.cache, plan.decode, decode.SCALE, backend=backend
    )
    failed = [each for each in decode.check(row, inputs, call()) if not each.passed]
    if failed:
        raise RuntimeError(f"{backend}: {failed[0]}")
    return call


def cases(backend: backends.Backend, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Call]]:
    """Return the rows that a backend serves, each as a function that makes the call."""
    found: dict[str, Callable[[], Call]] = {}
    for name, context in (("prefill", 0), ("prefill over context", CONTEXT[device])):
        row = prefills.Row(1, TOKENS[device], HEADS[device], context)
        if backend.name in prefills.able(row, dtype, device):
            whole = backend.ops["flash_attn_varlen"].whole_keys
            found[name] = partial(prefill_call, backend.name, context, dtype, device, whole)
            if whole:
                found[f"{name}, keys in two parts"] = partial(prefill_call, backend.name, context, dtype, device)
    if "mla_decode" in backend.ops and device == "cuda" and dtype == DTYPE and backend.is_available():
        found["decode"] = partial(decode_call, backend.name, device)
    return found


def print_profile(title: str, call: Call, device: str, functions: int) -> None:
    """Print the functions in which `PROFILED_CALLS` calls spend most time on the host, without the functions they call.

    Each call starts while the GPU is idle. The wait for the GPU is not in the profile.
    """
    profiler = cProfile.Profile()
    for _ in range(PROFILED_CALLS):
        if device == "cuda":
            torch.cuda.synchronize()
        profiler.enable()
        call()
        profiler.disable()
    print(title)
    pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(functions)


def measure(
    backend: str, make: Callable[[], Call], device: str, clock: Clock | None, profiled: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Return the host times of a call of `fast` and of the library in it, their difference, and the replayed times.

    Args:
        backend: name of the backend.
        make: function that makes the call of `fast`.
        device: "cuda" or "cpu".
        clock: times replays; None on a CPU.
        profiled: title and number of functions of a profile to print; None prints no profile.

    Raises:
        RuntimeError: the call of `fast` made no call of the library that the benchmark can record.
    """
    entries = entries_of(backend)
    with recorded(entries) as calls:
        call = make()
        calls.clear()  # the check made calls too
        call()
    if not calls:
        raise RuntimeError(f"{backend}: no call of its library was recorded")
    contenders = {"fast": call, "library": in_the_library(backend, calls)}
    host = {who: time_calls(each, device) for who, each in contenders.items()}
    if profiled is not None:
        print_profile(profiled[0], call, device, profiled[1])
    replayed = {} if clock is None else clock.replayed({who: [each] for who, each in contenders.items()})
    return {
        "host_us": {who: asdict(spread) for who, spread in host.items()},
        "added_us": host["fast"].median_us - host["library"].median_us,
        "replayed_us": {who: asdict(spread) for who, spread in replayed.items()},
        "calls_of_the_library": len(calls),
    }


def run_main(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Measure every backend that has an adapter and can run here; print a table; write JSON if `--json` is given."""
    check_device(arguments.device)
    dtype, device = DTYPES[arguments.dtype], arguments.device
    known = {each.name: each for each in backends.registered() if each.library is not None}
    wanted = list(known) if arguments.backends is None else arguments.backends
    if unknown := sorted(set(wanted) - set(known)):
        raise CannotRun(f"--backends: expected names of adapters ({', '.join(known)}), got {', '.join(unknown)}")
    clock, results, absent = Clock(arguments.time) if device == "cuda" else None, [], {}
    for name in wanted:
        found = cases(known[name], dtype, device)
        if not found or not entries_of(name):
            absent[name] = "serves none of the rows here" if not found else "its calls of the library are not recorded"
            continue
        for row, make in found.items():
            profiled = (f"{name}, {row}", arguments.profile) if arguments.profile else None
            results.append({"backend": name, "row": row, **measure(name, make, device, clock, profiled)})
    table = Table(title=f"Calls through adapters, {arguments.dtype}, on {device}")
    for title in ("backend", "row", "fast, host us", "library, host us", "added us", "fast / library, replayed"):
        table.add_column(title, justify="left" if title in ("backend", "row") else "right")
    for result in results:
        host, replayed = ({who: found["median_us"] for who, found in result[key].items()}
                          for key in ("host_us", "replayed_us"))  # fmt: skip
        table.add_row(
            result["backend"], result["row"], f"{host['fast']:.0f}", f"{host['library']:.0f}",
            f"{result['added_us']:.0f}",
            f"{replayed['fast'] / replayed['library']:.2f}" if len(replayed) == 2 else "-",
        )  # fmt: skip
    console = wide_console(110)
    console.print(table)
    for name, reason in absent.items():
        console.print(f"{name}: {reason}")
    if arguments.json:
        head = provenance("adapter_calls", argv, device)
        report = {**head, "dtype": arguments.dtype, "target_us": TARGET_US, "rows": results, "absent": absent}
        write_report(arguments.json, report)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.adapter_calls", description=__doc__.splitlines()[0],
        epilog="Exit status: 0 on success, 2 if the benchmark cannot run here.",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device (default: cuda)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="dtype (default: bfloat16)")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="backends to time (default: all with an adapter)")
    parser.add_argument("--time", type=float, default=20.0, metavar="MS",
                        help="milliseconds of replays for each call (default: %(default)s)")  # fmt: skip
    parser.add_argument("--profile", type=int, default=0, metavar="N",
                        help="print the N functions with most host time of each row (default: none)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions and times")
    return run(run_main, argv, parser)


if __name__ == "__main__":
    sys.exit(main())

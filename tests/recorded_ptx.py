"""Record a hash of the PTX (GPU assembly) of every kernel variant, to show that a refactoring changes no kernel.

    python -m tests.recorded_ptx record FILE
    python -m tests.recorded_ptx compare FILE --renamed few_heads=row_blocks_16_32 --gone merge_splits

A variant is a kernel compiled for one combination of argument types and constants. A hash does not cover debug
information, comments or the name of the kernel. So a change that only moves or renames kernels changes no hash.

No GPU is needed. The launchers (the functions that launch kernels) get CPU tensors and the properties of an H200. The
launches are recorded instead of run, and Triton compiles each recorded launch for sm_90.

A scenario is a function that makes launches. The key of a variant consists of the scenario, the name of the kernel, and
the number of the launch among the launches of this kernel in the scenario.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

import fast
from reference.interfaces import FP8_DS_MLA, FP8_E4M3, InvariantSplitRule, MLAConfig, format_named

from . import memory_checks
from .kernels.hopper.mla_decode import test_hopper_compilation as hopper_tests
from .support.backends import cpu_backend, with_backends
from .support.compiled import Recorded, RecordedGluon, compiled
from .support.factories import CONFIGS, LOW_RANK

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (  # tokens of a block, (latent width, rope width), dtype
    (64, (512, 64), BF16), (16, (512, 64), BF16), (32, (256, 32), FP16), (128, (512, 0), BF16), (64, (256, 64), BF16),
)  # fmt: skip
VARIANTS: dict[str, tuple] = {}  # key: (kernel, argument types, constants); forked processes read this global variable


def kernel_modules() -> list:
    """Return every module of `fast.kernels`."""
    package = importlib.import_module("fast.kernels")
    return [importlib.import_module(name) for _, name, _ in pkgutil.walk_packages(package.__path__, "fast.kernels.")]


@contextlib.contextmanager
def recording(launches: dict, facts=None) -> Iterator[pytest.MonkeyPatch]:
    """Record kernel launches in `launches` instead of running them.

    Args:
        launches: dictionary that receives the launches.
        facts: properties of the GPU that the launchers see; None leaves `device_facts` unchanged.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in kernel_modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    gluon = isinstance(value, GluonJITFunction)
                    patch.setattr(module, name, (RecordedGluon if gluon else Recorded)(value, launches))
                elif name == "device_facts" and facts is not None:
                    patch.setattr(module, name, lambda _: facts)
        yield patch


def hopper_decode(*arguments, **settings) -> dict:
    """Return the launch of the Hopper decode kernel for these arguments of `test_hopper_compilation.recorded`."""
    with recording({}) as patch:
        return {"": hopper_tests.recorded(patch, *arguments, **settings)}


def memory_checked() -> dict:
    """Return the launches of the Hopper decode kernels for the inputs of `tests/memory_checks.py` on an H200."""
    found: dict = {}
    with recording(found, hopper_tests.H200):
        decode = importlib.import_module("fast.kernels.hopper").KERNELS["mla_decode"]
        for given in memory_checks.decodes():
            *tensors, cut, stored, kv_scale, fp8_mode, q_scale = given[:-4]  # then: prepared, ranks, backend
            modes = {"fp8_mode": fp8_mode, "q_scale": q_scale}
            decode(*tensors, InvariantSplitRule(*cut), format_named(stored), kv_scale, **modes)
    return found


def warmed(backends, config, facts, **settings) -> dict:
    """Return the launches of `fast.warmup`, which launches every kernel of a config once.

    Args:
        backends: names of the backends whose kernels serve the CPU tensors. If several backends have kernels for an op,
            the last backend of the list serves the op.
        config: dimensions of the layer.
        facts: properties of the GPU that the launchers see.
        settings: further arguments of `fast.warmup`.
    """
    found: dict = {}
    table: dict = {}
    for name in backends:
        table |= importlib.import_module(f"fast.kernels.{name}").KERNELS
    with recording(found, facts) as patch:
        with_backends(patch, cpu_backend(table))
        fast.warmup(config, device="cpu", **settings)
    return found


def scenarios() -> Iterator[tuple[str, Callable[[], dict]]]:
    """Yield the name of each scenario, and a function that returns the launches of the scenario in order."""
    for heads, cut, shape in product((16, 32, 128), hopper_tests.CUTS, SHAPES):
        if cut in hopper_tests.ONLY_MANY and (heads <= 32 or shape[1][0] < 512):
            continue
        if shape is SHAPES[0] or cut in ("whole", hopper_tests.CUTS[-1]):
            yield f"hopper {heads} heads, {cut}, {shape}", partial(hopper_decode, heads, cut, *shape)
    for out_dtype in (F32, FP16):
        yield f"hopper 128 heads, out {out_dtype}", partial(hopper_decode, 128, out_dtype=out_dtype)
    yield "hopper memory checks", memory_checked
    settings = {"block_size": 16, "decode_threshold": 2}
    for (name, config), dtype in product(CONFIGS.items(), (BF16, F32)):
        facts = hopper_tests.H200 if dtype == BF16 else None
        yield f"triton {name}, {dtype}", partial(warmed, ["triton"], config, facts, dtype=dtype, **settings)
    lite = replace(MLAConfig.from_preset("deepseek-v2-lite"), num_heads=16)
    for name, config, backends, more in (
        ("lite", lite, ["triton"], {"block_size": 64, "decode_threshold": 1}),
        ("low-rank, batch-invariant", LOW_RANK, ["triton"], {"batch_invariant": True}),
        ("20 heads on Hopper, batch-invariant",
         replace(LOW_RANK, num_heads=20, kv_lora_rank=256, qk_rope_head_dim=32), ["triton", "hopper"],
         {"batch_invariant": True}),
        ("64 heads on Hopper",
         replace(LOW_RANK, num_heads=64, kv_lora_rank=256, qk_rope_head_dim=32), ["triton", "hopper"], {}),
        ("low-rank, fp8_e4m3", LOW_RANK, ["triton"], {"cache_format": FP8_E4M3}),
        ("low-rank, fp8_product", LOW_RANK, ["triton"], {"cache_format": FP8_E4M3, "fp8_mode": "fp8_product"}),
        ("lite, fp8_ds_mla", lite, ["triton"], {"block_size": 64, "cache_format": FP8_DS_MLA}),
    ):  # fmt: skip
        given = {"dtype": BF16, **settings, **more}
        yield f"triton {name}", partial(warmed, backends, config, hopper_tests.H200, **given)


class _Done(Exception):
    """Exception that ends the compilation after the PTX, before Triton makes a binary; it carries the PTX."""


def _stop(_backend, ptx, *_) -> None:
    raise _Done(ptx)


def ptx_of(kernel, kinds: dict, constants: dict) -> str:
    """Compile a recorded launch for sm_90 and return its PTX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_cubin", _stop)
        try:
            return compiled(kernel, kinds, constants).asm["ptx"]
        except _Done as done:
            return done.args[0]


def normalised(ptx: str, name: str) -> str:
    """Return the PTX without debug information and comments, with the kernel's name replaced by `kernel`."""
    ptx = re.sub(r"\.section\s+\.debug_\w+\s*\{.*?^\s*\}", "", ptx, flags=re.DOTALL | re.MULTILINE)
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in ptx.splitlines())
    kept = [line for line in lines if line and not re.match(r"\.(loc|file)\b|\$L__(tmp|info_string)\w*:", line)]
    return "\n".join(kept).replace(name, "kernel")


def variants(renamed: dict[str, str], only: str) -> dict[str, tuple]:
    """Return the launches of the selected scenarios by key.

    Args:
        renamed: for each renamed kernel, its name in the recorded file and its new name. The returned keys contain the
            name in the file.
        only: regular expression that selects scenarios.

    Raises:
        RuntimeError: a scenario launches no kernel.
    """
    back = {new: old for old, new in renamed.items()}
    found, counts = {}, {}
    for scenario, launch_all in scenarios():
        if not re.search(only, scenario):
            continue
        launches = launch_all()
        if not launches:
            raise RuntimeError(f"no launch was recorded in the scenario {scenario}")
        for launch in launches.values():
            name = launch[0].fn.__name__.strip("_").removesuffix("_kernel")
            place = (scenario, back.get(name, name))
            counts[place] = counts.get(place, 0) + 1
            found[f"{scenario} | {place[1]} {counts[place]}"] = launch
    return found


def described(launch: tuple) -> str:
    """Return a description of a launch; launches with equal descriptions compile to the same PTX."""
    kernel, kinds, constants = launch
    return f"{kernel.fn.__name__} {list(kinds.items())} {sorted((key, str(value)) for key, value in constants.items())}"


def _hashed(key: str) -> str:
    kernel = VARIANTS[key][0]
    try:
        ptx = ptx_of(*VARIANTS[key])
    except Exception as error:  # Triton's exceptions cannot be pickled, so the main process would wait forever
        raise RuntimeError(f"{key}: {type(error).__name__}: {str(error)[-2000:]}") from None
    return hashlib.sha256(normalised(ptx, kernel.fn.__name__).encode()).hexdigest()


def hashes(found: dict[str, tuple], workers: int) -> dict[str, str]:
    """Return the hash of every variant; launches with equal descriptions are compiled once."""
    first: dict[str, str] = {}
    for key, launch in found.items():
        first.setdefault(described(launch), key)
    keys = list(first.values())
    VARIANTS.update({key: found[key] for key in keys})
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        done = dict(zip(keys, pool.map(_hashed, keys), strict=True))
    print(f"{len(found)} variants, {len(keys)} compiled")
    return {key: done[first[described(launch)]] for key, launch in found.items()}


def main(argv: list[str]) -> int:
    """Record or compare hashes; return 1 if a variant differs, or if one is missing and not named by `--gone`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"), help="write the file, or compare with it")
    parser.add_argument("file", type=Path, help="file of the hashes")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW", help="names without the ending _kernel")
    parser.add_argument("--gone", nargs="*", default=[], help="texts that occur in the keys of removed variants")
    parser.add_argument("--only", default="", help="regular expression that selects scenarios")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of processes (default: 2)")
    given = parser.parse_args(argv)
    found = variants(dict(pair.split("=") for pair in given.renamed), given.only)
    if given.what == "record":
        given.file.write_text(json.dumps(hashes(found, given.workers), indent=1) + "\n")
        return 0
    before = {key: value for key, value in json.loads(given.file.read_text()).items()
              if re.search(given.only, key.split(" | ")[0])}  # fmt: skip
    now = hashes(found, given.workers)
    missing = [key for key in before.keys() - now.keys() if not any(part in key for part in given.gone)]
    differing = [key for key in before.keys() & now.keys() if before[key] != now[key]]
    for label, keys in (("differs", differing), ("missing", missing), ("new", now.keys() - before.keys())):
        print("\n".join(f"{label}: {key}" for key in sorted(keys)), end="\n" if keys else "")
    print(f"{len(before.keys() & now.keys()) - len(differing)} the same, {len(differing)} differ, "
          f"{len(missing)} missing, {len(now.keys() - before.keys())} new")  # fmt: skip
    return bool(differing or missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

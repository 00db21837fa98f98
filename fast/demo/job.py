"""Checks of the main job's options, and loading of the checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    CACHE_FORMATS,
    COMPUTE_FORMAT,
    CONVERTED,
    CacheFormat,
    CalibratedScales,
    GroupError,
    MLAConfig,
    UnsupportedConfiguration,
    check,
    check_mode_of_format,
    checkpoint_query_scale,
    checkpoint_scale,
)

from .. import backends
from ..backends.selection import refusals_of
from ..integrations._required import missing_transformers
from .batch_loop import BatchLoop
from .serving import ServingLoop

ASSETS = Path(__file__).resolve().parents[1] / "assets"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(eq=False)
class Job:
    """The checked options and the loaded checkpoint, for Multi-head Latent Attention.

    The methods are what depends on the attention family. `GQAJob` (fast.demo.gqa.job) replaces them.

    Attributes:
        args: command-line options.
        model: causal language model in eval mode, with the attention of transformers (not replaced by `use_mla`).
        config: configuration of the model's attention; the result of `read_config`.
        tokenizer: tokenizer of the checkpoint.
        texts: the prompts.
        prompt_ids: tokens of each prompt.
        device: device of the model.
        dtype: dtype of weights and cache.
        eos: tokens that end a request.
        packages: the packages that serve (`reference`, `fast` or both), by name.
        loops: one serving loop for each package; each loop has all prompts in its queue.
        context_parallel: groups of ranks that divide heads and sequences among themselves, or None.
        cache_format: format of the caches.
        fp8_mode: fp8 mode of the decodes.
        kv_scales: scale of each layer's cache by the name of the layer; None if the format has no such scale.
        q_scales: scale of each layer's queries in e4m3 by the name of the layer; None in the mode `converted`.
    """

    MODEL = "tiny-mla"  # folder in fast/assets of the checkpoint that is served without `--model`
    NOTE = None  # a line about this checkpoint, which is printed before the generated texts

    args: argparse.Namespace
    model: nn.Module
    config: Any
    tokenizer: Any
    texts: list[str]
    prompt_ids: list[list[int]]
    device: torch.device
    dtype: torch.dtype
    eos: tuple[int, ...]
    packages: dict[str, ModuleType]
    loops: dict[str, BatchLoop] = field(default_factory=dict)
    context_parallel: ContextParallel | None = None
    cache_format: CacheFormat = COMPUTE_FORMAT
    fp8_mode: str = CONVERTED
    kv_scales: dict[str, Any] | None = None
    q_scales: dict[str, float | torch.Tensor] | None = None

    @staticmethod
    def check_options(args: argparse.Namespace) -> None:
        """Check the sizes of blocks and workspace."""
        block = args.block_size
        check(args.workspace_tokens >= block, "--workspace-tokens", f"at least one block of {block}",
              args.workspace_tokens)  # fmt: skip

    @staticmethod
    def read_config(hf_config: Any) -> MLAConfig:
        """Return the configuration of the model's attention."""
        return MLAConfig.from_hf(hf_config)

    @staticmethod
    def check_format(cache_format: CacheFormat, config: MLAConfig) -> None:
        """Raise ValueError if caches of the model cannot have this format."""
        cache_format.columns(config.kv_lora_rank, config.qk_rope_head_dim)

    def choose_scales(self) -> None:
        """Set the scales of the job, as far as its cache format and its fp8 mode need them."""
        choose_scales(self)

    def install(self, name: str, **changes: Any) -> None:
        """Let the model compute its attention with one of the packages, until `restore`.

        Args:
            name: name of the package.
            changes: options that replace those of `patch_options`.
        """
        from ..integrations.transformers import use_mla

        use_mla(self.model, ops=self.packages[name], **{**self.patch_options(name), **changes})

    def options_to_read_the_cache(self, num_tokens: int) -> dict[str, Any]:
        """Return the options of `install` with which steps of so many tokens read all of their keys from the cache."""
        return {"decode_threshold": num_tokens}

    def patch_options(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of `use_mla` for one package."""
        options = {
            "block_size": self.args.block_size,
            "workspace_tokens": self.args.workspace_tokens,
            "cache_format": self.cache_format,
            "kv_scales": self.kv_scales,
        }
        if self.fp8_mode != CONVERTED:
            options |= {"fp8_mode": self.fp8_mode, "q_scales": self.q_scales}
        if name == "fast" and self.args.backend is not None:
            options["backend"] = self.args.backend
        if self.context_parallel is not None:
            options["context_parallel"] = self.context_parallel
        return options

    def make_loop(self, name: str, prompt_ids: list[list[int]], max_new_tokens: int) -> BatchLoop:
        """Return a serving loop with these prompts in its queue, and with a cache that has room for all prompts."""
        block = self.args.block_size
        covered = block * (1 if self.context_parallel is None else self.context_parallel.size)
        loop = ServingLoop(
            self.model,
            self.config,
            self.packages[name],
            num_blocks=sum(-(-(len(ids) + max_new_tokens) // max(covered, 1)) for ids in prompt_ids),
            block_size=block,
            max_num_seqs=len(prompt_ids),
            token_budget=self.args.token_budget,
            workspace_tokens=self.args.workspace_tokens,
            eos=self.eos,
            context_parallel=self.context_parallel,
        )
        for ids in prompt_ids:
            loop.add(ids, max_new_tokens)
        return loop


def check_outputs(args: argparse.Namespace) -> None:
    """Check that the files of `--json` and `--picture` can be written, without changing their contents.

    The function opens an existing file for writing. If a file is missing, the function creates a temporary file in the
    same folder, so that it also detects a read-only or full file system.

    Raises:
        ValueError: a folder is missing, a path is a folder, a file cannot be written, or both options name the same
            file. The message is one line.
    """
    given = {"--json": args.json, "--picture": None if args.no_picture else args.picture}
    for option, path in given.items():
        if path is None:
            continue
        target = Path(os.path.realpath(path))  # follow links, because a link may lead to another folder
        try:
            check(target.parent.is_dir() and not target.is_dir(), option, "a file in a folder that exists", path)
            if target.is_file() or target.is_symlink():  # `realpath` leaves a cycle of links; `os.open` raises
                os.close(os.open(target, os.O_WRONLY | os.O_APPEND))
            elif target.exists():  # a device or a pipe; to open a pipe may block, or end the program that reads it
                check(os.access(target, os.W_OK), option, "a path that can be written", path)
            else:
                tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            raise ValueError(f"{option}: expected a path that can be written, got {path}: {error.strerror}") from error
    if all(given.values()):
        paths = [Path(os.path.realpath(path)) for path in given.values()]
        same = paths[0] == paths[1] or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))
        check(not same, "--json", "another file than --picture", args.json)


def prepare(
    args: argparse.Namespace,
    ops: ModuleType,
    oracle: ModuleType,
    context_parallel: ContextParallel | None = None,
    job_type: type[Job] = Job,
    other_types: Mapping[str, type[Job]] = MappingProxyType({}),
) -> Job:
    """Check every option except the output paths (`check_outputs` checks them), and load the checkpoint.

    Args:
        args: options, with the defaults of the family (`fast.demo.families.read_family`).
        ops: module to use in place of `fast`.
        oracle: module to use in place of `reference`.
        context_parallel: groups of ranks that divide heads and sequences among themselves, or None.
        job_type: class of the job, which determines the attention family.
        other_types: classes of the jobs of the other families, by the names of the families.

    Raises:
        ValueError: an option is invalid. The message is one line.
        OSError: a file cannot be read or written.
    """
    needed = ("transformers",) if args.no_picture else ("transformers", "matplotlib")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    check(not missing, "python -m fast", f'{" and ".join(needed)} (pip install "mla-twins[hf]")',
          f"no {' and no '.join(missing)}")  # fmt: skip
    too_old = missing_transformers()
    if too_old is not None:
        raise ValueError(f"python -m fast: {too_old}")
    check(args.max_new_tokens >= 1, "--max-new-tokens", "at least 1", args.max_new_tokens)
    for option, value in (("--block-size", args.block_size), ("--token-budget", args.token_budget)):
        check(1 <= value < 2**31, option, "at least 1 and less than 2^31", value)
    job_type.check_options(args)
    texts = args.prompt
    if texts is None:
        paths = sorted((ASSETS / "prompts").glob("*.py.txt"))
        check(bool(paths), "prompts", f"text files in {ASSETS / 'prompts'}", "none")
        texts = [path.read_bytes().decode("utf-8") for path in paths]
    check(args.token_budget >= len(texts), "--token-budget", f"at least one token for each of {len(texts)} prompts",
          args.token_budget)  # fmt: skip
    cache_format = CACHE_FORMATS[args.cache_format]
    try:
        check_mode_of_format(args.fp8_mode, cache_format)
    except ValueError as error:
        raise ValueError(f"--fp8-mode: {str(error).removeprefix('fp8_mode: ')}") from None
    packages = {"reference": oracle, "fast": ops}
    packages = packages if args.ops == "both" else {args.ops: packages[args.ops]}
    check(args.backend is None or "fast" in packages, "--backend", "no backend with --ops reference", args.backend)

    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    from ..integrations.transformers import restore

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source, local = locate(args.model)
    hf_config = read(lambda: AutoConfig.from_pretrained(source, local_files_only=local))
    config = read_config(job_type, hf_config, other_types)
    try:
        job_type.check_format(cache_format, config)
    except ValueError as error:
        raise ValueError(f"--cache-format: {str(error).removeprefix('cache_format: ')}") from None
    device, dtype = choose_device(args, config, packages, cache_format)
    tokenizer = read(lambda: AutoTokenizer.from_pretrained(source, local_files_only=local))
    model = load_model(source, local, dtype).to(device).eval()
    eos = model.generation_config.eos_token_id
    eos = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    prompt_ids = [encode(tokenizer, text) for text in texts]
    positions = getattr(hf_config, "max_position_embeddings", None)  # None: the model has no limit
    for ids in prompt_ids:
        fits = positions is None or len(ids) + args.max_new_tokens <= positions
        check(fits, "--max-new-tokens", f"prompt and new tokens within the model's {positions} positions",
              f"{len(ids)} + {args.max_new_tokens}")  # fmt: skip
    job = job_type(
        args, model, config, tokenizer, texts, prompt_ids, device, dtype, eos, packages, {}, context_parallel,
        cache_format, args.fp8_mode,
    )  # fmt: skip
    job.choose_scales()
    for name in packages:
        job.install(name)
        try:  # the loop reads the cache format and the backend of the layers
            job.loops[name] = job.make_loop(name, prompt_ids, args.max_new_tokens)
        except GroupError:
            raise
        except (RuntimeError, MemoryError) as error:
            raise ValueError(f"--block-size: expected a cache that fits in memory, got: {one_line(error)}") from error
        finally:
            restore(model)
    return job


def locate(model: str) -> tuple[str, bool]:
    """Return the folder of a checkpoint and True, or the hub name of a checkpoint and False."""
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        path = Path(model)
    if path.is_dir():
        return str(path), True
    hub_name = not path.exists() and not model.startswith((".", "~", "/")) and model.count("/") == 1
    check(hub_name, "--model", "a folder with a checkpoint, or a hub name owner/name", f"{model!r}, which is no folder")
    return model, False


def read(load: Callable[[], Any]) -> Any:
    """Call `load`, which reads a file of a checkpoint, and turn every error into a ValueError of one line.

    Raises:
        ValueError: a file is missing or broken, or the architecture is unknown.
    """
    try:
        return load()
    except Exception as error:  # transformers may raise any error for a bad file
        raise ValueError(f"--model: expected a checkpoint that can be read, got: {one_line(error)}") from error


def read_config(job_type: type[Job], hf_config: Any, other_types: Mapping[str, type[Job]]) -> Any:
    """Return the configuration of the model's attention; a ValueError names another family that can read it."""

    def can_read(other: type[Job]) -> bool:
        try:
            other.read_config(hf_config)
        except Exception:  # a config of another architecture may cause any error
            return False
        return True

    try:
        return job_type.read_config(hf_config)
    except ValueError as error:
        able = [name for name, other in other_types.items() if can_read(other)]
        if not able:
            raise
        raise ValueError(f"{one_line(error)}; use --family {able[0]}") from None


def load_model(source: str, local: bool, dtype: torch.dtype) -> nn.Module:
    """Load the model and check that no weight is missing.

    Raises:
        ValueError: the checkpoint cannot be read, or weights are missing.
    """
    from transformers import AutoModelForCausalLM

    model, info = read(
        lambda: AutoModelForCausalLM.from_pretrained(
            source, local_files_only=local, dtype=dtype, output_loading_info=True
        )
    )
    absent = sorted(info["missing_keys"])
    check(not absent, "--model", "a checkpoint with all weights", f"{len(absent)} missing, such as {absent[:1]}")
    return model


def choose_scales(job: Job) -> None:
    """Set `kv_scales` and `q_scales` of the job, as far as its cache format and its fp8 mode need these scales.

    All packages and ranks get the same scales, so that they store the same numbers. The scale of a layer comes from the
    checkpoint, or from a calibration on the prompts if the checkpoint has no scale for the layer.
    """
    from ..integrations.transformers.models import attention_modules

    modules, caches, queries = attention_modules(job.model), {}, {}
    if job.cache_format.layer_scale:
        caches = {name: checkpoint_scale(module) for name, module in modules.items()}
    if job.fp8_mode != CONVERTED:
        queries = {name: checkpoint_query_scale(module) for name, module in modules.items()}
    if any(scale is None for scale in (*caches.values(), *queries.values())):
        calibrated = _calibrated(job)
        caches = {name: calibrated[name] if scale is None else scale for name, scale in caches.items()}
        queries = {name: calibrated.queries[name] if scale is None else scale for name, scale in queries.items()}
    job.kv_scales = {name: float(scale) for name, scale in caches.items()} or None
    job.q_scales = queries or None


def _calibrated(job: Job) -> CalibratedScales:
    """Return the scales of a calibration on the prompts, which runs the last of the job's packages."""
    from ..integrations.transformers import calibrate_model

    batches = [torch.tensor([ids], device=job.device) for ids in job.prompt_ids]
    name, package = list(job.packages.items())[-1]
    # a calibration quantises nothing, and each rank calibrates alone, with the same result
    excluded = ("cache_format", "kv_scales", "fp8_mode", "q_scales", "context_parallel")
    options = {key: value for key, value in job.patch_options(name).items() if key not in excluded}
    return calibrate_model(
        job.model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches], package,
        max_new_tokens=1, **options,
    )  # fmt: skip


def choose_device(
    args: argparse.Namespace, config: Any, packages: dict[str, ModuleType], cache_format: CacheFormat
) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype of the job.

    `config` is one config, or a tuple of the configs of layers that differ.

    Without `--device`, the device is a GPU if the chosen packages can serve the model on a GPU, and otherwise the CPU.

    Raises:
        UnsupportedConfiguration: `fast` cannot serve the model on this device; the error lists every reason.
        ValueError: the device or the backend is unknown.
    """
    configs = config if isinstance(config, tuple) else (config,)

    def dtype_on(device: torch.device) -> torch.dtype:
        return DTYPES[args.dtype or ("float32" if device.type == "cpu" else "bfloat16")]

    def refusals(device: torch.device) -> list[str]:
        if "fast" not in packages:
            return []
        found: list[str] = []
        bound = backends.bind_with_environment(args.backend)
        for each in configs:
            layer = each, device, dtype_on(device), args.block_size, cache_format, args.fp8_mode
            for request in backends.layer_requests(*layer):
                found += refusals_of(request, bound)
        return list(dict.fromkeys(found))

    if args.device is None:
        cuda = torch.device("cuda")
        device = cuda if torch.cuda.is_available() and not refusals(cuda) else torch.device("cpu")
    else:
        try:
            device = torch.device(args.device)
        except RuntimeError:
            raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {args.device!r}") from None
        check(device.type in ("cpu", "cuda"), "--device", "cpu, cuda or cuda:N", args.device)
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = device.type == "cpu" or (device.index or 0) < present
        check(here, "--device", f"a CUDA device of this machine ({present} found)", args.device)
    reasons = refusals(device)
    if reasons:
        raise UnsupportedConfiguration(reasons)
    return device, dtype_on(device)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, after the beginning-of-sequence token if the tokenizer has one.

    Raises:
        ValueError: the text is not valid UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"--prompt: expected valid UTF-8, got {text[:20]!r}") from None
    ids = tokenizer.encode(text)
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def one_line(error: BaseException) -> str:
    """Return the first non-empty line of an error message, or the name of the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""Measurements of the main job: both packages and plain transformers serve the same prompts."""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reference.interfaces import COMPUTE_FORMAT, CONVERTED

from .families import FAMILIES, default_model
from .job import Job
from .predictions import compare_bits_per_byte, in_words
from .requests import Request, StepReport

PARITY_TOKENS = 512  # tokens of the batch with which ops are compared
WARMUP_TOKENS = 2  # new tokens of a prompt that is served before each measurement


@torch.inference_mode()
def plain_greedy(job: Job, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """Return the tokens that plain transformers generates for one prompt."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=False, num_beams=1, repetition_penalty=1.0, max_new_tokens=max_new_tokens,
        eos_token_id=list(job.eos) or None, pad_token_id=job.eos[0] if job.eos else 0,
    )  # fmt: skip
    ids = torch.tensor([prompt_ids], device=job.device)
    out = job.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt_ids) :].tolist()


def measure(job: Job, console: Console) -> dict[str, Any]:
    """Serve the prompts with each package and with transformers, compare the results, and return all figures."""
    from ..integrations.transformers import restore

    family = FAMILIES[job.args.family]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    speed, tokens, schedules, parity = {}, {}, {}, []
    with Progress(*columns, console=console, transient=True) as progress:

        def bar(description: str, total: int) -> Callable[[int], None]:
            if not console.is_terminal:
                console.print(f"{description} ...")
            task = progress.add_task(description, total=total)
            return lambda count: progress.advance(task, count)

        if "fast" in job.packages and job.device.type == "cuda" and family.compile_ahead is not None:
            family.compile_ahead(job, console)
        for name in job.packages:
            loop, reports = job.loops[name], []
            advance = bar(f"serving with {name}: tokens", sum(map(len, job.prompt_ids)) + sum(
                request.max_new_tokens - 1 for request in loop.waiting))  # fmt: skip

            def on_step(report: StepReport, advance=advance, reports=reports) -> None:
                reports.append(report)
                advance(report.num_tokens)

            job.install(name)
            try:
                job.make_loop(name, job.prompt_ids[:1], min(WARMUP_TOKENS, job.args.max_new_tokens)).run()
                started = time.perf_counter()
                requests: list[Request] = loop.run(on_step)
                seconds = time.perf_counter() - started
            finally:
                restore(job.model)
            tokens[name] = [request.generated_ids for request in requests]
            speed[name] = rate(tokens[name], seconds, f"{len(requests)} together")
            schedules[name] = summary(reports)

        advance = bar("transformers, one prompt at a time: prompts", len(job.prompt_ids))
        plain_greedy(job, job.prompt_ids[0], min(WARMUP_TOKENS, job.args.max_new_tokens))
        tokens["transformers"], started = [], time.perf_counter()
        for ids in job.prompt_ids:
            tokens["transformers"].append(plain_greedy(job, ids, job.args.max_new_tokens))
            advance(1)
        speed["transformers"] = rate(tokens["transformers"], time.perf_counter() - started, "one at a time")

        if len(job.packages) == 2:
            advance = bar("parity, op by op", 1)
            parity = family.compare_ops(job, PARITY_TOKENS)
            advance(1)
        if job.cache_format != COMPUTE_FORMAT:
            bar("bits per byte of the prompts", 1)
        bits = compare_bits_per_byte(job)
    rows = [{**vars(row), "passed": row.passed} for row in parity]
    figures = {
        **surroundings(job),
        "served": list(job.packages),
        "compared": compared_contenders(job),
        "note": job.NOTE if job.args.model == default_model(job.args.family) else None,
        "prompts": [prompt_figures(job, number, tokens) for number in range(len(job.texts))],
        "parity": rows,
        "bits_per_byte": bits,
        "kv_scales": job.kv_scales,
        "q_scales": numbers_of(job.q_scales),
        "cache": {
            **family.cache_figures(job),
            "peak_bytes": max(row["peak_cache_bytes"] for row in schedules.values()),
        },
        "speed": speed,
        "schedule": schedules,
    }
    return {**figures, "verdict": verdict(figures)}


def rate(tokens: list[list[int]], seconds: float, how: str) -> dict[str, Any]:
    """Return the number of generated tokens and the tokens per second; `seconds` includes the prefill."""
    count = sum(map(len, tokens))
    return {"tokens": count, "seconds": seconds, "tokens_per_second": count / seconds, "how": how}


def summary(reports: list[StepReport]) -> dict[str, int]:
    """Return counts over all steps of one package (such as steps and chunks), and its largest cache in bytes."""
    return {
        "steps": len(reports),
        "mixed_steps": sum(report.num_decodes > 0 and report.num_prefills > 0 for report in reports),
        "context_chunks": sum(report.num_context_chunks for report in reports),
        "most_chunks_in_a_step": max(report.num_context_chunks for report in reports),
        "preemptions": sum(len(report.preempted) for report in reports),
        "peak_cache_bytes": max(report.cache_bytes for report in reports),
    }


def prompt_figures(job: Job, number: int, tokens: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Return the figures of one prompt: its text, its lengths, and the tokens that each package generated for it.

    Transformers counts as a package here. Two entries are the index of the first generated token that differs, or None:

    - `differs_at` compares the packages that must generate the same tokens (`compared_contenders`).
    - `differs_from_transformers_at` compares transformers with `fast`, or with `reference` if `fast` did not serve.
    """
    answers = {name: ids[number] for name, ids in tokens.items()}
    shown = answers["fast" if "fast" in answers else "reference"]
    compared = [answers[name] for name in compared_contenders(job)]
    return {
        "text": job.texts[number],
        "prompt_tokens": len(job.prompt_ids[number]),
        "new_tokens": len(shown),
        "continuation": job.tokenizer.decode(shown, skip_special_tokens=True),
        "tokens": answers,
        "identical": first_difference(compared) is None,
        "differs_at": first_difference(compared),
        "differs_from_transformers_at": first_difference([shown, answers["transformers"]]),
    }


def compared_contenders(job: Job) -> list[str]:
    """Return the packages that must generate the same tokens; transformers only if the cache is not quantised."""
    return [*job.packages, *(["transformers"] if job.cache_format == COMPUTE_FORMAT else [])]


def first_difference(answers: list[list[int]]) -> int | None:
    """Return the index of the first token that is not the same in all answers, or None."""
    columns = enumerate(itertools.zip_longest(*answers))
    return next((index for index, column in columns if any(token != column[0] for token in column)), None)


def surroundings(job: Job) -> dict[str, Any]:
    """Return the hardware, the versions of packages, the options, and which backends serve."""
    versions = {"python": platform.python_version()}
    for name in ("mla-twins", "torch", "transformers", "triton", "einops", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    family = FAMILIES[job.args.family]
    gpu = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else None
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(job.args).items()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"machine": platform.machine(), "system": platform.system(), "cpu": cpu_name(), "gpu": gpu,
                     "threads": torch.get_num_threads()},
        "versions": versions,
        "settings": {**settings, "device": str(job.device), "dtype": str(job.dtype).removeprefix("torch.")},
        "kernels": {"device": f"{job.device} ({gpu or cpu_name()})", **family.kernels(job)},
    }  # fmt: skip


def cpu_name() -> str:
    """Return the name of the CPU, or the machine type if the system does not give a name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def tokens_must_agree(dtype: str, device: str, fp8_mode: str) -> bool:
    """Return whether all compared packages must generate the same tokens; elsewhere, rounding may change a token.

    Only in float32 do `fast` and `reference` round alike. A decode of `fast` also rounds each probability: in the mode
    `fp8_product` to e4m3, and on a GPU in the mode `fp8_query` to 16 bits. `reference` rounds no probability.
    """
    exact = fp8_mode == CONVERTED or (fp8_mode == "fp8_query" and device == "cpu")
    return dtype == "float32" and exact


def numbers_of(scales: dict[str, float | torch.Tensor] | None) -> dict[str, float | list[float]] | None:
    """Return scales as numbers, which JSON can store: a list for a layer with one scale for each head."""
    if scales is None:
        return None
    return {name: torch.as_tensor(scale).tolist() for name, scale in scales.items()}


def verdict(figures: dict[str, Any]) -> dict[str, Any]:
    """Return whether the job passed, as lines of text and as booleans.

    Different tokens are a failure only where the packages round alike (`tokens_must_agree`). If the cache is quantised,
    the number of prompts with the same tokens as transformers is reported, but tokens may differ.
    """
    parity, prompts, settings = figures["parity"], figures["prompts"], figures["settings"]
    failed = [row["op"] for row in parity if not row["passed"]]
    different = [str(number) for number, prompt in enumerate(prompts, 1) if not prompt["identical"]]
    mode = settings["fp8_mode"]
    required = tokens_must_agree(settings["dtype"], settings["device"], mode)
    where = settings["dtype"] + ("" if mode == CONVERTED else f" and {mode}")
    lines = ["parity: not run" if not parity else f"parity: {len(parity) - len(failed)} of {len(parity)} within budget"
             + (f"; FAILED: {', '.join(failed)}" if failed else "")]  # fmt: skip
    alone = len(figures["compared"]) == 1
    line = f"greedy tokens: identical for {len(prompts) - len(different)} of {len(prompts)} prompts"
    if different:
        line += f"; differ for {', '.join(different)}" + ("" if required else f" (not required in {where})")
    lines.append(f"greedy tokens: not compared, because only {figures['served'][0]} ran" if alone else line)
    if "transformers" not in figures["compared"]:
        same = sum(prompt["differs_from_transformers_at"] is None for prompt in prompts)
        lines.append(
            f"same tokens as transformers (cache not quantised): {same} of {len(prompts)} prompts (not required)"
        )
    if figures["bits_per_byte"] is not None:
        lines.append(in_words(figures["bits_per_byte"]))
    return {"parity_passed": not failed, "tokens_identical": not different,
            "passed": not failed and not (different and required), "lines": lines}  # fmt: skip

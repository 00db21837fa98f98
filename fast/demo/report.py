"""Output of the main job: tables on the console, one picture and a JSON file.

All three show the same figures: the dict that `measure` returns.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .predictions import format_in_words

# Colour of each compared project. docs/hooks/picture.py and docs/assets/site.css must have equal colours (tested).
COLOURS = {
    "fast": "#0072b2",
    "reference": "#009e73",
    "transformers": "#d55e00",
    "FlashMLA": "#c08500",
    "FA3": "#8a8a8a",
    "vLLM Triton": "#cc79a7",
    "cuDNN": "#8a6d3b",
    "FA2 (V padded)": "#4f4f9e",
    "FA4": "#b2182b",
    "FlashInfer": "#5f9e1f",
}
NO_CONTENDER = "#7f7f7f"  # colour of the bars of cache sizes, which belong to no project
# rows of the table of cache sizes: key of the figures, name in the table, name in the picture
CACHES = {
    "mla": (
        ("latent_bytes_per_1000_tokens", "latent (cached by both packages)", "latent"),
        ("expanded_bytes_per_1000_tokens", "expanded keys and values", "expanded keys\nand values"),
    ),
    "gqa": (
        (
            "grouped_bytes_per_1000_tokens",
            "keys and values of the KV heads (cached)",
            "keys and values\nof the KV heads",
        ),
        ("every_head_bytes_per_1000_tokens", "keys and values for every query head", "for every\nquery head"),
    ),
}
LAYERS = {"mla": "activations of layer 0", "gqa": "activations of each kind of layer"}
TAIL_LINES = 3  # how many of the last lines of each prompt are shown


def show(console: Console, figures: dict[str, Any], verbose: bool = False) -> None:
    """Print all figures: first the verdict, the speeds and the backends, then the details.

    Args:
        console: console to print to.
        figures: result of `measure`.
        verbose: print for each op why each backend serves or refuses it, instead of one line for each backend.
    """
    console.rule("verdict")
    for line in figures["verdict"]["lines"]:
        console.print(line, markup=False)
    show_speed(console, figures)
    show_kernels(console, figures, verbose)
    show_continuations(console, figures)
    show_identity(console, figures)
    show_parity(console, figures)
    show_costs(console, figures)


def show_continuations(console: Console, figures: dict[str, Any]) -> None:
    """Print the last `TAIL_LINES` lines of each prompt in a dim colour, and the generated text."""
    console.rule("continuations")
    if figures["note"] is not None:
        console.print(f"note: {figures['note']}", markup=False)
    for number, prompt in enumerate(figures["prompts"], 1):
        tail = prompt["text"].splitlines(keepends=True)[-TAIL_LINES:]
        hidden = len(prompt["text"]) - len("".join(tail))
        text = Text("… " if hidden else "", style="dim")
        text.append("".join(tail), style="dim")
        text.append(printable(prompt["continuation"]), style="bold green")
        title = f"{number}: {prompt['prompt_tokens']} tokens + {prompt['new_tokens']}"
        console.print(Panel(text, title=title, title_align="left"))


def printable(text: str) -> str:
    """Replace control characters by escape sequences; a model may generate control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def show_identity(console: Console, figures: dict[str, Any]) -> None:
    """Print for each prompt whether the compared packages, and transformers, generated the same tokens."""
    compared, settings = figures["compared"], figures["settings"]
    apart = "transformers" not in compared  # over this cache format, other tokens are no fault
    stored = format_in_words(settings["cache_format"], settings["fp8_mode"])
    title = f"greedy tokens, prompt by prompt ({settings['dtype']}, cache format {stored})"
    table = Table(title=title)
    table.add_column("prompt", justify="right")
    table.add_column("prompt tokens", justify="right")
    table.add_column("new tokens", justify="right")
    if len(compared) > 1:
        table.add_column(" = ".join(compared), justify="center")
    if apart:
        table.add_column("= transformers", justify="center")
    for number, prompt in enumerate(figures["prompts"], 1):
        same = prompt["identical"]
        verdict = Text("identical", "green") if same else Text(f"differ at token {prompt['differs_at']}", "bold red")
        at = prompt["differs_from_transformers_at"]
        cells = [verdict] * (len(compared) > 1) + ["yes" if at is None else f"differs at token {at}"] * apart
        table.add_row(str(number), str(prompt["prompt_tokens"]), str(prompt["new_tokens"]), *cells)
    console.print(table)


def show_parity(console: Console, figures: dict[str, Any]) -> None:
    """Print the parity table: the errors of each op and their budgets (`fast.parity`)."""
    if not figures["parity"]:
        console.print(f"parity table: left out, because only {figures['served'][0]} ran; --ops both compares packages")
        return
    dtype = figures["settings"]["dtype"]
    layers = LAYERS[figures["settings"]["family"]]
    table = Table(title=f"parity of fast with reference, {dtype}, {layers} (gold: reference in float64)")
    table.add_column("op", no_wrap=True)
    for column in ("max error", "budget", "mean error", "budget"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in figures["parity"]:
        exact = row["max_budget"] == 0 and row["mean_budget"] == 0
        good = "exact" if exact else "pass"
        verdict = Text(good, style="green") if row["passed"] else Text("FAIL", style="bold red")
        numbers = [f"{row[key]:.2e}" for key in ("max_error", "max_budget", "mean_error", "mean_budget")]
        table.add_row(row["op"], *(["0"] * 4 if exact and row["passed"] else numbers), verdict)
    console.print(table)


def show_speed(console: Console, figures: dict[str, Any]) -> None:
    """Print a table with the tokens per second of each package and of transformers."""
    table = Table(title="speed")
    table.add_column("package")
    for column in ("generated tokens", "seconds", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_column("prompts")
    for name, row in figures["speed"].items():
        table.add_row(name, str(row["tokens"]), f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.1f}", row["how"])
    console.print(table)


def show_kernels(console: Console, figures: dict[str, Any], verbose: bool) -> None:
    """Print which backend serves which op: a line for each backend; if verbose, a line for each op with all reasons."""
    kernels = figures["kernels"]
    console.print(f"kernels on {kernels['device']}" + (":" if verbose else " (--verbose gives every reason):"))
    for line in kernels["lines" if verbose else "summary"]:
        console.print(f"  {line}", markup=False)


def show_costs(console: Console, figures: dict[str, Any]) -> None:
    """Print the cache bytes of 1000 tokens, and the counts of steps."""
    cache = figures["cache"]
    table = Table(title="cache, all layers")
    table.add_column("per 1000 tokens")
    table.add_column("bytes", justify="right")
    for key, name, _ in CACHES[figures["settings"]["family"]]:
        table.add_row(name, f"{cache[key]:,}")
    table.add_row("ratio", f"{cache['ratio']:.1f} x")
    console.print(table)
    for name, row in figures["schedule"].items():
        line = f"{name}: {row['steps']} steps, {row['mixed_steps']} of them with decodes and prefills"
        if figures["settings"]["family"] == "mla":
            line += (
                f", {row['context_chunks']} chunks of cached context, at most {row['most_chunks_in_a_step']} in a step"
            )
        console.print(line)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write the picture: tokens per second, cache bytes, and the ratio of error to budget for each op.

    The file is an SVG drawing if its name ends in .svg, otherwise a PNG image.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings, parity = figures["settings"], figures["parity"]
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
             "svg.fonttype": "none", "svg.hashsalt": "mla-twins"}  # fmt: skip
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(11, 6.4) if parity else (6, 6.4), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.25)) if parity else figure.add_gridspec(2, 1)
        draw_speed(figure.add_subplot(grid[0, 0]), figures["speed"])
        draw_cache(figure.add_subplot(grid[1, 0]), figures["cache"], settings["family"])
        if parity:
            draw_parity(figure.add_subplot(grid[:, 1]), parity)
        identical = sum(prompt["identical"] for prompt in figures["prompts"])
        figure.suptitle(
            f"mla-twins: {len(figures['prompts'])} prompts, {settings['max_new_tokens']} new tokens each, "
            f"{settings['device']}, {settings['dtype']}\n"
            f"greedy tokens of {' and '.join(figures['compared'])}: identical for {identical} of "
            f"{len(figures['prompts'])} prompts, cache format "
            f"{format_in_words(settings['cache_format'], settings['fp8_mode'])}",
            fontsize=11,
        )
        if path.suffix.lower() == ".svg":
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        else:
            figure.savefig(path, dpi=150, format="png")
        pyplot.close(figure)


def draw_speed(axes: Any, speed: dict[str, Any]) -> None:
    """Draw one bar of tokens per second for each package and for transformers."""
    names = list(speed)
    rates = [speed[name]["tokens_per_second"] for name in names]
    bars = axes.bar(names, rates, width=0.6, color=[COLOURS[name] for name in names])
    axes.bar_label(bars, fmt="{:.0f}", padding=2)
    axes.set_xticks(range(len(names)), [f"{name}\n({speed[name]['how']})" for name in names])
    axes.set_title("generated tokens per second, prefill included")
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.15)


def draw_cache(axes: Any, cache: dict[str, Any], family: str) -> None:
    """Draw the size of the cache beside the size of a cache with keys and values of every head."""
    values = [cache[key] / 1e6 for key, _, _ in CACHES[family]]
    bars = axes.bar([name for _, _, name in CACHES[family]], values, width=0.5, color=NO_CONTENDER)
    axes.bar_label(bars, fmt="{:.2f}", padding=2)
    axes.set_title(f"cache per 1000 tokens, all layers: {cache['ratio']:.1f} times smaller")
    axes.set_ylabel("MB")
    axes.margins(x=0.25, y=0.15)


def draw_parity(axes: Any, parity: list[dict[str, Any]]) -> None:
    """Draw largest error / budget and mean error / budget for each op; both ratios must be at most 1."""
    positions = range(len(parity))
    ratios = {
        key: [budget_ratio(row[f"{key}_error"], row[f"{key}_budget"]) for row in parity] for key in ("max", "mean")
    }
    limit = max(1.0, *(min(value, 2.0) for values in ratios.values() for value in values))
    axes.barh([p - 0.19 for p in positions], ratios["max"], 0.36, color=COLOURS["fast"], label="largest error")
    outline = dict(facecolor="white", edgecolor=COLOURS["fast"], linewidth=0.8)
    axes.barh([p + 0.19 for p in positions], ratios["mean"], 0.36, label="mean error", **outline)
    for position, row in zip(positions, parity, strict=True):
        if not row["passed"]:
            axes.text(0.02, position, "FAIL", color="#b00020", va="center", fontweight="bold", fontsize=8)
        elif row["max_budget"] == 0:
            axes.text(0.01, position, "exact", va="center", fontsize=7.5)
        elif max(ratios["max"][position], ratios["mean"][position]) < 0.01:
            axes.text(0.01, position, "below 0.01", va="center", fontsize=7.5)
    axes.axvline(1, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(list(positions), [row["op"] for row in parity], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlim(0, limit * 1.05)
    axes.set_xlabel("error / computed budget (1 = the limit)")
    axes.set_title("fast against reference, op by op")
    axes.margins(y=0.01)
    axes.legend(loc="lower right", bbox_to_anchor=(0.93 / limit, 0.01), frameon=True, fontsize=8)


def budget_ratio(error: float, budget: float) -> float:
    """Return error / budget; for a budget of 0, return 0.0 if the error is 0, otherwise 10.0 (outside the axis)."""
    if budget > 0:
        return error / budget
    return 0.0 if error == 0 else 10.0


def without_nan(value: Any) -> Any:
    """Return the figures with None in place of NaN and infinity, because JSON has neither."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(figures: dict[str, Any], path: Path) -> None:
    """Write all figures to a file.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(without_nan(figures), indent=1, allow_nan=False) + "\n")

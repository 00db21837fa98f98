"""Draw the tables and charts of the site from docs/results/*.json when the site is built.

A page contains comments such as `<!-- results: times h200-decode.json . replayed -->`. Each comment is replaced by a
table or a chart. The first word after `results:` names a public method of `Results`, and the other words are the
arguments of the method. No number of a table is typed into a page, so the pages always agree with the results files.

A *contender* is an implementation that a benchmark measures: `fast`, a variant of `fast` such as "fast, planned", or a
*peer*, which is the implementation of another project.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cascades import cascade_table
from changed_results import changes_table
from charts import Chart, Line, Mark
from contenders import OURS, best, code, decode_summary, gain, in_order, is_ours, style_of
from fp8_errors import modes_table, weights_table
from fp8_loss import bits_table, random_table, scores_table
from layer_stages import layer_bars, layers_table, stages_table
from markdown_tables import DIMS, NONE, shapes_table, table
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from negative_results import rejected_list
from planning_tables import planning_table, schedules_table
from prefill_backends import prefill_backends_table
from ranks import ranks_table
from steps import NOT_MEASURED, host_table, not_measured, step_bars, step_table, warmup_table
from weights import expansions_table, products_table, scales_table

OURS_BEST = "fast, the fastest variant for each shape"
REQUEST = re.compile(r"^<!-- results: (?P<name>\w+) ?(?P<words>[^\n]*?) -->$", re.MULTILINE)
VERSIONS = {"python": "Python", "triton": "Triton", "cuda": "CUDA"}  # spelling on the page


def part_of(report: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the part of a results file at `path`: keys joined by dots ("benchmarks.decode"); "." is the whole file."""
    for key in filter(None, path.split(".")):
        report = report[key]
    return report


def ratio(value: float) -> str:
    """Return a ratio of two speeds as text: with two digits behind the point below 10, and otherwise with one."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(rows: Iterable[dict[str, Any]], way: str) -> float:
    """Return the largest value of |quartile - median| / median over all times of the rows."""
    times = [time for row in rows for time in row["times"][way].values()]
    return max(abs(quartile / time["median_us"] - 1) for time in times for quartile in time["quartiles_us"])


def described(dims: dict[str, Any]) -> str:
    """Return the dimensions of a row in words."""
    return ", ".join(f"{DIMS.get(key, key)} {value}" for key, value in dims.items())


def gb_s(ceilings: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (name, GB/s) of each memory bandwidth among the measured limits of the GPU (`ceilings`)."""
    return [(key.removesuffix("_gb_s"), value) for key, value in ceilings.items() if key.endswith("_gb_s")]


def tflops(ceilings: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (name, TFLOPS) of each matrix product among the measured limits of the GPU, the highest rate first."""
    found = [(key.removesuffix("_tflops").replace("_", " "), value) for key, value in ceilings.items()
             if key.endswith("_tflops")]  # fmt: skip
    return sorted(found, key=lambda entry: -entry[1])


class Results:
    """Draw tables and charts from docs/results; a page calls the public methods by their names."""

    def __init__(self, docs: Path, root: str = "") -> None:
        self._docs, self._root = docs, root

    def _load(self, name: str) -> dict[str, Any]:
        return json.loads((self._docs / "results" / name).read_text(encoding="utf-8"))

    def facts(self, name: str) -> str:
        """Return hardware, versions and date, and whether the sources of `fast` have changed since the measurement."""
        report = self._load(name)
        hardware = report["hardware"]
        if isinstance(hardware, dict):  # the results file of `python -m fast`
            hardware, threads = hardware["gpu"] or hardware["cpu"], hardware["threads"]
        else:
            threads = report["threads"]
        on = (
            [hardware, f"driver {report['driver']}"]
            if "driver" in report
            else [f"{threads} thread{'s' * (threads > 1)} of an {hardware}"]
        )
        if ranks := sorted(key for key in report.get("between_gpus", {}) if key.endswith(" GPUs")):
            on.insert(1, " and ".join(ranks))
        versions = [f"{VERSIONS.get(key, key)} {value}" for key, value in report["versions"].items() if value]
        lines = [f"{', '.join(on)}; {', '.join(versions)}; measured on {report['date'][:10]}"]
        if "fast_sha256" in report:
            same = report["fast_sha256"] == digest(self._docs.parent / OURS)
            lines.append(
                f"sources of `fast/`: sha256 `{report['fast_sha256'][:12]}`, "
                + ("unchanged since the measurement" if same else "changed since the measurement")
            )
        return f"*{'; '.join(lines)}.* Complete file: [`{name}`]({self._root}results/{name})."

    def command(self, name: str, path: str = ".") -> str:
        """Return the command that wrote the file, in a shell block."""
        commands = re.split(" && |; ", part_of(self._load(name), path)["command"])
        return "```sh\n" + "\n".join(commands) + "\n```"

    def times(self, name: str, path: str, way: str) -> str:
        """Return a table; its columns are the shape, (speed of `fast`) / (speed of the best peer), and the medians.

        Args:
            name: name of the results file.
            path: path of the part of the file that has the rows (see `part_of`).
            way: how the times were measured, such as "replayed" (many calls in a row from a CUDA graph).
        """
        part = part_of(self._load(name), path)
        rows = [row for row in part["rows"] if way in row["times"]]
        if not rows and way == "stepped":  # older results files have no "stepped" times
            return not_measured(part["command"])
        who = in_order(who for row in rows for who in row["times"][way])
        head, said, shapes = shapes_table([row["dims"] for row in rows])
        medians = sorted(time["median_us"] for row in rows for time in row["times"][way].values())
        unit, scale = ("ms", 1e-3) if medians[len(medians) // 2] > 2000 else ("us", 1.0)
        peers = [name for name in who if not is_ours(name)]
        ratio = "x the best peer's speed" if len(peers) > 1 else f"x {(peers or ['a peer'])[0]}'s speed"
        lines = []
        for row, shape in zip(rows, shapes, strict=True):
            times = row["times"][way]
            if not row["passed"]:
                lines.append([shape, "parity failed", *[NONE] * len(who)])
                continue
            shown = [f"{times[name]['median_us'] * scale:.1f}" if name in times else NONE for name in who]
            fastest = who.index(min(times, key=lambda name: times[name]["median_us"]))
            shown[fastest] = f"**{shown[fastest]}**"
            lines.append([shape, gain(times), *shown])
        words = [
            f"Times are medians in {unit}; the quartiles are within {100 * spread(rows, way):.1f} % of the medians"
        ]
        words += [f"all rows have {', '.join(said)}"] if said else []
        words += (
            ["the outputs of `fast` passed the comparison with `reference` in every row before the measurement"]
            if any(not found["passed"] for row in rows for each in row.get("parity", {}).values() for found in each)
            else ["the outputs of every row passed the comparison with `reference` before the measurement"]
            if all(row["passed"] for row in rows)
            else []
        )
        words += sorted(
            {f"{NONE} means that {who} was not measured: {why}" for row in rows for who, why in row["absent"].items()}
        )
        over = sorted(
            {who for row in rows for who, found in row.get("parity", {}).items()
             if not is_ours(who) and not all(comparison["passed"] for comparison in found)}
        )  # fmt: skip
        words += [f"the error of {' and '.join(over)} exceeds the budget"] if over else []
        columns = [head, ratio, *map(code, who)]
        if not peers and all(row["passed"] for row in rows):
            columns, lines = [columns[0], *columns[2:]], [[line[0], *line[2:]] for line in lines]
        shown = f'<div class="times" markdown>\n\n{table(columns, lines, 1)}\n\n</div>'
        return f"{shown}\n\n{'; '.join(words)}."

    def roofline(self, name: str, path: str, way: str) -> str:
        """Return a roofline chart: the GPU's limits, and for each row the best variant of `fast` and the best peer."""
        part = part_of(self._load(name), path)
        rows = [row for row in part["rows"] if way in row["times"] and row["passed"]]
        ceilings = part["ceilings"]
        marks, links, names = [], [], {}
        for row in rows:
            x, both = row["flops"] / row["bytes"], []
            for ours in (True, False):
                if (who := best(row["times"][way], ours)) is not None:
                    time = row["times"][way][who]
                    text = f"{who}, {described(row['dims'])}: {time['tflops']:.0f} TFLOPS, {time['median_us']:.1f} us"
                    marks.append(Mark(style_of(who), x, time["tflops"], text))
                    peer = who.split(",")[0]
                    names[style_of(who)] = OURS_BEST if ours else f"{peer}, if {peer} is the best peer"
                    both.append((x, time["tflops"]))
            links += [(both[0], both[1])] if len(both) == 2 else []
        peaks = tflops(ceilings)
        # one FLOP per byte at 1000 GB/s is 1 TFLOPS
        ways = dict(gb_s(ceilings))
        bandwidth = part["bandwidth"].removesuffix("_gb_s")
        rate = ways[bandwidth] / 1000
        top = peaks[0][1]
        left = min(min(mark.x for mark in marks) / 1.5, min(mark.y for mark in marks) / rate)
        right = max(max(mark.x for mark in marks) * 1.5, 2 * top / rate)
        lines = [
            Line(
                f"memory, {bandwidth}: {ways[bandwidth]:.0f} GB/s", "memory", [(left, left * rate), (top / rate, top)]
            ),
            *(
                Line(f"{label}: {peak:.0f} TFLOPS", f"product{order}", [(peak / rate, peak), (right, peak)])
                for order, (label, peak) in enumerate(peaks)
            ),
        ]
        shares = [mark.y / min(top, mark.x * rate) for mark in marks if mark.style.startswith("ours ")]
        description = (
            f"Roofline of {way} times: TFLOPS against FLOPs per byte, both logarithmic. {len(rows)} shapes; "
            f"fast reaches {100 * min(shares):.0f} to {100 * max(shares):.0f} percent of the ceiling, "
            f"which is memory at {ways[bandwidth]:.0f} GB/s or products at {top:.0f} TFLOPS. "
            "The table gives every time."
        )
        return Chart(description, "FLOPs per byte", "TFLOPS", lines, marks, names, links).html()

    def decode_summary(self, name: str) -> str:
        """Return sentences about all shapes of a decode: speed relative to the fastest peer, and shapes behind it."""
        return decode_summary(self._load(name))

    def steps(self, name: str) -> str:
        """Return the facts, bar chart, table and command of a results file of tests.benchmarks.step (whole steps)."""
        return self._whole(name, step_bars, step_table)

    def layers(self, name: str) -> str:
        """Return the facts, charts, tables and command of a results file of `tests.benchmarks.step --layer`."""
        return self._whole(name, layers_table, layer_bars, stages_table)

    def host(self, name: str) -> str:
        """Return the facts, table and command of a results file of tests.benchmarks.host (times on the CPU)."""
        return self._whole(name, host_table)

    def warmups(self, name: str) -> str:
        """Return the facts, table and command of a results file of tests.benchmarks.warmup (compiling ahead)."""
        return self._whole(name, warmup_table)

    def weights(self, name: str, part: str) -> str:
        """Return the facts, one table and the command of a results file of tests.benchmarks.weights.

        `part` selects the table: "products" (absorbed weights), "expansions" (latents to keys and values) or "scales".
        """
        drawings = {"products": products_table, "expansions": expansions_table, "scales": scales_table}
        return self._whole(name, drawings[part])

    def fp8_errors(self, name: str) -> str:
        """Return the facts, tables and command of a results file of tests.benchmarks.fp8_errors."""
        between = (
            "The same benchmark rounds absorbed weights of 16 heads, and measures the error of the other 15 heads:"
        )
        return self._whole(name, modes_table, lambda report: between, weights_table)

    def fp8_loss(self, name: str, part: str) -> str:
        """Return one table of a results file of tests.benchmarks.fp8_loss: "bits", "random" or "scores"."""
        return {"bits": bits_table, "random": random_table, "scores": scores_table}[part](self._load(name))

    def prefill_backends(self, name: str) -> str:
        """Return the facts, table and command of a results file of tests.benchmarks.backends."""
        return self._whole(name, prefill_backends_table)

    def measured(self, name: str, *ways: str) -> str:
        """Return the facts and the command of a results file, and a table of times for each of `ways` (see `times`)."""
        return self._whole(
            name, *(lambda report, way=way: f"**{way.capitalize()}**\n\n{self.times(name, '.', way)}" for way in ways)
        )

    def _whole(self, name: str, *drawings: Callable[[dict[str, Any]], str]) -> str:
        """Return the facts, drawings and command of a results file, or a note if it is missing and in NOT_MEASURED."""
        if name in NOT_MEASURED and not (self._docs / "results" / name).exists():
            return not_measured(NOT_MEASURED[name])
        report = self._load(name)
        return "\n\n".join([self.facts(name), *(draw(report) for draw in drawings), self.command(name)])

    def cascades(self, name: str) -> str:
        """Return facts, table and command of a results file of tests.benchmarks.gqa_cascade."""
        return self._whole(name, cascade_table)

    def ranks(self, name: str) -> str:
        """Return a table of decode steps on one GPU and on several GPUs: speedup, times, MB that a rank receives."""
        return f"{ranks_table(self._load(name)['between_gpus'])}\n\nTimes are medians in us."

    def decoded_tokens(self, name: str) -> str:
        """Return facts, table, chart and command of a results file of tests.benchmarks.gqa_vs_transformers."""
        return self._whole(name, lambda report: self.contexts(name))

    def contexts(self, name: str) -> str:
        """Return a table and a chart of the time to decode one token at several context lengths.

        The chart has no variants of `fast`, because they would have the colour of `fast`.
        """
        rows = self._load(name)["rows"]
        who = list(dict.fromkeys(row["who"] for row in rows))
        at = {(row["context"], row["who"]): row for row in rows}
        contexts = sorted({row["context"] for row in rows})
        drawn = [name for name in who if name == OURS or not is_ours(name)]
        lines = [
            [str(context), ratio(at[context, OURS]["times_faster_than_transformers"]),
             *(f"{at[context, name]['ms_median']:.1f}" for name in who)]
            for context in contexts
        ]  # fmt: skip
        head = [
            "context",
            "`fast`, x transformers' speed",
            *(name if name == "transformers" else f"`{name}`" for name in who),
        ]
        lines_drawn = [
            Line(name, style_of(name), [(context, at[context, name]["ms_median"]) for context in contexts])
            for name in drawn
        ]
        chart = Chart(
            "Milliseconds for one decoded token against the length of the context, both logarithmic: "
            + "; ".join(f"{name} {at[contexts[-1], name]['ms_median']:.0f} at {contexts[-1]} tokens" for name in drawn)
            + ".",
            "tokens of context",
            "ms per token",
            lines_drawn,
            [
                Mark(
                    style_of(name),
                    context,
                    at[context, name]["ms_median"],
                    f"{name}, {context} tokens: {at[context, name]['ms_median']:.1f} ms",
                )
                for name in drawn
                for context in contexts
            ],
        )  # fmt: skip
        return f"{table(head, lines, 1)}\n\nTimes are medians in ms.\n\n{chart.html()}"

    def planning(self, name: str, path: str) -> str:
        """Return a table of the time that the CPU needs to plan a step."""
        return planning_table(part_of(self._load(name), path)["batches"])

    def planned(self, name: str) -> str:
        """Return facts, tables and command of a results file of tests.benchmarks.planning on a GPU."""
        return self._whole(
            name, lambda report: planning_table(report["batches"]), lambda report: schedules_table(report["schedule"])
        )

    def crossover(self, name: str, path: str) -> str:
        """Return a table: the largest slowdown of the path from `choose_path`, in percent of the faster path's time."""
        rows = part_of(self._load(name), path)["heads"]
        ways = list(rows[0]["lost"])
        lines = [
            [str(row["N"]), str(len(row["points"])), *(f"{100 * row['lost'][way]:.1f} %" for way in ways)]
            for row in rows
        ]
        return table(["heads", "shapes", *(f"largest slowdown with {way} costs" for way in ways)], lines, 1)

    def speed(self, name: str, path: str) -> str:
        """Return a table of the tokens per second of the main job, `python -m fast`."""
        part = part_of(self._load(name), path)
        lines = [
            [f"`{who}`" if who != "transformers" else who, row["how"], f"{row['tokens_per_second']:.1f}"]
            for who, row in part["speed"].items()
        ]
        return table(["package", "prompts", "tokens per second"], lines, 2)

    def adapters(self, name: str) -> str:
        """Return a table of calls of `fast` through adapters, beside the same calls of the libraries alone."""
        lines = []
        for row in self._load(name)["rows"]:
            host, replayed = ([row[key][who]["median_us"] for who in ("fast", "library")]
                              for key in ("host_us", "replayed_us"))  # fmt: skip
            cells = [*(f"{us:.0f}" for us in host), *(f"{us:.1f}" for us in replayed)]
            lines.append([code(row["backend"]), row["row"], *cells])
        titles = ["host: fast", "host: library", "replayed: fast", "replayed: library"]
        return table(["backend", "call, us", *titles], lines, 2)

    def checks(self, name: str) -> str:
        """Return a table of the checks that ran on the GPU, with their results."""
        report, lines = self._load(name), []
        for stage in (stage for stage in report if isinstance(report[stage], dict) and "ok" in report[stage]):
            found = report[stage]
            if "skipped" in found:
                left_out = sum(found["skipped"].values())
                said = f"{found['passed']} passed, {len(found['failed'])} failed, {left_out} skipped"
            elif "ops" in found:
                said = f"{len(found['ops'])} ops, {len(found['failed'])} failed"
            else:
                said = "; ".join(line.strip("= ") for line in found.get("verdict", {}).get("lines") or found["summary"])
            lines.append([stage.replace("_", " "), "passed" if found["ok"] else "**not passed**", said])
        return table(["check", "verdict", "summary"], lines, 3)

    def changes(self, name: str) -> str:
        """Return a table of recorded results: how many have the same bits as before, and which changes had a reason."""
        return changes_table(self._load(name))

    def mutants(self, name: str) -> str:
        """Return a table of counts of mutants (planted faults) for each subject: drawn, noticed by a test, survived."""
        report = self._load(name)
        columns = {"judged": "drawn", "killed": "a test failed", "timed out": "timed out", "survived": "survived"}
        rows = [[subject, *(str(counts[key]) for key in columns)]
                for subject, counts in (*report["by_subject"].items(), ("all", report["all"]))]  # fmt: skip
        noticed = report["all"]["judged"] - report["all"]["survived"]
        said = (
            f"{noticed} of {report['all']['judged']} mutants were noticed, {noticed / report['all']['judged']:.1%}. "
            f"The mutants were drawn with seed {report['seed']} out of {report['population']}, with cosmic-ray "
            f"{report['versions']['cosmic-ray']}, on {report['date']}. Complete file: [`{name}`](results/{name})."
        )
        return f"{table(['subject', *columns.values()], rows, 1)}\n\n{said}"

    def negative(self, name: str) -> str:
        """Return a Markdown list of the entries of the log `name` (a Markdown file) that have rejected experiments."""
        text = re.sub(r"^```.*?^```$", "", (self._docs / name).read_text(encoding="utf-8"), flags=re.M | re.S)
        return rejected_list(text, name)


def digest(folder: Path) -> str:
    """Return the sha256 of the Python sources of a folder, computed as in `digest` of tests/benchmarks/report.py."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def filled(markdown: str, docs: Path, root: str = "") -> str:
    """Return a page in which each comment `<!-- results: ... -->` is replaced by its table or chart.

    `root` leads from the folder of the page to the folder `docs`, such as "../"; links to results files begin with it.
    """
    results = Results(docs, root)

    def draw(request: re.Match[str]) -> str:
        draw: Callable[..., str] | None = getattr(results, request["name"], None)
        if draw is None or request["name"].startswith("_"):
            raise PluginError(f"expected the name of a table or chart, got {request['name']!r}: {request.group()}")
        return draw(*request["words"].split())

    return REQUEST.sub(draw, markdown)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the comments `<!-- results: ... -->` of a page by tables and charts."""
    return filled(markdown, Path(config.docs_dir), "../" * page.file.src_uri.count("/"))

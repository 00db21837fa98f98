"""Tests of the eleven notebooks of the learning path: each notebook runs, and its stored outputs are up to date."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

for needed in ("ipykernel", "ipywidgets", "matplotlib", "transformers"):
    pytest.importorskip(needed)
nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
channels = pytest.importorskip("jupyter_client.channels")

ROOT = Path(__file__).parents[2]
NAMES = [
    "01-latent",
    "02-two-paths",
    "03-softmax-in-pieces",
    "04-paged-cache",
    "05-chunked-prefill",
    "06-decode-kernel",
    "07-context-parallelism",
    "08-serving",
    "09-trusting-a-kernel",
    "10-cache-formats",
    "11-what-is-cached",
]
SECONDS, ALL_SECONDS = 60, 240  # limits in CPU seconds: of one notebook, and of all notebooks together
LAST_CELL = """
import resource

print(sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""
TOOK: dict[str, float] = {}  # notebook: CPU seconds that it took in `test_runs`
LARGEST = 300_000  # largest size of a notebook file in bytes, including its figures
OF_ONE_MACHINE = re.compile(r"/tmp/|/home/|/root/|site-packages|\b0x[0-9a-f]{8,}", re.IGNORECASE)


def load(name: str):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def interactive(cell) -> bool:
    """Return True if the cell shows a slider; the output of such a cell is not stored."""
    return "interactive" in cell.metadata.get("tags", ())


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def form(cell) -> list[tuple]:
    """Return the kinds of a cell's outputs, and the words of its printed text with every number replaced by 0.

    Some numbers, such as times, differ between machines.
    """
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            words = re.sub(r"[-+]?(\d[\d.,]*)(e[-+]?\d+)?", "0", output.text).split()
            if found and found[-1][:2] == ("stream", output.name):
                words = [*found.pop()[2], *words]
            found.append(("stream", output.name, words))
        else:
            found.append((output.output_type, *sorted(output.get("data", {}))))
    return found


def test_eleven_notebooks():
    """List the folder notebooks -> the eleven notebooks of the learning path, and no other notebook."""
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_stored(name):
    """Read the stored outputs of a notebook -> complete, without errors, and small.

    - At least five cells have an output, and at least one output is an SVG figure.
    - No output is an error, a warning or a PNG image, and no text output is longer than 60 lines.
    - No output contains a path or a memory address of the machine that ran the notebook.
    - The file has at most LARGEST bytes.
    """
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = load(name)
    nbformat.validate(notebook)
    assert path.stat().st_size <= LARGEST
    cells = [cell for cell in code_cells(notebook) if not interactive(cell)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum(bool(cell.outputs) for cell in cells) >= 5
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output.output_type != "error" and output.get("name") != "stderr", output
        text = output.get("text", "") + "".join(
            value for kind, value in output.get("data", {}).items() if kind.startswith("text/")
        )
        assert not OF_ONE_MACHINE.search(text), text
        assert len(text.splitlines()) <= 60
        assert "image/png" not in output.get("data", {})  # a PNG image cannot follow the colour scheme, but SVG can
    assert all(not cell.outputs for cell in code_cells(notebook) if interactive(cell))


@pytest.mark.parametrize("name", NAMES)
def test_fits_a_page(name):
    """Read code and printed text -> lines of at most 80 columns, because a page of the site has 80 columns."""
    for cell in code_cells(load(name)):
        printed = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        for line in "\n".join([cell.source, *printed]).splitlines():
            assert len(line) <= 80, line


@pytest.mark.parametrize("name", NAMES)
def test_cells_that_fold(name):
    """Read the tags of the cells -> tags that hide the set-up and the answers on the site until a click.

    The first code cell is the set-up. The notebook has two worked problems, and two code cells answer them. The two
    cells follow the heading "The answers in code". Jupyter hides the code of all these cells as well.
    """
    cells = load(name).cells
    assert "setup" in code_cells(load(name))[0].metadata["tags"]
    [answers] = [index for index, cell in enumerate(cells) if cell.source.startswith("## The answers in code")]
    tagged = [index for index, cell in enumerate(cells) if "answer" in cell.metadata.get("tags", ())]
    assert tagged == [answers + 1, answers + 2]
    folded = [cell for cell in cells if {"setup", "answer"} & {*cell.metadata.get("tags", ())}]
    assert all(cell.metadata["jupyter"]["source_hidden"] is True for cell in folded)
    assert cells[-1].source.startswith("## Read on\n") and cells[-1].source.count("](https://") >= 2


@pytest.mark.parametrize("name", NAMES)
def test_teaches(name):
    """Read a notebook -> it has all parts of a lesson.

    - The title begins with the number of the notebook. Links to the previous and to the next notebook follow.
    - At least six code cells check a statement with an assert.
    - There is exactly one takeaway. Two worked problems follow it, each with an answer that opens on a click.
    """
    notebook = load(name)
    number = NAMES.index(name) + 1
    first = notebook.cells[0].source
    assert first.startswith(f"# {number}. ")
    for neighbour in NAMES[max(0, number - 2) : number + 1]:
        assert neighbour == name or f"]({neighbour}.ipynb)" in first
    sources = [cell.source for cell in notebook.cells]
    [takeaway] = [index for index, text in enumerate(sources) if re.search(r"^> \*\*Takeaway\.\*\* ", text, re.M)]
    problems = [cell for cell in notebook.cells[takeaway:] if cell.cell_type == "markdown"]
    text = "\n".join(cell.source for cell in problems)
    assert "## Worked problems" in text
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>Answer</summary>") == 2
    checked = [cell.source for cell in notebook.cells[takeaway:] if cell.cell_type == "code"]
    assert len(checked) >= 2 and all("assert" in source for source in checked)
    asserts = re.compile(r"\bassert\b|assert_close|assert_equal")
    assert sum(bool(asserts.search(cell.source)) for cell in code_cells(notebook)) >= 6


READ = channels.AsyncZMQSocketChannel.get_msg
LONGEST_WAIT = 1  # seconds


async def read_in_short_waits(channel, timeout=None):
    """Read a message of a notebook's process, as READ does, with waits of at most LONGEST_WAIT.

    Now and then, the event loop of pyzmq misses a message. It then finds the message at the end of the wait.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            return await READ(channel, min(left, LONGEST_WAIT))
        except queue.Empty:
            if left <= LONGEST_WAIT:
                raise


def test_missed_messages_are_read_soon():
    """Let the event loop miss a message -> one short wait later it is read; if none comes, the wait ends in time."""

    class Missing:
        def __init__(self, waits):
            self.waits = waits  # number of waits after which a message has come

        async def poll(self, timeout_ms):
            await asyncio.sleep(timeout_ms / 1000)
            self.waits -= 1
            return self.waits <= 0

    def wait(waits, timeout):
        channel = SimpleNamespace(socket=Missing(waits), _recv=lambda: asyncio.sleep(0, "reply"))
        start = time.monotonic()
        return asyncio.run(read_in_short_waits(channel, timeout)), time.monotonic() - start

    reply, seconds = wait(1, 30)
    assert reply == "reply" and seconds < 10
    assert wait(2, None)[0] == "reply"
    with pytest.raises(queue.Empty):
        wait(99, 0.2)


@pytest.fixture(scope="module")
def matplotlib_folder(tmp_path_factory) -> Path:
    """One folder for all notebooks, because matplotlib looks for all fonts of the machine when its folder is empty."""
    return tmp_path_factory.mktemp("matplotlib")


@pytest.mark.parametrize("name", NAMES)
def test_runs(name, tmp_path, matplotlib_folder, monkeypatch):
    """Run a notebook from an empty directory, without a network -> the same outputs as stored, apart from numbers.

    The notebook runs in a new process, with the Python interpreter of this test.
    """
    kernel = tmp_path / "jupyter" / "kernels" / "twins"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "twins", "language": "python"}))
    for variable, folder in (("JUPYTER_PATH", "jupyter"), ("IPYTHONDIR", "ipython")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setenv("MPLCONFIGDIR", str(matplotlib_folder))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    stored, notebook = load(name), load(name)
    monkeypatch.setattr(channels.AsyncZMQSocketChannel, "get_msg", read_in_short_waits)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="twins", resources={"metadata": {"path": str(empty)}}
    )
    notebook.cells.append(nbformat.v4.new_code_cell(LAST_CELL))
    client.execute()
    TOOK[name] = float(notebook.cells.pop().outputs[0].text)
    assert TOOK[name] < SECONDS
    for before, after in zip(code_cells(stored), code_cells(notebook), strict=True):
        if not interactive(before):
            assert form(after) == form(before), before.source


def test_together():
    """Add up the times that `test_runs` measured -> all notebooks together take less than ALL_SECONDS."""
    if len(TOOK) < len(NAMES):
        pytest.skip("not all notebooks ran in this process")
    assert sum(TOOK.values()) < ALL_SECONDS

"""Tests of the choice of the fastest backend from measured times."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

import fast
from fast import backends
from fast.backends import AttentionSizes, Backend, KernelRequest, measured
from fast.backends.measured import MEASURED_DIMS, fastest, read_table
from fast.backends.own import CPU
from fast.mla.prefill_choice import prefill_requests

from ..benchmarks import backends as benchmark
from ..support import commands
from ..support.backends import registered
from ..support.factories import DIRECT, make_batch

OP = "flash_attn_varlen"
DIMS = (("qk_head_dim", DIRECT.qk_head_dim), ("v_head_dim", DIRECT.v_head_dim))
NAMES = ("flash_attn_3", "flashinfer", "triton")


def request(sizes, causal=True):
    sizes = None if sizes is None else AttentionSizes.rounded(*sizes)
    mask = "causal" if causal else None
    return KernelRequest(OP, torch.device("cuda", 0), torch.bfloat16, MEASURED_DIMS, mask=mask, sizes=sizes)


@pytest.fixture
def hopper(monkeypatch):
    """Take the times that were measured on compute capability 9.0."""
    table = read_table(measured.TABLES / "9.0.json")
    monkeypatch.setattr(measured, "table_of", lambda device: table)
    return table


def test_sizes_are_rounded_up():
    assert AttentionSizes.rounded(1, 3, 17, 2048) == (1, 4, 32, 2048)
    assert AttentionSizes.rounded(0, 128, 0, 2049) == (1, 128, 1, 4096)


def test_every_measured_row_gets_its_fastest_backend(hopper):
    """Ask for the sizes of each row -> the backend that was the fastest in this row, of those that are present."""
    for row in hopper.rows:
        asked = request(row.sizes, row.causal)
        for names in (NAMES, NAMES[1:], NAMES[::2]):
            assert fastest(names, [asked]) == min(names, key=row.times_us.get)
    winners = {min(NAMES, key=row.times_us.get) for row in hopper.rows}
    assert winners == set(NAMES)  # the winner depends on the shape


def test_the_project_s_own_kernel_is_among_the_measured_backends(hopper):
    """With `hopper`, as on an H200 with all libraries -> `hopper` serves all shapes but the two longest prompts."""
    names, chosen = ("flash_attn_3", "flashinfer", "hopper", "triton"), {}
    for row in hopper.rows:
        asked = request(row.sizes, row.causal)
        chosen[row.shape] = fastest(names, [asked])
        assert chosen[row.shape] == min(names, key=row.times_us.get)
    longest = {"1 x 16384 new tokens, 128 heads", "1 x 32768 new tokens, 16 heads"}
    assert {shape for shape, name in chosen.items() if name == "flash_attn_3"} == longest
    assert {name for shape, name in chosen.items() if shape not in longest} == {"hopper"}


def test_several_calls_of_a_step(hopper):
    """A step with a long prompt and a chunk for few queries -> the backend with the smallest sum of times."""
    prompt, chunk = request((1, 128, 16384, 16384)), request((16, 128, 64, 2048), causal=False)
    assert fastest(NAMES, [prompt]) == "flash_attn_3" and fastest(NAMES, [chunk]) == "triton"
    assert fastest(NAMES, [prompt, chunk]) == "flash_attn_3"
    assert fastest(NAMES, [request((8, 128, 512, 512)), chunk]) == "triton"


def test_priorities_decide_without_times(hopper, monkeypatch):
    """Without sizes, without a table, or with a first backend that was not measured -> the highest priority."""
    far = (8, 128, 512, 512)
    assert fastest(NAMES, [request(None)]) == "flash_attn_3"
    assert fastest(("new", *NAMES), [request(far)]) == "new"
    assert fastest(("triton", "new"), [request(far)]) == "triton"
    monkeypatch.setattr(measured, "table_of", lambda device: None)
    assert fastest(NAMES, [request(far)]) == "flash_attn_3"


@pytest.mark.parametrize("change", [
    {"dtype": torch.float16}, {"head_dims": (("qk_head_dim", 64), ("v_head_dim", 64))},
    {"head_dims": (("qk_head_dim", 192), ("v_head_dim", 192))}, {"head_dims": ()},
])  # fmt: skip
def test_priorities_decide_for_what_was_not_measured(hopper, change):
    """Change the dtype or the head dims of measured rows -> the highest priority, although it is the slowest."""
    names = ("triton", "flash_attn_3", "hopper")
    for row in hopper.rows:
        asked = request(row.sizes, row.causal)
        assert fastest(names, [asked]) == min(names, key=row.times_us.get)
        other = dataclasses.replace(asked, **change)
        assert fastest(names, [other]) == "triton" and not measured.expected_times(names, [other])
        assert fastest(names, [asked, other]) == "triton"  # one call of the step has no times


def test_the_measured_head_dims_are_those_of_the_benchmark(hopper):
    """Compare the rows of the table with the calls of the benchmark -> the same dtype and head dims."""
    for row in hopper.rows:
        requests, heads, queries, keys = row.sizes
        shape = benchmark.Row(requests, queries, heads, 0 if row.causal else keys)
        assert row.serves(benchmark.request_of(shape, torch.bfloat16, "cuda"))


def test_no_table_for_a_cpu():
    assert measured.table_of(torch.device("cpu")) is None
    asked = KernelRequest(OP, torch.device("cpu"), torch.float32, sizes=AttentionSizes.rounded(1, 2, 3, 4))
    assert backends.select(asked).name == "cpu"


def test_wrong_sizes(plain_errors):
    with pytest.raises(TypeError, match="^request.sizes: expected an AttentionSizes or None, got tuple$"):
        backends.select(KernelRequest(OP, torch.device("cpu"), torch.float32, sizes=(1, 2, 3, 4)))


def test_requests_of_a_step():
    """Plan a step with two chunks of context -> the sizes of the new tokens, then those of each chunk."""
    builder = fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, workspace_tokens=16, batch_invariant=True)
    prefill = builder.build(0, make_batch([6, 4], [6, 36]).common).prefill
    found = prefill_requests(prefill, DIRECT, torch.float32)
    assert [(each.mask, each.lse) for each in found] == [
        ("causal", False),
        ("causal", True),
        (None, True),
        (None, True),
    ]
    assert [each.sizes for each in found] == [(2, 4, 8, 8), (2, 4, 8, 8), (2, 4, 8, 16), (2, 4, 8, 16)]


def test_the_table_is_the_published_result():
    """The table that ships is the results file that the performance page shows."""
    folder = measured.TABLES.parents[2] / "docs" / "results"
    assert json.loads((measured.TABLES / "9.0.json").read_text()) == json.loads(
        (folder / "h200-backends.json").read_text()
    )


def explained(**options) -> dict[str, str]:
    """Return the line of `explain` for each op of a layer on the CPU."""
    lines = backends.explain(DIRECT, device="cpu", dtype=torch.float32, **options).splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.fixture
def shapes(monkeypatch):
    """Measure two backends for three shapes; "slow" has the highest priority, and "quick" wins for two shapes."""
    rows = [
        measured.MeasuredRow(causal, AttentionSizes(*sizes), {"slow": slow, "quick": quick}, torch.float32, DIMS)
        for causal, sizes, slow, quick in (
            (True, (4, 128, 2048, 2048), 9.0, 5.0), (True, (1, 16, 32768, 32768), 5.0, 9.0),
            (False, (16, 128, 64, 2048), 9.0, 5.0),
        )
    ]  # fmt: skip
    # the command `python -m fast backends` asks for a model with the measured head dims
    others = [row._replace(head_dims=MEASURED_DIMS) for row in rows]
    monkeypatch.setattr(measured, "table_of", lambda device: measured.MeasuredTable("an X100", (*rows, *others)))
    slow, quick = (
        Backend(name, priority, "cpu", {OP: CPU.ops[OP]}, library="L")
        for name, priority in (("slow", 30), ("quick", 20))
    )
    with registered(slow), registered(quick):
        yield rows


OTHERS = ("4 x 2048 new tokens, 128 heads", "16 x 64 new tokens over 2048 tokens of context, 128 heads")


def test_explain_names_the_shapes_for_which_another_backend_is_chosen(shapes):
    """Explain a layer whose prefills are chosen by measured times -> the GPU, and the shapes with another backend."""
    said = explained()
    assert said[OP].startswith(
        f"slow, chosen by measured times for the nearest shape (measured on an X100); for other shapes: quick for "
        f"{OTHERS[0]}, for {OTHERS[1]} ("
    )
    assert all(line.startswith("cpu, chosen by priority (") for op, line in said.items() if op != OP)
    for row in shapes:  # the explanation agrees with the choice
        asked = KernelRequest(OP, torch.device("cpu"), torch.float32, DIMS, lse=True, sizes=row.sizes,
                              mask="causal" if row.causal else None)  # fmt: skip
        assert (backends.select(asked).name == "quick") == (row.shape in OTHERS)
    assert explained(backend={OP: "quick"})[OP] == "quick, bound"


def test_explain_without_another_choice(shapes):
    """Let one backend win for every shape, or let the backend of the highest priority have no time."""
    shapes[0].times_us["slow"] = shapes[2].times_us["slow"] = 1.0
    wanted = "slow, chosen by measured times for the nearest shape (measured on an X100), for every measured shape ("
    assert explained()[OP].startswith(wanted)
    with registered(Backend("new", 40, "cpu", {OP: CPU.ops[OP]}, library="L")):
        assert explained()[OP].startswith("new, chosen by priority (")


def test_the_table_of_backends_names_the_shapes(shapes, capsys):
    """`python -m fast backends` prints how each backend was chosen; a prompt without context has no chunk shapes."""
    from fast.__main__ import main

    assert main(["backends", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["chosen_by"]
    assert found["mla_decode"] == {
        "how": "chosen by priority", "gpu": None, "shapes": {}, "in_words": "chosen by priority",
    }  # fmt: skip
    assert (found[OP]["how"], found[OP]["gpu"]) == ("chosen by measured times", "an X100")
    assert found[OP]["shapes"] == {"quick": list(OTHERS)}
    assert found[f"{OP}, without context"]["shapes"] == {"quick": [OTHERS[0]]}
    assert main(["backends", "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "chosen by priority" in text and "quick for 4 x 2048 new tokens" in text


COMPILED = """
import torch

import fast

compiled = torch.compile(
    lambda q, starts, longest: tuple(fast.flash_attn_varlen(q, q, q, starts, starts, longest, longest, 0.5, True)),
    fullgraph=True, dynamic=True, backend="eager",
)
for lens in ([3], [5], [7, 4]):
    q, starts = torch.randn(sum(lens), 2, 8), torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out, lse = compiled(q, starts, max(lens))
    wanted = fast.flash_attn_varlen(q, q, q, starts, starts, max(lens), max(lens), 0.5, True)
    assert torch.equal(out, wanted.out) and torch.equal(lse, wanted.lse)
"""


def test_compiled_with_any_lengths():
    """Trace `flash_attn_varlen` with dynamic shapes, in a process without run-time checks -> the same results."""
    status, said = commands.run([sys.executable, "-c", COMPILED], 300.0)
    assert status == 0, said

"""Tests of the benchmark of grouped-query attention: its counts, its check and its contenders. No time is measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ..benchmarks import contest, gqa, gqa_cascade
from ..benchmarks.gqa import ROWS, Row
from ..benchmarks.timing import Spread


def small(row: Row) -> Row:
    """Return a row of the same kind that a CPU computes within a second."""
    return replace(
        row, B=min(row.B, 3), Sq=min(row.Sq, 40), S=256 if row.shared else 160, N=8, Nkv=2, D=32,
        window=min(row.window, 50), shared=128 if row.shared else 0,
    )  # fmt: skip


def test_counts():
    """Count the work of rows -> the numbers computed by hand."""
    decode = Row.parse("128", "1", "4096", "64", "8", "128", "0", "0", "plain")
    assert decode == ROWS[0]
    # keys and values: 2 * 128 * 4096 * 8 * 128 elements; queries and output: 2 * 128 * 64 * 128 elements
    assert decode.bytes == 2 * (1_073_741_824 + 2_097_152)
    assert decode.flops == 4 * 128 * 64 * 128 * 4096
    assert replace(decode, kind="fp8").bytes == 1_073_741_824 + 2 * 2_097_152
    window = replace(decode, window=128, kind="sinks")
    assert window.bytes == 2 * (33_554_432 + 2_097_152) and window.flops == decode.flops // 32
    prefill = Row(1, 4, 10, 1, 1, 2)
    assert prefill.flops == 4 * 2 * (7 + 8 + 9 + 10) and replace(prefill, window=8).flops == 4 * 2 * (7 + 8 + 8 + 8)
    assert prefill.read_keys == 10 and replace(prefill, window=3).read_keys == 6
    assert Row(5, 1, 130, 1, 1, 2, shared=128).read_keys == 128 + 5 * 2


@pytest.mark.parametrize("row", ROWS, ids=contest.row_name)
def test_contenders_are_within_their_budgets(row):
    """Run every variant of `fast` on a small row of each kind -> the check passes; a changed output fails."""
    row = small(row)
    case = gqa.make_case(row, None, None, device="cpu")
    assert next(iter(case.contenders)) == "fast" and (gqa.WHOLE in case.contenders) == bool(row.shared)
    for contender in case.contenders.values():
        value = contender.view(contender.calls[0]())
        assert all(found.passed for found in case.check(value))
        value.out[-1, -1] *= 1.1
        assert not all(found.passed for found in case.check(value))


@pytest.mark.parametrize(
    "changes", [dict(B="0"), dict(shared="100"), dict(shared="64", window="5"), dict(kind="int8"), dict(Sq="5000")]
)
def test_invalid_rows(changes):
    texts = [changes.get(name, str(value)) for name, value in vars(ROWS[0]).items()]
    with pytest.raises(ValueError, match="at least 1|multiple of 64"):
        Row.parse(*texts)


@pytest.mark.parametrize("whole, cascade", [(30.0, 20.0), (20.0, 30.0)])
def test_loss_of_a_choice(whole, cascade, monkeypatch):
    """Measure one point with fixed times -> both ways run, and the loss compares the choice with the faster way."""
    calls = {}

    class FixedClock:
        def replayed(self, contenders):
            calls.update({who: [call() for call in given] for who, given in contenders.items()})
            return {who: Spread.of([{"whole": whole, "cascade": cascade}[who]]) for who in contenders}

    found = gqa_cascade.measure(gqa.Row(2, 1, 80, 4, 2, 64, shared=64), FixedClock(), "cpu")
    assert found["dims"] == {"B": 2, "N": 4, "Nkv": 2, "D": 64, "prefix": 64, "suffix": 16}
    assert found["loss"] == pytest.approx(max(0, {"whole": whole, "cascade": cascade}[found["chosen"]] / 20 - 1))
    for one, other in zip(calls["whole"], calls["cascade"], strict=True):
        torch.testing.assert_close(one.lse, other.lse, rtol=1e-5, atol=1e-5)


def test_choices_for_times_of_an_earlier_run(tmp_path, capsys):
    """Give the times of two points -> the choices of the present sources and their losses; the times stay."""
    dims = {"B": 128, "N": 64, "Nkv": 8, "D": 128, "prefix": 16384, "suffix": 64}
    point = {"dims": dims, "times_us": {"whole": 100.0, "cascade": 10.0}, "chosen": "whole", "loss": 9.0}
    short = {**point, "dims": dims | {"B": 2, "prefix": 64}, "chosen": "cascade"}
    earlier = {"command": "x", "multiprocessors": 132, "points": [point, short], "largest_loss": 9.0}
    path = tmp_path / "times.json"
    path.write_text(json.dumps(earlier))
    assert gqa_cascade.main(["--times", str(path), "--json", str(path)]) == 1  # the second choice loses
    found = json.loads(path.read_text())
    assert [each["chosen"] for each in found["points"]] == ["cascade", "whole"]
    assert [each["loss"] for each in found["points"]] == [0.0, 9.0] and found["largest_loss"] == 9.0
    assert [each["times_us"] for each in found["points"]] == [point["times_us"]] * 2 and found["command"] == "x"
    assert set(found["choices"]) == {"command", "date", "fast_sha256"}
    for wrong in ({}, {**earlier, "points": [{}]}, {**earlier, "points": []}):
        path.write_text(json.dumps(wrong))
        assert gqa_cascade.main(["--times", str(path)]) == 2
        assert "--times: expected a results file" in capsys.readouterr().err

"""Tests of backends that another distribution declares, with a small distribution on the search path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MODULE = '''
from dataclasses import replace

from fast.backends import Backend
from fast.backends.own import CPU


def attend(*arguments):
    """Attend with the backend "cpu", and say so."""
    from fast.kernels.cpu import flash_attn_varlen

    print("toy attends")
    return flash_attn_varlen(*arguments)


TOY = Backend("toy", -5, "cpu", {"flash_attn_varlen": replace(CPU.ops["flash_attn_varlen"], launcher=attend)})
MORE = lambda: [replace(TOY, name="second"), replace(TOY, name="third")]
'''
ENTRIES = """
[mla_twins.backends]
toy = toy_backends:TOY
more = toy_backends:MORE
broken = toy_backends_broken:BACKEND
twice = toy_backends:TOY
exits = toy_backends_exits:BACKEND
"""
PROGRAM = """
import warnings

import torch

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import fast

    names = [backend.name for backend in fast.backends.registered()]
print("names:", *names)
for warning in said:
    if issubclass(warning.category, RuntimeWarning):
        print("warning:", warning.message)
q = torch.randn(3, 2, 8)
starts = torch.tensor([0, 3], dtype=torch.int32)
call = (q, q, q, starts, starts, 3, 3, 1.0, True)
plain, named = fast.flash_attn_varlen(*call), fast.flash_attn_varlen(*call, backend="toy")
print("equal:", torch.equal(plain.out, named.out))
"""
TABLE = "import sys, warnings; warnings.simplefilter('ignore'); from fast.__main__ import main; main(sys.argv[1:])"


def test_a_distribution_with_backends(tmp_path):
    """Put a distribution with five entry points on the path -> its backends serve; three faulty entries are named.

    One entry point fails at import, one has the name of a backend that is already registered, and one ends the program
    at import. The table of backends has their errors, as text and in JSON.
    """
    (tmp_path / "toy_backends.py").write_text(MODULE)
    (tmp_path / "toy_backends_broken.py").write_text("raise OSError('libtoy.so was not found')\n")
    (tmp_path / "toy_backends_exits.py").write_text("raise SystemExit(3)\n")
    info = tmp_path / "toy_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")])

    def output_of(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", *command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = output_of(PROGRAM).splitlines()
    assert lines[0].startswith("names: cpu triton hopper torch torch_flash")
    assert {"toy", "second", "third"} <= set(lines[0].split())
    warnings = sorted(line for line in lines if line.startswith("warning: "))
    assert len(warnings) == 3, warnings
    assert warnings[0].startswith("warning: backend broken of toy_backends_broken:BACKEND is left out: OSError: libto")
    assert warnings[1] == "warning: backend exits of toy_backends_exits:BACKEND is left out: SystemExit: 3"
    assert warnings[2].startswith(
        "warning: backend twice of toy_backends:TOY is left out: ValueError: backend.name: expe"
    )
    assert lines[-2:] == ["toy attends", "equal: True"]  # chosen by name alone: its priority is below that of "cpu"
    left_out = json.loads(output_of(TABLE, "backends", "--device", "cpu", "--json"))["left_out"]
    assert [each["name"] for each in left_out] == ["broken", "twice", "exits"]
    assert left_out[2] == {"name": "exits", "value": "toy_backends_exits:BACKEND", "error": "SystemExit: 3"}
    table = " ".join(output_of(TABLE, "backends", "--device", "cpu").replace("│", " ").split())
    assert "broken toy_backends_broken:BACKEND left out OSError: libtoy.so was not found" in table

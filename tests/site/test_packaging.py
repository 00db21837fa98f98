"""Tests of the installed packages: type checks of a user's program, versions, messages of import errors.

The type checks use a new virtual environment. Copies of both packages are in its site-packages, where a wheel would put
them. All other packages come from the environment that runs the tests. The script `.ci/run` makes the same checks with
a real wheel.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import torch

import fast
import reference
from fast.integrations import _required

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "data" / "user_program" / "serve.py"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(
    command: list[str | Path], cwd: Path, site: str | None = None, timeout: float = 240
) -> subprocess.CompletedProcess:
    """Run a command in `cwd` with `site` as its PYTHONPATH, or with the root of this repository if `site` is None."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT) if site is None else site}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The Python interpreter of an environment with both packages in its site-packages."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


@pytest.fixture
def typed(installed, tmp_path):
    """A function that returns the exit status and the output lines of `mypy --strict` for the source of a program."""
    pytest.importorskip("mypy")

    def check(source: str) -> tuple[int, list[str]]:
        (tmp_path / "program.py").write_text(source, encoding="utf-8")
        options = ["--strict", "--python-executable", installed, "--cache-dir", ROOT / ".mypy_cache"]
        done = run([sys.executable, "-m", "mypy", *options, "program.py"], tmp_path, site="", timeout=600)
        return done.returncode, done.stdout.splitlines()

    return check


def test_mypy_strict_on_a_users_program(typed):
    """Check a user's program, which has no `type: ignore`, with `mypy --strict` -> no error."""
    pytest.importorskip("transformers")
    source = PROGRAM.read_text(encoding="utf-8")
    assert "ignore" not in source
    used = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert {"mla_decode", "from_hf", "build_mla_metadata", "MLAMetadataBuilder", "DecodeGraph", "warmup"} <= used
    assert typed(source) == (0, ["Success: no issues found in 1 source file"])


def test_types_are_told(typed):
    """Check a wrong program with `mypy --strict` -> mypy reports each wrong argument, and knows the right types."""
    source = """
import fast
import reference
import torch

def use(state: fast.AttentionState) -> None:
    reveal_type(fast.__version__)
    reveal_type(reference.__version__)
    out, lse = state
    reveal_type(out)
    reveal_type(state.lse)
    reveal_type(fast.warmup)
    reveal_type(fast.backends.explain)
    fast.mla_decode(out, lse)
    reference.allocate_kv_cache("8", 16, 576, torch.float32)
"""
    status, lines = typed(source)
    said = "\n".join(lines)
    assert status == 1
    assert said.count('Revealed type is "str"') == 2, said
    assert said.count('Revealed type is "torch._tensor.Tensor"') == 2, said
    assert said.count("-> list[str]") == 1 and said.count("-> str") == 1, said
    assert 'Missing positional arguments "kv_cache", "metadata", "softmax_scale"' in said
    assert 'Argument 1 to "allocate_kv_cache" has incompatible type "str"; expected "int"' in said
    assert lines[-1].startswith("Found 2 errors"), said


def test_version():
    """Read the versions of both packages -> the version in the file that pyproject.toml names."""
    assert "version" in PYPROJECT["project"]["dynamic"] and "version" not in PYPROJECT["project"]
    path = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    (version,) = re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    assert fast.__version__ == reference.__version__ == version


def test_typed_marks():
    """Look for the file `py.typed` -> both packages have it, so that type checkers read their annotations."""
    assert all((ROOT / package / "py.typed").is_file() for package in ("reference", "fast"))


def test_a_state_unpacks(ops):
    """Unpack an attention state -> `out` and `lse`, in this order, although the state is not a tuple."""
    out, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    state = ops.AttentionState(out, lse)
    first, second = state
    assert first is out and second is lse and len(list(state)) == 2
    assert not isinstance(state, tuple)


SHADOWS = {"file": "reference.py", "folder": "reference/__init__.py"}


@pytest.mark.parametrize("shape", SHADOWS)
@pytest.mark.parametrize(
    "imports", ["import fast", "import reference, fast", "from fast.demo.serving import ServingLoop"]
)
def test_a_shadow_of_reference_is_named(tmp_path, shape, imports):
    """Let a module `reference` next to the user's script hide our package -> an import error names the module."""
    shadow = tmp_path / SHADOWS[shape]
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("answer = 42\n")
    (tmp_path / "script.py").write_text(imports + "\n")
    done = run([sys.executable, "script.py"], tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last == (
        f"ImportError: fast: expected the package `reference` of mla-twins, got {shadow}, which shadows it: rename that"
        " file"
    )


def test_a_script_called_reference(tmp_path):
    """Run a user's script reference.py -> an import error with the script's path; the script does not run twice."""
    script = tmp_path / "reference.py"
    script.write_text("print('once')\nimport fast\nprint(fast.mla_decode)\n")
    done = run([sys.executable, script.name], tmp_path)
    assert done.returncode == 1 and done.stdout == "once\n"
    assert f"got {script}, which shadows it" in done.stderr.splitlines()[-1]


def test_no_shadow_where_there_is_none(tmp_path):
    """Put a folder `reference` without `__init__.py` and a file references.py beside a program -> no import error."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "references.py").write_text("")
    done = run([sys.executable, "-c", "import fast, reference; print(reference.__version__)"], tmp_path)
    assert done.returncode == 0 and done.stdout == f"{reference.__version__}\n", done.stderr


WITHOUT = """
import importlib.machinery, sys
class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hiding())
import fast, reference
from fast.integrations.transformers import use_mla
"""
TOO_OLD = """
import sys, types
sys.modules["transformers"] = old = types.ModuleType("transformers")
old.__version__ = "5.16.3"
from fast.integrations.transformers import use_mla
"""


@pytest.mark.parametrize("source, found", [(WITHOUT, "none"), (TOO_OLD, "5.16.3")], ids=["absent", "too old"])
def test_use_mla_names_the_pip_command(tmp_path, source, found):
    """Import `use_mla` while transformers is absent or too old -> an import error with the right pip command."""
    done = run([sys.executable, "-c", source], tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: fast.integrations.transformers: expected transformers 5.17 or later "
        f'(pip install "mla-twins[hf]"), got {found}'
    )


def test_a_package_that_transformers_lacks_is_its_own_error(monkeypatch):
    """Import transformers while a package that it requires is missing -> the original error, not an error of `fast`."""

    def broken(name):
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr(_required.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="tokenizers"):
        _required.missing_transformers()


@pytest.mark.parametrize(
    "version, enough", [("5.17.0", True), ("5.100", True), ("6.0.0.dev0", True), ("4.99.9", False)]
)
def test_versions_are_compared_as_numbers(monkeypatch, version, enough):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", version)
    assert (_required.missing_transformers() is None) == enough


def test_the_bound_is_the_one_of_the_extra():
    assert f"transformers>={_required.TRANSFORMERS}" in PYPROJECT["project"]["optional-dependencies"]["hf"]


def test_times_of_ci_name_its_stages():
    """Read the table of CONTRIBUTING.md -> it has every stage of `.ci/run`, in the order of the script."""
    script, page = ((ROOT / name).read_text(encoding="utf-8") for name in (".ci/run", "CONTRIBUTING.md"))
    head = r"\| stages of `\.ci/run` (?:\| .+, \d{4}-\d\d-\d\d )+\|\n\|[-|]+\|\n"  # one column for each processor
    table = re.search(rf"^{head}((?:\|.*\n)+)", page, re.MULTILINE)[1]
    rows = [re.fullmatch(r"\| (.+?) (?:\| \d+ s )+\|", line) for line in table.splitlines()]
    assert all(rows)
    stages = re.findall(r'^stage "([^"]+)"', script, re.MULTILINE)
    assert len(stages) > 5 and [stage for row in rows for stage in row[1].split(", ")] == stages

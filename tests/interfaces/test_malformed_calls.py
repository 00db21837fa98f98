"""Tests of thousands of calls with a malformed argument: each must raise a one-line error that names the argument.

The calls run in another process (`tests.malformed_calls`). In the process of the tests, a type checker would refuse the
calls before the packages do. The other process returns a report with the outcome of each call.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys

import pytest
import torch

import fast
import reference
from reference.interfaces import MLAConfig, check_type

from ..malformed_calls import Call, report_of
from ..support.commands import ROOT
from ..support.factories import DIRECT, integers
from ..support.malformed_values import tensors

PACKAGES = ("reference", "fast")
REFUSALS = ("ValueError", "TypeError", "UnsupportedConfiguration")

# The constructors of these dataclasses check nothing. Functions that get such a dataclass check its fields.
UNCHECKED = {"AttentionState", "BatchSplit", "CascadeMetadata", "ContextChunk", "ContextParallelChunk",
             "ContextParallelMetadata", "ChunkRows", "ChunkRun", "CrossAttentionBatch", "DecodeMetadata",
             "DecodeSchedule", "EncoderMetadata", "GlobalHyperparameters", "GQAHyperparameters",
             "GQAMetadata", "GraphBuffers", "GraphMemory", "LayerParameters", "MLAMetadata",
             "PagedAttentionMetadata", "PrefillMetadata", "PrefillPart", "QuantizedWeight",
             "ScheduleChoice"}  # fmt: skip
NOT_CALLED = UNCHECKED | {"CACHE_FORMATS", "PRESETS", "AttentionType", "GraphSupport", "QueryLenSupport", "ScaleSource",
                          "GroupError", "UnsupportedConfiguration"}  # fmt: skip

# Calls that are allowed to succeed with a malformed value, and the reason. An entry begins with three regular
# expressions: for the name of the call, the path of the argument, and the name of the malformed value.
LEGITIMATE = {
    (r"run_prefill_.*|gather_context|dcp_gather_context", r"metadata\.(context_chunks|parts).*", r".*"):
        "the functions read only the chunk that is passed",
    (r"MLAMetadataBuilder.update_captured",
     r"captured\.(slot_mapping|num_\w+|prefill|cascade|workspace|workspace_tokens|schedule_choice)\b.*", r".*"):
        "the method reads neither the buffers of the caller nor the fields that it does not write",
    (r"GQAMetadataBuilder.update_captured",
     r"captured\.(slot_mapping|num_\w+|prefill|cascade|schedule_choice)\b.*", r".*"):
        "the method reads neither the buffers of the caller nor the fields that it does not write",
    (r"rotary_cos_sin|split_kv_b_proj|quantize_weight|get_dcp_local_seq_lens|CommonAttentionMetadata.from_lens",
     r"\w+", r"a meta tensor"):
        "elementwise operations or views accept tensors of any device",
    (r"(copy|swap)_blocks.*|reorg_kvcache", r"kv_caches|source|gathered", r"a (float8|uint8) tensor.*"):
        "the functions copy the entries of every format",
    (r"DecodeGraph", r"step", r"a class"): "a class can be called",
    (r"ContextWorkspace", r"memory", r"a vector|a meta tensor"): "a layer refuses memory that does not fit",
    (r"CommonAttentionMetadata.from_lens", r"seq_lens", r"a uint8 tensor"): "lengths may have any int dtype",
    (r"(MLA|GQA)Attention\..*", r"metadata\.schedule_choice\..*", r".*"):
        "a report of the planner; no op reads its numbers",
    (r"GQAAttention", r"sinks", r"a meta tensor"): "a layer may be made before its parameters have values",
    (r"forward_prefill|simulate", r"gather|expand|program", r"a class"): "the class is called and raises the error",
}  # fmt: skip

# Argument: name that messages use for an element of this argument.
ALSO_NAMED = {"kv_caches": "kv_cache"}


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    """Return the report of all calls, by the name of the package."""
    commands = {name: [sys.executable, "-m", "tests.malformed_calls", name] for name in PACKAGES}
    running = {
        name: subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    found = {}
    for name, process in running.items():
        said, errors = process.communicate(timeout=900)
        assert process.returncode == 0, f"{name}: exit {process.returncode}\n{errors[-2000:]}"
        found[name] = json.loads(said)
    return found


def legitimate(call: str, path: str, value: str) -> bool:
    return any(
        re.fullmatch(pattern[0], call) and re.fullmatch(pattern[1], path) and re.fullmatch(pattern[2], value)
        for pattern in LEGITIMATE
    )


def fault(row: list, arguments: list[str]) -> str | None:
    """Return what is wrong with the outcome of a call, or None if the outcome is right."""
    call, path, value, type_is_right, kind, message, written = row
    if legitimate(call, path, value):
        return None
    if not kind:
        return None if type_is_right else "accepted"
    if kind not in REFUSALS:
        return f"{kind}: {message}"
    if written:
        return f"written before it was refused: {message}"
    if "\n" in message or len(message) > 1000:
        return f"more than one line: {message}"
    argument = path.split(".")[0]
    named = re.match(r"(\w+)[\w.\[\]()]*: ", message)
    if kind == "UnsupportedConfiguration" and named and named[1] in ("cpu", "triton", "hopper"):
        return None  # the message lists every backend with its reasons
    # A value of the right type, or a value on another device, can contradict another argument. The error may then name
    # the other argument.
    may_be_named = {argument, ALSO_NAMED.get(argument)}
    if type_is_right or value.startswith("a meta tensor"):
        may_be_named |= set(arguments)
    return None if named and named[1] in may_be_named else f"does not name {argument}: {message}"


@pytest.mark.parametrize("package", PACKAGES)
def test_good_calls_succeed(reports, package):
    """Every call succeeds with valid arguments, so in the tests below only the malformed value causes an error."""
    assert reports[package]["failed"] == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_called(reports, package):
    module = {"reference": reference, "fast": fast}[package]
    called = {name.split(".")[0] for name in reports[package]["arguments"]}
    assert set(module.__all__) - called == NOT_CALLED
    if package == "fast":
        assert {"decode_programs", "warmup", "backends", "serving", "transformers"} <= called


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_is_replaced(reports, package):
    """The report has malformed values for every parameter of every public function."""
    module = {"reference": reference, "fast": fast}[package]
    for name, given in reports[package]["arguments"].items():
        target = getattr(module, name, None)
        if inspect.isfunction(target):
            named = [p.name for p in inspect.signature(target).parameters.values() if p.kind is not p.VAR_KEYWORD]
            assert sorted(named) == sorted(given), name


@pytest.mark.parametrize("package", PACKAGES)
def test_refused(reports, package):
    """Every malformed value is refused in one line that begins with the argument's name, and nothing is written.

    The only exceptions are the calls that LEGITIMATE lists.
    """
    rows, arguments = reports[package]["calls"], reports[package]["arguments"]
    assert len(rows) > 10_000
    faults = [f"{row[0]}({row[1]} = {row[2]}): {found}" for row in rows if (found := fault(row, arguments[row[0]]))]
    assert not faults, f"{len(faults)} of {len(rows)} calls:\n" + "\n".join(faults[:40])


def test_both_packages_say_the_same(reports):
    """Both packages give the same message for the same malformed value, except for messages of backends of `fast`."""
    said = {package: {tuple(row[:3]): row[5] for row in reports[package]["calls"] if row[4]} for package in PACKAGES}
    both = said["reference"].keys() & said["fast"].keys()
    assert len(both) > 10_000
    other = {case: (said["reference"][case], said["fast"][case]) for case in both
             if said["reference"][case] != said["fast"][case]}  # fmt: skip
    other = {case: found for case, found in other.items() if not re.match(r"(cpu|triton|hopper): ", found[1])}
    assert not other, f"{len(other)} differ:\n" + "\n".join(
        f"{case}: {found}" for case, found in list(other.items())[:40]
    )


def test_no_exception_is_idle(reports):
    """Every entry of LEGITIMATE is needed: without it, at least one call would count as a fault."""
    rows = [row for package in PACKAGES for row in reports[package]["calls"]]
    for pattern in LEGITIMATE:
        fits = [row for row in rows if all(re.fullmatch(p, part) for p, part in zip(pattern, row, strict=False))]
        assert any((not row[4] and not row[3]) or "takes no arguments" in row[5] for row in fits), pattern


# Tests of `fault` itself.


def unchecked(config, seq_lens):
    """Return a sum without a check of the arguments, which `fault` must report."""
    return config.num_heads + int(seq_lens.max())


def late(config, kv_cache):
    """Write the cache, and check `config` only afterwards, which `fault` must report."""
    kv_cache.add_(1)
    check_type("config", config, MLAConfig)


def test_an_unchecked_function_is_seen(plain_errors):
    """`fault` reports three faults: an unchecked argument, a write before the error, an accepted malformed value."""
    config, seq_lens, kv_cache = DIRECT, integers(3, 4), torch.zeros(2, 2, 2)
    kinds = {"config": "MLAConfig", "seq_lens": "Tensor", "kv_cache": "Tensor"}
    rows = report_of(
        [Call("unchecked", unchecked, {"config": config, "seq_lens": seq_lens}, kinds),
         Call("late", late, {"config": config, "kv_cache": kv_cache}, kinds)]
    )["calls"]  # fmt: skip
    faults = {tuple(row[:3]): fault(list(row), list(kinds)) for row in rows}
    assert faults["unchecked", "config", "None"] == "AttributeError: 'NoneType' object has no attribute 'num_heads'"
    assert faults["unchecked", "seq_lens", "a sparse COO tensor"].startswith(("NotImplementedError", "RuntimeError"))
    assert faults["unchecked", "seq_lens", "one more dimension"] == "accepted"
    assert faults["late", "config", "None"] == (
        "written before it was refused: config: expected an MLAConfig, got NoneType"
    )
    assert faults["late", "kv_cache", "one more dimension"] == "accepted"


@pytest.mark.parametrize(
    "message, kind, wanted",
    [
        ("config: expected an MLAConfig, got NoneType", "TypeError", None),
        ("config.rope: expected a RopeConfig, got NoneType", "TypeError", None),
        ("costs: expected a PathCosts, got NoneType", "TypeError", "does not name"),
        ("expected an MLAConfig", "TypeError", "does not name"),
        ("config: expected\nan MLAConfig", "ValueError", "more than one line"),
        ("config: expected an MLAConfig", "RuntimeError", "RuntimeError"),
        ("", "", "accepted"),
    ],
)
def test_judge(message, kind, wanted):
    found = fault(["choose_path", "config", "None", False, kind, message, False], ["config", "costs"])
    assert (found is None) if wanted is None else found.startswith(wanted)


def test_malformed_tensors_are_malformed():
    """Every malformed tensor has the property that its name says."""
    made = tensors(torch.ones(2, 3))
    assert made["a sparse COO tensor"].layout == torch.sparse_coo
    assert made["a sparse CSR tensor"].layout == torch.sparse_csr
    assert made["a nested tensor"].is_nested and made["a jagged tensor"].is_nested
    assert made["a meta tensor"].is_meta and made["one more dimension"].dim() == 3
    assert made["a tensor of the other kind"].dtype == torch.int64

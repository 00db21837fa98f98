"""Tests of the adapters to flash-attn: with the library on a GPU, and with its unmodified Python without a GPU."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import reference
from fast import backends
from fast.attention.varlen import flash_attn_varlen_shared_rope
from fast.backends.adapters import flash_attn, sources
from fast.backends.adapters.conversion import with_poison
from fast.backends.adapters.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4
from fast.parity import compare_states
from reference.interfaces import AttentionState, UnsupportedConfiguration

from ...support.factories import offsets
from ...support.libraries import FA3_FWD, VLLM_FA2, VLLM_FA3, Recorder, imported_python, recorded_operators

DECLARED = {each.name: each for each in (FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4)}
DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = {
    "one": ([1], [1]),
    "equal": ([5, 5], [5, 5]),
    "mixed": ([1, 17, 0, 5, 7], [1, 17, 4, 0, 31]),
    "more queries than keys": ([9, 4, 3], [4, 0, 1]),
    "page edges": ([15, 16, 17, 63, 64, 65], [15, 16, 17, 63, 64, 65]),
    "long": ([300, 3, 127], [809, 700, 1021]),
    "no keys": ([4], [0]),
    "none": ([0], [0]),
}
DIMS = {"192/128": (128, 64, 128), "128/128": (64, 64, 128), "192/96": (128, 64, 96), "64/40": (48, 16, 40)}
VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
FA2_NAMES = ["q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table",
             "alibi_slopes", "max_seqlen_q", "max_seqlen_k", "p_dropout", "softmax_scale", "zero_tensors", "is_causal",
             "window_size_left", "window_size_right", "softcap", "return_softmax", "gen"]  # fmt: skip


def make_inputs(query_lens, key_lens, dtype, dims=DIMS["192/128"], heads=3, device="cpu"):
    """Return queries, keys without rope, rope parts, values; and the arguments after them up to `softmax_scale`."""
    nope, rope, value = dims
    tokens, keys = sum(query_lens), sum(key_lens)
    shapes = (tokens, heads, nope + rope), (keys, heads, nope), (keys, rope), (keys, heads, value)
    tensors = [torch.randn(*shape, dtype=torch.float32, device=device).to(dtype) for shape in shapes]
    starts = offsets(query_lens).to(device), offsets(key_lens).to(device)
    return tensors, (*starts, max(query_lens), max(key_lens), (nope + rope) ** -0.5)


def joined(tensors):
    """Return queries, whole keys and values."""
    q, k_nope, k_pe, v = tensors
    return q, torch.cat((k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)), dim=-1), v


def verdict(value, tensors, rest, causal):
    """Assert that a state is within the budgets, and that rows without keys are exactly 0 and -inf.

    The kernels round every output to the dtype of the queries, also if the adapter converts it to float32.
    """
    whole = joined(tensors)
    low = reference.flash_attn_varlen(*whole, *rest, causal)
    rounded = AttentionState(value.out.to(low.out.dtype), value.lse)
    assert torch.equal(rounded.out.to(value.out.dtype), value.out)
    gold = reference.flash_attn_varlen(*[x.double() for x in whole], *rest, causal)
    assert value.out.is_contiguous() and value.lse.is_contiguous()
    if value.out.numel():
        for parity in compare_states("flash_attn_varlen", rounded, low, gold):
            assert parity.passed, parity
    empty = gold.lse == -torch.inf
    assert value.out[empty.T].eq(0).all() and value.lse[empty].eq(-torch.inf).all()


def compiled_attention(given, empty_lse):
    """Compute what a compiled part of flash-attn computes, in the dtype of `q`, with its LSE of rows without keys."""
    q, k, v = given["q"], given["k"], given["v"]
    starts = given["cu_seqlens_q"], given["cu_seqlens_k"]
    lens = [int(each.diff().max()) for each in starts]
    assert given["max_seqlen_q"] >= lens[0] and given["max_seqlen_k"] >= lens[1]
    scale, causal = given["softmax_scale"], given["is_causal"]
    state = reference.flash_attn_varlen(q, k, v, *starts, *lens, scale, causal)
    out = state.out if given.get("out") is None else given["out"].copy_(state.out)
    return out, torch.where(state.lse == -torch.inf, empty_lse, state.lse).float()


def needs(*modules):
    """Skip a test if the Python of a library is not installed."""
    found = all(sources.is_installed(module) for module in modules)
    return pytest.mark.skipif(not found, reason=f"{' or '.join(modules)} is not installed")


@contextlib.contextmanager
def flash_attn_package():
    """Import flash-attn 2's own Python with a recorder in the place of `flash_attn_2_cuda`."""
    recorder = Recorder(
        FA2_NAMES, lambda given: (*compiled_attention(given, torch.inf), torch.empty(0), torch.empty(0))
    )
    with imported_python("flash_attn.flash_attn_interface", "flash_attn_2_cuda", varlen_fwd=recorder) as module:
        # the operator is declared for GPUs alone; on a CPU it runs the same Python function
        module._flash_attn_varlen_forward.register_kernel("cpu")(module._flash_attn_varlen_forward._init_fn)
        yield flash_attn.flash_attn_varlen_2, recorder


@contextlib.contextmanager
def fa3_fwd_package():
    """Import fa3-fwd's own Python with recorded operators."""

    def compute(given):
        return *compiled_attention(given, -torch.inf), torch.empty(0), torch.empty(0)

    python = imported_python("fa3_fwd_interface", "fa3_fwd._C")
    with recorded_operators("fa3_fwd", {FA3_FWD: compute}) as recorders, python as module:
        module._flash_attn_forward.register_kernel("cpu")(module._flash_attn_forward._init_fn)
        yield flash_attn.flash_attn_varlen_3, recorders["fwd"]


@contextlib.contextmanager
def vllm_package(version):
    """Import vLLM's own Python of flash-attn with recorded operators."""
    empty_lse, schema = (torch.inf, VLLM_FA2) if version == 2 else (-torch.inf, VLLM_FA3)
    extra = [] if version == 2 else [torch.empty(0), torch.empty(0)]
    functions = {schema: lambda given: [*compiled_attention(given, empty_lse), *extra]}
    compiled = [f"vllm.vllm_flash_attn._vllm_fa{each}_C" for each in (2, 3)]
    python = imported_python(VLLM, *compiled, bare="vllm")
    with recorded_operators(f"_vllm_fa{version}_C", functions) as recorders, python:
        launchers = {2: flash_attn.flash_attn_varlen_2, 3: flash_attn.flash_attn_varlen_3}
        yield launchers[version], next(iter(recorders.values()))


PYTHON = {  # the unmodified Python of each package, with recorders in the place of its compiled part
    "flash-attn": pytest.param(flash_attn_package, 2, marks=needs("flash_attn.flash_attn_interface")),
    "fa3-fwd": pytest.param(fa3_fwd_package, 3, marks=needs("fa3_fwd_interface")),
    "vllm 2": pytest.param(lambda: vllm_package(2), 2, marks=needs(VLLM)),
    "vllm 3": pytest.param(lambda: vllm_package(3), 3, marks=needs(VLLM)),
}


@pytest.fixture
def only(monkeypatch):
    """Return a function that leaves one source of flash-attn: the package whose Python the test imports."""

    def leave(package):
        for name in ("SOURCES_2", "SOURCES_3", "SOURCES_3_OF_ALL"):
            left = tuple(each for each in getattr(flash_attn, name) if each.package == package)
            monkeypatch.setattr(flash_attn, name, left)

    return leave


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [name for name in LENGTHS if name != "long"])
@pytest.mark.parametrize("name", PYTHON)
def test_the_python_of_a_package(name, lengths, dtype, causal, only):
    """Attend through the package's own Python -> right arguments for the compiled part, and a state within budget."""
    _run_the_python(name, lengths, dtype, causal, DIMS["192/128"], only)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", PYTHON)
def test_head_dims_of_a_package(name, dims, only):
    _run_the_python(name, "mixed", torch.bfloat16, True, DIMS[dims], only)


def _run_the_python(name, lengths, dtype, causal, dims, only):
    package, version = PYTHON[name].values
    for mark in PYTHON[name].marks:
        if mark.args[0] if mark.args else mark.kwargs.get("condition"):
            pytest.skip(mark.kwargs["reason"])
    if name == "fa3-fwd" and dtype == torch.float16:
        pytest.skip("fa3-fwd has no float16 kernels")
    only(name.split()[0])
    tensors, rest = make_inputs(*LENGTHS[lengths], dtype, dims)
    q, k, v = joined(tensors)
    with package() as (launch, recorder):
        state = launch(q, k, None, v, *rest, causal, dtype)
        wide = launch(q, k, None, v, *rest, causal, torch.float32)
        out, lse = torch.full((2, *q.shape[:2], v.shape[2] + 8), torch.nan, dtype=dtype)[0, ..., 8:], state[1] + 1
        assert launch(q, k, None, v, *rest, causal, dtype, out, lse) == (out, lse)
        assert launch(q, k, None, v, *rest, causal, dtype, out.clone(), None)[1] is None
        kept = getattr(flash_attn, f"kept_varlen_{version}")(q, k, None, v, *rest, causal, dtype)
        for others in ((q, k, v), (q.flip(0), k.flip(0), v.flip(0))):  # later calls have other values
            arguments = *others[:2], None, others[2], *rest, causal, dtype
            for found, wanted in zip(kept(*arguments), launch(*arguments), strict=True):
                assert torch.equal(found, wanted)
        alone = getattr(flash_attn, f"kept_varlen_{version}")(q, k, None, v, *rest, causal, dtype, out.clone(), None)
        found, no_lse = alone(q, k, None, v, *rest, causal, dtype, None, None)  # the library allocates the output
        assert no_lse is None and torch.equal(found, state[0]) and found.is_contiguous()
    verdict(AttentionState(*state), tensors, rest, causal)
    verdict(AttentionState(*wide), tensors, rest, causal)
    assert wide[0].dtype == torch.float32
    assert torch.equal(out, state[0]) and torch.equal(lse, state[1])
    if q.shape[0] == 0 or k.shape[0] == 0:
        assert not recorder.calls
        return
    for call in recorder.calls:
        direct = version == 3 and (dims[0] + dims[1], dims[2]) == (192, 128)
        assert call["v"].shape[2] == (dims[2] if direct else q.shape[2])
        assert call["v"][..., dims[2] :].eq(0).all()
        assert call["softmax_scale"] == rest[4] and call["is_causal"] is causal
        assert torch.equal(call["cu_seqlens_q"], rest[0]) and torch.equal(call["cu_seqlens_k"], rest[1])
        assert call["seqused_k"] is None and (call["window_size_left"], call["window_size_right"]) == (-1, -1)
        assert call["max_seqlen_q"] == max(rest[2], 2 if version == 2 else 65)
        assert call.get("num_splits", 1) == 1
        given = [x for x in (call["q"], call["k"], call["v"], call.get("out")) if x is not None]
        assert all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in given)
    if "vllm" in name:  # the third and the fourth call write into `out`, if no value is padded
        direct = call["v"].shape[2] == dims[2]
        assert [each["out"] is not None for each in recorder.calls][:4] == [False, False, direct, direct]


def function_of_flash_attn_4(module, recorder):
    """Run the library's own definition of its function, with a recorder in the place of `_flash_attn_fwd`.

    The rest of the module needs CuTe DSL, which compiles kernels on a GPU.
    """
    folder = importlib.util.find_spec(module.partition(".")[0]).submodule_search_locations[0]
    tree = ast.parse(Path(folder, *module.split(".")[1:]).with_suffix(".py").read_text())
    wanted = ("FlashAttnVarlenFunc", "flash_attn_varlen_func", "_validate_gather_bwd_kwargs")
    tree.body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    results = next(len(node.targets[0].elts) for node in ast.walk(tree) if isinstance(node, ast.Assign)
                   and getattr(getattr(node.value, "func", None), "id", None) == "_flash_attn_fwd")  # fmt: skip
    code = compile(tree, module, "exec")  # annotations stay unevaluated, as in this file

    def forward(*given, **options):
        return (*recorder(*given, **options), *[None] * results)[:results]

    names = {"torch": torch, "_flash_attn_fwd": forward}
    exec(code, names)
    return names["flash_attn_varlen_func"]


@pytest.mark.parametrize("source", flash_attn.SOURCES_4, ids=lambda source: source.package)
def test_arguments_for_flash_attn_4(source, monkeypatch):
    """Attend through the library's own function -> right arguments for its kernel, and a state within the budget."""
    if not sources.is_installed(source.module):
        pytest.skip(f"{source.module} is not installed")
    names = ["q", "k", "v"]
    recorder = Recorder(names, lambda given: compiled_attention(given | {"is_causal": given["causal"]}, -torch.inf))
    module = types.ModuleType(source.module)
    module.flash_attn_varlen_func = function_of_flash_attn_4(source.module, recorder)
    if (fault := sources._fault(source, module)) is not None:
        pytest.skip(fault)  # flash-attn 2.8 has an older module of this name
    monkeypatch.setattr(flash_attn, "loaded", lambda sources: (source, module))
    tensors, rest = make_inputs([4, 3, 2, 0], [4, 9, 0, 5], torch.bfloat16)
    q, k, v = joined(tensors)
    verdict(AttentionState(*flash_attn.flash_attn_varlen_4(q, k, None, v, *rest, True, q.dtype)), tensors, rest, True)
    call = recorder.calls[0]
    assert call["return_lse"] is True and call["num_splits"] == 1 and call["v"].shape[2] == 128
    assert call["softmax_scale"] == rest[4] and call["causal"] is True
    assert call["page_table"] is None and call["seqused_k"] is None and call["qv"] is None


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=torch.float32), "serves torch.bfloat16, torch.float16, got torch.float32"),
        (dict(out_dtype=torch.float64), "writes torch.float32, torch.bfloat16, torch.float16, got torch.float64"),
        (dict(dims=(192, 200)), "serves values that are not wider than keys, got 200 columns"),
        (dict(dims=(180, 128)), "got 180"),
        (dict(dims=(264, 128)), "got 264"),
        (dict(mask="visible_lens"), "applies the masks causal, got visible_lens"),
    ],
)
def test_refusals(declared, change, reason):
    """Ask for a call that the kernels cannot serve -> the declaration gives the reason."""
    if "dtype" in change and not sources.is_installed("flash_attn_interface") and flash_attn._only_fa3_fwd():
        pytest.skip("fa3-fwd alone has fewer dtypes")
    dim, value = change.get("dims", (192, 128))
    options = dict(dtype=torch.bfloat16, out_dtype=torch.float32, mask="causal", lse=True)
    options |= {key: given for key, given in change.items() if key != "dims"}
    request = backends.KernelRequest(
        "flash_attn_varlen", torch.device("cpu"), head_dims=(("qk_head_dim", dim), ("v_head_dim", value)), **options
    )
    found = declared.ops["flash_attn_varlen"].reasons(request)
    assert len(found) == 1 and found[0].endswith(reason), found
    assert f"{declared.name}: serves device cuda, got cpu" in declared.validate_configuration(request)


def test_capabilities_and_priorities():
    served = {name: [major for major in range(7, 13) if each.supports_compute_capability((major, 0))]
              for name, each in DECLARED.items()}  # fmt: skip
    assert served == {"flash_attn_2": [8, 9, 10, 11, 12], "flash_attn_3": [9], "flash_attn_4": [9, 10, 11]}
    assert FLASH_ATTN_3.priority_of("flash_attn_varlen", "9.x") == 15
    assert FLASH_ATTN_2.priority_of("flash_attn_varlen", "8.x") < 0
    assert FLASH_ATTN_4.only_named and not FLASH_ATTN_3.only_named and not FLASH_ATTN_2.only_named


def test_a_source_that_does_not_load(tmp_path, monkeypatch):
    """Install a package whose import fails and one without kernels -> both reasons; and one that works -> no reason."""
    (tmp_path / "broken_attention.py").write_text("raise OSError('libcudart.so.99: not found')\n")
    text = "FA2_AVAILABLE, FA2_UNAVAILABLE_REASON = {}, 'no kernel image'\nflash_attn_varlen_func = lambda q: q\n"
    (tmp_path / "lacking_attention.py").write_text(text.format(False))
    (tmp_path / "working_attention.py").write_text(text.format(True))
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("broken", "lacking", "absent")
    tried = tuple(sources.Source(each, f"{each}_attention", "FA2_AVAILABLE") for each in names)
    assert sources.missing_package(tried) is None and sources.missing_package(tried[2:]) == "absent"
    broken, lacking = sources.missing_artifacts(tried)
    assert "broken_attention cannot be imported: OSError: libcudart.so.99: not found" in broken
    assert lacking == "the kernels of lacking_attention do not load: no kernel image"
    with pytest.raises(UnsupportedConfiguration, match="no kernel image"):
        sources.loaded(tried)
    with pytest.raises(UnsupportedConfiguration, match="none is installed"):
        sources.loaded(tried[2:])
    working = sources.Source("working", "working_attention", "FA2_AVAILABLE", ("q",))
    assert sources.missing_artifacts((*tried, working)) == []
    older = sources.Source("working", "working_attention", "FA2_AVAILABLE", ("q", "max_seqlen_q"))
    fault = "working_attention is too old: flash_attn_varlen_func has no parameter max_seqlen_q"
    assert sources.missing_artifacts((older,)) == [fault]
    assert sources.loaded((*tried, working))[0] is working


def test_a_declaration_imports_no_library(tmp_path):
    """Import the adapters where each package raises in its import -> no package is imported, and all are installed."""
    for package in ("flash_attn", "vllm", "flash_mla", "flash_attn_interface", "fa3_fwd_interface"):
        inner = tmp_path / package / "vllm_flash_attn"
        inner.mkdir(parents=True)
        for file in ("__init__.py", "flash_attn_interface.py", "flash_mla_interface.py"):
            (tmp_path / package / file).write_text("raise SystemExit('imported')\n")
        (inner / "flash_attn_interface.py").write_text("raise SystemExit('imported')\n")
    code = (
        "from fast.backends.adapters import flash_attn, flashmla\n"
        "declared = flash_attn.FLASH_ATTN_2, flash_attn.FLASH_ATTN_3, flashmla.FLASHMLA\n"
        "assert [each.missing_package for each in declared] == [None] * 3\n"
    )
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_poisoned_rows():
    """Convert the LSE -inf of a row whose output is NaN -> NaN; a row without keys keeps its LSE -inf."""
    out, lse = torch.zeros(3, 2, 4, dtype=torch.bfloat16), torch.tensor([[0.25, -torch.inf, -torch.inf]] * 2)
    out[0], out[2] = 3.0, torch.nan
    expected = torch.tensor([[0.25, -torch.inf, torch.nan]] * 2)
    torch.testing.assert_close(with_poison(out, lse), expected, equal_nan=True, rtol=0, atol=0)


# The tests below run the libraries on a GPU.


@pytest.fixture(params=DECLARED)
def name(request):
    """Return the name of a backend that this machine can run, and register the backend for the test."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    declared = DECLARED[request.param]
    if not declared.supports_compute_capability(torch.cuda.get_device_capability()):
        pytest.skip(f"{request.param} does not serve this GPU")
    if declared.missing():
        pytest.skip("; ".join(declared.missing()))
    known = request.param in {each.name for each in backends.registered()}
    if not known:
        backends.register(declared)
    yield request.param
    if not known:
        backends.unregister(request.param)


def on_gpu(lengths, dtype=torch.bfloat16, dims="192/128", heads=3):
    return make_inputs(*LENGTHS[lengths], dtype, DIMS[dims], heads, "cuda")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_within_the_budget(name, lengths, dims, dtype, causal):
    if dtype not in DECLARED[name].ops["flash_attn_varlen"].dtypes:
        pytest.skip("the installed package has no kernel for this dtype")
    tensors, rest = on_gpu(lengths, dtype, dims)
    verdict(flash_attn_varlen_shared_rope(*tensors, *rest, causal, backend=name), tensors, rest, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_heads(name, heads, causal):
    """Attend with few and many heads, into float32, and into strided memory -> the same numbers, within the budget."""
    tensors, rest = on_gpu("mixed", heads=heads)
    plain = flash_attn_varlen_shared_rope(*tensors, *rest, causal, backend=name)
    verdict(plain, tensors, rest, causal)
    wide = flash_attn_varlen_shared_rope(*tensors, *rest, causal, torch.float32, backend=name)
    verdict(wide, tensors, rest, causal)
    out = torch.full((*plain.out.shape[:2], 256), torch.nan, dtype=plain.out.dtype, device="cuda")[..., 128:]
    made = flash_attn_varlen_shared_rope(*tensors, *rest, causal, out=out, backend=name)
    assert made.out is out and torch.equal(out, plain.out) and torch.equal(made.lse, plain.lse)
    alone = flash_attn_varlen_shared_rope(*tensors, *rest, causal, return_lse=False, backend=name)
    assert torch.equal(alone, plain.out)


def test_values_are_padded_without_reading_neighbours(name):
    """Attend with narrow values in a tensor with NaN behind each value -> no NaN in the output."""
    (q, k, k_pe, v), rest = on_gpu("mixed", dims="192/96")
    wide = torch.full((*v.shape[:2], 160), torch.nan, dtype=v.dtype, device="cuda")
    wide[..., : v.shape[2]] = v
    given = flash_attn_varlen_shared_rope(q, k, k_pe, wide[..., : v.shape[2]], *rest, True, backend=name)
    plain = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, True, backend=name)
    assert torch.equal(given.out, plain.out) and plain.out.isfinite().all()


def test_nan_in_keys_and_queries_stays_in_its_request(name):
    """Put NaN into a key and into a query -> NaN in the output and the LSE of their requests, and nowhere else."""
    (q, k, k_pe, v), rest = make_inputs([70, 50, 60], [70, 50, 60], torch.bfloat16, device="cuda")
    k[75], q[150] = torch.nan, torch.nan
    state = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, True, backend=name)
    others = torch.ones(180, dtype=torch.bool, device="cuda")
    others[70:120], others[150] = False, False
    assert state.out[others].isfinite().all() and state.lse[:, others].isfinite().all()
    assert state.out[150].isnan().all() and state.lse[:, 150].isnan().all()
    assert state.out[80:120].isnan().any()


def test_nan_in_values_stays_in_its_request(name, request):
    """Put NaN into a value -> NaN in its own request alone; flash-attn 3 and 4 read values of the next request too."""
    if name != "flash_attn_2":
        reason = "reads the values of the next request (Dao-AILab/flash-attention, issue 2374)"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    (q, k, k_pe, v), rest = make_inputs([70, 50, 60], [70, 50, 60], torch.bfloat16, device="cuda")
    v[75] = torch.nan
    state = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, True, backend=name)
    assert state.out[80:120].isnan().any()
    assert state.out[:70].isfinite().all() and state.out[120:].isfinite().all()


def test_keys_after_the_last_request(name):
    """Attend with keys behind the last request: NaN for flash-attn 2; finite values for 3 and 4 -> the same bits."""
    (q, k, k_pe, v), rest = make_inputs([70, 50], [70, 50], torch.bfloat16, device="cuda")
    tail = torch.nan if name == "flash_attn_2" else 0.0
    longer = [torch.cat((x, torch.full_like(x[:30], torch.nan))) for x in (k, k_pe)]
    values = torch.cat((v, torch.full_like(v[:30], tail)))
    plain = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, True, backend=name)
    given = flash_attn_varlen_shared_rope(q, *longer, values, *rest, True, bounded=True, backend=name)
    assert torch.equal(given.out, plain.out) and torch.equal(given.lse, plain.lse)


@pytest.mark.parametrize("dims", ["192/128", "128/128"])
@pytest.mark.parametrize("causal", [True, False])
def test_batch_invariance(name, dims, causal):
    """Attend each request alone and in a batch -> the same bits, if the backend declares it."""
    if not DECLARED[name].ops["flash_attn_varlen"].batch_invariant:
        pytest.skip("declares that it is not batch-invariant")
    lens, keys = [130, 1, 7, 64, 65], [400, 300, 7, 1000, 65]
    (q, k, k_pe, v), rest = make_inputs(lens, keys, torch.bfloat16, DIMS[dims], device="cuda")
    whole = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, causal, backend=name)
    rows, own = offsets(lens).tolist(), offsets(keys).tolist()
    for i, (length, seen) in enumerate(zip(lens, keys, strict=True)):
        mine, theirs = slice(rows[i], rows[i + 1]), slice(own[i], own[i + 1])
        starts = offsets([length]).cuda(), offsets([seen]).cuda()
        alone = flash_attn_varlen_shared_rope(
            q[mine], k[theirs], k_pe[theirs], v[theirs], *starts, length, seen, rest[4], causal, backend=name
        )
        assert torch.equal(alone.out, whole.out[mine]) and torch.equal(alone.lse, whole.lse[:, mine])


def test_replay(name):
    """Capture a call in a CUDA graph, change the inputs and replay -> the result of a call with the new inputs."""
    if name == "flash_attn_4":
        pytest.skip("flash-attn 4 compiles kernels in its first call")
    tensors, rest = on_gpu("mixed")
    flash_attn_varlen_shared_rope(*tensors, *rest, True, backend=name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = flash_attn_varlen_shared_rope(*tensors, *rest, True, backend=name)
    for x in tensors:
        x.normal_()
    graph.replay()
    verdict(AttentionState(state.out.clone(), state.lse.clone()), tensors, rest, True)

"""Tests of grouped-query attention with PyTorch's attention kernels, against the reference.

Without a GPU, "torch_flash" runs PyTorch's own kernel on the CPU. "torch_cudnn" runs with a stand-in for PyTorch's op,
which checks what cuDNN needs and calls the CPU kernel. On a GPU the same tests run both kernels themselves.

The letters of shapes: T query tokens, N heads, Nkv KV heads, Dh head dim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends import Backend
from fast.backends.adapters import torch_sdpa_gqa
from fast.backends.adapters.torch_sdpa import TORCH_CUDNN, TORCH_FLASH, missing_cudnn
from fast.parity import compare_states
from reference.interfaces import CAUSAL, GraphSupport, UnsupportedConfiguration
from reference.interfaces.gqa import AttentionType, GQAConfig

from ...gqa.test_fast_attention import PACKED, attend, doubled, packed_inputs, verdict
from ...support.backends import registered
from ...support.factories import assert_same_bits, offsets
from ...support.gqa import GROUPED, LENS, MHA, SLOPES, gqa_batch

ON_GPU = torch.cuda.is_available()
OP = "gqa_varlen_attention"
GPU_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = GPU_DTYPES if ON_GPU else (torch.float32, *GPU_DTYPES)
DECODER, ENCODER, CROSS = AttentionType.DECODER, AttentionType.ENCODER, AttentionType.CROSS
LENGTHS = {  # query lengths and key lengths
    "one key": ((1, 3), (1, 1)),
    "equal": ((5, 300), (5, 300)),
    "decodes": ((1, 1, 1), (700, 2, 33)),
    "more keys": ((4, 3, 130), (5, 640, 300)),
    "more queries": ((9, 4, 70, 3), (4, 1, 69, 2)),
    "empty": ((0, 3, 0, 2), (4, 0, 0, 9)),
    "none": ((0,), (0,)),
}
SMALL = pytest.mark.parametrize("lengths", ["one key", "more keys", "more queries", "empty"])


@pytest.fixture(autouse=True)
def on_device():
    """Create tensors on the GPU if there is one."""
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield


def cudnn_op(q, k, v, *, attn_bias, compute_log_sumexp, is_causal, scale):
    """Compute what PyTorch's cuDNN op computes, by the CPU kernel, in the layouts of the cuDNN op."""
    assert attn_bias is None and compute_log_sumexp
    assert q.shape[2] >= 1 and k.shape[2] >= 2 and (q.shape[2] == k.shape[2] or not is_causal)
    assert all(x.shape[0] == 1 and x.transpose(1, 2).is_contiguous() for x in (q, k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, is_causal=is_causal, scale=scale)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], None, None, None


@pytest.fixture(params=["torch_flash", "torch_cudnn"])
def adapter(request, monkeypatch):
    """Return the name of a backend with the launcher of an adapter that serves the device of the run."""
    declared = {"torch_flash": TORCH_FLASH, "torch_cudnn": TORCH_CUDNN}[request.param]
    if ON_GPU or request.param == "torch_flash":
        device = torch.device("cuda" if ON_GPU else "cpu")
        reasons = declared.validate_configuration(backends.KernelRequest(OP, device))
        if reasons:
            pytest.skip("; ".join(reasons))
        yield request.param
        return
    real = torch_sdpa_gqa._op
    monkeypatch.setattr(
        torch_sdpa_gqa, "_op", lambda backend, name: cudnn_op if backend == "torch_cudnn" else real(backend, name)
    )
    support = replace(declared.ops[OP], dtypes=DTYPES)
    with registered(Backend("cudnn_on_cpu", -1, "cpu", {OP: support})):
        yield "cudnn_on_cpu"


def inputs(lengths, config, dtype):
    """Return the arguments of `gqa_varlen_attention` for requests of the given lengths, and their sinks if needed."""
    query_lens, key_lens = lengths
    if config.attention_type is ENCODER:
        key_lens = query_lens
    q = torch.randn(sum(query_lens), config.num_heads, config.head_dim, dtype=torch.float64).to(dtype)
    shape = sum(key_lens), config.num_kv_heads, config.head_dim
    k, v = (torch.randn(*shape, dtype=torch.float64).to(dtype) for _ in range(2))
    sinks = torch.randn(config.num_heads).to(dtype) if config.attention_sinks else None
    return q, k, v, offsets(query_lens), offsets(key_lens), max(query_lens), max(key_lens), config, sinks


def check(arguments, adapter):
    """Attend -> within the budgets of the reference, and exactly 0 in rows without keys; return the state."""
    low, gold = reference.gqa_varlen_attention(*arguments), reference.gqa_varlen_attention(*doubled(arguments))
    state = fast.gqa_varlen_attention(*arguments, backend=adapter)
    if state.out.dtype == torch.float32 and state.out.numel():
        verdict(OP, state, low, gold)
    elif state.out.numel():  # for 16-bit inputs, the CPU kernel computes exp with an error of 4e-5
        for parity in compare_states(OP, state, low, gold):
            assert parity.passed, parity
    assert state.lse.dtype == torch.float32 and state.lse.is_contiguous()
    if arguments[-1] is None:
        assert state.out[(gold.lse == -torch.inf).T].eq(0).all()
    return state


@pytest.mark.parametrize("attention_type", [DECODER, ENCODER, CROSS], ids=lambda each: each.value)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["multi-head", "grouped", "multi-query"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_within_the_budgets(lengths, heads, attention_type, adapter):
    """Attend requests of all lengths -> within the budgets, with and without sinks; head dims alternate."""
    number = list(LENGTHS).index(lengths) + heads[1]
    config = GQAConfig(*heads, (64, 80, 128)[number % 3], attention_type=attention_type)
    for dtype in DTYPES:
        check(inputs(LENGTHS[lengths], config, dtype), adapter)
        check(inputs(LENGTHS[lengths], replace(config, attention_sinks=True), dtype), adapter)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("attention_type", [DECODER, CROSS], ids=lambda each: each.value)
def test_head_dims(attention_type, head_dim, adapter):
    config = GQAConfig(6, 2, head_dim, scale=0.3, attention_type=attention_type)
    for dtype in DTYPES:
        check(inputs(((1, 17, 0, 5, 9), (1, 17, 4, 0, 33)), config, dtype), adapter)


@pytest.mark.parametrize("name", PACKED)
def test_features(name, adapter):
    """Attend with every mask and feature -> within the budgets, or an error that names each feature it lacks."""
    config = PACKED[name]
    lacking = {
        "alibi": config.alibi_slopes is not None,
        "soft_cap": config.logits_soft_cap is not None,
        "window": config.sliding_window is not None,
        "attention_chunk": config.attention_chunk_size is not None,
    }
    text = ", ".join(feature for feature, is_lacking in lacking.items() if is_lacking)
    for dtype in DTYPES:
        arguments = packed_inputs(config, dtype)
        if text:
            out = torch.full_like(arguments[0], 7)
            with pytest.raises(UnsupportedConfiguration, match=f"^{adapter}: has no {text}$"):
                fast.gqa_varlen_attention(*arguments, out=out, backend=adapter)
            assert out.eq(7).all()
        else:
            check(arguments, adapter)


def test_each_refusal(adapter):
    """Ask for one missing feature at a time -> an error that names it; the cached op has no kernel."""
    for feature, change in (
        ("alibi", dict(alibi_slopes=SLOPES)),
        ("soft_cap", dict(logits_soft_cap=2.0)),
        ("window", dict(sliding_window=3)),
        ("attention_chunk", dict(attention_chunk_size=8)),
    ):
        arguments = packed_inputs(replace(GROUPED, **change), torch.bfloat16)
        with pytest.raises(UnsupportedConfiguration, match=f"^{adapter}: has no {feature}$"):
            fast.gqa_varlen_attention(*arguments, backend=adapter)
    batch = gqa_batch(GROUPED, LENS, 16, torch.bfloat16)
    batch = replace(batch, metadata=replace(batch.metadata, mask=CAUSAL))
    with pytest.raises(UnsupportedConfiguration, match=f"^{adapter}: has no kernel for gqa_paged_attention"):
        attend(fast, batch, backend=adapter)


@SMALL
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_given_outputs(sinks, lengths, adapter):
    """Write into memory with gaps, and another dtype -> the same numbers, and nothing in the gaps."""
    arguments = inputs(LENGTHS[lengths], replace(GROUPED, attention_sinks=sinks), torch.bfloat16)
    plain = fast.gqa_varlen_attention(*arguments, backend=adapter)
    tokens, heads, width = plain.out.shape
    wide = torch.full((heads, tokens, width + 8), 7.0, dtype=torch.bfloat16)
    out = wide[..., :width].transpose(0, 1)
    state = fast.gqa_varlen_attention(*arguments, out=out, backend=adapter)
    assert state.out is out and wide[..., width:].eq(7).all()
    assert_same_bits(out.contiguous(), plain.out)
    assert_same_bits(state.lse, plain.lse)
    precise = fast.gqa_varlen_attention(*arguments, torch.float32, backend=adapter)
    assert precise.out.dtype == precise.lse.dtype == torch.float32
    assert_same_bits(precise.out.bfloat16(), plain.out)
    assert_same_bits(precise.lse, plain.lse)


@SMALL
def test_any_strides(lengths, adapter):
    """Attend tensors whose last stride is not 1, and tensors that begin between two words -> the same bits."""
    arguments = inputs(LENGTHS[lengths], GROUPED, torch.bfloat16)
    plain = fast.gqa_varlen_attention(*arguments, backend=adapter)
    turned = [x.mT.contiguous().mT for x in arguments[:3]]
    shifted = [torch.full((*x.shape[:2], 83), torch.nan, dtype=x.dtype)[..., 1:81].copy_(x) for x in arguments[:3]]
    for strided in (turned, shifted):
        state = fast.gqa_varlen_attention(*strided, *arguments[3:], backend=adapter)
        assert_same_bits(state.out, plain.out)
        assert_same_bits(state.lse, plain.lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_precision_of_merged_states(dtype, adapter):
    """Attend requests with context -> the state of one causal mask as a tensor, which is what the merge replaces."""
    config = replace(MHA, head_dim=64)
    q, k, v, *rest = inputs(((40,), (500,)), config, dtype)
    state = fast.gqa_varlen_attention(q, k, v, *rest, backend=adapter)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * config.softmax_scale
    scores.masked_fill_(~torch.ones(40, 500, dtype=torch.bool).tril(460), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(state.out.double(), out, rtol=2 * eps, atol=2 * eps * float(v.abs().max()))
    torch.testing.assert_close(state.lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def tokens_behind(config, dtype):
    """Return (arguments of a launcher, tokens of the requests); 3 query tokens and 2 keys follow the last request."""
    q, k, v, *starts, longest_q, longest_k, _, sinks = inputs(((2, 5), (4, 5)), config, dtype)
    q, k, v = (torch.cat((x, torch.full_like(x[:count], torch.nan))) for x, count in ((q, 3), (k, 2), (v, 2)))
    return (q, k, v, *starts, longest_q, longest_k, 0.2, "decoder", None, None, None, None, sinks, dtype), 7


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_tokens_behind_the_last_request(sinks, adapter):
    """Attend with NaN in the tokens and keys behind the last request -> 0 and -inf there, and no NaN elsewhere."""
    launch = backends.kernel(adapter, OP)
    arguments, used = tokens_behind(replace(GROUPED, attention_sinks=sinks), torch.bfloat16)
    out, lse = launch(*arguments)
    assert out[used:].eq(0).all() and lse[:, used:].eq(-torch.inf).all()
    assert out[:used].isfinite().all() and lse[:, :used].isfinite().all()
    given = torch.full_like(out, torch.nan)
    assert launch(*arguments, given)[0] is given
    assert_same_bits(given, out)


@pytest.mark.parametrize("attention_type", [DECODER, CROSS], ids=lambda each: each.value)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9), (1, 12), (4, 1), (7, 3), (40, 40), (20, 60)], ids=str)
def test_nan_stays_in_its_request(lengths, attention_type, adapter):
    """Plant NaN in a query, a key, all keys or a value of the middle request -> NaN in the rows that see it.

    The other requests keep their bits.
    """
    config = GQAConfig(4, 2, 64, attention_type=attention_type, attention_sinks=True)
    queries, keys = lengths
    arguments = inputs(((3, queries, 4), (6, keys, 2)), config, torch.bfloat16)
    rows, owned = slice(3, 3 + queries), slice(6, 6 + keys)
    plain = fast.gqa_varlen_attention(*arguments, backend=adapter)
    hidden = max(queries - keys, 0) if attention_type is DECODER else 0  # rows that see no key
    cases = {
        "query": (0, (rows.stop - 1, 1), lambda x: x[-1, 1]),
        "all queries": (0, (rows,), lambda x: x[hidden:]),
        "last key": (1, (owned.stop - 1, 1), lambda x: x[-1, 2:]),
        "first key": (1, (owned.start, 0, 5), lambda x: x[hidden:, :2]),
        "all keys": (1, (owned,), lambda x: x[hidden:]),
        "value": (2, (owned.start, 1), lambda x: x[hidden:, 2:]),
    }
    for name, (which, place, poisoned) in cases.items():
        tensors = [x.clone() for x in arguments[:3]]
        tensors[which][place] = torch.nan
        state = fast.gqa_varlen_attention(*tensors, *arguments[3:], backend=adapter)
        assert poisoned(state.out[rows]).isnan().all(), name
        if which != 2:
            assert poisoned(state.lse.T[rows]).isnan().all(), name
        others = [each for each in range(len(state.out)) if not rows.start <= each < rows.stop]
        assert_same_bits(state.out[others], plain.out[others])
        assert_same_bits(state.lse[:, others], plain.lse[:, others])
        assert state.out[rows][:hidden].eq(0).all()
        if name == "last key" and attention_type is DECODER and queries > 1:  # only the last row sees it
            assert state.lse.T[rows][:-1].isfinite().all()


def test_each_request_alone(adapter):
    """Attend each request alone and in a batch -> the same bits, because each request has kernel calls of its own."""
    query_lens, key_lens = (130, 1, 7, 9), (130, 70, 40, 3)
    q, k, v, *_ = inputs((query_lens, key_lens), GROUPED, torch.bfloat16)
    starts = offsets(query_lens), offsets(key_lens)
    whole = fast.gqa_varlen_attention(q, k, v, *starts, 130, 130, GROUPED, backend=adapter)
    for request, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        rows, owned = (slice(int(each[request]), int(each[request + 1])) for each in starts)
        alone = fast.gqa_varlen_attention(
            q[rows], k[owned], v[owned], offsets([queries]), offsets([keys]), queries, keys, GROUPED, backend=adapter
        )
        assert_same_bits(alone.out, whole.out[rows])
        assert_same_bits(alone.lse, whole.lse[:, rows])


def test_only_by_name():
    """Choose a backend without a name -> never these adapters, although they could serve the call."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    request = backends.varlen_attention_request(GROUPED, device, torch.bfloat16)
    assert backends.select(request).name not in ("torch_flash", "torch_cudnn")
    assert backends.select(request, "torch_flash").name == "torch_flash"
    assert all(each.is_only_named(OP) for each in (TORCH_FLASH, TORCH_CUDNN))


def test_the_declarations(monkeypatch):
    """Ask what the adapters serve -> each limit as a reason."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    request = backends.KernelRequest(OP, gpu, torch.float32, (("head_dim", 260),), graph=GraphSupport.ANY, lse=True,
                                     out_dtype=torch.float64, batch_invariant=True, mask="visible_lens")  # fmt: skip
    for each in (TORCH_FLASH, TORCH_CUDNN):
        text = "\n".join(each.validate_configuration(request))
        for part in ("compute capability", "got torch.float32", "head_dim", "graph support", "torch.float64",
                     "not batch-invariant", "visible_lens"):  # fmt: skip
            assert part in text, (each.name, part)
        assert "LSE" not in text
    wide = replace(request, head_dims=(("head_dim", 136),))
    assert "head_dim" in "\n".join(TORCH_CUDNN.validate_configuration(wide))
    assert "head_dim" not in "\n".join(TORCH_FLASH.validate_configuration(wide))
    served = backends.KernelRequest(OP, cpu, torch.float32, (("head_dim", 20),), out_dtype=torch.float32, lse=True,
                                    batch_invariant=True, mask=CAUSAL, features=("sinks",))  # fmt: skip
    assert TORCH_FLASH.validate_configuration(served) == []
    assert TORCH_FLASH.validate_configuration(replace(served, dtype=torch.float64)) == [
        "torch_flash: serves torch.bfloat16, torch.float16, torch.float32, got torch.float64"
    ]


@pytest.mark.parametrize("backend, name", [
    ("torch_flash", "_scaled_dot_product_flash_attention"), ("torch_cudnn", "_scaled_dot_product_cudnn_attention"),
    ("torch_flash", "_scaled_dot_product_flash_attention_for_cpu"),
])  # fmt: skip
def test_a_missing_op(backend, name, monkeypatch):
    """Look for an op that this PyTorch has, and for one that it lacks -> the op, or an error that names it."""
    assert torch_sdpa_gqa._op(backend, name) is getattr(torch.ops.aten, name)
    monkeypatch.setattr(torch, "__version__", "2.x")
    reason = f"^{backend}: needs a PyTorch with the op aten::{name}_gone, which returns the LSE, found 2.x$"
    with pytest.raises(UnsupportedConfiguration, match=reason):
        torch_sdpa_gqa._op(backend, f"{name}_gone")


def test_arguments_of_the_ops():
    """Read the schemas of PyTorch's ops -> every argument that the launchers pass by name exists."""
    common = {"is_causal", "scale"}
    for name, arguments in (
        ("_scaled_dot_product_flash_attention_for_cpu", common),
        ("_scaled_dot_product_flash_attention", common),
        ("_scaled_dot_product_cudnn_attention", common | {"attn_bias", "compute_log_sumexp"}),
    ):
        schema = getattr(torch.ops.aten, name).default._schema
        assert [each.name for each in schema.arguments[:3]] == ["query", "key", "value"]
        assert arguments <= {each.name for each in schema.arguments}
        assert [each.name for each in schema.returns[:2]] == ["output", "logsumexp"]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ["torch_flash", "torch_cudnn"])
def test_the_kernel_that_runs(name):
    """Attend on a GPU under a profiler -> the kernel that the name promises."""
    if name == "torch_cudnn" and (missing_cudnn() or torch.cuda.get_device_capability()[0] not in (9, 10)):
        pytest.skip("needs cuDNN, and a GPU of compute capability 9 or 10")
    arguments = inputs(((256, 64), (256, 300)), GQAConfig(8, 2, 128), torch.bfloat16)
    fast.gqa_varlen_attention(*arguments, backend=name)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast.gqa_varlen_attention(*arguments, backend=name)
        torch.cuda.synchronize()
    names = [event.key.lower() for event in profile.key_averages()]
    word = "flash_fwd" if name == "torch_flash" else "cudnn"
    assert any(word in each for each in names), names

"""Tests of the adapters to PyTorch's SDPA.

Without a GPU, the adapter "torch_flash" runs with PyTorch's own kernel on the CPU. The functions that prepare the calls
on a GPU are tested with the same kernel. Whole calls on a GPU: test_every_adapter.py, and the end of this file.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.attention.varlen import flash_attn_varlen_shared_rope
from fast.backends.adapters import torch_sdpa
from fast.parity import compare
from reference.interfaces import AttentionState, UnsupportedConfiguration

from ...support.factories import DIRECT, make_batch, make_layer, make_weights, new_cache, offsets, positions_of

NAME = "torch_flash"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = {
    "one": ([1], [1]),
    "equal": ([5, 5], [5, 5]),
    "mixed": ([1, 17, 0, 5, 7], [1, 17, 4, 0, 31]),
    "more queries than keys": ([9, 4], [4, 0]),
    "long": ([300, 3], [809, 700]),
    "none": ([0], [0]),
}


def inputs(query_lens, key_lens, dtype, nope=12, rope=8, value=16, heads=3):
    tokens, keys = sum(query_lens), sum(key_lens)
    shapes = (tokens, heads, nope + rope), (keys, heads, nope), (keys, rope), (keys, heads, value)
    tensors = [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]
    longest = max(query_lens), max(key_lens)
    return tensors, (offsets(query_lens), offsets(key_lens), *longest, (nope + rope) ** -0.5)


def joined(tensors):
    """Return queries, whole keys and values."""
    q, k_nope, k_pe, v = tensors
    return q, torch.cat((k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)), dim=-1), v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_within_the_budget(lengths, dtype, causal):
    """Attend packed requests without an LSE -> the output is within the budget; rows without keys are exactly 0."""
    tensors, rest = inputs(*LENGTHS[lengths], dtype)
    value = flash_attn_varlen_shared_rope(*tensors, *rest, causal, return_lse=False, backend=NAME)
    whole = joined(tensors)
    low = reference.flash_attn_varlen(*whole, *rest, causal)
    gold = reference.flash_attn_varlen(*[x.double() for x in whole], *rest, causal)
    assert value.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(value, gold.out, rtol=1e-12, atol=1e-13)
    elif value.numel():
        parity = compare("flash_attn_varlen", value, low.out, gold.out)
        assert parity.passed, parity
    empty = (gold.lse == -torch.inf).T
    assert value[empty].eq(0).all()


def test_values_are_padded_without_reading_neighbours():
    """Attend with values narrower than keys, in a tensor with NaN behind each value -> no NaN in the output."""
    (q, k, k_pe, v), rest = inputs([7, 3], [7, 3], torch.float32)
    wide = torch.full((*v.shape[:2], 20), torch.nan)
    wide[..., : v.shape[2]] = v
    given = flash_attn_varlen_shared_rope(
        q, k, k_pe, wide[..., : v.shape[2]], *rest, True, return_lse=False, backend=NAME
    )
    plain = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, True, return_lse=False, backend=NAME)
    assert torch.equal(given, plain) and plain.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 3), (2, 5), (4, 4)])
def test_keys_with_nan(queries, keys, causal):
    """Make the last key NaN, or all keys -> NaN in the rows that see such a key, also with very few keys."""
    q, k, v = (torch.randn(tokens, 2, 32) for tokens in (queries, keys, keys))
    for first in (0, keys - 1):
        broken = k.clone()
        broken[first:] = torch.nan
        starts = offsets([queries]), offsets([keys])
        out, _ = torch_sdpa.flash_attn_varlen(q, broken, None, v, *starts, queries, keys, 0.2, causal, torch.float32)
        sees_nan = torch.arange(queries) + keys - queries >= first if causal else torch.ones(queries, dtype=torch.bool)
        assert out[sees_nan].isnan().all()
        if queries == keys:  # otherwise the kernel adds a mask to the scores, and NaN stays NaN also in masked scores
            assert out[~sees_nan].isfinite().all()


def test_nan_stays_in_its_request():
    (q, k, k_pe, v), rest = inputs([7, 3], [7, 3], torch.float32)
    k[2], v[1] = torch.nan, torch.nan
    out = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, True, return_lse=False, backend=NAME)
    assert out[:7].isnan().any() and out[7:].isfinite().all()


def test_batch_invariance():
    """Attend each request alone and in a batch -> the same bits, because each request is a call of its own."""
    lens = [130, 1, 7]
    (q, k, k_pe, v), rest = inputs(lens, lens, torch.float32)
    whole = flash_attn_varlen_shared_rope(q, k, k_pe, v, *rest, True, return_lse=False, backend=NAME)
    for first, length in zip((0, 130, 131), lens, strict=True):
        own, starts = slice(first, first + length), offsets([length])
        alone = flash_attn_varlen_shared_rope(
            q[own], k[own], k_pe[own], v[own], starts, starts, length, length, rest[4], True, return_lse=False,
            backend=NAME,
        )  # fmt: skip
        assert torch.equal(alone, whole[own])


def test_out_with_any_strides():
    tensors, rest = inputs([7, 3], [7, 3], torch.float32)
    made = torch.full((3, 10, 16), torch.nan).transpose(0, 1)
    out = flash_attn_varlen_shared_rope(*tensors, *rest, True, return_lse=False, out=made, backend=NAME)
    assert out is made
    torch.testing.assert_close(
        made, flash_attn_varlen_shared_rope(*tensors, *rest, True, return_lse=False, backend=NAME)
    )


def test_any_strides_and_no_setting_of_the_process():
    """Attend tensors whose last stride is not 1 -> the same bits; PyTorch's choice of SDPA kernels is unchanged."""
    tensors, rest = inputs([7, 3], [7, 3], torch.float32)
    strided = [x.mT.contiguous().mT for x in tensors]
    assert all(x.stride(-1) != 1 for x in strided)
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    plain, given = (
        flash_attn_varlen_shared_rope(*each, *rest, True, return_lse=False, backend=NAME) for each in (tensors, strided)
    )
    assert torch.equal(plain, given)
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(return_lse=True), "returns no LSE"),
        (dict(out_dtype=torch.float32), "writes torch.bfloat16, got torch.float32"),
        (dict(value=24), "serves values that are not wider than keys, got 24 columns"),
    ],
)
def test_refusals(change, reason):
    """Ask for what SDPA cannot do -> the error names the reason, and nothing is replaced."""
    tensors, rest = inputs([4], [4], torch.bfloat16, value=change.get("value", 16))
    options = {key: value for key, value in change.items() if key != "value"}
    with pytest.raises(UnsupportedConfiguration, match=f"^{NAME}: {reason}$"):
        flash_attn_varlen_shared_rope(*tensors, *rest, True, backend=NAME, **{"return_lse": False, **options})


def test_only_by_name():
    """Choose a backend without a name -> never the adapter, although it could serve the call."""
    request = backends.KernelRequest("flash_attn_varlen", torch.device("cpu"), torch.float32, out_dtype=torch.float32)
    assert backends.select(request).name == "cpu" and backends.select(request, NAME).name == NAME


def test_a_layer_with_the_adapter():
    """Run a step without context and a step with context -> equal output, and one error that names the LSE."""
    weights = make_weights(DIRECT, torch.float32)
    ours = make_layer(fast, DIRECT, weights, torch.float32)
    theirs = make_layer(fast, DIRECT, weights, torch.float32, backend=NAME)
    options = dict(batch_invariant=True, dtype=torch.float32)  # queries of several tokens are prefills
    builder = fast.MLAMetadataBuilder(DIRECT, 16, 128, 4, **options, backend=NAME)
    plain = fast.MLAMetadataBuilder(DIRECT, 16, 128, 4, **options)
    batch = make_batch([9, 5], [9, 5])
    cache = new_cache(batch, DIRECT.head_size, torch.float32)
    hidden = torch.randn(14, DIRECT.hidden_size)
    step = hidden, positions_of([9, 5], [9, 5])
    plan = builder.build(0, batch.common)
    assert plan.prefill.backend == NAME and plan.num_prefills == 2
    found = theirs(*step, cache.clone(), plan)
    torch.testing.assert_close(found, ours(*step, cache.clone(), plain.build(0, batch.common)))
    with pytest.raises(
        ValueError, match=f"^metadata.prefill.backend: expected {NAME}, the backend of the layer, got cpu$"
    ):
        theirs(*step, cache.clone(), plain.build(0, batch.common))
    later = make_batch([9, 5], [30, 25])
    with pytest.raises(UnsupportedConfiguration, match=f"^{NAME}: .*returns no LSE$"):
        builder.build(0, later.common)


def test_a_wrong_state_of_a_backend(plain_errors):
    """Return an output of another shape or dtype, or no LSE, from a backend -> an error that names the backend."""
    state = AttentionState(torch.zeros(3, 2, 4), torch.zeros(2, 3))
    given = "mine", "flash_attn_varlen"
    rest = (3, 2, 4), torch.float32, torch.device("cpu")
    backends.check_state(*given, tuple(state), *rest)
    backends.check_state(*given, (state.out, None), *rest, lse=False)
    backends.check_state("cpu", "flash_attn_varlen", None, *rest)
    name = "the result of the backend mine for flash_attn_varlen"
    for wrong, message in (
        ((state.out[:2], state.lse), f"{name}: out: expected shape"),
        ((state.out.double(), state.lse), f"{name}: out: expected dtype"),
        ((state.out, state.lse.T), f"{name}: lse: expected shape"),
        ((state.out, None), f"{name}: lse: expected a tensor"),
        (state.out, f"{name}: expected a pair"),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            backends.check_state(*given, wrong, *rest)
        assert str(error.value).startswith(message), str(error.value)


# Calls on a GPU

GPU = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10)
    or bool(torch_sdpa.missing_cudnn()),
    reason="needs a GPU of compute capability 9 or 10, and cuDNN",
)  # fmt: skip
KERNELS = (torch_sdpa.FLASH, torch_sdpa.CUDNN)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", [(1, 1), (5, 1), (1, 9), (7, 7), (9, 4), (3, 17), (4, 0)])
def test_one_request_with_calls_that_gpu_kernels_serve(lens, causal, kernel):
    """Attend one request with the calls for a GPU -> within the budget, although no call has a mask as a tensor."""
    (q, k, k_pe, v), rest = inputs([lens[0]], [lens[1]], torch.float32)
    q, k, v = joined((q, k, k_pe, v))
    out = torch.full((lens[0], 3, 20), torch.nan)[..., :16]
    torch_sdpa.attend_request(out, q, k, v, rest[4], causal, kernel)
    low = reference.flash_attn_varlen(q, k, v, *rest, causal)
    gold = reference.flash_attn_varlen(q.double(), k.double(), v.double(), *rest, causal)
    parity = compare("flash_attn_varlen", out.contiguous(), low.out, gold.out)
    assert parity.passed, parity
    assert out[(gold.lse == -torch.inf).T].eq(0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [1, 6])
def test_requests_of_equal_lengths_in_one_call(length, kernel):
    """Attend three requests in one call -> the result of three calls."""
    (q, k, k_pe, v), rest = inputs([length] * 3, [length] * 3, torch.float32)
    q, k, v = joined((q, k, k_pe, v))
    batch = [x.unflatten(0, (3, length)) for x in (q, k, v)]
    found = torch_sdpa.attend_equal(*batch, rest[4], True, kernel)
    assert found.shape == (3, length, 3, 16)
    gold = reference.flash_attn_varlen(q, k, v, *rest, True)
    torch.testing.assert_close(found.flatten(0, 1), gold.out)


def test_when_all_lengths_are_known_without_waiting():
    """Find out whether all requests have the longest length -> only if shapes and the same offsets prove it."""
    q, starts = torch.zeros(6, 1, 8), offsets([3, 3])
    assert torch_sdpa.equal_requests(q, starts, starts, 3) == 2
    assert torch_sdpa.equal_requests(q, starts, starts, 4) == 0  # an upper bound above the lengths
    assert torch_sdpa.equal_requests(q, starts, starts.clone(), 3) == 0  # the keys may have other lengths
    assert torch_sdpa.equal_requests(q, starts, starts[:2], 3) == 0
    assert torch_sdpa.equal_requests(q[:0], offsets([0, 0]), offsets([0, 0]), 0) == 0


def test_declarations_for_a_gpu(monkeypatch):
    """Ask what the adapters serve on a GPU -> the limits of each kernel, with every reason."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    dims = (("qk_head_dim", 320), ("v_head_dim", 192))
    request = backends.KernelRequest("flash_attn_varlen", GPU, torch.float32, dims, lse=True, batch_invariant=True)
    flash = torch_sdpa.TORCH_FLASH.validate_configuration(request)
    cudnn = torch_sdpa.TORCH_CUDNN.validate_configuration(request)
    for name, reasons in (("torch_flash", flash), ("torch_cudnn", cudnn)):
        assert all(reason.startswith(f"{name}: ") for reason in reasons)
        text = "\n".join(reasons)
        for part in ("compute capability", "got torch.float32", "qk_head_dim", "not batch-invariant", "no LSE"):
            assert part in text, (name, part)
    assert "serves v_head_dim" in "\n".join(cudnn)
    other = backends.KernelRequest("flash_attn_varlen", torch.device("meta"))
    assert torch_sdpa.TORCH_FLASH.validate_configuration(other) == ["torch_flash: serves device cpu, got meta"]
    assert torch_sdpa.TORCH_FLASH.supports_compute_capability((9, 0))
    assert not torch_sdpa.TORCH_FLASH.supports_compute_capability((7, 5))
    on_cpu = replace(torch_sdpa.TORCH_FLASH.ops["flash_attn_varlen"], dtypes=(torch.float64,))
    narrow = replace(torch_sdpa.TORCH_FLASH, ops={"flash_attn_varlen": on_cpu})  # its GPU serves bfloat16 and float16
    dtypes = torch.float64, torch.bfloat16, torch.float32
    assert [narrow.supports_dtype("flash_attn_varlen", dtype) for dtype in dtypes] == [True, True, False]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "needs a PyTorch with cuDNN, found 2.x without cuDNN"),
        (91002, "needs cuDNN 9.15.1 or later (91501), found 91002"),
        (91501, None),
    ],
)
def test_what_is_missing_for_cudnn(version, reason, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.x")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: version is not None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert torch_sdpa.missing_cudnn() == ([] if reason is None else [reason])


@on_gpu
@pytest.mark.parametrize("name", ["torch_flash", pytest.param("torch_cudnn", marks=hopper)])
def test_the_kernel_that_runs(name):
    """Attend on a GPU under a profiler -> the kernel that the name promises; PyTorch's settings are unchanged."""
    tensors, rest = inputs([256, 256], [256, 256], torch.bfloat16, 128, 64, 128, 4)
    q, k, v = (x.to(GPU) for x in joined(tensors))
    starts = rest[0].to(GPU)
    launch = backends.kernel(name, "flash_attn_varlen")
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    given = q, k, None, v, starts, starts, 256, 256, rest[4], True, torch.bfloat16
    launch(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch(*given)
        torch.cuda.synchronize()
    names = [event.key.lower() for event in profile.key_averages()]
    word = "flash_fwd" if name == "torch_flash" else "cudnn"
    assert any(word in each for each in names), names
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())


@on_gpu
@pytest.mark.parametrize("name", ["torch_flash", pytest.param("torch_cudnn", marks=hopper)])
def test_equal_lengths_do_not_wait_for_the_gpu(name):
    """Attend requests of equal lengths -> no wait for the GPU, which PyTorch would report as an error."""
    tensors, rest = inputs([64, 64], [64, 64], torch.bfloat16, 128, 64, 128, 4)
    q, k, v = (x.to(GPU) for x in joined(tensors))
    starts = rest[0].to(GPU)
    launch = backends.kernel(name, "flash_attn_varlen")
    given = q, k, None, v, starts, starts, 64, 64, rest[4], True, torch.bfloat16
    launch(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_allowed_kernel(kernel):
    """Enter `OnlyKernel` with some kernels forbidden -> one kernel is allowed, and afterwards the setting as before."""

    def allowed():
        return {name: is_allowed() for name, is_allowed, _ in torch_sdpa.OnlyKernel.SETTINGS}

    original = allowed()
    torch.backends.cuda.enable_math_sdp(False)
    try:
        before = allowed()
        with pytest.raises(ZeroDivisionError), torch_sdpa.OnlyKernel(kernel):
            assert allowed() == {name: name == kernel for name in before}
            assert torch_sdpa._CHOICE_OF_KERNEL.locked()
            raise ZeroDivisionError
        assert allowed() == before and not torch_sdpa._CHOICE_OF_KERNEL.locked()
    finally:
        torch.backends.cuda.enable_math_sdp(original["math"])
    assert allowed() == original

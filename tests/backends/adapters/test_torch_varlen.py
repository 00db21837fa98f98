"""Tests of the adapter to `torch.nn.attention.varlen`.

Without a GPU, PyTorch's own Python runs with a recorder in place of its compiled kernel. The recorder checks what the
kernel would check, and returns what the kernel documents: the attention of the reference in the dtype of the queries,
and an LSE of +inf for rows without keys. Calls of the kernel itself: test_every_adapter.py on a GPU.
"""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch

import reference
from fast import backends
from fast.backends.adapters import torch_varlen
from fast.backends.adapters.torch_varlen import TORCH_VARLEN, flash_attn_varlen, in_words

from ...support.adapters import check_state, make_call

LACKING = torch_varlen.missing()  # before the import below: this reads the source of PyTorch
with contextlib.suppress(ImportError):
    import torch.nn.attention.varlen  # before a test replaces an op that this module registers

# after the import, `missing` reads the imported function, so a wrong LACKING does not skip the tests
pytestmark = pytest.mark.skipif(
    any("2.11" in reason for reason in torch_varlen.missing()), reason="; ".join(torch_varlen.missing())
)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")


class Recorder:
    """Stands in for PyTorch's compiled kernel, and keeps the arguments of its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, starts, keys, max_q, max_k, dropout, causal, debug=None, *, scale, **options):
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0 and q.shape[2] <= 256
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
        assert starts.dtype == keys.dtype == torch.int32 and dropout == 0.0
        assert q.shape[0] and k.shape[0] and max_q >= 1
        window = options["window_size_left"], options["window_size_right"]
        assert window == ((-1, 0) if causal else (-1, -1))
        self.calls.append((q, k, v, max_q, max_k, options))
        end = int(keys[-1])  # keys after the last request are not read
        state = reference.flash_attn_varlen(q, k[:end], v[:end], starts, keys, max_q, max_k, scale, causal)
        lse = torch.where(state.lse == -torch.inf, torch.inf, state.lse)
        return state.out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", made)
    return made


def launch(call, out_dtype, *written):
    return flash_attn_varlen(call.q, call.keys, None, call.v, *call[4:], out_dtype, *written)


@on_cpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(16, 8, 16, 3), (16, 8, 24, 1)], ids=["narrow values", "equal widths"])
@pytest.mark.parametrize(
    "lens", [([1, 17, 0, 5], [1, 17, 4, 31]), ([9, 4], [4, 0]), ([3], [0]), ([0], [0]), ([2], [9])]
)
def test_conversions(recorder, lens, dims, out_dtype, causal):
    """Attend with PyTorch's Python and a recorder -> the state law at the border, for every dtype of the output."""
    call = make_call(*lens, dims, torch.bfloat16, causal)
    out, lse = launch(call, out_dtype)
    check_state(call, out, lse, out_dtype)
    assert out.is_contiguous()
    assert len(recorder.calls) == (1 if sum(lens[0]) and sum(lens[1]) else 0)


@on_cpu
def test_written_results(recorder):
    """Pass an output with gaps and an LSE, or an output alone -> the given tensors, and nothing in the gaps."""
    call = make_call([9, 4], [4, 0], (16, 8, 16, 3), torch.bfloat16, True)
    plain, plain_lse = launch(call, torch.float32)
    wide = torch.full((3, 13, 20), torch.nan)
    out, lse = wide[..., :16].transpose(0, 1), torch.full((3, 13), torch.nan)
    found = launch(call, torch.float32, out, lse)
    assert found[0] is out and found[1] is lse
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and wide[..., 16:].isnan().all()
    out.fill_(torch.nan)
    found = launch(call, torch.float32, out, None)
    assert found[0] is out and found[1] is None and torch.equal(out, plain)
    empty = make_call([4], [0], (16, 8, 16, 3), torch.bfloat16, True)
    out, lse = torch.full((4, 3, 16), torch.nan), torch.full((3, 4), torch.nan)
    launch(empty, torch.float32, out, lse)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()


@on_cpu
def test_a_row_of_nan(recorder, monkeypatch):
    """Return +inf for a row whose output is NaN, as the kernel does -> an LSE of NaN, not of -inf."""
    real = recorder.__call__

    def kernel(*given, **options):
        out, lse, *rest = real(*given, **options)
        out[2], lse[:, 2] = torch.nan, torch.inf
        return out, lse, *rest

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    call = make_call([9, 4], [4, 0], (16, 8, 16, 3), torch.bfloat16, True)
    out, lse = launch(call, torch.bfloat16)
    assert out[2].isnan().all() and lse[:, 2].isnan().all()
    assert lse[:, [0, 1, 3, 4]].eq(-torch.inf).all() and lse[:, 5:9].isfinite().all()


@on_cpu
def test_values_are_padded_without_reading_neighbours(recorder):
    """Attend with values in a tensor with NaN behind each value -> zeros in the padding, and whole, aligned words."""
    call = make_call([5], [7], (16, 8, 16, 2), torch.bfloat16, False)
    wide = torch.full((7, 2, 27), torch.nan, dtype=torch.bfloat16)
    wide[..., 1:17] = call.v
    out, lse = flash_attn_varlen(call.q, call.keys, None, wide[..., 1:17], *call[4:], torch.bfloat16)
    check_state(call, out, lse, torch.bfloat16)
    q, k, v, *_ = recorder.calls[0]
    assert v[..., 16:].eq(0).all() and torch.equal(v[..., :16], call.v)
    assert all(x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in x.stride()[:-1]) for x in (q, k, v))


@on_cpu
def test_splits_and_bounds_of_each_call(recorder):
    """Attend one query -> the same variant of the kernel as in a batch, and no split, where PyTorch has this choice."""
    call = make_call([1], [9], (16, 8, 24, 2), torch.bfloat16, True)
    launch(call, torch.bfloat16)
    *_, max_q, max_k, options = recorder.calls[0]
    assert max_q == 2 and max_k == 9 and options.get("num_splits", 1) == 1


def test_words():
    """Ask for rows of whole, aligned words -> the same tensor if its rows are, and otherwise a copy."""
    whole = torch.randn(4, 3, 16).to(torch.bfloat16)
    assert in_words(whole) is whole and in_words(whole[..., :8]).data_ptr() == whole.data_ptr()
    wide = torch.randn(4, 3, 24).to(torch.bfloat16)
    for part in (
        wide[..., 1:17],
        whole.mT,
        wide.flatten()[4:196].view(4, 3, 16),
        torch.randn(4, 3, 20).bfloat16()[..., :16],
    ):
        made = in_words(part)
        assert torch.equal(made, part) and made.is_contiguous() and made.data_ptr() % 16 == 0 and made is not part


def test_the_declaration(monkeypatch):
    """Ask what the adapter serves -> every reason; it may be chosen without a name, after the backends of `fast`."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    gpu = torch.device("cuda")
    request = backends.KernelRequest(
        "flash_attn_varlen", gpu, torch.float32, (("qk_head_dim", 20), ("v_head_dim", 24)), out_dtype=torch.float64,
        mask="visible_lens",
    )  # fmt: skip
    text = "\n".join(TORCH_VARLEN.validate_configuration(request))
    for part in (
        "compute capability",
        "got torch.float32",
        "torch.float64",
        "qk_head_dim",
        "not wider",
        "visible_lens",
    ):
        assert part in text, part
    assert not TORCH_VARLEN.only_named and TORCH_VARLEN.priority == -5
    assert TORCH_VARLEN.ops["flash_attn_varlen"].lse and TORCH_VARLEN.ops["flash_attn_varlen"].batch_invariant


def test_versions_without_a_scale(monkeypatch):
    """Import a `varlen_attn` without `scale`, as in PyTorch 2.10 -> a reason that names the version to install."""
    from torch.nn.attention import varlen

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError("not called")

    monkeypatch.setattr(varlen, "varlen_attn", older)
    assert torch_varlen.missing() == [
        f"needs PyTorch 2.11 or later, found {torch.__version__}: its varlen_attn has no parameter scale and no"
        " parameter window_size"
    ]


def test_parameters_without_an_import():
    """Read the parameters of `varlen_attn` from the source of PyTorch -> those of the imported function."""
    from torch.nn.attention import varlen

    assert torch_varlen._parameters_in(varlen.__file__) == set(inspect.signature(varlen.varlen_attn).parameters)
    assert torch_varlen._parameters_in(__file__) is None
    assert torch_varlen.missing() == LACKING


@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch_varlen.missing()), reason="needs a GPU")
def test_no_wait_and_replays():
    """Capture a call in a CUDA graph, change the offsets in place, replay -> the result for the new offsets."""
    with torch.device("cuda"):
        call = make_call([40, 24], [70, 60], (128, 64, 128, 4), torch.bfloat16, True)
        call = call._replace(max_seqlen_q=64, max_seqlen_k=130)
        launch(call, torch.float32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = launch(call, torch.float32)
        for queries, keys in (([40, 24], [70, 60]), ([1, 63], [129, 1]), ([64, 0], [100, 30])):
            call.cu_seqlens_q.copy_(torch.tensor([0, queries[0], 64], dtype=torch.int32))
            call.cu_seqlens_k.copy_(torch.tensor([0, keys[0], 130], dtype=torch.int32))
            graph.replay()
            check_state(call, out, lse, torch.float32)

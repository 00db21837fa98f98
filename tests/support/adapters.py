"""Helpers for the tests of the adapters to other libraries: which adapters run, their inputs, judges and report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fast
import reference
from fast import backends
from fast.attention.varlen import flash_attn_varlen_shared_rope
from fast.backends import Backend, KernelRequest
from fast.backends.checked_calls import forget_calls
from fast.parity import Parity, compare, compare_states
from reference.interfaces import AttentionState, QueryLenSupport, wide_dtype

from .factories import assert_close64, offsets

LENGTHS = {  # query lengths and key lengths
    "one": ([1], [1]),
    "equal": ([7, 7, 7], [7, 7, 7]),
    "new tokens": ([1, 17, 0, 65, 7], [1, 17, 0, 65, 7]),
    "block edges": ([127, 128, 129], [127, 128, 129]),
    "longer keys": ([1, 17, 3, 64], [63, 64, 1, 129]),
    "no keys": ([5, 3, 2], [0, 31, 0]),
    "more queries": ([9, 4, 130], [4, 0, 129]),
    "primes": ([131, 3], [257, 127]),
    "none": ([0], [0]),
}
DIMS = {"192/128": (128, 64, 128, 16), "128/128": (64, 64, 128, 3), "96/64": (64, 32, 64, 1)}  # P, R, V, heads
MOST_ERRORS = 3  # messages of failed tests in a report, for each backend


def unavailable(backend: Backend, op: str, device: str) -> list[str]:
    """Return every reason why a backend can serve no call of an op on this machine; an empty list if there is none."""
    return backend.validate_configuration(KernelRequest(op, torch.device(device)))


def adapters_of(config: pytest.Config, op: str) -> list[Backend]:
    """Return the backends of other libraries that serve an op on this machine, or the one that `--backend` names.

    Args:
        config: config of the run of pytest.
        op: name of the op.

    Raises:
        pytest.UsageError: `--backend` names a backend that does not exist, or that cannot serve this machine; the
            message has every reason.
    """
    device, name = config.getoption("--device", "cpu"), config.getoption("--backend", None)
    of_libraries = [each for each in backends.registered() if each.library is not None]
    if name is not None:
        names = [each.name for each in of_libraries]
        if name not in names:
            raise pytest.UsageError(f"--backend: expected one of {', '.join(names)}, got {name}")
        named = of_libraries[names.index(name)]
        if op not in named.ops:
            return []
        reasons = unavailable(named, op, device)
        if reasons:
            raise pytest.UsageError(f"--backend {name}: cannot serve {op} on {device}: {'; '.join(reasons)}")
        return [named]
    return [each for each in of_libraries if op in each.ops and not unavailable(each, op, device)]


class Call(NamedTuple):
    """One call of `flash_attn_varlen`.

    Attributes:
        q: [T, N, P + R].
        k_nope: [S, N, P].
        k_pe: [S, R].
        v: [S, N, V].
        cu_seqlens_q: [B + 1].
        cu_seqlens_k: [B + 1].
        max_seqlen_q: length of the longest query.
        max_seqlen_k: largest number of keys of a request.
        softmax_scale: factor of the scores.
        causal: whether the mask is causal.
    """

    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    causal: bool

    @property
    def keys(self) -> Tensor:
        """Whole keys, [S, N, P + R]."""
        return torch.cat((self.k_nope, self.k_pe[:, None].expand(-1, self.k_nope.shape[1], -1)), dim=-1)

    def request(self, out_dtype: torch.dtype, lse: bool) -> KernelRequest:
        """Return the request that `fast` checks before this call."""
        return KernelRequest(
            "flash_attn_varlen", self.q.device, self.q.dtype,
            (("qk_head_dim", self.q.shape[2]), ("v_head_dim", self.v.shape[2])), query_lens=QueryLenSupport.VARLEN,
            out_dtype=out_dtype, mask="causal" if self.causal else None, lse=lse,
        )  # fmt: skip


def make_call(query_lens, key_lens, dims, dtype: torch.dtype, causal: bool) -> Call:
    """Return a call with random inputs; equal query and key lengths share one tensor of offsets, as in a prefill.

    Args:
        query_lens: number of queries of each request.
        key_lens: number of keys of each request.
        dims: P, R, V and number of heads; a CPU, which is slow, gets at most 2 heads of DIMS.
        dtype: dtype of the tensors.
        causal: whether the mask is causal.
    """
    nope, rope, value, heads = dims
    if dims in DIMS.values() and torch.empty(0).device.type == "cpu":
        heads = min(heads, 2)
    tokens, keys = sum(query_lens), sum(key_lens)
    shapes = (tokens, heads, nope + rope), (keys, heads, nope), (keys, rope), (keys, heads, value)
    tensors = [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]
    starts = offsets(query_lens)
    ends = starts if list(query_lens) == list(key_lens) else offsets(key_lens)
    return Call(*tensors, starts, ends, max(query_lens), max(key_lens), (nope + rope) ** -0.5, causal)


def attend(call: Call, name: str, lse: bool, out_dtype: torch.dtype | None = None, out: Tensor | None = None):
    """Run a call with the backend `name`; return its state, with None as LSE if `lse` is False."""
    found = flash_attn_varlen_shared_rope(*call, out_dtype, return_lse=lse, out=out, backend=name)
    return (found.out, found.lse) if lse else (found, None)


def expected(call: Call, out_dtype: torch.dtype) -> tuple[AttentionState, AttentionState]:
    """Return low and gold: the reference in the dtype of the queries, and in float64.

    A kernel of a library writes the dtype of the queries, and its adapter converts this output to `out_dtype`. So low
    rounds its output to the dtype of the queries too.
    """
    rest = call[4:]
    low = reference.flash_attn_varlen(call.q, call.keys, call.v, *rest)
    gold = reference.flash_attn_varlen(call.q.double(), call.keys.double(), call.v.double(), *rest)
    return AttentionState(low.out.to(out_dtype), low.lse), gold


def judge(out: Tensor, lse: Tensor | None, low: AttentionState, gold: AttentionState) -> list[Parity]:
    """Compare a state, or an output alone, with its budget."""
    if lse is None:
        return [compare("flash_attn_varlen: out", out, low.out, gold.out)]
    return compare_states("flash_attn_varlen", AttentionState(out, lse), low, gold)


def check_state(call: Call, out: Tensor, lse: Tensor | None, out_dtype: torch.dtype) -> None:
    """Assert that a state is within its budget, and exactly 0 and -inf in rows without keys.

    In float64 low and gold are the same numbers, so a state must be equal to gold up to rounding.
    """
    low, gold = expected(call, out_dtype)
    assert out.dtype == out_dtype
    if out_dtype == torch.float64:
        assert_close64(out, gold.out)
        if lse is not None:
            assert_close64(lse, gold.lse)
    else:
        for parity in judge(out, lse, low, gold):
            assert parity.passed, parity
    empty = gold.lse == -torch.inf
    assert out[empty.T].eq(0).all()
    if lse is not None:
        assert lse.dtype == wide_dtype(out_dtype) and lse[empty].eq(-torch.inf).all()


def out_dtypes_of(backend: Backend, dtype: torch.dtype, lse: bool) -> list[torch.dtype]:
    """Return the dtypes of outputs that `fast` asks for, as far as a backend declares them.

    These are the dtype of the queries and, for states that will be merged, the wide dtype.
    """
    support = backend.ops["flash_attn_varlen"]
    wanted = dict.fromkeys((dtype, wide_dtype(dtype)) if lse else (dtype,))
    allowed = (dtype,) if support.same_out_dtype else support.out_dtypes or support.dtypes
    return [each for each in wanted if each in allowed]


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Callable], Callable]) -> None:
    """Replace the launcher of each backend by `change(launcher)`; the first call of each signature then runs it."""
    real = backends.kernel
    monkeypatch.setattr(fast.backends, "kernel", lambda name, op: change(real(name, op)))
    forget_calls()  # a kept call does not run the launcher


class Report:
    """Results of the tests of each backend, for `--adapter-report FILE`.

    A test belongs to a backend if it has a parameter `adapter`. The file has, for each backend, the numbers of passed,
    failed and skipped tests, how often each reason for a skip occurs, and the first messages of failed tests. It also
    has the device, and the backends that did not run, with every reason.

    Args:
        config: config of the run of pytest.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self.skips: dict[str, Counter] = defaultdict(Counter)
        self.errors: dict[str, list[str]] = defaultdict(list)
        self._of_test: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name = getattr(item, "callspec", None) and item.callspec.params.get("adapter")
            if isinstance(name, str):  # pytest has another value if no backend is left for a test
                self._of_test[item.nodeid] = name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self._of_test.get(report.nodeid)
        if name is None or (report.when != "call" and report.passed):
            return
        self.counts[name][report.outcome] += 1
        if report.skipped:
            self.skips[name][report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.failed and len(self.errors[name]) < MOST_ERRORS:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.errors[name].append(f"{report.nodeid}: {crash.message if crash else report.longrepr}"[:500])

    def pytest_sessionfinish(self) -> None:
        device, named = (self.config.getoption(name, None) for name in ("--device", "--backend"))
        device = device or "cpu"
        ran = {
            name: {each: self.counts[name][each] for each in ("passed", "failed", "skipped")}
            | {"reasons": dict(self.skips[name]), "errors": self.errors[name]}
            for name in sorted(self.counts)
        }
        not_run = {
            each.name: list(dict.fromkeys(reason for op in each.ops for reason in unavailable(each, op, device)))
            or [f"no test ran; the run was for {named or 'all backends'}"]
            for each in backends.registered()
            if each.library is not None and each.name not in ran
        }
        found = {
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "torch": torch.__version__,
            "backends": ran,
            "not_run": not_run,
        }
        with open(self.config.getoption("--adapter-report"), "w", encoding="utf-8") as file:
            file.write(json.dumps(found, indent=1) + "\n")

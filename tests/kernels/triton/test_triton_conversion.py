"""Tests of the Triton kernels with which adapters convert: whole keys, padded columns, and the state law.

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter. Every result
must be equal to that of the formulas in PyTorch, which CPU tensors take.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from fast.backends import kept_launches
from fast.backends.adapters import conversion
from fast.backends.adapters.conversion import Convention, lawful_state

from ...support.factories import assert_same_bits
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter
from .gqa.test_triton_gqa_offsets import far

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import conversion as kernels

DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_GPU else ()))
CONVENTIONS = [Convention(*flags) for flags in itertools.product((False, True), repeat=3)]
SHAPES = [(1, 1, 16), (5, 3, 40), (9, 16, 128), (17, 5, 24), (2, 126, 8)]


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


@pytest.fixture
def launches(monkeypatch):
    """Let the adapters' functions launch the kernels, also for CPU tensors; return the names of the launches."""
    names = []

    def launcher(name, tensor):
        def launch(*arguments):
            names.append(name)
            return getattr(kernels, name)(*arguments)

        return launch

    monkeypatch.setattr(conversion, "_own_launcher", launcher)
    return names


def assert_same_numbers(actual, expected):
    """Assert that all bits are equal, except for the sign and the payload of a NaN, which a sum may change."""
    assert_same_bits(*(torch.where(each.isnan(), torch.nan, each) for each in (actual, expected)))


def noise(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float32).to(dtype).to(DEVICE)


def with_gaps(x):
    """Return a tensor with the numbers of `x` whose rows have other strides, and whose memory begins elsewhere."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 11), torch.nan, dtype=x.dtype, device=x.device)
    wide = wide.transpose(0, 1).contiguous().transpose(0, 1)
    wide[..., 3:-8] = x
    return wide[..., 3:-8]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [1, 8, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_keys(shape, rope, dtype, launches):
    """Join both parts of keys, contiguous or with gaps -> the bits of `torch.cat`, in one launch."""
    tokens, heads, nope = shape
    k, k_pe = noise(*shape, dtype=dtype), noise(tokens, rope, dtype=dtype)
    k[0, 0, 0], k_pe[-1, -1] = torch.nan, torch.inf
    wanted = torch.cat((k, k_pe[:, None].expand(-1, heads, -1)), dim=-1)
    for parts in ((k, k_pe), (with_gaps(k), with_gaps(k_pe)), (k, k_pe.T.contiguous().T)):
        found = conversion.whole_keys(*parts)
        assert found.is_contiguous()
        assert_same_bits(found, wanted)
    whole = torch.full((tokens, heads, nope + rope), 7.0, dtype=dtype, device=DEVICE)
    whole[..., :nope] = k
    conversion.write_shared_columns(whole, k_pe)
    assert_same_bits(whole, wanted)
    assert launches == ["join_columns"] * 4


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [41, 64, 192])
def test_padded_columns(padded, dtype, launches):
    """Pad values, contiguous or with gaps -> the values and zeros, in one launch; nothing to pad -> the same tensor."""
    v = noise(6, 3, 40, dtype=dtype)
    v[1] = torch.nan
    for given in (v, with_gaps(v)):
        found = conversion.pad_columns(given, padded)
        assert_same_bits(found[..., :40], v)
        assert found.is_contiguous() and not found[..., 40:].any()
    assert launches == ["join_columns"] * 2
    assert conversion.pad_columns(v, 40) is v and conversion.whole_keys(v, None) is v
    assert conversion.whole_keys(v, noise(6, 0, dtype=dtype)) is v
    assert len(launches) == 2


def library_state(shape, dtype):
    """Return an output and an LSE [N, T] with NaN and infinities in every combination of two rows' first columns."""
    tokens, heads, _ = shape
    made, lse = noise(*shape, dtype=dtype), noise(heads, tokens) * 5
    special = (torch.nan, torch.inf, -torch.inf, 0.0, None)
    rows = itertools.islice(zip(itertools.product(range(tokens), range(heads)), itertools.cycle(
        itertools.product(special, special)), strict=False), 60)  # fmt: skip
    for (token, head), (first, number) in rows:
        if first is not None:
            made[token, head, 0] = first
        if number is not None:
            lse[head, token] = number
    return made, lse


@runs
@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda each: "".join("01"[flag] for flag in each))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 3, 40), (9, 17, 24)])
def test_states(shape, dtype, convention, launches, monkeypatch):
    """Convert states of a library with NaN and infinities -> the numbers of the formulas in PyTorch, in one launch.

    The LSE is [N, T] or [T, N] in memory. The output is converted or not, cut or not, and goes to new or given memory.
    """
    made, lse = library_state(shape, dtype)
    tokens, heads, columns = shape
    lens = (torch.arange(tokens, dtype=torch.int32) % 3 - 1).to(DEVICE)
    for out_dtype, cut, visible_lens in itertools.product((dtype, torch.float32), (0, 5), (None, lens)):
        rest = convention, out_dtype, columns - cut
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "_own_launcher", lambda name, tensor: None)
            wanted = lawful_state(made, lse, *rest, visible_lens=visible_lens)
        for given in (lse, lse.T.contiguous().T, with_gaps(lse)):
            launches.clear()
            found = lawful_state(with_gaps(made), given, *rest, visible_lens=visible_lens)
            assert launches == ["convert_state"] or tokens == heads == 1  # which may have nothing to convert
            assert all(each.is_contiguous() for each in found)
            for each, expected in zip(found, wanted, strict=True):
                assert_same_numbers(each, expected)
        guard = torch.full((2, tokens, heads, columns - cut + 8), 3.0, dtype=out_dtype, device=DEVICE)
        out, into = guard[1, ..., 8:], torch.empty(tokens, heads, device=DEVICE).T
        assert lawful_state(made, lse, *rest, out, into, visible_lens) == (out, into)
        assert_same_numbers(out.contiguous(), wanted[0])
        assert_same_numbers(into.contiguous(), wanted[1])
        assert guard[0].eq(3).all() and guard[1, ..., :8].eq(3).all()


@runs
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_an_lse_by_request(queries, launches):
    """Convert an LSE [B, N, Sq], the layout of FlashMLA -> [N, T] with the tokens of a request together."""
    made, lse = noise(4 * queries, 5, 16, dtype=torch.float16), noise(4, 5, queries)
    out, found = lawful_state(made, lse.transpose(0, 1), Convention(poison=True), torch.float16, 16)
    assert out is made
    assert_same_bits(found, lse.transpose(0, 1).reshape(5, 4 * queries))
    assert launches == ["convert_state"]


@runs
def test_nothing_to_convert(launches):
    """Pass a lawful state, or an output alone -> the same tensors and no launch; no token -> no launch that fails."""
    made, lse = noise(6, 3, 16), noise(3, 6)
    assert lawful_state(made, lse, Convention(), torch.float32, 16) == (made, lse)
    assert lawful_state(made, None, Convention(base_2=True), torch.float32, 16) == (made, None)
    assert lawful_state(made, None, Convention(), torch.float16, 9)[0].shape == (6, 3, 9)
    assert not launches
    out, found = lawful_state(made[:0], lse[:, :0], Convention(base_2=True), torch.float16, 16)
    assert out.shape == (0, 3, 16) and found.shape == (3, 0)
    assert conversion.whole_keys(made[:0], noise(0, 4)).shape == (0, 3, 20)
    assert conversion.pad_columns(made[:, :0], 20).shape == (6, 0, 20)


@runs
def test_offsets_beyond_32_bit(launches):
    """Convert and join tensors whose last token begins behind element 2^31 -> the right numbers (pitfall 8)."""
    made, target, k_pe = (far(torch.randn(shape).half(), 0).to(DEVICE) for shape in ((3, 2, 16), (3, 2, 16), (3, 4)))
    out, _ = lawful_state(made, noise(2, 3), Convention(base_2=True), torch.float16, 16, target)
    assert_same_bits(out.contiguous(), made.contiguous())
    kernels.join_columns(made[..., :12], k_pe, target)
    assert_same_bits(target.contiguous(), torch.cat((made[..., :12], k_pe[:, None].expand(-1, 2, -1)), -1))


class Kernel:
    """Stands in for a Triton kernel; counts the searches for its compiled kernel."""

    arg_names = ("x", "y", "number", "FLAG", "OTHER")

    def __init__(self):
        self.searches = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **constants):
        self.searches += 1
        return type("Compiled", (), {"packed_metadata": ()})()


def test_kept_launches(monkeypatch):
    """Launch with an old key -> a direct launch with the addresses of this call; a new key or a hook -> none."""
    triton = pytest.importorskip("triton")
    driver = driver_without_gpu(monkeypatch)
    seen = []
    monkeypatch.setattr(
        kept_launches, "direct_launch", lambda compiled, grid: lambda stream, given: seen.append((grid, stream, given))
    )
    kernel = Kernel()
    kept = kept_launches.KeptLaunches(kernel)
    x, y, z = (torch.zeros(4) for _ in range(3))
    kept.run("a", (7,), (x, y), (5,), FLAG=True, OTHER=None, num_warps=4)
    assert kernel.searches == 1 and not seen
    assert kept.again("a", (z, y)) and not kept.again("b", (z, y))
    assert kernel.searches == 1
    assert seen == [((7, 1, 1), driver.stream, (z.data_ptr(), y.data_ptr(), 5, True, None))]
    kept.run("b", (8,), (x, y), (6,), FLAG=False, OTHER=None)
    assert kernel.searches == 2
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda *_: None)
    assert not kept.again("a", (x, y)) and len(seen) == 1
    kept.run("a", (7,), (x, y), (5,), FLAG=True, OTHER=None)
    assert kernel.searches == 3 and len(seen) == 1
    monkeypatch.setattr(kept_launches, "MOST_KEYS", 2)
    for number in range(9):
        kept.run(number, (1,), (x, y), (number,), FLAG=True, OTHER=None)
    assert len(kept._kept) <= 2


def driver_without_gpu(monkeypatch):
    """Put a driver without a GPU in the place of Triton's; return it."""
    from triton import runtime

    class Active:
        stream = 12

        @staticmethod
        def get_current_device():
            return 0

        @staticmethod
        def get_current_stream(device):
            return 12

    class Driver:
        active, stream = Active, 12

    monkeypatch.setattr(runtime, "driver", Driver)
    return Driver


@gpu_only
def test_a_kept_launch_on_a_gpu(launches):
    """Convert twice with equal shapes and other tensors -> the second launch is kept, and both results are right."""
    kernels._STATES._kept.clear()
    for _ in range(3):
        made, lse = noise(9, 4, 128, dtype=torch.bfloat16), noise(4, 9)
        out, found = lawful_state(made, lse, Convention(base_2=True), torch.float32, 128)
        assert_same_bits(out, made.float())
        assert_same_bits(found, conversion.natural_lse(lse))
    assert len(kernels._STATES._kept) >= 1

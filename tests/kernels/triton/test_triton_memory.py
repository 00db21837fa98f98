"""Tests of the Triton kernels for cache, merge and rope, and of the kernel that fuses rope, norm and cache write.

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter. "Pitfall 8" is
entry 8 of the list in `tests/__init__.py`. The budget of a result is the largest error that docs/correctness.md allows.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import fast
import reference
from fast.kernels.rotation import rotate
from fast.parity import compare, compare_states
from reference.interfaces import AttentionState, RopeConfig, YarnConfig

from ...support.factories import GARBAGE, assert_same_bits, integers, offsets
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, gpu_only, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import cache, merge, rope

MOVED = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * ON_GPU  # dtypes for kernels that only copy
COMPUTED = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
SHAPES = {"rope 64": (16, 64, 64), "rope 32": (64, 32, 32), "no rope": (1, 32, 0), "odd": (7, 21, 6)}  # block, Lkv, R
YARN = RopeConfig(
    10000.0, True, YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.7)
)
PAIRINGS = {"interleaved": RopeConfig(10000.0, True), "half-split": RopeConfig(10000.0, False), "yarn": YARN}
FAR = 2**31 - 100  # a block id far outside any cache


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def noise(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def long(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def poisoned_cache(num_blocks: int, block_size: int, width: int, dtype, layers: int = 0, order: str = "blocks"):
    """Return a cache filled with NaN.

    If `layers` is not 0, the cache is a strided view: one layer of a tensor with `layers` layers. The dimension of the
    layers comes after the dimension of the blocks (`order` "blocks") or of the entries (`order` "entries").
    """
    if not layers:
        return torch.full((num_blocks, block_size, width), torch.nan, dtype=dtype, device=DEVICE)
    shape = (num_blocks, layers, block_size, width) if order == "blocks" else (num_blocks, block_size, layers, width)
    whole = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    return whole.select(1 if order == "blocks" else 2, 1)


def payloads(x: torch.Tensor) -> torch.Tensor:
    """Write two NaNs with different bits and a negative zero to the first row of a tensor, and return the tensor."""
    bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    quiet = torch.full((), torch.nan, dtype=x.dtype).view(bits.dtype).item()
    bits[0, :3] = torch.tensor([quiet + 1, quiet - 1, torch.iinfo(bits.dtype).min], device=x.device)
    return x


# Tests of the cache.


@runs
@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_write(shape, dtype):
    """A write copies latents and rope keys to their slots, skips slots out of range, and changes no other byte."""
    block_size, latent, rope_dim = shape
    tokens, num_blocks = 37, -(-48 // block_size)
    capacity = num_blocks * block_size
    projected = payloads(noise(tokens, latent + rope_dim, dtype=dtype))
    kv_c, k_pe = projected.split([latent, rope_dim], -1)
    slots = torch.randperm(capacity)[:tokens].tolist()
    for token, bad in {3: -1, 8: capacity, 9: FAR, 20: -5, 36: 2**62}.items():
        slots[token] = bad
    for layers, order in ((0, ""), (3, "blocks"), (2, "entries")):
        written = poisoned_cache(num_blocks, block_size, latent + rope_dim, dtype, layers, order)
        wanted = written.clone()
        for token, slot in enumerate(slots):
            if 0 <= slot < capacity:
                wanted[slot // block_size, slot % block_size] = projected[token]
        cache.concat_and_cache_mla(kv_c, k_pe, written, long([*slots, 0, 5]))
        assert_same_bits(written, wanted)


@runs
@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("block_size, width", [(16, 128), (64, 96), (1, 80), (7, 27)])
def test_gather(block_size, width, dtype):
    """A gather returns token ranges of any start and length, and writes only `out`; all tensors can be strided."""
    starts, lengths = [0, 5, 63, 0, 2], [33, 0, 2, 1, 20]
    columns = -(-70 // block_size)
    table = torch.full((5, columns + 2), GARBAGE, dtype=torch.int32)
    used = torch.randperm(5 * columns).int().view(5, columns)
    table[:, :columns] = used
    for layers, order in ((0, ""), (3, "blocks"), (2, "entries")):
        entries = poisoned_cache(5 * columns, block_size, width, dtype, layers, order)
        entries.copy_(noise(5 * columns, block_size, width, dtype=dtype))
        payloads(entries[int(used[0, 0])])
        workspace = torch.full((60, 2, width), torch.nan, dtype=dtype, device=DEVICE)
        out = workspace[: sum(lengths), 1] if layers else workspace.view(-1, width)[: sum(lengths)]
        rows = [
            entries[int(used[b, p // block_size]), p % block_size]
            for b, (s, n) in enumerate(zip(starts, lengths, strict=True))
            for p in range(s, s + n)
        ]
        strided = torch.stack((table, table), -1).to(DEVICE)[..., 0]
        arguments = (offsets(lengths).to(DEVICE), integers(*starts).to(DEVICE))
        cache.gather_and_maybe_dequant_cache(entries, strided if layers else table.to(DEVICE), *arguments, out)
        assert_same_bits(out, torch.stack(rows))
        out.fill_(torch.nan)
        assert workspace.isnan().all()  # nothing outside `out` was written


@runs
@pytest.mark.parametrize(
    "dtype, out_dtype", [pair for pair in itertools.product(COMPUTED, COMPUTED) if pair[0] != pair[1]]
)
@pytest.mark.parametrize("width", [96, 27])
def test_gather_converts(width, dtype, out_dtype):
    """A gather into another dtype rounds each value once, as `Tensor.to` does; rows outside the cache are 0.

    The test fails if the kernel copies the bytes of the cache and ignores the dtype of `out`.
    """
    entries = noise(6, 4, width, dtype=dtype)
    table = integers(5, 0, GARBAGE, 3, -1, 2).view(2, 3).to(DEVICE)
    out = torch.full((16, width), torch.nan, dtype=out_dtype, device=DEVICE)
    arguments = (offsets([7, 9]).to(DEVICE), integers(1, 2).to(DEVICE))
    cache.gather_and_maybe_dequant_cache(entries, table, *arguments, out)
    zeros = torch.zeros(1, width, dtype=dtype, device=DEVICE)
    first, second = torch.cat((entries[5], entries[0])), torch.cat((entries[3], zeros.expand(4, -1), entries[2]))
    assert_same_bits(out, torch.cat((first[1:8], second[2:11])).to(out_dtype))


@runs
@pytest.mark.parametrize("requests", [1, 2, 3, 17, 64])
def test_gather_many_requests(requests):
    """A gather finds the request of every token by binary search, also if some requests have no tokens."""
    lengths = torch.randint(0, 4, (requests,))
    lengths[torch.rand(requests) < 0.3] = 0
    entries = noise(requests * 4, 1, 8)
    table = torch.randperm(requests * 4).int().view(requests, 4).to(DEVICE)
    out = torch.full((int(lengths.sum()), 8), torch.nan, device=DEVICE)
    zeros = torch.zeros(requests, dtype=torch.int32, device=DEVICE)
    cache.gather_and_maybe_dequant_cache(entries, table, offsets(lengths.tolist()).to(DEVICE), zeros, out)
    blocks = [int(table[b, p]) for b, n in enumerate(lengths.tolist()) for p in range(n)]
    assert_same_bits(out, entries[blocks, 0])


@runs
@pytest.mark.parametrize("bad", [-1, -GARBAGE, 12, GARBAGE, FAR])
def test_gather_outside_the_cache(bad):
    """A row whose token is outside the cache is 0, and the rows beside it are right."""
    entries, table = noise(12, 4, 16), torch.arange(12, dtype=torch.int32).view(3, 4)
    table[1, 1] = bad
    out = torch.full((30, 16), torch.nan, device=DEVICE)
    # request 2 extends past the last column of the block table; tokens 28 and 29 belong to no request
    arguments = (table.to(DEVICE), integers(0, 5, 15, 28).to(DEVICE), integers(0, 1, 5).to(DEVICE), out)
    cache.gather_and_maybe_dequant_cache(entries, *arguments)
    flat = entries.view(-1, 16)
    wanted = torch.zeros(30, 16, device=DEVICE)
    wanted[:5], wanted[5:15], wanted[15:26] = flat[:5], flat[17:27], flat[37:48]
    wanted[8:12] = 0  # positions 4..7 of request 1
    assert_same_bits(out, wanted)


@runs
@pytest.mark.parametrize(
    "cu_seq_lens, starts", [((0, 2**31 - 1, 0), (0, 0)), ((7, 3, 9), (-4, -9)), ((-5, 4, 10), (0, 2**31 - 1))]
)
def test_gather_wild_offsets(cu_seq_lens, starts):
    """With invalid offsets or starts, a gather does not raise; each row is 0 or an entry of the cache."""
    entries, table = noise(4, 4, 8), torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2)
    out = torch.full((10, 8), torch.nan, device=DEVICE)
    cache.gather_and_maybe_dequant_cache(
        entries, table, integers(*cu_seq_lens).to(DEVICE), integers(*starts).to(DEVICE), out
    )
    known = torch.cat((entries.view(-1, 8), torch.zeros(1, 8, device=DEVICE)))
    assert (out[:, None] == known).all(-1).any(-1).all()


@runs
@pytest.mark.parametrize("dtype", MOVED[:2])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_copy_and_swap(block_size, dtype):
    """Copies and swaps copy whole blocks, skip pairs with a block id out of range, and change no other byte."""
    good, bad = [[2, 0], [5, 4], [2, 6]], [[-1, 1], [1, -1], [9, 1], [1, 9], [FAR, 1], [3, 2**62]]
    mapping = long([good[0], *bad[:3], *good[1:], *bad[3:]])
    caches = [poisoned_cache(9, block_size, 40, dtype, *view) for view in ((0, ""), (3, "blocks"), (2, "entries"))]
    for one in caches:
        one.copy_(noise(9, block_size, 40, dtype=dtype))
        payloads(one[2])
    wanted = [one.clone() for one in caches]
    for one in wanted:
        for a, b in good:
            one[b] = one[a]
    cache.copy_blocks(caches, mapping)
    for one, want in zip(caches, wanted, strict=True):
        assert_same_bits(one, want)
    for source in caches:
        target = poisoned_cache(9, block_size, 40, dtype, 2, "entries")
        wanted, was = target.clone(), source.clone()
        for a, b in good:
            wanted[b] = source[a]
        cache.swap_blocks(source, target, mapping)
        assert_same_bits(target, wanted)
        assert_same_bits(source, was)


@gpu_only
@pytest.mark.parametrize("mapping_device", ["cpu", "cuda"])
def test_swap_between_devices(mapping_device):
    mapping = torch.tensor([[3, 0], [-1, 2], [1, 7], [9, 1], [0, 4]], device=mapping_device)
    for source_device, target_device in (("cuda", "cpu"), ("cpu", "cuda")):
        source = torch.randn(5, 4, 12).bfloat16().to(source_device)
        target = torch.full((6, 4, 12), torch.nan, dtype=torch.bfloat16, device=target_device)
        wanted = target.clone()
        wanted[0], wanted[4] = source[3].to(target_device), source[0].to(target_device)
        with torch.device("cuda"):  # the result must not depend on the default device
            cache.swap_blocks(source, target, mapping)
        assert_same_bits(target, wanted)
        for backend in (None, "triton"):
            target.fill_(torch.nan)
            wanted = target.clone()
            wanted[0], wanted[4] = source[3].to(target_device), source[0].to(target_device)
            pairs = torch.tensor([[3, 0], [0, 4]], device=mapping_device)
            fast.swap_blocks(source, target, pairs, backend=backend)
            assert_same_bits(target, wanted)


@runs
def test_nothing_to_move():
    entries = noise(3, 4, 5)
    was = entries.clone()
    none = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    cache.concat_and_cache_mla(noise(0, 3), noise(0, 2), entries, long([]))
    cache.concat_and_cache_mla(noise(2, 3), noise(2, 2), entries[:0], long([0, 1]))
    cache.copy_blocks([entries], none)
    cache.copy_blocks([], long([[0, 1]]))
    cache.swap_blocks(entries, noise(2, 4, 5), none)
    cache.swap_blocks(entries[:0], entries, long([[0, 1]]))
    out, table = noise(0, 5), torch.empty(0, 3, dtype=torch.int32, device=DEVICE)
    cache.gather_and_maybe_dequant_cache(entries, table, integers(0).to(DEVICE), table[:, 0], out)
    assert_same_bits(entries, was)


@gpu_only
def test_offsets_beyond_32_bit():
    """The kernels are right if offsets (in elements) in the cache or in the states exceed 2^31 (pitfall 8)."""
    width, block_size, num_blocks = 576, 64, 2**16
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        entries = torch.empty(num_blocks, block_size, width, dtype=torch.bfloat16, device=DEVICE)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert entries.numel() > 2**31
    new = noise(3, width, dtype=torch.bfloat16)
    last = num_blocks * block_size - 1
    cache.concat_and_cache_mla(new[:, :512], new[:, 512:], entries, long([last, 5, (num_blocks - 2) * block_size]))
    assert_same_bits(entries[-1, -1], new[0])
    table = integers(num_blocks - 1, GARBAGE, 0, GARBAGE, num_blocks - 2, GARBAGE).view(3, 2).to(DEVICE)
    out = torch.empty_like(new)
    places = integers(0, 1, 2, 3).to(DEVICE), integers(63, 5, 0).to(DEVICE)
    cache.gather_and_maybe_dequant_cache(entries, table, *places, out)
    assert_same_bits(out, new)
    cache.copy_blocks([entries], long([[num_blocks - 2, 1], [0, num_blocks - 3]]))
    assert_same_bits(entries[1, 0], new[2])
    assert_same_bits(entries[num_blocks - 3, 5], new[1])
    q_pe, frequencies = noise(3, 2, 64, dtype=torch.bfloat16), torch.zeros(32, device=DEVICE)
    weight = torch.ones(512, dtype=torch.bfloat16, device=DEVICE)
    slots, positions = long([last - 64, 7, -1]), long([1, 2, 3])
    _, normed, key = rope.rope_norm_and_cache(
        positions, q_pe, new[:, :512], new[:, 512:], entries, slots, weight, 1e-6, frequencies, 1.0, True
    )
    assert_same_bits(entries.view(-1, width)[last - 64], torch.cat((normed, key), -1)[0])
    del entries
    huge = torch.zeros(2**17 + 1, 129, 128, dtype=torch.bfloat16, device=DEVICE)  # offsets exceed 2^31
    a, b = huge[:, :128], huge[:, 1:]
    assert a.stride(0) * (a.shape[0] - 1) > 2**31
    a[-1], b[-1, -1] = noise(128, 128), noise(128)
    lse = torch.zeros(128, a.shape[0], device=DEVICE)
    out, _ = merge.merge_attn_states(a, lse, b, lse)
    wanted = ((a[-1].float() + b[-1].float()) / 2).bfloat16()
    assert torch.equal(out[-1], wanted) and not out[:-1].any()


# Tests of the merge.


def make_states(tokens, heads, value_dim, dtype):
    """Return outputs and LSEs of two states; the strides differ, and one LSE is a transposed tensor."""
    wide = torch.float32
    outs = noise(tokens, heads, value_dim, dtype=dtype), noise(tokens, heads, value_dim + 8, dtype=dtype)
    outs = outs[0], outs[1][..., :value_dim]
    lses = noise(heads, tokens, dtype=wide) * 5, (noise(tokens, heads, dtype=wide) * 5).T
    return outs[0], lses[0], outs[1], lses[1]


def to_state(out, lse, dtype=None):
    return AttentionState(out.cpu() if dtype is None else out.cpu().to(dtype), lse.cpu() if dtype is None else
                          lse.cpu().to(dtype))  # fmt: skip


def check_merge(a, a_lse, b, b_lse):
    gold = reference.merge_attn_states(to_state(a, a_lse, torch.float64), to_state(b, b_lse, torch.float64))
    low = reference.merge_attn_states(to_state(a, a_lse), to_state(b, b_lse))
    out, lse = merge.merge_attn_states(a, a_lse, b, b_lse)
    assert out.is_contiguous() and lse.is_contiguous() and out.dtype == a.dtype and lse.dtype == a_lse.dtype
    for parity in compare_states("merge", to_state(out, lse), low, gold):
        assert parity.passed, parity
    return out, lse


@runs
@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("shape", [(1, 1, 16), (9, 3, 20), (5, 16, 128), (3, 126, 32), (2, 5, 512), (33, 1, 1)])
def test_merge(shape, dtype):
    """The error of a merge of two states with different strides is within the budget (pitfall 18)."""
    a, a_lse, b, b_lse = make_states(*shape, dtype)
    check_merge(a, a_lse, b, b_lse)
    check_merge(b, b_lse, a, a_lse)
    by_head = a.transpose(0, 1).contiguous().transpose(0, 1)
    check_merge(by_head, a_lse * 30, b, b_lse * 30)


@runs
@pytest.mark.parametrize("dtype", COMPUTED)
def test_merge_identity(dtype):
    """If a row has keys in one state only, the merge returns the bits of this state (pitfalls 2 and 3).

    If a row has keys in neither state, its output is 0 and its LSE is -inf.
    """
    a, a_lse, b, b_lse = make_states(7, 5, 24, dtype)
    a[0, 0, :2] = torch.tensor([-0.0, torch.nan])
    a_lse[:, 4:] = -torch.inf
    b_lse[:, :3] = -torch.inf
    b[:2], a[5:] = torch.nan, torch.nan
    b_lse[:, 6], b[6] = -torch.inf, 0
    out, lse = merge.merge_attn_states(a, a_lse, b, b_lse)
    assert_same_bits(out[:3], a[:3])
    assert_same_bits(lse[:, :3], a_lse[:, :3])
    assert_same_bits(out[4:], b[4:])
    assert_same_bits(lse[:, 4:], b_lse[:, 4:])
    assert out[3].isfinite().all() and lse[:, 3].isfinite().all()


@runs
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("other", [0.5, -torch.inf, torch.inf, torch.nan])
def test_merge_refuses_to_hide(bad, other):
    a, a_lse, b, b_lse = make_states(4, 3, 16, torch.float32)
    a_lse[1, 2], b_lse[1, 2] = bad, other
    for sides in ((a, a_lse, b, b_lse), (b, b_lse, a, a_lse)):
        out, lse = merge.merge_attn_states(*sides)
        assert out[2, 1].isnan().all() and lse[1, 2].isnan()
        assert out.isnan().sum() == 16 and lse.isnan().sum() == 1


@runs
@pytest.mark.parametrize("dtype", COMPUTED)
def test_merge_in_place(dtype):
    """A merge gives the same bits if it overwrites one of its inputs; it rounds once to an output of another dtype."""
    a, a_lse, b, b_lse = (x.contiguous() for x in make_states(19, 5, 24, dtype))
    wanted, wanted_lse = merge.merge_attn_states(a, a_lse, b, b_lse)
    rounded, lse = torch.empty_like(a, dtype=torch.float16), torch.empty_like(a_lse)
    merge.merge_attn_states(a, a_lse, b, b_lse, rounded, lse)
    if dtype == torch.float32:
        assert_same_bits(rounded, wanted.half())
    assert_same_bits(lse, wanted_lse)
    for number in range(2):
        copies = a.clone(), a_lse.clone(), b.clone(), b_lse.clone()
        out, lse = merge.merge_attn_states(*copies, *copies[2 * number : 2 * number + 2])
        assert out is copies[2 * number] and lse is copies[2 * number + 1]
        assert_same_bits(out, wanted)
        assert_same_bits(lse, wanted_lse)


@runs
def test_merge_nothing():
    for shape in ((0, 3, 8), (3, 0, 8)):
        out, lse = merge.merge_attn_states(*make_states(*shape, torch.float32))
        assert out.shape == shape and lse.shape == (shape[1], shape[0])


# Tests of rope, alone and with the norm and the cache write.


def rope_inputs(tokens, heads, latent, rope_dim, dtype, config):
    """Return positions, q_pe, latent, k_pe and frequencies.

    As in a layer, q_pe is a slice of [T, N, P + R], and latent and k_pe are slices of one projection [T, Lkv + R].
    """
    q = noise(tokens, heads, 16 + rope_dim, dtype=dtype)
    projected = noise(tokens, latent + rope_dim, dtype=dtype) * 3
    positions = torch.randint(0, 160_000, (tokens,)).to(DEVICE)
    positions[:1] = 0
    frequencies = reference.rotary_frequencies(config, rope_dim, torch.float32).to(DEVICE)
    return positions, q[..., 16:], projected[:, :latent], projected[:, latent:], frequencies


def magnitude_of(config):
    return 1.0 if config.yarn is None else config.yarn.cos_sin_scale


def check_rope(value, positions, x, frequencies, config):
    """Assert that the error of rope is within the budget; gold is computed in float64 from the same float32 angles."""
    positions, x, frequencies, value = (t.cpu() for t in (positions, x, frequencies, value))
    assert value.is_contiguous() and value.shape == x.shape
    low_angles = positions.float()[:, None] * frequencies
    scale = magnitude_of(config)

    def turned(angles, entries):
        cos, sin = angles.cos() * scale, angles.sin() * scale
        if entries.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        return rotate(entries, cos, sin, config.interleaved)

    parity = compare("rope", value, turned(low_angles, x), turned(low_angles.double(), x.double()))
    assert parity.passed, parity


@runs
@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("config", PAIRINGS.values(), ids=PAIRINGS)
@pytest.mark.parametrize("heads, rope_dim", [(1, 64), (3, 32), (16, 64), (126, 6), (5, 2)])
def test_rope(heads, rope_dim, config, dtype):
    """The error of the Triton kernel is within the budget for both pairings and for YaRN (pitfalls 14 and 15)."""
    positions, q_pe, _, k_pe, frequencies = rope_inputs(3, heads, 32, rope_dim, dtype, config)
    positions = positions.int() if heads == 1 else positions
    q, k = rope.apply_rope(positions, q_pe, k_pe, frequencies, magnitude_of(config), config.interleaved)
    check_rope(q, positions, q_pe, frequencies, config)
    check_rope(k, positions, k_pe, frequencies, config)


@runs
@pytest.mark.parametrize("dtype", COMPUTED)
@pytest.mark.parametrize("config", PAIRINGS.values(), ids=PAIRINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rope_norm_and_cache(shape, config, dtype):
    """One launch computes rope and norm and writes the cache; cache and returned tensors have the same bits."""
    block_size, latent, rope_dim = shape
    positions, q_pe, kv_c, k_pe, frequencies = rope_inputs(6, 3, latent, rope_dim, dtype, config)
    weight, eps, capacity = noise(latent, dtype=dtype), 1e-5, -(-70 // block_size) * block_size
    slots = [capacity - 1, -1, 0, capacity, 67]  # the last token has no slot: padding after the batch
    entries = poisoned_cache(capacity // block_size, block_size, latent + rope_dim, dtype, 2, "entries")
    wanted = entries.clone()
    q, normed, k = rope.rope_norm_and_cache(
        positions, q_pe, kv_c, k_pe, entries, long(slots), weight, eps, frequencies, magnitude_of(config),
        config.interleaved,
    )  # fmt: skip
    if rope_dim:
        check_rope(q, positions, q_pe, frequencies, config)
        check_rope(k, positions, k_pe, frequencies, config)
    gold = reference.rms_norm(kv_c.cpu().double(), weight.cpu().double(), eps)
    parity = compare("norm", normed.cpu(), reference.rms_norm(kv_c.cpu(), weight.cpu(), eps), gold)
    assert parity.passed and normed.is_contiguous(), parity
    for token in (0, 2, 4):
        wanted[slots[token] // block_size, slots[token] % block_size] = torch.cat((normed[token], k[token]))
    assert_same_bits(entries, wanted)


@runs
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_poisons_only_its_row(interleaved):
    config = PAIRINGS["interleaved" if interleaved else "half-split"]
    positions, q_pe, kv_c, k_pe, frequencies = rope_inputs(5, 3, 32, 8, torch.float32, config)
    q_pe[1, 2], kv_c[2], k_pe[3] = torch.nan, torch.nan, torch.inf
    entries = torch.zeros(5, 1, 40, device=DEVICE)
    weight = torch.ones(32, device=DEVICE)
    slots = long([4, 3, 2, 1, 0])
    q, normed, k = rope.rope_norm_and_cache(
        positions, q_pe, kv_c, k_pe, entries, slots, weight, 1e-6, frequencies, 1.0, interleaved
    )
    assert q.isnan().sum() == 8 and q[1, 2].isnan().all()
    assert normed.isnan().sum() == 32 and normed[2].isnan().all()
    assert not k[3].isfinite().all() and k[[0, 1, 2, 4]].isfinite().all()
    assert entries[[0, 3, 4]].isfinite().all()


@runs
def test_rope_nothing():
    for shape in ((0, 3, 8), (4, 3, 0)):
        tokens, _, width = shape
        frequencies = torch.zeros(width // 2, device=DEVICE)
        positions, k_pe = torch.zeros(tokens, dtype=torch.int64, device=DEVICE), noise(tokens, width)
        q, k = rope.apply_rope(positions, noise(*shape), k_pe, frequencies, 1.0, True)
        assert q.shape == shape and k.shape == (tokens, width)
    entries, none = noise(2, 4, 24), torch.empty(0, dtype=torch.int64, device=DEVICE)
    was, weight, frequencies = entries.clone(), noise(16), torch.zeros(4, device=DEVICE)
    for tokens, held in ((0, entries), (3, entries[:0]), (3, entries)):  # no token; no cache block; no slot
        positions = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        q, normed, k = rope.rope_norm_and_cache(
            positions, noise(tokens, 2, 8), noise(tokens, 16), noise(tokens, 8), held, none, weight, 1e-6, frequencies,
            1.0, False,
        )  # fmt: skip
        assert q.isfinite().all() and normed.isfinite().all() and k.isfinite().all()
    assert_same_bits(entries, was)


@gpu_only
def test_under_a_graph():
    """Change the values of the input tensors of a captured graph -> a replay gives the bits of an ordinary call."""
    positions, q_pe, kv_c, k_pe, frequencies = rope_inputs(6, 3, 512, 64, torch.bfloat16, YARN)
    weight, slots = noise(512, dtype=torch.bfloat16), long([3, -1, 40, 17, 63, 5])
    entries, mapping = noise(4, 16, 576, dtype=torch.bfloat16), long([[0, 1]])
    table, cu, starts = integers(3, 0).view(2, 1).to(DEVICE), integers(0, 2, 6).to(DEVICE), integers(1, 2).to(DEVICE)
    out, state = torch.empty(6, 576, dtype=torch.bfloat16, device=DEVICE), make_states(6, 3, 64, torch.bfloat16)

    def step():
        q, normed, k = rope.rope_norm_and_cache(
            positions, q_pe, kv_c, k_pe, entries, slots, weight, 1e-6, frequencies, 1.1, True
        )
        cache.concat_and_cache_mla(normed, k, entries, slots)
        cache.copy_blocks([entries], mapping)
        cache.gather_and_maybe_dequant_cache(entries, table, cu, starts, out)
        return q, *merge.merge_attn_states(*state)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    kv_c.normal_(), q_pe.normal_(), state[0].normal_(), slots.copy_(long([9, 8, -1, 50, 51, 60]))
    mapping.copy_(long([[2, 3]]))
    was = entries.clone()
    graph.replay()
    replayed = [x.clone() for x in (*captured, out, entries)]
    entries.copy_(was)
    again = step()
    for got, want in zip(replayed, (*again, out, entries), strict=True):
        assert_same_bits(got, want)

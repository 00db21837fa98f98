"""Make random inputs, and compute expected results with oracles: slow functions that call no code of the packages.

In the caches, every slot that belongs to no token is NaN. In the block tables, every entry after a request's last block
is GARBAGE.

The letters of shapes: B requests, T query tokens, S keys of a request, Sq query tokens of a request, N heads, H hidden
size, Lkv latent width, P and R widths of the parts of a head without rope and with rope, V value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from reference.interfaces import AttentionState, CommonAttentionMetadata, MLAConfig, RopeConfig, YarnConfig

GARBAGE = 2147480000  # block number far out of range
NO_BLOCKS = (
    GARBAGE,
    -1,
    -(2**31),
)  # table entries that are no blocks; an engine may leave any of them in freed entries
HEADS = (1, 3, 16, 64, 126, 128)
YARN = YarnConfig(factor=40.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=1.0)

# Small configs. DIRECT: direct query, default rope, half-split pairs. LOW_RANK: low-rank query, YaRN, interleaved
# pairs.
DIRECT = MLAConfig(48, 3, None, 24, 12, 8, 10, 1e-5, RopeConfig(interleaved=False))
LOW_RANK = MLAConfig(40, 16, 20, 32, 16, 16, 24, 1e-6, RopeConfig(theta=5000.0, interleaved=True, yarn=YARN))
NO_ROPE = replace(DIRECT, qk_rope_head_dim=0)
CONFIGS = {"direct": DIRECT, "low-rank": LOW_RANK, "no-rope": NO_ROPE}


def integers(*values: int) -> Tensor:
    """Return an int32 vector of these values."""
    return torch.tensor(values, dtype=torch.int32)


def table_without_blocks(requests: int, columns: int) -> Tensor:
    """Return a block table [requests, columns] whose entries are the numbers of NO_BLOCKS in turn, in every row."""
    numbers = torch.arange(requests)[:, None] + torch.arange(columns)
    return integers(*NO_BLOCKS)[numbers % len(NO_BLOCKS)]


def offsets(lengths) -> Tensor:
    """Return the prefix sums of the lengths as int32, [B + 1]; the first sum is 0."""
    return integers(*(sum(lengths[:i]) for i in range(len(lengths) + 1)))


@dataclass(frozen=True)
class Batch:
    """Requests whose tokens lie in random blocks of the cache.

    Attributes:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, new tokens included; 0 for a padding request, although it has new tokens.
        block_size: number of tokens in a block.
        num_blocks: number of blocks of the cache; some blocks belong to no request.
        slots: for each request, the slot of each of its tokens as (block, offset).
        common: the same batch in the form that an engine gives to a builder of plans.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int
    num_blocks: int
    slots: tuple[tuple[tuple[int, int], ...], ...]
    common: CommonAttentionMetadata

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def context_lens(self) -> tuple[int, ...]:
        return tuple(max(s - q, 0) for q, s in zip(self.query_lens, self.seq_lens, strict=True))

    @property
    def positions(self) -> Tensor:
        """Position of each token in its request, [T]; the tokens of padding requests have position 0."""
        return positions_of(self.query_lens, self.seq_lens)


def positions_of(query_lens, seq_lens) -> Tensor:
    """Return the position of each new token in its request, [T]; the tokens of padding requests have position 0."""
    pairs = zip(query_lens, seq_lens, strict=True)
    found = [torch.arange(s - q, s) if s else torch.zeros(q, dtype=torch.int64) for q, s in pairs]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def make_batch(query_lens, seq_lens, block_size: int = 16, padding: int = 0, spare_blocks: int = 3) -> Batch:
    """Return a batch with blocks in random order; its last `padding` tokens belong to no request."""
    query_lens, seq_lens = tuple(query_lens), tuple(seq_lens)
    used = [math.ceil(length / block_size) for length in seq_lens]
    num_blocks = sum(used) + spare_blocks
    free = torch.randperm(num_blocks).tolist()
    table = torch.full((len(seq_lens), max(used, default=0) + 2), GARBAGE, dtype=torch.int32)
    slots = []
    for request, count in enumerate(used):
        blocks = [free.pop() for _ in range(count)]
        table[request, :count] = integers(*blocks)
        slots.append(tuple((block, at) for block in blocks for at in range(block_size))[: seq_lens[request]])
    numbers = {slot: i for i, slot in enumerate((b, at) for b in range(num_blocks) for at in range(block_size))}
    mapping = []
    for query_len, length, own in zip(query_lens, seq_lens, slots, strict=True):
        mapping += [numbers[slot] for slot in own[length - query_len :]] if length else [-1] * query_len
    common = CommonAttentionMetadata.make(
        offsets(query_lens).cpu(),
        integers(*seq_lens).cpu(),
        table,
        torch.tensor(mapping + [-1] * padding, dtype=torch.int64),
    )
    return Batch(query_lens, seq_lens, block_size, num_blocks, tuple(slots), common)


def moved(common: CommonAttentionMetadata, device: torch.device | str) -> CommonAttentionMetadata:
    """Return the batch with its tensors on a device; its CPU fields stay on the CPU."""
    names = ("seq_lens", "query_start_loc", "block_table", "slot_mapping")
    return replace(common, **{name: getattr(common, name).to(device) for name in names})


def make_entries(batch: Batch, head_size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random cache entries of all tokens: one tensor [S, Lkv + R] for each request."""
    return [torch.randn(length, head_size, dtype=torch.float64).to(dtype) for length in batch.seq_lens]


def make_cache(
    batch: Batch, entries: list[Tensor], head_size: int, dtype: torch.dtype, new_tokens: bool = True
) -> Tensor:
    """Return a cache that holds the entries; every other slot is NaN.

    If `new_tokens` is false, the slots of the new tokens are NaN as well.
    """
    cache = torch.full((batch.num_blocks, batch.block_size, head_size), torch.nan, dtype=dtype)
    for request, own in enumerate(batch.slots):
        held = len(own) if new_tokens else batch.context_lens[request]
        for token, (block, at) in enumerate(own[:held]):
            cache[block, at] = entries[request][token].to(dtype)
    return cache


def new_cache(batch: Batch, head_size: int, dtype: torch.dtype, new_tokens: bool = True) -> Tensor:
    """Return a cache as `make_cache` does, with random entries."""
    return make_cache(batch, make_entries(batch, head_size, dtype), head_size, dtype, new_tokens)


def last_rows(batch: Batch, per_request: list[Tensor]) -> Tensor:
    """Return the rows of the new tokens of all requests, [T, ..]; padding requests get random rows."""
    rows = []
    for query_len, length, own in zip(batch.query_lens, batch.seq_lens, per_request, strict=True):
        rows.append(own[length - query_len :] if length else torch.randn(query_len, *own.shape[1:]).to(own.dtype))
    return torch.cat(rows) if rows else torch.empty(0, 0)


def far_heads(x: Tensor) -> Tensor:
    """Return a copy of `x` [T, N, D] whose heads are 2^30 elements apart.

    Head 2 thus begins at element 2 * 2^30 = 2^31, an offset that exceeds int32. Memory between the heads stays
    unwritten.
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        storage = torch.empty((x.shape[1] - 1) * 2**30 + x.shape[0] * x.shape[2], dtype=x.dtype, device=x.device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
    return storage.as_strided(x.shape, (x.shape[2], 2**30, 1)).copy_(x)


def make_up_projections(config: MLAConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random W_UK [Lkv, N, P] and W_UV [Lkv, N, V]; keys and values then have the magnitude of the latents."""

    def weight(width: int) -> Tensor:
        values = torch.randn(config.kv_lora_rank, config.num_heads, width, dtype=torch.float64)
        return (values * config.kv_lora_rank**-0.5).to(dtype)

    return weight(config.qk_nope_head_dim), weight(config.v_head_dim)


def make_weights(config: MLAConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random weights of one layer, by the names of the arguments of `MLAAttention`."""
    c = config
    shapes = {
        "kv_a_proj_with_mqa": (c.head_size, c.hidden_size),
        "kv_b_proj": (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj": (c.hidden_size, c.num_heads * c.v_head_dim),
    }
    if c.q_lora_rank is None:
        shapes["q_proj"] = (c.num_heads * c.qk_head_dim, c.hidden_size)
    else:
        shapes["q_a_proj"] = (c.q_lora_rank, c.hidden_size)
        shapes["q_b_proj"] = (c.num_heads * c.qk_head_dim, c.q_lora_rank)
    weights = {name: (torch.randn(*s, dtype=torch.float64) * s[1] ** -0.5).to(dtype) for name, s in shapes.items()}
    for name, width in (("kv_a_layernorm", c.kv_lora_rank), ("q_a_layernorm", c.q_lora_rank)):
        if width is not None:
            weights[name] = (1 + 0.3 * torch.randn(width, dtype=torch.float64)).to(dtype)
    return weights


def linear(weight: Tensor) -> nn.Linear:
    """Return a linear module with the given weight and without bias."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return module


def norm(weight: Tensor) -> nn.RMSNorm:
    """Return a norm module with the given weight and a wrong epsilon of 0.5, which a layer must not use."""
    module = nn.RMSNorm(weight.shape[0], eps=0.5, dtype=weight.dtype)
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return module


def make_layer(ops, config: MLAConfig, weights: dict[str, Tensor], dtype: torch.dtype, **options):
    """Return a layer of the package `ops` with the given weights."""
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    given = {name: linear(weight) if weight.dim() == 2 else norm(weight) for name, weight in cast.items()}
    return ops.MLAAttention(config, **given, **options)


def preset(name: str) -> MLAConfig:
    """Return the config of a preset; MiniCPM3 gets plain half-split rope, because its own rope is not implemented."""
    return MLAConfig.from_preset(name, **({"rope": RopeConfig(interleaved=False)} if name == "minicpm3" else {}))


def softmax_scale(config: MLAConfig) -> float:
    """Return the softmax scale of a config; if the config gives none, compute it without code of the packages."""
    if config.given_softmax_scale is not None:
        return config.given_softmax_scale
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    yarn = config.rope.yarn
    if yarn is not None and yarn.mscale_all_dim is not None:
        m = 1 + math.log(yarn.factor) * yarn.mscale_all_dim / 10 if yarn.factor > 1 else 1.0
        scale = scale * m * m
    return scale


# The oracles compute in float64, for one request at a time, from keys and values of every head.


def oracle_rope(x: Tensor, positions: Tensor, config: MLAConfig) -> Tensor:
    """Rotate [S, .., R] pair by pair with complex multiplication; the angles are computed in Python floats."""
    width, rope = x.shape[-1], config.rope
    out = x.double().clone()
    for pair in range(width // 2):
        i, j = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + width // 2)
        turn = torch.tensor([oracle_turn(int(p), pair, width, rope) for p in positions], dtype=torch.complex128)
        turn = turn.view(-1, *[1] * (x.dim() - 2))
        turned = torch.complex(x[..., i].double(), x[..., j].double()) * turn
        out[..., i], out[..., j] = turned.real, turned.imag
    return out


def oracle_turn(position: int, pair: int, width: int, rope: RopeConfig) -> complex:
    """Return the complex number by which rope multiplies a pair; it contains YaRN's frequencies and magnitude."""
    frequency, magnitude = rope.theta ** (-2 * pair / width), 1.0
    if (yarn := rope.yarn) is not None:

        def pair_of(rotations):  # index of the pair that makes `rotations` full turns within the original context
            return width / 2 * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi), rope.theta)

        low, high = max(math.floor(pair_of(yarn.beta_fast)), 0), min(math.ceil(pair_of(yarn.beta_slow)), width - 1)
        kept = 1 - min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
        frequency = kept * frequency + (1 - kept) * frequency / yarn.factor
        both = yarn.mscale is not None and yarn.mscale_all_dim is not None

        def m(a):
            return 1 + 0.1 * a * math.log(yarn.factor)

        magnitude = m(yarn.mscale) / m(yarn.mscale_all_dim) if both else m(1.0)
    angle = position * frequency
    return complex(math.cos(angle), math.sin(angle)) * magnitude


def oracle_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttentionState:
    """Attend one tiny request element by element with exact sums: q [Sq, N, D], k [S, N, D], v [S, N, Dv]."""
    queries, heads, _ = q.shape
    keys = k.shape[0]
    out = torch.zeros(queries, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((heads, queries), -torch.inf, dtype=torch.float64)
    for i in range(queries):
        # causal: if n queries come after this query, it attends all keys but the last n keys
        seen = [j for j in range(keys) if not causal or keys - j > queries - 1 - i]
        for head in range(heads):
            scores = [
                scale * math.fsum(a * b for a, b in zip(q[i, head].tolist(), k[j, head].tolist(), strict=True))
                for j in seen
            ]
            if not seen:
                continue
            top = max(scores)
            total = math.fsum(math.exp(s - top) for s in scores)
            lse[head, i] = top + math.log(total)
            for d in range(v.shape[2]):
                out[i, head, d] = math.fsum(
                    math.exp(s - top) / total * v[j, head, d].item() for s, j in zip(scores, seen, strict=True)
                )
    return AttentionState(out, lse)


def oracle_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute causal attention of the last Sq of S tokens with torch's kernel in `dtype`; return [Sq, N, Dv]."""
    keys_after = torch.arange(k.shape[0]).flip(0)
    queries_after = torch.arange(q.shape[0]).flip(0)
    seen = keys_after[None, :] >= queries_after[:, None]
    heads_first = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=scale).transpose(0, 1)


def oracle_layer(config: MLAConfig, weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Compute a layer for the whole sequence of one request, [S, H] -> [S, H], without a cache."""
    c, w = config, {name: weight.double() for name, weight in weights.items()}
    x, positions = hidden.double(), torch.arange(hidden.shape[0])

    def normed(y, weight):
        return weight * y / (y.pow(2).sum(-1, keepdim=True) / y.shape[-1] + c.latent_norm_eps).sqrt()

    if c.q_lora_rank is None:
        q = x @ w["q_proj"].T
    else:
        q = normed(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    q = q.view(-1, c.num_heads, c.qk_head_dim)
    q = torch.cat((q[..., : c.qk_nope_head_dim], oracle_rope(q[..., c.qk_nope_head_dim :], positions, c)), -1)
    down = x @ w["kv_a_proj_with_mqa"].T
    latent = normed(down[:, : c.kv_lora_rank], w["kv_a_layernorm"])
    k_pe = oracle_rope(down[:, c.kv_lora_rank :], positions, c)
    kv = (latent @ w["kv_b_proj"].T).view(-1, c.num_heads, c.qk_nope_head_dim + c.v_head_dim)
    k = torch.cat((kv[..., : c.qk_nope_head_dim], k_pe[:, None].expand(-1, c.num_heads, -1)), -1)
    out = oracle_sdpa(q, k, kv[..., c.qk_nope_head_dim :], softmax_scale(c))
    return out.reshape(-1, c.num_heads * c.v_head_dim) @ w["o_proj"].T


# Comparisons.


def assert_close64(actual: Tensor, expected: Tensor) -> None:
    """Assert that no difference of two tensors exceeds 1e-12 x max(1, largest expected value).

    NaN and infinities must be at the same elements.
    """
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if expected.numel():  # the usual case, without NaN and infinities; one NaN or infinity makes the condition false
        largest = expected.abs().max().item()
        if (actual.double() - expected.double()).abs().max().item() <= 1e-12 * max(1.0, largest) < math.inf:
            return
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), "NaN or infinity at different elements"
    assert torch.equal(actual[~finite].isnan(), expected[~finite].isnan())
    infinite = expected.isinf()
    assert torch.equal(actual[infinite].double(), expected[infinite].double())
    error = (actual[finite].double() - expected[finite].double()).abs().max().item() if finite.any() else 0.0
    largest = expected[finite].abs().max().item() if finite.any() else 0.0
    assert error <= 1e-12 * max(1.0, largest), f"error {error:.3e}"


def assert_states64(actual: AttentionState, expected: AttentionState) -> None:
    """Assert that outputs and LSEs are equal up to float64 rounding."""
    assert_close64(actual.out, expected.out)
    assert_close64(actual.lse, expected.lse)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert that shape, dtype and all bits are equal, NaN payloads included."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert torch.equal(
        actual.contiguous().view(-1).view(torch.uint8) if actual.numel() else actual,
        expected.contiguous().view(-1).view(torch.uint8) if expected.numel() else expected,
    ), "bits differ"

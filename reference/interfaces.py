"""The contract that both wings speak: configuration, metadata, errors, closed-form integers, argument checks.

Letters used everywhere: T packed query tokens, B requests, W block-table width, S key/value tokens, N heads,
H hidden, Lq query latent, Lkv key/value latent, P no-rope dim, R rope dim (0 is legal), V value dim.

`reference` and `fast` both import this module; it imports torch and jaxtyping only.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

__all__ = [
    "PRESETS",
    "AttentionState",
    "CommonAttentionMetadata",
    "ContextChunk",
    "DecodeMetadata",
    "DecodeSchedule",
    "MLAConfig",
    "MLAMetadata",
    "PrefillMetadata",
    "QueryLenSupport",
    "RopeConfig",
    "UnsupportedConfiguration",
    "YarnConfig",
    "chunked_prefill_workspace_size",
    "kv_cache_shape",
    "yarn_mscale",
]


class UnsupportedConfiguration(ValueError):
    """A configuration that cannot be served, with every reason.

    Attributes:
        reasons: one clear line each; never empty.
    """

    def __init__(self, reasons: Iterable[str]):
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class QueryLenSupport(enum.Enum):
    """Which query lengths a decode kernel takes: one token, one length for the whole batch, or any."""

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


# --- configuration ----------------------------------------------------------------------------------------


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's m(f, a) = 0.1 a ln f + 1, and 1 where f <= 1 (arXiv 2309.00071, section 3.4, as DeepSeek uses it)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071) with DeepSeek's two magnitude scales.

    Attributes:
        factor: ratio of the extended to the original context.
        original_max_position_embeddings: context of pre-training, in tokens.
        beta_fast: rotations over the original context above which a frequency is left alone.
        beta_slow: rotations below which a frequency is divided by `factor`.
        mscale: numerator of the cos/sin magnitude, or None where the checkpoint gives none.
        mscale_all_dim: its denominator, and where given squared into the softmax scale.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def cos_sin_scale(self) -> float:
        """Factor of cos and sin: m(f, mscale) / m(f, mscale_all_dim), or m(f, 1) where either is absent."""
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `q_pe` and `k_pe`.

    Attributes:
        theta: base of the geometric frequencies.
        interleaved: True pairs elements (0, 1), (2, 3), ..; False pairs (0, R/2), (1, R/2 + 1), ...
        yarn: YaRN parameters, or None for plain rotary.
    """

    theta: float = 10000.0
    interleaved: bool = True
    yarn: YarnConfig | None = None


PRESETS: Mapping[str, Mapping[str, int | None]] = {
    # Dims only, from the published configs; rotary parameters and norms' epsilons are the checkpoint's business.
    name: dict(
        zip(
            (
                "hidden_size",
                "num_heads",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
            ),
            dims,
            strict=True,
        )
    )
    for name, dims in {
        #                    H     N    Lq    Lkv   P    R   V
        "deepseek-v2-lite": (2048, 16, None, 512, 128, 64, 128),
        "deepseek-v2": (5120, 128, 1536, 512, 128, 64, 128),
        "deepseek-v3": (7168, 128, 1536, 512, 128, 64, 128),  # R1 has the same dims
        "kimi-k2": (7168, 64, 1536, 512, 128, 64, 128),
        "moonlight": (2048, 16, None, 512, 128, 64, 128),
        "minicpm3": (2560, 40, 768, 256, 64, 32, 64),
        "glm-5": (6144, 64, 2048, 512, 192, 64, 256),
        "longcat-flash": (6144, 64, 1536, 512, 128, 64, 128),
    }.items()
}


@dataclass(frozen=True)
class MLAConfig:
    """One MLA attention layer.

    Attributes:
        hidden_size: H.
        num_heads: N.
        q_lora_rank: Lq, or None where the query is projected in one step.
        kv_lora_rank: Lkv, the latent that is cached.
        qk_nope_head_dim: P.
        qk_rope_head_dim: R; 0 is legal.
        v_head_dim: V.
        latent_norm_eps: epsilon of the RMS norms over the latents (not the model's `rms_norm_eps`).
        rope: rotary parameters.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self):
        for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            check(_is_positive_int(getattr(self, name)), name, "a positive int", getattr(self, name))
        check(self.q_lora_rank is None or _is_positive_int(self.q_lora_rank), "q_lora_rank", "a positive int or None",
              self.q_lora_rank)  # fmt: skip
        check(
            isinstance(self.qk_rope_head_dim, int) and self.qk_rope_head_dim >= 0 and self.qk_rope_head_dim % 2 == 0,
            "qk_rope_head_dim", "an even int >= 0", self.qk_rope_head_dim,
        )  # fmt: skip

    @property
    def qk_head_dim(self) -> int:
        """P + R, the query/key width on the expanded path."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_size(self) -> int:
        """Lkv + R, elements of one cache entry."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(P + R)^-1/2, times m(f, mscale_all_dim)^2 where YaRN gives mscale_all_dim; the same on both paths."""
        scale = self.qk_head_dim**-0.5
        yarn = self.rope.yarn
        if yarn is not None and yarn.mscale_all_dim:
            scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
        return scale

    @classmethod
    def from_preset(cls, name: str, **fields: Any) -> MLAConfig:
        """A config with the published dims of `name`; rope and epsilon are the defaults unless given in `fields`.

        Raises:
            ValueError: `name` is not in `PRESETS`.
        """
        check(name in PRESETS, "name", f"one of {', '.join(PRESETS)}", name)
        return cls(**{**PRESETS[name], **fields})

    @classmethod
    def from_hf(cls, config: Any) -> MLAConfig:
        """Read a transformers config (any object with its attributes).

        `latent_norm_eps` is transformers' own 1e-6, which its modules use whatever `rms_norm_eps` says;
        `MLAAttention.from_hf` reads the module's own.

        Raises:
            UnsupportedConfiguration: not MLA, or latent scaling, a sparse-attention indexer or a rope that is
                not implemented; every reason is given.
        """
        required = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        model_type = getattr(config, "model_type", type(config).__name__)
        missing = [name for name in (*required, "v_head_dim") if getattr(config, name, None) is None]
        if missing:
            wanted = f"config: expected a Multi-head Latent Attention model, got {model_type!r}"
            raise UnsupportedConfiguration([f"{wanted} without {', '.join(missing)}"])
        reasons = [
            f"config.{name}: latent scaling is not implemented, got {getattr(config, name)!r}"
            for name in ("mla_scale_q_lora", "mla_scale_kv_lora")
            if getattr(config, name, None)
        ]
        if model_type == "longcat_flash" and not reasons:  # transformers scales whatever the flags say
            reasons.append("config.model_type: latent scaling is not implemented, got 'longcat_flash'")
        if getattr(config, "index_topk", None):
            reasons.append(f"config.index_topk: sparse-attention indexers are not implemented, got {config.index_topk}")
        rope = RopeConfig()
        try:
            rope = _rope_from_hf(config, model_type)
        except UnsupportedConfiguration as error:
            reasons += error.reasons
        if reasons:
            raise UnsupportedConfiguration(reasons)
        return cls(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=getattr(config, "q_lora_rank", None) or None,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rope=rope,
        )


def _rope_from_hf(config: Any, model_type: str) -> RopeConfig:
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    reasons = []
    interleaved = getattr(config, "rope_interleave", None)
    if model_type == "deepseek_v2":
        interleaved = True  # complex multiplication of neighbouring elements, with no switch in the config
    if interleaved is None:
        reasons.append(f"config.rope_interleave: expected True or False, got nothing from {model_type!r}")
    if kind not in ("default", "yarn"):
        reasons.append(f"config.rope_parameters: rope type {kind!r} is not implemented (default and yarn are)")
    if kind == "yarn" and parameters.get("attention_factor") is not None:
        reasons.append("config.rope_parameters: an explicit attention_factor is not implemented")
    if kind == "yarn" and not parameters.get("truncate", True):
        reasons.append("config.rope_parameters: truncate=False is not implemented")
    if kind == "yarn" and not parameters.get("original_max_position_embeddings"):
        reasons.append("config.rope_parameters: YaRN needs original_max_position_embeddings, got none")
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        reasons.append("config.rope_parameters: a partial_rotary_factor is not implemented")
    if reasons:
        raise UnsupportedConfiguration(reasons)
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=bool(interleaved))
    original = parameters["original_max_position_embeddings"]
    return RopeConfig(
        theta=theta,
        interleaved=bool(interleaved),
        yarn=YarnConfig(
            factor=float(parameters.get("factor") or config.max_position_embeddings / original),
            original_max_position_embeddings=int(original),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            mscale=parameters.get("mscale"),
            mscale_all_dim=parameters.get("mscale_all_dim"),
        ),
    )


# --- state and metadata -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Softmax attention over some set of keys, in the form that merges.

    Attributes:
        out: [T, N, Dv], normalised; Dv is V on the expanded path, Lkv on the absorbed one.
        lse: [N, T], natural log of the sum of exponentials; float32, or float64 where `out` is float64.
            A row that attended nothing has out = 0 and lse = -inf.
    """

    out: Float[Tensor, "T N Dv"]
    lse: Float[Tensor, "N T"]


@dataclass(frozen=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch, as a scheduler knows it. The `_cpu` twins hold the same values on the CPU.

    Constructing it directly checks nothing (the hot path); `make` validates.

    Attributes:
        seq_lens: [B], tokens of each request after this step (context + query).
        query_start_loc: [B + 1], prefix sum of the query lengths; a query length of 0 is legal.
        block_table: [B, W], block ids; entries past a request's last block are garbage.
        slot_mapping: [T], cache slot of each token, -1 = padding.
        max_query_len: an upper bound on the query lengths.
        num_actual_tokens: query_start_loc[-1]; tokens past it are padding.
    """

    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    seq_lens_cpu: Int32[Tensor, " B"]
    query_start_loc_cpu: Int32[Tensor, " B+1"]
    block_table: Int32[Tensor, "B W"]
    slot_mapping: Int64[Tensor, " T"]
    max_query_len: int
    num_actual_tokens: int

    @property
    def num_reqs(self) -> int:
        """B."""
        return self.seq_lens_cpu.shape[0]

    @property
    def num_computed_tokens_cpu(self) -> Int32[Tensor, " B"]:
        """Context lengths: tokens that were in the cache before this step; 0 for padding rows."""
        return (self.seq_lens_cpu - self.query_start_loc_cpu.diff()).clamp_(min=0)

    @classmethod
    def make(
        cls,
        query_start_loc_cpu: Int32[Tensor, " offsets"],
        seq_lens_cpu: Int32[Tensor, " B"],
        block_table: Int32[Tensor, "B W"],
        slot_mapping: Int64[Tensor, " T"],
    ) -> CommonAttentionMetadata:
        """Validate a batch and put it on the device of `block_table`.

        Raises:
            ValueError: wrong shape or dtype, a `query_start_loc` that falls, 0 < S < Sq, or fewer slots than tokens;
                the message names the argument and the request.
        """
        check_tensor("query_start_loc_cpu", query_start_loc_cpu, ("B + 1",), (torch.int32,), torch.device("cpu"))
        num_reqs = query_start_loc_cpu.shape[0] - 1
        check(num_reqs >= 0, "query_start_loc_cpu", "at least one element", 0)
        check_tensor("seq_lens_cpu", seq_lens_cpu, (num_reqs,), (torch.int32,), torch.device("cpu"))
        check_tensor("block_table", block_table, (num_reqs, "W"), (torch.int32,))
        check_tensor("slot_mapping", slot_mapping, ("T",), (torch.int64,), block_table.device)
        check_lengths(query_start_loc_cpu, seq_lens_cpu, ("query_start_loc_cpu", "seq_lens_cpu"))
        num_tokens = int(query_start_loc_cpu[-1])
        check(
            slot_mapping.shape[0] >= num_tokens, "slot_mapping", f"at least {num_tokens} slots", slot_mapping.shape[0]
        )
        device = block_table.device
        return cls(
            seq_lens=seq_lens_cpu.to(device, non_blocking=True),
            query_start_loc=query_start_loc_cpu.to(device, non_blocking=True),
            seq_lens_cpu=seq_lens_cpu,
            query_start_loc_cpu=query_start_loc_cpu,
            block_table=block_table,
            slot_mapping=slot_mapping,
            max_query_len=int(query_start_loc_cpu.diff().max()) if num_reqs else 0,
            num_actual_tokens=num_tokens,
        )


@dataclass(frozen=True, eq=False)
class ContextChunk:
    """A piece of the cached context of some requests, small enough for the workspace.

    Attributes:
        starts: [B], first context token of each request's piece.
        cu_seq_lens: [B + 1], prefix sum of the pieces' lengths (a length may be 0).
        num_tokens: cu_seq_lens[-1].
        max_seq_len: the longest piece.
    """

    starts: Int32[Tensor, " B"]
    cu_seq_lens: Int32[Tensor, " B+1"]
    num_tokens: int
    max_seq_len: int

    def to(self, device: torch.device) -> ContextChunk:
        """The same chunk with its tensors on `device`."""
        return replace(self, starts=self.starts.to(device, non_blocking=True),
                       cu_seq_lens=self.cu_seq_lens.to(device, non_blocking=True))  # fmt: skip


@dataclass(frozen=True, eq=False)
class PrefillMetadata:
    """The requests that take the expanded path.

    Attributes:
        block_table: [B, W].
        query_start_loc: [B + 1], from 0.
        max_query_len: the longest query.
        context_chunks: the cached context, in pieces; empty where no request has any.
    """

    block_table: Int32[Tensor, "B W"]
    query_start_loc: Int32[Tensor, " B+1"]
    max_query_len: int
    context_chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True, eq=False)
class DecodeMetadata:
    """The requests that take the absorbed path. The mask is data: row t sees `visible_lens[t]` keys.

    Attributes:
        block_table: [B, W].
        seq_lens: [B], keys in the cache, the new tokens included; 0 for padding rows.
        query_start_loc: [B + 1], from 0.
        max_query_len: an upper bound on the query lengths.
        visible_lens: [T], keys of its request that each row sees (S - Sq + i + 1); 0 = an empty row.
    """

    block_table: Int32[Tensor, "B W"]
    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    max_query_len: int
    visible_lens: Int32[Tensor, " T"]


@dataclass(frozen=True, eq=False)
class MLAMetadata:
    """One step for one layer: rows [0, num_decode_tokens) decode, the rest up to num_actual_tokens prefill.

    Either part may hold no request.

    Attributes:
        slot_mapping: [T], of the whole batch, padding included.
        num_actual_tokens: rows that belong to requests; rows past it are padding and get output 0.
        num_decodes: requests on the absorbed path; they come first.
        num_decode_tokens: their rows.
        decode: plan of the absorbed path.
        prefill: plan of the expanded path.
    """

    slot_mapping: Int64[Tensor, " T"]
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: DecodeMetadata
    prefill: PrefillMetadata

    @property
    def num_prefills(self) -> int:
        """Requests on the expanded path."""
        return self.prefill.block_table.shape[0]


@dataclass(frozen=True, eq=False)
class DecodeSchedule:
    """How decode work is cut over programs: a plan of time, never of values.

    Attributes:
        tile_ranges: [programs, 5]; first request, last request, first tile, last tile (exclusive), first split.
        split_offsets: [B + 1], prefix sum of the splits of each request.
    """

    tile_ranges: Int32[Tensor, "programs 5"]
    split_offsets: Int32[Tensor, " offsets"]


# --- closed-form integers ---------------------------------------------------------------------------------


def kv_cache_shape(num_blocks: int, block_size: int, head_size: int) -> tuple[int, int, int]:
    """Shape of one layer's paged latent cache: [num_blocks, block_size, Lkv + R].

    Raises:
        ValueError: an argument is below 1 (`num_blocks` may be 0).
    """
    check(isinstance(num_blocks, int) and num_blocks >= 0, "num_blocks", "an int >= 0", num_blocks)
    check(_is_positive_int(block_size), "block_size", "a positive int", block_size)
    check(_is_positive_int(head_size), "head_size", "a positive int", head_size)
    return (num_blocks, block_size, head_size)


def chunked_prefill_workspace_size(max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """Tokens of context that are expanded at once: min(max(8 max_model_len, 4 max_num_seqs block), 64k).

    At least one block a sequence, rounded up to whole blocks (vLLM's rule for its MLA workspace).

    Raises:
        ValueError: an argument is below 1.
    """
    for name, value in (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs), ("block_size", block_size)):
        check(_is_positive_int(value), name, "a positive int", value)
    tokens = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), 64 * 1024)
    tokens = max(tokens, max_num_seqs * block_size)
    return -(-tokens // block_size) * block_size


# --- validation of arguments ------------------------------------------------------------------------------


def check(condition: bool, argument: str, expected: object, got: object) -> None:
    """Raise one line that names the argument, what was expected and what came."""
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums, scores and LSE: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(
    argument: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Check rank, sizes (an int is exact, a str is only a name), dtype and device. Reads no values.

    Raises:
        TypeError: not a tensor.
        ValueError: anything else; one line.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {type(tensor).__name__}")
    fits = len(shape) == tensor.dim() and all(
        isinstance(want, str) or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{argument}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{argument}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{argument}: expected device {device}, got {tensor.device}")


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    """Check that a dtype is one of the floating types that are served."""
    check(dtype in FLOAT_DTYPES, argument, f"one of {', '.join(map(str, FLOAT_DTYPES))}", dtype)


def check_offsets(argument: str, offsets: Tensor, total: int | None = None) -> None:
    """Check values of a prefix sum on the CPU: starts at 0, never falls, ends at `total` where given."""
    values = offsets.tolist()
    check(bool(values) and values[0] == 0, argument, "a first element of 0", values[0] if values else "no element")
    for request, (low, high) in enumerate(itertools.pairwise(values)):
        check(high >= low, argument, "values that never fall", f"{low} then {high} at request {request}")
    if total is not None:
        check(values[-1] == total, argument, f"a last element of {total}", values[-1])


def check_lengths(
    query_start_loc: Tensor, seq_lens: Tensor, names: tuple[str, str] = ("query_start_loc", "seq_lens")
) -> None:
    """Check the values of a batch on the CPU; 0 < S < Sq raises, S = 0 is a padding row."""
    check_offsets(names[0], query_start_loc)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for request, length in enumerate(lengths):
        query_len = starts[request + 1] - starts[request]
        check(length >= 0, names[1], "lengths >= 0", f"{length} at request {request}")
        check(length == 0 or length >= query_len, names[1], f"at least the query length {query_len}",
              f"{length} at request {request}")  # fmt: skip


def check_prefill_lengths(common: CommonAttentionMetadata, num_decodes: int) -> None:
    """Check on the CPU that no padding row with query tokens stands among the prefills."""
    query_lens = common.query_start_loc_cpu.diff()[num_decodes:]
    wrong = ((query_lens > 0) & (common.seq_lens_cpu[num_decodes:] == 0)).nonzero()
    if wrong.numel():
        check(False, "seq_lens", "padding rows among the decodes only", f"0 at request {num_decodes + int(wrong[0])}")


def check_slots(slot_mapping: Tensor, num_slots: int, argument: str = "slot_mapping") -> None:
    """Check the values of a slot mapping on the CPU: -1 (padding) up to num_slots - 1."""
    if slot_mapping.numel():
        low, high = int(slot_mapping.min()), int(slot_mapping.max())
        check(low >= -1 and high < num_slots, argument, f"slots in [-1, {num_slots})",
              low if low < -1 else high)  # fmt: skip


def check_blocks(
    block_table: Tensor,
    num_tokens: Iterable[int],
    block_size: int,
    num_blocks: int,
    argument: str = "block_table",
) -> None:
    """Check by value (on the CPU) that the first `num_tokens[b]` tokens of each request lie in blocks of the cache."""
    width = block_table.shape[1]
    used = [-(-tokens // block_size) for tokens in num_tokens]
    for request, columns in enumerate(used):
        check(columns <= width, argument, f"at least {columns} columns for request {request}", width)
    owned = torch.arange(width, device="cpu") < torch.tensor(used, device="cpu")[:, None]
    block_table = block_table.cpu()
    wrong = owned & ((block_table < 0) | (block_table > num_blocks - 1))
    if wrong.any():
        request = int(wrong.any(1).nonzero()[0])
        block = int(block_table[request][wrong[request]][0])
        check(False, argument, f"blocks in [0, {num_blocks}) at request {request}", block)


def check_cache(kv_cache: Tensor, head_size: int | str = "Lkv + R", dtype: torch.dtype | None = None,
                device: torch.device | None = None) -> None:  # fmt: skip
    """Check a paged latent cache's rank, entry width, dtype and device."""
    check_tensor("kv_cache", kv_cache, ("num_blocks", "block_size", head_size),
                 FLOAT_DTYPES if dtype is None else (dtype,), device)  # fmt: skip
    check(kv_cache.shape[1] >= 1, "kv_cache", "a block size of at least 1", kv_cache.shape[1])


def check_cache_write(kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Shapes, dtypes and devices of a cache write; reads no values."""
    check_tensor("kv_c_normed", kv_c_normed, ("T", "Lkv"))
    device = kv_c_normed.device
    tokens, latent = kv_c_normed.shape
    check_tensor("k_pe", k_pe, (tokens, "R"), (kv_c_normed.dtype,), device)
    check_cache(kv_cache, latent + k_pe.shape[1], kv_c_normed.dtype, device)
    check_tensor("slot_mapping", slot_mapping, ("slots",), (torch.int64,), device)
    check(slot_mapping.shape[0] >= tokens, "slot_mapping", f"at least {tokens} slots", slot_mapping.shape[0])


def check_gather(kv_cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, starts: Tensor, num_tokens: int) -> None:
    """Shapes, dtypes and devices of a gather; reads no values."""
    check_cache(kv_cache)
    device = kv_cache.device
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,), device)
    requests = block_table.shape[0]
    check_tensor("cu_seq_lens", cu_seq_lens, (requests + 1,), (torch.int32,), device)
    check_tensor("starts", starts, (requests,), (torch.int32,), device)
    check(num_tokens >= 0, "num_tokens", "an int >= 0", num_tokens)


def check_swap(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Shapes, dtypes and storage of two caches between which blocks are copied; reads no values."""
    check_tensor("source", source, ("source_blocks", "block_size", "head_size"))
    check_tensor("target", target, ("target_blocks", *source.shape[1:]), (source.dtype,))
    check_tensor("block_mapping", block_mapping, ("pairs", 2), (torch.int64,))
    shared = source.numel() and source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    alike = (source.data_ptr(), source.shape, source.stride()) == (target.data_ptr(), target.shape, target.stride())
    check(alike or not shared, "target", "the very cache of source, or one with its own storage", "an overlapping view")


def check_projections(config: MLAConfig, direct: object, *low_rank: object) -> None:
    """Check that exactly the query projections are given that the config's q_lora_rank asks for."""
    given = ["q_proj"] * (direct is not None)
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    given += [name for name, module in zip(names, low_rank, strict=True) if module is not None]
    wanted = ["q_proj"] if config.q_lora_rank is None else list(names)
    wanted_names = f"{', '.join(wanted)} for q_lora_rank {config.q_lora_rank}"
    check(given == wanted, "q_proj", wanted_names, ", ".join(given) or None)


def check_norm(argument: str, norm: object, width: int) -> None:
    """Check a latent norm: a module with a weight and no hooks, for its weight is read, its forward not called."""
    weight = getattr(norm, "weight", None)
    check(weight is not None, argument, "a module with a weight", type(norm).__name__)
    check_tensor(f"{argument}.weight", weight, (width,))
    hooked = norm._forward_hooks or norm._forward_pre_hooks or "forward" in norm.__dict__
    check(not hooked, argument, "a module without hooks", "one with a forward hook")


def check_block_mapping(block_mapping: Tensor, source_blocks: int, target_blocks: int, same_cache: bool) -> None:
    """Check the values of (source, target) block pairs on the CPU; none written twice or read and written."""
    pairs = block_mapping.tolist()
    for source, target in pairs:
        check(0 <= source < source_blocks, "block_mapping", f"source blocks in [0, {source_blocks})", source)
        check(0 <= target < target_blocks, "block_mapping", f"target blocks in [0, {target_blocks})", target)
    targets = [target for _, target in pairs]
    check(len(set(targets)) == len(targets), "block_mapping", "distinct target blocks", targets)
    overlap = set(targets) & {source for source, _ in pairs}
    check(not (same_cache and overlap), "block_mapping", "no block that is both source and target", sorted(overlap))


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, k_pe: Tensor | None = None
) -> None:
    """Shapes, dtypes and devices of varlen attention, the shared rope key apart or not; reads no values."""
    check_tensor("q", q, ("T", "N", "P + R"))
    _, heads, width = q.shape
    check_tensor("k", k, ("S", heads, width if k_pe is None else width - k_pe.shape[-1]), (q.dtype,), q.device)
    if k_pe is not None:
        check_tensor("k_pe", k_pe, (k.shape[0], "R"), (q.dtype,), q.device)
    check_tensor("v", v, (k.shape[0], heads, "V"), (q.dtype,), q.device)
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), (torch.int32,), q.device)
    check_tensor("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), (torch.int32,), q.device)


def check_state(argument: str, state: AttentionState) -> None:
    """Shapes, dtypes and devices of an attention state; reads no values."""
    check_tensor(f"{argument}.out", state.out, ("T", "N", "Dv"))
    tokens, heads, _ = state.out.shape
    check_tensor(f"{argument}.lse", state.lse, (heads, tokens), (wide_dtype(state.out.dtype),), state.out.device)


def check_merge(prefix: AttentionState, suffix: AttentionState) -> None:
    """Shapes, dtypes and devices of two states to merge; reads no values."""
    check_state("prefix", prefix)
    check_state("suffix", suffix)
    check_tensor("suffix.out", suffix.out, tuple(prefix.out.shape), (prefix.out.dtype,), prefix.out.device)


def check_decode(ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, metadata: DecodeMetadata) -> None:
    """Shapes, dtypes and devices of absorbed decode; reads no values."""
    check_tensor("ql_nope", ql_nope, ("T", "N", "Lkv"))
    tokens, heads, latent = ql_nope.shape
    check_tensor("q_pe", q_pe, (tokens, heads, "R"), (ql_nope.dtype,), ql_nope.device)
    check_cache(kv_cache, latent + q_pe.shape[2], ql_nope.dtype, ql_nope.device)
    check_decode_plan(metadata, tokens, ql_nope.device)


def check_decode_plan(metadata: DecodeMetadata, num_tokens: int, device: torch.device) -> None:
    """Shapes, dtypes and devices of the tensors of a decode plan; reads no values."""
    int32 = (torch.int32,)
    check_tensor("metadata.seq_lens", metadata.seq_lens, ("B",), int32, device)
    requests = metadata.seq_lens.shape[0]
    check_tensor("metadata.block_table", metadata.block_table, (requests, "W"), int32, device)
    check_tensor("metadata.query_start_loc", metadata.query_start_loc, (requests + 1,), int32, device)
    check_tensor("metadata.visible_lens", metadata.visible_lens, (num_tokens,), int32, device)
    longest = metadata.max_query_len
    check(num_tokens <= requests * longest, "metadata.max_query_len",
          f"a bound: {num_tokens} tokens of {requests} requests", longest)  # fmt: skip


def check_prefill(q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: PrefillMetadata,
                  w_uk: Tensor, w_uv: Tensor) -> None:  # fmt: skip
    """Shapes, dtypes and devices of a prefill; reads no values."""
    check_tensor("q", q, ("T", "N", "P + R"))
    tokens, heads, width = q.shape
    check_tensor("k_pe", k_pe, (tokens, "R"), (q.dtype,), q.device)
    rope = k_pe.shape[1]
    check_tensor("kv_c_normed", kv_c_normed, (tokens, "Lkv"), (q.dtype,), q.device)
    latent = kv_c_normed.shape[1]
    check_tensor("w_uk", w_uk, (latent, heads, width - rope), (q.dtype,), q.device)
    check_tensor("w_uv", w_uv, (latent, heads, "V"), (q.dtype,), q.device)
    check_cache(kv_cache, latent + rope, q.dtype, q.device)
    requests = metadata.block_table.shape[0]
    check_tensor("metadata.query_start_loc", metadata.query_start_loc, (requests + 1,), (torch.int32,), q.device)


def check_decode_values(metadata: DecodeMetadata, num_tokens: int, block_size: int, num_blocks: int) -> None:
    """Check on the CPU the values of a decode plan: offsets, lengths, visible lengths and blocks.

    Lengths are those of the keys that lie here (under context parallelism a rank holds fewer than the query is long),
    so only the mask bounds them.
    """
    check_offsets("metadata.query_start_loc", metadata.query_start_loc, num_tokens)
    lengths = metadata.seq_lens.tolist()
    check(min(lengths, default=0) >= 0, "metadata.seq_lens", "lengths >= 0", min(lengths, default=0))
    check_blocks(metadata.block_table, lengths, block_size, num_blocks, "metadata.block_table")
    bounds = torch.repeat_interleave(metadata.seq_lens, metadata.query_start_loc.diff())
    wrong = ((metadata.visible_lens < 0) | (metadata.visible_lens > bounds)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        check(False, "metadata.visible_lens", f"a value in [0, {int(bounds[row])}] at row {row}",
              int(metadata.visible_lens[row]))  # fmt: skip


def check_forward_attention(
    config: MLAConfig, weight: Tensor, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, output: Tensor
) -> None:
    """Shapes, dtypes and devices of a layer's attention, all tied to its up-projection; reads no values."""
    dtypes, device = (weight.dtype,), weight.device
    check_tensor("q", q, ("T", config.num_heads, config.qk_head_dim), dtypes, device)
    tokens = q.shape[0]
    check_tensor("kv_c_normed", kv_c_normed, (tokens, config.kv_lora_rank), dtypes, device)
    check_tensor("k_pe", k_pe, (tokens, config.qk_rope_head_dim), dtypes, device)
    check_cache(kv_cache, config.head_size, weight.dtype, device)
    check_tensor("output", output, (tokens, config.num_heads, config.v_head_dim), dtypes, device)


def check_step(metadata: MLAMetadata, num_tokens: int, kv_cache: Tensor) -> None:
    """Check a whole step's plan before its first write: counts everywhere, values where they lie on the CPU.

    Compiled code has no place for reading values here; there each op checks its own before it writes.
    """
    check(isinstance(metadata, MLAMetadata), "metadata", "an MLAMetadata or None", type(metadata).__name__)
    end, split = metadata.num_actual_tokens, metadata.num_decode_tokens
    check(0 <= split <= end <= num_tokens, "metadata", f"0 <= num_decode_tokens <= num_actual_tokens <= {num_tokens}",
          f"{split} and {end}")  # fmt: skip
    device, prefill, int32 = kv_cache.device, metadata.prefill, (torch.int32,)
    check_tensor("metadata.slot_mapping", metadata.slot_mapping, ("slots",), (torch.int64,), device)
    check(metadata.slot_mapping.shape[0] >= end, "metadata.slot_mapping", f"at least {end} slots",
          metadata.slot_mapping.shape[0])  # fmt: skip
    check_decode_plan(metadata.decode, split, device)
    check(metadata.num_decodes == metadata.decode.seq_lens.shape[0], "metadata.num_decodes",
          f"the {metadata.decode.seq_lens.shape[0]} requests of metadata.decode", metadata.num_decodes)  # fmt: skip
    check_tensor("metadata.prefill.block_table", prefill.block_table, ("B", "W"), int32, device)
    requests = prefill.block_table.shape[0]
    check_tensor("metadata.prefill.query_start_loc", prefill.query_start_loc, (requests + 1,), int32, device)
    for chunk in prefill.context_chunks:
        check_tensor("metadata.prefill.context_chunks.starts", chunk.starts, (requests,), int32, device)
        check_tensor("metadata.prefill.context_chunks.cu_seq_lens", chunk.cu_seq_lens, (requests + 1,), int32, device)
    if device.type != "cpu" or torch.compiler.is_compiling():
        return
    num_blocks, block_size, _ = kv_cache.shape
    check_slots(metadata.slot_mapping[:end], num_blocks * block_size, "metadata.slot_mapping")
    check_decode_values(metadata.decode, split, block_size, num_blocks)
    check_offsets("metadata.prefill.query_start_loc", prefill.query_start_loc, end - split)
    for chunk in prefill.context_chunks:
        check_offsets("metadata.prefill.context_chunks.cu_seq_lens", chunk.cu_seq_lens, chunk.num_tokens)
        first, lengths = chunk.starts.tolist(), chunk.cu_seq_lens.diff().tolist()
        earliest = min(first, default=0)
        check(earliest >= 0, "metadata.prefill.context_chunks.starts", "values >= 0", earliest)
        ends = (start + length if length else 0 for start, length in zip(first, lengths, strict=True))
        check_blocks(prefill.block_table, ends, block_size, num_blocks, "metadata.prefill.block_table")

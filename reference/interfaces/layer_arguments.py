"""Argument checks of an attention layer: its config, its modules and the plan of a step.

In the docstrings below, "read no values" means that a check looks at shapes, dtypes and devices alone. Such a check
does not wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention_arguments import check_decode_plan, check_decode_values, check_prefill_plan, check_schedule
from .cache_arguments import check_block_size, check_formatted_cache
from .cache_format import COMPUTE_FORMAT, CacheFormat
from .checks import (
    check,
    check_blocks,
    check_int,
    check_number,
    check_offsets,
    check_out,
    check_slots,
    check_tensor,
    check_type,
)
from .config import MLAConfig
from .costs import PathCosts
from .decode_schedule import ScheduleChoice
from .errors import UnsupportedConfiguration
from .metadata import CascadeMetadata, MLAMetadata
from .quantization import CONVERTED, E4M3
from .workspace import ContextWorkspace

CPU = torch.device("cpu")


def check_config(config: MLAConfig | None, optional: bool = False) -> None:
    """Check that an argument is an `MLAConfig`; with `optional`, None is legal too."""
    if config is not None or not optional:
        check_type("config", config, MLAConfig, "an MLAConfig or None" if optional else None)


def check_costs(costs: PathCosts | None) -> None:
    """Check that an argument is a `PathCosts` or None."""
    if costs is not None:
        check_type("costs", costs, PathCosts, "a PathCosts or None")


def check_modules(**modules: object) -> None:
    """Check that projections are modules. A query projection, whose name starts with "q_", may also be None."""
    for name, module in modules.items():
        if module is not None or not name.startswith("q_"):
            check_type(name, module, nn.Module, "a module")


def check_no_bias(argument: str, linear: nn.Module) -> None:
    """Check that a linear module has no bias: the layer reads only the weight, so it would ignore a bias."""
    check(getattr(linear, "bias", None) is None, argument, "no bias", "a bias")


def check_module_expansion(
    kv_c_normed: Tensor, kv_b_proj: nn.Module, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> None:
    """Check the arguments of `expand_kv_by_module`: the latents must be on the device of the module.

    Parameters on the device "meta" are not compared, because a module may load its weight when it is called.
    """
    for name, value in (("num_heads", num_heads), ("qk_nope_head_dim", qk_nope_head_dim), ("v_head_dim", v_head_dim)):
        check_int(name, value)
    check_modules(kv_b_proj=kv_b_proj)
    held = (each.device for each in (*kv_b_proj.parameters(), *kv_b_proj.buffers()) if not each.is_meta)
    check_tensor("kv_c_normed", kv_c_normed, ("S", "Lkv"), device=next(held, None))


def check_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Check the arguments of `rms_norm`: x [T, L] with rows of any width L, weight [L], eps at least 0."""
    check_tensor("x", x, ("T", "L"))
    check_tensor("weight", weight, (x.shape[1],), device=x.device)
    check_number("eps", eps, 0)


def check_layer_inputs(config: MLAConfig, weight: Tensor, hidden_states: Tensor, positions: Tensor) -> None:
    """Check the inputs of a layer: hidden states [T, H] in the dtype and on the device of `weight`; positions [T]."""
    check_tensor("hidden_states", hidden_states, ("T", config.hidden_size), (weight.dtype,), weight.device)
    check_tensor("positions", positions, (hidden_states.shape[0],), (torch.int64, torch.int32), weight.device)


def check_projections(config: MLAConfig, direct: object, *low_rank: object) -> None:
    """Check that the given query projections fit `config.q_lora_rank`.

    Args:
        config: the config of the layer.
        direct: `q_proj`; required if `q_lora_rank` is None, otherwise it must be None.
        low_rank: `q_a_proj`, `q_a_layernorm` and `q_b_proj`; required if `q_lora_rank` is an int, otherwise None.
    """
    check_config(config)
    given = ["q_proj"] * (direct is not None)
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    given += [name for name, module in zip(names, low_rank, strict=True) if module is not None]
    wanted = ["q_proj"] if config.q_lora_rank is None else list(names)
    wanted_names = f"{', '.join(wanted)} for q_lora_rank {config.q_lora_rank}"
    check(given == wanted, "q_proj", wanted_names, ", ".join(given) or None)


def check_norm(argument: str, norm: object, width: int) -> None:
    """Check a latent norm: a module with a weight [width] and without hooks.

    A layer reads the weight and does not call the module. Hooks would therefore not run.
    """
    check_type(argument, norm, nn.Module, "a module with a weight")
    weight = getattr(norm, "weight", None)
    check(weight is not None, argument, "a module with a weight", type(norm).__name__)
    check_tensor(f"{argument}.weight", weight, (width,))
    hooked = norm._forward_hooks or norm._forward_pre_hooks or "forward" in norm.__dict__
    check(not hooked, argument, "a module without hooks", "a module with a forward hook")


def latent_norm_eps(kv_a_layernorm: object, q_a_layernorm: object | None) -> float:
    """Return `variance_epsilon`, the epsilon of the latent norms of a transformers module.

    Raises:
        UnsupportedConfiguration: the two norms have different epsilons, but an `MLAConfig` has only one epsilon.
    """
    eps = kv_a_layernorm.variance_epsilon
    other = eps if q_a_layernorm is None else q_a_layernorm.variance_epsilon
    if other != eps:
        wanted = f"q_a_layernorm.variance_epsilon: expected {eps}, as in kv_a_layernorm"
        raise UnsupportedConfiguration([f"{wanted}, got {other}"])
    return eps


def check_forward_attention(
    config: MLAConfig,
    weight: Tensor,
    q: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    cache_format: CacheFormat,
    kv_scale: Tensor | None = None,
) -> None:
    """Check shapes, dtypes and devices of the inputs of `MLAAttention.forward_attention`; read no values.

    `weight` is an up-projection of the layer. All tensors must be on the device of `weight`, and all tensors except the
    cache must have the dtype of `weight`.
    """
    dtypes, device = (weight.dtype,), weight.device
    check_tensor("q", q, ("T", config.num_heads, config.qk_head_dim), dtypes, device)
    tokens = q.shape[0]
    check_tensor("kv_c_normed", kv_c_normed, (tokens, config.kv_lora_rank), dtypes, device)
    check_tensor("k_pe", k_pe, (tokens, config.qk_rope_head_dim), dtypes, device)
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    check_formatted_cache(kv_cache, cache_format, *widths, weight.dtype, device, kv_scale)


def check_attention_output(
    config: MLAConfig, output: Tensor, output_scale: Tensor | None, weight: Tensor, q: Tensor, *inputs: Tensor
) -> None:
    """Check the tensor that `MLAAttention.forward_attention` writes; read no values.

    Args:
        config: config with the heads of this rank.
        output: [T, N, V].
        output_scale: scale of an output in e4m3, or None.
        weight: an up-projection of the layer, on the device of `output`. Without `output_scale`, `output` has the dtype
            of `weight`.
        q: [T, N, P + R].
        inputs: the other tensors that `output` must not overlap.
    """
    shape = (q.shape[0], config.num_heads, config.v_head_dim)
    dtype = weight.dtype if output_scale is None else E4M3
    check_out("output", output, shape, dtype, weight.device, weight, q, *inputs)


def check_step(
    metadata: MLAMetadata,
    num_tokens: int,
    kv_cache: Tensor,
    workspace_tokens: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> None:
    """Check shapes and numbers in the plan of a step, before the layer writes anything; read no values.

    No chunk of context may have more than `workspace_tokens` tokens, because the layer has no memory for more tokens.
    """
    check(isinstance(metadata, MLAMetadata), "metadata", "an MLAMetadata or None", type(metadata).__name__)
    end, split = metadata.num_actual_tokens, metadata.num_decode_tokens
    for name, count in (("num_actual_tokens", end), ("num_decode_tokens", split)):
        check_int(f"metadata.{name}", count, 0)
    check(0 <= split <= end <= num_tokens, "metadata", f"0 <= num_decode_tokens <= num_actual_tokens <= {num_tokens}",
          f"{split} and {end}")  # fmt: skip
    device, prefill = kv_cache.device, metadata.prefill
    check_tensor("metadata.slot_mapping", metadata.slot_mapping, ("slots",), (torch.int64,), device)
    check(metadata.slot_mapping.shape[0] >= end, "metadata.slot_mapping", f"at least {end} slots",
          metadata.slot_mapping.shape[0])  # fmt: skip
    check_decode_plan(metadata.decode, split, device)
    check_int("metadata.num_decodes", metadata.num_decodes, 0)
    check(metadata.num_decodes == metadata.decode.seq_lens.shape[0], "metadata.num_decodes",
          f"the {metadata.decode.seq_lens.shape[0]} requests of metadata.decode", metadata.num_decodes)  # fmt: skip
    check_block_size("metadata.decode.block_size", metadata.decode.block_size, kv_cache)
    if metadata.schedule is not None:
        check_schedule(metadata.schedule, metadata.num_decodes, device, "metadata.schedule")
    if metadata.cascade is not None:
        check_type("metadata.cascade", metadata.cascade, CascadeMetadata)
        for name, part in (("prefix", metadata.cascade.prefix), ("suffix", metadata.cascade.suffix)):
            check_decode_plan(part, split, device)
            check_block_size(f"metadata.cascade.{name}.block_size", part.block_size, kv_cache)
    check_prefill_plan(prefill, end - split, device, "metadata.prefill")
    check_block_size("metadata.prefill.block_size", prefill.block_size, kv_cache)
    check_int("metadata.workspace_tokens", metadata.workspace_tokens, 0)
    check_type("metadata.cache_format", metadata.cache_format, CacheFormat)
    check(metadata.cache_format == cache_format, "metadata.cache_format", f"{cache_format.name}, the layer's format",
          metadata.cache_format.name)  # fmt: skip
    check(metadata.fp8_mode == fp8_mode, "metadata.fp8_mode", f"{fp8_mode}, the layer's mode", metadata.fp8_mode)
    check_type("metadata.schedule_choice", metadata.schedule_choice, ScheduleChoice)
    check_type("metadata.workspace", metadata.workspace, ContextWorkspace)
    check_type("metadata.captured", metadata.captured, (tuple, type(None)), "a tuple or None")
    for chunk in prefill.context_chunks:
        check(chunk.num_tokens <= workspace_tokens, "metadata.workspace_tokens",
              f"chunks of at most {workspace_tokens} tokens, the layer's workspace_tokens",
              f"a chunk of {chunk.num_tokens} tokens in a plan "
              f"with workspace_tokens {metadata.workspace_tokens}")  # fmt: skip


def check_step_values(metadata: MLAMetadata, kv_cache: Tensor) -> None:
    """Check the values in the plan of a step, after `check_step`.

    The function does nothing if the cache is on a GPU, or under torch.compile. (Under torch.compile, each function that
    the layer calls checks its own values.)
    """
    if not kv_cache.is_cpu or torch.compiler.is_compiling():
        return
    end, split, prefill = metadata.num_actual_tokens, metadata.num_decode_tokens, metadata.prefill
    num_blocks, block_size, _ = kv_cache.shape
    check_slots(metadata.slot_mapping[:end], num_blocks * block_size, "metadata.slot_mapping")
    check_decode_values(metadata.decode, split, block_size, num_blocks)
    if metadata.cascade is not None:
        check_decode_values(metadata.cascade.prefix, split, block_size, num_blocks)
        check_decode_values(metadata.cascade.suffix, split, block_size, num_blocks)
    check_offsets("metadata.prefill.query_start_loc", prefill.query_start_loc, end - split)
    for part in prefill.parts:
        tokens = part.end_token - part.first_token
        check_offsets("metadata.prefill.parts.plan.query_start_loc", part.plan.query_start_loc, tokens)
        for chunk in part.plan.context_chunks:
            check_offsets("metadata.prefill.parts.plan.context_chunks.cu_seq_lens", chunk.cu_seq_lens, chunk.num_tokens)
    for chunk in prefill.context_chunks:
        total = None if chunk.bounded else chunk.num_tokens
        check_offsets("metadata.prefill.context_chunks.cu_seq_lens", chunk.cu_seq_lens, total, chunk.num_tokens)
        held_starts, held_offsets = chunk.held
        first, lengths = held_starts.tolist(), held_offsets.diff().tolist()
        earliest = min(first, default=0)
        check(earliest >= 0, "metadata.prefill.context_chunks.starts", "values >= 0", earliest)
        ends = (start + length if length else 0 for start, length in zip(first, lengths, strict=True))
        check_blocks(prefill.block_table, ends, block_size, num_blocks, "metadata.prefill.block_table")

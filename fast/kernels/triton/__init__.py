"""Backend "triton": Triton kernels and their launchers, for NVIDIA GPUs of compute capability 8.0 (Ampere) or later."""

from .. import compile_log
from .advance import advance_step
from .attention import flash_attn_varlen
from .cache import concat_and_cache_mla, copy_blocks, gather_and_maybe_dequant_cache, swap_blocks
from .cache_formats import dequantize_entries, quantize_entries
from .context_parallel import merge_packed_attn_states, pack_attn_state, reorg_kvcache, weight_attn_out
from .decode import decode_programs, mla_decode, schedule_costs
from .gqa.key_value import reshape_and_cache
from .gqa.packed import gqa_varlen_attention
from .gqa.paged import gqa_paged_attention
from .merge import merge_attn_states
from .padding_tokens import zero_padding_tokens
from .rope import apply_rope, rope_norm_and_cache
from .schedule import plan_decode
from .visible_lens import compute_visible_lens
from .weights import multiply_heads

KERNELS = {
    "advance_step": advance_step,
    "apply_rope": apply_rope,
    "compute_visible_lens": compute_visible_lens,
    "concat_and_cache_mla": concat_and_cache_mla,
    "copy_blocks": copy_blocks,
    "decode_programs": decode_programs,
    "dequantize_entries": dequantize_entries,
    "flash_attn_varlen": flash_attn_varlen,
    "gather_and_maybe_dequant_cache": gather_and_maybe_dequant_cache,
    "gqa_paged_attention": gqa_paged_attention,
    "gqa_varlen_attention": gqa_varlen_attention,
    "merge_attn_states": merge_attn_states,
    "merge_packed_attn_states": merge_packed_attn_states,
    "mla_decode": mla_decode,
    "multiply_heads": multiply_heads,
    "pack_attn_state": pack_attn_state,
    "plan_decode": plan_decode,
    "quantize_entries": quantize_entries,
    "reorg_kvcache": reorg_kvcache,
    "reshape_and_cache": reshape_and_cache,
    "rope_norm_and_cache": rope_norm_and_cache,
    "schedule_costs": schedule_costs,
    "swap_blocks": swap_blocks,
    "weight_attn_out": weight_attn_out,
    "zero_padding_tokens": zero_padding_tokens,
}

compile_log.install_once()

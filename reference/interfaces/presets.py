"""Dimensions and rotary parameters of published models."""

from __future__ import annotations

from collections.abc import Mapping

from .rope_config import RopeConfig, YarnConfig

PRESETS: Mapping[str, Mapping[str, int | None]] = {
    # {name of the model: arguments of `MLAConfig`, without the rope}, from the published configs
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
        "deepseek-v3": (7168, 128, 1536, 512, 128, 64, 128),  # DeepSeek-R1 has the same dims
        "kimi-k2": (7168, 64, 1536, 512, 128, 64, 128),
        "moonlight": (2048, 16, None, 512, 128, 64, 128),
        "minicpm3": (2560, 40, 768, 256, 64, 32, 64),
        "glm-5": (6144, 64, 2048, 512, 192, 64, 256),
        "longcat-flash": (6144, 64, 1536, 512, 128, 64, 128),
    }.items()
}


def _published_yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> YarnConfig:
    """Return YaRN parameters for pre-training sequences of 4096 tokens, with equal `mscale` and `mscale_all_dim`."""
    return YarnConfig(factor, 4096, beta_fast, 1.0, mscale, mscale)


# {name of the model: its published rope}; None if `RopeConfig` cannot express the rope
PRESET_ROPES: Mapping[str, RopeConfig | None] = {
    # source: github.com/NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/deepseek/deepseek_provider.py (V2,
    # V2-Lite, V3, Moonlight) and kimi/kimi_provider.py (Kimi-K2-Instruct; Kimi-K2-Instruct-0905 has factor 64)
    "deepseek-v2-lite": RopeConfig(10000.0, True, _published_yarn(40.0, 0.707)),
    "deepseek-v2": RopeConfig(10000.0, True, _published_yarn(40.0, 0.707)),
    "deepseek-v3": RopeConfig(10000.0, True, _published_yarn(40.0, 1.0)),
    "kimi-k2": RopeConfig(50000.0, True, _published_yarn(32.0, 1.0, beta_fast=1.0)),
    "moonlight": RopeConfig(50000.0, True),
    # source: config.json of huggingface.co/openbmb/MiniCPM3-4B. The rope of this model (LongRoPE) divides each
    # frequency by a different number.
    "minicpm3": None,
    # source: github.com/radixark/miles, scripts/models/glm5-744B-A40B.sh; interleaved as in transformers' glm_moe_dsa
    "glm-5": RopeConfig(1e6, True),
    # source: config.json of huggingface.co/mlx-community/LongCat-Flash-Chat-bf16; interleaved as in transformers'
    # longcat_flash
    "longcat-flash": RopeConfig(1e7, True),
}

"""Read the configs of an encoder-decoder model from a transformers config."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..checks import check, check_int, check_type, short_text
from ..errors import UnsupportedConfiguration
from ..hf_values import is_switched_on
from .attention_type import AttentionType
from .config import GQAConfig
from .dims import head_dim_reason
from .hf_refusals import refused_fields

# {model type: scale of the scores; None for head_dim^-1/2}; Whisper scales its queries before the call of attention
_SCALES = {
    "bart": None, "blenderbot": None, "blenderbot-small": None, "m2m_100": None, "marian": None, "mbart": None,
    "nllb-moe": None, "pegasus": None, "plbart": None, "speech_to_text": None, "whisper": 1.0,
}  # fmt: skip
_REQUIRED = ("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")


class EncoderDecoderConfigs(NamedTuple):
    """The configs of all attention layers of an encoder-decoder model.

    Attributes:
        encoder: config of each layer of the encoder.
        decoder: config of the self attention of each layer of the decoder.
        cross: config of the cross attention of each layer of the decoder.
    """

    encoder: tuple[GQAConfig, ...]
    decoder: tuple[GQAConfig, ...]
    cross: tuple[GQAConfig, ...]


def encoder_decoder_configs_from_hf(config: Any) -> EncoderDecoderConfigs:
    """Return the configs of an encoder-decoder model that a transformers config describes, such as BART or Whisper.

    Args:
        config: a transformers config of an encoder-decoder model, or an object with its attributes.

    Raises:
        TypeError: `model_type` is not a str.
        ValueError: a field has an invalid value.
        UnsupportedConfiguration: the model is not one of the supported encoder-decoder models, or needs a feature that
            is not implemented. The exception lists every reason.
    """
    model_type = getattr(config, "model_type", type(config).__name__)
    check_type("config.model_type", model_type, str)
    if model_type not in _SCALES:
        raise UnsupportedConfiguration([f"config.model_type: expected one of {', '.join(_SCALES)}, got {model_type!r}"])
    if missing := [name for name in _REQUIRED if getattr(config, name, None) is None]:
        raise UnsupportedConfiguration([f"config: expected an encoder-decoder model, got {model_type!r} without "
                                        f"{', '.join(missing)}"])  # fmt: skip
    reasons = refused_fields(config, model_type, ignored=("decoder_attention_heads",))
    if not is_switched_on(config, "is_encoder_decoder", True):
        reasons.append(f"config.is_encoder_decoder: expected True, got {short_text(config.is_encoder_decoder)}")
    check_int("config.d_model", config.d_model)
    sides = {}
    for side in ("encoder", "decoder"):
        heads, layers = getattr(config, f"{side}_attention_heads"), getattr(config, f"{side}_layers")
        check_int(f"config.{side}_attention_heads", heads)
        check_int(f"config.{side}_layers", layers)
        check(config.d_model % heads == 0, "config.d_model", f"a multiple of {side}_attention_heads {heads}",
              config.d_model)  # fmt: skip
        head_dim = config.d_model // heads
        if reason := head_dim_reason(head_dim, f"config.d_model / {side}_attention_heads"):
            reasons.append(reason)
        sides[side] = (layers, dict(num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=_SCALES[model_type]))
    if reasons:
        raise UnsupportedConfiguration(reasons)
    kinds = (("encoder", AttentionType.ENCODER), ("decoder", AttentionType.DECODER), ("decoder", AttentionType.CROSS))
    found = []
    for side, kind in kinds:
        layers, fields = sides[side]
        found.append((GQAConfig(**fields, attention_type=kind),) * layers)
    return EncoderDecoderConfigs(*found)

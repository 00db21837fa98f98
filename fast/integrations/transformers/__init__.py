"""Run models of transformers with the attention of this project.

    from fast.integrations.transformers import restore, use_attention, use_mla

    use_mla(model)                       # DeepSeek: Multi-head Latent Attention; or use_mla(model, ops=reference)
    use_attention(model)                 # Llama, Qwen, Gemma, gpt-oss, BART, ..: grouped-query attention
    model.generate(**inputs)             # as before, but with a paged cache
    restore(model)

How `use_mla` works (the folder `gqa` explains `use_attention`): it replaces `forward` on two kinds of module
*instances*. It changes no class, config, parameter, submodule or hook.

- The new `forward` of the base model checks the arguments of a call, refuses unsupported calls, and plans the step once
  for all layers. A plan has the integers that attention needs: lengths, cache slots, chunks of context.
- The new `forward` of each attention module runs an `ops.MLAAttention` that uses the projections of this module.

The base model builds no attention mask, because its new `forward` passes an empty mask of four dimensions to the
original `forward`: transformers returns such a mask unchanged. The module `cache` stores the latents of a padded batch
in a `DynamicCache`.
"""

from .._required import missing_transformers

if (_missing := missing_transformers()) is not None:
    raise ImportError(f"fast.integrations.transformers: {_missing}")

from .attention import use_mla
from .cache import LatentCacheLayer
from .calibration import calibrate_model
from .gqa import KeyValueCacheLayer, gqa_layers, use_attention
from .models import mla_layers
from .restoring import restore

__all__ = [
    "KeyValueCacheLayer",
    "LatentCacheLayer",
    "calibrate_model",
    "gqa_layers",
    "mla_layers",
    "restore",
    "use_attention",
    "use_mla",
]

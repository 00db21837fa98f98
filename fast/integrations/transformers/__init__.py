"""Run the DeepSeek models of transformers with the attention of this project.

    from fast.integrations.transformers import restore, use_mla

    use_mla(model)                       # or use_mla(model, ops=reference)
    model.generate(**inputs)             # as before, but with a paged latent cache and absorbed decodes
    restore(model)

How it works: `use_mla` replaces `forward` on two kinds of module *instances*. It changes no class, config, parameter,
submodule or hook.

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

from .attention import restore, use_mla
from .cache import LatentCacheLayer
from .calibration import calibrate_model
from .models import mla_layers

__all__ = ["LatentCacheLayer", "calibrate_model", "mla_layers", "restore", "use_mla"]

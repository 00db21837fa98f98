"""transformers' DeepSeek models on the twins' attention.

    from fast.integrations.transformers import restore, use_mla

    use_mla(model)                       # or use_mla(model, ops=reference)
    model.generate(**inputs)             # as before; decodes absorbed, over a paged latent cache
    restore(model)

How it hangs together: `use_mla` puts a `forward` on two kinds of module *instances* and touches nothing else (no
class, config, parameter, submodule or hook). The one on the base model reads the arguments of a call, refuses what
cannot be served, plans the step once (`attention`), and hands it down; those on the attention modules run an
`ops.MLAAttention` that shares their projections. The base model's own mask construction is passed by: transformers
returns a four-dimensional mask as it is, so it is handed an empty one and never builds any. What a `DynamicCache`
holds of a padded batch is in `cache`.
"""

from .._required import missing_transformers

if (_missing := missing_transformers()) is not None:
    raise ImportError(f"fast.integrations.transformers: {_missing}")

from .attention import restore, use_mla
from .cache import LatentCacheLayer

__all__ = ["LatentCacheLayer", "restore", "use_mla"]

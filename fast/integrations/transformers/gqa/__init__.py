"""Run models of transformers with the grouped-query attention of this project.

`use_attention` selects an attention function of this project through the attention interface of transformers. The
modules:

- `interface`: the functions that transformers calls for attention and for masks;
- `models`: the decoder and the encoder of a model, and the config of each layer;
- `cache`: the paged key/value cache as layers of a `DynamicCache`;
- `steps`: the plan of a forward;
- `attention`: `use_attention` and its inverse.
"""

from .attention import is_served, restore_attention, use_attention
from .cache import KeyValueCacheLayer
from .models import gqa_layers

__all__ = ["KeyValueCacheLayer", "gqa_layers", "is_served", "restore_attention", "use_attention"]

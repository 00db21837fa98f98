"""The configs of a model under `use_attention`, in which the name of the attention interface is `INTERFACE`."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from .interface import INTERFACE


class ReplacedConfigs:
    """The configs of a model under `use_attention`, and the configs that the model had before.

    The modules get copies of their configs, in which the name of the attention interface is `INTERFACE`. Other models
    with the same config objects are therefore left alone.

    Args:
        model: the model.
        modules: modules whose configs are replaced, together with every other module that has the same config object.
    """

    def __init__(self, model: PreTrainedModel, modules: Iterable[nn.Module]):
        self.pairs: list[tuple[PreTrainedConfig, PreTrainedConfig]] = []
        numbers: dict[int, int] = {}  # from the id of a config to its pair
        for module in modules:
            if id(module.config) not in numbers:
                numbers[id(module.config)] = len(self.pairs)
                replaced = copy.copy(module.config)
                replaced._attn_implementation = INTERFACE
                self.pairs.append((module.config, replaced))
        held = ((module, numbers.get(id(module.__dict__.get("config")))) for module in model.modules())
        self.modules = [(module, number) for module, number in held if number is not None]
        self.before = [dict(vars(replaced)) for _, replaced in self.pairs]

    def replace(self) -> None:
        """Give the modules the copies."""
        for module, number in self.modules:
            module.config = self.pairs[number][1]

    def restore(self) -> None:
        """Give the modules their own configs again, with the fields that somebody has changed in a copy since."""
        for (config, replaced), before in zip(self.pairs, self.before, strict=True):
            for name, value in vars(replaced).items():
                if name != "_attn_implementation_internal" and value is not before.get(name):
                    setattr(config, name, value)
        for module, number in self.modules:
            module.config = self.pairs[number][0]

"""Read the values of fields of a transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checks import check, short_text


def enables(value: object) -> bool:
    """Return whether the value of a field enables a feature.

    None, False, 0 and an empty string, list, tuple, set or dict do not enable a feature. Any other value does, for
    example a tensor.
    """
    if value is None or isinstance(value, bool | int | float | str | list | tuple | set | Mapping):
        return bool(value)
    return True


def is_given(value: object) -> bool:
    """Return what `enables` returns, but True for the number 0, which the caller then refuses."""
    return enables(value) or (isinstance(value, int | float) and not isinstance(value, bool))


def is_switched_on(config: Any, name: str, missing: bool = False) -> bool:
    """Return whether a switch of a config, such as `use_sliding_window`, is on.

    Args:
        config: the config.
        name: name of the field.
        missing: result for a config without the field, or with None.

    Raises:
        ValueError: the value enables the feature, but is neither True nor 1.
    """
    value = getattr(config, name, None)
    if value is None:
        return missing
    on = enables(value)
    check(not on or (isinstance(value, int) and value == 1), f"config.{name}", "True or False", short_text(value))
    return on

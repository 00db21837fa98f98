"""Fixtures with the models for the tests of the transformers adapter."""

from __future__ import annotations

import copy

import pytest


@pytest.fixture(params=["v2", "v2-yarn", "v3-yarn", "v3-half"])
def name(request):
    return request.param


@pytest.fixture
def model():
    """Return a copy of a model without `use_mla`; a test can change the copy."""
    from ...support.transformers_models import STOCK  # needs transformers

    return copy.deepcopy(STOCK["v3-yarn"])

"""Fixtures with the models on which the tests of the transformers adapter run."""

from __future__ import annotations

import copy

import pytest


@pytest.fixture(params=["v2", "v2-yarn", "v3-yarn", "v3-half"])
def name(request):
    return request.param


@pytest.fixture
def model():
    """Return a copy of a stock model, which a test may change."""
    from ..support.transformers_models import STOCK  # needs transformers

    return copy.deepcopy(STOCK["v3-yarn"])

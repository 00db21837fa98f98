"""The models that the tests of the adapter take turns at."""

from __future__ import annotations

import copy

import pytest


@pytest.fixture(params=["v2", "v2-yarn", "v3-yarn", "v3-half"])
def name(request):
    return request.param


@pytest.fixture
def model():
    """A stock model that a test may change."""
    from ..support.transformers_models import STOCK  # needs transformers

    return copy.deepcopy(STOCK["v3-yarn"])

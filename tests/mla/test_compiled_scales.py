"""Tests of a compiled layer whose scales were overwritten in place."""

from __future__ import annotations

import sys

import pytest
import torch

from ..support.commands import run

OVERWRITE = """
import sys
import torch
import fast
from tests.support.factories import make_batch, make_layer, make_weights
from tests.support.format_caches import FORMATS, poisoned_cache, step_of

name, device = sys.argv[1:]
torch.manual_seed(0)
if device != "cpu":  # under a default device, torch.compile takes a third more time to trace a layer
    torch.set_default_device(device)
cache_format, config, scale = FORMATS["fp8_e4m3"]
weights, batch = make_weights(config, torch.float32), make_batch((12, 5), (12, 5))
hidden, positions = torch.randn(17, config.hidden_size), torch.tensor([11, 4])
options = dict(cache_format=cache_format, fp8_mode="fp8_query")
prefill = fast.build_mla_metadata(batch.common, 16, 64, **options)
decode = fast.build_mla_metadata(step_of(batch, ((1, 12), (1, 5))), 16, 64, **options)


def make_compiled():
    # a layer that has written the prefills to its cache, the cache, and the compiled layer
    layer = make_layer(fast, config, weights, torch.float32, kv_scale=scale, q_scale=0.01, **options)
    cache = poisoned_cache(batch.num_blocks, 16, config, cache_format, torch.float32)
    layer(hidden, batch.positions, cache, prefill)
    torch._dynamo.reset()
    return layer, cache, torch.compile(layer, fullgraph=True, backend="aot_eager")


def error_with(value, layer, cache, compiled):
    # the error of a compiled decode after a scale was overwritten in place; None if the call returns
    getattr(layer, name).value.fill_(value)
    before = cache.view(torch.uint8).clone()
    try:
        compiled(hidden[:2] * 2, positions, cache, decode)
    except Exception as error:
        assert torch.equal(before, cache.view(torch.uint8)), "the call wrote to the cache"
        return str(error)


def check_values(found, shown):
    wanted = None if shown is None or device != "cpu" else f"{name}: expected a finite number above 0, got {shown}"
    assert found == wanted, found


with torch.no_grad():
    for value, shown in ((float("nan"), "nan"), (0.5, None)):  # overwritten before the layer is traced
        found = error_with(value, *make_compiled())
        if name == "kv_scale":
            assert "kv_scale: expected a scale that only KVScale.choose changes" in found, found
        else:
            check_values(found, shown)
    layer, cache, compiled = make_compiled()
    compiled(hidden[:2], positions, cache, decode)
    for value, shown in ((float("nan"), "nan"), (0.0, "0.0"), (-1.0, "-1.0"), (0.5, None)):
        check_values(error_with(value, layer, cache, compiled), shown)
"""


@pytest.mark.parametrize("name", ["kv_scale", "q_scale"])
def test_overwritten_scales(name):
    """Overwrite a scale of a compiled layer in place -> the call raises before it writes, in the cases below.

    - A cache scale that was overwritten before the layer is traced: every new value is refused, on every device.
    - Any scale on a CPU: NaN, 0 and negative numbers are refused, before and after the layer is traced.

    Every other change is accepted: code that was traced reads no value on a GPU, and cannot see that a buffer changed.
    The test runs in a process without the run-time shape checks of the tests, which `torch.compile` cannot trace.
    """
    code, said = run([sys.executable, "-c", OVERWRITE, name, str(torch.get_default_device())], 300)
    assert code == 0, said

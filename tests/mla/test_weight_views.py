"""Tests of the query projection and of the norm of a layer: whose memory the layer writes, and which modules it takes.

A prefill puts the rotated parts of its queries into the output of the query projection, unless something else may hold
this output.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import fast
from fast.mla.weight_views import Projections

from ..support.factories import DIRECT, LOW_RANK, make_batch, make_layer, make_weights, new_cache

CONFIGS = pytest.mark.parametrize("config", [DIRECT, LOW_RANK], ids=["direct", "low_rank"])


class Step:
    """A layer with a decode, and a prefill with context.

    Attributes:
        layer: the layer.
        name: name of the query projection.
    """

    def __init__(self, config):
        batch = make_batch([1, 5], [20, 45])
        self.layer = make_layer(fast, config, make_weights(config, torch.float64), torch.float64)
        self.name = "q_proj" if config.q_lora_rank is None else "q_b_proj"
        self._cache = new_cache(batch, config.head_size, torch.float64)
        self._plan = fast.build_mla_metadata(batch.common, 16, 32)
        self._inputs = torch.randn(6, config.hidden_size, dtype=torch.float64), torch.tensor([19, *range(40, 45)])

    def __call__(self):
        return self.layer(*self._inputs, self._cache.clone(), self._plan)

    @property
    def projection(self) -> nn.Module:
        """Return the query projection."""
        return getattr(self.layer, self.name)


class Module(nn.Module):
    """A projection of another class, which changes the output of the projection `right` by a function."""

    def __init__(self, right, change):
        super().__init__()
        self._right, self._change = [right], change

    def forward(self, x):
        """Return the changed output."""
        return self._change(self._right[0](x))


def inferred(x):
    """Return a copy of `x` as an inference tensor, which may not be written outside of inference mode."""
    with torch.inference_mode():
        return x.clone()


@CONFIGS
@pytest.mark.parametrize("of_all_modules", [False, True])
def test_a_hook_may_keep_the_queries(config, of_all_modules):
    """The output that a hook of the query projection keeps is not changed by a prefill, and the result is the same."""
    step, kept = Step(config), []
    first = step()

    def keep(module, _, output):
        if module is step.projection:
            kept.append((output, output.clone()))

    hook = (register_module_forward_hook if of_all_modules else step.projection.register_forward_hook)(keep)
    try:
        assert step().equal(first) and step().equal(first)
    finally:
        hook.remove()
    assert len(kept) == 2 and all(output.equal(copy) for output, copy in kept)
    assert step().equal(first) and len(kept) == 2


@CONFIGS
@pytest.mark.parametrize("case", ["kept", "inference", "wide"])
def test_queries_of_a_module_of_another_class(config, case):
    """A query projection may return one tensor in all calls, an inference tensor, or a tensor with other strides."""
    step, memory = Step(config), {}
    first = step()
    change = {
        "kept": lambda x: memory.setdefault("kept", x),
        "inference": inferred,
        "wide": lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
    }[case]
    setattr(step.layer, step.name, Module(step.projection, change))
    for _ in range(3):
        assert step().equal(first)


@CONFIGS
def test_queries_with_equal_rows(config):
    """A query projection may return an expanded tensor, whose rows share their memory."""
    step = Step(config)
    right = step.projection
    setattr(step.layer, step.name, Module(right, lambda x: x[:1].expand(x.shape).contiguous()))
    expected = step()
    setattr(step.layer, step.name, Module(right, lambda x: x[:1].expand(x.shape)))
    assert step().equal(expected) and step().equal(expected)


def test_where_rotated_parts_are_written():
    """Rotated parts are written into the output of a plain linear module, if its rows are contiguous and aligned."""
    plain, other = nn.Linear(4, 36), Module(nn.Linear(4, 36), lambda x: x)
    hooked = nn.Linear(4, 36)
    hooked.register_forward_hook(lambda *_: None)
    replaced = nn.Linear(4, 36)
    replaced.forward = plain.forward

    def in_place(projection, q, low_rank=False):
        modules = (None, plain, projection, None) if low_rank else (projection, None, None, None)
        rotated = torch.randn(*q.shape[:2], 2)
        expected = torch.cat((q[..., :-2], rotated), dim=-1)
        before, found = q.clone(), Projections(*modules, plain, plain).join_queries(q, rotated)
        assert found.equal(expected) and found.is_contiguous() and found.data_ptr() % 16 == 0
        written = found.data_ptr() == q.data_ptr()
        assert written or q.equal(before)
        return written

    q = torch.randn(6, 3, 12)
    for low_rank in (False, True):
        found = [in_place(each, q.clone(), low_rank) for each in (plain, other, hooked, replaced)]
        assert found == [True, False, False, False]
    assert in_place(plain, q[2:])
    assert not in_place(plain, q.flatten()[9 : 9 + 72].view(2, 3, 12))
    assert not in_place(plain, torch.randn(6, 3, 24)[..., :12])
    assert not in_place(plain, torch.randn(36, 6).t().reshape(6, 3, 12))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_norm(plain_errors):
    """The latent norm may be a `torch.jit.ScriptModule`."""
    step = Step(DIRECT)
    first, norm = step(), step.layer.kv_a_layernorm
    right = nn.RMSNorm(norm.weight.shape[0], dtype=torch.float64)
    right.weight.data.copy_(norm.weight.data)
    step.layer.kv_a_layernorm = torch.jit.script(right)
    assert step().equal(first) and step().equal(first)

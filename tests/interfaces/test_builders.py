"""Every metadata builder does what `AttentionMetadataBuilder` says, whatever attention family it plans for."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import fast
import reference
from reference.interfaces import AttentionMetadataBuilder, GraphSupport

from ..support.factories import DIRECT, integers, make_batch

BLOCK, LONGEST, REQUESTS = 16, 256, 6
BUILDERS = {  # by name: a builder for blocks of 16, sequences up to 256 tokens and 6 requests that draft one token
    f"{ops.__name__}.MLAMetadataBuilder{' (batch-invariant)' * invariant}": (
        lambda ops=ops, invariant=invariant: ops.MLAMetadataBuilder(
            DIRECT, BLOCK, LONGEST, REQUESTS, num_speculative_tokens=1, num_programs=3, batch_invariant=invariant
        )
    )
    for ops in (reference, fast)
    for invariant in (False, True)
}


@pytest.fixture(params=BUILDERS.values(), ids=BUILDERS)
def builder(request) -> AttentionMetadataBuilder:
    return request.param()


def tensors_of(plan) -> dict[str, torch.Tensor]:
    """Every tensor of a plan, by its path."""
    found = {}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value
        elif dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": tensor for name, tensor in tensors_of(value).items()}
    return found


def test_signatures(builder):
    """Every method of the protocol is there, with its parameters, defaults and annotations."""
    assert isinstance(builder, AttentionMetadataBuilder)
    methods = {name for name, value in vars(AttentionMetadataBuilder).items() if inspect.isfunction(value)}
    asked = {name for name in methods if not name.startswith("_")}
    assert asked == {"build", "build_for_cudagraph_capture", "update_captured", "can_run_in_cudagraph",
                     "use_cascade_attention", "reorder_batch"}  # fmt: skip
    for name in asked:
        wanted = inspect.signature(getattr(AttentionMetadataBuilder, name)).parameters
        got = inspect.signature(getattr(type(builder), name)).parameters
        assert list(got) == list(wanted), name
        for parameter in wanted.values():
            assert got[parameter.name].default == parameter.default, f"{name}: {parameter.name}"
            own = parameter.annotation in ("Any", got[parameter.name].annotation)  # the plan's type is the family's
            assert own, f"{name}: {parameter.name}"


def test_build(builder):
    """A batch in the order that `reorder_batch` asks for gets a plan of all its tokens."""
    query_lens, contexts = integers(30, 1, 2, 1), integers(0, 100, 31, 5)
    order = list(range(4))
    for here, there in builder.reorder_batch(query_lens, contexts):
        order[here], order[there] = order[there], order[here]
    lens = [int(query_lens[request]) for request in order]
    batch = make_batch(lens, [int(query_lens[request] + contexts[request]) for request in order], BLOCK)
    for fast_build in (False, True):
        plan = builder.build(0, batch.common, fast_build)
        assert plan.num_actual_tokens == 34 and plan.num_decodes == 3


def test_refusals(builder, plain_errors):
    """More requests or longer ones than the builder was made for; a batch that no graph may hold."""
    with pytest.raises(ValueError, match=f"^common: expected at most {REQUESTS} requests, got 7$"):
        builder.build(0, make_batch([1] * 7, [5] * 7, BLOCK).common)
    with pytest.raises(
        ValueError, match=f"^common: expected at most {LONGEST} tokens a request, got 300 at request 1$"
    ):
        builder.build(0, make_batch([1, 1], [5, 300], BLOCK).common)
    with pytest.raises(ValueError, match="^common: expected decodes of one query length"):
        builder.build_for_cudagraph_capture(make_batch([1, 9], [5, 9], BLOCK).common)


def test_captured_plans(builder):
    """`update_captured` writes the plan of another batch of the shape into the very tensors that were captured."""
    assert builder.graph_support is not GraphSupport.NONE
    first, second = (make_batch([2, 2, 2], lens, BLOCK).common for lens in ([40, 7, 200], [3, 90, 18]))
    assert builder.can_run_in_cudagraph(first)
    assert builder.can_run_in_cudagraph(make_batch([1, 2], [5, 9], BLOCK).common) is (
        builder.graph_support is GraphSupport.ANY
    )
    captured = builder.build_for_cudagraph_capture(first)
    held = {name: tensor.data_ptr() for name, tensor in tensors_of(captured).items()}
    builder.update_captured(captured, second)
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(captured).items()} == held
    wanted, got = tensors_of(builder.build_for_cudagraph_capture(second)), tensors_of(captured)
    for name in wanted.keys() & got.keys():  # lengths, block table and slots are the caller's own buffers
        if name.startswith("schedule.") or name == "decode.visible_lens":
            assert got[name].equal(wanted[name]), name


def test_shared_prefixes(builder):
    """The builder's own choice for its decodes; none where the results may not depend on the other requests."""
    query_lens, lens = integers(*[1] * 6), integers(*[4096] * 6)
    asked = builder.use_cascade_attention(4000, query_lens, lens)
    assert asked is (not builder.batch_invariant and fast.use_cascade_attention(4000, query_lens, lens, DIRECT))
    assert builder.use_cascade_attention(0, query_lens, lens) is False

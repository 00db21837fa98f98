"""Tests of every metadata builder against the protocol `AttentionMetadataBuilder`.

A builder makes the plan of a step: all integers that the attention of a batch needs. Each attention family has its own
builder, and all builders follow the protocol.
"""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import fast
import reference
from reference.interfaces import AttentionMetadataBuilder, GraphSupport

from ..support.factories import DIRECT, integers, make_batch
from ..support.gqa_plans import PLAIN, WINDOW

BLOCK, LONGEST, REQUESTS = 16, 256, 6
BUILDERS = {  # name: function that makes a builder for 6 requests of at most 256 tokens, with 1 drafted token
    f"{ops.__name__}.MLAMetadataBuilder{' (batch-invariant)' * invariant}": (
        lambda ops=ops, invariant=invariant: ops.MLAMetadataBuilder(
            DIRECT, BLOCK, LONGEST, REQUESTS, num_speculative_tokens=1, num_programs=3, batch_invariant=invariant
        )
    )
    for ops in (reference, fast)
    for invariant in (False, True)
} | {
    f"{ops.__name__}.GQAMetadataBuilder ({name}{', batch-invariant' * invariant})": (
        lambda ops=ops, config=config, invariant=invariant: ops.GQAMetadataBuilder(
            config, BLOCK, LONGEST, REQUESTS, num_speculative_tokens=1, num_programs=3, batch_invariant=invariant
        )
    )
    for ops in (reference, fast)
    for name, config in (
        ("all keys", PLAIN),
        ("window", WINDOW),
        ("attention chunks", dataclasses.replace(PLAIN, attention_chunk_size=128)),
    )
    for invariant in (False, True)
}


@pytest.fixture(params=BUILDERS.values(), ids=BUILDERS)
def builder(request) -> AttentionMetadataBuilder:
    return request.param()


def tensors_of(plan) -> dict[str, torch.Tensor]:
    """Return every tensor of a plan by its path, such as "decode.seq_lens"."""
    found = {}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value
        elif dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": tensor for name, tensor in tensors_of(value).items()}
    return found


def test_signatures(builder):
    """A builder has every method of the protocol, with the same parameters, defaults and annotations."""
    assert isinstance(builder, AttentionMetadataBuilder)
    assert (builder.block_size, builder.max_model_len, builder.max_num_seqs) == (BLOCK, LONGEST, REQUESTS)
    assert builder.ownership is None
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
            # the protocol has Any where each attention family has its own plan type
            own = parameter.annotation in ("Any", got[parameter.name].annotation)
            assert own, f"{name}: {parameter.name}"


def test_build(builder):
    """After `reorder_batch`, the plan has all tokens of the batch, and the three short requests are decodes."""
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
    """A builder refuses too many requests, too long requests, and batches that no CUDA graph can serve."""
    with pytest.raises(ValueError, match=f"^common: expected at most {REQUESTS} requests, got 7$"):
        builder.build(0, make_batch([1] * 7, [5] * 7, BLOCK).common)
    with pytest.raises(
        ValueError, match=f"^common: expected at most {LONGEST} tokens a request, got 300 at request 1$"
    ):
        builder.build(0, make_batch([1, 1], [5, 300], BLOCK).common)
    with pytest.raises(ValueError, match="^common: expected decodes of up to 2 tokens, got 10 tokens in 2 requ"):
        builder.build_for_cudagraph_capture(make_batch([1, 9], [5, 9], BLOCK).common)


MASKS = ("decode.visible_lens", "decode.first_visible")  # the second one with a window or attention chunks


def test_captured_plans(builder):
    """`update_captured` writes the plan of a batch with other lengths into the tensors of a captured plan."""
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
    for name in wanted.keys() & got.keys():  # the caller itself writes lengths, block table and slots
        if name.startswith("schedule.") or name in MASKS:
            assert got[name].equal(wanted[name]), name


def test_shared_prefixes(builder):
    """The method `use_cascade_attention` returns the result of the function of its attention family.

    True means a cascade: the shared prefix is attended once. A batch-invariant builder returns False instead.
    """
    query_lens, lens = integers(*[1] * 6), integers(*[4096] * 6)
    asked = builder.use_cascade_attention(4000, query_lens, lens)
    decide = fast.use_cascade_attention if builder.config is DIRECT else fast.use_gqa_cascade_attention
    assert asked is (not builder.batch_invariant and decide(4000, query_lens, lens, builder.config))
    assert builder.use_cascade_attention(0, query_lens, lens) is False


def test_a_graph_over_any_builder(builder):
    """`DecodeGraph` works with any builder of the protocol, and plans the batch of every run."""
    ops = reference if type(builder).__module__.startswith("reference.") else fast
    planned = []

    def step(hidden_states, positions, plan):
        planned.append(plan)
        return hidden_states

    graph = ops.DecodeGraph(step, builder, [1, 4], LONGEST // BLOCK, 8, torch.float32, "cpu", query_len=2)
    for lens in ([40, 7, 200], [3, 90, 18]):
        common = make_batch([2, 2, 2], lens, BLOCK).common
        hidden = torch.randn(6, 8)
        assert graph.run(hidden, torch.zeros(6, dtype=torch.int64), common).equal(hidden)
        wanted = tensors_of(builder.build_for_cudagraph_capture(common))
        got = tensors_of(planned[-1])
        assert planned[-1].num_actual_tokens == 8 and got.keys() == wanted.keys()
        assert got["slot_mapping"].tolist() == [*common.slot_mapping.tolist(), -1, -1]
        for name in {"decode.seq_lens", *MASKS} & got.keys():
            assert (
                got[name][: wanted[name].shape[0]].equal(wanted[name])
                and got[name][wanted[name].shape[0] :].eq(0).all()
            )

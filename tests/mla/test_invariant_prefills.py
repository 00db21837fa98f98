"""Tests of batch-invariant prefills: a request gets the same bits alone and with any other requests.

The chunks of context are cut by a request's own length, and the attention does not divide keys by the sizes of a batch.
Latents are expanded in blocks with equal numbers of rows (`fast.mla.head_products`).
"""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from fast.mla.prefill_choice import choose_prefill_backend
from reference.interfaces import TokenOwnership

from ..support.backends import registered
from ..support.factories import DIRECT, assert_same_bits, integers, make_batch, make_cache, offsets
from ..support.planning import same
from ..support.properties import given, st
from .test_backend_hooks import hooked

CONTEXTS = st.lists(st.sampled_from([0, 0, 1, 15, 16, 17, 48, 64, 65, 100, 128, 200]), max_size=8)
WORKSPACE = 64


def cuts_of(chunks, request):
    """Return (first token, number of tokens) of a request in each chunk that has tokens of it."""
    lens = [int(chunk.cu_seq_lens.diff()[request]) for chunk in chunks]
    return [(int(chunk.starts[request]), length) for chunk, length in zip(chunks, lens, strict=True) if length]


@given(CONTEXTS, st.sampled_from([(1, 1), (2, 1), (2, 16)]), st.sampled_from([32, 64, 80]))
def test_chunks(lens, ranks, workspace):
    """Contexts are cut where they fill a workspace; both packages give the same chunks, at most twice as many."""
    plans = [ops.plan_context_chunks(integers(*lens), workspace, 16, *ranks, True) for ops in (reference, fast)]
    same(*plans)
    unit = reference.interfaces.context_unit(16, *ranks)
    most = workspace // unit * unit
    for request, length in enumerate(lens):
        wanted = [(start, min(most, length - start)) for start in range(0, length, most)]
        assert cuts_of(plans[1], request) == wanted
    for chunk in plans[1]:
        assert sum(-(-length // unit) * unit for length in chunk.cu_seq_lens.diff().tolist()) <= workspace
        assert 0 < chunk.num_tokens == int(chunk.cu_seq_lens[-1])
    packed = fast.plan_context_chunks(integers(*lens), workspace, 16, *ranks)
    assert len(packed) <= len(plans[1]) <= 2 * len(packed)


def test_ordinary_chunks_depend_on_the_other_requests(ops):
    """Without the flag, the requests before a request change its cuts; with it, they do not."""
    lens = [integers(40), integers(30, 40)]
    found = [
        [cuts_of(ops.plan_context_chunks(each, WORKSPACE, 16, 1, 1, invariant), -1) for each in lens]
        for invariant in (False, True)
    ]
    assert found == [[[(0, 40)], [(0, 32), (32, 8)]], [[(0, 40)], [(0, 40)]]]


@pytest.mark.parametrize("ownership", [None, TokenOwnership(2, 1, 16)], ids=["one rank", "two ranks"])
def test_plans(ops, ownership):
    """The plan of a batch-invariant builder has the flag in every part, and the cuts of `plan_context_chunks`."""
    batch = make_batch([5, 2, 4, 3], [35, 102, 4, 203])
    common = fast.CommonAttentionMetadata.from_lens(
        batch.query_lens, batch.seq_lens, batch.common.block_table, 16, ownership
    )
    plan = ops.build_mla_metadata(common, 16, WORKSPACE, ownership=ownership, batch_invariant=True).prefill
    wanted = ops.plan_context_chunks(
        integers(30, 100, 0, 200), WORKSPACE, 16, *((2, 16) if ownership else (1, 1)), True
    )
    assert [chunk.starts.tolist() for chunk in plan.context_chunks] == [chunk.starts.tolist() for chunk in wanted]
    assert plan.batch_invariant and len(plan.parts) == 3
    assert all(part.plan.batch_invariant for part in plan.parts)
    ordinary = ops.build_mla_metadata(common, 16, WORKSPACE, ownership=ownership).prefill
    assert not ordinary.batch_invariant and not any(part.plan.batch_invariant for part in ordinary.parts)


def test_paths_and_schedules(ops):
    """`build_mla_metadata` with the flag calls `choose_path` for no request, and makes a batch-invariant schedule."""
    batch = make_batch([1, 2, 2], [4000, 4000, 4000])
    plans = [
        ops.build_mla_metadata(batch.common, 16, 4096, config=DIRECT, num_programs=4, batch_invariant=flag)
        for flag in (False, True)
    ]
    assert [plan.num_decodes for plan in plans] == [3, 1]
    assert plans[1].schedule.batch_invariant and (plans[0].schedule is None or not plans[0].schedule.batch_invariant)


def requests_of(query_lens, context_lens):
    """Return for each request its cache entries and its queries."""
    heads, width = DIRECT.num_heads, DIRECT.qk_head_dim
    return [
        (torch.randn(query + context, DIRECT.head_size), torch.randn(query, heads, width))
        for query, context in zip(query_lens, context_lens, strict=True)
    ]


def prefill(requests, context_lens, weights, batch_invariant, row_by_row=False):
    """Return the attention state of each request of one `forward_prefill`; `row_by_row` expands single latents."""
    lens = [len(queries) for _, queries in requests]
    batch = make_batch(lens, [len(entries) for entries, _ in requests])
    entries = [own for own, _ in requests]
    cache = make_cache(batch, entries, DIRECT.head_size, torch.float32, new_tokens=False)
    new = torch.cat([own[context:] for own, context in zip(entries, context_lens, strict=True)])
    kv_c, k_pe = new.split([DIRECT.kv_lora_rank, DIRECT.qk_rope_head_dim], -1)
    plan = fast.build_mla_metadata(batch.common, 16, WORKSPACE, batch_invariant=batch_invariant).prefill
    assert plan.block_table.shape[0] == len(lens)
    q = torch.cat([queries for _, queries in requests])

    def expand(latents):  # so that the rounding does not depend on the number of latents
        return tuple(torch.stack([torch.einsum("l,lnc->nc", row, w) for row in latents]) for w in weights)

    state = fast.forward_prefill(q, kv_c, k_pe, cache, plan, *weights, 0.01, expand=expand if row_by_row else None)
    return list(zip(state.out.split(lens), state.lse.split(lens, dim=1), strict=True))


@pytest.mark.parametrize("neighbours", [
    ([2], [30]), ([3, 2], [0, 40]), ([2, 5, 2], [0, 100, 17]), ([2] * 9, [0, 5] * 4 + [0]),
], ids=str)  # fmt: skip
def test_bits_of_a_request(neighbours):
    """A request gets the same bits alone, behind other requests, and between them."""
    torch.manual_seed(1)
    weights = torch.randn(DIRECT.kv_lora_rank, 3, 12), torch.randn(DIRECT.kv_lora_rank, 3, 10)
    own = requests_of([5, 4], [150, 0])
    others, contexts = requests_of(*neighbours), neighbours[1]
    for index, context in enumerate((150, 0)):
        (alone,) = prefill(own[index : index + 1], [context], weights, True)
        behind = prefill([*others, own[index]], [*contexts, context], weights, True)[-1]
        between = prefill([*others, own[index], *others], [*contexts, context, *contexts], weights, True)
        for found in (behind, between[len(others)]):
            assert_same_bits(found[0], alone[0])
            assert_same_bits(found[1], alone[1])


def test_bits_without_the_flag():
    """The control of the test above: without the flag, a request before another request changes its bits.

    The keys have the same bits in both cases, so the attention makes the difference.
    """
    torch.manual_seed(1)
    weights = torch.randn(DIRECT.kv_lora_rank, 3, 12), torch.randn(DIRECT.kv_lora_rank, 3, 10)
    own, other = requests_of([5], [150]), requests_of([2], [30])
    (alone,) = prefill(own, [150], weights, False, row_by_row=True)
    behind = prefill([*other, *own], [30, 150], weights, False, row_by_row=True)[-1]
    assert not torch.equal(behind[0], alone[0])


def test_a_choice_does_not_depend_on_the_context():
    """A backend without LSE is chosen for steps without context only by builders that are not batch-invariant."""
    with registered(hooked("no_lse", lse=False)):
        for batch_invariant, wanted in ((False, "no_lse"), (True, "cpu")):
            plan = fast.build_mla_metadata(make_batch([5], [5]).common, 16, 64, batch_invariant=batch_invariant)
            assert choose_prefill_backend(plan.prefill, DIRECT, torch.float32, None, batch_invariant) == wanted


def test_flag_of_a_call(plain_errors):
    """`batch_invariant=True` chooses a backend that is batch-invariant; an always invariant launcher gets no flag."""
    q, k, v = (torch.randn(5, 3, width) for width in (20, 20, 10))
    call = q, k, v, offsets([2, 3]), offsets([2, 3]), 3, 3, 0.3, True
    given_to = []

    def launcher(*arguments, **options):
        given_to.append(options)
        return fast.kernels.cpu.flash_attn_varlen(*arguments)

    for declared, wanted in (
        ({"batch_invariant": False}, None),
        ({"invariant_on_request": False}, {}),
        ({"invariant_on_request": True}, {"batch_invariant": True}),
    ):  # fmt: skip
        with registered(hooked("theirs", launcher=launcher, **declared)):
            given_to.clear()
            for _ in range(3):  # the later calls may be kept calls
                state = fast.flash_attn_varlen(*call, batch_invariant=True)
            assert given_to == ([] if wanted is None else [wanted] * 3)
            assert_same_bits(state.out, fast.flash_attn_varlen(*call, backend="cpu").out)
            if wanted is None:
                with pytest.raises(fast.UnsupportedConfiguration, match="^theirs: is not batch-invariant"):
                    fast.flash_attn_varlen(*call, batch_invariant=True, backend="theirs")
    with pytest.raises(TypeError, match="^batch_invariant: expected True or False, got int$"):
        fast.flash_attn_varlen(*call, batch_invariant=1)

"""Tiny random DeepSeek models of transformers, and the comparison of their logits with and without `use_mla`.

`use_mla` makes a model compute its attention with `reference` or `fast`. A model without `use_mla` is called stock.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from fast.parity import compare
from reference.interfaces import CommonAttentionMetadata

pytest.importorskip("transformers", reason="the integration runs transformers models")
import transformers

from fast.integrations.transformers import use_mla

from .factories import positions_of

VOCAB, LAYERS, BLOCK, HEAD_SIZE = 61, 2, 4, 32 + 8
YARN = dict(
    rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=32, beta_slow=1,
    mscale=0.7, mscale_all_dim=1.0,
)  # fmt: skip
PLAIN = dict(rope_type="default", rope_theta=1000.0)
CONFIGS = {
    "v2": (2, dict(q_lora_rank=None, rope_parameters=PLAIN, first_k_dense_replace=1)),
    "v2-yarn": (2, dict(q_lora_rank=20, rope_parameters=YARN)),
    "v3-yarn": (3, dict(q_lora_rank=20, rope_parameters=YARN, rope_interleave=True, first_k_dense_replace=1)),
    "v3-half": (3, dict(q_lora_rank=None, rope_parameters=PLAIN, rope_interleave=False)),
}
# A mark for tests that generate several tokens. It switches off the run-time checks of annotations, which would make
# these tests much slower.
WITHOUT_SHAPE_CHECKS = pytest.mark.usefixtures("plain_errors")
GREEDY = dict(do_sample=False, max_new_tokens=5)


def build(name: str, seed: int = 0, **fields):
    """Return a tiny random model in eval mode; `fields` replace fields of its config."""
    generation, special = CONFIGS[name]
    kind = transformers.DeepseekV2Config if generation == 2 else transformers.DeepseekV3Config
    sizes = dict(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS,
        num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, max_position_embeddings=64, initializer_range=0.3, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=8, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**sizes, **special, **fields}))
    with torch.no_grad():  # random norm weights in place of 1
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.set_experts_implementation("eager")  # the grouped implementation does not support float64
    return model.eval()


STOCK = {name: build(name) for name in CONFIGS}


@functools.cache
def gold_model(name: str):
    return copy.deepcopy(STOCK[name]).double()


@functools.cache
def eager_model(name: str):
    model = copy.deepcopy(STOCK[name])
    model.set_attn_implementation("eager")
    return model


@functools.cache
def moved_model(name: str, draw: int):
    """Return the model with eager attention; each weight is changed by at most one unit in the last place (float32)."""
    model = copy.deepcopy(eager_model(name))
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2.0 - 1
            parameter.copy_(parameter.double() * (1 + 2.0**-24 * signs.double()))
    return model


def served(name: str, ops, **options):
    return use_mla(copy.deepcopy(STOCK[name]), ops=ops, **{"block_size": BLOCK, "workspace_tokens": 16, **options})


def padded_batch():
    """Return ids and mask, [3, 11], with padding on the left (row 0), in the middle (row 1), on the right (row 2)."""
    ids = torch.randint(1, VOCAB, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 5:7], mask[2, 10] = 0, 0, 0
    return ids, mask


def furthest_off(results: list[torch.Tensor], gold: torch.Tensor) -> torch.Tensor:
    """Return for each element the value among the results that is furthest from gold."""
    return functools.reduce(
        lambda low, other: torch.where((low - gold).abs() > (other - gold).abs(), low, other), results
    )


def assert_same(scenario, name: str, ops, **options) -> None:
    """Run `scenario(model)` for a model with `use_mla` -> the error of its logits is within a budget.

    The error is measured against the stock model in float64 (gold). The budget is computed from the errors of six stock
    models in float32: two with different attention implementations of transformers, and four whose weights were changed
    by one unit in the last place. For each element the largest of the six errors counts, because the error of one model
    can be small by chance.

    Args:
        scenario: function of a model that returns logits.
        name: name of the model in CONFIGS.
        ops: package for `use_mla`.
        options: further arguments of `use_mla`.
    """
    with torch.no_grad():
        gold = scenario(gold_model(name))
        low = [scenario(model) for model in (STOCK[name], eager_model(name), *(moved_model(name, n) for n in range(4)))]
        value = scenario(served(name, ops, **options))
    result = compare("logits", value, furthest_off(low, gold), gold)
    assert result.passed, result


def tokens_of(model, **inputs):
    torch.manual_seed(7)
    return model.generate(**inputs)


def packed_step(ops, query_lens, seq_lens, table):
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    slots = ops.slot_mapping(starts, lens, table, BLOCK, int(starts[-1]))
    metadata = ops.build_mla_metadata(CommonAttentionMetadata.make(starts, lens, table, slots), BLOCK, 16)
    return dict(position_ids=positions_of(query_lens, seq_lens)[None], use_cache=False, mla_metadata=metadata)


def attributes(model):
    return {path: {key: id(value) for key, value in vars(module).items()} for path, module in model.named_modules()}

"""Tests of the logits of DeepSeek models under `use_mla`, for padded batches, packed batches and several ranks.

`use_mla` makes a model of transformers compute its attention with `reference` or `fast`. The error of the logits
against transformers in float64 must be within a budget, which is computed from the error of transformers in float32.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache

from fast.demo.serving import ServingLoop
from fast.integrations.transformers import LatentCacheLayer, restore, use_mla
from fast.parity import compare
from reference.interfaces import MLAConfig, RopeConfig, UnsupportedConfiguration

from ...support.transformers_models import (
    BLOCK,
    HEAD_SIZE,
    LAYERS,
    STOCK,
    VOCAB,
    assert_same,
    eager_model,
    furthest_off,
    gold_model,
    packed_step,
    padded_batch,
    served,
)

# padded batches


def test_logits_with_padding_of_every_kind(name, ops):
    ids, mask = padded_batch()
    assert_same(lambda model: model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], name, ops)


@pytest.mark.parametrize(("cuts", "decode_threshold"), [((1, 5, 6), 1), ((4, 8, 9), 3)])
def test_logits_of_a_prompt_fed_in_pieces(name, ops, cuts, decode_threshold):
    """Pass the tokens of the prompts in several calls -> logits within the budget.

    Prefills expand the context in chunks of at most four blocks. In some calls, all tokens of a row are padding.
    """
    ids, mask = padded_batch()
    bounds = (0, *cuts, ids.shape[1])

    def scenario(model):
        cache, logits = DynamicCache(), []
        for start, end in itertools.pairwise(bounds):
            positions = torch.arange(start, end)[None]
            part = model(ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
            logits.append(part.logits)
        return torch.cat(logits, dim=1)[mask.bool()]

    assert_same(scenario, name, ops, decode_threshold=decode_threshold)


@pytest.mark.parametrize("pitfall", [14, 15])
def test_a_wrong_rope_is_seen(ops, pitfall, monkeypatch):
    """Plant a mistake -> the error of the logits exceeds the budget.

    The mistakes are a softmax scale without YaRN's factor mscale^2 (pitfall 14 of the list in tests/__init__.py) and a
    rope that rotates wrong pairs of elements (pitfall 15).
    """
    ids, mask = padded_batch()
    checked = lambda: assert_same(  # noqa: E731
        lambda model: model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], "v3-yarn", ops
    )
    checked()
    if pitfall == 14:
        monkeypatch.setattr(MLAConfig, "softmax_scale", property(lambda self: self.qk_head_dim**-0.5))
    else:
        original = MLAConfig.from_hf
        flip = lambda rope: RopeConfig(rope.theta, not rope.interleaved, rope.yarn)  # noqa: E731

        def from_hf(config):
            read = original(config)
            return MLAConfig(**{**vars(read), "rope": flip(read.rope)})

        monkeypatch.setattr(MLAConfig, "from_hf", from_hf)
    with pytest.raises(AssertionError, match="Parity"):
        checked()


def test_the_latent_norms_own_epsilon_is_read(name, ops):
    """Set `variance_epsilon` of the norm modules to 0.25 -> layers use 0.25 and ignore `rms_norm_eps` of the config."""
    ids, mask = padded_batch()

    def with_epsilon(model):
        model = copy.deepcopy(model)
        for module in model.modules():
            if hasattr(module, "kv_a_layernorm"):
                for norm in (module.kv_a_layernorm, getattr(module, "q_a_layernorm", None)):
                    if norm is not None:
                        norm.variance_epsilon = 0.25
        return model

    gold, low, other = (with_epsilon(model) for model in (gold_model(name), STOCK[name], eager_model(name)))
    value = use_mla(with_epsilon(STOCK[name]), ops=ops, block_size=BLOCK, workspace_tokens=16)
    with torch.no_grad():
        gold, low, other, value = (
            model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for model in (gold, low, other, value)
        )
        unchanged = gold_model(name)(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert (gold - unchanged).abs().max() > 0.01, "the changed epsilon does not change the logits"
    result = compare("logits", value, furthest_off([low, other], gold), gold)
    assert result.passed, result


def test_two_latent_norms_of_different_epsilons_are_refused(ops):
    attention = copy.deepcopy(STOCK["v3-yarn"]).model.layers[0].self_attn
    attention.q_a_layernorm.variance_epsilon = 1e-5
    wanted = "^q_a_layernorm.variance_epsilon: expected 1e-06, as in kv_a_layernorm, got 1e-05$"
    with pytest.raises(UnsupportedConfiguration, match=wanted):
        ops.MLAAttention.from_hf(attention)


@pytest.mark.parametrize("fields", [dict(sliding_window=8), dict(attn_logit_softcapping=2.0)])
def test_use_mla_refuses_other_attention(model, ops, fields):
    """Call `use_mla` for another kind of attention -> an error names the config field, and the model is unchanged."""
    for field, asked in fields.items():
        setattr(model.config, field, asked)
    with pytest.raises(UnsupportedConfiguration, match=f"^config.{next(iter(fields))}: "):
        use_mla(model, ops=ops)
    assert not any(isinstance(module, ops.MLAAttention) for module in model.modules())


def test_heads_without_a_language_model_and_embeddings_as_input(ops):
    ids, mask = padded_batch()

    def scenario(model):
        base = model.model
        states = base(None, mask, inputs_embeds=base.embed_tokens(ids), output_hidden_states=True)
        assert len(states.hidden_states) == LAYERS + 1
        return states.last_hidden_state[mask.bool()]

    assert_same(scenario, "v3-yarn", ops)
    base = use_mla(copy.deepcopy(STOCK["v3-yarn"]).model, ops=ops)
    with torch.no_grad():
        assert type(base(ids).past_key_values.layers[0]) is LatentCacheLayer
    restore(base)


def test_a_gradient_is_an_error_and_not_missing(ops):
    model = served("v3-yarn", ops)
    logits = model(torch.randint(1, VOCAB, (1, 5))).logits
    with pytest.raises(RuntimeError, match="inference only"):
        logits.sum().backward()


# packed batches


def test_packed_batch_against_each_request_alone(name, ops):
    model = served(name, ops)
    caches = [ops.allocate_kv_cache(16, BLOCK, HEAD_SIZE, torch.float32) for _ in range(LAYERS)]
    table = torch.randperm(16).to(torch.int32).view(4, 4)
    prompts = [torch.randint(1, VOCAB, (length,)) for length in (9, 14, 11, 6)]
    done = [0, 0, 0, 0]
    with torch.no_grad():
        for query_lens in ([8, 5, 3, 0], [1, 4, 0, 6], [0, 5, 8, 0]):  # the second step has a decode and prefills
            new_ids = [prompt[at : at + q] for prompt, at, q in zip(prompts, done, query_lens, strict=True)]
            done = [at + q for at, q in zip(done, query_lens, strict=True)]
            ends = torch.tensor(query_lens).cumsum(0) - 1
            live = [request for request, q in enumerate(query_lens) if q]
            logits = model(
                torch.cat(new_ids)[None], mla_kv_caches=caches, logits_to_keep=ends[live],
                **packed_step(ops, query_lens, done, table),
            ).logits  # fmt: skip
            for row, request in enumerate(live):
                ids = prompts[request][None, : done[request]]
                gold = gold_model(name)(ids).logits[0, -1]
                low = furthest_off([model(ids).logits[0, -1] for model in (STOCK[name], eager_model(name))], gold)
                result = compare(f"request {request}", logits[0, row], low, gold)
                assert result.passed, result


class LargestTensor(TorchDispatchMode):
    """Dispatch mode of PyTorch that records the number of elements of the largest tensor that an op returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


def test_no_square_mask_is_ever_built(ops):
    requests, each = 12, 50
    total = requests * each
    model = served("v3-yarn", ops)
    caches = [ops.allocate_kv_cache(requests * 13, BLOCK, HEAD_SIZE, torch.float32) for _ in range(LAYERS)]
    table = torch.arange(requests * 13, dtype=torch.int32).view(requests, 13)
    ids, keep = torch.randint(1, VOCAB, (1, total)), torch.tensor([total - 1])
    step = packed_step(ops, [each] * requests, [each] * requests, table)
    with torch.no_grad():
        with LargestTensor() as packed:
            model(ids, mla_kv_caches=caches, logits_to_keep=keep, **step)
        with LargestTensor() as stock:
            STOCK["v3-yarn"](ids, position_ids=step["position_ids"], use_cache=False, logits_to_keep=keep)
    assert packed.elements < total * total <= stock.elements


def test_a_model_on_several_ranks(ops):
    """Serve packed batches on three ranks that share each sequence -> the same tokens as on one rank.

    On three ranks, a padded batch is refused. If the dtype of the model changed after `use_mla`, a call is refused too.
    """

    def program(ranks):
        model = copy.deepcopy(STOCK["v3-yarn"])
        use_mla(model, ops=ops, block_size=BLOCK, context_parallel=ranks)
        config = ops.MLAConfig.from_hf(model.config)

        def loop():
            made = ServingLoop(model, config, ops, num_blocks=20, block_size=BLOCK, max_num_seqs=2, token_budget=8,
                               workspace_tokens=48, context_parallel=ranks)  # fmt: skip
            for prompt in ([5, 3, 9, 1, 7, 2, 8, 4, 6, 11, 13], [10, 12, 2]):
                made.add(prompt, 6)
            return made

        tokens = [request.generated_ids for request in loop().run()]
        if ranks is not None:
            with pytest.raises(ValueError, match="^model: expected a packed batch with mla_metadata and mla_kv_caches"):
                model(torch.tensor([[1, 2, 3]]))
            model.double()
            with pytest.raises(
                ValueError, match=r"^model \(q_\w+\): expected the weights that use_mla divided among the ranks, got"
            ):
                loop().run()
        return tokens

    assert ops.simulate(3, 1, program) == [program(None)] * 3

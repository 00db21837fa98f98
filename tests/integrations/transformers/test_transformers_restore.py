"""Tests that `restore` undoes `use_mla`, and that hooks, copies and saved checkpoints work under `use_mla`.

`use_mla` makes a DeepSeek model of transformers compute its attention with `reference` or `fast`.
"""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
import transformers

from fast.integrations.transformers import restore, use_mla

from ...support.transformers_models import GREEDY, STOCK, VOCAB, WITHOUT_SHAPE_CHECKS, attributes, padded_batch, served


@WITHOUT_SHAPE_CHECKS
def test_restore_leaves_the_model_as_it_was(model, ops):
    ids, mask = padded_batch()
    with torch.no_grad():
        model(ids, output_hidden_states=True)  # the first call with this option makes transformers add hooks
        expected = model(ids, attention_mask=mask).logits
    before, config = attributes(model), copy.deepcopy(vars(model.config))
    tensors = {key: id(value) for key, value in model.named_parameters()}
    names = [name for name, _ in model.named_modules()]
    assert use_mla(model, ops=ops) is model
    assert [name for name, _ in model.named_modules()] == names
    assert {key: id(value) for key, value in model.named_parameters()} == tensors
    model.generate(ids, attention_mask=mask, **GREEDY)
    assert restore(model) is model
    assert attributes(model) == before and vars(model.config) == config
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    use_mla(model, ops=ops)  # `use_mla` can be called again after `restore`
    restore(model)


@WITHOUT_SHAPE_CHECKS
def test_hooks_still_run_and_a_model_of_the_same_config_is_left_alone(ops):
    model = served("v3-yarn", ops)
    sibling = type(model)(model.config).eval()
    seen = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: seen.append(output[0].shape))
    ids = torch.randint(1, VOCAB, (1, 6))
    expected = sibling.generate(ids, **GREEDY)
    model.generate(ids, **GREEDY)
    assert seen[0] == (1, 6, 24) and len(seen) == GREEDY["max_new_tokens"]
    assert torch.equal(use_mla(sibling, ops=ops).generate(ids, **GREEDY), expected)


@WITHOUT_SHAPE_CHECKS
def test_a_copy_is_served_from_its_own_weights(ops):
    model = served("v3-yarn", ops)
    ids = torch.randint(1, VOCAB, (1, 6))
    expected = model.generate(ids, **GREEDY)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    changed = twin.generate(ids, **GREEDY)
    assert not torch.equal(changed, expected)
    assert torch.equal(restore(twin).generate(ids, **GREEDY), changed)
    assert torch.equal(model.generate(ids, **GREEDY), expected)


@WITHOUT_SHAPE_CHECKS
def test_save_pretrained_while_served(ops, tmp_path):
    model = served("v3-yarn", ops)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) and loaded.config.to_dict().keys() == STOCK["v3-yarn"].config.to_dict().keys()
    for (key, value), (other, expected) in zip(
        loaded.state_dict().items(), STOCK["v3-yarn"].state_dict().items(), strict=True
    ):
        assert key == other and torch.equal(value, expected)
    ids = torch.randint(1, VOCAB, (1, 6))
    assert torch.equal(use_mla(loaded, ops=ops).generate(ids, **GREEDY), model.generate(ids, **GREEDY))

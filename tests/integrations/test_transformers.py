"""transformers' DeepSeek models under use_mla: the same tokens in every mode of generate, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fast.demo.serving import ServingLoop
from fast.parity import compare
from reference.interfaces import CommonAttentionMetadata, MLAConfig, RopeConfig, UnsupportedConfiguration

transformers = pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache, DynamicLayer, QuantizedCache, StaticCache  # noqa: E402

import fast  # noqa: E402
from fast.integrations.transformers import LatentCacheLayer, restore, use_mla  # noqa: E402  (needs transformers)

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
# The annotations of every room on the way are checked in the tests of one forward; a whole generation would spend
# most of its time on them.
WITHOUT_SHAPE_CHECKS = pytest.mark.usefixtures("plain_errors")
GREEDY = dict(do_sample=False, max_new_tokens=5)
MODES = {
    "greedy": GREEDY,
    "no cache": dict(GREEDY, use_cache=False),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20, max_new_tokens=5, num_return_sequences=2),
    "beams": dict(GREEDY, num_beams=3, num_return_sequences=2),
    "prompt lookup": dict(GREEDY, prompt_lookup_num_tokens=3),
}


def build(name: str, seed: int = 0, **fields):
    """A tiny random model in eval mode."""
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
    with torch.no_grad():  # norms that are not all ones
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.set_experts_implementation("eager")  # the grouped one has no float64
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


@pytest.fixture(params=CONFIGS)
def name(request):
    return request.param


@pytest.fixture
def model():
    """A stock model that a test may change."""
    return copy.deepcopy(STOCK["v3-yarn"])


def served(name: str, ops, **options):
    return use_mla(copy.deepcopy(STOCK[name]), ops=ops, **{"block_size": BLOCK, "workspace_tokens": 16, **options})


def padded_batch():
    """Left padding, a hole and right padding, [3, 11]; the last column of row 2 is padding."""
    ids = torch.randint(1, VOCAB, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 5:7], mask[2, 10] = 0, 0, 0
    return ids, mask


def further_off(low: torch.Tensor, other: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
    """At each element, which of two results in float32 lies further from gold."""
    return torch.where((low - gold).abs() > (other - gold).abs(), low, other)


def assert_same(scenario, name: str, ops, **options) -> None:
    """`scenario(model) -> logits` of a served model within the budget that stock float32 sets against stock float64.

    What float32 costs is taken from both of stock's own attentions: at each element, the one that lies further off.
    """
    with torch.no_grad():
        gold = scenario(gold_model(name))
        low, other = scenario(STOCK[name]), scenario(eager_model(name))
        value = scenario(served(name, ops, **options))
    result = compare("logits", value, further_off(low, other, gold), gold)
    assert result.passed, result


def tokens_of(model, **inputs):
    torch.manual_seed(7)
    return model.generate(**inputs)


# generate


def mode_inputs(mode: str):
    """Two rows, the first padded on the left (prompt lookup takes one, which repeats itself)."""
    torch.manual_seed(11)
    rows = 1 if mode == "prompt lookup" else 2
    ids = torch.randint(1, VOCAB, (rows, 9)).repeat(1, 2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0 if rows > 1 else 1
    return dict(input_ids=ids, attention_mask=mask, **MODES[mode])


@functools.cache
def stock_tokens(name: str, mode: str):
    return tokens_of(STOCK[name], **mode_inputs(mode))


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize(
    ("name", "mode"),
    [*itertools.product(("v2", "v3-yarn"), MODES), *itertools.product(("v2-yarn", "v3-half"), ("greedy", "beams"))],
)
def test_generate_gives_the_same_tokens(name, ops, mode):
    assert torch.equal(tokens_of(served(name, ops), **mode_inputs(mode)), stock_tokens(name, mode))


@WITHOUT_SHAPE_CHECKS
def test_assisted_generation(ops):
    ids = torch.randint(1, VOCAB, (1, 9))
    inputs = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=build("v3-half", seed=3), **GREEDY
    )
    assert torch.equal(tokens_of(served("v3-yarn", ops), **inputs), tokens_of(STOCK["v3-yarn"], **inputs))
    inputs["assistant_model"] = served("v3-half", ops)  # and with the assistant served too
    assert torch.equal(tokens_of(served("v3-yarn", ops), **inputs), tokens_of(STOCK["v3-yarn"], **inputs))


@WITHOUT_SHAPE_CHECKS
def test_generate_continues_from_a_passed_cache(ops):
    def conversation(model):
        torch.manual_seed(1)
        ids, mask = torch.randint(1, VOCAB, (2, 6)), torch.ones(2, 6, dtype=torch.long)
        mask[1, :3] = 0
        cache = DynamicCache(config=model.config)
        for _ in range(2):
            ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
            ids = torch.cat((ids, torch.randint(1, VOCAB, (2, 4))), dim=1)
            mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), dim=1)
        return ids, cache.get_seq_length()

    ids, length = conversation(served("v2-yarn", ops))
    stock_ids, stock_length = conversation(STOCK["v2-yarn"])
    assert torch.equal(ids, stock_ids) and length == stock_length


@WITHOUT_SHAPE_CHECKS
def test_a_copied_cache_is_a_cache_of_its_own(ops):
    model = served("v3-yarn", ops)
    prompt = torch.randint(1, VOCAB, (1, 10))
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    for _ in range(2):
        ids = torch.cat((prompt, torch.randint(1, VOCAB, (1, 3))), dim=1)
        expected = STOCK["v3-yarn"].generate(ids, **GREEDY)
        assert torch.equal(model.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY), expected)
    assert cache.get_seq_length() == 10


# forward


def test_logits_with_padding_of_every_kind(name, ops):
    ids, mask = padded_batch()
    assert_same(lambda model: model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], name, ops)


@pytest.mark.parametrize(("cuts", "decode_threshold"), [((1, 5, 6), 1), ((4, 8, 9), 3)])
def test_logits_of_a_prompt_fed_in_pieces(name, ops, cuts, decode_threshold):
    """Chunks of context expanded in a workspace of four blocks, and pieces that are all padding in some row."""
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
    """Pitfalls 14 and 15: without YaRN's mscale squared, or with the other pairing of rope elements, parity fails."""
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
    """The modules' `variance_epsilon`, here far from the 1e-6 of the config, decides and not `rms_norm_eps`."""
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
    assert (gold - unchanged).abs().max() > 0.01, "an epsilon that decides nothing"
    result = compare("logits", value, further_off(low, other, gold), gold)
    assert result.passed, result


def test_two_latent_norms_of_different_epsilons_are_refused(ops):
    attention = copy.deepcopy(STOCK["v3-yarn"]).model.layers[0].self_attn
    attention.q_a_layernorm.variance_epsilon = 1e-5
    wanted = "^q_a_layernorm.variance_epsilon: expected 1e-06, that of kv_a_layernorm, got 1e-05$"
    with pytest.raises(UnsupportedConfiguration, match=wanted):
        ops.MLAAttention.from_hf(attention)


@pytest.mark.parametrize("fields", [dict(sliding_window=8), dict(attn_logit_softcapping=2.0)])
def test_use_mla_refuses_other_attention(model, ops, fields):
    """A model that asks for other attention stays stock: the reason names the field."""
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


# the cache


CACHE_OPERATIONS = {
    "reorder": lambda cache, mask: (cache.reorder_cache(torch.tensor([2, 0, 0])), mask[[2, 0, 0]])[1],
    "repeat": lambda cache, mask: (cache.batch_repeat_interleave(2), mask.repeat_interleave(2, 0))[1],
    "select": lambda cache, mask: (cache.batch_select_indices(torch.tensor([2, 0])), mask[[2, 0]])[1],
    "select by mask": lambda cache, mask: (
        cache.batch_select_indices(torch.tensor([True, False, True])), mask[[0, 2]])[1],
    "crop": lambda cache, mask: (cache.crop(-3), mask[:, :-3])[1],
    "crop nothing": lambda cache, mask: (cache.crop(0), mask)[1],
    "crop all": lambda cache, mask: (cache.crop(-11), mask[:, :0])[1],
}  # fmt: skip


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize("operation", CACHE_OPERATIONS)
def test_cache_operations_mean_what_stock_means(ops, operation):
    ids, mask = padded_batch()
    new = torch.randint(1, VOCAB, (6, 5))

    def scenario(model):
        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        kept = CACHE_OPERATIONS[operation](cache, mask)
        assert cache.get_seq_length() == kept.shape[1]
        assert cache.get_mask_sizes(5, 0) == (kept.shape[1] + 5, 0)
        assert cache.get_max_length(0) == -1 and cache.is_croppable and not cache.is_compileable
        rows = kept.shape[0]
        logits = []
        for step in (new[:rows, :3], new[:rows, 3:4], new[:rows, 4:]):
            kept = torch.cat((kept, kept.new_ones(step.shape)), dim=1)
            logits.append(model(step, attention_mask=kept, past_key_values=cache).logits)
        return torch.cat(logits, dim=1)

    assert_same(scenario, "v3-yarn", ops, workspace_tokens=24)


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize("amount", [0, -1, -6, -9, 3, 6, 8])
def test_crop_takes_the_convention_of_the_installed_version(ops, amount):
    """A positive argument is the length to keep in some versions and an error in others; ours is as stock's is."""
    outcomes = []
    for model in (STOCK["v3-yarn"], served("v3-yarn", ops)):
        with torch.no_grad():
            cache = model(torch.ones(2, 6, dtype=torch.long), use_cache=True).past_key_values
        try:
            cache.crop(amount)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            # stock counts an empty tensor as 0 tokens
            outcomes.append([cache.get_seq_length(layer) for layer in range(LAYERS)])
    assert outcomes[0] == outcomes[1]


@WITHOUT_SHAPE_CHECKS
def test_reset_takes_another_batch(ops):
    model = served("v3-yarn", ops)
    cache = DynamicCache()
    for rows in (3, 1):
        ids = torch.randint(1, VOCAB, (rows, 5))
        with torch.no_grad():
            value = model(ids, past_key_values=cache).logits
            alone = model(ids, use_cache=False).logits
        assert cache.get_seq_length() == 5 and torch.equal(value, alone)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.layers[0].kv_cache is None


def record_allocations(ops, monkeypatch):
    """Every allocated cache, filled with NaN."""
    made, allocate = [], ops.allocate_kv_cache

    def poisoned(*args, **kwargs):
        made.append(allocate(*args, **kwargs).fill_(math.nan))
        return made[-1]

    monkeypatch.setattr(ops, "allocate_kv_cache", poisoned)
    return made


def test_padding_is_never_written_and_unwritten_bytes_reach_nothing(ops, monkeypatch):
    """Pitfall 7: every byte that no real token owns is NaN, the tail of the last page included."""
    record_allocations(ops, monkeypatch)
    ids, mask = padded_batch()
    model = served("v3-yarn", ops)
    cache = DynamicCache()
    with torch.no_grad():
        first = model(ids, attention_mask=mask, past_key_values=cache).logits
        mask = torch.cat((mask, mask.new_ones(3, 1)), dim=1)
        second = model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits
    assert first.isfinite().all() and second.isfinite().all()
    lens = mask.sum(1)
    for layer in cache.layers:
        tokens = layer.kv_cache.view(3, -1, HEAD_SIZE)
        owned = torch.arange(tokens.shape[1]) < lens[:, None]
        assert tokens[owned].isfinite().all() and tokens[~owned].isnan().all()


@WITHOUT_SHAPE_CHECKS
def test_pages_grow_by_doubling(ops, monkeypatch):
    made = record_allocations(ops, monkeypatch)
    served("v3-yarn", ops).generate(torch.randint(1, VOCAB, (2, 5)), max_new_tokens=14, do_sample=False)
    widths = [2, 4, 8]  # blocks of 4 tokens a row: 5 tokens, then 9, 17
    assert [made[i].shape[0] for i in range(len(made))] == [2 * width for width in widths for _ in range(LAYERS)]


def test_a_failed_forward_leaves_the_cache_as_it_was(ops, monkeypatch):
    model = served("v3-yarn", ops)
    ids = torch.randint(1, VOCAB, (2, 9))
    fresh = DynamicCache(config=model.config)
    with torch.no_grad():
        cache = model(ids[:, :5]).past_key_values
        expected = model(ids[:, 5:], past_key_values=copy.deepcopy(cache)).logits
        attention = model.model.layers[1].self_attn.forward.attention
        with monkeypatch.context() as patch:
            patch.setattr(attention, "forward", lambda *args: (_ for _ in ()).throw(RuntimeError("planted")))
            for past, step in ((cache, ids[:, 5:] + 1), (fresh, ids)):
                with pytest.raises(RuntimeError, match="planted"):
                    model(step % VOCAB, past_key_values=past)
        assert cache.get_seq_length() == 5 and all(type(layer) is DynamicLayer for layer in fresh.layers)
        assert torch.equal(model(ids[:, 5:], past_key_values=cache).logits, expected)


def test_a_cache_made_in_inference_mode_is_used_outside(ops):
    model = served("v3-yarn", ops)
    ids = torch.randint(1, VOCAB, (1, 5))
    with torch.inference_mode():
        cache = model(ids).past_key_values
    with torch.no_grad():
        value = model(ids, past_key_values=cache).logits
        whole = model(ids.repeat(1, 2), use_cache=False).logits[:, 5:]
    assert torch.equal(value.argmax(-1), whole.argmax(-1))


# packed batches


def packed_step(ops, query_lens, seq_lens, table):
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    slots = ops.slot_mapping(starts, lens, table, BLOCK, int(starts[-1]))
    metadata = ops.build_mla_metadata(CommonAttentionMetadata.make(starts, lens, table, slots), BLOCK, 16)
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    return dict(position_ids=positions[None], use_cache=False, mla_metadata=metadata)


def test_packed_batch_against_each_request_alone(name, ops):
    model = served(name, ops)
    caches = [ops.allocate_kv_cache(16, BLOCK, HEAD_SIZE, torch.float32) for _ in range(LAYERS)]
    table = torch.randperm(16).to(torch.int32).view(4, 4)
    prompts = [torch.randint(1, VOCAB, (length,)) for length in (9, 14, 11, 6)]
    done = [0, 0, 0, 0]
    with torch.no_grad():
        for query_lens in ([8, 5, 3, 0], [1, 4, 0, 6], [0, 5, 8, 0]):  # prefills, then a decode beside chunked context
            pieces = [prompt[at : at + q] for prompt, at, q in zip(prompts, done, query_lens, strict=True)]
            done = [at + q for at, q in zip(done, query_lens, strict=True)]
            ends = torch.tensor(query_lens).cumsum(0) - 1
            live = [request for request, q in enumerate(query_lens) if q]
            logits = model(
                torch.cat(pieces)[None], mla_kv_caches=caches, logits_to_keep=ends[live],
                **packed_step(ops, query_lens, done, table),
            ).logits  # fmt: skip
            for row, request in enumerate(live):
                ids = prompts[request][None, : done[request]]
                gold = gold_model(name)(ids).logits[0, -1]
                low = further_off(STOCK[name](ids).logits[0, -1], eager_model(name)(ids).logits[0, -1], gold)
                result = compare(f"request {request}", logits[0, row], low, gold)
                assert result.passed, result


class LargestTensor(TorchDispatchMode):
    """The most elements of any result, as transformers' side of the model sees it."""

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


# nothing else changes


def attributes(model):
    return {path: {key: id(value) for key, value in vars(module).items()} for path, module in model.named_modules()}


@WITHOUT_SHAPE_CHECKS
def test_restore_leaves_the_model_as_it_was(model, ops):
    ids, mask = padded_batch()
    with torch.no_grad():
        model(ids, output_hidden_states=True)  # transformers installs its own hooks at the first such call
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
    use_mla(model, ops=ops)  # and again
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


# errors


def with_rope(**rope):
    config = copy.deepcopy(STOCK["v3-yarn"].config)
    config.rope_parameters = {**PLAIN, **rope}
    return config


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda model: llama(), {}, "model: expected DeepseekV2 or DeepseekV3 .* got LlamaForCausalLM"),
        (lambda model: torch.nn.Linear(2, 2), {}, "model: expected DeepseekV2 or DeepseekV3 .* got Linear"),
        (lambda model: model.train(), {}, "model: expected eval mode .* got training mode"),
        (lambda model: use_mla(model), {}, "model: expected one that is not under use_mla"),
        (lambda model: model, dict(block_size=0), "block_size: expected an int of at least 1, got 0"),
        (lambda model: model, dict(decode_threshold=0), "decode_threshold: expected an int of at least 1, got 0"),
        (lambda model: model, dict(workspace_tokens=63), "workspace_tokens: expected at least one block of 64, got 63"),
        (lambda model: model, dict(ops=math), "ops: expected a module that keeps the contract .* got math without"),
        (lambda model: model, dict(no_such_option=1), "no_such_option"),
        (lambda model: model, dict(ops=fast, backend="nosuch"), "^backend: expected one of cpu, .*, got nosuch$"),
        (lambda model: model, dict(ops=fast, backend={"mla": "cpu"}), "^backend: expected a mapping from .*, got mla$"),
    ],
)  # fmt: skip
def test_use_mla_refuses(model, ops, change, options, message, plain_errors):
    model = change(model)
    before = attributes(model)
    with pytest.raises((ValueError, TypeError), match=message):
        use_mla(model, **{"ops": ops, **options})
    assert attributes(model) == before


def test_a_layer_that_cannot_be_served_leaves_the_others_untouched(model, ops):
    model.model.layers[1].self_attn.config = with_rope(rope_type="linear", factor=2.0)
    before = attributes(model)
    with pytest.raises(UnsupportedConfiguration, match="rope type 'linear' is not implemented"):
        use_mla(model, ops=ops)
    assert attributes(model) == before


def test_a_replaced_forward_is_not_overwritten(model, ops):
    module = model.model.layers[1].self_attn
    module.forward = type(module).forward.__get__(module)
    with pytest.raises(ValueError, match="a DeepseekV3Attention whose forward was replaced"):
        use_mla(model, ops=ops)
    assert "forward" not in vars(model.model) and "forward" not in vars(model.model.layers[0].self_attn)


def test_restore_refuses_a_model_that_is_not_served(model):
    with pytest.raises(ValueError, match="model: expected one that is under use_mla, got one that is not"):
        restore(model)


def test_restore_does_not_remove_what_something_else_put(model, ops):
    module = use_mla(model, ops=ops).model.layers[1].self_attn
    ours, module.forward = module.forward, type(module).forward.__get__(module)
    before = attributes(model)
    with pytest.raises(ValueError, match="a DeepseekV3Attention with another since"):
        restore(model)
    assert attributes(model) == before
    module.forward = ours
    restore(model)


def static_cache(model):
    return StaticCache(config=model.config, max_cache_len=32)


def offloaded_cache(model):
    cache = DynamicCache()
    cache.offloading = True
    return cache


def filled_cache(model):
    with torch.no_grad():
        return STOCK["v3-yarn"](torch.ones(2, 3, dtype=torch.long), use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m: dict(past_key_values=static_cache(m)), "past_key_values: expected a DynamicCache, got StaticCache"),
        (lambda m: dict(past_key_values=object.__new__(QuantizedCache)), "a DynamicCache, got QuantizedCache"),
        (lambda m: dict(past_key_values=offloaded_cache(m)), "stays on its device, got one with offloading"),
        (lambda m: dict(past_key_values=filled_cache(m)), "expected an empty DynamicCache .* got 3 tokens"),
        (lambda m: dict(past_key_values=((), ())), "past_key_values: expected a DynamicCache, got tuple"),
        (lambda m: dict(attention_mask=torch.ones(2, 1, 6, 6)), r"attention_mask: expected a padding mask \[2, 6\]"),
        (lambda m: dict(attention_mask=torch.ones(2, 6, 6)), r"attention_mask: .* got shape \[2, 6, 6\]"),
        (lambda m: dict(attention_mask=torch.ones(2, 7)), r"attention_mask: .* got shape \[2, 7\]"),
        (lambda m: dict(attention_mask={"full_attention": None}), "attention_mask: .* got dict"),
        (lambda m: dict(position_ids=torch.ones(3, 6, dtype=torch.long)), "position_ids: expected shape"),
        (lambda m: dict(position_ids=torch.arange(6)[None] % 3, use_cache=False), "position_ids: .* mla_metadata"),
        (lambda m: dict(cu_seq_lens_q=torch.tensor([0, 12])), "a packed one with mla_metadata, got cu_seq_lens_q"),
        (lambda m: dict(output_attentions=True), "output_attentions: expected False"),
        (lambda m: dict(is_causal=False), "is_causal: expected True, got False"),
        (lambda m: dict(inputs_embeds=torch.ones(2, 6, 24)), "exactly one of input_ids and inputs_embeds"),
        (lambda m: dict(mla_metadata=1), "mla_metadata: expected the plan of ops.build_mla_metadata"),
        (lambda m: dict(mla_kv_caches=[]), "mla_metadata: expected .* beside mla_kv_caches, got NoneType"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_served(ops, arguments, message):
    model = served("v3-yarn", ops)
    kwargs = arguments(model)
    past = kwargs.get("past_key_values")
    layers = list(getattr(past, "layers", []))
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 6, dtype=torch.long), **kwargs)
    assert list(getattr(past, "layers", [])) == layers


def test_training_mode_is_refused_at_the_forward(ops):
    model = served("v3-yarn", ops)
    model.model.layers[1].self_attn.train()
    with pytest.raises(ValueError, match="model: expected eval mode"):
        model(torch.ones(1, 3, dtype=torch.long))


def test_a_layer_called_alone_is_refused(ops):
    model = served("v3-yarn", ops)
    with pytest.raises(ValueError, match="model: expected a call through the model"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, 24))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mla_kv_caches=None), "mla_kv_caches: expected a list of one cache a layer .*, got NoneType"),
        (dict(mla_kv_caches=[0]), "mla_kv_caches: expected one cache a layer, 2, got 1"),
        (dict(mla_kv_caches=[torch.zeros(2, BLOCK, s) for s in (HEAD_SIZE, 7)]), r"mla_kv_caches\[1\]: expected shape"),
        (dict(attention_mask=torch.ones(1, 6)), "attention_mask: expected None beside mla_metadata, got Tensor"),
        (dict(past_key_values=DynamicCache()), "past_key_values: expected None beside mla_metadata, got DynamicCache"),
        (dict(use_cache=True), "use_cache: expected False beside mla_metadata, got True"),
        (dict(input_ids=torch.ones(2, 3, dtype=torch.long)), r"input_ids: expected one packed row \[1, T\]"),
        (dict(position_ids=torch.zeros(1, 5, dtype=torch.long)), r"position_ids: .* \[1, 6\], got \[1, 5\]"),
    ],
)  # fmt: skip
def test_a_packed_batch_that_does_not_fit(ops, changes, message, plain_errors):
    model = served("v3-yarn", ops)
    caches = [torch.zeros(2, BLOCK, HEAD_SIZE) for _ in range(LAYERS)]
    step = packed_step(ops, [6], [6], torch.tensor([[0, 1]], dtype=torch.int32))
    call = dict(input_ids=torch.ones(1, 6, dtype=torch.long), mla_kv_caches=caches, **step)
    with pytest.raises(ValueError, match=message):
        model(**{**call, **changes})
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize(
    ("rows", "later_mask", "message"),
    [
        (3, None, "attention_mask: expected a padding mask .* for past_key_values holds padding, got None"),
        (3, lambda mask: torch.ones_like(mask), "attention_mask: expected the padding that past_key_values was filled"),
        (3, lambda mask: mask.flip(0), "attention_mask: expected the padding that past_key_values was filled"),
        (3, lambda mask: mask[:, -1:], "attention_mask: expected a padding mask"),
        (2, lambda mask: mask[:2], "input_ids: expected 3 rows as in past_key_values, got 2"),
    ],
)  # fmt: skip
def test_a_later_step_that_contradicts_the_cache(ops, rows, later_mask, message):
    ids, mask = padded_batch()
    model = served("v3-yarn", ops)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    pages = [layer.kv_cache.clone() for layer in cache.layers]
    longer = torch.cat((mask, mask.new_ones(3, 1)), dim=1)
    with pytest.raises(ValueError, match=message):
        model(ids[:rows, :1], attention_mask=later_mask and later_mask(longer), past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1]
    for layer, before in zip(cache.layers, pages, strict=True):
        assert torch.equal(layer.kv_cache.nan_to_num(nan=0.5), before.nan_to_num(nan=0.5))


def test_a_mask_that_hides_a_cached_token(ops):
    ids, _ = padded_batch()
    model = served("v3-yarn", ops)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    mask = torch.ones(3, 12)
    mask[1, 4] = 0
    with pytest.raises(ValueError, match="attention_mask: expected every cached token visible, got a hidden one"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)


def test_a_latent_cache_is_refused_elsewhere(ops):
    ids = torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad():
        cache = served("v3-yarn", ops)(ids, use_cache=True).past_key_values
        with pytest.raises(TypeError, match="past_key_values: expected a cache of this model"):
            STOCK["v3-yarn"](ids, past_key_values=cache)
        with pytest.raises(ValueError, match="past_key_values: expected blocks of 8 tokens, got 4"):
            served("v3-yarn", ops, block_size=8)(ids, past_key_values=cache)
    assert cache.get_seq_length() == 3


def test_generate_with_a_static_cache_is_refused(ops):
    with warnings.catch_warnings(), pytest.raises(ValueError, match="past_key_values: expected a DynamicCache"):
        warnings.simplefilter("ignore")
        served("v3-yarn", ops).generate(torch.ones(1, 3, dtype=torch.long), cache_implementation="static", **GREEDY)


def test_a_model_on_several_ranks(ops):
    """A packed batch gets the tokens of one rank; a padded one is refused, and so are weights that were moved since."""

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
                ValueError, match=r"^model \(q_\w+\): expected the weights that use_mla took this rank's"
            ):
                loop().run()
        return tokens

    assert ops.simulate(3, 1, program) == [program(None)] * 3

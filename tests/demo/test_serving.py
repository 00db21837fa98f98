"""Tests of the serving loop, which runs many requests in the same steps over one paged cache.

For each request, the loop must generate the tokens that transformers generates for this request alone. In these tests,
all unused memory of the caches is NaN, so that a wrong read changes the tokens.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reference
from fast.demo.blocks import BlockAllocator
from fast.demo.serving import ServingLoop
from reference.interfaces import PathCosts

transformers = pytest.importorskip("transformers", reason="the serving loop runs a transformers model")
from fast.integrations.transformers import restore, use_mla  # noqa: E402  (needs transformers)

ROOT = Path(__file__).resolve().parents[2]
PROMPT_LENGTHS = (3, 70, 1, 17, 33, 50, 16, 8)
NEW_TOKENS = 8
POISON = float("nan")


def tiny_model(num_layers: int = 2, max_positions: int = 256):
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=10,
        qk_rope_head_dim=4,
        v_head_dim=6,
        rope_interleave=True,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def greedy(model, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the tokens that stock transformers generates for one request."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def prompts():
    generator = random.Random(1)
    return [[generator.randrange(97) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def wanted(model, prompts):
    return [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture
def make_loop(model):
    """Return a function that makes a serving loop with caches full of NaN.

    The loop patches its model with `use_mla`. After the test, `restore` undoes the patch.
    """

    def make(ops, on=model, **options):
        use_mla(on, ops=ops)
        patched.append(on)
        defaults = dict(num_blocks=64, block_size=8, max_num_seqs=8, token_budget=64, workspace_tokens=64)
        loop = ServingLoop(on, ops.MLAConfig.from_hf(on.config), ops, **{**defaults, **options})
        for kv_cache in loop.kv_caches:
            kv_cache.fill_(POISON)
        return loop

    patched = []
    yield make
    for each in patched:
        restore(each)


def poison_unowned(loop: ServingLoop) -> None:
    """Write NaN to every slot that holds no cache entry of a running request."""
    for kv_cache in loop.kv_caches:
        kv_cache[loop.allocator.free_blocks] = POISON
        for request in loop.running:
            kept, offset = divmod(request.num_computed, loop.block_size)
            if offset:
                kv_cache[request.blocks[kept], offset:] = POISON


def check_books(loop: ServingLoop, report) -> None:
    """Assert after a step that each block belongs to one request or is free, and that the limits of the loop hold."""
    owned = [block for request in loop.requests for block in request.blocks]
    assert sorted(owned + loop.allocator.free_blocks) == list(range(loop.allocator.num_blocks))
    assert report is None or 0 < report.num_tokens <= loop.token_budget
    assert len(loop.running) <= loop.max_num_seqs
    for request in loop.requests:
        assert (request in loop.running) + (request in loop.waiting) + request.finished == 1
        held = request.num_computed if request in loop.running else 0
        assert len(request.blocks) == -(-held // loop.block_size)


def serve(loop: ServingLoop, prompts, new_tokens: int = NEW_TOKENS) -> tuple[list[list[int]], list]:
    """Serve all prompts, and write NaN to unowned slots after each step; return the tokens and the reports."""
    reports = []

    def on_step(report):
        reports.append(report)
        check_books(loop, report)
        poison_unowned(loop)

    for prompt in prompts:
        loop.add(prompt, new_tokens)
    requests = loop.run(on_step)
    assert loop.allocator.num_free == loop.allocator.num_blocks
    return [request.generated_ids for request in requests], reports


def test_mixed_batch_gives_transformers_tokens(make_loop, ops, prompts, wanted):
    tokens, reports = serve(make_loop(ops), prompts)
    assert tokens == wanted
    assert any(report.num_decodes and report.num_prefills for report in reports)


def test_chunked_prefill_with_tiny_budget_and_workspace(make_loop, ops, prompts, wanted):
    """Serve with a budget of 3 tokens a step and a workspace of one block -> the right tokens.

    With these sizes, a step has at most one prefill with context. This prefill expands its context in chunks of one
    block.
    """
    order = [5, 3, 0]
    loop = make_loop(ops, block_size=4, token_budget=3, max_num_seqs=3, workspace_tokens=4,
                     costs=PathCosts(absorbed_request=1e15))  # fmt: skip
    tokens, reports = serve(loop, [prompts[i] for i in order])
    assert tokens == [wanted[i] for i in order]
    assert max(report.num_context_chunks for report in reports) >= 11


def test_pieces_of_prompts_take_the_absorbed_path(make_loop, ops, prompts, wanted):
    """Serve with a budget of 5 tokens a step, so that a prompt needs many steps -> the right tokens.

    With a long context, the few new tokens of a step take the absorbed path (attention over the cached latents). With a
    short context, they take the expanded path, which needs chunks of the context.
    """
    order = [5, 3, 0]
    loop = make_loop(ops, block_size=4, token_budget=5, max_num_seqs=3, workspace_tokens=4)
    tokens, reports = serve(loop, [prompts[i] for i in order])
    assert tokens == [wanted[i] for i in order]
    assert max(report.num_context_chunks for report in reports) <= 3
    assert any(report.num_tokens > report.num_decodes + report.num_prefills for report in reports)


def test_every_decode_leads_the_batch(make_loop, ops, prompts, wanted):
    """Serve prompts -> a request with one pending token (a token that is not in the cache yet) runs as a decode.

    With at most 4 tokens in a step, prompts of 33 = 4 x 8 + 1 and 17 = 4 x 4 + 1 tokens have one token left at the end.
    """
    order = [4, 3, 5, 0]
    loop = make_loop(ops, block_size=4, token_budget=4, max_num_seqs=4, workspace_tokens=4)
    for i in order:
        loop.add(prompts[i], NEW_TOKENS)
    mixed = 0
    while loop.running or loop.waiting:
        one_left = sum(request.num_pending == 1 for request in loop.running)
        report = loop.step()
        assert report.num_decodes >= one_left
        mixed += report.num_prefills > 0 and report.num_decodes > 0
    assert mixed > 0
    assert [request.generated_ids for request in loop.requests] == [wanted[i] for i in order]


def test_preemption_recomputes_and_keeps_tokens(make_loop, ops, prompts, wanted):
    """Serve with too few blocks, so that the loop preempts requests and computes them again -> the right tokens.

    At first, the cache has enough blocks for four requests. While the requests decode, they need more blocks.
    """
    order = [4, 3, 6, 7, 0, 2]
    loop = make_loop(ops, num_blocks=11, max_num_seqs=4)
    tokens, reports = serve(loop, [prompts[i] for i in order])
    assert tokens == [wanted[i] for i in order]
    preempted = [request_id for report in reports for request_id in report.preempted]
    assert preempted and sum(request.num_preemptions for request in loop.requests) == len(preempted)
    assert 0 not in preempted, "the oldest request was preempted"


def test_block_order_changes_nothing(make_loop, ops, prompts, wanted):
    order = list(range(64))
    random.Random(7).shuffle(order)
    assert serve(make_loop(ops, block_order=order), prompts)[0] == wanted


def test_eos_retires_a_request(make_loop, ops, prompts, wanted):
    eos = wanted[1][4]
    loop = make_loop(ops, eos=eos)
    tokens, _ = serve(loop, prompts)
    assert tokens == [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in wanted]
    assert any(len(ids) < NEW_TOKENS for ids in tokens)


def test_resident_cache_is_exactly_the_tokens_rounded_up_to_blocks(make_loop, ops, prompts, model):
    loop = make_loop(ops)
    config, layers = loop.config, model.config.num_hidden_layers
    for prompt in prompts:
        loop.add(prompt, NEW_TOKENS)
    assert loop.cache_bytes_in_use == 0
    while loop.running or loop.waiting:
        loop.step()
        tokens = sum(-(-r.num_computed // loop.block_size) * loop.block_size for r in loop.running)
        entry = (config.kv_lora_rank + config.qk_rope_head_dim) * model.dtype.itemsize
        assert loop.cache_bytes_in_use == layers * entry * tokens
    allocated = sum(kv_cache.untyped_storage().nbytes() for kv_cache in loop.kv_caches)
    assert allocated == layers * entry * loop.allocator.num_blocks * loop.block_size


def test_a_step_that_raises_leaves_nothing_half_applied(make_loop, ops, prompts, wanted, model):
    """Let every third call of the model fail, after all layers have written the cache -> the right tokens.

    The loop can repeat a failed step. If no request was preempted, a failed step changes no request and no block.
    """
    prompts, wanted = prompts[:4], wanted[:4]
    loop = make_loop(ops, num_blocks=12, max_num_seqs=4, token_budget=24)
    calls = 0

    def fail(module, args):
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RuntimeError("planted")

    def books():
        per_request = [(r.num_computed, list(r.blocks), list(r.generated_ids)) for r in loop.requests]
        return per_request, list(loop.running), list(loop.waiting), sorted(loop.allocator.free_blocks)

    hook = model.lm_head.register_forward_pre_hook(fail)
    failures = 0
    try:
        for prompt in prompts:
            loop.add(prompt, NEW_TOKENS)
        while loop.running or loop.waiting:
            before = books()
            preemptions = sum(r.num_preemptions for r in loop.requests)
            try:
                loop.step()
            except RuntimeError as error:
                assert str(error) == "planted"
                failures += 1
                if sum(r.num_preemptions for r in loop.requests) == preemptions:
                    assert books() == before
            check_books(loop, None)
            poison_unowned(loop)
    finally:
        hook.remove()
    assert failures > 5
    assert [r.generated_ids for r in loop.requests] == wanted


def test_soak(make_loop, ops):
    """Serve 200 random requests, which arrive over time, with 24 blocks -> every request gets all its tokens.

    The tokens of a sample of the requests are compared with transformers. With `reference`, which is slower, there are
    40 requests.
    """
    count = 200 if ops.__name__ == "fast" else 40
    model = tiny_model(num_layers=1, max_positions=128)
    generator = random.Random(3)
    order = list(range(24))
    generator.shuffle(order)
    arrivals = [
        ([generator.randrange(97) for _ in range(generator.choice((1, 2, 3, 4, 5, 7, 8, 9, 13, 40)))],
         generator.randint(1, 8))
        for _ in range(count)
    ]  # fmt: skip
    sample = range(0, count, count // 10)
    expected = {i: greedy(model, *arrivals[i]) for i in sample}
    loop = make_loop(ops, on=model, num_blocks=24, block_size=4, max_num_seqs=10, token_budget=32, workspace_tokens=16,
                     block_order=order)  # fmt: skip
    pending, steps, preemptions = list(arrivals), 0, 0
    while pending or loop.running or loop.waiting:
        for _ in range(min(len(pending), generator.randint(0, 4) if loop.running or loop.waiting else 1)):
            loop.add(*pending.pop(0))
        report = loop.step()
        check_books(loop, report)
        poison_unowned(loop)
        preemptions += len(report.preempted)
        steps += 1
        assert steps < 5000, "the loop makes no progress"
    assert preemptions > 0
    assert loop.cache_bytes_in_use == 0
    assert all(len(r.generated_ids) == r.max_new_tokens for r in loop.requests)
    assert {i: loop.requests[i].generated_ids for i in sample} == expected


BAD_LOOPS = [
    (dict(num_blocks=0), "num_blocks: expected at least 1, got 0"),
    (dict(block_size=0), "block_size: expected at least 1, got 0"),
    (dict(max_num_seqs=0), "max_num_seqs: expected at least 1, got 0"),
    (dict(token_budget=7), "token_budget: expected at least max_num_seqs, 8, got 7"),
    (dict(workspace_tokens=7), "workspace_tokens: expected at least one unit of 8 tokens, got 7"),
    (dict(decode_threshold=0), "decode_threshold: expected at least 1, got 0"),
    (dict(block_order=[0] * 64), "block_order: expected a permutation of 64 blocks"),
]


@pytest.mark.parametrize("options, message", BAD_LOOPS)
def test_bad_options(make_loop, options, message):
    with pytest.raises(ValueError) as caught:
        make_loop(reference, **options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


BAD_REQUESTS = [
    ([], 4, "prompt_ids: expected at least one token, got an empty prompt"),
    ([1, 97], 4, "prompt_ids: expected tokens in [0, 97), got 1 to 97"),
    ([-1], 4, "prompt_ids: expected tokens in [0, 97), got -1 to -1"),
    ([1], 0, "max_new_tokens: expected at least 1, got 0"),
    ([1] * 60, 5, "prompt_ids: expected prompt + max_new_tokens of at most the cache's 64 tokens, got 60 + 5"),
]


@pytest.mark.parametrize("prompt, new_tokens, message", BAD_REQUESTS)
def test_bad_requests_change_nothing(make_loop, prompt, new_tokens, message):
    loop = make_loop(reference, num_blocks=8)
    with pytest.raises(ValueError) as caught:
        loop.add(prompt, new_tokens)
    assert str(caught.value) == message
    assert (loop.requests, list(loop.waiting), loop.running, loop.allocator.num_free) == ([], [], [], 8)


def test_a_prompt_longer_than_the_models_positions(make_loop):
    loop = make_loop(reference)
    with pytest.raises(ValueError) as caught:
        loop.add([1] * 250, 7)
    assert str(caught.value) == (
        "prompt_ids: expected prompt + max_new_tokens of at most the model's 256 positions, got 250 + 7"
    )
    loop.add([1] * 250, 6)


def test_a_request_may_fill_the_whole_cache(make_loop, ops, prompts, wanted):
    loop = make_loop(ops, num_blocks=10)
    assert serve(loop, [prompts[1]])[0] == [wanted[1]]


def test_allocator():
    allocator = BlockAllocator(5, order=[3, 1, 4, 0, 2])
    assert allocator.allocate(2) == [3, 1]
    for blocks, message in [
        ([4], "blocks: expected blocks that are in use, got block 4, which is free"),
        ([3, 3], "blocks: expected distinct blocks, got [3, 3]"),
        ([3, 5], "blocks: expected ids in [0, 5), got 5"),
    ]:
        with pytest.raises(ValueError) as caught:
            allocator.free(blocks)
        assert str(caught.value) == message
        assert sorted(allocator.free_blocks) == [0, 2, 4]
    with pytest.raises(ValueError, match="at most the 3 free blocks, got 4"):
        allocator.allocate(4)
    allocator.free([3])
    with pytest.raises(ValueError, match="block 3, which is free"):
        allocator.free([3])
    assert sorted(allocator.free_blocks) == [0, 2, 3, 4]


PEAK_MEMORY = """
import torch
import fast
import reference

HEADS, LATENT, NOPE, ROPE, VALUE, BLOCK, QUERY = 16, 32, 112, 16, 128, 16, 16
torch.manual_seed(0)
w_uk, w_uv = torch.randn(LATENT, HEADS, NOPE), torch.randn(LATENT, HEADS, VALUE)

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def prefill(ops, context, workspace_tokens):
    total = context + QUERY
    num_blocks = -(-total // BLOCK)
    kv_cache = ops.allocate_kv_cache(num_blocks, BLOCK, LATENT + ROPE, torch.float32).normal_()
    starts, lens = torch.tensor([0, QUERY], dtype=torch.int32), torch.tensor([total], dtype=torch.int32)
    table = torch.randperm(num_blocks).to(torch.int32)[None]
    slots = ops.slot_mapping(starts, lens, table, BLOCK, QUERY)
    common = ops.CommonAttentionMetadata.make(starts, lens, table, slots)
    metadata = ops.build_mla_metadata(common, BLOCK, workspace_tokens).prefill
    q = torch.randn(QUERY, HEADS, NOPE + ROPE)
    ops.forward_prefill(q, torch.randn(QUERY, LATENT), torch.randn(QUERY, ROPE), kv_cache, metadata, w_uk, w_uv, 0.1)
    return kv_cache.nbytes

with torch.inference_mode():
    for ops in (reference, fast, reference, fast):
        small = prefill(ops, 4096, 512)
    before = peak()
    growth = []
    for ops, workspace_tokens in ((reference, 512), (fast, 512), (fast, 32768)):
        large = prefill(ops, 32768, workspace_tokens)
        growth.append(peak() - before)
print(large - small, 512 * HEADS * (NOPE + ROPE + VALUE) * 4, *growth)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_of_a_chunked_prefill_does_not_grow_with_the_context():
    """Prefill with a context of 4096, then of 32768 tokens -> the peak memory grows only a little.

    The limit of the growth is the additional bytes of the larger cache, plus the bytes of two workspaces of expanded
    keys and values. As a control, another prefill expands the whole context at once (537 MB of keys and values). With
    this prefill, the peak memory grows by more than 10 x the limit.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PEAK_MEMORY]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    cache_growth, workspace, *growth, growth_when_whole = map(int, done.stdout.split())
    bound = cache_growth + 2 * workspace
    assert len(growth) == 2 and max(growth) <= bound
    assert growth_when_whole > 10 * bound


def test_an_idle_loop_steps_to_nothing(make_loop, ops):
    """Make a step without requests -> no error, and nothing changes."""
    loop = make_loop(ops, num_blocks=4)
    report = loop.step()
    assert (report.num_tokens, report.num_running, report.num_waiting) == (0, 0, 0)
    assert loop.run() == [] and loop.allocator.num_free == 4

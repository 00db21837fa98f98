"""Tests of the automatic choice of Hopper's attention over packed requests, and of its warm-up.

Only the last test needs a GPU. The other tests record launches.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fast
from fast.backends.own import HOPPER
from reference.interfaces import COMPUTE_FORMAT

from ....support.factories import LOW_RANK, make_batch, make_layer, make_weights
from ....support.format_caches import poisoned_cache
from ....support.triton_mode import ON_HOPPER
from ....test_compilation import attend, serve

pytest.importorskip("triton")
hopper_compilation = pytest.importorskip(
    "tests.kernels.hopper.mla_decode.test_hopper_compilation"
)  # skips interpreted kernels

from fast.kernels.compile_log import compiling_ahead  # noqa: E402
from fast.kernels.hopper.varlen import launch, select  # noqa: E402
from fast.kernels.prescribed_splits import prescribe_splits  # noqa: E402

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("without_shape_checks")
OP = "flash_attn_varlen"
DIMS = HOPPER.ops[OP].head_dims
# P, R and V: shared rope part; keys that the launcher joins; keys without rope
WIDTHS = {"shared rope": (64, 32, 64), "joined": (48, 16, 64), "no rope": (128, 0, 128)}
# New tokens and lengths of the requests of a step. On an H200, a layer with 4 heads divides these keys into splits: the
# context in steps 1 and 2, the new tokens in step 3, which has no context, and both in step 4.
LONG_STEPS = (([16], [4112]), ([3, 30], [5000, 8000]), ([2100], [2100]), ([2100], [6196]))
SPLIT_KERNELS = ("_varlen_kernel", "_combine_varlen_kernel")


def config_of(nope: int, rope: int, value: int):
    """Return a config with these widths, whose decodes the backend "hopper" serves."""
    return replace(
        LOW_RANK, num_heads=4, kv_lora_rank=256, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value
    )


@pytest.fixture
def launches(monkeypatch):
    """Let the backends "hopper" and "cpu" (with the kernels of "triton") serve CPU tensors; record their launches."""
    return hopper_compilation.record_all(monkeypatch)


def attention_kernels(found) -> set[str]:
    """Return the names of the recorded kernels for attention over packed requests."""
    return {key[0] for key in found} & {"_varlen_kernel", "_flash_attn_varlen_kernel"}


@pytest.mark.parametrize("width, value", list(itertools.product(DIMS["qk_head_dim"], DIMS["v_head_dim"])))
def test_declared_widths_are_served(width, value):
    """Whatever part of a key is rope, the launcher finds parts and tiles for every pair of declared widths."""
    for rope in range(width + 1):
        parts = select.parts_of(width - rope, rope)
        c = select.constants_of(parts, value)
        assert (width, value) == (c.FIRST + c.SECOND, c.VALUE)


def test_every_width_of_the_launcher_is_declared():
    assert (DIMS["qk_head_dim"], DIMS["v_head_dim"]) == (tuple(select.KEY_WIDTHS), select.VALUE_WIDTHS)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_warmup_specialises_for_every_step(widths, batch_invariant, launches):
    """Warm up -> steps launch no new variant, batch-invariant or not."""
    config = config_of(*WIDTHS[widths])
    fast.warmup(config, device="cpu", dtype=BF16, block_size=16, decode_threshold=2, batch_invariant=batch_invariant)
    ahead = set(launches)
    assert attention_kernels(ahead) == {"_varlen_kernel"}
    assert len([key for key in ahead if key[0] == "_varlen_kernel"]) >= 2  # without context, and with context
    serve(config, BF16, 2, batch_invariant)
    assert set(launches) == ahead


def test_warmup_for_an_output_in_e4m3(launches):
    """Warm up for an output in e4m3 -> also the variant for a float32 output without an LSE is launched."""
    config = config_of(*WIDTHS["shared rope"])
    fast.warmup(config, device="cpu", dtype=BF16, block_size=16, decode_threshold=2, fp8_output=True)
    ahead = set(launches)
    assert len([key for key in ahead if key[0] == "_varlen_kernel"]) >= 3
    serve(config, BF16, 2, output_scale=torch.tensor(0.5))
    assert not [key for key in set(launches) - ahead if key[0] == "_varlen_kernel"]


def split_variants(found) -> set[tuple]:
    """Return those of the recorded variants of the prefill that only calls with splits launch."""
    return {
        key
        for key in found
        if key[0] == "_combine_varlen_kernel" or (key[0] == "_varlen_kernel" and "SPLIT=True" in dict(key[1:])["c"])
    }


def serve_long(config, output_scale=None) -> None:
    """Run the layer, and with an `output_scale` only its attention, in all steps of `LONG_STEPS`."""
    layer = make_layer(fast, config, make_weights(config, BF16), BF16)
    for query_lens, seq_lens in LONG_STEPS:
        batch = make_batch(query_lens, seq_lens)
        cache = torch.zeros_like(poisoned_cache(batch.num_blocks, 16, config, COMPUTE_FORMAT, BF16))
        plan = fast.build_mla_metadata(batch.common, 16, 16384, 1, dtype=BF16)
        tokens = sum(query_lens)
        inputs = torch.randn(tokens, config.hidden_size).to(BF16), torch.arange(tokens), cache, plan
        layer(*inputs) if output_scale is None else attend(layer, output_scale, *inputs)


@pytest.mark.parametrize("fp8_output", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_warmup_specialises_for_splits(widths, fp8_output, launches, monkeypatch):
    """Warm up -> prefills with splits launch no new variant, and all variants for splits that warm-up launched.

    Warm-up compiles the combine kernel for an output in float32 with an LSE, and for a bfloat16 output without an LSE;
    for an output in e4m3 also for a float32 output without an LSE.
    """
    monkeypatch.setattr(launch, "device_facts", lambda _: hopper_compilation.H200)
    config = config_of(*WIDTHS[widths])
    fast.warmup(config, device="cpu", dtype=BF16, block_size=16, fp8_output=fp8_output)
    ahead = set(launches)
    launches.clear()
    serve_long(config)
    if fp8_output:
        serve_long(config, torch.tensor(0.5))
    assert not set(launches) - ahead
    assert split_variants(launches) == split_variants(ahead)
    counts = {name: sum(key[0] == name for key in split_variants(ahead)) for name in SPLIT_KERNELS}
    assert counts == {"_varlen_kernel": 1, "_combine_varlen_kernel": 3 if fp8_output else 2}


def test_prescribed_splits_end_with_their_context(launches):
    """Prescribe splits for a call -> the same call before and after launches the kernel without splits."""
    q, k, v = (torch.zeros(16, 4, 64, dtype=BF16) for _ in range(3))
    cu_seqlens = torch.tensor([0, 16], dtype=torch.int32)

    def call() -> int:
        """Return the number of variants with splits that the call launches."""
        launches.clear()
        fast.flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, 16, 16, 0.1, causal=True)
        assert attention_kernels(launches) == {"_varlen_kernel"}
        return len(split_variants(launches))

    assert [call(), call()] == [0, 0]
    with prescribe_splits(2):
        assert [call(), call()] == [2, 2]
    assert call() == 0


@pytest.mark.parametrize("value, batch_invariant, wanted", [
    (64, False, "hopper"), (64, True, "hopper"), (48, False, "cpu"), (48, True, "cpu"),
])  # fmt: skip
def test_steps_launch_the_chosen_kernel(value, batch_invariant, wanted, launches):
    """The builder names the backend of a step's prefills, and the layer launches its kernel."""
    config = config_of(64, 32, value)
    layer = make_layer(fast, config, make_weights(config, BF16), BF16)
    builder = fast.MLAMetadataBuilder(config, 16, 512, 8, workspace_tokens=256, batch_invariant=batch_invariant)
    batch = make_batch([40, 90], [40, 300])
    plan = builder.build(0, batch.common)
    assert plan.prefill.backend == wanted and plan.prefill.context_chunks
    cache = poisoned_cache(batch.num_blocks, 16, config, COMPUTE_FORMAT, BF16)
    layer(torch.randn(130, config.hidden_size).to(BF16), torch.arange(130), cache, plan)
    assert attention_kernels(launches) == {"_varlen_kernel" if wanted == "hopper" else "_flash_attn_varlen_kernel"}


def test_batch_invariant_steps_of_a_named_backend(launches):
    """A batch-invariant builder accepts the backend "hopper", and its plans ask for batch invariance."""
    config = config_of(64, 32, 64)
    options = dict(batch_invariant=True, dtype=BF16)
    for backend in ("hopper", {OP: "hopper"}, None):
        builder = fast.MLAMetadataBuilder(config, 16, 512, 8, **options, backend=backend)
        plan = builder.build(0, make_batch([40, 3], [40, 20]).common).prefill
        plans = [plan, *(part.plan for part in plan.parts)]
        assert len(plans) == 3 and all(each.backend == "hopper" and each.batch_invariant for each in plans)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_warmup_leaves_nothing_to_compile_of_long_contexts():
    """Warm up -> prefills with splits, over long contexts and of many new tokens, compile nothing."""
    config = config_of(128, 64, 128)
    over_context = select.BatchSizes(16, 4096, 1, config.num_heads, 16, 4096, causal=False)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert select.best_num_splits(over_context, 128, processors) > 1
    fast.warmup(config, dtype=BF16, block_size=16, fp8_output=True)
    with torch.device("cuda"), compiling_ahead() as compiled:
        serve_long(config)
        serve_long(config, torch.tensor(0.5))
    assert compiled == []

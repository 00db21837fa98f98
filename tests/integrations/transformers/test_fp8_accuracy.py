"""Tests of the accuracy over quantised caches: bits per byte of the shipped checkpoint, and errors of random models.

The bits per byte are the cross entropy of a model's predictions, in bits for each byte of the text. e4m3 has 3 bits
after the leading bit, so that a stored number has a relative error of up to 1/16. The format fp8_e4m3 stores the whole
entry in e4m3. The format fp8_ds_mla stores the latent in e4m3 and the rope part in bfloat16.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import fast
import reference
from reference.interfaces import FP8_DS_MLA, FP8_E4M3

transformers = pytest.importorskip("transformers")
from transformers.cache_utils import DynamicCache  # noqa: E402

from fast.demo.job import Job, encode  # noqa: E402
from fast.demo.predictions import bits_per_byte, compare_bits_per_byte  # noqa: E402
from fast.integrations.transformers import calibrate_model, restore, use_mla  # noqa: E402

from ...assets.test_checkpoint import ASSETS, CHECKPOINT, load  # noqa: E402
from ...benchmarks.fp8_loss import DRAWS, LATENT, ROPE, batches_of, random_errors, random_model  # noqa: E402
from ...support.stdlib_sample import BOS, windows  # noqa: E402
from ...support.transformers_models import WITHOUT_SHAPE_CHECKS  # noqa: E402

pytestmark = WITHOUT_SHAPE_CHECKS
MOST_BITS = 0.01  # largest relative increase of the bits per byte
CALIBRATED = 5  # number of prompts in the calibration


# bits per byte of the shipped checkpoint


def job_of(ops, prompts: list[str]) -> SimpleNamespace:
    """Return a job over fp8_e4m3 that has only the attributes that `predictions.bits_per_byte` reads."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    job = SimpleNamespace(
        model=load(), tokenizer=tokenizer, prompt_ids=[encode(tokenizer, text) for text in prompts],
        packages={"ops": ops}, device=torch.device("cpu"), cache_format=FP8_E4M3,
        fp8_mode="converted", context_parallel=None,
    )  # fmt: skip
    batches = [batch for ids in job.prompt_ids[:CALIBRATED] for batch in batches_of(torch.tensor([ids]))]
    job.kv_scales = calibrate_model(job.model, batches, fast, max_new_tokens=1)
    job.patch_options = lambda name: {"cache_format": job.cache_format, "kv_scales": job.kv_scales}
    job.options_to_read_the_cache = partial(Job.options_to_read_the_cache, job)
    job.install = partial(Job.install, job)
    return job


@pytest.mark.parametrize(("ops", "count"), [(fast, 5), (reference, 5)], ids=["fast", "reference"])
def test_bits_per_byte_where_every_key_is_stored(ops, count):
    """Decode shipped prompts over fp8_e4m3 -> at most 1 % more bits per byte than over a cache in the model's dtype.

    All tokens take the absorbed path, so that also the key of a new token is read from the cache. Over a cache in
    the model's dtype, the bits per byte must equal the bits that the test computes from the model without `use_mla`.
    """
    prompts = [path.read_text() for path in sorted((ASSETS / "prompts").glob("*.py.txt"))[:count]]
    job = job_of(ops, prompts)
    found = compare_bits_per_byte(job)
    assert found["increase"] <= MOST_BITS, found
    assert found["over_format"] != found["compute_dtype"], "the cache was not quantised"
    nats, predicted = 0.0, 0
    with torch.inference_mode():
        for ids in job.prompt_ids:
            logits = job.model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
            nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
            predicted += len(ids) - 1  # a token of this checkpoint is a byte
    assert found["compute_dtype"] == pytest.approx(nats / math.log(2) / predicted, rel=1e-4)


def test_bits_per_byte_in_steps_of_a_server():
    """Prefill windows of 1024 bytes in steps of 256 tokens over fp8_e4m3 -> at most 1 % more bits per byte.

    A server with a token budget of 256 runs such steps. Each step reads the tokens of earlier steps from the cache.
    """
    targets, model = windows()[::8], load()
    inputs = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=BOS)
    scales = calibrate_model(model, batches_of(inputs[:2]), fast, max_new_tokens=1)

    def bits(**options) -> float:
        cache, losses = DynamicCache(config=model.config), []
        use_mla(model, **options)
        with torch.inference_mode():
            for new, wanted in zip(inputs.split(256, 1), targets.split(256, 1), strict=True):
                logits = model(new, past_key_values=cache, use_cache=True).logits
                losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()))
        restore(model)
        return float(torch.stack(losses).double().mean()) / math.log(2)

    plain, stored = bits(), bits(cache_format="fp8_e4m3", kv_scales=scales)
    assert plain < stored <= (1 + MOST_BITS) * plain, (plain, stored)


def test_no_bits_without_a_byte():
    """Measure a prompt of one token -> None, because the model predicts nothing."""
    job = job_of(fast, [""])
    job.prompt_ids = [[BOS]]
    assert bits_per_byte(job, FP8_E4M3) is None and compare_bits_per_byte(job) is None


# random models with the dims of fp8_ds_mla


@pytest.mark.parametrize(("rope_size", "most"), [(1.0, 1.0), (8.0, 0.6)])
def test_error_of_fp8_ds_mla_against_fp8_e4m3(rope_size, most):
    """Run 12 random models over both formats -> the median of the ratio of their errors is at most `most`.

    If the rope keys are large, most of the error of fp8_e4m3 comes from them. The format fp8_ds_mla does not
    quantise rope keys.
    """
    errors = [random_errors(seed, rope_size)["float32"] for seed in range(DRAWS)]
    ratios = [each["fp8_ds_mla"] / each["fp8_e4m3"] for each in errors]
    assert statistics.median(ratios) <= most, sorted(ratios)


def test_rope_values_are_those_of_bfloat16(ops):
    """Write the same tokens to caches in fp8_ds_mla and in bfloat16 -> the rope parts have the same bits."""
    model, ids = random_model(0).to(torch.bfloat16), torch.randint(1, 61, (1, 40))
    caches = []
    for cache_format in ("fp8_ds_mla", "compute_dtype"):
        use_mla(model, ops, block_size=64, cache_format=cache_format)
        with torch.no_grad():
            past = model(ids, use_cache=True).past_key_values
        restore(model)
        caches.append(past.layers[0].kv_cache[0, : ids.shape[1]])  # the inputs of later layers differ
    stored, plain = caches
    rope = FP8_DS_MLA.layout(LATENT, ROPE).rope
    assert stored.dtype == torch.uint8 and stored.shape[1] == 656 and plain.shape[1] == LATENT + ROPE
    assert torch.equal(stored[:, rope:].contiguous().view(torch.bfloat16).view(torch.int16),
                       plain[:, LATENT:].contiguous().view(torch.int16))  # fmt: skip

"""Tests of the shipped checkpoint tiny-mla: size, dimensions, tokenizer, and bits per byte.

Bits per byte measure how well the model predicts text; fewer bits are better. The tests measure them with the attention
of transformers, of `reference` and of `fast` (`use_mla`).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

import fast
import reference

transformers = pytest.importorskip("transformers")
from fast.integrations.transformers import use_mla  # noqa: E402

from ..support.stdlib_sample import BOS, SAMPLE, windows  # noqa: E402

ASSETS = Path(fast.__file__).parent / "assets"
CHECKPOINT = ASSETS / "tiny-mla"


def load(dtype: torch.dtype = torch.float32, ops=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype, local_files_only=True).eval()
    return model if ops is None else use_mla(model, ops=ops)


@torch.inference_mode()
def nats(model, targets: torch.Tensor) -> torch.Tensor:
    """Return the negative log likelihood of every byte in nats; a sequence is a bos token and one window."""
    losses = []
    for batch in targets.split(4):
        logits = model(torch.nn.functional.pad(batch[:, :-1], (1, 0), value=BOS), use_cache=False).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="none"))
    return torch.cat(losses)


def bits_per_byte(losses: torch.Tensor) -> float:
    return losses.double().mean().item() / math.log(2)


@pytest.mark.parametrize("ops", [None, reference, fast], ids=["transformers", "reference", "fast"])
def test_bits_per_byte(ops):
    """Measure the bits per byte on two windows of each file -> at most 2, and equal to the number on the model card."""
    card = (CHECKPOINT / "README.md").read_text()
    count, figure = re.search(r"first two windows of each file \| 1024 \| (\d+) \| ([\d.]+) \|", card).groups()
    targets = windows(per_file=2)
    measured = bits_per_byte(nats(load(ops=ops), targets))
    assert targets.shape[0] == int(count)
    assert f"{measured:.4f}" == figure
    assert measured <= 2.0


def test_log_of_the_shipped_weights():
    """Read the training log of the shipped weights -> at most 2 bits per byte on files outside the training data.

    The files outside the training data are a tenth of all files, rounded up.
    """
    lines = (ASSETS / "train_tiny_mla.log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    held_out = [event for event in events if event["event"] == "held_out"]
    assert held_out and all(event["bits_per_byte"] <= 2.0 for event in held_out)
    assert {event["window"] for event in held_out} >= {1024}
    split = {event["part"]: event["files"] for event in events if event["event"] == "data"}
    assert split["held_out"] == -(-(split["train"] + split["held_out"]) // 10)


def test_size_and_dims():
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 8_000_000
    config = fast.MLAConfig.from_hf(transformers.AutoConfig.from_pretrained(CHECKPOINT, local_files_only=True))
    assert config.kv_lora_rank >= 64 and config.qk_rope_head_dim >= 16 and config.num_heads >= 8
    assert config.q_lora_rank is not None
    yarn = config.rope.yarn
    assert yarn is not None and yarn.mscale != yarn.mscale_all_dim  # if equal, YaRN would not scale cos and sin
    # the three dimensions differ, so that code that exchanges two of them fails
    assert len({config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim}) == 3


def test_tokenizer_round_trips_any_text():
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    for text in ("", "def f(x):\n\treturn 'ä€😀' <|bos|>\r\n", "".join(map(chr, range(1, 0x2FF)))):
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_licence_stands_beside_the_sample_and_the_prompts():
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (SAMPLE / "LICENSE").read_text().upper()
    for folder in (SAMPLE, ASSETS / "prompts"):
        notice = (folder / "NOTICE").read_text()
        assert "Python Software Foundation" in notice
    assert len(list((ASSETS / "prompts").glob("*.py.txt"))) == 8

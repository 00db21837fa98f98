"""Make the small model with grouped-query attention that ships in ``tiny-gqa/``.

The model is a ``Qwen3ForCausalLM`` with random weights and the byte-level tokenizer of ``tiny-mla/``. It is for tests
and demonstrations of attention: its text has no meaning. Every second layer has a window, so the layers form two groups
with a plan each.

    python make_tiny_gqa.py --out tiny-gqa
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

BOS, EOS, PAD, VOCAB_SIZE = 256, 257, 258, 264  # as in tiny-mla: 256 bytes and eight special tokens
HERE = Path(__file__).resolve().parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def model_config() -> Qwen3Config:
    """Return the config of the model: 4 query heads and 2 KV heads of 32 elements, with a window in every second layer.

    The window of 48 tokens is three blocks of 16 tokens.
    """
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        use_sliding_window=True,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


@torch.no_grad()
def random_model(seed: int) -> Qwen3ForCausalLM:
    """Return the model with random weights in bfloat16.

    Large output projections make the next token depend on attention. The special tokens have zero rows in the language
    model head: they get the score 0, so that greedy decoding does not generate them.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("o_proj.weight"):
            parameter.mul_(2.0)
    model.lm_head.weight[BOS:] = 0
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    return model.to(torch.bfloat16).eval()


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "tiny-gqa", help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    arguments = parser.parse_args()
    random_model(arguments.seed).save_pretrained(arguments.out)
    for name in TOKENIZER_FILES:
        shutil.copyfile(HERE / "tiny-mla" / name, arguments.out / name)


if __name__ == "__main__":
    main()

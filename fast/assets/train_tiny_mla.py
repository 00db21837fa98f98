"""Train the small Multi-head Latent Attention model that ships in ``tiny-mla/``.

A byte-level ``DeepseekV3ForCausalLM`` (all layers dense) learns the source of Python's standard library. The steps:

1. Sort the ``.py`` files by path and read their bytes. Hold out every tenth file; train on the other files.
2. Join the training files into one stream of tokens. Each file begins with bos and ends with eos.
3. Cut windows from the stream at random places. In half of the windows, replace the first token by bos, so that
   the model learns to start at any place of a file.
4. Train float32 weights with AdamW and bfloat16 autocast. The learning rate warms up, then falls to zero as a cosine.
5. Round the weights to bfloat16, save them in the format of transformers, load them as float32, and measure the model.

The metric is bits per byte. A file is cut into windows of 1024 bytes that do not overlap, and an incomplete window at
its end is dropped. Each window is a separate input behind one bos token, so the model predicts all 1024 bytes of the
window.

    python train_tiny_mla.py --steps 12000 --out tiny-mla --log train_tiny_mla.log.jsonl
    python train_tiny_mla.py --evaluate tiny-mla
    python train_tiny_mla.py --evaluate tiny-mla --files tests/data/stdlib_sample/*.py.txt
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = 256, 257, 258
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|pad|>"] + [f"<|reserved_{i}|>" for i in range(5)]
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
HERE = Path(__file__).resolve().parent


def model_config() -> DeepseekV3Config:
    """Return the config of the model.

    The three widths of a head (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) all differ, so that a test detects code
    that confuses two of them. No layer is a mixture of experts.
    """
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=608,
        num_hidden_layers=6,
        first_k_dense_replace=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        rope_interleave=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        initializer_range=0.04,
        tie_word_embeddings=False,
        moe_intermediate_size=8,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=0,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0..255 are the byte values; the special tokens have the ids from 256 on.

    ``encode`` adds no bos; the caller adds it. If a string contains the text of a special token, ``encode`` gives the
    bytes of this text (``split_special_tokens``).
    """
    # GPT-2's byte-level alphabet writes each byte as a printable character. A byte that is printable is written as
    # itself, and any other byte as a character whose code point is 256 or more.
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = iter(range(256, 512))
    vocab = {chr(byte) if byte in kept else chr(next(moved)): byte for byte in range(256)}
    if set(vocab) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError("the byte alphabet differs from the byte alphabet of the package tokenizers")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        pad_token=SPECIAL_TOKENS[2],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_max_length=4096,
    )


def split_stdlib(root: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Read the ``.py`` files under ``root``, and hold out every tenth file.

    Args:
        root: folder of a standard library.

    Returns:
        Two dicts from relative path to the bytes of a file: the training files, and the held-out files.

    Raises:
        FileNotFoundError: there are no ``.py`` files under ``root``.
    """
    paths = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.is_file() and not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    if not paths:
        raise FileNotFoundError("no .py files under the folder given with --stdlib")
    train: dict[str, bytes] = {}
    held_out: dict[str, bytes] = {}
    for index, path in enumerate(paths):
        (held_out if index % 10 == 0 else train)[path] = (root / path).read_bytes()
    return train, held_out


def token_stream(files: dict[str, bytes]) -> torch.Tensor:
    """Join files into one int16 vector of tokens: for each file bos, the bytes of the file, and eos."""
    parts = []
    for content in files.values():
        parts += [[BOS], np.frombuffer(content, dtype=np.uint8), [EOS]]
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int16) for part in parts]))


def draw_batch(
    stream: torch.Tensor, tokens: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut windows from the stream at random places; in half of the windows, replace the first token by bos.

    Args:
        stream: int16 ``[S]``, on the training device.
        tokens: number of tokens in a batch.
        length: length of a window in tokens.
        generator: random generator on the CPU, which gives the same windows for every training device.

    Returns:
        Inputs and targets, both int64 ``[tokens // length, length]``; a target is the token after the input.
    """
    rows = tokens // length
    starts = torch.randint(stream.numel() - length, (rows, 1), generator=generator).to(stream.device)
    windows = stream[starts + torch.arange(length + 1, device=stream.device)].long()
    windows[: rows // 2, 0] = BOS
    return windows[:, :-1], windows[:, 1:]


@torch.inference_mode()
def bits_per_byte(model: torch.nn.Module, contents: Sequence[bytes], window: int = 1024) -> dict[str, float | int]:
    """Return how many bits the model needs to predict one byte of some files.

    Each file is cut into windows that do not overlap, and an incomplete window at its end is dropped. Each window is a
    separate input behind one bos token.

    Args:
        model: causal language model over the ids of ``byte_tokenizer``.
        contents: bytes of each file.
        window: bytes in a window.

    Returns:
        A dict with ``bits_per_byte``, the number of ``windows`` and the number of predicted ``bytes``.

    Raises:
        ValueError: no file is as long as a window.
    """
    if all(len(content) < window for content in contents):
        raise ValueError(f"no file has {window} bytes or more")
    device = next(model.parameters()).device
    cut = [np.frombuffer(c, np.uint8)[: len(c) // window * window].reshape(-1, window) for c in contents]
    windows = torch.from_numpy(np.concatenate(cut).astype(np.int64))
    batch_tokens = 65536 if device.type == "cuda" else 8192
    nats = 0.0
    for targets in windows.split(max(1, batch_tokens // window)):
        targets = targets.to(device)
        inputs = F.pad(targets[:, :-1], (1, 0), value=BOS)
        logits = model(input_ids=inputs, use_cache=False).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        nats += losses.double().sum().item()
    return {
        "bits_per_byte": round(nats / math.log(2) / windows.numel(), 4),
        "windows": len(windows),
        "bytes": windows.numel(),
    }


@torch.inference_mode()
def greedy_continuation(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, prompt: str, count: int) -> str:
    """Return the greedy continuation of bos and ``prompt``, at most ``count`` tokens."""
    ids = torch.tensor([[BOS, *tokenizer.encode(prompt)]], device=model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Return the learning rate of a step: it rises linearly to ``peak``, then falls to zero as a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def load(folder: str, device: str) -> torch.nn.Module:
    """Load a saved model as float32, in eval mode."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(device).eval()


class Log:
    """Log of events: print each event as one line of JSON, and also write it to a file if a path is given."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        if self._path:
            self._path.write_text("")

    def __call__(self, event: str, **fields: object) -> None:
        """Log one event with its fields."""
        line = json.dumps({"event": event, **fields})
        print(line, flush=True)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                print(line, file=file)


def train(args: argparse.Namespace) -> None:
    """Train the model, save the rounded weights and the tokenizer, and measure the saved model."""
    log = Log(args.log)
    on_gpu = args.device.startswith("cuda")
    log(
        "run",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        hardware=torch.cuda.get_device_name() if on_gpu else platform.machine(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        stdlib_python=args.stdlib_python,
        **{k: getattr(args, k) for k in ("steps", "batch_tokens", "lengths", "lr", "warmup", "weight_decay", "seed")},
        compile=args.compile,
    )

    train_files, held_out = split_stdlib(Path(args.stdlib))
    for part, files in (("train", train_files), ("held_out", held_out)):
        digest = hashlib.sha256(b"".join(files.values())).hexdigest()
        log("data", part=part, files=len(files), bytes=sum(map(len, files.values())), sha256=digest)

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = DeepseekV3ForCausalLM._from_config(model_config(), attn_implementation="sdpa").to(args.device)
    log("model", parameters=sum(p.numel() for p in model.parameters()))
    stream = token_stream(train_files).to(args.device)

    # Compile each layer, not the whole model: a compiled model would build a causal mask that is not needed.
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=on_gpu,
    )

    probe = list(held_out.values())[::8]
    if all(len(content) < 4096 for content in probe):
        raise ValueError("the held-out files are too few or too short to measure")
    model.train()
    started = last_time = time.perf_counter()
    recent: list[torch.Tensor] = []
    for step in range(args.steps):
        rate = learning_rate(step, args.steps, args.lr, args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = args.lengths[step % len(args.lengths)]
        inputs, targets = draw_batch(stream, args.batch_tokens, length, generator)
        with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())

        done = step + 1
        if done % args.log_every == 0 or done == args.steps:
            bits = torch.stack(recent).mean().item() / math.log(2)
            now = time.perf_counter()
            speed = len(recent) * args.batch_tokens / (now - last_time)
            log(
                "step",
                step=done,
                train_bits_per_token=round(bits, 4),
                lr=round(rate, 6),
                tokens=done * args.batch_tokens,
                tokens_per_second=round(speed),
                seconds=round(now - started, 1),
            )
            recent, last_time = [], now
        if done % args.probe_every == 0 and done < args.steps:
            model.eval()
            with torch.compiler.set_stance("force_eager"):
                log("probe", step=done, part="every eighth held-out file", **bits_per_byte(model, probe))
            model.train()
            last_time = time.perf_counter()
        if args.seconds and time.perf_counter() - started > args.seconds:
            log("stopped", step=done, reason="the time limit was reached before the last step")
            break
    seconds = time.perf_counter() - started
    tokens = done * args.batch_tokens
    epochs = round(tokens / stream.numel(), 2)
    log("trained", steps=done, tokens=tokens, epochs=epochs, seconds=round(seconds, 1))

    model.to(torch.bfloat16).save_pretrained(args.out)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False).save_pretrained(args.out)
    byte_tokenizer().save_pretrained(args.out)

    model = load(args.out, args.device)
    for window in (1024, 4096):
        log("held_out", weights="bfloat16, loaded as float32", window=window,
            **bits_per_byte(model, list(held_out.values()), window))  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    for path in sorted(Path(args.prompts).glob("*.py.txt")):
        prompt = path.read_bytes().decode("utf-8")
        log("continuation", prompt=path.name, text=greedy_continuation(model, tokenizer, prompt, 160))


def evaluate(args: argparse.Namespace) -> None:
    """Print the bits per byte of a saved model, for ``--files`` or for the held-out files of ``--stdlib``."""
    if args.files:
        contents = [Path(path).read_bytes() for path in args.files]
    else:
        contents = list(split_stdlib(Path(args.stdlib))[1].values())
    print(json.dumps(bits_per_byte(load(args.evaluate, args.device), contents, args.window)))


def main() -> None:
    """Read the command line, then train or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", metavar="FOLDER", help="measure a saved model instead of training")
    parser.add_argument("--files", nargs="+", help="with --evaluate: measure on these files, not on held-out files")
    parser.add_argument("--window", type=int, default=1024, help="with --evaluate: bytes in a window (default 1024)")
    parser.add_argument("--stdlib", default=sysconfig.get_path("stdlib"), help="folder of the standard library")
    parser.add_argument("--stdlib-python", default=platform.python_version(), help="Python version of --stdlib")
    parser.add_argument("--out", default=str(HERE / "tiny-mla"), help="output folder (default: tiny-mla)")
    parser.add_argument("--log", help="file for the JSON lines")
    parser.add_argument("--prompts", default=str(HERE / "prompts"), help="folder of prompts to continue at the end")
    parser.add_argument("--steps", type=int, default=12000, help="steps until the learning rate is 0 (default 12000)")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds, even before --steps are done")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens in a step (default 65536)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 2048, 2048, 4096],
                        help="window lengths in tokens, one for each step; then the list starts again")  # fmt: skip
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 3e-3)")
    parser.add_argument("--warmup", type=int, default=300, help="warm-up steps (default 300)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="weight decay of matrices (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the data (default 0)")
    parser.add_argument("--log-every", type=int, default=100, help="steps between two lines of the log (default 100)")
    parser.add_argument("--probe-every", type=int, default=1000, help="steps between two probes (default 1000)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="device (default: a GPU if torch sees one)")  # fmt: skip
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(),
                        help="torch.compile the layers (default: on a GPU)")  # fmt: skip
    args = parser.parse_args()
    evaluate(args) if args.evaluate else train(args)


if __name__ == "__main__":
    main()

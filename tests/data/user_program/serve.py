"""Example of a user's program: decode, run a layer, and generate tokens with both packages, `fast` and `reference`.

CI runs this program with an installed wheel, and checks it with `mypy --strict`. Run it in a folder that does not
contain the packages, so that Python imports the installed packages. The program takes no options. If a file is missing
in the wheel, the program ends with an error.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import fast
import reference
from fast.backends import explain
from fast.demo.requests import Request
from fast.demo.serving import ServingLoop
from fast.integrations.transformers import restore, use_mla
from fast.parity import Parity, compare

BLOCK_SIZE = 16
CHECKPOINT = Path(fast.__file__).parent / "assets" / "tiny-mla"


def make_batch(query_lens: list[int], seq_lens: list[int], block_table: Tensor) -> fast.CommonAttentionMetadata:
    """Return the batch of a step from the query lengths and the sequence lengths of its requests."""
    return fast.CommonAttentionMetadata.from_lens(query_lens, seq_lens, block_table, BLOCK_SIZE)


def decode(dtype: torch.dtype, package: str) -> tuple[Tensor, Tensor]:
    """Decode one token of each of two requests over a paged cache, and return output and LSE."""
    torch.manual_seed(0)
    config = fast.MLAConfig.from_preset("deepseek-v2-lite")
    cache: Tensor = fast.allocate_kv_cache(4, BLOCK_SIZE, config.head_size, dtype).copy_(
        torch.randn(4, BLOCK_SIZE, config.head_size).to(torch.bfloat16)
    )
    block_table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    batch = make_batch([1, 1], [20, 31], block_table)
    plan: fast.MLAMetadata = fast.build_mla_metadata(batch, BLOCK_SIZE, workspace_tokens=32)
    ql_nope = torch.randn(2, 4, config.kv_lora_rank).to(torch.bfloat16).to(dtype)
    q_pe = torch.randn(2, 4, config.qk_rope_head_dim).to(torch.bfloat16).to(dtype)
    run = fast.mla_decode if package == "fast" else reference.mla_decode
    out, lse = run(ql_nope, q_pe, cache, plan.decode, config.softmax_scale)
    return out, lse


def check_decode() -> None:
    """Compare the decodes of both packages; end the program if the error of `fast` exceeds its budget.

    The budget is computed from the error of `reference` in float32 against `reference` in float64.
    """
    gold, low, ours = (
        decode(dtype, package)
        for dtype, package in ((torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "fast"))
    )
    names = ("out", "lse")
    found: list[Parity] = [compare(name, ours[i], low[i], gold[i]) for i, name in enumerate(names)]
    for parity in found:
        if not parity.passed:
            raise SystemExit(f"{parity.op}: failed with largest error {parity.max_error}, budget {parity.max_budget}")


def step_layer(attention: torch.nn.Module, ops_layer: type[fast.MLAAttention]) -> Tensor:
    """Run a prefill of 20 tokens, then a decode in a `DecodeGraph`; return the output of the decode."""
    layer = ops_layer.from_hf(attention)
    config: fast.MLAConfig = layer.config
    cache = fast.allocate_kv_cache(8, BLOCK_SIZE, config.head_size, torch.float32)
    builder = fast.MLAMetadataBuilder(config, BLOCK_SIZE, max_model_len=64, max_num_seqs=2)
    block_table = torch.tensor([[5, 1]], dtype=torch.int32)
    metadata = builder.build(0, make_batch([20], [20], block_table))
    layer(torch.randn(20, config.hidden_size), torch.arange(20), cache, metadata)

    def step(hidden_states: Tensor, positions: Tensor, plan: fast.MLAMetadata) -> Tensor:
        result: Tensor = layer(hidden_states, positions, cache, plan)
        return result

    graph = fast.DecodeGraph(
        step, builder, [1, 2], max_blocks=4, hidden_size=config.hidden_size, dtype=torch.float32, device="cpu"
    )
    return graph.run(torch.randn(1, config.hidden_size), torch.tensor([20]), make_batch([1], [21], block_table))


def generate(ops: ModuleType) -> list[int]:
    """Return the tokens that the serving loop generates with the shipped checkpoint and greedy sampling."""
    model = AutoModelForCausalLM.from_pretrained(str(CHECKPOINT), dtype=torch.float32)
    config = fast.MLAConfig.from_hf(model.config)
    use_mla(model, ops=ops, block_size=BLOCK_SIZE)
    loop = ServingLoop(
        model, config, ops, num_blocks=8, block_size=BLOCK_SIZE, max_num_seqs=2, token_budget=32, workspace_tokens=32
    )
    loop.add(list(range(1, 20)), 4)
    requests: list[Request] = loop.run()
    restore(model)
    return requests[0].generated_ids


def main() -> None:
    """Run all parts of the program and print one line."""
    versions: tuple[str, str] = (fast.__version__, reference.__version__)
    check_decode()
    model = AutoModelForCausalLM.from_pretrained(str(CHECKPOINT), dtype=torch.float32)
    rows = step_layer(model.model.layers[0].self_attn, fast.MLAAttention)
    config = fast.MLAConfig.from_hf(model.config)
    told: str = explain(config, device="cpu", dtype=torch.float32, block_size=BLOCK_SIZE)
    compiled: list[str] = fast.warmup(config, device="cpu", dtype=torch.float32, block_size=BLOCK_SIZE)
    programs: int = fast.decode_programs(config, device="cpu", dtype=torch.float32, block_size=BLOCK_SIZE)
    costs: fast.ScheduleCosts = fast.schedule_costs(config, device="cpu", dtype=torch.float32, block_size=BLOCK_SIZE)
    fast.plan_decode(torch.tensor([70, 9000], dtype=torch.int32), programs, costs)
    if generate(fast) != generate(reference):
        raise SystemExit("the packages generate different tokens")
    print(f"mla-twins {' '.join(versions)}: {tuple(rows.shape)}, {len(told.splitlines())} ops, "
          f"{len(compiled)} compiled, {programs} programs")  # fmt: skip


if __name__ == "__main__":
    main()

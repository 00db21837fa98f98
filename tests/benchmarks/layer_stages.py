"""Time one attention layer of DeepSeek-V3 and of DeepSeek-V2-Lite, and divide its time into stages.

    python -m tests.benchmarks.step --layer
    python -m tests.benchmarks.step --layer --peers .peers --json layer.json

A row is a layer with one batch: decodes, or prompts whose context is in the cache. `fast` and transformers run the same
weights on the same GPU, each in a CUDA graph. The graph of `fast` contains LAYERS_IN_A_GRAPH layers, each with its own
weights and cache, so that the L2 cache does not hold the weights of the next layer. Its time is divided by the number
of layers. The plan is made before the graph. transformers runs with `sdpa` attention, and its cache is filled before.

The long prefill has so many keys that nearly all of its time is attention and expansion. Its target is LEAST_PRODUCTS:
the least share of attention and of the expansion product, without the gather, in the times of the ops of
`forward_prefill`. The run prints this share and a verdict. transformers is not timed there.

Before the timing, the outputs of the first request are compared with the output of transformers in float64. Of the long
prefill, only the first outputs are compared. The budget is computed from the error of `reference` in the dtype of the
layer. A row of `fast` that exceeds its budget is an error.

Each stage of a layer has three times:

- fast: the sum of the times of the ops of the stage; each op is replayed alone.
- peers: the time of the best kernels of others. The projections and the output are the products of cuBLAS that `fast`
  calls too. `query_to_latent`, `latent_to_value` and the expansion are `torch.bmm` and `torch.mm`. Attention is the
  fastest kernel of the folder `--peers`; without this folder, the peers have no time. Stages that only move bytes take
  the time of a copy of as many bytes.
- floor: the larger of two times: the FLOPs of the stage at the rate of a large matrix product, and the least bytes of
  the stage at the bandwidth of a large read (stages that move bytes: a large copy). Both rates are measured in the
  same run.

"kernels" counts the kernels of one layer from the last projection to the output projection, both left out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

import fast
import reference
from fast.parity import Parity, compare
from reference.interfaces import MLAConfig, MLAMetadata, QueryLenSupport

from . import decode, prefill
from .command_line import CannotRun, one_line
from .kernel_times import Kernel, Marker, traced_steps
from .layer_work import MOVING, floor_us, work_of
from .layers import BLOCK_SIZE, Batch, dtype_for, make_batch, num_blocks, positions_of
from .recorded_ops import RecordedOp, record, time_ops
from .targets import judged
from .timing import Call, Ceilings, Clock, wall_times

STAGES = (
    "projections", "write", "query_to_latent", "expansion", "attention", "latent_to_value", "merge", "output",
)  # fmt: skip
MOST_KERNELS = 6  # target: most kernels between the projections of a decode
LONG = "long prefill"  # batch in which nearly all work is attention and expansion
LEAST_PRODUCTS = 0.9  # target: least share of attention and the expansion product in `forward_prefill` of LONG
PRODUCTS = ("::mm", "::bmm", "::addmm", "::matmul")  # how the names of matrix products end
# If the new tokens of a request times its keys are at most MOST_CHECKED_PAIRS, all its outputs are compared. Otherwise
# its first CHECKED_TOKENS outputs are compared, because attention in float64 stores every pair, and transformers is not
# timed.
MOST_CHECKED_PAIRS, CHECKED_TOKENS = 10_000_000, 64
LAYERS_IN_A_GRAPH = 8
RECORDED = {True: 8, False: 3}  # number of layers whose ops are recorded; True: the batch consists of decodes
TRACES = 3
MODELS = {"deepseek-v3": 3, "deepseek-v2-lite": 2}  # preset: generation of the classes of transformers
BATCHES = {
    "cuda": {
        "decode": Batch(64, 4096, 0, 0), "chunked prefill": Batch(0, 0, 2, 1024, 8192),
        LONG: Batch(0, 0, 1, 8192, 65536),
    },
    "cpu": {"decode": Batch(2, 20, 0, 0), "chunked prefill": Batch(0, 0, 2, 9, 70), LONG: Batch(0, 0, 1, 17, 150)},
}  # fmt: skip
TINY = {"hidden_size": 48, "num_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
MSCALE = {3: 1.0, 2: 0.707}  # `mscale` of the two models, by generation


def stages_of(names: Sequence[str]) -> list[str]:
    """Return the stage of each op of a layer; the ops are in the order in which the layer calls them.

    Raises:
        AssertionError: the layer has no fused write, or the last op is no matrix product.
    """
    write = next((place for place, name in enumerate(names) if "rope_norm_and_cache" in name), None)
    if write is None or not names[-1].endswith(("::mm", "::addmm")):
        raise AssertionError(f"expected a fused write and an output projection in a layer, got {', '.join(names)}")
    found, decoded = ["projections"] * write + ["write"], False
    absorbed = any("mla_decode" in name for name in names)
    for name in names[write + 1 : -1]:
        if "mla_decode" in name:
            decoded = True
            found.append("attention")
        elif "varlen" in name:
            found.append("attention")
        elif "merge" in name:
            found.append("merge")
        elif name == "aten::copy_":  # a prefill puts the rotated parts into its queries
            found.append("write")
        elif not absorbed:
            found.append("expansion")
        else:
            found.append("latent_to_value" if decoded else "query_to_latent")
    return [*found, "output"]


def product_share(ops: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of attention and the expansion product in the time of `forward_prefill`; None in a decode.

    The ops of `forward_prefill` lie between the fused write, with the copy of the rotated parts, and the output
    projection. The other ops of `forward_prefill` are gathers, merges and copies.

    Args:
        ops: ops of a layer in the order of their calls, with the names `op` and the times `median_us`.
    """
    names = [op["op"] for op in ops]
    first = names.index(next(name for name in names if "rope_norm_and_cache" in name)) + 1
    first += names[first] == "aten::copy_"
    inner = ops[first:-1]
    if not any("varlen" in op["op"] for op in inner):
        return None
    wanted = (op["median_us"] for op in inner if "varlen" in op["op"] or op["op"].endswith(PRODUCTS))
    return sum(wanted) / sum(op["median_us"] for op in inner)


def checked_tokens(batch: Batch) -> int:
    """Return the number of new tokens of the first request whose outputs are compared with transformers in float64."""
    queries = batch.query_lens[0]
    return queries if queries * batch.seq_lens[0] <= MOST_CHECKED_PAIRS else min(queries, CHECKED_TOKENS)


def kernels_between(ops: Sequence[RecordedOp], marker: Marker) -> list[str]:
    """Return the names of the kernels that the ops between the projections and the output launch on a GPU."""
    stages = stages_of([op.name for op in ops])
    inner = [op for op, stage in zip(ops, stages, strict=True) if stage not in ("projections", "output")]

    def run() -> None:
        for op in inner:
            op.call()

    steps: list[list[Kernel]] = traced_steps(run, TRACES, marker)
    return [kernel.name for kernel in steps[-1]]


class Rows(NamedTuple):
    """Requests of a batch as transformers takes them.

    Attributes:
        hidden_states: [B, q, H].
        positions: [B, q], position of each token.
        entries: [B, context, Lkv + R], the cached entries.
    """

    hidden_states: Tensor
    positions: Tensor
    entries: Tensor

    def first(self, tokens: int) -> Rows:
        """Return the first new tokens of the first request."""
        return Rows(self.hidden_states[:1, :tokens], self.positions[:1, :tokens], self.entries[:1])


class Stock:
    """Attention of transformers over a filled cache.

    Args:
        model: model of transformers; its first layer is run.
        rows: requests, in the dtype of the model.
    """

    def __init__(self, model: nn.Module, rows: Rows):
        from transformers import DynamicCache

        self.module, self.rows = model.layers[0].self_attn, rows
        config = model.config
        latent, rope = rows.entries[:, None].split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        if getattr(config, "rope_interleave", False):  # transformers stores the even elements first, then the odd ones
            rope = torch.cat((rope[..., 0::2], rope[..., 1::2]), dim=-1)
        if hasattr(self.module, "expand_kv"):  # this version caches latents
            self.keys, self.values = latent.contiguous(), rope.contiguous()
        else:
            self.keys, self.values = self._expanded(latent[:, 0], rope)
        self.cache = DynamicCache(config=config)
        self.cache.update(self.keys, self.values, 0)
        self.embeddings = model.rotary_emb(rows.hidden_states, position_ids=rows.positions)
        seen = torch.arange(rows.entries.shape[1] + rows.positions.shape[1], device=rows.positions.device)
        self.mask = None if rows.positions.shape[1] == 1 else (seen <= rows.positions[0][:, None])[None, None]

    def _expanded(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [B, N, context, P + R] and values [B, N, context, V]."""
        dims = [self.module.qk_nope_head_dim, self.module.v_head_dim]
        expanded = self.module.kv_b_proj(latent).unflatten(-1, (self.module.num_heads, sum(dims))).transpose(1, 2)
        nope, values = expanded.split(dims, dim=-1)
        return torch.cat((nope, rope.expand(-1, nope.shape[1], -1, -1)), dim=-1), values.contiguous()

    def __call__(self) -> Tensor:
        """Run the layer after the cached tokens, and return its output [B, q, H]."""
        layer = self.cache.layers[0]
        layer.keys, layer.values = self.keys, self.values  # forget the tokens of the last call
        return self.module(
            hidden_states=self.rows.hidden_states, position_embeddings=self.embeddings, attention_mask=self.mask,
            past_key_values=self.cache,
        )[0]  # fmt: skip


def make_model(preset: str, dims: Mapping[str, Any], layers: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Return a model of transformers with random weights; its MLPs have one unit."""
    import transformers

    generation = MODELS[preset]
    kind = f"DeepseekV{generation}"
    mscale = {"mscale": MSCALE[generation], "mscale_all_dim": MSCALE[generation]}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=8, num_hidden_layers=layers, first_k_dense_replace=layers, intermediate_size=1,
        num_attention_heads=dims["num_heads"], num_key_value_heads=dims["num_heads"], max_position_embeddings=163840,
        rope_parameters={**YARN, **mscale}, attn_implementation="sdpa",
        initializer_range=dims["hidden_size"] ** -0.5,
        **{name: size for name, size in dims.items() if name != "num_heads"},
    )  # fmt: skip
    with torch.device(device):
        model = getattr(transformers, f"{kind}Model")(config)
    rotation = model.rotary_emb  # its frequencies stay in float32
    model.rotary_emb = None
    model = model.to(dtype).eval()
    model.rotary_emb = rotation
    return model


@dataclass
class Layers:
    """Layers of `fast` with the weights of a model of transformers, and a batch that runs through them.

    Attributes:
        model: the model of transformers.
        layers: the layers of `fast`, which share the weights of the model.
        caches: cache of each layer.
        plan: plan of the batch.
        hidden_states: [T, H].
        positions: [T].
        block_table: [B, W].
        batch: the requests.
    """

    model: nn.Module
    layers: list[fast.MLAAttention]
    caches: list[Tensor]
    plan: MLAMetadata
    hidden_states: Tensor
    positions: Tensor
    block_table: Tensor
    batch: Batch

    @classmethod
    def make(cls, model: nn.Module, batch: Batch, backend: str | None) -> Layers:
        """Return the layers of a model with caches of random entries, and the plan of a batch."""
        layers = [fast.MLAAttention.from_hf(each.self_attn, backend=backend) for each in model.layers]
        weight, config = layers[0].o_proj.weight, layers[0].config
        kind = {"dtype": weight.dtype, "device": weight.device}
        common = make_batch(batch.query_lens, batch.seq_lens, weight.device.type)
        longest, requests = max(batch.seq_lens), len(batch.seq_lens)
        builder = fast.MLAMetadataBuilder(  # only requests with one new token take the absorbed path
            config, BLOCK_SIZE, longest, requests, QueryLenSupport.SINGLE_ONLY, dtype=weight.dtype, backend=backend
        )  # fmt: skip
        captured = batch.prompts == 0 and weight.device.type == "cuda"  # the plan that a `DecodeGraph` makes
        plan = builder.build_for_cudagraph_capture(common) if captured else builder.build(0, common)
        shape = num_blocks(batch.seq_lens), BLOCK_SIZE, config.head_size
        return cls(
            model, layers, [torch.randn(*shape, **kind) for _ in layers], plan,
            torch.randn(sum(batch.query_lens), config.hidden_size, **kind),
            positions_of(batch.query_lens, batch.seq_lens, weight.device.type), common.block_table, batch,
        )  # fmt: skip

    @property
    def config(self) -> MLAConfig:
        """Config of the layers."""
        return self.layers[0].config

    def run(self, number: int) -> Tensor:
        """Run layer `number` on the hidden states of the batch."""
        return self.layers[number](self.hidden_states, self.positions, self.caches[number], self.plan)

    def run_all(self) -> Tensor:
        """Run every layer on the same hidden states, and return the output of the last layer."""
        return [self.run(number) for number in range(len(self.layers))][-1]

    def rows(self) -> Rows:
        """Return the batch as transformers takes it; the cached entries are those of the first layer."""
        context = self.batch.seq_lens[0] - self.batch.query_lens[0]
        requests = len(self.batch.query_lens)
        entries = self.caches[0][self.block_table.long()].flatten(1, 2)[:, :context]
        return Rows(self.hidden_states.unflatten(0, (requests, -1)), self.positions.unflatten(0, (requests, -1)),
                    entries.clone())  # fmt: skip

    def reference_output(self) -> Tensor:
        """Return the output of `reference` in the dtype of the layer for the first `checked_tokens`, [q, H]."""
        queries = checked_tokens(self.batch)
        keys = self.batch.seq_lens[0] - self.batch.query_lens[0] + queries
        device, count = self.hidden_states.device, num_blocks([keys])
        common = make_batch([queries], [keys], device.type)
        cache = torch.empty_like(self.caches[0][:count])
        cache[common.block_table[0, :count].long()] = self.caches[0][self.block_table[0, :count].long()]
        builder = reference.MLAMetadataBuilder(
            self.config, BLOCK_SIZE, keys, 1, QueryLenSupport.SINGLE_ONLY, dtype=cache.dtype
        )  # fmt: skip
        plan = builder.build(0, common)
        layer = reference.MLAAttention.from_hf(self.model.layers[0].self_attn)
        return layer(self.hidden_states[:queries], self.positions[:queries], cache, plan)


def gold_output(layers: Layers) -> Tensor:
    """Return the output of transformers in float64 for the first `checked_tokens` of the first request, [q, H]."""
    model, rows = layers.model, layers.rows().first(checked_tokens(layers.batch))
    small = copy.copy(model)
    small._modules = {**model._modules, "layers": nn.ModuleList([copy.deepcopy(model.layers[0]).double()])}
    small.rotary_emb = copy.deepcopy(model.rotary_emb)
    wide = Rows(rows.hidden_states.double(), rows.positions, rows.entries.double())
    return Stock(small, wide)()[0]


def check_outputs(name: str, layers: Layers, stock: Stock | None) -> dict[str, Parity]:
    """Compare the outputs of `fast` and of transformers for the first `checked_tokens` with float64.

    Later tokens change no output of earlier tokens, so the other tokens of the request are left out of the comparison.

    Args:
        name: name of the row.
        layers: the layers and the batch.
        stock: attention of transformers; None leaves it out.

    Raises:
        RuntimeError: the error of `fast` exceeds its budget, or an element of its output is not finite.
    """
    queries, whole = checked_tokens(layers.batch), layers.run(0)
    if not bool(whole.isfinite().all()):
        raise RuntimeError(f"{name}: fast: an element of the output is not finite, so nothing was timed")
    outputs = {"fast": whole[:queries]} | ({} if stock is None else {"transformers": stock()[0, :queries]})
    gold, low = gold_output(layers), layers.reference_output()
    found = {who: compare(who, output, low, gold) for who, output in outputs.items()}
    if not found["fast"].passed:
        raise RuntimeError(f"{name}: {found['fast']}: the error exceeds the budget, so nothing was timed")
    return found


def fastest(clock: Clock | None, contenders: Mapping[str, Sequence[Call]]) -> tuple[str, float]:
    """Return the name and the time in microseconds of the fastest contender; replayed on a GPU, once on a CPU."""
    if clock is None:
        times = {who: wall_times(calls[0], 1).median_us for who, calls in contenders.items()}
    else:
        times = {who: spread.median_us for who, spread in clock.replayed(contenders).items()}
    if not times:
        raise CannotRun(f"no contender of {', '.join(contenders)} could be captured")
    best = min(times, key=lambda who: times[who])
    return best, times[best]


def products(clock: Clock | None, layers: Layers) -> dict[str, float]:
    """Return the times of the products of cuBLAS with parts of `kv_b_proj`, by stage, in microseconds."""
    c, x = layers.config, layers.hidden_states
    both = [layer.up_projections() for layer in layers.layers]  # [Lkv, N, P] and [Lkv, N, V]
    kind = {"dtype": x.dtype, "device": x.device}
    if layers.batch.prompts == 0:
        tokens = x.shape[0]
        q, latent = (torch.randn(c.num_heads, tokens, width, **kind) for width in (c.qk_nope_head_dim, c.kv_lora_rank))
        into = [partial(torch.bmm, q, w_uk.permute(1, 2, 0)) for w_uk, _ in both]
        back = [partial(torch.bmm, latent, w_uv.transpose(0, 1)) for _, w_uv in both]
        return {stage: fastest(clock, {"torch.bmm": calls})[1]
                for stage, calls in (("query_to_latent", into), ("latent_to_value", back))}  # fmt: skip
    weights = [layer.kv_b_proj.weight for layer in layers.layers]
    total = 0.0
    for keys in (layers.batch.prompts * layers.batch.context, x.shape[0]):
        latents = torch.randn(keys, c.kv_lora_rank, **kind)
        total += fastest(clock, {"torch.mm": [partial(torch.mm, latents, weight.T) for weight in weights]})[1]
    return {"expansion": total}


class PeerTime(NamedTuple):
    """The attention of the fastest peers.

    Attributes:
        who: names of the fastest peers; None if no peer can serve the batch.
        us: their time in microseconds.
        absent: peers that cannot serve the batch, with the reasons.
    """

    who: str | None
    us: float
    absent: dict[str, str]


def attention_of_peers(clock: Clock | None, layers: Layers, peers: ModuleType) -> PeerTime:
    """Time the attention of the peers. A prefill has two calls: the context without a mask, and the new tokens."""
    batch, heads, device = layers.batch, layers.config.num_heads, layers.hidden_states.device
    if batch.prompts == 0:
        row = decode.Row(batch.decodes, batch.keys, 1, heads)
        made = [decode.peer_contenders(row, decode.make_inputs(row, 2, device), peers)]
    else:
        shapes = [(batch.new_tokens, "causal"), *([(batch.context, "full")] if batch.context else [])]
        rows = [prefill.Row(batch.prompts, batch.new_tokens, keys, heads, mask) for keys, mask in shapes]
        made = [prefill.peer_contenders(row, prefill.make_inputs(row, device), peers) for row in rows]
    names, total, absent = [], 0.0, {}
    for contenders, reasons in made:
        absent |= reasons
        usable = {}
        for who, contender in contenders.items():
            try:
                contender.calls[0]()
            except Exception as error:  # a peer that cannot serve this batch is absent; the others are timed
                absent[who] = f"{type(error).__name__}: {one_line(error)}"
            else:
                usable[who] = contender.calls
        if not usable:
            return PeerTime(None, 0.0, absent)
        name, time = fastest(clock, usable)
        names.append(name)
        total += time
    return PeerTime(" and ".join(dict.fromkeys(names)), total, absent)


def measure(name: str, layers: Layers, clock: Clock | None, ceilings: Ceilings | None, peers: ModuleType | None):
    """Return the row of one layer with one batch: the times of each stage, and the times of the whole layer.

    Args:
        name: name of the layer, and of the batch.
        layers: the layers and the batch.
        clock: clock of the GPU; None on a CPU. A run on a CPU has no floors and counts no kernels.
        ceilings: measured rates of the GPU.
        peers: module of the folder of peers.
    """
    decodes, part = layers.batch.prompts == 0, checked_tokens(layers.batch) < layers.batch.query_lens[0]
    stock = None if part else Stock(layers.model, layers.rows())
    bodies = {"fast": layers.run_all} | ({} if stock is None else {"transformers": stock})
    parity = check_outputs(name, layers, stock)
    if clock is None:
        whole = {who: wall_times(body, 2) for who, body in (bodies | {"fast": lambda: layers.run(0)}).items()}
    else:
        counts = {"fast": len(layers.layers), "transformers": 1}
        whole = clock.captured(bodies, counts)
        if "fast" not in whole:
            raise CannotRun(f"the layer could not be captured: {clock.not_captured['fast']}")
    device = layers.hidden_states.device.type
    recorded = [record(partial(layers.run, number), device)
                for number in range(min(RECORDED[decodes], len(layers.layers)))]  # fmt: skip
    _, ops = time_ops(clock, [], recorded, 1)
    stages = stages_of([op["op"] for op in ops])
    work = work_of(layers.config, layers.batch, layers.hidden_states.element_size())
    if set(stages) != set(work):
        raise AssertionError(f"{name}: expected ops of the stages {sorted(work)}, got {sorted(set(stages))}")
    kernels = None if clock is None else kernels_between(recorded[0], Marker())
    del recorded
    cublas = products(clock, layers)
    best = PeerTime(None, 0.0, {}) if peers is None else attention_of_peers(clock, layers, peers)
    found: dict[str, dict[str, Any]] = {}
    for stage in (stage for stage in STAGES if stage in work):
        own = [op for op, each in zip(ops, stages, strict=True) if each == stage]
        times = {"fast_us": sum(op["median_us"] for op in own)}
        if stage in cublas:
            times["peers_us"] = cublas[stage]
            if stage == "expansion" and ceilings is not None:  # the gather reads and writes the cached entries
                gathered = layers.batch.prompts * layers.batch.context * layers.config.head_size
                times["peers_us"] += 2 * gathered * layers.hidden_states.element_size() / ceilings.copy_gb_s / 1e3
        elif stage in ("projections", "output"):
            times["peers_us"] = times["fast_us"]
        elif stage == "attention" and best.who is not None:
            times["peers_us"] = best.us
        if ceilings is not None:
            times["floor_us"] = floor_us(stage, work[stage], ceilings)
            if stage in MOVING:
                times["peers_us"] = times["floor_us"]
            times["share_of_floor"] = times["floor_us"] / times["fast_us"]
        found[stage] = {**times, **work[stage]._asdict()}
    left_out = {"transformers": "its attention stores every pair of a query and a key"} if part else {}
    return {
        "dims": asdict(layers.batch), "heads": layers.config.num_heads,
        "whole_us": {who: asdict(spread) for who, spread in whole.items()},
        "stages": found, "ops": ops, "attention_peer": best.who, "absent": best.absent | left_out,
        "product_share": product_share(ops), "kernels": kernels,
        "parity": {who: {**asdict(each), "passed": each.passed} for who, each in parity.items()},
        "not_captured": dict(clock.not_captured) if clock is not None else {},
    }  # fmt: skip


def total_us(row: Mapping[str, Any], who: str) -> float | None:
    """Return the sum of the times of all stages for "fast", "peers" or "floor"; None if a stage has no such time."""
    times = [stage.get(f"{who}_us") for stage in row["stages"].values()]
    return None if None in times else sum(times)


def draw(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of all rows, in microseconds."""
    table = Table(title="One attention layer, in us")
    for column in ("layer", "batch", "", *STAGES, "sum", "whole", "kernels"):
        table.add_column(column, justify="left" if column in ("layer", "batch", "") else "right", no_wrap=True)

    def cell(value: float | None, text: str = "{:.1f}") -> str:
        return "" if value is None else text.format(value)

    for row in rows:
        for who in ("fast", "peers", "floor", "share", "transformers"):
            key = "share_of_floor" if who == "share" else f"{who}_us"
            text = "{:.0%}" if who == "share" else "{:.1f}"
            times = [cell(row["stages"].get(stage, {}).get(key), text) for stage in STAGES]
            whole = row["whole_us"].get(who, {}).get("median_us")
            names = [row["layer"], row["batch"]] if who == "fast" else ["", ""]
            total = total_us(row, who) if who in ("fast", "peers", "floor") else None
            count = cell(len(row["kernels"]), "{}") if who == "fast" and row["kernels"] is not None else ""
            table.add_row(*names, who, *times, cell(total), cell(whole), count, end_section=who == "transformers")
    return table


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdicts on MOST_KERNELS and LEAST_PRODUCTS of a run on a GPU; "text" has a verdict in words."""
    found = []
    for row in rows:
        if row["kernels"] is not None and row["batch"] == "decode":
            count, met = len(row["kernels"]), len(row["kernels"]) <= MOST_KERNELS
            text = f"{row['layer']}, decode: {count} kernels between the projections, at most {MOST_KERNELS}: "
            found.append({"layer": row["layer"], "kernels": count, "at_most": MOST_KERNELS, "met": met,
                          "text": text + ("met" if met else "missed")})  # fmt: skip
        if row["kernels"] is not None and row["batch"] == LONG:
            what = f"{row['layer']}, {LONG}, N {row['heads']}: share of attention and the expansion product"
            found.append(judged(what, row["product_share"], least=LEAST_PRODUCTS, layer=row["layer"]))
    return found


def dims_of(preset: str, device: str, heads: int | None) -> dict[str, Any]:
    """Return the dims of a preset; on a CPU they are tiny."""
    dims = dict(fast.PRESETS[preset])
    if device == "cpu":
        dims |= TINY | ({} if dims["q_lora_rank"] is None else {"q_lora_rank": 24})
    return dims if heads is None else dims | {"num_heads": heads}


def time_layers(
    device: str, backend: str | None, heads: int | None, clock: Clock | None, ceilings: Ceilings | None,
    peers: ModuleType | None, count: int = LAYERS_IN_A_GRAPH,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of all layers and batches.

    Args:
        device: "cuda" or "cpu".
        backend: backend of `fast`.
        heads: number of heads; None takes the number of the preset.
        clock: clock of the GPU; None on a CPU.
        ceilings: measured rates of the GPU; None on a CPU.
        peers: module of the folder of peers.
        count: number of layers in the graph of `fast`.
    """
    rows: list[dict[str, Any]] = []
    for preset in MODELS:
        model = make_model(preset, dims_of(preset, device, heads), count, dtype_for(device), device)
        for batch_name, batch in BATCHES[device].items():
            layers = Layers.make(model, batch, backend)
            row = measure(f"{preset}, {batch_name}", layers, clock, ceilings, peers)
            rows.append({"layer": preset, "batch": batch_name, **row})
            del layers
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows

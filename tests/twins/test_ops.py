"""Tests of the ops that `fast` registers with torch.library: schemas, fake implementations, `torch.compile`.

A fake implementation computes only shapes, dtypes and strides of the results, for tracing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

import fast
from fast.backends import decode_request, select
from fast.backends.kernel_request import GQA_OPS
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import CACHE_FORMATS, COMPUTE_FORMAT, CONVERTED, E4M3, QueryLenSupport

from ..support.factories import DIRECT, integers, make_batch, make_cache, make_entries, new_cache, offsets

# the ops of grouped-query attention alone have their samples in test_gqa_ops
OPS = sorted(name for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("mla_twins::") and not name.removesuffix("_out").endswith(GQA_OPS))  # fmt: skip


def backend_here(dtype: torch.dtype) -> str:
    """Return the name of the backend that serves decodes of the config DIRECT on the default device."""
    return decode_backend(dtype, DIRECT.kv_lora_rank, DIRECT.qk_rope_head_dim)


def decode_backend(dtype: torch.dtype, latent: int, rope: int, block_size: int = 16) -> str:
    """Return the name of the backend that serves decodes over entries of the given widths on the default device."""
    device = torch.get_default_device()
    return select(decode_request(device, dtype, latent, rope, block_size, QueryLenSupport.VARLEN)).name


def decode_samples(
    dtype: torch.dtype,
    latent: int,
    rope: int,
    heads: int,
    block_size: int = 16,
    seq_lens: Sequence[int] = (20, 33, 0),
    out_dtype: torch.dtype | None = None,
    in_e4m3: bool = False,
    fp8_mode: str = CONVERTED,
    programs: int = 4,
) -> list[tuple]:
    """Return the arguments of four decodes: with or without a schedule, and batch-invariant or not.

    There are at most three requests. The schedules have `programs` programs. With `in_e4m3`, the cache has the format
    `fp8_e4m3`. With another `fp8_mode` than `converted`, the queries are in e4m3 too.
    """
    batch = make_batch([1, 2, 0][: len(seq_lens)], seq_lens, block_size)
    cache, stored, kv_scale = new_cache(batch, latent + rope, dtype).nan_to_num(0), COMPUTE_FORMAT, None
    if in_e4m3:
        stored, kv_scale = CACHE_FORMATS["fp8_e4m3"], torch.tensor(0.5)
        entries = cache.flatten(0, 1)
        codes = fast.quantize_entries(entries[:, :latent], entries[:, latent:], stored, kv_scale)
        cache = codes.view(cache.shape)
    plan = fast.build_mla_metadata(batch.common, block_size, 4096, 2).decode
    costs = measured_schedule_costs(heads)
    schedule, own = (fast.plan_decode(plan.seq_lens, programs, costs, own) for own in (False, True))
    ql, q_pe = (torch.randn(batch.num_tokens, heads, width).to(dtype) for width in (latent, rope))
    q_scale = None
    if fp8_mode != CONVERTED:
        ql, q_pe, q_scale = ql.to(E4M3), q_pe.to(E4M3), torch.rand(heads) + 1
    return [
        (ql, q_pe, cache, plan.block_table, plan.seq_lens, plan.query_start_loc, plan.visible_lens, 2, max(seq_lens),
         0.3, out_dtype or dtype, *plan_of, list(costs.split_rule.numbers), stored.name, kv_scale,
         fp8_mode, q_scale, [], *ranks, decode_backend(dtype, latent, rope, block_size))
        for plan_of, ranks in (
            ((None, None, False), (None, [])),
            ((schedule.tile_ranges, schedule.split_offsets, False), (None, [])),
            ((None, None, True), (plan.seq_lens + 1, [2, 0, 1])),  # as under context parallelism with two ranks
            ((own.tile_ranges, own.split_offsets, True), (None, [])),
        )
    ]  # fmt: skip


def samples(dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Return arguments of every op.

    Unused cache entries are 0 and not NaN, because opcheck treats two NaN as different values.
    """
    batch = make_batch([1, 2, 0], [20, 33, 0])
    entries = make_entries(batch, DIRECT.head_size, dtype)
    cache = make_cache(batch, entries, DIRECT.head_size, dtype).nan_to_num(0)
    decodes = decode_samples(dtype, DIRECT.kv_lora_rank, DIRECT.qk_rope_head_dim, 3)
    if decode_backend(dtype, 256, 32) != backend_here(dtype):  # another backend serves these widths
        decodes += decode_samples(dtype, 256, 32, 3) + decode_samples(dtype, 256, 32, 40)
        decodes += decode_samples(dtype, 256, 32, 3, in_e4m3=True)
    eighths = fast.quantize_entries(
        cache.flatten(0, 1)[:, :24], cache.flatten(0, 1)[:, 24:], CACHE_FORMATS["fp8_e4m3"], torch.tensor(0.5)
    ).view(cache.shape)
    in_tiles = torch.zeros(*cache.shape[:2], 656, dtype=torch.uint8)
    caches = (cache, "compute_dtype", None), (eighths, "fp8_e4m3", torch.tensor(0.5))
    if backend_here(dtype) == "cpu":
        decodes += [
            (*(query.to(E4M3) for query in decodes[0][:2]), eighths, *decodes[0][3:15], "fp8_e4m3", torch.tensor(0.5),
             mode, torch.rand(3) + 1, [], None, [], "cpu")
            for mode in ("fp8_query", "fp8_product")
        ]  # fmt: skip
    table, cu, starts = batch.common.block_table, offsets([20, 17, 0]), integers(0, 16, 0)

    def rand(*shape):
        return torch.randn(*shape).to(dtype)

    lse = torch.float64 if dtype == torch.float64 else torch.float32
    backend = backend_here(dtype)
    advanced = [
        (torch.tensor([5, 6, 7]).to(ids), torch.arange(4).to(ids), torch.arange(4), integers(20, 33, 0),
         integers(0, 1, 3, 4), torch.arange(4), torch.arange(12).view(3, 4).int(), 16, ownership, 64, backend)
        for ids, ownership in ((torch.int64, [1, 0, 1]), (torch.int32, [2, 1, 8]))
    ]  # fmt: skip
    decodes += [
        (*given[:2], stored, *given[3:15], cache_format, kv_scale, "converted", None, [], None, [], backend)
        for given, stored, cache_format, kv_scale in (
            *((each, eighths, "fp8_e4m3", torch.tensor(0.5)) for each in decodes[:4]),
            (decode_samples(dtype, 512, 64, 3)[0], in_tiles, "fp8_ds_mla", None),
        )
    ]
    offsets_and_settings = (offsets([4, 2]), offsets([5, 2]), 4, 5, 0.3, True, False)
    attention = (*offsets_and_settings, dtype, backend)
    products = [
        (rand(6, 3, 8), weight, weight_scale, output_scale, backend)
        for weight, weight_scale in ((rand(3, 8, 5), None), (rand(3, 8, 5).to(E4M3), torch.rand(3) + 1))
        for output_scale in (None, torch.tensor(0.5))
    ]
    states = (rand(6, 3, 5), torch.randn(3, 6, dtype=lse), rand(6, 3, 5), torch.randn(3, 6, dtype=lse))
    return {
        "mla_twins::advance_step": advanced,
        "mla_twins::apply_rope": [
            (torch.arange(6), rand(6, 3, 8), rand(6, 8), torch.rand(4, dtype=lse), 1.3, pairs, scale, backend)
            for pairs in (True, False) for scale in (None, torch.rand(3) + 1)
        ],
        "mla_twins::compute_visible_lens": [
            (offsets([1, 2, 0]), integers(20, 33, 0), 5, *owned, backend) for owned in ((1, 0, 1), (3, 1, 4))
        ],
        "mla_twins::zero_padding_tokens": [(rand(6, 3, 10), offsets([2, 1]), backend)],
        "mla_twins::concat_and_cache_mla": [
            (rand(3, 24), rand(3, 8), held, batch.common.slot_mapping, *stored, backend) for held, *stored in caches
        ] + [(rand(3, 512), rand(3, 64), in_tiles, batch.common.slot_mapping, "fp8_ds_mla", None, backend)],
        "mla_twins::rope_norm_and_cache": [
            (torch.arange(3), rand(3, 3, 8), rand(3, 24), rand(3, 8), held, batch.common.slot_mapping, rand(24), 1e-5,
             torch.rand(4, dtype=lse), 1.3, pairs, *stored, scale, backend)
            for pairs in (True, False) for held, *stored in caches
            for scale in (None, *[torch.rand(3) + 1] * (held.dtype == E4M3))
        ] + [
            (torch.arange(3), rand(3, 3, 64), rand(3, 512), rand(3, 64), in_tiles, batch.common.slot_mapping, rand(512),
             1e-5, torch.rand(32, dtype=lse), 1.3, True, "fp8_ds_mla", None, None, backend)
        ],
        "mla_twins::quantize_entries": [
            (rand(5, 24), rand(5, 8), DIRECT.head_size, held.dtype, *stored, backend) for held, *stored in caches
        ] + [(rand(5, 512), rand(5, 64), 656, torch.uint8, "fp8_ds_mla", None, backend)],
        "mla_twins::dequantize_entries": [
            (held.view(-1, DIRECT.head_size), DIRECT.head_size, out_dtype, *stored, backend)
            for held, *stored in caches for out_dtype in (dtype, torch.float32)
        ] + [(torch.zeros(5, 656, dtype=torch.uint8), 576, dtype, "fp8_ds_mla", None, backend)],
        "mla_twins::dequantize_entries_out": [
            (held.view(-1, DIRECT.head_size), *stored, torch.zeros(held.shape[:2].numel(), DIRECT.head_size).to(dtype),
             backend) for held, *stored in caches
        ] + [(torch.zeros(5, 656, dtype=torch.uint8), "fp8_ds_mla", None, torch.zeros(5, 576, dtype=dtype), backend)],
        "mla_twins::gather_cache": [
            (held, table, cu, starts, 37, DIRECT.head_size, out_dtype, *stored, backend)
            for held, *stored in caches for out_dtype in (dtype, torch.float32)
        ] + [
            (eighths, table, cu, starts, 37, DIRECT.head_size, torch.float8_e4m3fn, "fp8_e4m3", None, backend),
            (in_tiles, table, cu, starts, 37, 576, dtype, "fp8_ds_mla", None, backend),
            (in_tiles, table, cu, starts, 37, 656, torch.uint8, "fp8_ds_mla", None, backend),
        ],
        "mla_twins::gather_cache_out": [
            (held, table, cu, starts, *stored, gathered.to(out_dtype, copy=True), backend)
            for gathered in (rand(37, DIRECT.head_size),) for out_dtype in (dtype, torch.float32)
            for held, *stored in caches
        ] + [(in_tiles, table, cu, starts, "fp8_ds_mla", None, rand(37, 576), backend)],
        "mla_twins::copy_blocks": [([rand(4, 2, 3), rand(4, 2, 3)], torch.tensor([[0, 1], [2, 3]]), backend)],
        "mla_twins::swap_blocks": [(rand(4, 2, 3), rand(5, 2, 3), torch.tensor([[0, 4], [2, 3]]), backend)],
        "mla_twins::flash_attn_varlen": [
            (rand(6, 3, 8), rand(7, 3, 8), None, rand(7, 3, 5), *attention),
            (rand(6, 3, 8), rand(7, 3, 6), rand(7, 2), rand(7, 3, 5), *offsets_and_settings[:-1], True, dtype, backend),
        ],
        "mla_twins::flash_attn_varlen_out": [
            (rand(6, 3, 8), rand(7, 3, 6), rand(7, 2), rand(7, 3, 5), *offsets_and_settings,
             rand(6, 3, 5).to(out_dtype), stored, backend)
            for out_dtype in (dtype, torch.float32) for stored in (None, torch.zeros(3, 6, dtype=lse))
        ],
        "mla_twins::merge_attn_states": [(*states, backend)],
        "mla_twins::merge_attn_states_out": [
            (*states, scale, torch.zeros(6, 3, 5).to(out_dtype), torch.zeros(3, 6, dtype=lse), backend)
            for out_dtype, scale in ((dtype, None), (torch.float32, None), (E4M3, torch.tensor(0.5)))
        ],
        "mla_twins::bmm_out": [(rand(3, 4, 5), rand(3, 5, 2), rand(3, 4, 2), rows) for rows in (0, 3)],
        "mla_twins::multiply_heads": products,
        "mla_twins::multiply_heads_out": [
            (*given[:-1], torch.zeros(6, 3, 5).to(given[0].dtype if given[3] is None else E4M3), backend)
            for given in products
        ],
        "mla_twins::mla_decode": decodes,
        "mla_twins::mla_decode_out": [
            (*given[:-1], torch.zeros(given[0].shape, dtype=given[10]), given[-1]) for given in decodes
        ],
        # 8 tokens and 2 heads, so that messages have no padding bytes; padding bytes would stay unwritten
        "mla_twins::pack_attn_state": [(rand(8, 4, 5), torch.randn(4, 8, dtype=lse), 2, backend)],
        "mla_twins::merge_packed_attn_states": [
            (fast.distributed.merge._pack_attn_state(rand(3, 4, 5), torch.randn(4, 3, dtype=lse), 2, backend), 3, 2, 5,
             dtype, backend)
        ],
        "mla_twins::weight_attn_out": [(rand(3, 4, 5), torch.randn(2, 4, 3, dtype=lse), 1, backend)],
        "mla_twins::reorg_kvcache": [
            (rand(2, 20, 32), offsets([20, 0, 17]), torch.tensor([[0, 10, 10, 19], [0, 10, 10, 18]]).int(), 2,
             rand(37, 32), backend)
        ],
        "mla_twins::plan_decode": [
            (integers(20, 0, 3000), 4, 5, 1, 8, [4, 32, 16, 128], batch_invariant, backend)
            for batch_invariant in (False, True)
        ],
    }  # fmt: skip


def test_every_op_has_a_sample():
    assert sorted(samples(torch.float32)) == OPS


def overload(name: str):
    return getattr(torch.ops.mla_twins, name.split("::")[1]).default


def check_op(name: str, arguments: tuple) -> None:
    """Run `torch.library.opcheck` on one call of an op, if no tensor is in e4m3.

    opcheck compares tensors with operations that PyTorch lacks for 8-bit floats.
    """
    if all(getattr(argument, "dtype", None) != E4M3 for argument in arguments) and "fp8_e4m3" not in arguments:
        torch.library.opcheck(overload(name), arguments)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    """Run opcheck on an op -> no error in its schema, its fake implementation and its tracing."""
    for arguments in samples(torch.float32)[name]:
        check_op(name, arguments)


def padded(x: torch.Tensor) -> torch.Tensor:
    """Return the values of x as a view of rows that are twice as wide."""
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return the values of x, stored head by head."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def is_data(x) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 1 and x.is_floating_point()


LAYOUTS = {"contiguous": lambda x: x, "padded": padded, "transposed": transposed}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_fake_results(name, layout, dtype):
    """Call an op with real and with fake tensors of several layouts -> the same shapes, dtypes and strides."""
    for arguments in samples(dtype)[name]:
        arguments = tree_map(lambda x: layout(x) if is_data(x) else x, arguments)
        real = overload(name)(*arguments)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = overload(name)(*tree_map(
                lambda x: mode.from_tensor(x, static_shapes=True) if torch.is_tensor(x) else x, arguments))  # fmt: skip
        for r, f in zip(tree_leaves(real), tree_leaves(fake), strict=True):
            if isinstance(r, torch.Tensor):
                assert (r.dtype, r.device, r.stride()) == (f.dtype, f.device, f.stride())
                assert all(isinstance(size, int) for size in f.shape)  # no size depends on the data
                assert f.shape == r.shape


COMPILE = """
import sys
import torch
import fast
if sys.argv[1] != "cpu":  # under a default device, torch.compile takes a third more time to trace a layer
    torch.set_default_device(sys.argv[1])
from tests.support.factories import CONFIGS, make_batch, make_cache, make_entries, make_layer, make_weights

torch.manual_seed(0)
config = CONFIGS["low-rank"]
weights = make_weights(config, torch.float32)
name = fast.backends.select(fast.backends.KernelRequest("apply_rope", torch.get_default_device(), torch.float32)).name
bound = {"mla_decode": name, "flash_attn_varlen": name}
for query_lens, tail, backend in (
    ([1, 1, 1], [], None), ([1, 1, 1, 6], [6], name), ([1, 1, 1, 6], [6], bound), ([1, 1, 1, 6, 4], [6, 44], None)
):
    torch._dynamo.reset()
    layer = make_layer(fast, config, weights, torch.float32, backend=backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for step, seq_lens in enumerate(([20, 33, 1], [21, 34, 2], [48, 50, 17], [49, 51, 18])):
        torch._dynamo.config.error_on_recompile = step > 1  # at the second step max_seq_len becomes a symbol
        batch = make_batch(query_lens, seq_lens + tail)
        entries = make_entries(batch, config.head_size, torch.float32)
        held = make_cache(batch, entries, config.head_size, torch.float32, new_tokens=False)
        table = torch.full((len(query_lens), 9), 2147480000, dtype=torch.int32)
        table[:, : batch.common.block_table.shape[1]] = batch.common.block_table
        common = fast.CommonAttentionMetadata.make(
            batch.common.query_start_loc_cpu, batch.common.seq_lens_cpu, table, batch.common.slot_mapping
        )
        cache = torch.full((24, *held.shape[1:]), torch.nan)
        cache[: len(held)] = held
        plan = fast.build_mla_metadata(common, 16, 64)
        hidden, positions = torch.randn(batch.num_tokens, config.hidden_size), torch.arange(batch.num_tokens)
        caches = [cache.clone(), cache.clone()]
        with torch.no_grad():
            wanted = layer(hidden, positions, caches[0], plan)
            got = compiled(hidden, positions, caches[1], plan)
        assert wanted.isfinite().all() and wanted.abs().max() > 0.01
        assert torch.equal(got, wanted)
        assert torch.equal(caches[0].nan_to_num(7), caches[1].nan_to_num(7))
print("compiled")
"""


def test_compile_fullgraph():
    """Compile a layer with `fullgraph=True` -> the bits of eager mode, in steps of decodes and in mixed steps.

    While sequences grow, the layer is recompiled once: `max_seq_len` is a constant in the first graph and a symbol in
    the second graph. The test runs in its own process, because the run-time shape checks of the tests cannot be traced.
    """
    command = [sys.executable, "-c", COMPILE, str(torch.get_default_device())]
    root = Path(fast.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("compiled\n"), done.stderr

"""Tables for `python -m tests.mutants`: the tests that judge the mutants of each file, and the subject of each file.

A mutant is a source file with one planted fault. The judge of a mutant is a set of tests. At least one of these tests
should fail on the mutant. The results file counts the mutants of each subject.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Judge:
    """The tests that judge the mutants of a file.

    Attributes:
        modules: test modules in `tests`, without suffix.
        selection: expression for `pytest -k` that selects tests of the modules; "" selects all tests.
    """

    modules: tuple[str, ...]
    selection: str = ""

    @property
    def command(self) -> list[str]:
        """The arguments with which pytest runs the tests of the judge."""
        paths = [f"tests/{module}.py" for module in self.modules]
        return [*paths, *(["-k", self.selection] if self.selection else [])]


BATCH = Judge(("planning/test_batch", "interfaces/test_limits", "mla/test_builder", "interfaces/test_bad_input"))
SCHEDULE = Judge(("planning/test_schedule", "interfaces/test_limits", "mla/test_builder", "interfaces/test_bad_input"))
CHUNKS = Judge(("mla/test_chunk_runs", *SCHEDULE.modules))
PATH = Judge(("mla/test_choose_path", "interfaces/test_limits", "mla/test_builder", "interfaces/test_bad_input"))
CASCADE = Judge(
    ("mla/test_cascade", "mla/test_fp8_mode_of_a_layer", "interfaces/test_limits", "interfaces/test_bad_input"),
    "not test_fp8_mode_of_a_layer or test_cascade_is_a_decode",
)
BUILDER = Judge(
    (
        "mla/test_builder",
        "mla/test_fp8_mode_of_plans",
        "planning/test_schedule_choice",
        "interfaces/test_limits",
        "mla/test_cascade",
        "planning/test_graphs",
        "planning/test_rank_slots",
        "mla/test_context_parallel_plans",
        "mla/test_context_parallel_refusals",
        "interfaces/test_bad_input",
    ),
    "not test_context_parallel_refusals or test_plans",
)
# The selection leaves out the tests that take the most time: of whole layers, of serving loops over many ranks, and of
# Triton kernels, which judge no file here.
CONTEXT_PARALLEL = Judge(
    (
        "planning/test_rank_slots",
        "mla/test_context_parallel_plans",
        "mla/test_context_gather",
        "distributed/test_merge_over_ranks",
        "mla/test_context_parallel",
        "mla/test_fp8_mode_of_a_layer",
        "distributed/test_simulation",
        "mla/test_context_parallel_refusals",
        "interfaces/test_limits",
        "kernels/cpu/test_cpu_pieces",
        "interfaces/test_bad_input",
    ),
    "not (ranks_are_one or serving or 64_ranks or other_layers or fewer_ranks or test_fp8_mode_of_a_layer"
    " or in_the_interpreter) or exchanged_queries or refuse_before",
)
PADDING_TOKENS = Judge(("mla/test_padding_tokens",))
VISIBLE_LENS = Judge(("planning/test_visible_lens", "planning/test_mixed_graphs"), "not in_the_interpreter")
SLOT_MAPPING = Judge((*BATCH.modules, "planning/test_rank_slots"))
OWNERSHIP = Judge(
    ("interfaces/test_interfaces", "planning/test_schedule", "planning/test_visible_lens", *CONTEXT_PARALLEL.modules),
    CONTEXT_PARALLEL.selection,
)
SCHEDULE_CHOICE = Judge(("planning/test_schedule_choice", "planning/test_schedule", "interfaces/test_limits"))
SIZES = Judge(
    (
        "planning/test_schedule_choice",
        "planning/test_schedule",
        "mla/test_workspaces",
        "interfaces/test_interfaces",
        "mla/test_builder",
    )
)
SLOTS = Judge(("interfaces/test_from_lens", "planning/test_batch", "interfaces/test_limits"))
ADVANCE = Judge(("planning/test_advance",))
CAPTURED = Judge(("interfaces/test_builders", "planning/test_graphs", "mla/test_builder", "mla/test_fp8_mode_of_plans"))
GRAPHS = Judge(
    ("planning/test_graphs", "mla/test_fp8_mode_of_plans", "mla/test_block_sizes", "interfaces/test_bad_input")
)
KERNELS = Judge(
    (
        "kernels/cpu/test_cpu_pieces",
        "cache/test_cache",
        "attention/test_rope",
        "twins/test_differential",
        "identities/test_identities",
        "interfaces/test_bad_input",
    ),
    "not (preset or any_cut or chunked_is_whole or same_bits_again)",
)
# Of the tests of whole grids of dtypes, configs and layouts, the selections keep few tests, because all take too long.
_SOME_ATTENTION = (
    "not (test_features or test_grid or test_packed or small_tiles or batch_invariance or test_queries_in_e4m3"
    " or test_nan_stays or test_the_budget) or (test_packed[ and float64 and (them or grouped or encoder))"
    " or test_features[grouped-torch.float64-compute or (test_features and them-torch.float64-fp8)"
    " or test_nan_stays_in_its_request[all"
)
GQA_KERNELS = Judge(("gqa/test_fast_attention",), _SOME_ATTENTION)
GQA_CACHE_KERNELS = Judge(("gqa/test_fast_cache",))
SOFTMAX = Judge(
    ("kernels/cpu/test_cpu_pieces", "identities/test_identities", "gqa/test_fast_attention"),
    f"({KERNELS.selection}) and ({_SOME_ATTENTION}) and not test_layer"
    " and (not test_fast_attention or test_features or test_packed or test_empty)",
)
GQA_CONFIG = Judge(("interfaces/gqa/test_gqa_config", "interfaces/gqa/test_gqa_groups"))
GQA_GROUPS = Judge(("interfaces/gqa/test_gqa_groups",))
GQA_CACHE = Judge(("interfaces/gqa/test_gqa_cache_shapes",))
GQA_SCALES = Judge(
    ("interfaces/gqa/test_gqa_scales", "gqa/test_reference_layer"),
    "test_gqa_scales or scales or calibration or checkpoint or queries_in_e4m3",
)
GQA_FROM_HF = Judge(("interfaces/gqa/test_gqa_from_hf", "interfaces/gqa/test_gqa_from_hf_refusals"))
GQA_STEP = Judge(("interfaces/gqa/test_gqa_step_arguments", "gqa/test_layer_keys"))
GQA_ARGUMENTS = Judge(
    ("interfaces/gqa/test_gqa_config", "gqa/test_reference_attention"),
    "test_gqa_config or bad or refuse or rows_without_keys or freed_blocks",
)


def gqa_judges(package: str) -> dict[str, Judge]:
    """Return the judges of the files of `reference.gqa` or `fast.gqa`, which leave out the tests of the other package.

    The selections also leave out most tests of whole layers and of many lengths, because these tests take the most
    time.
    """
    other = "[fast" if package == "reference" else "[reference"
    plans = Judge(
        (
            "gqa/test_gqa_builder",
            "gqa/test_gqa_cascade_choice",
            "gqa/test_gqa_local_attention",
            "gqa/test_gqa_graphs",
        ),
        f"not ({other} or test_runs or test_replays or test_layer[ or test_prefill_in_steps or graphs_of_ranks"
        " or (captured_plans_of_chunks and not them))",
    )
    attention = Judge(
        ("gqa/test_reference_attention", "identities/test_gqa_identities"),
        f"not ({other} or test_dtypes or test_inputs or any_lengths or test_encoder[ or test_chunked or test_prefill_is"
        " or test_paged_is or (test_stored_formats and not (NHD and them)) or (test_masked_softmax[ and not them))",
    )
    step = (
        "test_outputs_in_place[True or test_step[ or test_steps or test_step_over or test_output_scale or compile"
        " or test_ranks_are_one_rank"
    )
    layer = Judge(
        ("gqa/test_reference_layer", "gqa/test_layer_keys", *(("gqa/test_fast_layer",) if package == "fast" else ())),
        f"not ({other} or (({step}) and not test_step[{package}-all))",
    )
    ranks = Judge(
        ("gqa/test_gqa_context_parallel",),
        f"not ({other} or test_ranks_equal or processes or test_decode_graphs or test_fp8_caches)",
    )
    judges = {
        "attention": attention, "builder": plans, "captured": plans, "cascade": attention, "choose_cascade": plans,
        "context_parallel": ranks, "layer": layer, "metadata": plans,
    }  # fmt: skip
    if package == "fast":
        few = "not (values_are_checked_once or (test_a_missing_feature and compute_dtype))"
        judges["backend_choice"] = Judge(("gqa/test_layer_backends",), few)
        judges["checked_plans"] = Judge(("gqa/test_layer_backends",), "values")
        judges["schedule_programs"] = Judge(("gqa/test_schedule_programs",))
    return {f"{package}/gqa/{module}.py": judge for module, judge in judges.items()}


GQA_PLANS = gqa_judges("reference")["reference/gqa/metadata.py"]
ADAPTER = Judge(
    (
        "integrations/transformers/test_adapter_bounds",
        "integrations/transformers/test_transformers_generate",
        "integrations/transformers/test_transformers",
        "integrations/transformers/test_transformers_cache",
        "integrations/transformers/test_transformers_restore",
        "integrations/transformers/test_transformers_errors",
    ),
    "not (pieces or assisted or continues_from or sampling or beams or yarn-greedy or half or v2-yarn or wrong_rope)",
)
ADAPTER_FORMATS = Judge(
    (
        "integrations/transformers/test_cache_formats",
        "integrations/transformers/test_fp8_modes_of_models",
        *ADAPTER.modules,
    ),
    f"{ADAPTER.selection} or test_cache_formats or test_fp8_modes_of_models",
)
PRODUCTS = Judge(("mla/test_quantized_weights", "mla/test_fp8_weights_of_a_layer"))
TABLE = {
    **gqa_judges("reference"), **gqa_judges("fast"),
    **{f"reference/interfaces/gqa/{module}.py": judge for module, judge in {
        "alibi": GQA_FROM_HF, "arguments": GQA_ARGUMENTS, "attention_type": GQA_STEP, "cache": GQA_CACHE,
        "config": GQA_CONFIG, "dims": GQA_CONFIG, "encoder_decoder": GQA_FROM_HF, "groups": GQA_GROUPS,
        "hf_config": GQA_FROM_HF, "hf_refusals": GQA_FROM_HF,
        "layer_arguments": Judge(("gqa/test_reference_layer",), "refuse"),
        "metadata": GQA_PLANS, "plan_arguments": GQA_PLANS,
        "rank_config": gqa_judges("reference")["reference/gqa/context_parallel.py"],
        "scales": GQA_SCALES, "step_arguments": GQA_STEP,
    }.items()},
    **{f"{package}/{module}.py": judge for package in ("fast", "reference") for module, judge in {
        "planning/batch": BATCH, "planning/local_attention": BATCH, "planning/slots": SLOT_MAPPING,
        "planning/context_chunks": CHUNKS, "planning/decode_schedule": SCHEDULE, "planning/shared_prefix": CASCADE,
        "mla/choose_path": PATH, "mla/cascade": CASCADE, "mla/metadata": BUILDER, "mla/builder": BUILDER,
        "mla/captured": CAPTURED,
        "planning/graphs": GRAPHS, "planning/advance": ADVANCE, "planning/visible_lens": VISIBLE_LENS,
        "mla/context_parallel": CONTEXT_PARALLEL, "distributed/merge": CONTEXT_PARALLEL,
        "distributed/reorg": CONTEXT_PARALLEL,
    }.items()},
    "fast/planning/owned_keys.py": VISIBLE_LENS,
    "fast/mla/staging.py": BUILDER,
    "fast/mla/state_rows.py": Judge(("mla/test_chunk_runs", "mla/test_prefill_outputs")),
    "fast/mla/device_choices.py": Judge(
        (
            "backends/test_registry", "planning/test_schedule_choice", "mla/test_fp8_mode_of_plans",
            "kernels/hopper/mla_decode/test_hopper_bounds",
        )
    ),
    "reference/interfaces/advance_arguments.py": ADVANCE,
    "reference/interfaces/graph_arguments.py": CAPTURED,
    "reference/interfaces/ownership.py": OWNERSHIP,
    "reference/interfaces/sizes.py": SIZES,
    "reference/interfaces/decode_schedule.py": SCHEDULE_CHOICE,
    "reference/interfaces/builder.py": GRAPHS,
    "reference/interfaces/slots.py": SLOTS,
    "fast/kernels/cpu/__init__.py": KERNELS,
    "fast/kernels/cpu/advance.py": ADVANCE,
    "fast/kernels/cpu/attention.py": KERNELS,
    "fast/kernels/cpu/cache.py": KERNELS,
    "fast/kernels/cpu/context_parallel.py": CONTEXT_PARALLEL,
    "fast/kernels/cpu/decode.py": KERNELS,
    "fast/kernels/cpu/gqa.py": GQA_KERNELS,
    "fast/kernels/cpu/key_value.py": GQA_CACHE_KERNELS,
    "fast/kernels/cpu/merge.py": KERNELS,
    "fast/kernels/cpu/padding_tokens.py": PADDING_TOKENS,
    "fast/kernels/cpu/rope.py": KERNELS,
    "fast/kernels/cpu/schedule.py": SCHEDULE,
    "fast/kernels/cpu/softmax.py": SOFTMAX,
    "fast/kernels/cpu/visible_lens.py": VISIBLE_LENS,
    "fast/kernels/cpu/weights.py": PRODUCTS,
    "fast/kernels/torch/attention.py": GQA_KERNELS,
    "fast/kernels/torch/cache.py": GQA_CACHE_KERNELS,
    "fast/kernels/rotation.py": KERNELS,
    "fast/integrations/transformers/__init__.py": ADAPTER,
    "fast/integrations/transformers/attention.py": ADAPTER,
    "fast/integrations/transformers/cache.py": ADAPTER,
    "fast/integrations/transformers/cache_options.py": ADAPTER_FORMATS,
    "fast/integrations/transformers/calibration.py": ADAPTER_FORMATS,
    "fast/integrations/transformers/models.py": ADAPTER_FORMATS,
    "fast/integrations/transformers/padding.py": ADAPTER,
    "fast/integrations/transformers/restoring.py": ADAPTER,
}  # fmt: skip
SUBJECTS = {  # text: subject of the files whose paths contain the text; the first text that a path contains counts
    "gqa": "grouped-query attention",
    "fast/kernels/cpu/key_value": "grouped-query attention",
    "fast/kernels/torch/": "grouped-query attention",
    "fast/kernels/cpu/advance": "planning",
    "fast/kernels/cpu/schedule": "planning",
    "fast/kernels/cpu/": "cpu kernels",
    "fast/kernels/rotation": "cpu kernels",
    "integrations/": "transformers adapter",
    "context_parallel": "context parallelism",
    "distributed/": "context parallelism",
    "ownership": "context parallelism",
    "": "planning",
}

"""Tests of both packages, `reference` (the readable specification) and `fast` (the optimised implementation).

A folder of tests has the path of the folder that it tests: `tests/cache` tests `reference/cache` and `fast/cache`, and
`tests/kernels/hopper/varlen` tests `fast/kernels/hopper/varlen`. `twins/test_mirror.py` checks this. The other folders
are:

- `twins` compares each function of `fast` with its twin, the function of the same name in `reference`.
- `identities` checks mathematical identities, and `mutations` plants known mistakes that tests must detect.
- `gpu` tests the benchmarks and the GPU suite (`gpu_suite.py`), and has tests of whole steps on a GPU. The benchmarks
  themselves are in `benchmarks`.
- `site` tests the pages.
- `support` holds the helpers that several modules use, and `data` holds the files that tests read.

docs/correctness.md divides the checks into five tiers. These modules test the tiers:

- 1, bit-exact: test_cache, the folder `planning`, test_differential
- 2, float64 identities: test_identities, test_rope, test_weights
- 3 and 4, computed budgets for outputs and LSE: test_differential, test_rope, test_weights
- 5, planted mistakes: test_mutations

A property test has 25 examples, or 2000 examples with `HYPOTHESIS_PROFILE=deep`.

With the pytest option `--device cuda` the tests make their tensors on a GPU, so that the GPU kernels of `fast` run. The
Triton kernels also have test files of their own (test_triton_*, in `kernels/triton`). Without a GPU these files run in
Triton's interpreter.

The list below contains faults that occurred in real systems. Below each fault are the tests that detect it. For
example, "cache: test_write" is the test `test_write` of the module test_cache. "mutations: base-2 LSE" is the mistake
of this name that test_mutations plants. Other names without `test_`, such as `lse_in_bfloat16`, are mistakes that a
test of the named module plants. Other files write "pitfall 8" for entry 8 of this list.

1   a merge that needs natural logarithms gets a base-2 LSE
    identities: test_attention, test_merge; differential: test_prefill; mutations: base-2 LSE
2   the merge of two states without keys gives NaN
    identities: test_merge_identity; differential: test_merge; triton_memory: test_merge_identity; mutations: merge of
    empty rows
3   the LSE of a row without keys is +inf or a finite number
    identities: test_attention, test_merge_refuses_to_hide; mutations: empty rows
4   an LSE is stored in bf16
    differential: test_merge, test_attention; mutations: LSE in bf16; context_parallel: lse_in_bfloat16
5   a request has query tokens but no keys
    identities: test_attention; differential: test_attention, test_decode
6   padding rows of a CUDA graph have seq_len 0 and garbage block ids
    differential: test_decode, test_padding_rows_are_zero_whatever_they_hold; cache: test_write
7   the tail of a request's last block holds NaN
    cache: test_gather; differential: test_unowned_bytes_reach_nothing; mutations: 0 x NaN
8   the product of block id and stride overflows int32
    cache, triton_memory, triton_decode, triton_gqa_offsets, hopper_decode: test_offsets_beyond_32_bit; hopper_decode:
    test_parts_beyond_32_bit; batch: test_slot_mapping_is_64_bit
9   reorg_kvcache is wrong with more than one chunk
    context_gather: test_reorg, test_gather_equals_one_rank, padding_taken_for_tokens
10  a chunk of the context starts at a token that is not a multiple of D x I (D ranks, interleave of I tokens)
    schedule: test_context_chunks_of_ranks
11  a short context gets as much of the workspace as a long context
    schedule: test_one_long_context_among_short_ones
12  a kernel reads past seq_lens if a request has several query tokens
    identities: test_several_queries; builder: test_plan; mutations: reads past its position
13  with decode context parallelism the causal mask uses the rank-local position
    context_parallel: test_ranks_are_one, causal_bound_of_the_local_position
14  YaRN's factor mscale^2 is missing or applied twice
    interfaces: test_scale_law, test_yarn_scales; rope: test_yarn_against_transformers; mutations: mscale^2
15  interleaved and half-split rope pairs are confused
    rope: test_against_complex_numbers, test_pairings_differ_by_a_permutation; interfaces:
    test_from_hf_deepseek_classes; mutations: other rope pairs
16  the plan is built before the batch is padded to the size of a CUDA graph
    builder: test_graph_padding_rows_are_inert; graphs: test_a_run_leaves_nothing_behind
17  a buffer grows inside a captured CUDA graph
    graphs: test_refusals, test_captured_memory_stands_still; process_groups: test_nccl_graphs
18  a merge assumes that both attention states have the same strides
    identities: test_merge_strides; ops: test_fake_results; mutations: merge assumes strides
19  the result of a request changes with the other requests of the batch
    triton_scheduled_decode, hopper_decode: test_batch_invariance; hopper_decode:
    test_no_bit_tells_how_wide_the_table_is
20  an asynchronous matrix product reads shared memory that was already overwritten with new data
    hopper_decode, hopper_two_phases: test_same_bits_a_thousand_times
21  the inputs of a test are degenerate, so that wrong outputs pass the test too
    identities: test_inputs_were_not_degenerate; mutations: every planted mistake

`python -m tests.mutants` plants random faults; CI does not run this command. docs/correctness.md says how many of these
faults the tests detect.

The GPU suite runs the kernel launches of `memory_checks.py` under compute-sanitizer.

Tests of decode context parallelism need several ranks. test_context_parallel, test_context_gather and
test_merge_over_ranks simulate the ranks in one process. test_process_groups starts a process for each rank, with gloo
on CPUs and with NCCL on GPUs. Some tests of test_process_groups kill a rank, or give two ranks different arguments.
`support.ranks` has the tasks that simulated and real ranks run. `support.processes` starts the processes.
"""

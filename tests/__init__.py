"""Tests of the contract, the identities, the twins, bad input and the registered ops, and tests with planted mistakes.

Folders: `tests/cache` tests `reference/cache` and `fast/cache`, and so on. Four folders are not named after a folder
of the packages: `twins`, `identities` and `mutations` test all of them, `gpu` tests the GPU suite and the benchmarks,
`site` tests the pages, and `support` holds the helpers that several modules use.

Tiers of the comparison:

- 1, bit-exact: test_cache, `planning`, test_differential
- 2, float64 identities: test_identities, test_rope, test_weights
- 3 and 4, computed budgets for outputs and LSE: test_differential, test_rope, test_weights
- 5, planted mistakes: test_mutations

`HYPOTHESIS_PROFILE=deep` draws 2000 examples for a property instead of 25.

`--device cuda` makes the tensors of these tests on a GPU, so the backend of that GPU serves them. The Triton kernels
also have files of their own (test_triton_*), which run in Triton's interpreter where there is no GPU.

The list below names the faults that occurred in real systems, and under each fault the tests that detect it: the module
without its `test_`, then the tests. Other files refer to an entry as "pitfall" and its number.

1   base-2 LSE fed to a natural-log merge
    identities: test_attention, test_merge; differential: test_prefill; mutations: base-2 LSE
2   both partial states empty: NaN
    identities: test_merge_identity; differential: test_merge; triton_memory: test_merge_identity; mutations: merge of
    empty rows
3   empty rows as +inf or a finite number
    identities: test_attention, test_merge_refuses_to_hide; mutations: empty rows
4   LSE stored in bf16
    differential: test_merge, test_attention; mutations: LSE in bf16; context_parallel: lse_in_bfloat16
5   zero-length keys with queries present
    identities: test_attention; differential: test_attention, test_decode
6   padding rows of a graph: seq_len 0, garbage block ids
    differential: test_decode, test_padding_rows_are_zero_whatever_they_hold; cache: test_write
7   NaN in the tail of the last block
    cache: test_gather; differential: test_unowned_bytes_reach_nothing; mutations: 0 x NaN
8   int32 overflow in block x stride
    cache, triton_memory, triton_decode, hopper_decode: test_offsets_beyond_32_bit; hopper_decode:
    test_parts_beyond_32_bit; batch: test_slot_mapping_is_64_bit
9   reorg_kvcache wrong with more than one chunk
    context_gather: test_reorg, test_gather_equals_one_rank, padding_taken_for_tokens
10  chunks of equal size that are not a multiple of D x I tokens
    schedule: test_context_chunks_of_ranks
11  a short context gets as much of the workspace as a long one
    schedule: test_one_long_context_among_short_ones
12  a request with several query tokens reads past seq_lens
    identities: test_several_queries; builder: test_plan; mutations: reads past its position
13  with decode context parallelism, causal bound from the rank-local position
    context_parallel: test_ranks_are_one, causal_bound_of_the_local_position
14  YaRN's factor mscale^2 missing or applied twice
    interfaces: test_scale_law, test_yarn_scales; rope: test_yarn_against_transformers; mutations: mscale^2
15  interleaved and half-split rope pairs confused
    rope: test_against_complex_numbers, test_pairings_differ_by_a_permutation; interfaces; mutations: other rope pairs
16  metadata built before the batch is padded to the size of a graph
    builder: test_graph_padding_rows_are_inert; graphs: test_a_run_leaves_nothing_behind
17  buffers grow inside a captured graph
    graphs: test_refusals, test_captured_memory_stands_still; process_groups: test_nccl_graphs
18  merge assumes equal strides
    identities: test_merge_strides; ops: test_fake_results; mutations: merge assumes strides
19  results of a request change with the batch around it
    triton_scheduled_decode, hopper_decode: test_batch_invariance; hopper_decode:
    test_no_bit_tells_how_wide_the_table_is
20  a product in flight reads memory that was refilled
    hopper_decode, hopper_two_phases: test_same_bits_a_thousand_times
21  degenerate inputs, for which every output matches
    identities: test_inputs_were_not_degenerate; every control of mutations

`python -m tests.mutants` plants random faults; it does not run in CI. docs/correctness.md has its counts.

The GPU suite (gpu_suite) runs the launches of memory_checks under compute-sanitizer.

Ranks: test_context_parallel, test_context_gather and test_merge_over_ranks simulate ranks in one process.
test_process_groups starts a process for each rank (with gloo on CPUs, with NCCL where there are GPUs), kills some, and
gives others arguments that disagree. `support.ranks` has the tasks that both kinds of ranks run, `support.processes`
starts the processes.
"""

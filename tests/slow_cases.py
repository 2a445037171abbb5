"""Cases that repeat, on another layout, family or size, what the gate proves: slow tests, each with what covers it.

A test that is slow as a whole, or whose file decides which of its cases are, has the marker in its file.
"""

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest


class SlowCases(NamedTuple):
    """Cases of one test.

    Attributes:
        file: Path from ``tests``.
        test: Name of the function.
        parameters: Regular expression that the parameters in the test's id match as a whole.
        covered_by: What in the gate detects the same faults.
    """

    file: str
    test: str
    parameters: str
    covered_by: str


SLOW_CASES = (
    SlowCases(
        "jaxserve/test_families.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "glm4-moe-tp2-experts2-gather|(laguna|phimoe|minimax-m2|cohere2-moe|opt|gpt-bigcode)-tp2",
        "the same rows' module against transformers; the other families with experts on two devices",
    ),
    SlowCases(
        "jaxserve/test_hybrids.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "(qwen3-5-moe|lfm2)-pp2|(qwen3-next|falcon-h1|mamba2|qwen3-5-vision|kimi-linear)-tp2|(lfm2-moe|kimi-linear)-ep2"
        "|(bamba|nemotron-h)-tp4",
        "the same rows' module against transformers; another row here with the same recurrent layer",
    ),
    SlowCases(
        "jaxserve/test_hybrids.py",
        "test_rejected_drafts_leave_no_trace",
        "0.7-qwen3-5-tp1",
        "the same with drafts that are always wrong",
    ),
    SlowCases(
        "jaxserve/test_stored_weights.py",
        "test_experts",
        "awq-settings1",
        "the same experts on one device",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "(mamba2|delta_net)-(native|xla|pallas-interpret)-(odd_heads|shorter_than_taps|ragged_bf16|without_norm|limits)"
        "|delta_net-(native|xla|pallas-interpret)-key_decays_(bf16|tiny_heads|wide)"
        "|delta_net-(xla|pallas-interpret)-key_decays_(decode|odd_heads)",
        "the other cases of these kernels; test_broken_recurrent_kernels.py",
    ),
    SlowCases(
        "faults/test_lives.py",
        "test_an_engine_that_does_not_get_ready_is_ended_with_its_stacks",
        "restart",
        "the same without a restart",
    ),
    SlowCases(
        "jaxserve/test_models.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "llama-(linear|yarn|llama3)-tp1|llama-mqa-bias-tied-tp4|mistral-tp2|gpt-neox-serial-tp2|gpt2-bare-names-tp1"
        "|kimi-k2-tp1",
        "the same rows' module against transformers, test_rope_oracle.py, and another row of the same family here",
    ),
    SlowCases(
        "jaxserve/test_models.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "llama-(dp2|split-logits4)|olmo2-whole-attention4|gpt2-sequence4|mixtral-sequence4"
        "|gpt-oss-(context2|tp2-experts3-.*)|deepseek-v3-(context4|ep2|tp2-experts2-gather)"
        "|granite-moe-tp1-experts2-gather",
        "a representative layout of each family here; each layout in test_meshes.py, test_layouts.py and its own files",
    ),
    SlowCases(
        "jaxserve/test_families.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "(exaone4|muse-glimmer|glm4|cohere2|flex-olmo|nemotron|phi|hyperclovax|gpt-neo|apertus|nanochat|granite4|mistral4"
        "|afmoe)-tp2",
        "the same rows' module against transformers; families with the same layers on two devices, here and in "
        "test_models.py",
    ),
    SlowCases(
        "jaxserve/test_meshes.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "qwen3-.*|mixtral-.*|gpt-oss-.*",
        "the other three meshes, with the same axes; test_sequence_parallel.py, test_lanes.py and test_stages.py",
    ),
    SlowCases(
        "sharding/test_layouts.py",
        "test_layout",
        "(dense|sparse)-[a-z_]+-(2|8)-1|(sparse|switch)-expert_[a-z_]+-(1-2|1-8|2-2)",
        "each layout on 4 or 8 devices; the model with latents on 8",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_any_schedule_gives_the_same_bits",
        "llama_split|bfloat16_activations|multiplied_and_capped|split_in_four|latents|sinks",
        "the other families, of which latents and sinks run split and on native kernels",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_native_kernels_give_the_same_bits_without_tiles",
        "llama|bfloat16_tied|split_in_four|experts|experts_alone",
        "the same families split over two devices; bits of the kernels in test_native.py",
    ),
    SlowCases(
        "jaxserve/test_weight_recipes.py",
        "test_real_tensor_lists_are_used_up_exactly",
        "1-.*|4-(llama-3.1-70b|mixtral-8x22b-wizardlm2|mistral-small-24b-dolphin3)",
        "the same lists on 4 devices; smaller models of the same families",
    ),
    SlowCases(
        "jaxserve/lab/test_real_plans.py",
        "test_supported_models_are_planned",
        "llama-3.1-70b|llama-2-7b|yi-1.5-6b|mistral-small-24b-dolphin3|mixtral-8x22b-wizardlm2|qwen2.5-14b-cogito",
        "other real models of the same families",
    ),
    SlowCases(
        "jaxserve/test_kv_window.py",
        "test_pages_of_the_window_are_enough",
        "windowed-3-xla|mixed-3-native",
        "the other pairs of model and kernels",
    ),
    SlowCases("jaxserve/test_stages.py", "test_.*", "three|three-.*", "two stages, and two stages of two devices"),
    SlowCases(
        "jaxserve/test_sequence_parallel.py",
        "test_.*",
        "four|four-.*",
        "the deterministic engine, which must give the same bits",
    ),
    SlowCases(
        "jaxserve/test_layers.py",
        "test_a_kernel_that_writes_from_the_projection_changes_nothing",
        ".*-8-pallas-interpret",
        "the same kernel without tiles, and native kernels with tiles",
    ),
    SlowCases(
        "jaxserve/test_steps.py",
        "test_lanes_of_one_program_do_not_see_each_other|test_one_program_a_step_gives_what_several_do"
        "|test_tokens_do_not_depend_on_the_layout",
        "1-gathered|tensor_parallel-1|tensor_parallel-4",
        "the same on two devices",
    ),
    SlowCases(
        "jaxserve/test_runner.py",
        "test_decode_steps_larger_than_every_decode_shape_run_as_mixed_steps",
        "1-None|2-None",
        "the case with drafts",
    ),
    SlowCases("jaxserve/test_remote_runner.py", "test_.*", "in turn", "overlapping steps, which are harder"),
    SlowCases(
        "jaxserve/test_llm.py",
        "test_compile_sizes_compile_fewer_programs_for_the_same_answers",
        "settings1-5",
        "the other settings; test_buckets.py",
    ),
    SlowCases(
        "jaxserve/test_expert_load.py",
        "test_every_token_counts_once_for_each_of_its_experts",
        "dp2",
        "one device, and two that share the experts",
    ),
    SlowCases(
        "jaxserve/lab/test_lab_plan.py",
        "test_the_model_of_temporaries_agrees_with_the_compiler",
        "Llama-3.1-70B on 8|Qwen2.5-14B on 8",
        "the same models on fewer devices",
    ),
    SlowCases(
        "jaxserve/lab/test_calibration.py",
        "test_predictions_follow_from_the_calibration",
        "experts data=4|dense tensor=4 tensor_parallel",
        "the other two",
    ),
    SlowCases(
        "jaxserve/test_draft_rows.py",
        "test_drafts_change_no_token",
        "right-1-cpu",
        "two devices, and the programs of a GPU",
    ),
    SlowCases(
        "jaxserve/test_head_requests.py",
        "test_answers_on_several_devices_are_those_without_a_head",
        "mtp-.*",
        "the same stages with EAGLE-3, which needs the states of several layers",
    ),
    SlowCases(
        "jaxserve/test_draft_requests.py",
        "test_.*",
        "one step at a time(-.*)?",
        "overlapping steps, and stages",
    ),
    SlowCases(
        "jaxserve/test_request_features.py",
        "test_beams_are_those_of_a_search_with_the_whole_model",
        "1",
        "three beams",
    ),
    SlowCases(
        "jaxserve/structured_output/test_grammars.py",
        "test_real_tokenizers",
        "deepseek-r1|phi3|granite-3.1",
        "other tokenizers",
    ),
    SlowCases(
        "jaxserve/server/test_real_clients.py",
        "test_lm_eval",
        "",
        "echo with logprobs of a prompt, which is all that it asks for, in test_http_completions.py",
    ),
    SlowCases(
        "pallas_kernels/test_jax_triton.py",
        "test_interpreted_kernel_matches_reference",
        ".*(mixed_full|group_of_twenty|window_one|sinks_decode|longer_decode|many_splits|edges_of_page_64)",
        "the other cases of the same kernels; test_kernels.py on Pallas kernels",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_long_contexts_are_right_and_do_not_depend_on_threads",
        ".*float32",
        "bfloat16; float32 in the cases of test_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_lowers_for_an_h200",
        "[a-z0-9_]+-xla-.*",
        "the same JAX code in test_matches_reference; whole steps with XLA's kernels lower for CUDA in test_stages.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "paged_attention-pallas-interpret-(bfloat16_.*|group_of_.*|head_of_.*|sinks_.*|window_one|soft_cap_.*)",
        "the other cases of the kernel; the same cases on XLA and native kernels; test_jax_triton.py",
    ),
    SlowCases(
        "pallas_kernels/test_attention_parts.py",
        "test_parts_combined_are_the_attention",
        "[a-z_]+-native-(many_rows|mixed|window|sinks|bfloat16_mixed|one_by_one_window)",
        "the other cases, and all of them on XLA",
    ),
    SlowCases(
        "pallas_kernels/test_truncation_kernel.py",
        "test_the_kernel_keeps_what_xla_keeps",
        "2|12288",
        "sizes beside the boundary of a tile",
    ),
    SlowCases(
        "jaxserve/test_engine_stories.py",
        "test_greedy_tokens_are_those_of_the_reference",
        "two.*|large.*",
        "one device, and four; requests over two devices in test_request_mix.py",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_any_schedule_gives_the_same_bits",
        "head_norms_and_windows|experts_split",
        "latents_native_split, sinks_native_split and width_norms_behind_split",
    ),
    SlowCases(
        "jaxserve/test_split_logits.py",
        "test_tokens_are_those_of_whole_rows",
        "4-1000-.*",
        "the vocabulary that ends in the middle of a device's part",
    ),
    SlowCases(
        "jaxserve/test_draft_rows.py",
        "test_drafts_change_no_token",
        "right-1-gpu",
        "two devices; test_draft_requests.py",
    ),
    SlowCases(
        "jaxserve/lab/test_lab_plan.py",
        "test_parts_have_the_collectives_of_the_whole_program",
        ".*-prefill",
        "decode steps of the same layouts, and prefill steps of a stage",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "paged_attention-(?:[a-z]+|pallas-interpret|mosaic-interpret|jax-triton)-(?!(?:mixed|edges|window_of_tile"
        "s|soft_cap_and_window|sinks_window|multi_query|group_of_eight|head_of_80|bfloat16_mixed|large_page|one_t"
        "oken|one_by_one|prefill)$).*",
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "linear-(?:[a-z]+|pallas-interpret|mosaic-interpret|jax-triton)-(?!(?:padded|norm_odd|rows_1|rows_5_bf16|"
        "rows_13|rows_33_bf16|gated_odd_bf16|parts_bf16|residual|bias_bf16|odd_in_bf16|odd_out|silu_bf16|gelu_new"
        "|two_outs_bf16|wide_bf16|tiny|many_rows|scale|relu)$).*",
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "qkv_write-(?:[a-z]+|pallas-interpret|mosaic-interpret|jax-triton)-(?!(?:poisoned_float32|padded|three_to"
        "kens|partial_rotation_alone|group_of_seven|tiny_head|no_rotation)$).*",
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "int4_matmul-(?:[a-z]+|pallas-interpret|mosaic-interpret|jax-triton)-(?!(?:rows_3|symmetric_group_32|rows"
        "_33|odd_splits|group_is_all|single|half)$).*",
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "truncation-(?:[a-z]+|pallas-interpret|mosaic-interpret|jax-triton)-(?!(?:flat|one_allowed|heavy_ties|odd"
        "|masked|peaked)$).*",
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "latent_attention-(?:[a-z]+|pallas-interpret|mosaic-interpret|jax-triton)-(?!(?:chunk_inside_a_page|bfloa"
        "t16_tiles|odd_heads|odd_widths|edges|mixed|one_by_one)$).*",
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_matches_reference",
        "grouped_matmul-(?:[a-z]+|pallas-interpret|mosaic-interpret|jax-triton)-(?!(?:tile_borders|many_experts|n"
        "o_rows|gated_rows_behind|odd_widths|one_takes_all)$).*",
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_kernels.py",
        "test_lowers_for_an_h200",
        "(paged_attention|truncation)-(triton|mosaic)-(?!decode_(1x1k|64x8k)|prefill_2k_after_8k|sinks|llama_top_k_top_p_2"
        "56|qwen_top_p_2).*",
        "a decode, a prefill and the sizes that differ; scripts/compile_check.sh",
    ),
    SlowCases(
        "test_examples.py",
        "test_command",
        ".*(eval demo|bench throughput.*|bench latency.*|--chat .*|compare demo .*)",
        "tests of these commands in test_cli.py, test_bench_serve.py, test_demo_tasks.py and lab/test_compare.py;"
        " test_docs.py knows every flag",
    ),
    SlowCases(
        "test_examples.py",
        "test_program",
        "program[02356]",
        "the README's first program; test_public_api.py and test_parameter_docs.py know every name",
    ),
    SlowCases(
        "sharding/test_layouts.py",
        "test_layout",
        "latents-(?!context_parallel|expert_all_to_all).*|sparse-(replicated|replicated_attention|sequence_parall"
        "el|split_logits|tensor_parallel)-4-1|switch-expert_(gather|all_reduce)-2-4",
        "each layout on the dense model, each exchange of experts on the sparse one",
    ),
    SlowCases(
        "sharding/test_layouts.py",
        "test_layouts_that_are_not_in_the_registry",
        "latents-axes(5|6|7|10|13|18)-.*|sparse-axes(2|3|12)-.*",
        "the same axes on the other models",
    ),
    SlowCases(
        "sharding/test_layouts.py",
        "test_devices_that_share_tokens_need_no_number_of_key_value_heads|test_whole_attention_needs_no_number_of"
        "_heads",
        "sinks|dense|norms of all heads",
        "latents and attention of one's own",
    ),
    SlowCases(
        "jaxserve/test_models.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "deepseek-v2-tp2|olmo2-tp4|gemma-tp2|qwen2-windows-tp2|phi3-tp2|llama-(tp1|dynamic-tp1)|qwen2-moe-tp2-exp"
        "erts2-gather|granite-moe-ep4|gpt2-tp4|qwen2-tp2|granite-tp2",
        "each family's module against transformers here; its engine in test_meshes.py or a sibling of the family",
    ),
    SlowCases(
        "pallas_kernels/test_jax_triton.py",
        "test_interpreted_kernel_matches_reference",
        ".*-(chunk_inside_a_page|window|multi_query|head_of_80|sinks|edges|soft_cap_and_window|odd_in|rows_300|ro"
        "ws_128|rows_1|rows_16|rows_17|group_32|group_64|group_is_all|half|single|symmetric|random|empty_experts|"
        "one_takes_all|gated|many_rows|one_row|even|rows_behind|single_symmetric|one_expert)",
        "mixed, sinks_window, bfloat16_mixed, odd_splits, rows_3 and rows_33, many_experts, no_rows, tile_borders"
        " and their like; every case on a GPU by scripts/gpu_check.py",
    ),
    SlowCases(
        "pallas_kernels/test_jax_triton.py",
        "test_compiles_for_an_h200_without_spills",
        "(?!prefill_2k_after_0_page_64|llama_8b_down_64).*",
        "a prefill and a product of weights; scripts/compile_check.sh",
    ),
    SlowCases(
        "test_sharding_page.py",
        "test_a_layout_is_planned_drawn_run_and_compared",
        "",
        "plans in test_lab_plan.py, pictures in test_show.py, runs in test_layouts.py, comparisons in test_compare.py",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_any_schedule_gives_the_same_bits",
        "norms_behind_on_four|sinks_native_split",
        "latents_native_split and experts_native; sinks in test_kernels.py",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_native_kernels_give_the_same_bits_without_tiles",
        "experts_split|width_norms_behind_split",
        "experts_alone_split; widths in test_steps.py",
    ),
    SlowCases(
        "jaxserve/test_meshes.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "gemma3-.*|deepseek-v3-stage=2.*",
        "the llama mesh here; stages with experts in test_reshard.py, both families on two devices in test_models.py",
    ),
    SlowCases(
        "jaxserve/test_kv_window.py",
        "test_pages_of_the_window_are_enough",
        "mixed-3-xla",
        "windowed-3-native, and several page tables in the tests below it",
    ),
    SlowCases(
        "jaxserve/test_trace.py",
        "test_a_trace_with_too_few_pages",
        "data=1",
        "preemption in test_engine_stories.py and faults/test_overload.py",
    ),
    SlowCases(
        "checkpoints/test_loader.py",
        "test_peak_memory_is_the_arrays_and_about_one_shard",
        "source1-bfloat16",
        "the other source",
    ),
    SlowCases(
        "jaxserve/test_draft_rows.py",
        "test_drafts_change_no_token",
        "right-2-cpu|wrong-1-gpu",
        "wrong-1-cpu; whole answers in test_draft_requests.py",
    ),
    SlowCases(
        "jaxserve/test_draft_rows.py",
        "test_a_token_stays_while_the_drafts_before_it_are_what_was_sampled",
        "2|4|5|7|9|1[0149]",
        "the other seeds",
    ),
    SlowCases(
        "jaxserve/test_layers.py",
        "test_a_kernel_that_writes_from_the_projection_changes_nothing",
        "(bias|norm_of_width|no_rotation)-None-pallas-interpret",
        "norm_of_heads, and all on native kernels",
    ),
    SlowCases(
        "jaxserve/test_stages.py",
        "test_experts_in_stages",
        ".*",
        "stages in the tests beside it, experts on devices in test_models.py and test_layouts.py",
    ),
    SlowCases(
        "jaxserve/test_stages.py",
        "test_every_stage_has_work|test_embeddings_are_those_of_one_device",
        "two with tensor(-.*)?",
        "two stages of one device",
    ),
    SlowCases(
        "jaxserve/test_lanes.py",
        "test_requests_of_every_kind_are_as_on_one_device",
        "gather-0",
        "the deterministic layout, with the same scheduler",
    ),
    SlowCases(
        "jaxserve/lab/test_compare.py",
        "test_all_meshes_and_layouts_that_are_valid_and_differ|test_the_command_prints_json_and_draws",
        "",
        "test_all_that_run_give_equal_tokens and the figures of test_lab_plan.py",
    ),
    SlowCases(
        "pallas_kernels/test_attention_parts.py",
        "test_parts_combined_are_the_attention",
        "paged_attention-xla-(many_rows|bfloat16_mixed|one_by_one_window|window|sinks)|latent_attention-xla-(long"
        "|mixed|bfloat16)",
        "mixed and long with xla, the others with native kernels",
    ),
    SlowCases(
        "jaxserve/test_weight_recipes.py",
        "test_real_tensor_lists_are_used_up_exactly",
        "4-(qwen2.5-14b-cogito|llama-2-7b|yi-1.5-6b|smollm3-3b)",
        "qwen3-1.7b, llama-3.2-3b, gemma-2b-it and phi-3-mini",
    ),
    SlowCases(
        "jaxserve/test_draft_requests.py",
        "test_.*",
        "in stages(-right|-mixed)?|overlapping-(right|mixed)",
        "in stages-wrong, overlapping and overlapping-wrong",
    ),
    SlowCases(
        "jaxserve/test_expert_determinism.py",
        "test_bits_alone_and_in_any_batch",
        "mixtral-2",
        "qwen2-moe-1, and experts_native in test_determinism.py",
    ),
    SlowCases(
        "jaxserve/test_tokenizer.py",
        "test_sentencepiece_decode",
        "baichuan-7b|llama2-model-only",
        "mistral-v3",
    ),
    SlowCases(
        "jaxserve/structured_output/test_grammars.py",
        "test_real_tokenizers",
        "qwen|llama2-model-only",
        "gpt2, llama2 and both mistrals",
    ),
    SlowCases(
        "jaxserve/test_split_logits.py",
        "test_rows_without_a_token|test_logprobs_of_every_mode",
        "2-native|4-xla|0-.*",
        "2-xla, 4-native and the modes of 600 tokens",
    ),
    SlowCases(
        "jaxserve/test_steps.py",
        "test_one_program_a_step_gives_what_several_do",
        "split_logits-2",
        "tensor_parallel-2",
    ),
    SlowCases(
        "jaxserve/test_mooncake.py",
        "test_hits_are_the_traces_own_reuse_and_answers_stay",
        ".*",
        "hits in test_prefix_cache.py and test_simulate_scheduler.py",
    ),
    SlowCases(
        "jaxserve/lab/test_lab_plan.py",
        "test_the_model_of_temporaries_agrees_with_the_compiler",
        "Qwen2.5-14B on (1|2)",
        "Llama-3.1-8B on 1",
    ),
    SlowCases(
        "jaxserve/test_sampler.py",
        "test_truncation_keeps_what_sorting_keeps",
        "40000",
        "5000",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_shared_pages_read_once_give_the_same_bits|test_long_contexts_are_right_and_do_not_depend_on_threads",
        "40-float32|.*soft_cap.*-bfloat16|{}-bfloat16",
        "40-bfloat16, the small pages, and a window",
    ),
    SlowCases(
        "jaxserve/reshard/test_reshard.py",
        "test_drafts_are_verified_on_the_new_mesh",
        "",
        "test_requests_of_every_kind_continue; drafts in test_draft_requests.py",
    ),
    SlowCases(
        "jaxserve/lab/test_lab_plan.py",
        "test_two_devices_hold_far_more_than_twice_the_tokens_of_one",
        "",
        "test_figures_computed_by_hand",
    ),
    SlowCases(
        "jaxserve/lab/test_calibration.py",
        "test_plans_and_comparisons_for_it|test_steps_of_devices_that_share_a_host_take_turns",
        "",
        "test_what_is_measured and test_predictions_follow_from_the_calibration",
    ),
    SlowCases(
        "jaxserve/test_stages.py",
        "test_requests_of_every_kind_are_as_on_one_device",
        "two with tensor-0",
        "two-0; stages with tensor in test_meshes.py",
    ),
    SlowCases(
        "test_gpu_check.py",
        "test_a_dry_run_lists_every_part",
        "",
        "the parts' own tests beside it; test_lowers_for_an_h200 in test_kernels.py",
    ),
    SlowCases(
        "jaxserve/server/test_engine_options.py",
        "test_what_overrides_the_generation_config_is_the_servers_default",
        "",
        "test_model_defaults.py",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_devices_that_share_the_tokens_of_a_tile",
        "norms_behind_on_four",
        "experts_native",
    ),
    SlowCases(
        "jaxserve/test_kv_window.py",
        "test_layers_are_split_and_have_several_page_tables",
        "",
        "several page tables in the test after it",
    ),
    SlowCases(
        "jaxserve/test_llm.py",
        "test_a_layout_of_ones_own",
        "",
        "the test of this name in test_compare.py; test_layouts.py",
    ),
    SlowCases(
        "jaxserve/test_steps.py",
        "test_lanes_of_one_program_do_not_see_each_other",
        "2-split",
        "test_lanes.py",
    ),
    SlowCases(
        "pallas_kernels/test_latent_mosaic.py",
        "test_deterministic_mode_does_not_depend_on_the_step",
        "",
        "the test of this name in test_mosaic.py",
    ),
    SlowCases(
        "pallas_kernels/test_mosaic.py",
        "test_decode_does_not_depend_on_the_number_of_rows",
        "4|8",
        "1 here and in test_latent_mosaic.py",
    ),
    SlowCases(
        "pallas_kernels/test_mosaic.py",
        "test_lowers_for_an_h200",
        "settings(0-3|2-3|2-4|3-2)",
        "the other settings; scripts/compile_check.sh",
    ),
    SlowCases(
        "pallas_kernels/test_mosaic.py",
        "test_decode_matches_reference|test_prefill_matches_reference",
        "several_tiles_of_a_split|group_of_seven|groups_of_four|pieces_of_wgmma|wide_head",
        "group_of_seven_in_eight_splits, edges_of_a_tile, mixed and window_over_blocks",
    ),
    SlowCases(
        "pallas_kernels/test_latent_mosaic.py",
        "test_decode_matches_reference",
        "more_splits_than_pages|one_head_in_a_window|two_blocks_of_heads",
        "test_mosaic.py's splits; no_rotated_key and broken kernels",
    ),
    SlowCases(
        "faults/test_drain.py",
        "test_a_second_sigterm_is_immediate",
        "",
        "the same with an engine that hangs, and while the server only waits for it",
    ),
    SlowCases(
        "faults/test_death.py",
        "test_an_engine_does_not_outlive_its_front_end",
        "",
        "the end of test_a_killed_process_… in test_engine_process.py: the process ends when its socket closes",
    ),
    SlowCases(
        "faults/test_startup.py",
        "test_a_damaged_file_is_named",
        r"tokenizer\.json",
        "config.json; the error's text in test_tokenizer.py",
    ),
    SlowCases(
        "faults/test_startup.py",
        "test_a_model_that_is_nowhere_is_named|test_a_pool_that_a_request_could_be_too_large_for_is_refused",
        "",
        "damaged files, which pass the same way; the errors in test_engine_process.py and test_memory.py",
    ),
    SlowCases(
        "jaxserve/test_gguf_models.py",
        "test_tokens_are_those_of_the_decoded_weights",
        "llama Q4_K_M-tensor=2",
        "mixtral on two devices; blocks of every type in quantized/test_gguf_blocks.py",
    ),
    SlowCases(
        "jaxserve/test_gguf_models.py",
        "test_q8_0_of_a_trained_model",
        "",
        "the other models' tokens, and a trained model in three files",
    ),
    SlowCases(
        "jaxserve/test_lanes.py",
        "test_requests_of_every_kind_are_as_on_one_device",
        "gather-1",
        "deterministic-1; gather in test_aborts_on_one_lane_leave_the_others_alone",
    ),
    SlowCases(
        "jaxserve/test_draft_requests.py",
        "test_drafts_change_no_answer",
        "overlapping-wrong",
        "in stages-wrong, and test_ngram.py with one stage",
    ),
    SlowCases(
        "jaxserve/test_draft_rows.py",
        "test_drafts_change_no_token",
        "wrong-1-cpu",
        "wrong-2-cpu and mixed-1-gpu",
    ),
    SlowCases(
        "jaxserve/test_split_logits_requests.py",
        "test_a_request_has_the_same_bits_whatever_is_in_its_steps",
        "mixed",
        "right drafts",
    ),
    SlowCases(
        "jaxserve/test_embed.py",
        "test_a_preempted_prompt_begins_its_sum_again",
        "False",
        "True",
    ),
    SlowCases(
        "jaxserve/lab/test_real_plans.py",
        "test_supported_models_are_planned",
        "llama-2-13b-bnb-nf4|phi-3-mini|llama-3.2-3b-one-tensor-per-shard",
        "other real models; these models' tensors in test_weight_recipes.py",
    ),
    SlowCases(
        "jaxserve/test_weight_recipes.py",
        "test_real_tensor_lists_are_used_up_exactly",
        "4-qwen3-14b-mlx-4bit",
        "llama-2-13b-bnb-nf4 and qwen3-1.7b; this model in test_real_plans.py",
    ),
    SlowCases(
        "jaxserve/test_engine_stories.py",
        "test_greedy_tokens_are_those_of_the_reference",
        "one step at a time",
        "plain; one step at a time in test_ngram.py",
    ),
    SlowCases(
        "jaxserve/test_models.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "deepseek-v2-lite-tp2|qwen3-tp2|gemma2-tp2|baichuan-tp2",
        "the same families' modules against transformers; deepseek-v3, llama and gemma3 on two devices",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_native_kernels_give_the_same_bits_without_tiles",
        "head_norms_and_windows|multiplied_and_capped",
        "llama_split and experts_alone_split; these families with tiles",
    ),
    SlowCases(
        "jaxserve/test_stages.py",
        "test_embeddings_are_those_of_one_device|test_weights_have_the_names_of_the_whole_model",
        "two-last|two with tensor",
        "two-mean and two",
    ),
    SlowCases(
        "jaxserve/lab/test_lab_plan.py",
        "test_a_quantized_model_is_planned_as_a_plain_one",
        "",
        "real quantized models in test_real_plans.py",
    ),
    SlowCases(
        "jaxserve/test_quantized_checkpoints.py",
        "test_an_engine_generates_what_the_float_model_does",
        ".*tensor_parallel_size.*",
        "one device and two stages; every array on two devices, bit for bit",
    ),
    SlowCases(
        "jaxserve/test_ngram.py",
        "test_a_story_is_the_same_with_drafts",
        "",
        "test_completions_are_those_without_drafts",
    ),
    SlowCases(
        "jaxserve/test_ngram.py",
        "test_completions_are_the_same_on_every_mesh_and_with_few_pages",
        "2 stages of 2 devices",
        "few pages; stages in test_draft_requests.py, and two devices in test_draft_rows.py",
    ),
    SlowCases(
        "jaxserve/server/test_real_clients.py",
        "test_langchain",
        "",
        "OpenAI's own client, which it calls",
    ),
    SlowCases(
        "jaxserve/test_families.py",
        "test_greedy_tokens_equal_those_of_transformers",
        "(ministral3|olmo3|seed-oss|solar-open|glm4-moe-lite|glm|ernie|ernie-moe|hunyuan|hunyuan-moe|starcoder2"
        "|gemma4-31b)-tp2|hy-v3-tp2-experts2-gather",
        "the same families' modules against transformers; the layers that they are made of in other rows on two"
        " devices, such as glm4, glm4-moe, exaone4 and gemma4-e2b",
    ),
)


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of ``SLOW_CASES``."""
    patterns = collections.defaultdict[str, list[re.Pattern[str]]](list)
    for each in SLOW_CASES:
        patterns[f"tests/{each.file}"].append(re.compile(pattern_of(each)))
    for item in items:
        node_id = item.nodeid
        if any(pattern.fullmatch(node_id) for pattern in patterns.get(node_id.partition("::")[0], ())):
            item.add_marker(pytest.mark.slow)


def unmatched(node_ids: Sequence[str]) -> list[SlowCases]:
    """Return the entries that match none of the tests of their file; a test without its data has no cases."""
    present = collections.defaultdict[str, list[str]](list)
    for node_id in node_ids:
        present[node_id.partition("::")[0]].append(node_id)
    return [each for each in SLOW_CASES if not _is_matched(each, present.get(f"tests/{each.file}", []))]


def _is_matched(cases: SlowCases, node_ids: Sequence[str]) -> bool:
    """Return whether an entry matches one of its file's tests, or nothing can be said."""
    pattern = re.compile(pattern_of(cases))
    is_complete = bool(node_ids) and not any("[NOTSET]" in node_id for node_id in node_ids)
    return not is_complete or any(pattern.fullmatch(node_id) for node_id in node_ids)


def pattern_of(cases: SlowCases) -> str:
    """Return the regular expression of the tests' ids."""
    parameters = rf"\[({cases.parameters})\]" if cases.parameters else ""
    return rf"tests/{re.escape(cases.file)}::({cases.test}){parameters}"

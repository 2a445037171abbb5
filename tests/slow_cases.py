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


KERNELS_IN_GATE = {
    "argmax-native": ".*",
    "argmax-xla": "one|odd|wide_and_odd|ties|broken",
    "delta_net-native": "one_token|decode|ragged|long|tiny_heads|wide_keys|six_values_per_key|three_taps|only_padding"
    "|key_decays|key_decays_odd_heads",
    "delta_net-xla": "one_token|decode|ragged|long|six_values_per_key|two_taps|only_padding|key_decays",
    "delta_net-pallas-interpret": "decode|ragged|tiny_heads|six_values_per_key|only_padding|key_decays",
    "grouped_matmul-native": "tile_borders|many_experts|gated_rows_behind|odd_widths",
    "grouped_matmul-xla": "tile_borders|gated_rows_behind|no_rows",
    "int4_matmul-xla": "symmetric_group_32|odd_splits|single",
    "latent_attention-native": "edges|mixed|odd_heads|bfloat16_tiles",
    "latent_attention-xla": "mixed|odd_widths|one_by_one",
    "linear-native": "norm_odd|rows_1|rows_5_bf16|gated_odd_bf16|parts_bf16|residual|bias_bf16|gelu_new|scale|relu|tiny"
    "|many_rows",
    "linear-xla": "norm_odd|gated_odd_bf16|parts_bf16|residual",
    "mamba2-native": "one_token|decode|ragged|long|tiny_heads|production|without_bias|before_the_gate|not_gated"
    "|two_taps|only_padding",
    "mamba2-xla": "decode|ragged|long|without_bias|before_the_gate|not_gated|only_padding",
    "mamba2-pallas-interpret": "decode|ragged|tiny_heads|before_the_gate|not_gated|only_padding",
    "paged_attention-native": "mixed|edges|soft_cap_and_window|sinks_window|bfloat16_mixed|head_of_80",
    "paged_attention-xla": "mixed|window_of_tiles|sinks_window|bfloat16_mixed",
    "paged_attention-pallas-interpret": "mixed|edges|soft_cap_and_window",
    "quantized_grouped_matmul-native": "[a-z0-9_]+_empty_experts|(w8a8|q4_k_int8|mxfp4)_gated|awq_many_rows|one_row"
    "|no_rows|one_expert|many_experts",
    "quantized_grouped_matmul-xla": "(w8a8|awq|q4_k_int8|fp8_block)_empty_experts|(int8_channel|q8_0|q4_k|mxfp4)_gated"
    "|no_rows|many_experts",
    "quantized_linear-native": "[a-z0-9_]+_rows_5|(w8a8|awq|q4_k_int8|mxfp4|fp8_block|nf4)_row|w8a8_rows_(2|17|100)"
    "|q4_k_int8_rows_33|[a-z0-9_]+_(wide|gated|gated_row|odd_out|odd_in|residual|scale|padded|many_rows|order"
    "|order_filled|order_gated)|cut_group|(int8_channel|awq|nf4|q6_k|fp8_block)_rows_5_bf16|awq_row_bf16",
    "quantized_linear-xla": "[a-z0-9_]+_rows_5|w8a8_(gated|padded|order)|awq_(gated|scale|order_filled)|q8_0_residual"
    "|awq_rows_5_bf16",
    "qkv_write-native": "poisoned_float32|padded|partial_rotation_alone|group_of_seven",
    "qkv_write-xla": "poisoned_float32|group_of_seven",
    "qkv_write-pallas-interpret": "poisoned_float32|padded|no_rotation",
    "short_convolution-native": "one_token|decode|ragged|ragged_bf16|with_bias|wide|four_taps|only_padding",
    "short_convolution-xla": "decode|ragged|odd|two_taps|shorter_than_taps|only_padding",
    "truncation-native": "flat|heavy_ties|masked",
    "truncation-xla": "one_allowed|odd",
    "truncation-pallas-interpret": "heavy_ties|peaked",
}
"""Cases of ``test_matches_reference`` in the gate, by operation and implementation: regular expressions of names.
The others have the same features apart, or are for GPUs."""
LOWERED_IN_GATE = (
    "int4_matmul-triton-(llama_8b_gate_up_256|qwen_14b_down_2)|grouped_matmul-triton-(qwen3_30b_a3b_gate_up_2"
    "|mixtral_8x7b_down_8192)|truncation-triton-(qwen_top_p_2|llama_top_k_top_p_256)|qkv_write-triton-(llama_8b_2"
    "|qwen3_14b_8192)|paged_attention-(triton|mosaic|jax-triton)-(decode_1x1k_page_16|decode_64x8k_page_64"
    "|prefill_2k_after_8k_page_64|sinks_decode_8x8k_page_64)|latent_attention-mosaic-(v3_decode_1x8k"
    "|v3_tp8_prefill_512_after_2k)|delta_net-triton-(qwen3.5_0.8b_decode_1|kimi_linear_48b_prefill_512)"
    "|mamba2-triton-(nemotron_8b_decode_32|granite_350m_prefill_512)"
)
"""Cases of ``test_lowers_for_an_h200`` that the gate runs: of each kernel a small step and a large one."""


def kernel_cases() -> list[SlowCases]:
    """Return the slow cases of the comparison of kernels with their references."""
    file, rows = "pallas_kernels/test_kernels.py", "|".join(KERNELS_IN_GATE)
    covered_by = (
        "cases with the same features together, in each implementation; broken kernels in test_broken_kernels.py"
    )
    found = [
        SlowCases(file, "test_matches_reference", rf"{row}-(?!({cases})\]).*", covered_by)
        for row, cases in KERNELS_IN_GATE.items()
        if cases != ".*"
    ]
    others = SlowCases(file, "test_matches_reference", f"(?!({rows})-).*", "gpu_check.py on a GPU; test_mosaic.py")
    compiled_too = (
        "a small step and a large one of each kernel; scripts/compile_check.sh; whole steps in test_stages.py"
    )
    return [*found, others, SlowCases(file, "test_lowers_for_an_h200", rf"(?!({LOWERED_IN_GATE})\]).*", compiled_too)]


SLOW_CASES = (
    *kernel_cases(),
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
    SlowCases(
        "faults/test_leaving.py",
        "test_a_client_that_leaves_gives_its_pages_back",
        "(http unary|grpc stream)-prefill|(http stream|grpc unary)-decode|(http unary|grpc unary)-last",
        "each phase through two interfaces, and each interface in some phase; every phase in test_engine_process.py",
    ),
    SlowCases(
        "faults/test_leaving.py",
        "test_a_client_that_leaves_the_queue_leaves_it_within_a_step",
        "http unary|grpc stream",
        "the other two interfaces",
    ),
    SlowCases(
        "faults/test_death.py",
        "test_an_engine_that_is_killed_while_it_starts_is_no_wrong_setting",
        "restart",
        "the same without a restart",
    ),
    SlowCases(
        "faults/test_drain.py",
        "test_a_drain_by_the_admin_service",
        "",
        "a drain by it before a SIGTERM, here; test_grpc_services.py",
    ),
    SlowCases(
        "test_examples.py",
        "test_command",
        ".*(--tensor-parallel-size 2|--compile-sizes .*|--prompts .*)",
        "a prompt on one device here; test_cli.py and test_llm.py",
    ),
    SlowCases(
        "test_examples.py",
        "test_load_generator",
        "",
        "its options in test_bench_serve.py; real servers in tests/faults",
    ),
    SlowCases(
        "jaxserve/test_models.py",
        "test_a_module_on_its_own_gives_the_logits_of_transformers",
        "llama-(linear|dynamic|yarn|llama3)|qwen2-windows|gpt-neox-serial",
        "test_rope_oracle.py; mistral's windows, and other rows of the same family here",
    ),
    SlowCases(
        "sharding/test_layouts.py",
        "test_devices_share_tokens_however_the_rest_is_split",
        "dense-2-1-.*|sparse-2-4-.*-gather|switch-2-4-.*-all_to_all",
        "the other layouts of the same models",
    ),
    SlowCases(
        "jaxserve/test_standard_streams.py",
        "test_output_that_cannot_be_written",
        ".*-(--help|serve --help|plan --help|generate --prompt Hi (--json|--prompt Ho) --quiet"
        "|show demo|compare demo --devices 2|bench latency --num-iters 1 --json)",
        "a command of each kind of output, on each kind of stream",
    ),
    SlowCases(
        "jaxserve/test_weight_recipes.py",
        "test_projections_equal_a_construction_by_device|test_biases_follow_the_rows_of_their_weights",
        "(1-(1|4|8)|2-(2|4|8)|4-4)(-.*)?",
        "one device with 2 heads of keys, two with one, and four with 1, 2 and 8",
    ),
    SlowCases(
        "jaxserve/test_gguf_models.py",
        "test_names_values_and_configuration_of_each_family",
        "(?!(llama|gpt-oss|gemma2)-).*-True",
        "each family with a head of its own, and three with the embedding as the head",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_wide_heads",
        "320-float32|512-bfloat16",
        "the other type of each width",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_a_token_has_the_same_bits_in_a_chunk_and_alone",
        r".*(window|soft_cap).*-float32|\{\}-bfloat16",
        "each setting in one type",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_shared_pages_read_once_give_the_same_bits",
        "2-bfloat16|3-float32",
        "the other type of each number of rows",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_a_token_is_written_alike_alone_and_in_a_chunk",
        ".*(64.*-bfloat16|(80|512).*-float32)",
        "each size in one type",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_a_row_is_multiplied_alike_in_any_company|test_a_row_is_multiplied_alike_among_any_rows_of_any_experts",
        "sizes0-float32|sizes1-bfloat16|800-100-False-float32|37-9-True-bfloat16",
        "each size in one type",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_packed_weights_come_back_bit_for_bit",
        r"\((1, 1|31, 1|2, 3|7, 129)\)-float32|\((32, 32|33, 37|100, 64|90, 64)\)-bfloat16",
        "each shape in one type",
    ),
    SlowCases(
        "pallas_kernels/test_native.py",
        "test_soft_caps_of_any_size",
        r"0\.5|1000\.0",
        "30 and 100,000",
    ),
    SlowCases(
        "pallas_kernels/test_quantized_native.py",
        "test_matches_the_reference_in_odd_forms",
        "groups_of_6|float_zeros|int6_zeros|zero_of_uint8",
        "the other odd forms, with the same parts",
    ),
    SlowCases(
        "pallas_kernels/test_quantized_native.py",
        "test_a_row_is_multiplied_alike_in_any_company|test_a_row_is_multiplied_alike_among_any_rows_of_any_experts",
        "int8_channel|fp8_block|awq-True",
        "w8a8, awq, awq_bf16 and q4_k_int8",
    ),
    SlowCases(
        "pallas_kernels/test_paged_attention.py",
        "test_one_by_one_it_is_the_same",
        "xla-(edges|head_of_80)|pallas-interpret-(window|chunk_inside_a_page)",
        "each case on the other implementation",
    ),
    SlowCases(
        "pallas_kernels/test_paged_attention.py",
        "test_pages_that_all_rows_begin_with_are_read_as_well_together",
        "xla-(1|7|15)|pallas-interpret-(0|1|8)",
        "0 and 8 with XLA, 7 and 15 with Pallas",
    ),
    SlowCases(
        "pallas_kernels/test_paged_attention.py",
        "test_what_is_no_number_stays_with_its_text",
        "xla-rows(0-8|1-None)|pallas-interpret-rows(0-None|1-8)",
        "each pair of rows and tile on the other implementation",
    ),
    SlowCases(
        "pallas_kernels/test_paged_attention.py",
        "test_splits_of_contexts_shorter_than_they_are",
        "1|4",
        "3 and 16 splits",
    ),
    SlowCases(
        "pallas_kernels/test_paged_attention.py",
        "test_blocks_have_every_token_once",
        "1-(mixed_full|chunk_inside_a_page|many_rows|prefill)|64-(mixed|mixed_full|chunk_inside_a_page|many_rows)",
        "blocks of 8 tokens; blocks of 1 and 64 in a case each",
    ),
    SlowCases(
        "pallas_kernels/test_truncation_kernel.py",
        "test_ties_at_the_boundary_are_all_kept",
        "1-(xla|pallas-interpret)|2-(xla|native)",
        "one and two ties on the other implementations; 4,000 on all",
    ),
    SlowCases(
        "pallas_kernels/test_truncation_kernel.py",
        "test_rows_with_nothing_to_choose_from_do_no_harm",
        "-inf-(native|pallas-interpret)|nan-xla|inf-(xla|native)",
        "each value on one implementation, NaN on two",
    ),
    SlowCases(
        "pallas_kernels/test_truncation_kernel.py",
        "test_the_kernel_keeps_what_xla_keeps",
        "4095",
        "4097",
    ),
    SlowCases(
        "pallas_kernels/test_recurrent_kernels.py",
        "test_results_do_not_depend_on_chunks_or_the_batch|test_a_snapshot_is_the_state_of_a_shorter_prompt",
        "(delta_net|mamba2)-xla",
        "short_convolution-xla; native kernels; test_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_recurrent_kernels.py",
        "test_rows_outside_of_the_arrays_are_errors",
        "(lens1|starts|pages|snapshot_pages.*)-key_decays|(lens0|starts|snapshot_pages.*)-mamba2",
        "the same kernel with one decay per head; each error on two operations",
    ),
    SlowCases(
        "pallas_kernels/test_jax_triton.py",
        "test_interpreted_kernel_matches_reference",
        ".*-(rows_3|symmetric_group_32|no_rows|many_experts|odd_widths|gated_single)",
        "rows_33 and odd_splits; tile_borders and gated_rows_behind",
    ),
    SlowCases(
        "pallas_kernels/test_attention_parts.py",
        "test_parts_combined_are_the_attention",
        "paged_attention-native-window_one|latent_attention-native-bfloat16",
        "the other cases; both in test_kernels.py",
    ),
    SlowCases(
        "pallas_kernels/test_qkv_write.py",
        "test_rounds_where_the_layers_round",
        "(three_tokens|partial_rotation)-xla|(head_of_80|float32)-pallas-interpret",
        "each case on the other implementation",
    ),
    SlowCases(
        "pallas_kernels/test_broken_kernels.py",
        "test_broken_quantized_weights_are_noticed",
        "(swapped_nibbles|scale_of_the_next_group|factor_of_the_next_block)-None|(scale_of_the_next_output|zero_point_off_by_one)-group",
        "each fault with one kind of activations",
    ),
    SlowCases(
        "jaxserve/test_sampler.py",
        "test_tokens_are_distributed_as_their_probabilities",
        r"0\.5-.*-positions|2\.5-.*-seeds|1\.0-0-0\.8-0\.0-positions|1\.0-0-1\.0-0\.05-seeds|1\.5-.*-positions",
        "each setting over seeds or positions, the plain one over both",
    ),
    SlowCases(
        "jaxserve/test_sampler.py",
        "test_logprobs_are_those_of_float64",
        "7-20|20-(3|700)|700-20",
        "the other pairs",
    ),
    SlowCases(
        "jaxserve/test_sampler.py",
        "test_what_is_reported",
        "raw_logprobs-True|processed_logprobs-False|raw_logits-False|processed_logits-True",
        "each mode, chosen at run time or not",
    ),
    SlowCases(
        "jaxserve/test_sampler.py",
        "test_rows_with_nan_are_told_and_leave_others_alone",
        "one--1-(greedy|full)|one-1-sampled|all-1-(greedy|full)|all--1-sampled|forbidden--1-full",
        "the other sign of each",
    ),
    SlowCases(
        "jaxserve/test_steps.py",
        "test_a_decode_step_communicates_what_its_layout_states",
        "2-(True-.*|False-split)|4-(False-.*|True-one program)",
        "2-False-one program and 4-True-split",
    ),
    SlowCases(
        "jaxserve/test_steps.py",
        "test_the_state_is_updated_in_place",
        "2-False-split|4-True-one program",
        "the other four",
    ),
    SlowCases(
        "jaxserve/test_steps.py",
        "test_sampling_communicates_what_its_layout_states|test_steps_with_experts_communicate_what_their_layout_states",
        "(greedy|full)-tensor_parallel|1-expert_(all_reduce|gather)",
        "sampled-tensor_parallel and split logits; two devices of each part of the experts",
    ),
    SlowCases(
        "jaxserve/test_gguf_models.py",
        "test_tokens_are_those_of_the_decoded_weights",
        "llama, tied, small blocks-one device",
        "qwen2, mixtral and GPT-OSS; blocks of every type in quantized/test_gguf_blocks.py",
    ),
    SlowCases(
        "jaxserve/test_stored_weights.py",
        "test_stored_weights_compute_what_decoded_ones_do",
        "compressed-tensors 3 bits with zeros",
        "int8, fp8 blocks and gptq act-order; records of this format in quantized/test_records.py",
    ),
    SlowCases(
        "jaxserve/test_stored_weights.py",
        "test_float_weights_are_quantized_while_they_are_loaded|test_weights_move_bit_for_bit|test_answers_do_not_depend_on_the_batch",
        "int4_group|gptq 4 bits|file's",
        "int8_w8a8, and int4_group in test_what_is_written_quantized_is_what_loading_makes; gptq act-order; int8",
    ),
    SlowCases(
        "jaxserve/reshard/test_reshard.py",
        "test_weights_keep_their_bits|test_pages_keep_their_bits",
        "bfloat16 and fewer heads than devices|heads-xla|latents-None",
        "latents and experts; heads-None and latents-xla",
    ),
    SlowCases(
        "jaxserve/test_determinism.py",
        "test_any_schedule_gives_the_same_bits|test_native_kernels_give_the_same_bits_without_tiles",
        "width_norms_behind_split|llama_split",
        "latents_native_split, bfloat16_tied and experts_alone_split",
    ),
    SlowCases(
        "jaxserve/lab/test_lab_plan.py",
        "test_parts_have_the_collectives_of_the_whole_program",
        "config[247]-.*",
        "the same layouts of other models",
    ),
    SlowCases(
        "jaxserve/lab/test_calibration.py",
        "test_predictions_follow_from_the_calibration",
        "experts tensor=4 tensor_parallel",
        "dense data=4",
    ),
    SlowCases(
        "jaxserve/lab/test_real_plans.py",
        "test_supported_models_are_planned|test_published_sizes_are_planned",
        "gemma-2b-it|Ministral 3 3B|Granite 4.0 Micro 3B",
        "other real models; these models' tensors in test_weight_recipes.py and their layers in test_families.py",
    ),
    SlowCases(
        "jaxserve/test_stages.py",
        "test_requests_of_every_kind_are_as_on_one_device|test_one_request_alone_is_as_on_one_device",
        "two-1|two with tensor.*",
        "two-0 and two; stages of two devices in test_reshard.py and test_meshes.py",
    ),
    SlowCases(
        "jaxserve/test_stages.py",
        "test_stages_lower_for_gpus|test_what_a_draft_head_reads_goes_from_stage_to_stage",
        "sequence_parallel|split_logits",
        "tensor_parallel and context_parallel",
    ),
    SlowCases(
        "jaxserve/test_request_mix.py",
        "test_requests_together_are_as_each_alone|test_requests_that_are_preempted_are_as_each_alone|test_accuracy_holds_at_every_concurrency",
        "default-[12]|deterministic-[02]|overlapping-default|8",
        "one seed of each engine; the deterministic engine; 1 and 64 at a time",
    ),
    SlowCases(
        "jaxserve/test_engine_stories.py",
        "test_preempted_requests_have_the_same_tokens",
        "False",
        "True",
    ),
    SlowCases(
        "jaxserve/test_split_logits.py",
        "test_tokens_are_those_of_whole_rows|test_logprobs_of_every_mode",
        "2-5001-(distinct-(greedy|sampled)|ties-(greedy|full)|flat-sampled)|600-raw_logits",
        "each variant and each spread; processed logits and logprobs",
    ),
    SlowCases(
        "jaxserve/test_draft_rows.py",
        "test_drafts_change_no_token",
        "mixed-[12]-cpu",
        "wrong-2-cpu and mixed-1-gpu",
    ),
    SlowCases(
        "jaxserve/test_draft_rows.py",
        "test_a_token_stays_while_the_drafts_before_it_are_what_was_sampled",
        "3|8|1[368]",
        "the other seeds",
    ),
    SlowCases(
        "jaxserve/test_sequence_parallel.py",
        "test_steps_communicate_what_the_layout_states",
        "dense-True|sparse-True",
        "dense-False and latents-True",
    ),
    SlowCases(
        "jaxserve/test_embed.py",
        "test_an_aborted_request_leaves_nothing_behind",
        "[135]",
        "0, 2 and 4 steps",
    ),
    SlowCases(
        "jaxserve/test_lanes.py",
        "test_(?!aborts|requests_of_every).*",
        "gather",
        "the deterministic layout, with the same scheduler; gather in test_aborts_on_one_lane_leave_the_others_alone",
    ),
    SlowCases(
        "jaxserve/test_layers.py",
        "test_vocabulary_split|test_row_parallel_adds_its_bias_once|test_float32_products_are_not_rounded",
        "24-[14]|21-2|False-[14]|True-2|8",
        "the other numbers of devices",
    ),
    SlowCases(
        "jaxserve/test_layers.py",
        "test_a_kernel_that_writes_from_the_projection_changes_nothing",
        "bias-8-native|norm_of_width-None-native|no_rotation-8-native",
        "each case with or without tiles",
    ),
    SlowCases(
        "sharding/test_layouts.py",
        "test_layouts_that_are_not_in_the_registry|test_lanes_whose_devices_share_the_tokens_of_pages",
        "sparse-axes9-gathered|sparse-axes15-split|latents-axes17-split|gather",
        "the same axes on other models; all_to_all",
    ),
    SlowCases(
        "jaxserve/structured_output/test_grammars.py",
        "test_texts_of_random_schemas_validate|test_texts_of_random_patterns_match",
        "40|80|120|160",
        "the other seeds",
    ),
    SlowCases(
        "jaxserve/structured_output/test_grammars.py",
        "test_forced_text_uses_the_tokens_a_prompt_would",
        "deepseek-r1|llama2-model-only|mistral-v1",
        "qwen, llama2, mistral-v7, phi3 and gpt2",
    ),
    SlowCases(
        "jaxserve/test_detokenizer.py",
        "test_deltas_are_the_decode_of_real_tokenizers|test_stop_strings_of_real_tokenizers",
        "baichuan-7b|granite-3.1|llama2-model-only|mistral-v[12]|pythia",
        "tokenizers of the same kinds",
    ),
    SlowCases(
        "jaxserve/test_tool_parsers.py",
        "test_cut_anywhere|test_any_grouping_gives_the_same",
        ".*[13579]",
        "the even numbers of each parser; all of them in test_answers",
    ),
    SlowCases(
        "jaxserve/test_quantized_checkpoints.py",
        "test_each_kind_of_model_loads_quantized_weights",
        "qwen2, tied-nf4 double|phi-3-gptq act-order|qwen3-moe-fp8 blocks, ragged",
        "each model with two formats, and each format with two models",
    ),
    SlowCases(
        "jaxserve/test_draft_steps.py",
        "test_random_events_change_no_token_and_no_page",
        "[13]-[12]",
        "the other seeds",
    ),
    SlowCases(
        "jaxserve/test_interrupts.py",
        "test_a_signal_in_a_step_ends_its_call_alone",
        "(schedule|launch|collect)-(chat|encode|stream)|(complete|wait|_deliver)-(generate|embed|beam_search)",
        "each place in three calls, and each call in three places",
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

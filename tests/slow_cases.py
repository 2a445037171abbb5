"""Cases that repeat, on another layout, family or size, what the gate proves: slow tests, each with what covers it.

A test that is slow as a whole, or whose file decides which of its cases are, has the marker in its file.
"""

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
        "jaxserve/test_real_plans.py",
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
        "jaxserve/test_lab_plan.py",
        "test_the_model_of_temporaries_agrees_with_the_compiler",
        "Llama-3.1-70B on 8|Qwen2.5-14B on 8",
        "the same models on fewer devices",
    ),
    SlowCases(
        "jaxserve/test_calibration.py",
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
    SlowCases("jaxserve/test_grammars.py", "test_real_tokenizers", "deepseek-r1|phi3|granite-3.1", "other tokenizers"),
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
        "jaxserve/test_lab_plan.py",
        "test_parts_have_the_collectives_of_the_whole_program",
        ".*-prefill",
        "decode steps of the same layouts, and prefill steps of a stage",
    ),
)


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of ``SLOW_CASES``."""
    patterns = [re.compile(pattern_of(each)) for each in SLOW_CASES]
    for item in items:
        if any(pattern.fullmatch(item.nodeid) for pattern in patterns):
            item.add_marker(pytest.mark.slow)


def unmatched(node_ids: Sequence[str]) -> list[SlowCases]:
    """Return the entries that match none of the tests of their file; a test without its data has no cases."""
    present = {node_id.partition("::")[0] for node_id in node_ids}
    present -= {node_id.partition("::")[0] for node_id in node_ids if "[NOTSET]" in node_id}
    return [
        each
        for each in SLOW_CASES
        if f"tests/{each.file}" in present and not any(re.fullmatch(pattern_of(each), node_id) for node_id in node_ids)
    ]


def pattern_of(cases: SlowCases) -> str:
    """Return the regular expression of the tests' ids."""
    parameters = rf"\[({cases.parameters})\]" if cases.parameters else ""
    return rf"tests/{re.escape(cases.file)}::({cases.test}){parameters}"

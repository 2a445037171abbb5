"""The failure list, row by row: which tests make each failure happen."""

import ast
from pathlib import Path

ROWS: dict[int, tuple[str, ...]] = {
    1: (
        "test_a_client_that_leaves_gives_its_pages_back",
        "test_a_client_that_leaves_the_queue_leaves_it_within_a_step",
    ),
    2: ("test_a_deadline_in_the_queue_runs_no_prefill",),
    3: ("test_a_deadline_while_it_decodes_ends_the_stream",),
    4: (
        "test_a_burst_of_ten_times_the_capacity_is_cut",
        "test_grpc_says_when_to_try_again",
        "test_too_many_waiting_prompt_tokens_are_refused",
    ),
    5: (
        "test_a_client_that_stops_to_read_is_ended_and_delays_nobody",
        "test_a_grpc_client_that_stops_to_read_is_told_why_it_was_ended",
    ),
    6: ("test_a_client_that_is_killed_gives_its_pages_back", "test_a_peer_that_is_gone_without_a_word_is_found"),
    7: (
        "test_garbage_kills_nothing",
        "test_a_truncated_body_and_a_lying_length",
        "test_headers_and_bodies_are_bounded",
        "test_messages_and_metadata_are_bounded",
        "test_an_unknown_call_and_a_message_that_is_none",
    ),
    8: ("test_three_surfaces_one_verdict", "test_bad_parameters_are_refused_everywhere"),
    9: ("test_a_bad_grammar_fails_its_request_alone_and_soon", "test_a_template_that_never_ends_fails_alone"),
    10: ("test_an_exception_in_host_code_fails_its_request_alone",),
    11: ("test_nan_ends_its_request_is_not_cached_and_changes_no_neighbour",),
    12: (
        "test_a_pool_that_runs_out_gives_the_same_texts",
        "test_a_pool_that_a_request_could_be_too_large_for_is_refused",
    ),
    13: ("test_a_failing_step_ends_the_server_with_the_reason",),
    16: ("test_a_hung_step_is_found_and_its_stacks_written_down", "test_a_stopped_engine_is_found"),
    19: (
        "test_a_killed_engine_fails_all_at_once_and_ends_the_server",
        "test_an_engine_does_not_outlive_its_front_end",
        "test_an_engine_is_started_again_where_that_was_asked_for",
        "test_a_server_that_starts_takes_no_requests_yet",
    ),
    20: (
        "test_sigterm_lets_requests_end_and_takes_no_more",
        "test_requests_that_a_grace_is_too_short_for_are_cut",
        "test_a_second_sigterm_is_immediate",
    ),
    21: ("test_a_hung_step_is_found_and_its_stacks_written_down",),
    22: ("test_a_damaged_checkpoint_is_named", "test_a_damaged_file_is_named"),
    23: ("test_a_full_disk_is_no_reason_to_fail", "test_a_cache_that_cannot_be_written_is_no_reason_to_fail"),
    24: ("test_only_certificates_that_are_known_get_in_and_new_ones_are_taken",),
    25: ("test_every_door_asks_for_its_key",),
    26: ("test_a_clock_that_jumps_changes_no_timer",),
    27: ("test_callers_cannot_make_series",),
    28: ("test_a_minute_of_everything",),
}
"""Rows of the failure list that need one host, with their tests; 14, 15, 17 and 18 need several ranks."""


def test_every_row_of_the_failure_list_has_its_tests() -> None:
    """Names in the table are of tests in this folder."""
    assert set(range(1, 29)) - set(ROWS) == {14, 15, 17, 18}
    there = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name for names in ROWS.values() for name in names} - there == set()

"""Rules by which a campaign calls a promise broken."""

import pytest

from campaign.judgement import (
    GROWTH_BYTES,
    MIN_SAMPLES,
    QUIET_SECONDS,
    SILENCE,
    Event,
    Findings,
    Memory,
    Promise,
    Timed,
    ends_of,
    growth_bytes,
    is_unhandled,
    longest_silence,
    measured_slowdown,
    missed_time_limits,
)

AGAIN = {"retry-after": "3"}


@pytest.mark.parametrize("status", [200, 303, 400, 401, 413, 429, 499])
def test_an_answer_below_500_is_handled(status: int) -> None:
    assert not is_unhandled(status, {})


@pytest.mark.parametrize(
    ("status", "headers", "body", "unhandled"),
    [
        (500, {}, b"", True),
        (500, AGAIN, b"", True),
        (504, AGAIN, b"", True),
        (503, AGAIN, b"", False),
        (503, {}, b'{"error": {"code":"worker_not_ready"}}', True),
        (503, {}, b'{"error":{"code":"hub_offline"}}', False),
        (502, {}, b'{"error":{"code":"hub_hub_error"}}', False),
        (502, {}, b"", True),
        (500, {}, b'{"error":{"code":"hub_offline"}}', True),
    ],
)
def test_a_server_error_is_handled_only_where_it_says_when_to_come_again_or_blames_the_hub(
    status: int, headers: dict[str, str], body: bytes, unhandled: bool
) -> None:
    assert is_unhandled(status, headers, body) == unhandled


def test_a_stream_has_the_ends_that_it_told() -> None:
    chunk, error = 'data: {"choices":[]}', 'data: {"error":{"code":"worker_restarted"}}'
    assert ends_of([chunk, "", 'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}']) == []
    assert ends_of([chunk, "data: [DONE]"]) == ["done"]
    assert ends_of([chunk, error]) == ["error"]
    assert ends_of([error, "data: [DONE]"]) == ["error", "done"]


def test_a_stream_without_an_end_and_one_with_two_are_failures() -> None:
    findings = Findings()
    for ends in (["done"], ["error"], [], ["error", "done"]):
        findings.count_stream(ends, "a stream")
    assert (findings.tried, findings.failures) == (4, ["a stream: 0 ends (cut)", "a stream: 2 ends (error, done)"])


def heard(*events: tuple[float, str]) -> list[Event]:
    """Return events of a reader that never waits for a processor."""
    return [Event(*event) for event in events]


def test_silence_is_between_chunks_of_one_stream() -> None:
    events = heard((0.0, "begin"), (4.0, "chunk"), (5.0, "chunk"), (7.0, "chunk"), (8.0, "done"), (20.0, "begin"))
    assert longest_silence(events, 0.0, 30.0) == (2.0, 5.0)
    assert longest_silence([*events, *heard((21.0, "chunk"), (24.0, "error"))], 0.0, 30.0) == (3.0, 21.0)


def test_a_stream_that_has_not_ended_is_silent_until_now() -> None:
    assert longest_silence(heard((0.0, "begin"), (1.0, "chunk")), 0.0, 6.0) == (5.0, 1.0)


def test_silence_counts_within_the_turn_only() -> None:
    events = heard((0.0, "chunk"), (10.0, "chunk"), (11.0, "chunk"), (30.0, "chunk"))
    assert longest_silence(events, 8.0, 12.0) == (2.0, 8.0)
    assert longest_silence(events, 10.0, 11.0) == (1.0, 10.0)
    assert longest_silence([], 0.0, 9.0) == (0.0, 0.0)


def test_a_reader_that_waits_for_a_processor_hears_no_silence_meanwhile() -> None:
    events = [Event(0.0, "chunk", 0.1), Event(3.0, "chunk", 2.6), Event(4.0, "chunk", 2.6)]
    assert longest_silence(events, 0.0, 4.0) == (1.0, 3.0)


def test_a_machine_is_never_quicker_than_a_quiet_one() -> None:
    assert measured_slowdown([]) == 1.0
    assert measured_slowdown([QUIET_SECONDS / 10] * 5) == 1.0
    assert measured_slowdown([50 * QUIET_SECONDS]) == 1.0, "one alone says nothing"
    assert measured_slowdown([QUIET_SECONDS, 50 * QUIET_SECONDS, 2 * QUIET_SECONDS]) == 2.0


def test_a_promise_of_seconds_is_for_the_median_and_for_the_worst() -> None:
    promises = {"first token": Promise(10.0, 5.0)}

    def missed_by(*seconds: float, slow: float = 1.0) -> list[str]:
        return missed_time_limits(
            promises, {"first token": [Timed(duration, f"kill {duration:g}") for duration in seconds]}, slow
        )

    assert missed_by(1.0, 4.0, 9.0) == []
    assert missed_by(6.0, 6.0, 9.0) == ["first token, median: 6.00 s, promised 5 s, allowed here 5.00 s"]
    assert missed_by(1.0, 2.0, 11.0) == ["first token, worst: 11.00 s (kill 11), promised 10 s, allowed here 10.00 s"]
    assert len(missed_by(6.0, 6.0, 11.0)) == 2
    assert missed_by(6.0, 6.0, 11.0, slow=1.5) == []


def test_what_was_not_timed_and_what_nobody_promised_break_nothing() -> None:
    assert missed_time_limits({SILENCE: Promise(0.5)}, {}, 1.0) == []
    assert missed_time_limits({}, {SILENCE: [Timed(60.0)]}, 1.0) == []


def test_memory_leaks_where_the_second_half_of_a_life_adds_to_it() -> None:
    megabyte = 1 << 20
    warm = [Memory(1, 100 * megabyte)] * MIN_SAMPLES
    grown = [Memory(1, 200 * megabyte)] * MIN_SAMPLES
    assert growth_bytes(warm) == 0
    assert growth_bytes([Memory(1, 50 * megabyte), *warm]) == 0, "it warms up in the first half"
    assert growth_bytes([*warm, Memory(1, 100 * megabyte + GROWTH_BYTES)]) == 0
    assert growth_bytes([*warm, *grown]) == 100 * megabyte
    assert growth_bytes([*warm, *([Memory(2, 200 * megabyte)] * MIN_SAMPLES)]) == 0, "another process"
    assert growth_bytes([Memory(1, megabyte), Memory(1, 900 * megabyte)]) == 0, "two samples say nothing"


def test_findings_of_turns_add_up() -> None:
    findings, other = Findings(1, ["a"]), Findings(2, ["b"])
    findings.record_time(SILENCE, 0.1)
    other.record_time(SILENCE, 0.3, "long constant")
    other.record_time("first token", 4.0)
    findings.add(other)
    silences = [Timed(0.1), Timed(0.3, "long constant")]
    assert (findings.tried, findings.failures, findings.times) == (
        3,
        ["a", "b"],
        {SILENCE: silences, "first token": [Timed(4.0)]},
    )

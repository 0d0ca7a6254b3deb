"""Events that a client receives: text, stops, statistics, ends. Loop and scheduler are real, the engine is a fake."""

from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from app.core.errors import HubProblem, PacelineError, StoreUnavailable, error_class
from app.core.messages import (
    MEASUREMENT,
    Accepted,
    Cancel,
    Delta,
    Failed,
    Generate,
    ReadPrompt,
    Shutdown,
    TextWork,
    error_of,
    failed_frame,
)
from app.core.request import SamplingParameters, SpeculationRequest
from app.core.unit import LiveValues
from app.engine.loaded_unit import NoDrafter
from app.worker.answer import Answer, describe
from app.worker.text_thread import BACKLOG_BYTES
from app.worker.texts import PromptFuture
from app.worker.thread_commands import LoopCommand, Submission
from tests.worker import fakes
from tests.worker.fakes import FakeEngine, fake_read
from tests.worker.pair import Pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_request_is_accepted_streamed_and_finished_once(pair: Pair) -> None:
    pair.say(pair.ask())
    pair.settle()
    assert pair.of("r")[0] == Accepted(id="r", prompt_tokens=5)
    assert pair.text() == "abcdefghij"
    (finished,) = pair.finished()
    assert (finished.finish_reason, finished.usage.completion_tokens) == ("length", 10)
    assert not finished.usage.reason
    deltas = [event for event in pair.of("r") if isinstance(event, Delta)]
    assert sum(delta.tokens for delta in deltas) == 10
    counted = (sum(delta.drafted for delta in deltas), sum(delta.accepted for delta in deltas))
    assert counted == (finished.usage.drafted, finished.usage.accepted) != (0, 0)
    assert (deltas[0].method, deltas[0].accepted_spans) == ("ngram", ((0, 2),))
    assert pair.leases == 0
    assert pair.engine.rows == set()


def test_choices_draw_with_their_own_seeds_and_end_on_their_own(pair: Pair) -> None:
    command = pair.ask(n=3, sampling=SamplingParameters(seed=41))
    posted: list[LoopCommand] = []
    Answer(command, fake_read(command), 0.0, send=print, post=posted.append).begin(fake_read(command).result())
    (submission,) = posted
    assert isinstance(submission, Submission)
    assert [request.sampling.seed for request in submission.requests] == [41, 42, 43]
    pair.say(command)
    pair.settle()
    assert [finished.index for finished in pair.finished()] == [0, 1, 2]
    assert [pair.text(index=index) for index in range(3)] == ["abcdefghij"] * 3


def test_a_stop_string_ends_the_text_and_counts_to_the_last_told_token(pair: Pair) -> None:
    pair.say(pair.ask(stop=("ef",), max_tokens=100))
    pair.settle()
    assert pair.text() == "abcd"
    (finished,) = pair.finished()
    usage = finished.usage
    assert finished.finish_reason == "stop"
    assert usage.completion_tokens == 6
    assert (usage.drafted, usage.accepted, usage.cycles, usage.steps) == (4, 4, 2, 2)
    assert usage.accepted_per_position == (2, 2)
    assert usage.cached_tokens == 1
    assert usage.methods == ("ngram",)
    assert pair.leases == 0
    assert not pair.schedulers[0].has_work


def test_a_stop_inside_a_block_cuts_its_drafts(pair: Pair) -> None:
    pair.say(pair.ask(stop=("d",), max_tokens=100))
    pair.settle()
    usage = pair.finished()[0].usage
    assert (usage.completion_tokens, usage.drafted, usage.accepted) == (4, 3, 3)
    assert usage.accepted_per_position == (2, 1)


def test_tokens_without_text_ride_along(tmp_path: Path) -> None:
    pair = Pair(tmp_path, make_engine=lambda: FakeEngine(b"ab\x00"))
    pair.say(pair.ask(stop=("abxxx",), max_tokens=50, sampling=SamplingParameters(top_logprobs=1)))
    pair.settle()
    (delta,) = (event for event in pair.of("r") if isinstance(event, Delta))
    assert (delta.text, delta.tokens) == ("ab", 2)
    assert [token.token for token in delta.logprobs] == ["a", "b"]
    assert delta.logprobs[0].top == (("a", -0.5, (97,)), ("A", -2.0, (65,)))
    assert pair.finished()[0].finish_reason == "stop"


@pytest.mark.parametrize(("continues", "text"), [(True, " world wor"), (False, "world wor")])
def test_a_continued_answer_keeps_the_space_before_its_next_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continues: bool, text: str
) -> None:
    """SentencePiece writes a space before the first word of a text too."""
    monkeypatch.setattr(fakes, "TABLE", msgspec.structs.replace(fakes.TABLE, trims=True))
    pair = Pair(tmp_path, make_engine=lambda: FakeEngine(b" world"))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    pair.say(pair.ask(text=None, messages=messages, continues=continues))
    pair.settle()
    assert pair.text() == text


def test_text_that_waited_keeps_the_method_that_drafted_it(pair: Pair) -> None:
    pair.say(pair.ask(stop=("abcx",), max_tokens=4))
    pair.settle()
    (delta,) = (event for event in pair.of("r") if isinstance(event, Delta))
    assert (delta.text, delta.drafted, delta.method) == ("abcd", 2, "ngram")


def test_echo_tells_the_prompt_first(pair: Pair) -> None:
    pair.say(pair.ask("text", echo=True), pair.ask("ids", text=None, tokens=[104, 105], echo=True))
    pair.settle()
    assert pair.text("text") == "helloabcdefghij"
    assert pair.text("ids") == "hiabcdefghij"


def test_max_tokens_zero_reads_the_prompt_and_tells_no_text(pair: Pair) -> None:
    pair.say(pair.ask(max_tokens=0))
    pair.settle()
    (finished,) = pair.finished()
    assert (pair.text(), finished.finish_reason, finished.usage.completion_tokens) == ("", "length", 0)


def test_max_tokens_none_means_the_whole_context(pair: Pair) -> None:
    pair.say(pair.ask(max_tokens=None))
    pair.settle(150)
    assert pair.finished()[0].usage.completion_tokens == 195


def test_chat_messages_are_rendered(pair: Pair) -> None:
    pair.say(pair.ask(text=None, messages=[{"role": "user", "content": "hey"}]))
    pair.settle()
    assert pair.of("r")[0] == Accepted(id="r", prompt_tokens=3)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"text": None}, "InvalidRequest"),
        ({"tokens": [1]}, "InvalidRequest"),
        ({"text": ""}, "InvalidRequest"),
        ({"text": None, "tokens": [256]}, "InvalidRequest"),
        ({"text": None, "tokens": [-1]}, "InvalidRequest"),
        ({"n": 0}, "InvalidRequest"),
        ({"max_tokens": -1}, "InvalidRequest"),
        ({"text": "x" * 300}, "InvalidRequest"),
        ({"text": "€"}, "PacelineError"),
    ],
)
def test_what_cannot_run_fails_before_it_is_accepted_and_the_next_one_runs(
    pair: Pair, changes: dict[str, object], error: str
) -> None:
    pair.say(pair.ask("bad", **changes), pair.ask("good"))
    pair.settle()
    (failed,) = pair.of("bad")
    assert failed in pair.failed("bad")
    assert pair.failed("bad")[0].error == error
    assert error_class(error).__name__ == error
    assert pair.text("good") == "abcdefghij"
    assert pair.leases == 0


@pytest.mark.parametrize("error", [HubProblem("gated"), StoreUnavailable("it is locked"), NoDrafter("draft model")])
def test_an_error_that_is_made_in_another_way_crosses_too(error: PacelineError) -> None:
    crossed = error_of(failed_frame("r", error))
    assert (crossed.message, crossed.code, crossed.status) == (error.message, error.code, type(crossed).status)
    assert isinstance(error, type(crossed))


def test_a_full_queue_refuses_all_choices_together(pair: Pair) -> None:
    model = pair.model("m", live=LiveValues(queue_limit=2))
    pair.say(Generate(id="r", model=model, text="x", n=3, max_tokens=5))
    pair.settle()
    (failed,) = pair.of("r")
    assert failed == pair.failed()[0]
    assert (failed.error, failed.retry_after_seconds) == ("QueueFull", 1)
    assert pair.leases == 0
    assert not pair.schedulers[0].has_work


def test_a_missing_folder_is_an_unavailable_model(pair: Pair) -> None:
    command = pair.ask()
    Path(command.model.path).rmdir()
    pair.say(command)
    pair.settle()
    assert pair.failed()[0].error == "ModelUnavailable"


def test_cancel_ends_every_choice_at_what_was_told(pair: Pair) -> None:
    pair.say(pair.ask(n=2, max_tokens=150))
    pair.settle(8)
    length = len(pair.text())
    assert 0 < length < 150
    pair.say(Cancel(id="r"), Cancel(id="r"), Cancel(id="nobody"))
    pair.settle()
    assert [finished.finish_reason for finished in pair.finished()] == ["cancelled"] * 2
    assert pair.finished()[0].usage.completion_tokens == len(pair.text())
    assert pair.leases == 0
    assert pair.engine.rows == set()


def test_shutdown_lets_running_requests_finish_and_refuses_new_ones(pair: Pair) -> None:
    pair.say(pair.ask())
    pair.settle(6)
    pair.say(Shutdown(drain_seconds=60), pair.ask("late"))
    while pair.turn():
        pass
    assert pair.finished()[0].finish_reason == "length"
    assert pair.failed("late")[0].code == "stopping"


@pytest.mark.parametrize("second", [False, True])
def test_at_the_end_of_the_drain_the_rest_fails(pair: Pair, second: bool) -> None:
    pair.say(pair.ask(max_tokens=150), Shutdown(drain_seconds=60))
    for _ in range(8):
        assert pair.turn()
    if second:
        pair.say(Shutdown(drain_seconds=60))
    else:
        pair.now += 61
    assert not pair.turn()
    assert pair.failed()[0].error == "WorkerGone"


def test_a_backlog_is_refused_at_the_door(tmp_path: Path) -> None:
    slow = Slow()
    pair = Pair(tmp_path, backlog_limit=3, read=slow)
    pair.say(*(pair.ask(f"r{number}") for number in range(5)))
    pair.settle()
    assert [event.id for event in pair.failed("r3") + pair.failed("r4")] == ["r3", "r4"]
    assert pair.failed("r3")[0].error == "QueueFull"
    for future in slow.futures:
        future.set_result(fake_read(pair.ask()).result())
    pair.settle()
    assert [pair.text(f"r{number}") for number in range(3)] == ["abcdefghij"] * 3


def test_a_full_backlog_is_its_owners_own(tmp_path: Path) -> None:
    slow = Slow()
    pair = Pair(tmp_path, backlog_limit=2, read=slow)
    pair.say(*(pair.ask(f"r{number}", owner="busy") for number in range(3)), pair.ask("other", owner="calm"))
    pair.settle()
    assert [event.error for event in pair.failed("r2")] == ["QueueFull"]
    assert pair.failed("other") == []


def test_prompts_that_wait_are_limited_in_bytes_and_one_alone_is_not(tmp_path: Path) -> None:
    slow = Slow()
    pair = Pair(tmp_path, read=slow)
    pair.text_thread.receive(pair.ask("huge", owner="busy"), BACKLOG_BYTES + 1)
    pair.text_thread.receive(pair.ask("more", owner="busy"), 1)
    pair.settle()
    assert [bool(pair.failed(name)) for name in ("huge", "more")] == [False, True]
    slow.futures[0].set_result(fake_read(pair.ask()).result())
    pair.settle()
    pair.text_thread.receive(pair.ask("later", owner="busy"), 1)
    pair.settle()
    assert len(slow.futures) == 2


def test_times_count_from_the_moment_of_receipt(pair: Pair) -> None:
    pair.say(pair.ask(), pair.ask("stopped", stop=("g",)))
    pair.now += 2.0
    pair.settle()
    for request_id in ("r", "stopped"):
        usage = pair.finished(request_id)[0].usage
        assert usage.queue_seconds >= 2.0
    assert pair.finished("stopped")[0].usage.first_token_seconds >= 2.0


def test_the_log_line_says_what_ran(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="paceline.request"):
        pair.say(pair.ask(stop=("ef",)))
        pair.settle()
    (record,) = caplog.records
    line = describe("m", pair.finished()[0])
    assert record.getMessage() == line
    for words in ("r#0 model=m finish=stop method=ngram", "drafted=4 accepted=4 rate=1.00 tokens_per_cycle=3.000"):
        assert words in line


def test_the_log_has_no_line_for_each_turn_of_a_measurement(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="paceline.request"):
        pair.say(pair.ask(owner=MEASUREMENT))
        pair.settle()
    assert pair.finished()
    assert caplog.records == []


def test_what_the_text_side_was_busy_with_is_told(pair: Pair) -> None:
    pair.say(pair.ask(), pair.ask("bad", text="€"))
    pair.settle()
    seconds = [event.seconds for event in pair.events if isinstance(event, TextWork)]
    assert seconds == [{"tokenize": 0.5}, {"render": 0.25}]


class Slow:
    """A prompt reader whose futures are resolved by the test."""

    def __init__(self) -> None:
        self.futures: list[PromptFuture] = []

    def __call__(self, _: Generate) -> PromptFuture:
        self.futures.append(Future())
        return self.futures[-1]


def test_a_prompt_that_takes_long_holds_up_neither_streams_nor_others(tmp_path: Path) -> None:
    slow = Slow()
    pair = Pair(tmp_path, read=lambda command: (slow if command.id == "slow" else fake_read)(command))
    pair.say(pair.ask("running"), pair.ask("slow"), pair.ask("next"))
    pair.settle()
    assert (pair.text("running"), pair.text("next"), pair.of("slow")) == ("abcdefghij", "abcdefghij", [])
    slow.futures[0].set_result(fake_read(pair.ask()).result())
    pair.settle()
    assert pair.text("slow") == "abcdefghij"


def test_a_client_that_leaves_while_its_prompt_is_read_is_forgotten(tmp_path: Path) -> None:
    slow = Slow()
    pair = Pair(tmp_path, read=slow)
    pair.say(pair.ask("waiting", n=2), Cancel(id="waiting"), pair.ask("begun"))
    pair.settle()
    assert slow.futures[0].cancelled()
    slow.futures[1].set_running_or_notify_cancel()
    pair.say(Cancel(id="begun"))
    pair.settle()
    slow.futures[1].set_result(fake_read(pair.ask()).result())
    pair.settle()
    ends = [
        (event.id, event.index, event.finish_reason) for name in ("waiting", "begun") for event in pair.finished(name)
    ]
    assert ends == [("waiting", 0, "cancelled"), ("waiting", 1, "cancelled"), ("begun", 0, "cancelled")]
    assert pair.leases == 0


def test_a_prompt_that_is_still_read_when_the_server_stops_is_told(tmp_path: Path) -> None:
    pair = Pair(tmp_path, read=Slow())
    pair.say(pair.ask(), Shutdown(drain_seconds=60))
    for _ in range(3):
        assert pair.turn()
    pair.now += 61
    assert not pair.turn()
    assert pair.failed()[0].code == "stopping"


@pytest.mark.parametrize("kind", ["generate", "count"])
@pytest.mark.parametrize("way", ["at once", "later"])
def test_a_computer_that_can_start_no_process_fails_a_request_and_no_stream(
    tmp_path: Path, kind: str, way: str
) -> None:
    broken: PromptFuture = Future()
    broken.set_exception(OSError(24, "Too many open files"))

    def read(command: Generate) -> PromptFuture:
        if command.id == "running":
            return fake_read(command)
        if way == "at once":
            raise RuntimeError("can't start new thread")
        return broken

    pair = Pair(tmp_path, read=read)
    asked = pair.ask("r")
    pair.say(pair.ask("running"), asked if kind == "generate" else ReadPrompt(id="r", prompt=asked))
    pair.settle()
    assert "could not be answered" in pair.failed("r")[0].message
    assert pair.text("running") == "abcdefghij"


def test_prompts_that_are_only_counted_wait_and_leave_like_others(tmp_path: Path) -> None:
    readings = list[PromptFuture]()

    def read(_command: Generate) -> PromptFuture:
        readings.append(Future())
        return readings[-1]

    pair = Pair(tmp_path, read=read, backlog_limit=2)
    pair.say(*(ReadPrompt(id=name, prompt=pair.ask(name)) for name in ("first", "left", "too many")))
    pair.say(Cancel(id="left"))
    pair.settle()
    assert [reading.cancelled() for reading in readings] == [False, True]
    assert [failed.code for failed in pair.failed("too many")] == ["queue_full"]
    assert pair.of("left") == []
    pair.say(Shutdown(drain_seconds=60), ReadPrompt(id="late", prompt=pair.ask("late")))
    pair.turn()
    assert [failed.code for failed in pair.failed("late")] == ["stopping"]
    pair.now += 61
    assert not pair.turn()
    assert [failed.code for failed in pair.failed("first")] == ["stopping"]


def test_why_nothing_is_drafted_is_told_when_it_changes(pair: Pair) -> None:
    pair.say(pair.ask("a", max_tokens=12, speculation=SpeculationRequest(method="off")))
    pair.settle()
    reasons = [event.why_not_drafted for event in pair.of("a") if isinstance(event, Delta)]
    assert reasons[0]
    assert not any(reasons[1:])
    (finished,) = pair.finished("a")
    assert reasons[0] == finished.usage.reason


def test_a_bias_for_tokens_that_the_model_does_not_have_is_refused_by_name(pair: Pair) -> None:
    pair.say(pair.ask(sampling=SamplingParameters(logit_bias={3: 1.0, 256: 1.0, 999_999: 1.0})))
    pair.settle()
    (failed,) = pair.of("r")
    assert isinstance(failed, Failed)
    assert (failed.error, failed.parameter) == ("InvalidRequest", "logit_bias")
    assert "no token 256, 999999; its ids are 0 to 255" in failed.message


def test_the_log_says_nothing_of_a_prompt_that_cannot_be_read(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="paceline.request"):
        pair.say(pair.ask(text="€"))
        pair.settle()
    assert pair.failed()
    assert caplog.records == []

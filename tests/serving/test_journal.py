"""Records of requests: what is counted, how they end, what is written, and what never is."""

import asyncio
import threading
import timeit
from collections.abc import Sequence
from pathlib import Path
from time import process_time

import pytest

from app.core.errors import ModelUnavailable, StoreUnavailable
from app.core.messages import Accepted, Delta, Finished, Generate, LoadProgress
from app.core.reason import NO_REASON, Reason
from app.core.request import FinishedRequest, SamplingParameters
from app.core.statistics import MethodStatistics, Statistics
from app.core.unit import LiveValues, ModelSpecification
from app.serving.journal import Journal
from app.serving.metrics import Metrics
from app.serving.record import Record
from app.store.rows import RequestHistory
from app.store.store import FILE_NAME, Store

pytestmark = pytest.mark.anyio
SECRET = "the prompt nobody may find"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Time:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Broken(RequestHistory):
    """A history that cannot be written until it is `mended`."""

    def __init__(self) -> None:
        self.mended = False
        self.kept: list[str] = []

    def save(self, requests: Sequence[FinishedRequest], limit: int) -> None:
        if not self.mended:
            raise StoreUnavailable("no room")
        self.kept += [request.id for request in requests]

    def page(self, *, count: int, before: str = "", model_id: str = "", outcome: str = "") -> list[FinishedRequest]:
        raise StoreUnavailable("no room")

    def clear(self) -> None:
        raise StoreUnavailable("no room")


class Slow(Broken):
    """A history whose writes wait until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.mended = True
        self.writes, self.goes_on = threading.Event(), threading.Event()

    def save(self, requests: Sequence[FinishedRequest], limit: int) -> None:
        if requests:
            self.writes.set()
            self.goes_on.wait()
        super().save(requests, limit)


def opened(
    journal: Journal,
    name: str = "r",
    *,
    prompts: int = 1,
    n: int = 1,
    created_at: float = 1.0,
    metrics: Metrics | None = None,
) -> Record:
    model = ModelSpecification(id="m", path="/m", live=LiveValues(draft_unavailable="no drafter fits"))
    commands = [
        Generate(
            id=f"{name}-{at}",
            model=model,
            text=SECRET,
            n=n,
            max_tokens=10,
            stop=(SECRET,),
            sampling=SamplingParameters(seed=3, temperature=0.5),
        )
        for at in range(prompts)
    ]
    named = {"id": name, "endpoint": "/v1/completions", "key_name": "a key"}
    return Record(journal, metrics or Metrics(), commands, **named, created_at=created_at)


def delta(tokens: int = 1, **changes: object) -> Delta:
    return Delta(id="r-0", index=0, text="word", tokens=tokens, **changes)  # type: ignore[arg-type]


def finished(index: int = 0, id: str = "r-0", **usage: object) -> Finished:  # noqa: A002
    return Finished(id=id, index=index, finish_reason="stop", usage=Statistics(**usage))  # type: ignore[arg-type]


def run(journal: Journal, name: str = "r", created_at: float = 1.0) -> Record:
    record = opened(journal, name, created_at=created_at)
    record.begin(lambda _error: None)
    record.on_event(Accepted(id=f"{name}-0", prompt_tokens=5))
    record.on_event(delta())
    record.on_event(finished(id=f"{name}-0", completion_tokens=1, prompt_tokens=5))
    return record


def history(folder: Path) -> RequestHistory:
    return RequestHistory(Store(folder / FILE_NAME))


async def test_a_request_goes_through_its_phases_and_their_seconds_add_up() -> None:
    time = Time()
    journal = Journal(clock=time)
    record = opened(journal)
    assert journal.running == []
    record.begin(lambda _error: None)
    time.now += 2
    for fraction in (0.0, 0.5, 1.0):
        journal.on_event(LoadProgress(model_id="m", phase="weights", fraction=fraction))
        journal.on_event(LoadProgress(model_id="another", phase="weights", fraction=fraction))
        time.now += 1
    assert record.seconds() == {"queue": 3.0, "load": 2.0, "prefill": 0.0, "decode": 0.0, "total": 5.0}
    record.on_event(Accepted(id="r-0", prompt_tokens=40))
    time.now += 4
    assert (record.is_accepted, record.has_first_token) == (True, False)
    record.on_event(delta(3, drafted=4, accepted=2, method="ngram", why_not_drafted=NO_REASON))
    time.now += 2
    record.on_event(delta(1, why_not_drafted=Reason("batched")))
    assert record.seconds() == {"queue": 3.0, "load": 2.0, "prefill": 4.0, "decode": 2.0, "total": 11.0}
    assert (record.tokens_per_second, record.acceptance, record.method) == (2.0, 0.5, "off")
    assert record.why_not_drafted == Reason("batched")
    record.close()
    (past,) = journal.recent
    assert past.outcome == "cancelled"
    assert past.figures["speculation"]["method"] == "ngram"
    assert past.figures["usage"]["completion_tokens"] == 4
    time.now += 100
    assert record.elapsed_seconds == 11.0


async def test_what_the_worker_told_at_the_end_goes_before_what_was_counted() -> None:
    journal = Journal()
    record = opened(journal)
    record.begin(lambda _error: None)
    record.on_event(Accepted(id="r-0", prompt_tokens=40))
    usage = {"prompt_tokens": 40, "completion_tokens": 9, "prefill_seconds": 1.5, "decode_seconds": 3.0}
    methods = (MethodStatistics("dflash", steps=4, drafted=8, accepted=6, accepted_per_position=(4, 2)),)
    record.on_event(finished(**usage, by_method=methods))
    (past,) = journal.recent
    assert past.figures["seconds"]["prefill"] == 1.5
    assert past.figures["seconds"]["decode"] == 3.0
    assert past.figures["speculation"]["accepted_per_position"] == [4, 2]
    assert past.figures["speculation"]["reason"] == "no drafter fits"
    assert past.figures["asked"]["sampling"]["temperature"] == 0.5
    assert (past.key_name, past.endpoint, past.outcome) == ("a key", "/v1/completions", "stop")


async def test_a_cancelled_request_gets_the_figures_that_the_worker_tells_afterwards(tmp_path: Path) -> None:
    journal, metrics = Journal(history(tmp_path)), Metrics()
    record = opened(journal, n=2, metrics=metrics)
    record.begin(lambda _error: None)
    record.on_event(Accepted(id="r-0", prompt_tokens=40))
    record.on_event(delta(3, drafted=4, accepted=2, method="ngram"))
    record.close()
    await journal.flush()
    assert journal.recent[0].figures["usage"]["completion_tokens"] == 3
    for index in range(2):
        methods = (MethodStatistics("ngram", steps=2, drafted=6, accepted=3),)
        usage = Statistics(cached_tokens=38, completion_tokens=4, decode_seconds=0.5, by_method=methods)
        journal.on_event(Finished(id="r-0", index=index, finish_reason="cancelled", usage=usage))
    (past,) = journal.recent
    await journal.flush()
    assert past == history(tmp_path).find("r")
    drafting = metrics.drafting("m")["ngram"]
    assert (drafting["drafted"], drafting["accepted"]) == (12, 6), "`/metrics` counts it too"
    assert (past.outcome, history(tmp_path).count()) == ("cancelled", 1)
    assert past.figures["usage"] == {"prompt_tokens": 0, "cached_tokens": 38, "completion_tokens": 8}
    assert past.figures["speculation"]["tokens_per_cycle"] == 2.5
    assert past.figures["timings"]["predicted_per_second"] == 16.0
    journal.on_event(Finished(id="r-0", index=0, finish_reason="cancelled", usage=Statistics()))
    assert journal.recent == [past]


async def test_a_request_that_was_cancelled_before_all_its_prompts_were_sent_gets_its_figures_too() -> None:
    journal = Journal(keeps_texts=lambda: True)
    record = opened(journal, prompts=3)
    record.begin(lambda _error: None)
    for name in ("r-0", "r-1"):
        record.on_event(Accepted(id=name, prompt_tokens=5))
    record.on_event(finished(id="r-0", completion_tokens=7))
    record.close()
    assert {command.text for command in record.commands} == {None}, "nothing large is kept while the rest is waited for"
    journal.on_event(Finished(id="r-1", index=0, finish_reason="cancelled", usage=Statistics(completion_tokens=2)))
    (past,) = journal.recent
    assert past.figures["usage"]["completion_tokens"] == 9
    journal.on_event(Finished(id="r-1", index=0, finish_reason="cancelled", usage=Statistics(completion_tokens=3)))
    assert journal.recent == [past], "it came once"


async def test_what_was_cancelled_before_it_was_read_is_counted_by_the_clock() -> None:
    time = Time()
    journal = Journal(clock=time)
    record = opened(journal)
    record.begin(lambda _error: None)
    time.now += 2
    record.close()
    (past,) = journal.recent
    assert (past.outcome, past.figures["seconds"]["queue"]) == ("cancelled", 2.0)
    assert past.figures["usage"]["completion_tokens"] == 0


async def test_what_is_deleted_stays_deleted_when_figures_come_afterwards(tmp_path: Path) -> None:
    journal = Journal(history(tmp_path), keeps_texts=lambda: True)
    record = opened(journal)
    record.begin(lambda _error: None)
    record.on_event(Accepted(id="r-0", prompt_tokens=5))
    record.close()
    await journal.clear()
    journal.on_event(Finished(id="r-0", index=0, finish_reason="cancelled", usage=Statistics()))
    await journal.flush()
    assert journal.recent == []
    assert history(tmp_path).count() == 0


async def test_what_the_store_does_not_delete_stays_and_what_ends_meanwhile_too() -> None:
    broken = Broken()
    journal = Journal(broken)
    run(journal, "a")
    with pytest.raises(StoreUnavailable):
        await journal.clear()
    assert [past.id for past in journal.recent] == ["a"]
    broken.mended = True
    broken.clear = lambda: run(journal, "b")  # type: ignore[method-assign]
    await journal.clear()
    assert [past.id for past in journal.recent] == ["b"]
    await journal.flush()
    assert broken.kept == ["b"]


async def test_several_choices_of_several_prompts_are_one_request() -> None:
    journal = Journal()
    record = opened(journal, prompts=2, n=2)
    record.begin(lambda _error: None)
    for name in ("r-0", "r-1"):
        record.on_event(Accepted(id=name, prompt_tokens=5))
    for name, index in (("r-0", 0), ("r-1", 1), ("r-0", 1), ("r-1", 0)):
        assert journal.running == [record]
        record.on_event(finished(index, name, prompt_tokens=5, completion_tokens=7))
    assert journal.running == []
    (past,) = journal.recent
    assert past.figures["usage"]["completion_tokens"] == 28
    assert past.figures["usage"]["prompt_tokens"] == 10


async def test_an_error_is_its_outcome_and_the_first_end_is_the_only_one() -> None:
    journal = Journal()
    record = opened(journal)
    record.begin(lambda _error: None)
    record.on_event(ModelUnavailable("x" * 1000))
    record.close()
    record.on_event(finished())
    (past,) = journal.recent
    assert past.outcome == "model_unavailable"
    assert len(past.figures["problem"]) == 300


async def test_texts_are_kept_only_where_that_is_switched_on(tmp_path: Path) -> None:
    for keeps in (False, True):
        folder = tmp_path / str(keeps)
        journal = Journal(history(folder), keeps_texts=lambda keeps=keeps: keeps)  # type: ignore[misc]
        run(journal)
        await journal.flush()
        row = history(folder).find("r")
        assert row is not None
        assert (row.prompt, row.reply) == ((SECRET, "word") if keeps else (None, None))
        assert history(folder).page(count=5)[0].prompt is None
        assert journal.recent[0].prompt is None
        content = b"".join(path.read_bytes() for path in folder.iterdir())
        assert (SECRET.encode() in content) == keeps
        await journal.clear()
        assert SECRET.encode() not in b"".join(path.read_bytes() for path in folder.iterdir())
        assert history(folder).count() == 0


async def test_the_oldest_beyond_the_limit_are_forgotten_and_a_lower_limit_is_felt(tmp_path: Path) -> None:
    limits = {"now": 5}
    kept = history(tmp_path)
    journal = Journal(kept, limit=lambda: limits["now"])
    for number in range(8):
        run(journal, f"r{number}", created_at=float(number))
        await journal.flush()
    assert [past.id for past in kept.page(count=10)] == ["r7", "r6", "r5", "r4", "r3"]
    assert len(journal.recent) == 5
    limits["now"] = 2
    await journal.flush()
    assert kept.count() == 2
    limits["now"] = 0
    run(journal, "r9", created_at=9.0)
    await journal.flush()
    assert (kept.count(), list(journal.recent)) == (0, [])


async def test_many_surplus_requests_go_at_once(tmp_path: Path) -> None:
    kept = history(tmp_path)
    source = Journal()
    past = run(source).past()
    kept.save([FinishedRequest(**{**_values(past), "id": f"r{n}", "created_at": float(n)}) for n in range(700)], 1_000)
    kept.save([], 10)
    assert [row.id for row in kept.page(count=20)] == [f"r{n}" for n in range(699, 689, -1)]


def _values(past: FinishedRequest) -> dict[str, object]:
    return {name: getattr(past, name) for name in FinishedRequest.__dataclass_fields__}


async def test_pages_follow_each_other_and_can_be_narrowed(tmp_path: Path) -> None:
    kept = history(tmp_path)
    assert (kept.page(count=5), kept.find("r"), kept.models(), kept.count()) == ([], None, [], 0)
    past = run(Journal()).past()
    outcomes = ("stop", "length", "cancelled", "queue_full")
    kept.save(
        [
            FinishedRequest(
                **{
                    **_values(past),
                    "id": f"r{n}",
                    "created_at": 1.0,
                    "outcome": outcomes[n % 4],
                    "model_id": f"m{n % 2}",
                }
            )  # type: ignore[arg-type]
            for n in range(8)
        ],
        100,
    )
    first = kept.page(count=3)
    second = kept.page(count=10, before=first[-1].id)
    assert [row.id for row in (*first, *second)] == [f"r{n}" for n in range(7, -1, -1)]
    assert kept.page(count=5, before="nobody") == []
    assert {row.outcome for row in kept.page(count=9, outcome="fine")} == {"stop", "length"}
    assert {row.outcome for row in kept.page(count=9, outcome="failed")} == {"queue_full"}
    assert {row.model_id for row in kept.page(count=9, model_id="m1")} == {"m1"}
    assert kept.models() == ["m0", "m1"]


async def test_a_store_that_cannot_be_written_costs_no_request_and_is_tried_again() -> None:
    broken = Broken()
    journal = Journal(broken)
    run(journal, "a")
    await journal.flush()
    run(journal, "b")
    await journal.flush()
    assert [past.id for past in journal.recent] == ["b", "a"]
    broken.mended = True
    await journal.flush()
    assert broken.kept == ["a", "b"]
    assert not journal.has_unwritten


async def test_who_reads_while_a_request_is_being_written_waits_for_it() -> None:
    slow = Slow()
    journal = Journal(slow)
    run(journal)
    writing = asyncio.create_task(journal.flush())
    await asyncio.to_thread(slow.writes.wait)
    assert journal.has_unwritten
    reading = asyncio.create_task(journal.flush())
    slow.goes_on.set()
    await reading
    assert slow.kept == ["r"]
    await writing
    assert not journal.has_unwritten


async def test_an_end_waits_for_what_is_just_being_written() -> None:
    slow = Slow()
    journal = Journal(slow, period_seconds=0.0)
    running = asyncio.create_task(journal.run())
    run(journal)
    await asyncio.to_thread(slow.writes.wait)
    running.cancel()
    assert not (await asyncio.wait({running}, timeout=0.2))[0]
    slow.goes_on.set()
    await asyncio.wait({running})
    assert slow.kept == ["r"]


async def test_what_fails_too_often_is_dropped_lest_it_keeps_others_out() -> None:
    broken = Broken()
    journal = Journal(broken)
    run(journal, "poison")
    for _ in range(10):
        await journal.flush()
    broken.mended = True
    run(journal, "good")
    await journal.flush()
    assert broken.kept == ["good"]


async def test_a_step_of_a_stream_costs_next_to_nothing() -> None:
    for keeps_texts in (False, True):
        record = opened(Journal(keeps_texts=lambda keeps=keeps_texts: keeps))  # type: ignore[misc]
        event = delta(4, drafted=4, accepted=3, method="ngram")
        clock = timeit.Timer(lambda: record.on_event(event), timer=process_time)  # noqa: B023
        best = min(clock.repeat(number=2_000, repeat=5)) / 2_000
        assert best < 20e-6

"""The client over a supervised fake worker: streams, cancels, loads, slow readers, subscriptions."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from app.core.errors import InvalidRequest, ModelInUse, PacelineError, QueueFull, WorkerGone
from app.core.messages import (
    Accepted,
    Delta,
    Finished,
    Generate,
    Heartbeat,
    KeepModels,
    LoadProgress,
    ModelLoaded,
    Ready,
    Snapshot,
)
from app.core.unit import LiveValues, LoadedModel, ModelSpecification, Stay
from app.supervision.book import ModelBook
from app.supervision.client import WorkerClient
from app.supervision.stream import MAX_IN_FLIGHT, RequestStream
from tests.worker.serving import DEADLINE_SECONDS, QUICK, ask, collect, serving, until

SLOW = ModelSpecification(id="slow", path="/models/slow")
FAST = ModelSpecification(id="fast", path="/models/fast")
OTHER = ModelSpecification(id="other", path="/models/other")


async def exhaust(stream: RequestStream) -> None:
    while stream.running:
        await stream.next()


def cancelled(event: object) -> bool:
    return isinstance(event, Finished) and event.finish_reason == "cancelled"


def test_streams_loads_and_snapshot() -> None:
    async def scenario() -> None:
        async with serving() as client:
            events = await collect(client, ask("words 3", n=2))
            assert isinstance(events[0], Accepted)
            assert [event.text for event in events if isinstance(event, Delta) and event.index == 1] == [
                "0 ",
                "1 ",
                "2 ",
            ]
            assert [event.index for event in events if isinstance(event, Finished)] == [0, 1]
            phases: list[str] = []
            client.subscribe(lambda event: phases.append(event.phase) if isinstance(event, LoadProgress) else None)
            assert (await client.load(FAST)).model_id == "fast"
            assert phases == ["weights", "ready"]
            assert client.book.progress == {}
            await client.unload("fast")
            await until(client, lambda event: isinstance(event, Heartbeat))
            assert [model.id for model in client.book.snapshot.models] == ["fake"]
            assert not client.in_flight

    asyncio.run(scenario())


def stay_of(model_id: str, stay: Stay) -> Callable[[object], bool]:
    """Return a condition: the event is a heartbeat that reports this stay for the model."""

    def says(event: object) -> bool:
        models = event.snapshot.models if isinstance(event, Heartbeat) and event.snapshot else ()
        return any(model.id == model_id and model.stay == stay for model in models)

    return says


def test_how_long_models_stay_is_heard_by_a_worker_that_is_not_there_yet_and_by_the_next_one() -> None:
    async def scenario() -> None:
        async with serving() as client:
            client.keep(KeepModels(models={"fake": Stay(pinned=True)}))
            assert not client.ready, "it starts"
            await until(client, stay_of("fake", Stay(pinned=True, idle_seconds=3600.0)))
            with pytest.raises(WorkerGone):
                await collect(client, ask("kill"))
            await until(client, stay_of("fake", Stay(pinned=True, idle_seconds=3600.0)))

    asyncio.run(scenario())


def test_how_long_a_model_stays_by_the_word_of_a_request_survives_the_worker() -> None:
    async def scenario() -> None:
        async with serving(timing=replace(QUICK, steady_seconds=0.0)) as client:
            await client.load(FAST, Stay(idle_seconds=4.0))
            await until(client, stay_of("fast", Stay(pinned=False, idle_seconds=4.0)))
            assert await loaded_after(client, "kill", {"fast"}) == ["fast"]
            assert client.book.loaded()["fast"].stay == Stay(pinned=False, idle_seconds=4.0)
            assert client.unit("fast") == FAST

    asyncio.run(scenario())


def test_a_worker_that_ends_while_it_loads_again_forgets_neither_the_model_nor_its_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        used = tmp_path / "used"
        stay = Stay(pinned=False, idle_seconds=4.0)
        async with serving() as client:
            await client.load(ModelSpecification(id="once", path=str(used)), Stay(idle_seconds=4.0))
            await until(client, stay_of("once", stay))
            loading = asyncio.create_task(until(client, lambda event: isinstance(event, LoadProgress)))
            await asyncio.sleep(0)
            client.renew()
            await loading
            used.unlink()
            client.keep(KeepModels(models={"fast": Stay(pinned=True)}))
            client.renew()
            await until(client, stay_of("once", stay))

    asyncio.run(scenario())


def test_a_request_of_many_prompts_goes_on_in_the_next_worker_where_one_is_renewed() -> None:
    async def scenario() -> None:
        async with serving() as client:
            model = ModelSpecification(id="m", path="/models/m", live=LiveValues(queue_limit=2))
            texts = ("hold", "words 1", "words 1")
            stream = client.open(
                [Generate(id=f"r{number}", model=model, text=text) for number, text in enumerate(texts)]
            )
            await stream.wait_accepted(0.0)
            await until(client, lambda event: isinstance(event, Accepted))
            client.renew(drain_seconds=DEADLINE_SECONDS)
            await exhaust(stream)
            assert client.restarts == 1

    asyncio.run(scenario())


def test_the_unit_of_a_model_is_the_one_in_use_or_else_the_one_last_asked_for() -> None:
    async def scenario() -> None:
        async with serving() as client:
            assert client.unit("slow") is None
            changed = msgspec.structs.replace(SLOW, max_rows=3)
            loading = asyncio.create_task(client.load(changed))
            await until(client, lambda event: isinstance(event, LoadProgress))
            assert client.unit("slow") == changed, "on its way"
            client.book.snapshot = Snapshot(models=(LoadedModel(unit=SLOW, state="ready", leases=1),))
            assert client.unit("slow") == SLOW, "in use: it is not replaced"
            client.book.snapshot = Snapshot(models=(LoadedModel(unit=SLOW, state="ready"),))
            assert client.unit("slow") == changed
            loading.cancel()
            await until(client, lambda event: isinstance(event, LoadProgress))
            client.book.snapshot = Snapshot(models=(LoadedModel(unit=SLOW, state="ready"),))
            assert client.unit("slow") == SLOW

    asyncio.run(scenario())


def test_a_unit_that_was_refused_is_not_what_the_next_request_gets() -> None:
    async def scenario() -> None:
        async with serving() as client:
            client.book.snapshot = Snapshot(models=(LoadedModel(unit=SLOW, state="ready"),))
            using = client.open([Generate(id="using", model=SLOW, text="silent")])
            await using.wait_accepted(DEADLINE_SECONDS)
            changed = msgspec.structs.replace(SLOW, max_rows=3)
            with pytest.raises(ModelInUse):
                await collect(client, Generate(id="refused", model=changed, text="fail ModelInUse"))
            client.book.snapshot = Snapshot(models=(LoadedModel(unit=SLOW, state="ready"),))
            assert client.unit("slow") == SLOW
            using.close()

    asyncio.run(scenario())


async def loaded_after(client: WorkerClient, text: str, wanted: set[str]) -> list[str]:
    """End the worker with `text`; return the models that the next worker loads, in order, until it has `wanted`."""
    seen: list[str] = []
    unsubscribe = client.subscribe(lambda event: seen.append(event.model_id), ModelLoaded)
    with pytest.raises(WorkerGone):
        await collect(client, ask(text, model_id="fast"))
    await until(client, lambda event: isinstance(event, Heartbeat) and {"fake", *wanted} == names(event))
    unsubscribe()
    return seen


def names(event: Heartbeat) -> set[str]:
    return {model.id for model in event.snapshot.models} if event.snapshot else set()


@pytest.mark.parametrize("end", ["kill", "abort", "exit 3"])
def test_what_was_loaded_is_loaded_again_at_once_and_what_was_asked_last_comes_first(end: str) -> None:
    async def scenario() -> None:
        async with serving(timing=replace(QUICK, steady_seconds=0.0)) as client:
            for model in (FAST, OTHER, msgspec.structs.replace(FAST, id="gone")):
                await client.load(model)
            await client.unload("gone")
            await until(client, lambda event: isinstance(event, Heartbeat) and "gone" not in names(event))
            assert await loaded_after(client, end, {"fast", "other"}) == ["fast", "other"]

    asyncio.run(scenario())


def test_between_two_workers_a_model_is_still_the_unit_that_somebody_loaded() -> None:
    async def scenario() -> None:
        async with serving() as client:
            changed = msgspec.structs.replace(FAST, max_rows=3)
            await client.load(changed)
            await until(client, lambda event: isinstance(event, Heartbeat) and "fast" in names(event))
            ready = asyncio.create_task(until(client, lambda event: isinstance(event, Ready)))
            with pytest.raises(WorkerGone):
                await collect(client, ask("kill"))
            assert (client.book.loaded(), client.unit("fast")) == ({}, changed)
            await ready
            assert client.unit("fast") == changed

    asyncio.run(scenario())


def test_a_restored_model_is_known_between_the_end_of_its_load_and_the_next_snapshot() -> None:
    book = ModelBook()
    book.request(FAST)
    book.handle(Heartbeat(pending=False, snapshot=Snapshot(models=(LoadedModel(unit=FAST, state="ready"),))))
    book.handle_exit(may_restore=True)
    assert book.to_restore(()) == [FAST]
    book.handle(LoadProgress(model_id="fast", phase="ready", fraction=1.0))
    assert book.unit("fast", in_flight=False) == FAST
    book.handle(Heartbeat(pending=False, snapshot=Snapshot()))
    assert book.unit("fast", in_flight=False) is None, "it was evicted at once"


def test_a_model_that_the_next_worker_does_not_load_is_no_longer_expected_as_it_was() -> None:
    book = ModelBook()
    book.request(FAST)
    book.handle(Heartbeat(pending=False, snapshot=Snapshot(models=(LoadedModel(unit=FAST, state="ready"),))))
    book.handle_exit(may_restore=True)
    assert book.unit("fast", in_flight=False) == FAST
    assert book.to_restore(("fast",)) == []
    assert book.unit("fast", in_flight=False) is None, "it is in quarantine"
    book.handle_exit(may_restore=True)
    book.handle(Heartbeat(pending=False, snapshot=Snapshot(models=(LoadedModel(unit=FAST, state="ready"),))))
    book.handle_exit(may_restore=True)
    assert book.to_restore(()) == [FAST]
    book.not_restored("fast")
    assert book.unit("fast", in_flight=False) is None, "its load was refused"


def test_where_workers_end_one_after_the_other_nothing_is_loaded_until_it_is_asked_for() -> None:
    async def scenario() -> None:
        async with serving() as client:
            await client.load(FAST)
            await until(client, lambda event: isinstance(event, Heartbeat) and "fast" in names(event))
            assert await loaded_after(client, "kill", {"fast"}) == ["fast"]
            assert await loaded_after(client, "kill", set()) == []
            seen: list[str] = []
            client.subscribe(lambda event: seen.append(event.model_id), ModelLoaded)
            ready = asyncio.create_task(until(client, lambda event: isinstance(event, Ready)))
            await asyncio.sleep(0)
            client.renew()
            await ready
            await client.load(OTHER)
            assert seen == ["other"]

    asyncio.run(scenario())


def test_a_renewal_loads_again_what_was_loaded_however_earlier_workers_ended() -> None:
    async def scenario() -> None:
        async with serving() as client:
            for _ in range(2):
                with pytest.raises(WorkerGone):
                    await collect(client, ask("kill"))
            await client.load(FAST)
            await until(client, lambda event: isinstance(event, Heartbeat) and "fast" in names(event))
            loading = asyncio.create_task(until(client, lambda event: isinstance(event, ModelLoaded)))
            await asyncio.sleep(0)
            client.renew()
            await loading
            await until(client, lambda event: isinstance(event, Heartbeat) and "fast" in names(event))

    asyncio.run(scenario())


def test_the_error_that_a_frame_names_is_raised() -> None:
    async def scenario() -> None:
        async with serving() as client:
            with pytest.raises(QueueFull, match="as asked") as caught:
                await collect(client, ask("fail QueueFull"))
            assert caught.value.code == "asked"
            with pytest.raises(PacelineError):
                await collect(client, ask("fail os.system"))
            with pytest.raises(InvalidRequest):
                await collect(client, ask("\ud800"))
            assert not client.in_flight

    asyncio.run(scenario())


def test_a_request_whose_client_leaves_before_the_worker_is_ready_never_runs() -> None:
    async def scenario() -> None:
        async with serving() as client:
            accepted = list[str]()
            client.subscribe(lambda event: accepted.append(event.id), Accepted)
            stream = client.open([ask("forever", request_id="left")])
            await asyncio.sleep(0)
            assert not client.ready
            stream.close()
            assert isinstance((await collect(client, ask("words 1", request_id="stays")))[-1], Finished)
            assert accepted == ["stays"]

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["aclose", "cancel"])
def test_leaving_early_cancels_in_the_worker(way: str) -> None:
    async def scenario() -> None:
        async with serving() as client:
            stream = client.generate(ask("forever"))
            assert isinstance(await anext(stream), Accepted)
            gone = asyncio.create_task(until(client, cancelled))
            await asyncio.sleep(0)
            if way == "aclose":
                await stream.aclose()
            else:
                await anext(stream)
                waiting = asyncio.create_task(drain(stream))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            await gone
            assert not client.in_flight

    async def drain(stream: object) -> None:
        async for _ in stream:  # type: ignore[attr-defined]
            pass

    asyncio.run(scenario())


def test_a_reader_that_does_not_read_is_cancelled_and_told() -> None:
    async def scenario() -> None:
        async with serving(buffer_events=10) as client:
            stream = client.generate(ask("forever"))
            await anext(stream)
            await until(client, cancelled)
            for _ in range(10):
                assert isinstance(await anext(stream), Delta)
            with pytest.raises(PacelineError) as caught:
                await anext(stream)
            assert caught.value.code == "client_too_slow"

    asyncio.run(scenario())


def test_prompts_of_one_request_share_a_queue_and_an_end() -> None:
    async def scenario() -> None:
        async with serving() as client:
            heard: list[object] = []
            stream = client.open(
                [ask("words 2", request_id="a", n=2), ask("words 2", request_id="b", n=2)], on_event=heard.append
            )
            await stream.wait_accepted(10)
            events = []
            while stream.running:
                events.append(await stream.next(10))
            assert heard == events
            answers = [event for event in events if isinstance(event, Delta | Finished)]
            assert sorted({stream.choice(event) for event in answers}) == [0, 1, 2, 3]
            assert sum(isinstance(event, Finished) for event in answers) == 4
            assert await stream.next(0.01) is None
            stream.close()

            stream = client.open(
                [ask("forever", request_id="a"), ask("fail QueueFull", request_id="b")], on_event=heard.append
            )
            gone = asyncio.create_task(until(client, cancelled))
            with pytest.raises(QueueFull, match="as asked"):
                await exhaust(stream)
            assert isinstance(heard[-1], QueueFull)
            assert getattr(await gone, "id", "") == "a"
            assert not client.in_flight

    asyncio.run(scenario())


def test_waiting_for_an_event_ends_in_time() -> None:
    async def scenario() -> None:
        async with serving("--never-ready", ready_seconds=0.5) as client:
            stream = client.open([ask("words 1")])
            await stream.wait_accepted(0.05)
            assert await stream.next(0.05) is None
            assert stream.running
            with pytest.raises(WorkerGone):
                await stream.wait_accepted(10)

    asyncio.run(scenario())


def test_a_cancelled_load_is_cancelled_in_the_worker() -> None:
    async def scenario() -> None:
        async with serving() as client:
            loading = asyncio.create_task(client.load(SLOW))
            await until(client, lambda event: isinstance(event, LoadProgress))
            assert client.book.progress["slow"].fraction == 0.5
            failed = asyncio.create_task(until(client, lambda event: isinstance(event, LoadProgress)))
            await asyncio.sleep(0)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            await failed
            assert client.book.progress == {}

    asyncio.run(scenario())


def test_a_failing_listener_disturbs_nobody_and_a_used_id_is_refused() -> None:
    async def scenario() -> None:
        async with serving() as client:

            def broken(event: object) -> None:
                raise RuntimeError("a broken page")

            unsubscribe = client.subscribe(broken)
            assert await collect(client, ask("words 1"))
            unsubscribe()
            unsubscribe()
            stream = client.generate(ask("forever"))
            await anext(stream)
            with pytest.raises(ValueError, match="in use"):
                await collect(client, Generate(id="r", model=FAST, text="words 1"))
            await stream.aclose()

    asyncio.run(scenario())


def test_of_thousands_of_prompts_the_worker_has_a_few_and_others_go_in_between() -> None:
    async def scenario() -> None:
        async with serving() as client:
            running: list[int] = [0]

            def count(event: object) -> None:
                running.append(running[-1] + isinstance(event, Accepted) - isinstance(event, Finished))

            commands = [msgspec.structs.replace(ask("words 1"), id=f"many-{index}") for index in range(2048)]
            stream = client.open(commands, on_event=count)
            texts, other = 0, asyncio.create_task(collect(client, ask("words 2")))
            while (event := await stream.next()) is not None:
                texts += isinstance(event, Delta)
            assert (texts, len(await other)) == (2048, 4)
            assert max(running) <= MAX_IN_FLIGHT
            assert not client.in_flight

    asyncio.run(scenario())


@pytest.mark.parametrize(("limit", "most"), [(128, MAX_IN_FLIGHT), (8, 4), (1, 1)])
def test_a_request_of_many_prompts_leaves_half_of_the_queue_to_others(limit: int, most: int) -> None:
    async def scenario() -> None:
        async with serving() as client:
            model = ModelSpecification(id="fake", path="/models/fake", live=LiveValues(queue_limit=limit))
            commands = [
                msgspec.structs.replace(ask("forever"), id=f"many-{index}", model=model) for index in range(300)
            ]
            accepted: list[object] = []
            all_in = asyncio.Event()

            def record(event: object) -> None:
                accepted.extend([event] if isinstance(event, Accepted) else [])
                if len(accepted) == most:
                    all_in.set()

            stream = client.open(commands, on_event=record)
            await all_in.wait()
            assert len(await collect(client, ask("words 2"))) == 4
            assert len(accepted) == most
            stream.close()
            await until(client, cancelled)
            assert not client.in_flight

    asyncio.run(scenario())


def test_a_worker_that_dies_ends_the_prompts_that_were_not_sent_yet() -> None:
    async def scenario() -> None:
        async with serving() as client:
            texts = ["forever"] * 200
            texts[MAX_IN_FLIGHT - 1] = "kill"
            commands = [msgspec.structs.replace(ask(text), id=f"many-{index}") for index, text in enumerate(texts)]
            with pytest.raises(WorkerGone):
                await exhaust(client.open(commands))
            assert not client.in_flight

    asyncio.run(scenario())

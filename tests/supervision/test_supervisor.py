"""The supervisor and a real process: spawn, crash, hang, quarantine, stop, parent death."""

import asyncio
import dataclasses
import errno
import os
import signal
import subprocess
import sys

import psutil
import pytest

from app.core.errors import InvalidRequest, ModelUnavailable, PacelineError, WorkerGone
from app.core.messages import Accepted, Delta, Failed, Finished, Heartbeat, Ready
from app.machine.channel import NOTE_BYTES
from app.supervision.child import PACKAGE_PARENT, open_note_file, worker_environment
from app.supervision.client import WorkerClient
from app.supervision.recovery import Timing
from tests.worker.serving import DEADLINE_SECONDS, QUICK, Stopwatch, ask, collect, serving, until

IMPATIENT = dataclasses.replace(QUICK, silence_seconds=3.0)


async def failure_of(client: WorkerClient, text: str, *, request_id: str = "r", model_id: str = "m") -> PacelineError:
    """Return the error that ends a request."""
    with pytest.raises(WorkerGone) as caught:
        await collect(client, ask(text, request_id=request_id, model_id=model_id))
    return caught.value


def test_a_worker_serves_in_its_own_session_offline_and_without_secrets() -> None:
    async def scenario() -> None:
        async with serving() as client:
            events = await collect(client, ask("environment"))
            lines = [event.text for event in events if isinstance(event, Delta)]
            assert "HF_HUB_OFFLINE=1" in lines
            assert "TOKENIZERS_PARALLELISM=false" in lines
            assert "session=True" in lines
            assert f"cwd={PACKAGE_PARENT}" in lines
            assert client.ready_info is not None
            assert client.ready_info.process_id == client.process_id

    asyncio.run(scenario())


def test_a_worker_starts_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("app.supervision.child.tempfile.TemporaryFile", full)

    async def scenario() -> None:
        async with serving() as client:
            assert isinstance((await collect(client, ask("words 3")))[-1], Finished)
            assert "SIGKILL" in (await failure_of(client, "kill")).message

    asyncio.run(scenario())


def test_the_disk_that_a_crash_note_takes_is_taken_before_a_worker_writes_it() -> None:
    note = open_note_file()
    assert note is not None
    with note:
        assert os.fstat(note.fileno()).st_blocks * 512 >= NOTE_BYTES


def test_secrets_do_not_reach_the_worker() -> None:
    inherited = {"HF_TOKEN": "a", "PACELINE_API_KEY": "b", "MLX_LM_TRUST_REMOTE_CODE": "1", "PATH": "/bin"}
    environment = worker_environment(inherited)
    assert "PATH" in environment
    assert not environment.keys() & (inherited.keys() - {"PATH"})


def test_kill_mid_stream_tells_every_client_and_the_next_request_is_fine() -> None:
    async def scenario() -> None:
        async with serving() as client:
            failures: list[str] = []
            client.subscribe(lambda event: failures.append(event.id) if isinstance(event, Failed) else None)
            tasks = [asyncio.create_task(failure_of(client, "forever", request_id=f"r{n}")) for n in range(8)]
            await until(client, lambda event: isinstance(event, Delta) and event.id == "r7")
            assert client.process_id is not None
            watch = Stopwatch()
            os.kill(client.process_id, signal.SIGKILL)
            errors = await asyncio.gather(*tasks)
            assert watch.seconds <= 2
            assert all("SIGKILL" in error.message for error in errors)
            assert sorted(failures) == sorted(f"r{n}" for n in range(8))
            events = await collect(client, ask("words 3"))
            assert watch.seconds <= 10
            assert isinstance(events[-1], Finished)
            assert (client.restarts, client.quarantined) == (1, {})
            assert "SIGKILL" in str(client.last_exit)

    asyncio.run(scenario())


@pytest.mark.parametrize(("text", "cause"), [("kill", "SIGKILL"), ("exit 3", "code 3"), ("garbage", "not understood")])
def test_every_way_to_die_has_a_readable_cause(text: str, cause: str) -> None:
    async def scenario() -> None:
        async with serving() as client:
            error = await failure_of(client, text)
            assert cause in error.message
            assert error.retry_after_seconds is not None
            assert await collect(client, ask("words 1"))

    asyncio.run(scenario())


def test_a_stopped_worker_counts_as_hung_and_is_replaced() -> None:
    async def scenario() -> None:
        async with serving(timing=IMPATIENT) as client:
            await client.wait_ready(DEADLINE_SECONDS)
            old = client.process_id
            watch = Stopwatch()
            error = await failure_of(client, "stop")
            assert "hung" in error.message
            assert watch.seconds > 0.5 * IMPATIENT.silence_seconds
            assert await collect(client, ask("words 1"))
            assert old is not None
            assert not psutil.pid_exists(old)
            assert client.process_id != old

    asyncio.run(scenario())


def test_silence_without_pending_work_is_no_hang_and_heartbeats_keep_a_slow_answer_alive() -> None:
    async def scenario() -> None:
        async with serving(timing=IMPATIENT) as client:
            silent = asyncio.create_task(collect(client, ask("silent")))
            watch = Stopwatch()
            while watch.seconds < 1.5 * IMPATIENT.silence_seconds:
                await until(client, lambda event: isinstance(event, Heartbeat))
            assert client.restarts == 0
            silent.cancel()

    asyncio.run(scenario())


def test_three_crashes_quarantine_the_model_and_only_it() -> None:
    async def scenario() -> None:
        async with serving() as client:
            for number in range(3):
                assert client.quarantined == {}
                await failure_of(client, "kill", request_id=f"r{number}", model_id="bad")
            assert "3 times" in str(client.quarantined["bad"])
            with pytest.raises(ModelUnavailable, match="quarantined") as caught:
                await collect(client, ask("words 1", model_id="bad"))
            assert caught.value.retry_after_seconds == QUICK.quarantine_seconds
            assert await collect(client, ask("words 1", model_id="good"))
            client.release_quarantine("bad")
            with pytest.raises(InvalidRequest, match="bad is not quarantined"):
                client.release_quarantine("bad")
            assert await collect(client, ask("words 1", model_id="bad"))

    asyncio.run(scenario())


def test_hostile_models_never_quarantine_a_busy_good_one() -> None:
    async def scenario() -> None:
        async with serving() as client:
            for number in range(3):
                for hostile in ("bad", "worse", "worst"):
                    good = asyncio.create_task(failure_of(client, "forever", request_id="good", model_id="good"))
                    await until(client, lambda event: isinstance(event, Delta))
                    await failure_of(client, "abort", request_id=f"{hostile}{number}", model_id=hostile)
                    await good
            assert client.quarantined.keys() == {"bad", "worse", "worst"}
            assert await collect(client, ask("words 1", model_id="good"))

    asyncio.run(scenario())


def test_kills_from_outside_blame_nobody_while_several_models_run() -> None:
    async def scenario() -> None:
        async with serving() as client:
            for number in range(4):
                other = asyncio.create_task(failure_of(client, "forever", request_id="other", model_id="other"))
                await until(client, lambda event: isinstance(event, Delta))
                await failure_of(client, "kill", request_id=f"r{number}", model_id="m")
                await other
            for number in range(4):
                await failure_of(client, "kill idle", request_id=f"idle{number}", model_id="m")
            assert client.quarantined == {}

    asyncio.run(scenario())


def test_after_many_crashes_clients_hear_the_true_wait_and_a_request_shortens_it() -> None:
    async def scenario() -> None:
        patient = dataclasses.replace(QUICK, first_pause_seconds=40.0, longest_pause_seconds=64.0, crash_limit=9)
        timing = dataclasses.replace(patient, awaited_pause_seconds=1.0)
        async with serving(timing=timing, ready_seconds=0.05) as client:
            assert await client.wait_ready(DEADLINE_SECONDS)
            assert (await failure_of(client, "abort")).retry_after_seconds in range(
                1, 4
            )  # the first restart is immediate
            assert await client.wait_ready(DEADLINE_SECONDS)
            watch = Stopwatch()
            error = await failure_of(client, "abort")
            assert error.retry_after_seconds is not None
            with pytest.raises(WorkerGone, match=r"SIGABRT.*try again in") as refused:
                await collect(client, ask("words 1"))
            assert refused.value.retry_after_seconds in {error.retry_after_seconds, error.retry_after_seconds - 1}
            assert str(refused.value.retry_after_seconds) in refused.value.message
            assert await client.wait_ready(DEADLINE_SECONDS)
            assert 1.0 <= watch.seconds < 15.0

    asyncio.run(scenario())


def test_a_worker_that_never_starts_is_reported_and_tried_again() -> None:
    async def scenario() -> None:
        async with serving("--crash", ready_seconds=0.1) as client:
            with pytest.raises(WorkerGone, match="not running"):
                await collect(client, ask("words 1"))
            while client.restarts < 3:
                assert not await client.wait_ready(0.05)
            assert "code 7" in str(client.last_exit)

    asyncio.run(scenario())


def test_a_worker_that_is_never_ready_is_replaced() -> None:
    async def scenario() -> None:
        timing = Timing(start_seconds=0.3, poll_seconds=0.05, abort_seconds=0.1, stop_seconds=0.3)
        async with serving("--never-ready", timing=timing, ready_seconds=0.1) as client:
            while client.restarts == 0:  # clients that wait do not delay it
                assert not await client.wait_ready(0.01)
            assert "did not become ready" in str(client.last_exit)

    asyncio.run(scenario())


def test_a_command_that_cannot_be_spawned_is_an_error_not_a_crash() -> None:
    async def scenario() -> None:
        client = WorkerClient(command=("/nonexistent/python",), timing=QUICK)
        await client.start()
        while client.restarts == 0:
            assert not await client.wait_ready(0.02)
        assert "could not be started" in str(client.last_exit)
        await client.stop()

    asyncio.run(scenario())


def test_stop_drains_running_requests_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        async with serving() as client:
            held = asyncio.create_task(collect(client, ask("hold")))
            await until(client, lambda event: isinstance(event, Accepted))
            stopping = asyncio.create_task(client.stop(5.0))
            events = await held
            assert isinstance(events[-1], Finished)
            await stopping
            assert "code 0" in str(client.last_exit)
            with pytest.raises(WorkerGone):
                await collect(client, ask("words 1"))

    asyncio.run(scenario())


def test_stop_ends_a_deaf_worker_too_and_fails_what_is_left() -> None:
    async def scenario() -> None:
        async with serving("--deaf") as client:
            task = asyncio.create_task(failure_of(client, "silent"))
            await until(client, lambda event: isinstance(event, Accepted))
            process_id = client.process_id
            assert process_id is not None
            await client.stop(0.0)
            assert not psutil.pid_exists(process_id)
            assert "stopped with the server" in (await task).message

    asyncio.run(scenario())


def test_stop_before_ready_and_twice_leaves_nobody_behind() -> None:
    async def scenario() -> None:
        async with serving() as client:
            await asyncio.gather(client.stop(), client.stop())
            assert client.process_id is None
        assert not [child for child in psutil.Process().children() if "fake_worker" in " ".join(child.cmdline())]

    asyncio.run(scenario())


PARENT = """
import asyncio
from tests.worker.serving import ask, serving

async def main():
    async with serving() as client:
        stream = client.generate(ask("forever"))
        await anext(stream)
        print(client.process_id, flush=True)
        async for _ in stream:
            pass

asyncio.run(main())
"""


def test_the_worker_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=PACKAGE_PARENT)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    worker.wait(timeout=DEADLINE_SECONDS)
    assert not worker.is_running()


def test_ready_is_told_once_per_life() -> None:
    async def scenario() -> None:
        async with serving() as client:
            first = await until(client, lambda event: isinstance(event, Ready))
            await failure_of(client, "kill")
            second = await until(client, lambda event: isinstance(event, Ready))
            assert isinstance(first, Ready)
            assert isinstance(second, Ready)
            assert first.process_id != second.process_id

    asyncio.run(scenario())


def test_a_renewed_worker_finishes_what_runs_and_whoever_asks_meanwhile_gets_the_next_one() -> None:
    async def scenario() -> None:
        async with serving() as client:
            held = asyncio.create_task(collect(client, ask("hold")))
            await until(client, lambda event: isinstance(event, Accepted))
            old = client.process_id
            client.renew(5.0)
            assert (client.draining, client.ready) == (True, False)
            waiting_request = asyncio.create_task(collect(client, ask("words 1", request_id="next")))
            assert isinstance((await held)[-1], Finished)
            assert isinstance((await waiting_request)[-1], Finished)
            assert client.process_id != old
            assert (client.draining, client.ready, client.restarts) == (False, True, 1)
            assert "code 0" in str(client.last_exit)
            assert client.quarantined == {}

    asyncio.run(scenario())


def test_a_renewal_without_patience_ends_what_runs_and_blames_no_model() -> None:
    async def scenario() -> None:
        async with serving() as client:
            for number in range(3):
                running = asyncio.create_task(failure_of(client, "forever", request_id=f"r{number}"))
                await until(client, lambda event: isinstance(event, Delta))
                client.renew()
                await running
                assert await collect(client, ask("words 1", request_id=f"n{number}"))
            assert (client.restarts, client.quarantined) == (3, {})

    asyncio.run(scenario())


def test_a_second_renewal_and_a_stop_cut_a_drain_short() -> None:
    async def scenario() -> None:
        async with serving() as client:
            running = asyncio.create_task(failure_of(client, "forever"))
            await until(client, lambda event: isinstance(event, Delta))
            client.renew(3600.0)
            client.renew(3600.0)
            await running
            running = asyncio.create_task(failure_of(client, "forever", request_id="s"))
            await until(client, lambda event: isinstance(event, Delta) and event.id == "s")
            client.renew(3600.0)
            await client.stop()
            await running

    asyncio.run(scenario())


def test_a_worker_that_does_not_end_once_nothing_is_awaited_is_ended_long_before_its_drain_is_over() -> None:
    async def scenario() -> None:
        async with serving("--lingers") as client:
            held = asyncio.create_task(collect(client, ask("hold")))
            await until(client, lambda event: isinstance(event, Accepted))
            first = client.process_id
            client.renew(3600.0)
            assert isinstance((await held)[-1], Finished)
            assert isinstance((await collect(client, ask("words 1", request_id="next")))[-1], Finished)
            assert client.process_id != first
            client.renew(3600.0)
            await client.stop(3600.0)

    asyncio.run(scenario())


def test_a_worker_that_hangs_while_it_drains_is_replaced() -> None:
    async def scenario() -> None:
        async with serving(timing=IMPATIENT) as client:
            stuck = asyncio.create_task(failure_of(client, "stop"))
            await until(client, lambda event: isinstance(event, Accepted))
            client.renew(3600.0)
            await stuck
            assert isinstance((await collect(client, ask("words 1", request_id="next")))[-1], Finished)
            assert client.quarantined == {}

    asyncio.run(scenario())

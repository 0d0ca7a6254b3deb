"""`paceline bench MODEL`: the running server measures, or a temporary server that the command starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.command.bench import temporary_server, wait_for_result
from app.command.server import Server
from app.machine.server_file import RunningServer, lock_home
from app.serving.sweep.report import report_object
from app.settings import Settings
from app.store.rows import StoredMeasurements, StoredSettings
from app.store.store import FILE_NAME, Store
from tests.benchmark.sweeps import measured as results_of
from tests.cli.fake_server import FakeServer
from tests.cli.test_commands import run

DEMO = "demo-assistant"
MEASUREMENTS = "/admin/api/measurements"
OF_BIG = f"{MEASUREMENTS}?model=big"
LOCKED = (401, {"error": {"message": "Sign in", "code": "not_signed_in"}})


def kept_row(*, drafter: str = "ngram") -> dict[str, Any]:
    results = results_of({1: {("off", 0): [10.0] * 3, (drafter, 2): [30.0] * 3}}, left_out=[], device="Test (cpu)")
    report = report_object(results, {"drafts": None, "methods": None, "num_draft_tokens": None, "policy": "off"})
    row = {"id": 7, "model_id": "big", "results": results, "report": report}
    return {**row, "machine": {"cores": 2}, "versions": {"mlx": "1"}}


def ended(row: dict[str, Any] | None, problem: str = "") -> dict[str, Any]:
    last = {"model_id": "big", "outcome": "failed" if problem else "done", "number": row["id"] if row else 0}
    return {"active": None, "last": {**last, "problem": problem}, "measurements": [row] if row else []}


@pytest.mark.soak
@pytest.mark.landing
def test_a_model_is_measured_shown_and_kept_by_a_server_of_its_own(
    tmp_path: Path, environment: Mapping[str, str], fake: FakeServer
) -> None:
    fake.answers[MEASUREMENTS] = LOCKED
    file = tmp_path / "made" / "speed.json"
    words = ("--prompt", "Count from 1 to 20.", "--minutes", "0.05", "--rounds", "1", "--apply")
    result = run(environment, "bench", DEMO, *words, "--json", str(file))
    assert result.exit_code == 0, result.output
    parts = (DEMO, "Tokens/s", "no drafting", "governor", "1 request, 0.1k", "No time was left for", "One round only")
    for part in ("requires an API key", "separate server", *parts):
        assert part in result.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["report"]["text"] in result.stdout
    assert document["options"]["prompts"] == ["Count from 1 to 20."]
    assert {"off", "auto", "draft_model", "ngram"} <= {
        setting["method"] for setting in document["cells"][0]["settings"]
    }
    assert document["versions"]["mlx-lm"]
    assert document["machine"]["cores"] >= 1
    store = Store(Path(environment["PACELINE_HOME"]) / FILE_NAME)
    kept = StoredMeasurements(store).of(DEMO)
    assert [row.results["model"] for row in kept] == [DEMO]
    assert (DEMO not in StoredSettings(store).models()) == ("Nothing to change." in result.stdout)


@pytest.mark.parametrize("apply", [False, True])
def test_a_running_server_measures_and_applies_what_was_listed(
    environment: Mapping[str, str], fake: FakeServer, apply: bool
) -> None:
    fake.answers |= {MEASUREMENTS: (202, {}), OF_BIG: (200, ended(kept_row()))}
    fake.answers[f"{MEASUREMENTS}/7/apply"] = (200, {"became": "loaded"})
    result = run(environment, "bench", "big", *(["--apply"] if apply else []))
    assert result.exit_code == 0, result.output
    for line in ("methods: automatic → ngram", "num_draft_tokens: automatic → 2", "policy: off → auto"):
        assert line in result.stdout
    asked = [(method, path) for method, path, _, _ in fake.requests]
    assert asked[0] == ("POST", MEASUREMENTS)
    assert (("POST", f"{MEASUREMENTS}/7/apply") in asked) == apply == ("Stored for big" in result.stdout)


def test_the_server_of_the_home_lets_the_command_in_by_its_file(
    environment: Mapping[str, str], fake: FakeServer
) -> None:
    fake.answers |= {MEASUREMENTS: (202, {}), OF_BIG: (200, ended(kept_row()))}
    fake.answers["/admin/api/session"] = (200, {"kind": "command"})
    home = Path(environment["PACELINE_HOME"])
    home.mkdir()
    with lock_home(home) as write:
        write(RunningServer("127.0.0.1", fake.port, "own-key"))
        assert run({**environment, "PACELINE_PORT": "1"}, "bench", "big").exit_code == 0
    assert {authorization for *_, authorization in fake.requests} == {"Bearer own-key"}
    assert not (home / "server.json").exists(), "the file of the server goes with it"


def test_what_could_not_be_measured_is_one_line(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers |= {MEASUREMENTS: (202, {}), OF_BIG: (200, ended(None, "big needs more memory than there is"))}
    result = run(environment, "bench", "big")
    assert (result.exit_code, result.stderr) == (1, "big needs more memory than there is\n")


def test_a_model_that_is_not_there_is_one_line(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers[MEASUREMENTS] = LOCKED
    result = run(environment, "bench", "nowhere")
    assert result.exit_code == 1
    assert 'no model "nowhere"' in result.stderr
    assert result.stderr.count("\n") == 1


def test_ctrl_c_ends_the_measurement_and_keeps_what_is_known(fake: FakeServer, tmp_path: Path) -> None:
    active = {"model_id": "big", "phase": "measuring", "seconds_left": 60}
    ask = {"text": "1 request, 0.1k: no drafting, round 1 of 3"}
    fake.answers |= {
        OF_BIG: (200, {**ended(None), "active": {**active, "ask": ask}}),
        f"{MEASUREMENTS}/current": (200, {"stopping": True}),
    }
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            fake.answers[OF_BIG] = (200, ended(kept_row()))
            raise KeyboardInterrupt

    settings = Settings(_env_prefix="PACELINE_IGNORED_IN_TESTS_", home=tmp_path, port=fake.port)  # type: ignore[call-arg]
    assert wait_for_result(Server(settings), "big", tell)["id"] == 7
    assert said == [f"{ask['text']}, 60 s left", "stopping"]
    assert ("DELETE", f"{MEASUREMENTS}/current") in [(method, path) for method, path, _, _ in fake.requests]


def test_a_second_ctrl_c_waits_no_longer(fake: FakeServer, tmp_path: Path) -> None:
    active = {"model_id": "big", "phase": "measuring", "seconds_left": 60, "ask": {"text": "1 request"}}
    fake.answers |= {
        OF_BIG: (200, {**ended(None), "active": active}),
        f"{MEASUREMENTS}/current": (200, {"stopping": True}),
    }

    def interrupt(text: str) -> None:
        if text != "stopping":
            raise KeyboardInterrupt

    settings = Settings(_env_prefix="PACELINE_IGNORED_IN_TESTS_", home=tmp_path, port=fake.port)  # type: ignore[call-arg]
    with pytest.raises(KeyboardInterrupt):
        wait_for_result(Server(settings), "big", interrupt)
    assert [method for method, *_ in fake.requests].count("DELETE") == 1


def test_the_server_of_a_measurement_opens_no_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, str] = {}

    def start(_command: object, *, env: dict[str, str], **_options: object) -> None:
        given.update(env)
        raise InterruptedError

    monkeypatch.setattr("app.command.bench.subprocess.Popen", start)
    monkeypatch.setattr("app.command.bench.signal.signal", lambda *_: None)
    with pytest.raises(InterruptedError), temporary_server(Settings(home=tmp_path, open=True)):
        pass
    assert given["PACELINE_OPEN"] == "0"

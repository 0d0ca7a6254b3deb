"""The subcommands of the command line, against a scripted server."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from app import __version__
from app.cli import application
from tests.cli.fake_server import LAST_CHUNK, FakeServer, chunk
from tests.models.folders import write_model

LOADED = {
    "worker": {"ready": True},
    "models": [
        {
            "id": "big",
            "draft": "small",
            "drafts": [{"id": "small", "method": "draft_model"}],
            "state": "ready",
            "weights_bytes": 1_500_000_000,
            "methods": ["draft_model", "ngram"],
            "unavailable": {"mtp": "it has no head"},
            "running": 1,
            "waiting": 2,
            "pinned": True,
        }
    ],
    "loading": {"next": {"model_id": "next", "phase": "weights", "fraction": 0.25}},
    "quarantined": {"bad": "it crashed three times"},
    "memory_pressure": "critical",
}


def run(environment: Mapping[str, str], *arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(application, list(arguments), input=typed, env=dict(environment))


def test_help_teaches() -> None:
    result = CliRunner().invoke(application, ["serve", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for word in (
        "--host",
        "--port",
        "--model-dir",
        "--draft",
        "--policy",
        "main=a+b",
        "--speculative-config",
        "--acceptance",
        "Try it",
    ):
        assert word in result.stdout


def test_version() -> None:
    assert CliRunner().invoke(application, ["--version"]).stdout == f"paceline {__version__}\n"


def test_ls_shows_the_embedded_models_without_a_server(environment: Mapping[str, str]) -> None:
    result = run({**environment, "PACELINE_PORT": "1"}, "ls", "--json")
    assert result.exit_code == 0
    rows = {row["id"]: row for row in json.loads(result.stdout)}
    assert rows["demo-assistant"]["draft"] == "demo-assistant-dflash"
    assert rows["demo-assistant"]["drafts"] == [{"id": "demo-assistant-dflash", "method": "dflash"}]
    assert rows["demo-assistant"]["size_bytes"] > 1_000_000
    table = run(environment, "ls").stdout
    assert "demo-assistant" in table
    assert "Context" in table


def test_ls_tells_base_models_from_those_that_chat(environment: Mapping[str, str], tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "base")
    (write_model(tmp_path / "models" / "chatty") / "chat_template.jinja").write_text("{{ messages }}")
    result = run({**environment, "PACELINE_MODEL_DIRS": str(tmp_path / "models")}, "ls", "--json")
    bases = [row["id"] for row in json.loads(result.stdout) if row["is_base"]]
    assert bases == ["base"], "a drafter is none, with or without a template"


def test_ls_names_the_problem_of_a_broken_folder_and_of_a_wrong_draft(environment: Mapping[str, str]) -> None:
    result = run({**environment, "PACELINE_DRAFTS": "demo-assistant=nowhere"}, "ls", "--json")
    rows = {row["id"]: row for row in json.loads(result.stdout)}
    problem = rows["demo-assistant"]["problem"]
    assert 'PACELINE_DRAFTS names nowhere for demo-assistant: no model "nowhere" on this computer' in problem
    assert rows["demo-assistant"]["drafts"] == []


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("demo-assistant=nowhere", 'no model "nowhere" on this computer; '),
        ("demo-assistant=demo-hybrid-mtp", "the multi-token head of a qwen3 model cannot run here; choose a drafter"),
        ("demo-assistant=demo-assistant-dflash+demo-hybrid-mtp", "demo-hybrid-mtp cannot draft for demo-assistant"),
        ("demo-assistent=demo-draft", 'no main model "demo-assistent" on this computer; `paceline ls` lists'),
        ("demo-draft-typo=off", "`paceline ls` lists the models"),
    ],
)
def test_serve_refuses_a_draft_that_cannot_be_used_in_one_line(
    environment: Mapping[str, str], draft: str, words: str
) -> None:
    result = run(environment, "serve", "--draft", draft)
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == "", "nothing was started"


def test_ps_shows_what_is_loaded_loading_and_quarantined(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/status"] = (200, LOADED)
    shown = run(environment, "ps").stdout
    for part in ("big", "small", "ready (pinned)", "1.5 GB", "draft_model", "ngram"):
        assert part in shown
    assert "it has no head" not in shown, "with a drafter loaded, what was not loaded is noise"
    assert "weights 25%" in shown
    assert "bad is quarantined: it crashed three times" in shown
    assert "short of memory (critical)" in shown
    assert json.loads(run(environment, "ps", "--json").stdout) == LOADED
    alone = LOADED | {"models": [LOADED["models"][0] | {"draft": None, "drafts": [], "methods": ["ngram"]}]}  # type: ignore[index, operator]
    fake.answers["/api/status"] = (200, alone)
    assert "mtp: it" in run(environment, "ps").stdout


def test_ps_says_where_rows_run_one_by_one(environment: Mapping[str, str], fake: FakeServer) -> None:
    model = LOADED["models"][0] | {"cache_families": ["trim", "apart"]}  # type: ignore[index, operator]
    fake.answers["/api/status"] = (200, LOADED | {"models": [model]})
    assert "row by row" in run(environment, "ps").stdout


def test_ps_tells_what_to_do_when_nothing_is_loaded(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/status"] = (200, {"models": [], "loading": {}})
    assert "paceline load MODEL" in run(environment, "ps").stdout


def test_a_quarantined_model_is_released_by_command(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/release"] = (200, {"model": "big", "released": True})
    assert "big is released" in run(environment, "release", "big").stdout
    assert fake.requests[-1][1:3] == ("/api/release", {"model": "big"})


def test_load_and_unload_send_what_was_asked(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/load"] = (
        200,
        {"model": "big", "drafts": [{"id": "small"}], "draft_unavailable": "", "seconds": 1.25},
    )
    fake.answers["/api/unload"] = (200, {"model": "big", "state": "available", "was_loaded": True})
    keyed = {**environment, "PACELINE_API_KEY": "secret"}
    result = run(keyed, "load", "big", "--draft", "small", "--pin", "--ttl", "60")
    assert "big is ready after 1.2 s with small." in result.stdout
    assert "big is unloaded" in run(keyed, "unload", "big").stdout
    fake.answers["/api/unload"] = (200, {"model": "big", "state": "available", "was_loaded": False})
    assert "big was not loaded" in run(environment, "unload", "big").stdout
    assert fake.requests[:2] == [
        ("POST", "/api/load", {"model": "big", "draft": "small", "pin": True, "ttl": 60.0}, "Bearer secret"),
        ("POST", "/api/unload", {"model": "big"}, "Bearer secret"),
    ]


def test_earlier_prompts_are_listed_and_forgotten_without_a_server(environment: Mapping[str, str]) -> None:
    folder = Path(environment["PACELINE_HOME"]) / "prefixes"
    assert "No earlier prompt is kept" in run(environment, "cache").stdout
    for name, size in (("big-0123", 3_000_000), ("big-0123", 1_000_000), ("a-b-4567", 2_000)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"rows-{size:064x}.safetensors").write_bytes(bytes(size))
    table = run(environment, "cache").stdout
    assert all(word in table for word in ("big", "4.0 MB", "a-b", "2.0 kB"))
    kept = json.loads(run(environment, "cache", "list", "--json").stdout)
    assert kept["size_bytes"] == 4_002_000
    assert {model["model"]: model["files"] for model in kept["models"]} == {"big": 2, "a-b": 1}
    assert "4.0 MB freed on disk" in run(environment, "cache", "clear").stdout
    assert not any(folder.iterdir())


def test_an_error_of_the_server_is_one_line(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/load"] = (503, {"error": {"message": "it needs 9 GB; unload another model"}})
    result = run(environment, "load", "big")
    assert result.exit_code == 1
    assert result.stderr == "it needs 9 GB; unload another model\n"


def test_a_wanted_key_is_told(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/status"] = (401, {"error": {"message": "missing"}})
    result = run(environment, "ps")
    assert result.exit_code == 1
    assert "PACELINE_API_KEY" in result.stderr


def test_a_reply_that_breaks_off_is_told(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/v1/chat/completions"] = (200, f"data: {json.dumps(chunk('One, t'))}\n\n".encode())
    result = run(environment, "chat", "big", "--once", "Count.")
    assert (result.exit_code, result.stdout) == (1, "One, t")
    assert "closed the connection" in result.stderr


def test_another_program_at_the_port_is_told(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/status"] = (500, "what?")
    result = run(environment, "ps")
    assert result.exit_code == 1
    assert "is it Paceline?" in result.stderr


@pytest.mark.parametrize(
    "words", [("ps",), ("load", "big"), ("unload", "big"), ("chat", "--once", "hi")], ids=lambda words: words[0]
)
def test_without_a_server_the_next_action_is_told_in_one_line(
    environment: Mapping[str, str], words: tuple[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        result = run({**environment, "PACELINE_PORT": str(port)}, *words)
    assert result.exit_code == 1
    assert result.stderr == f"no server at http://127.0.0.1:{port}: start one with `paceline serve`\n"


def test_a_wrong_setting_is_one_line(environment: Mapping[str, str]) -> None:
    result = run({**environment, "PACELINE_PORT": "many"}, "ps")
    assert result.exit_code == 1
    assert result.stderr.startswith("PACELINE_PORT: ")
    assert result.stderr.count("\n") == 1
    assert run(environment, "serve", "--draft", "no-equals-sign").stderr.startswith("PACELINE_DRAFTS: ")


def test_chat_once_writes_the_reply_to_stdout_and_its_numbers_to_stderr(
    environment: Mapping[str, str], fake: FakeServer
) -> None:
    fake.answers["/v1/chat/completions"] = (200, [chunk("1, "), chunk("2, 3", [[0, 3]]), LAST_CHUNK])
    result = run(environment, "chat", "big", "--once", "Count.", "--temperature", "0", "--no-speculation")
    assert result.exit_code == 0
    assert result.stdout == "1, 2, 3\n"
    numbers = "5 tokens · 123.4 tokens/s · draft_model: 3 of 4 drafts accepted (75%) · 2.50 tokens per step\n"
    assert result.stderr == numbers
    _, _, body, _ = fake.requests[-1]
    assert body["messages"] == [{"role": "user", "content": "Count."}]
    assert body["temperature"] == 0
    assert body["speculation"] == {"method": "off"}


def test_chat_takes_the_loaded_model_and_keeps_the_conversation(
    environment: Mapping[str, str], fake: FakeServer
) -> None:
    models = [{"id": "cold", "kind": "main"}, {"id": "warm", "kind": "main", "state": "loaded"}]
    fake.answers["/v1/models"] = (200, {"data": models})
    fake.answers["/v1/chat/completions"] = (200, [chunk("Hello."), LAST_CHUNK])
    result = run(environment, "chat", "--system", "Be brief.", typed="Hi\n/help\n/wat\nAgain\n/reset\nLast\n/quit\n")
    assert result.exit_code == 0
    assert "warm" in result.stdout
    assert "/wat is no command" in result.stdout
    said = [
        [message["content"] for message in body["messages"]] for _, path, body, _ in fake.requests if "chat" in path
    ]
    assert said == [["Be brief.", "Hi"], ["Be brief.", "Hi", "Hello.", "Again"], ["Be brief.", "Last"]]


OURS = {"id": "demo-assistant", "source": "embedded", "draft": "demo-draft"}


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        ([{"id": "demo-a", "source": "embedded", "draft": None}, OURS], "demo-assistant"),
        ([OURS, {"id": "mine", "source": "folder"}], "mine"),
        ([{"id": "bert", "kind": "encoder", "state": "loaded"}, OURS, {"id": "mine", "source": "folder"}], "mine"),
        ([OURS, {"id": "mine", "source": "folder"}, {"id": "other", "source": "folder", "state": "loaded"}], "other"),
    ],
    ids=["embedded", "the only one of the user", "no encoder", "loaded"],
)
def test_chat_without_a_model_takes_the_only_sensible_one(
    environment: Mapping[str, str], fake: FakeServer, models: list[dict[str, object]], chosen: str
) -> None:
    fake.answers["/v1/models"] = (200, {"data": models})
    fake.answers["/v1/chat/completions"] = (200, [chunk("Hello."), LAST_CHUNK])
    assert run(environment, "chat", "--once", "Hi").exit_code == 0
    assert fake.requests[-1][2]["model"] == chosen
    assert run({**environment, "PACELINE_DEFAULT_MODEL": "mine"}, "chat", "--once", "Hi").exit_code == 0
    assert fake.requests[-1][2]["model"] == "mine"


def test_chat_asks_which_model_where_there_is_a_choice(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/v1/models"] = (200, {"data": [OURS, {"id": "one"}, {"id": "two"}]})
    result = run(environment, "chat", "--once", "Hi")
    assert result.exit_code == 1
    assert "name a model: demo-assistant, one, two. `paceline chat MODEL`" in result.stderr


def test_ids_are_never_broken_in_a_narrow_window(environment: Mapping[str, str], fake: FakeServer) -> None:
    names = ["organisation/Some-Model-30B-A3B-Instruct-2507-4bit", "organisation/Some-Model-0.6B-Instruct-2507-4bit"]
    model = {"id": names[0], "state": "ready", "drafts": [{"id": name} for name in names]}
    fake.answers["/api/status"] = (200, {"models": [model]})
    shown = run({**environment, "COLUMNS": "80"}, "ps").stdout
    for name in names:
        assert name in shown


def test_chat_survives_an_error_of_the_server(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/v1/chat/completions"] = (200, [chunk("Hel"), {"error": {"message": "the worker restarted"}}])
    result = run(environment, "chat", "big", typed="Hi\n")
    assert result.exit_code == 0
    assert "the worker restarted" in result.stdout

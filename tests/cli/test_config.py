"""`paceline config`: the same settings as on the page, for people and for programs; each error is one line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.machine.server_file import RunningServer, lock_home
from app.settings import Settings
from tests.cli.fake_server import FakeServer
from tests.cli.test_commands import LOADED, run


def test_every_setting_is_listed_with_its_value_and_when_it_is_felt(environment: Mapping[str, str]) -> None:
    table = run(environment, "config", "list").stdout
    rows = {row["name"]: row for row in json.loads(run(environment, "config", "--json").stdout)}
    assert set(rows) == set(Settings.model_fields)
    assert all(name in table for name in rows)
    assert (rows["port"]["origin"], rows["theme"]["origin"]) == ("environment", "default")
    assert {row["takes_effect"] for row in rows.values()} == {"now", "reload", "restart"}


def test_in_80_columns_a_setting_is_a_line_of_its_value_and_below_it_what_it_means(
    environment: Mapping[str, str],
) -> None:
    shown = run({**environment, "COLUMNS": "80"}, "config", "list").stdout
    lines = [line.rstrip() for line in shown.splitlines()]
    at = lines.index("drain_seconds  30.0  default · takes effect after a restart")
    assert lines[at + 1] == "    Shutdown grace period for running requests. (seconds)"
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) < 3 * len(Settings.model_fields)


@pytest.mark.parametrize(
    ("name", "value", "felt"),
    [
        ("theme", "dark", "takes effect now"),
        ("queue_limit", "5", "on next load"),
        ("drain_seconds", "5", "after a restart"),
        ("PACELINE_MAX_ROWS", "4", "on next load"),
        ("keep-texts", "on", "takes effect now"),
        ("model_dirs", f"/usr{os.pathsep}/var", "takes effect"),
        ("allowed_hosts", "studio.local, attic.local", "takes effect"),
    ],
)
def test_set_says_when_it_is_felt_and_get_prints_it(
    environment: Mapping[str, str], name: str, value: str, felt: str
) -> None:
    said = run(environment, "config", "set", name, value)
    assert (said.exit_code, said.stderr) == (0, "")
    assert felt in said.stdout
    assert run(environment, "config", "get", name).stdout.strip().removesuffix(".0") == value
    assert json.loads(run(environment, "config", "get", name, "--json").stdout)["origin"] == "store"
    assert run(environment, "config", "unset", name).exit_code == 0
    assert json.loads(run(environment, "config", "get", name, "--json").stdout)["origin"] == "default"


def test_a_relative_folder_is_one_of_the_terminal_and_not_of_the_running_server(
    environment: Mapping[str, str], fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fake.answers["/admin/api/settings"] = 200, {}
    home = Path(environment["PACELINE_HOME"])
    home.mkdir()
    with lock_home(home) as write:
        write(RunningServer("127.0.0.1", fake.port, "own-key"))
        assert run(environment, "config", "set", "downloads_folder", "models").exit_code == 0
        assert run(environment, "config", "set", "model_dirs", f"one{os.pathsep}/two{os.pathsep}").exit_code == 0
    assert [body for method, _, body, _ in fake.requests if method == "PATCH"] == [
        {"downloads_folder": str(tmp_path / "models")},
        {"model_dirs": f"{tmp_path / 'one'}{os.pathsep}/two"},
    ]


def test_a_variable_goes_first_and_that_is_told(environment: Mapping[str, str]) -> None:
    said = run(environment, "config", "set", "port", "9000").stdout
    assert "PACELINE_PORT in the environment overrides it" in said
    assert run(environment, "config", "get", "port").stdout.strip() == environment["PACELINE_PORT"]
    free = {name: value for name, value in environment.items() if name != "PACELINE_PORT"}
    assert run(free, "config", "get", "port").stdout.strip() == "9000"


def test_what_is_stored_is_used_by_every_command(environment: Mapping[str, str], fake: FakeServer) -> None:
    port = environment["PACELINE_PORT"]
    free = {name: value for name, value in environment.items() if name != "PACELINE_PORT"}
    assert run(free, "config", "set", "port", port).exit_code == 0
    fake.answers["/api/status"] = (200, LOADED)
    assert "big" in run(free, "ps").stdout, "it found the server"


def test_a_model_has_settings_of_its_own(environment: Mapping[str, str]) -> None:
    own = ("--model", "demo-assistant")
    assert "takes effect now" in run(environment, "config", "set", *own, "temperature", "0.2").stdout
    assert "on next load" in run(environment, "config", "set", *own, "methods", "ngram, draft_model").stdout
    assert run(environment, "config", "set", *own, "drafts", "none").exit_code == 0
    rows = {row["name"]: row for row in json.loads(run(environment, "config", "list", *own, "--json").stdout)}
    assert (rows["temperature"]["value"], rows["methods"]["value"]) == (0.2, ["ngram", "draft_model"])
    assert rows["drafts"]["value"] == []
    assert "temperature 0.2" in run(environment, "ls").stdout
    assert run(environment, "config", "set", *own, "alias", "helper").exit_code == 0
    assert run(environment, "config", "get", "--model", "helper", "temperature").stdout.strip() == "0.2"
    assert run(environment, "config", "set", *own, "presence_penalty", "-0.5").exit_code == 0
    assert run(environment, "config", "get", *own, "presence_penalty").stdout.strip() == "-0.5"
    assert run(environment, "config", "unset", *own, "temperature").exit_code == 0
    assert run(environment, "config", "get", *own, "temperature").stdout.strip() == "–"


def test_a_profile_says_what_a_request_can_and_is_gone_when_it_says_nothing(environment: Mapping[str, str]) -> None:
    own = ("--model", "demo-assistant:careful")
    assert "takes effect now" in run(environment, "config", "set", *own, "temperature", "0.1").stdout
    rows = {row["name"]: row for row in json.loads(run(environment, "config", "list", *own, "--json").stdout)}
    assert (rows["temperature"]["value"], "alias" in rows, rows["num_draft_tokens"]["value"]) == (0.1, False, None)
    assert run(environment, "config", "get", "--model", "demo-assistant", "temperature").stdout.strip() == "–"
    assert "no setting pinned" in run(environment, "config", "set", *own, "pinned", "on").stderr
    assert run(environment, "config", "unset", *own, "temperature").exit_code == 0
    assert "no model" in run(environment, "config", "list", "--model", "nothing:careful").stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("set", "port", "70000"), "port: use 65535 or less"),
        (("set", "port", "abc"), "port: use a whole number"),
        (("set", "memory_limit", "1M"), "memory_limit: use 10 MB or more"),
        (("set", "--model", "demo-assistant", "temperature", "warm"), "temperature: use a number"),
        (("set", "api_key", "k"), "api_key comes from the environment only"),
        (("set", "require_key", "on"), "nobody has a key yet"),
        (("set", "host", "0.0.0.0"), "other machines reach this address"),  # noqa: S104
        (("set", "horoscope", "1"), "unknown setting horoscope"),
        (("get", "temperature"), "unknown setting temperature"),
        (("get", "--model", "demo-assistant", "port"), "models have no setting port"),
        (("set", "--model", "nowhere", "temperature", "1"), 'no model "nowhere"'),
        (("set", "--model", "demo-assistant", "alias", "demo-draft"), "name of another model"),
        (("set", "--model", "demo-assistant", "methods", "guessing"), "methods: "),
        (("set", "theme"), "config set NAME VALUE"),
        (("get",), "config get NAME"),
        (("unset",), "config unset NAME"),
        (("get", "theme", "dark"), "config get NAME"),
    ],
)
def test_what_is_wrong_is_one_line(environment: Mapping[str, str], words: tuple[str, ...], reason: str) -> None:
    result = run(environment, "config", *words)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert (result.stderr.count("\n"), result.stdout) == (1, "")


def test_the_help_teaches(environment: Mapping[str, str]) -> None:
    shown = " ".join(run(environment, "config", "--help").stdout.split())
    for part in ("paceline config set theme dark", "--model demo-assistant temperature 0.2", "list, get, set or unset"):
        assert part in shown

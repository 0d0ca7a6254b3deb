"""Settings: read once, bounded, each described, and errors that name the variable."""

from pathlib import Path
from typing import Any

import pytest

from app.command.server import explicit_settings
from app.core.errors import InvalidSetting
from app.settings import Settings, read_settings


def make(**values: Any) -> Settings:
    return read_settings(_env_prefix="PACELINE_IGNORED_IN_TESTS_", **values)


def test_defaults_are_safe() -> None:
    settings = make()
    assert (settings.host, settings.port, settings.is_loopback, settings.api_key) == ("127.0.0.1", 8710, True, None)
    assert settings.home == Path.home() / ".paceline"
    assert (settings.policy, settings.max_rows, settings.queue_limit) == ("auto", 8, 128)


def test_no_settings_lead_to_a_folder_that_is_called_tilde() -> None:
    for settings in (Settings(), make(), make().over({}), make().over({"port": 1})):
        assert settings.home == Path.home() / ".paceline"
        assert settings.downloads_path == Path.home() / ".paceline" / "models"


def test_texts_as_the_environment_gives_them() -> None:
    settings = make(
        port="0",
        open="1",
        model_dirs="/a:~/b",
        allowed_hosts="Studio.local, [fe80::1]",
        memory_limit="24GiB",
        drafts="a/main=b, c=off",
        num_draft_tokens="",
        idle_seconds="90",
        api_key="  key ",
    )
    assert settings.model_dirs == (Path("/a"), Path.home() / "b")
    assert settings.allowed_hosts == ("studio.local", "[fe80::1]")
    assert settings.memory_limit == 24 << 30
    assert settings.drafts == {"a/main": "b", "c": "off"}
    assert (settings.num_draft_tokens, settings.idle_seconds) == (None, 90)
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "key"
    assert make(drafts='{"a": "b"}').drafts == {"a": "b"}
    assert make(api_key=" ").api_key is None
    assert make(speculative_config=" ").speculative_config is None
    config = make(speculative_config='{"method": "eagle", "model": "b"}').speculative_config
    assert config is not None
    assert (config.method, config.model) == ("eagle3", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"),
        ("port", "http"),
        ("host", " "),
        ("host", "a b"),
        ("home", "~nobody-of-that-name/x"),
        ("downloads_folder", "~nobody-of-that-name/x"),
        ("downloads_folder", "a\0b"),
        ("model_dirs", "/a:~nobody-of-that-name"),
        ("model_dirs", "a\0b"),
        ("policy", "always"),
        ("max_rows", "0"),
        ("queue_limit", "-1"),
        ("memory_limit", "lots"),
        ("memory_limit", "1"),
        ("drafts", "main"),
        ("drafts", "{"),
        ("drafts", '{"a": 1}'),
        ("drafts", '{"a":' * 100_000),
        ("num_draft_tokens", "65"),
        ("acceptance", "always"),
        ("speculative_config", '{"method": "medusa"}'),
        ("speculative_config", '{"method": "ngram", "speed": 9}'),
        ("speculative_config", "ngram"),
        ("idle_seconds", "nan"),
        ("allowed_hosts", "*"),
        ("allowed_hosts", "http://x"),
        ("allowed_hosts", "x:80"),
        ("allowed_origins", "*"),
        ("allowed_origins", "chat.example"),
        ("allowed_origins", "https://chat.example/"),
        ("allowed_origins", "https://*.example"),
        ("api_key", "two words"),
        ("api_key", "ключ"),
        ("drain_seconds", "inf"),
    ],
)
def test_an_error_is_one_line_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        make(**{name: value})
    message = str(refused.value)
    assert message.startswith(f"PACELINE_{name.upper()}: ")
    assert "\n" not in message
    assert value not in {"two words", "ключ"} or value not in message


def test_a_folder_is_kept_with_its_whole_path_because_other_processes_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = make(model_dirs="models", downloads_folder="loads", home="state")
    assert settings.model_dirs == (tmp_path / "models",)
    assert (settings.downloads_folder, settings.home) == (tmp_path / "loads", tmp_path / "state")
    assert explicit_settings(model_dirs=[Path("more")]).model_dirs[0] == tmp_path / "more"


@pytest.mark.parametrize(
    ("host", "loopback", "names"),
    [
        ("127.0.0.1", True, ("127.0.0.1",)),
        ("127.0.0.9", True, ("127.0.0.9",)),
        ("localhost", True, ("localhost",)),
        ("[::1]", True, ("[::1]",)),
        ("0.0.0.0", False, ()),  # noqa: S104
        ("::", False, ()),
        ("192.168.1.5", False, ("192.168.1.5",)),
        ("studio.local", False, ("studio.local",)),
    ],
)
def test_what_is_loopback_and_which_names_it_answers_to(host: str, loopback: bool, names: tuple[str, ...]) -> None:
    settings = make(host=host)
    assert (settings.is_loopback, settings.host_names) == (loopback, names)


def test_every_setting_is_described() -> None:
    assert "api_key" in Settings.model_fields
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict)
        assert field.json_schema_extra["takes_effect"] in {"now", "reload", "restart"}, name

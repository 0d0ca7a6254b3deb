"""Settings of a running server: the source of each value, conflicts, and the moment a change takes effect."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import InvalidSetting, StoreUnavailable
from app.model_settings import CONFLICTS as MODEL_CONFLICTS
from app.model_settings import ModelSettings
from app.serving.live_settings import CONFLICTS, LiveSettings
from app.settings import Settings, read_settings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from tests.api.fakes import FakeStorage

pytestmark = pytest.mark.anyio


def make(storage: FakeStorage | None = None, **given: Any) -> LiveSettings:
    """Make settings in which the `given` values come from the command line."""
    return LiveSettings(read_settings(_env_prefix="PACELINE_IGNORED_IN_TESTS_", **given), storage or FakeStorage())


def test_the_command_line_goes_before_the_environment_before_the_store_before_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_PORT", "2")
    monkeypatch.setenv("PACELINE_MAX_ROWS", "2")
    storage = FakeStorage()
    storage.values = {"port": 3, "max_rows": 3, "queue_limit": 3}
    live = LiveSettings(read_settings(port=1), storage)
    current = live.current
    assert (current.port, current.max_rows, current.queue_limit, current.max_requests) == (1, 2, 3, 512)
    names = ("port", "max_rows", "queue_limit", "max_requests")
    assert [live.origin(name) for name in names] == ["command line", "environment", "store", "default"]
    assert live.stored("port") == 3, "it waits behind the command line"


def test_what_is_felt_at_once_is_and_what_waits_for_a_restart_waits() -> None:
    live = make()
    live.change({"max_requests": 7, "port": 9000, "theme": "dark"}, "test")
    assert (live.current.max_requests, live.current.theme) == (7, "dark")
    assert (live.current.port, live.pending.port) == (8710, 9000)
    live.change({"max_requests": None}, "test")
    assert live.current.max_requests == 512
    live.change({"port": None}, "test")
    assert live.pending.port == 8710


def test_values_are_taken_as_text_and_as_json(tmp_path: Path) -> None:
    live = make()
    folder, other = tmp_path / "one", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    for name, text, value, plain in (
        ("allowed_hosts", "Studio.local, mac", ("studio.local", "mac"), ["studio.local", "mac"]),
        ("allowed_hosts", ["Mac"], ("mac",), ["mac"]),
        ("model_dirs", f"{folder}:{other}", (folder, other), [str(folder), str(other)]),
        ("model_dirs", [str(folder)], (folder,), [str(folder)]),
        ("downloads_folder", "/d", Path("/d"), "/d"),
        ("drafts", "a=b,c=off", {"a": "b", "c": "off"}, {"a": "b", "c": "off"}),
        ("keep_texts", "on", True, True),
        ("idle_seconds", "90", 90.0, 90.0),
    ):
        live.change({name: text}, "test")
        assert getattr(live.current, name) == value, name
        assert live.stored(name) == plain, name
        again = LiveSettings(Settings(), storage_with(live, name))
        assert getattr(again.current, name) == value, name
    live.change({"memory_limit": "1.5G"}, "test")
    assert live.pending.memory_limit == live.stored("memory_limit") == 1_500_000_000
    live.change({"speculative_config": '{"method": "ngram"}'}, "test")
    assert live.stored("speculative_config") == {"method": "ngram"}


def storage_with(live: LiveSettings, name: str) -> FakeStorage:
    storage = FakeStorage()
    storage.values = {name: live.stored(name)}
    return storage


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("nonsense", 1, "there is no setting called nonsense"),
        ("port", 70000, "port: use 65535 or less"),
        ("theme", "pink", "theme: use one of 'system', 'light', 'dark'"),
        ("language", "xx", "language: use one of en"),
        ("hub_endpoint", "ftp://x", "hub_endpoint: "),
        ("api_key", "k", "api_key comes from the environment only: set PACELINE_API_KEY"),
        ("home", "/elsewhere", "home comes from the environment only"),
        ("locked_down", False, "there is no setting called locked_down"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_nothing_is_kept(name: str, value: Any, reason: str) -> None:
    storage = FakeStorage()
    live = make(storage)
    with pytest.raises(InvalidSetting) as refused:
        live.change({"theme": "dark", name: value}, "test")
    assert reason in refused.value.message
    assert "\n" not in refused.value.message
    assert (refused.value.status, storage.values) == (422, {})


@pytest.mark.parametrize(
    ("before", "change", "names"),
    [
        ({}, {"host": "0.0.0.0"}, ("host",)),  # noqa: S104
        ({}, {"require_key": True}, ("require_key",)),
        ({"num_draft_tokens": 4}, {"policy": "off"}, ("policy",)),
        ({"policy": "off"}, {"drafts": "a=b"}, ("policy",)),
        ({}, {"policy": "off", "speculative_config": {"method": "ngram"}}, ("policy",)),
    ],
)
def test_settings_that_clash_are_refused_with_what_to_do(
    before: dict[str, Any], change: dict[str, Any], names: tuple[str]
) -> None:
    live = make()
    live.change(before, "test")
    with pytest.raises(InvalidSetting, match="|".join(names)) as refused:
        live.change(change, "test")
    assert refused.value.code == "conflicting_settings"
    assert all(live.stored(name) == before.get(name) for name in change)


def test_a_key_makes_room_for_what_needs_one() -> None:
    storage = FakeStorage()
    storage.keys = 1
    live = make(storage)
    live.change({"host": "0.0.0.0", "require_key": True}, "test")  # noqa: S104
    make(api_key="k").change({"host": "0.0.0.0", "require_key": True}, "test")  # noqa: S104


@pytest.mark.parametrize(
    "values",
    [
        {"policy": "off", "drafts": ["a"]},
        {"policy": "off", "methods": ["ngram"]},
        {"drafts": [], "methods": ["dflash"]},
        {"prompt_lookup_min": 5, "prompt_lookup_max": 2},
        {"methods": ["dflash"], "prompt_lookup_max": 2},
        {"pinned": True, "idle_seconds": 60},
    ],
)
def test_settings_of_a_model_that_clash_are_refused(values: dict[str, Any]) -> None:
    live = make()
    with pytest.raises(InvalidSetting) as refused:
        live.change_model("big", values, "test")
    assert (refused.value.code, dict(live.models)) == ("conflicting_settings", {})


def test_every_conflict_names_settings_that_exist() -> None:
    assert {name for conflict in CONFLICTS for name in conflict.names} <= set(Settings.model_fields)
    assert {name for conflict in MODEL_CONFLICTS for name in conflict.names} <= set(ModelSettings.model_fields)


def test_an_alias_belongs_to_one_model() -> None:
    live = make()
    live.change_model("big", {"alias": "assistant"}, "test")
    live.change_model("big", {"alias": "assistant", "top_k": 5}, "test")
    assert live.id_of_alias("assistant") == "big"
    for taken in ({"alias": "assistant"}, {"alias": "other-id"}):
        with pytest.raises(InvalidSetting, match="name of another model"):
            live.change_model("small", taken, "test", reserved={"other-id"})
    live.change_model("big", {"alias": None}, "test")
    assert (live.id_of_alias("assistant"), live.model("big")) == (None, ModelSettings(top_k=5))


def test_a_stored_value_that_means_nothing_any_more_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    storage = FakeStorage()
    storage.values = {"theme": "pink", "gone": 1, "max_requests": 5}
    live = make(storage)
    assert (live.current.theme, live.current.max_requests) == ("system", 5)
    assert "the stored setting theme is left out" in caplog.text


@pytest.mark.parametrize("stored", [0, 1, "off", "maybe", float("nan"), None, [], {}])
def test_what_protects_is_on_where_its_stored_value_cannot_be_read(
    stored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FakeStorage()
    storage.values = {"require_key": stored, "prefix_cache_disk": "much", "keep_texts": "maybe", "allowed_hosts": 7}
    live = make(storage)
    assert (live.current.require_key, live.current.prefix_cache_disk) == (True, 0.0)
    assert (live.current.keep_texts, live.current.allowed_hosts) == (False, ())
    assert "the stored setting require_key is taken for True" in caplog.text
    live.change({"require_key": False}, "test")
    assert make(storage).current.require_key is False


def test_what_is_kept_is_read_as_it_was_set(tmp_path: Path) -> None:
    """SQLite stores 20.0 as the integer 20."""
    chosen = {"require_key": False, "open": True, "prefix_cache_disk": 20.0, "idle_seconds": 5.5, "theme": "dark"}
    chosen |= {"memory_limit": 20_000_000, "allowed_hosts": ("a.local",), "drafts": {"big": "off"}, "history_limit": 0}
    with closing(Store(tmp_path / FILE_NAME)) as store:
        LiveSettings(Settings(), StoredSettings(store)).change(chosen, "test")
        kept = LiveSettings(Settings(), StoredSettings(store)).current
    assert {name: getattr(kept, name) for name in chosen} == chosen


async def test_a_change_is_told_on_the_loop_wherever_it_is_made(tmp_path: Path) -> None:
    live = LiveSettings(Settings(), StoredSettings(Store(tmp_path / FILE_NAME)))
    themes: list[str] = []
    felt = asyncio.Event()

    def listen() -> None:
        themes.append(live.current.theme)
        felt.set()

    unsubscribe = live.subscribe(listen)
    for theme in ("dark", "light"):
        await asyncio.to_thread(live.change, {"theme": theme}, "test")
        async with asyncio.timeout(60):
            await felt.wait()
        felt.clear()
    assert (themes, live.changes) == (["dark", "light"], 2)
    unsubscribe()
    live.change({"theme": "dark"}, "test")
    await asyncio.sleep(0)
    assert themes == ["dark", "light"]


async def test_a_store_that_cannot_be_written_changes_nothing() -> None:
    class Failing(FakeStorage):
        def change_settings(self, changes: Any, *, source: str) -> None:
            raise StoreUnavailable("the disk is gone")

    live = make(Failing())
    with pytest.raises(StoreUnavailable):
        live.change({"theme": "dark"}, "test")
    assert (live.current.theme, live.pending.theme, live.stored("theme"), live.changes) == ("system", "system", None, 0)


async def test_without_a_store_settings_are_read_only() -> None:
    live = LiveSettings(Settings(), stored={"theme": "dark"}, models={"big": ModelSettings(top_k=5)})
    assert (live.current.theme, live.origin("theme"), live.model("big").top_k) == ("dark", "store", 5)
    for change in (lambda: live.change({"theme": "light"}, "test"), lambda: live.change_model("big", {}, "test")):
        with pytest.raises(StoreUnavailable):
            change()


async def test_a_listener_that_fails_does_not_keep_others_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    live = make()
    felt = asyncio.Event()

    def fail() -> None:
        raise RuntimeError("broken")

    live.subscribe(fail)
    live.subscribe(felt.set)
    await asyncio.to_thread(live.change, {"theme": "dark"}, "test")
    async with asyncio.timeout(60):
        await felt.wait()
    assert "a listener to the settings failed" in caplog.text

"""Every setting of the server: the one schema that form, API, command line and documents follow.

Values come from the command line, then environment variables `PACELINE_*`, then the store, then the defaults. A field
has a unit, a section of the form and a time when a change takes effect: `now`, after a `reload` of the model, or a
`restart`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
)

from app.core import setting_texts
from app.core.errors import InvalidSetting, invalid_setting
from app.core.request import MAX_DRAFT_TOKENS, AcceptanceRule, DraftingPolicy
from app.core.unit import DEFAULT_STAY
from app.speculative_config import SpeculativeConfig, parse_setting

LANGUAGE = r"^(?:[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*)?$"
ADDRESS = r"^(?:https?://[A-Za-z0-9.-]+(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?)?$"


PREFIXES = "prefixes"
"""Folder in `home` for the prefix cache on disk."""
WHERE_UNREADABLE: Mapping[str, Any] = {"require_key": True, "prefix_cache_disk": 0.0}
"""Values that replace unreadable stored ones whose default would open the server or write texts to disk."""
TakesEffect = Literal["now", "reload", "restart"]
Section = Literal["general", "network", "memory", "folders", "speculation", "history"]
SECTIONS: tuple[Section, ...] = get_args(Section)


def _setting(
    default: Any,
    description: str,
    section: Section,
    takes_effect: TakesEffect = "restart",
    *,
    unit: str = "",
    stored: bool = True,
    **limits: Any,
) -> Any:
    extra: dict[str, Any] = {"takes_effect": takes_effect, "section": section, "unit": unit, "stored": stored}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def _switch(description: str, section: Section, takes_effect: TakesEffect = "restart", *, default: bool = False) -> Any:
    return _setting(default=default, description=description, section=section, takes_effect=takes_effect)


SpeculativeText = Annotated[SpeculativeConfig | None, BeforeValidator(parse_setting)]


class Settings(BaseModel):
    """The settings of one server process. `model_fields_set` names those from command line or environment."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True, arbitrary_types_allowed=True
    )
    _command_line: frozenset[str] = PrivateAttr(frozenset())

    language: str = _setting(
        "", "Dashboard language, such as ko; empty: the browser's.", "general", "now", pattern=LANGUAGE
    )
    theme: Literal["system", "light", "dark"] = _setting("system", "Dashboard theme.", "general", "now")
    open: bool = _switch("Open the dashboard in the browser when the server starts.", "general")
    check_updates: bool = _switch(
        "Ask what installed Paceline (pip, uv, pipx, Homebrew, git) once a day for a newer version.", "general", "now"
    )
    prevent_sleep: bool = _switch(
        "Keep a Mac from idle sleep while requests run (`caffeinate`).", "general", "now", default=True
    )
    default_model: str = _setting(
        "", "Model for requests that name none; empty: the only model installed.", "general", "now", max_length=300
    )
    host: str = _setting(
        "127.0.0.1", "Address to listen on; anything other than loopback requires an API key.", "network"
    )
    port: int = _setting(8710, "TCP port to listen on; 0 picks a free one.", "network", ge=0, le=65535)
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(setting_texts.parse_names)] = _setting(
        (),
        "Allowed hosts besides 127.0.0.1, localhost and [::1]: the host names that requests may use, separated by ','.",
        "network",
        "now",
    )
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(setting_texts.parse_names)] = _setting(
        (),
        "Allowed origins (CORS) of pages calling /v1, such as https://chat.example, separated by ','; empty: none.",
        "network",
        "now",
    )
    api_key: SecretStr | None = _setting(
        None, "Environment key: requests must carry it or another key; empty: none required.", "network", stored=False
    )
    require_key: bool = _switch(
        "Require an API key for every request, including those from this computer.", "network", "now"
    )
    max_requests: int = _setting(
        512, "Limit on open generation requests; more get 429.", "network", "now", unit="requests", ge=1, le=10_000
    )
    drain_seconds: float = _setting(
        30.0, "Shutdown grace period for running requests.", "network", unit="seconds", ge=0, le=3600
    )
    memory_limit: Annotated[int | None, BeforeValidator(setting_texts.parse_optional_size)] = _setting(
        None,
        "Memory limit for models and caches, in bytes or like 24G; empty: derived from the machine.",
        "memory",
        unit="bytes",
        ge=10**7,
    )
    wire: Literal["auto", "off"] = _setting(
        "auto",
        "Keep model weights resident (wired): where macOS and the memory left allow it (`auto`) or never (`off`).",
        "memory",
    )
    prefix_cache_memory: Annotated[int | None, BeforeValidator(setting_texts.parse_optional_size)] = _setting(
        None,
        "Memory for earlier prompts of a model, in bytes or like 8G; empty: half of what models leave.",
        "memory",
        "reload",
        unit="bytes",
        ge=10**7,
    )
    prefix_cache_disk: float = _setting(
        10.0, "GB on disk for earlier prompts, which survive restarts; 0: none.", "memory", ge=0, le=10_000
    )
    prefix_cache_days: float = _setting(
        14.0, "Days after which an unused earlier prompt leaves the disk.", "memory", ge=0.01, le=3650
    )
    idle_seconds: Annotated[float | None, BeforeValidator(setting_texts.none_if_empty)] = _setting(
        DEFAULT_STAY.idle_seconds,
        "Idle time after which a model is unloaded.",
        "memory",
        "now",
        unit="seconds",
        ge=1,
        le=31_536_000,
    )
    max_rows: int = _setting(8, "Concurrent requests per model.", "memory", "reload", unit="requests", ge=1, le=256)
    queue_limit: int = _setting(
        128,
        "Max. queued requests per model and API key; further ones get 429.",
        "memory",
        "reload",
        unit="requests",
        ge=1,
        le=10_000,
    )
    home: Path = _setting(
        Path("~/.paceline"), "Folder for Paceline's data.", "folders", stored=False, validate_default=True
    )
    model_dirs: Annotated[tuple[Path, ...], BeforeValidator(setting_texts.parse_folders)] = _setting(
        (),
        "Model folders, separated by ':', besides the bundled models and the Hugging Face cache.",
        "folders",
        "now",
    )
    downloads_folder: Annotated[Path | None, BeforeValidator(setting_texts.parse_folder)] = _setting(
        None, "Download folder; empty: models in Paceline's data folder.", "folders", "now"
    )
    hub_endpoint: str = _setting(
        "",
        "Hugging Face endpoint to download from; empty: HF_ENDPOINT, else the Hub.",
        "folders",
        "now",
        pattern=ADDRESS,
    )
    parallel_downloads: int = _setting(1, "Concurrent downloads.", "folders", "now", unit="downloads", ge=1, le=3)
    policy: DraftingPolicy = _setting(
        "auto",
        "When to draft: whenever it is faster (`auto`), only when one request is running (`single`) or never (`off`).",
        "speculation",
        "reload",
    )
    acceptance: AcceptanceRule = _setting(
        "coupled",
        "Acceptance rule: `coupled` (exact: same seed, same text), `strict` (exact on any device if a request runs "
        "alone; slower) or `rejection` (sampling: same distribution).",
        "speculation",
        "reload",
    )
    num_draft_tokens: Annotated[int | None, BeforeValidator(setting_texts.none_if_empty)] = _setting(
        None,
        f"Draft length, 1 to {MAX_DRAFT_TOKENS}: exact with one method chosen, else the maximum; empty: automatic "
        "(governor).",
        "speculation",
        "reload",
        unit="tokens",
        ge=1,
        le=MAX_DRAFT_TOKENS,
    )
    drafts: Annotated[dict[str, str], BeforeValidator(setting_texts.parse_pairs)] = _setting(
        {},
        'Drafters by main model: JSON, or "main=draft+other,second=off"; others get the best match.',
        "speculation",
        "reload",
    )
    speculative_config: SpeculativeText = _setting(
        None,
        "vLLM's JSON object: `method` (ngram, draft_model, eagle3, mtp, dflash), `model`, `num_speculative_tokens`, "
        "`prompt_lookup_min` and `_max`; of the default model, or of the one under the key `target`.",
        "speculation",
        "reload",
    )
    ngram_across_requests: bool = _switch(
        "Also draft n-grams from earlier requests with the same API key, or with none.",
        "speculation",
        "reload",
    )
    history_limit: int = _setting(
        1000,
        "Request history: finished requests to keep; 0: none.",
        "history",
        "now",
        unit="requests",
        ge=0,
        le=100_000,
    )
    keep_texts: bool = _switch(
        "Store prompts and replies of finished requests, not only their statistics.", "history", "now"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Log level.", "history", "now")

    @field_validator("home")
    @classmethod
    def _expand_home(cls, home: Path) -> Path:
        return setting_texts.absolute_path(str(home))

    @field_validator("api_key")
    @classmethod
    def _no_empty_key(cls, key: SecretStr | None) -> SecretStr | None:
        text = key.get_secret_value().strip() if key else ""
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("use printable ASCII characters without spaces")
        return SecretStr(text) if text else None

    @field_validator("host")
    @classmethod
    def _bare_host(cls, host: str) -> str:
        host = host.strip().strip("[]")
        if not host or " " in host or not host.isprintable():
            raise ValueError("give an address, such as 127.0.0.1")
        return host

    @field_validator("allowed_hosts")
    @classmethod
    def _valid_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if setting_texts.HOST_NAME.fullmatch(name) is None:
                raise ValueError("give names without scheme, port or wildcard, such as studio.local")
        return tuple(name.lower() for name in names)

    @field_validator("allowed_origins")
    @classmethod
    def _valid_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if setting_texts.ORIGIN.fullmatch(origin) is None:
                raise ValueError("give scheme and name, and a port where there is one, such as https://chat.example")
        return tuple(origin.lower() for origin in origins)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return setting_texts.is_loopback(self.host)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names that a Host header may carry in addition to the loopback ones."""
        return (*self.allowed_hosts, *setting_texts.host_names(self.host))

    @property
    def prefixes_path(self) -> Path:
        """Folder of the prefix cache on disk."""
        return self.home / PREFIXES

    @property
    def downloads_path(self) -> Path:
        """Folder of downloads."""
        return self.downloads_folder or self.home / "models"

    @property
    def model_folders(self) -> tuple[Path, ...]:
        """Folders that are searched for models first; models in the default downloads folder stay usable."""
        return tuple(dict.fromkeys((self.downloads_path, self.home / "models", *self.model_dirs)))

    def with_left_downloads(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return `changes`, with a replaced downloads folder added to the model folders, so that its models stay."""
        left, folders = self.downloads_folder, changes.get("model_dirs", self.model_dirs) or ()
        if left is None or changes.get("downloads_folder", left) == left or left in folders:
            return changes
        return {**changes, "model_dirs": (*folders, left)}

    @property
    def command_line(self) -> frozenset[str]:
        """Names of the settings from the command line, rather than the environment."""
        return self._command_line

    def with_command_line(self, **values: Any) -> "Settings":
        """Return a copy with these checked values, marked as given on the command line."""
        copy = self.model_copy(update=values)
        copy._command_line = self._command_line | frozenset(values)  # noqa: SLF001
        return copy

    def over(self, stored: Mapping[str, Any]) -> "Settings":
        """Return these settings, with stored ones where neither command line nor environment set one.

        Stored values are plain JSON values; `model_fields_set` is unchanged. Raises `InvalidSetting`.
        """
        unset = {name: value for name, value in stored.items() if name not in self.model_fields_set}
        validated = _validated(unset)
        return self.with_values({name: getattr(validated, name) for name in validated.model_fields_set})

    def with_values(self, values: Mapping[str, Any]) -> "Settings":
        """Return a copy with these checked values; `model_fields_set` is unchanged."""
        settings = Settings.model_construct(_fields_set=set(self.model_fields_set), **{**dict(self), **values})
        settings._command_line = self._command_line  # noqa: SLF001
        return settings


def read_settings(**overrides: Any) -> Settings:
    """Read the settings from the environment, but `overrides` (the command line) win. Raises `InvalidSetting`."""
    variables = {name: f"PACELINE_{name.upper()}" for name in Settings.model_fields}
    environment = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    settings = _validated({**environment, **overrides})
    return settings.with_command_line(
        **{name: getattr(settings, name) for name in overrides if name in Settings.model_fields}
    )


def check_setting(name: str, value: Any) -> Any:
    """Return the value to store for a setting, from text or plain JSON; None for None. Raises `InvalidSetting`."""
    if name not in Settings.model_fields:
        raise InvalidSetting(f"there is no setting called {name[:60]}", parameter="name")
    if not setting_info(name)["stored"]:
        raise InvalidSetting(f"{name} comes from the environment only: set PACELINE_{name.upper()}", parameter=name)
    try:
        return None if value is None else getattr(Settings(**{name: value}), name)
    except ValidationError as error:
        raise _invalid(error) from None


def setting_info(name: str) -> dict[str, Any]:
    """Return the metadata of a setting: `takes_effect`, `section`, `unit` and `stored`."""
    return cast("dict[str, Any]", Settings.model_fields[name].json_schema_extra)


def _validated(values: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        raise _invalid(error, "PACELINE_") from None


def _invalid(error: ValidationError, prefix: str = "") -> InvalidSetting:
    """Return the first problem of a failed validation; with a `prefix`, it names the variable."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    is_size = setting_info(name)["unit"] == "bytes"
    return invalid_setting(first, f"{prefix}{name.upper()}" if prefix else "", is_size=is_size)

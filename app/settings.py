"""Every setting in one place: environment variables `PACELINE_*`, read once at start.

Each field says its unit and default; `takes_effect` in its schema says when a change is felt.
"""

import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.core.sizes import parse_size
from app.core.speculative_config import SpeculativeConfig

HOST_NAME = re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}")


class SettingsError(ValueError):
    """A variable has a value that cannot be used; the message is one line and names the variable."""


def _bytes(value: object) -> object:
    if not isinstance(value, str) or not value:
        return value or None
    return parse_size(value)


def _folders(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(Path(part).expanduser() for part in value.split(os.pathsep) if part)


def _names(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip().lower() for part in value.split(",") if part.strip())


def _pairs(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return json.loads(value)
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not (main.strip() and equals and draft.strip()) for main, equals, draft in pairs):
        raise ValueError('give pairs like "main=draft,other=off", or a JSON object')
    return {main.strip(): draft.strip() for main, _, draft in pairs}


def _speculative(value: object) -> object:
    if not isinstance(value, str):
        return value
    return SpeculativeConfig.read(value) if value.strip() else None


def _absent(value: object) -> object:
    return None if value == "" else value


Takes = Literal["restart", "reload"]


def _setting(default: Any, description: str, takes_effect: Takes = "restart", **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"takes_effect": takes_effect}, **limits)


class Settings(BaseSettings):
    """The settings of one server process. `takes_effect`: `restart` of Paceline, or `reload` of a model."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_",
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        arbitrary_types_allowed=True,
    )

    host: str = _setting("127.0.0.1", "Address to listen on; anything beyond loopback needs an API key.")
    port: int = _setting(8710, "TCP port to listen on; 0 takes a free one.", ge=0, le=65535)
    home: Path = _setting(Path("~/.paceline"), "Folder for the state that Paceline keeps.")
    model_dirs: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_folders)] = _setting(
        (), "Folders with models, separated by ':', besides the embedded ones and the Hugging Face cache."
    )
    open: bool = _setting(default=False, description="Open the start page in the browser once the server is up.")
    api_key: SecretStr | None = _setting(None, "Key that every request must carry; none is asked when empty.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = _setting(
        (), "Host names, separated by ',', that requests may use besides 127.0.0.1, localhost and [::1]."
    )
    policy: Literal["single", "auto", "off"] = _setting(
        "single", "When to speculate: `single` running request only, `auto` where it pays, or `off`.", "reload"
    )
    acceptance: Literal["coupled", "rejection"] = _setting(
        "coupled",
        "Which drafts stay: `coupled` (equal to the target's own draw: same seed, same text) or `rejection` (p/q).",
        "reload",
    )
    max_rows: int = _setting(8, "Requests that one model decodes at the same time.", "reload", ge=1, le=256)
    queue_limit: int = _setting(128, "Requests that may wait for one model; more get 429.", "reload", ge=1, le=10_000)
    memory_limit: Annotated[int | None, BeforeValidator(_bytes)] = _setting(
        None, "Ceiling for models and caches in bytes, or like 24G; empty: derived from the machine.", ge=1 << 20
    )
    drafts: Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)] = _setting(
        {},
        'Drafters by main model: JSON, or "main=draft+other,second=off"; others get the best one that fits.',
        "reload",
    )
    speculative_config: Annotated[SpeculativeConfig | None, NoDecode, BeforeValidator(_speculative)] = _setting(
        None,
        "vLLM's JSON object: `method` (ngram, draft_model, eagle3, mtp, dflash), `model`, `num_speculative_tokens`, "
        "`prompt_lookup_min` and `_max`; of the default model, or of the one under the key `target`.",
        "reload",
    )
    num_draft_tokens: Annotated[int | None, BeforeValidator(_absent)] = _setting(
        None, "Tokens drafted per step, 1 to 64; empty: the governor decides.", "reload", ge=1, le=64
    )
    idle_seconds: Annotated[float | None, BeforeValidator(_absent)] = _setting(
        None, "Seconds without a request that unload a model; empty: one hour.", "reload", ge=1, le=31_536_000
    )
    default_model: str = _setting("", "Model for requests that name none; empty: the only one there is.")
    drain_seconds: float = _setting(30.0, "Seconds that running requests get to finish at shutdown.", ge=0, le=3600)
    max_requests: int = _setting(512, "Generation requests held open at once; more get 429.", ge=1, le=10_000)

    @field_validator("home")
    @classmethod
    def _expand_home(cls, home: Path) -> Path:
        return home.expanduser().absolute()

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
        if not host:
            raise ValueError("give an address, such as 127.0.0.1")
        return host

    @field_validator("allowed_hosts")
    @classmethod
    def _valid_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if HOST_NAME.fullmatch(host) is None:
                raise ValueError("give names without scheme, port or wildcard, such as studio.local")
        return hosts

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names that a Host header may carry, besides the loopback ones."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return (*self.allowed_hosts, self.host.lower())
        if address.is_unspecified:
            return self.allowed_hosts
        return (*self.allowed_hosts, f"[{address}]" if address.version == 6 else str(address))


def read_settings(**overrides: Any) -> Settings:
    """Settings from the environment, `overrides` (the command line) first. Raises `SettingsError`."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        message = str(first["msg"]).removeprefix("Value error, ")
        raise SettingsError(f"PACELINE_{name.upper()}: {message}") from None


def describe_settings() -> dict[str, FieldInfo]:
    """Every setting by the name of its environment variable, for the documentation and the command line."""
    return {f"PACELINE_{name.upper()}": field for name, field in Settings.model_fields.items()}

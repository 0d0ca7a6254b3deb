"""The local Paceline server as the command line sees it: where it is, and a few calls over HTTP with errors that tell
the next action.

Where it is, its words, the environment and the store tell: that is glanced at, without its libraries. The calls go by
the standard library's client: another one takes longer to import than the whole call.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import SecretStr

from app.core.errors import CommandError, InvalidSetting
from app.core.server_file import read_server
from app.model_settings import ModelSettings
from app.settings import Settings, read_settings
from app.store.glance import FILE_NAME, glance

CONNECT_SECONDS = 3.0
BAD_REQUEST, UNAUTHORIZED = 400, 401
UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - an address to compare with, not to bind


def given(*, model_dirs: Sequence[Path] = (), drafts: Sequence[str] = (), **words: Any) -> Settings:
    """What the environment says, and over it the command line. Raises `InvalidSetting`."""
    settings = read_settings(**{name: value for name, value in words.items() if value is not None})
    extra: dict[str, Any] = {}
    if model_dirs:
        extra["model_dirs"] = (*(folder.expanduser().absolute() for folder in model_dirs), *settings.model_dirs)
    if drafts:
        extra["drafts"] = {**settings.drafts, **read_settings(drafts=",".join(drafts)).drafts}
    return settings.with_command_line(**extra)


def known(settings: Settings) -> Settings | None:
    """What is given, what is stored, and defaults; None where the store has to be opened to tell."""
    stored = glance(settings.home / FILE_NAME)
    if stored is None:
        return None
    try:
        return settings.over(stored.settings)
    except (InvalidSetting, AttributeError):  # a stored value that means nothing (any more)
        return None


def stored_choices(settings: Settings) -> dict[str, ModelSettings]:
    """What is stored for each model that something is stored for."""
    stored = glance(settings.home / FILE_NAME)
    return stored.models if stored is not None else {}


class NoServer(CommandError):
    """Nothing answers at the address."""


def address_of(settings: Settings) -> str:
    """Where a client on this computer reaches the server."""
    host = _reachable(settings)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _reachable(settings: Settings) -> str:
    return UNSPECIFIED.get(settings.host, settings.host)


class NoKey(CommandError):
    """The server asks for a key that was not given, or not for enough."""


def running_server(settings: Settings) -> "Server | None":
    """The server that runs on this home, which lets the owner of the files in; None when none does."""
    found = read_server(settings.home)
    if found is None:
        return None
    server = Server(settings.with_command_line(host=found.host, port=found.port, api_key=SecretStr(found.key)))
    try:
        is_ours = server.asker() == "command"
    except CommandError:
        return None
    return server if is_ours else None


class Server:
    """The server at an address; a connection for each call. Loading takes long, so only connecting times out."""

    def __init__(self, settings: Settings) -> None:
        self.address = address_of(settings)
        self._place = _reachable(settings), settings.port
        self._headers = {"Content-Type": "application/json"}
        if settings.api_key is not None:
            self._headers["Authorization"] = f"Bearer {settings.api_key.get_secret_value()}"

    def live(self) -> None:
        """`GET /health/live`. Raises NoServer until one answers."""
        self._call("GET", "/health/live")

    def asker(self) -> str:
        """`GET /admin/api/session`: as what the server knows who asks."""
        return str(self._call("GET", "/admin/api/session").get("kind", ""))

    def change_setting(self, name: str, value: Any, model: str = "") -> None:
        """`PATCH /admin/api/settings`, or `…/models/{id}/settings`: keep a value, or with None forget it."""
        self._call("PATCH", _settings_path(model), {name: value})

    def models(self) -> list[dict[str, Any]]:
        """`GET /v1/models`."""
        return list(self._call("GET", "/v1/models").get("data", []))

    def loaded(self) -> dict[str, Any]:
        """`GET /api/status`."""
        return self._call("GET", "/api/status")

    def load(self, model: str, *, draft: str | None, pin: bool | None, ttl: float | None) -> dict[str, Any]:
        """`POST /api/load`; returns when the model is ready."""
        asked = {"model": model, "draft": draft, "pin": pin, "ttl": ttl}
        return self._call("POST", "/api/load", {name: value for name, value in asked.items() if value is not None})

    def unload(self, model: str) -> dict[str, Any]:
        """`POST /api/unload`."""
        return self._call("POST", "/api/unload", {"model": model})

    def release(self, model: str) -> dict[str, Any]:
        """`POST /api/release`."""
        return self._call("POST", "/api/release", {"model": model})

    def add_download(self, repository: str, revision: str = "") -> dict[str, Any]:
        """`POST /admin/api/downloads`: the download, new or gone on with."""
        return self._call("POST", "/admin/api/downloads", {"repository": repository, "revision": revision})

    def download(self, number: int) -> dict[str, Any]:
        """One of `GET /admin/api/downloads`; empty when it is gone."""
        rows = self._call("GET", "/admin/api/downloads").get("downloads", [])
        return next((row for row in rows if row.get("id") == number), {})

    def pause_download(self, number: int) -> dict[str, Any]:
        """`POST /admin/api/downloads/{id}/pause`."""
        return self._call("POST", f"/admin/api/downloads/{number}/pause", {})

    def begin_measurement(self, wishes: Mapping[str, Any]) -> None:
        """`POST /admin/api/measurements`: measure in the background."""
        self._call("POST", "/admin/api/measurements", wishes)

    def measurements(self, model: str) -> dict[str, Any]:
        """`GET /admin/api/measurements`: the `active` one, how the `last` one ended, and those kept of `model`."""
        return self._call("GET", f"/admin/api/measurements?model={quote(model)}")

    def stop_measurement(self) -> None:
        """`DELETE /admin/api/measurements/current`: what is known by then is kept."""
        self._call("DELETE", "/admin/api/measurements/current")

    def apply_measurement(self, number: int) -> None:
        """`POST /admin/api/measurements/{id}/apply`."""
        self._call("POST", f"/admin/api/measurements/{number}/apply", {})

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The chunks of a streamed chat answer; closing the generator ends the request."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._explained_errors(), self._asked("POST", "/v1/chat/completions", asked) as response:
            for line in response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    chunk: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        raise CommandError(_message(chunk))
                    yield chunk
            raise HTTPException("it ended early")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._explained_errors(), self._asked(method, path, body) as response:
            answer = json.loads(response.read())
        return answer if isinstance(answer, dict) else {}

    @contextmanager
    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[HTTPResponse]:
        """The answer, which is no error; the connection ends with it."""
        connection = HTTPConnection(*self._place, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError:
            raise NoServer(f"no server at {self.address}: start one with `paceline serve`") from None
        try:
            connection.sock.settimeout(None)
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            self._check(response)
            yield response
        finally:
            connection.close()

    def _check(self, response: HTTPResponse) -> None:
        if response.status == UNAUTHORIZED:
            raise NoKey(f"{self.address} requires an API key: set PACELINE_API_KEY")
        if response.status >= BAD_REQUEST:
            try:
                body = json.loads(response.read())
            except ValueError:
                body = {}
            if _code(body) == "insufficient_scope":
                raise NoKey(_message(body))
            raise CommandError(_message(body) or f"{self.address} answered {response.status}; is it Paceline?")

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except (HTTPException, OSError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise CommandError(
                f"{self.address} closed the connection ({why}): try again, or run `paceline doctor`"
            ) from None
        except ValueError:
            raise CommandError(
                f"{self.address} did not answer with JSON; is it Paceline? Run `paceline doctor`"
            ) from None


def _settings_path(model: str) -> str:
    return f"/admin/api/models/{quote(model)}/settings" if model else "/admin/api/settings"


def _code(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("code", "")) if isinstance(error, dict) else ""


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")

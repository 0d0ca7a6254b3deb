"""The local Paceline server as the command line sees it: its address, and calls over HTTP whose errors name the next
action.

The address comes from the command line, the environment and the store, read without database libraries. Calls use the
standard library's HTTP client: importing any other takes longer than the whole call.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from app.core.errors import CommandError, InvalidSetting
from app.core.setting_texts import client_host, local_url
from app.machine.server_file import read_server
from app.model_settings import ModelSettings
from app.settings import Settings, read_settings
from app.store.snapshot import FILE_NAME, read_snapshot

CONNECT_SECONDS = 3.0
BAD_REQUEST, UNAUTHORIZED = 400, 401


def explicit_settings(*, model_dirs: Sequence[Path] = (), drafts: Sequence[str] = (), **options: Any) -> Settings:
    """Return the settings given explicitly: environment, overridden by the command line. Raises `InvalidSetting`."""
    settings = read_settings(**{name: value for name, value in options.items() if value is not None})
    extra: dict[str, Any] = {}
    if model_dirs:
        extra["model_dirs"] = (*(folder.expanduser().absolute() for folder in model_dirs), *settings.model_dirs)
    if drafts:
        extra["drafts"] = {**settings.drafts, **read_settings(drafts=",".join(drafts)).drafts}
    return settings.with_command_line(**extra)


def peek_settings(settings: Settings) -> Settings | None:
    """Return explicit settings over stored ones, read without opening the store; None if the store is unusable."""
    stored = read_snapshot(settings.home / FILE_NAME)
    if stored is None:
        return None
    try:
        return settings.over(stored.settings)
    except (InvalidSetting, AttributeError):  # a stored value that is not valid (any more)
        return None


def stored_model_settings(settings: Settings) -> dict[str, ModelSettings]:
    """Return the stored settings of each model that has some."""
    stored = read_snapshot(settings.home / FILE_NAME)
    return stored.models if stored is not None else {}


class NoServer(CommandError):
    """Nothing answers at the address."""


class NoKey(CommandError):
    """The server requires a key, but none was given, or the given key's scope is insufficient."""


def running_server(settings: Settings) -> "Server | None":
    """Return the server that runs on this home, with the key that it writes for its owner; None if none runs."""
    running = read_server(settings.home)
    if running is None:
        return None
    return Server(settings.with_command_line(host=running.host, port=running.port, api_key=SecretStr(running.key)))


def target_server(settings: Settings) -> "Server":
    """Return the server that a command addresses: the one of this home, else the one at the configured address.

    A host given explicitly takes precedence if it differs from the running server's.
    """
    running = read_server(settings.home)
    is_elsewhere = running is not None and "host" in settings.model_fields_set and settings.host != running.host
    return (None if is_elsewhere else running_server(settings)) or Server(settings)


class Server:
    """The server at an address; each call opens a connection. By default only connecting times out: loads take long."""

    def __init__(self, settings: Settings) -> None:
        self.address = local_url(settings.host, settings.port)
        self._address = client_host(settings.host), settings.port
        self._headers = {"Content-Type": "application/json"}
        if settings.api_key is not None:
            self._headers["Authorization"] = f"Bearer {settings.api_key.get_secret_value()}"

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> dict[str, Any]:
        """Call a route and return its JSON object, within `seconds` if given.

        Raises NoServer, NoKey, and `CommandError` with the server's message.
        """
        with self._translated_errors(), self._response(method, path, body, seconds) as response:
            answer = json.loads(response.read())
        return answer if isinstance(answer, dict) else {}

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the chunks of a streamed chat answer; closing the generator ends the request."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._translated_errors(), self._response("POST", "/v1/chat/completions", request) as response:
            for line in response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    chunk: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        raise CommandError(_error(chunk, "message"))
                    yield chunk
            raise HTTPException("it ended early")

    @contextmanager
    def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request, yield its response, and close the connection. Raises as `call` does for an error response."""
        connection = HTTPConnection(*self._address, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError:
            raise NoServer(f"no server at {self.address}: start one with `paceline serve`") from None
        try:
            connection.sock.settimeout(seconds)
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
            if _error(body, "code") == "insufficient_scope":
                raise NoKey(_error(body, "message"))
            raise CommandError(_error(body, "message") or f"{self.address} answered {response.status}; is it Paceline?")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (HTTPException, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CommandError(
                f"{self.address} closed the connection ({reason}): try again, or run `paceline doctor`"
            ) from None
        except ValueError:
            raise CommandError(
                f"{self.address} did not answer with JSON; is it Paceline? Run `paceline doctor`"
            ) from None


def _error(body: Any, name: str) -> str:
    """Return a field of OpenAI's error object, or the text that other servers send instead; "" if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get(name, "")) if isinstance(error, dict) else str(error or "")

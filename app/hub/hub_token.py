"""The token for the hub: stored in a file for nobody else, or found where Hugging Face's own tools keep theirs.

It is written through the dashboard and never read back: `origin` says only where one comes from. A token is told to the
hub that it was stored for and to no other, so that changing the hub's address does not tell it to a stranger.
"""

import os
import re
import uuid
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub import constants

from app.core.errors import InvalidRequest

FILE_NAME = "hub_token"
TOKEN = re.compile(r"[A-Za-z0-9_.\-]{8,256}")

Origin = Literal["paceline", "hugging_face", "none"]


class HubToken:
    """The file of one `PACELINE_HOME`. An empty `endpoint` is the public hub, or what HF_ENDPOINT says."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def read(self, endpoint: str) -> str:
        """The token to use there; empty for none."""
        return self._stored(endpoint) or _found(endpoint)

    def origin(self, endpoint: str) -> Origin:
        """Where the token for there comes from."""
        if self._stored(endpoint):
            return "paceline"
        return "hugging_face" if _found(endpoint) else "none"

    def write(self, token: str, endpoint: str) -> None:
        """Keep a token for there; an empty one removes it. Raises `InvalidRequest`, which never quotes it."""
        token = token.strip()
        if not token:
            self._path.unlink(missing_ok=True)
            return
        if TOKEN.fullmatch(token) is None:
            raise InvalidRequest("That is no token: copy one whole from the hub's settings page.", parameter="token")
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_name(f".{FILE_NAME}.{uuid.uuid4().hex}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n{_address(endpoint)}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)

    def _stored(self, endpoint: str) -> str:
        try:
            token, _, address = self._path.read_text("ascii").strip().partition("\n")
        except (OSError, ValueError):
            return ""
        return token if TOKEN.fullmatch(token) and address == _address(endpoint) else ""


def _found(endpoint: str) -> str:
    """The token of Hugging Face's own tools, which is for the hub that they use."""
    return (huggingface_hub.get_token() or "") if _address(endpoint) in {"", _address(constants.ENDPOINT)} else ""


def _address(endpoint: str) -> str:
    return endpoint.rstrip("/")

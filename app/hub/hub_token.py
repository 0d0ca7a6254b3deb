"""The token for the hub: stored in a file for nobody else, or found where Hugging Face's own tools keep theirs.

It is written through the dashboard and never read back: `origin` says only where one comes from.
"""

import os
import re
import uuid
from pathlib import Path
from typing import Literal

from huggingface_hub import get_token

from app.core.errors import InvalidRequest

FILE_NAME = "hub_token"
TOKEN = re.compile(r"[A-Za-z0-9_.\-]{8,256}")

Origin = Literal["paceline", "hugging_face", "none"]


class HubToken:
    """The file of one `PACELINE_HOME`."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def read(self) -> str:
        """The token to use; empty for none."""
        return self._stored() or get_token() or ""

    def origin(self) -> Origin:
        """Where the token comes from."""
        if self._stored():
            return "paceline"
        return "hugging_face" if get_token() else "none"

    def write(self, token: str) -> None:
        """Keep a token; an empty one removes it. Raises `InvalidRequest`, which never quotes it."""
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
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)

    def _stored(self) -> str:
        try:
            text = self._path.read_text("ascii").strip()
        except (OSError, ValueError):
            return ""
        return text if TOKEN.fullmatch(text) else ""

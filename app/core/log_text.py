"""What a log line may hold: no control characters that could forge lines or drive a terminal, and no secrets."""

import re
from collections.abc import Sequence

HIDDEN = "…"
MAX_CHARACTERS = 8_000
SECRETS = (
    re.compile(r"(\bpl-)[A-Za-z0-9_\-]{6,}"),
    re.compile(r"(\bhf_)[A-Za-z0-9]{6,}"),
    re.compile(r"(\bsk-)[A-Za-z0-9_\-]{6,}"),
    re.compile(r"(\bbearer\s+)[^\s'\"]+", re.IGNORECASE),
    re.compile(r"(\bpaceline_session=)[^\s;'\"]+", re.IGNORECASE),
    re.compile(r"(/setup#)\S+"),
)
"""What begins like a key, a token or a cookie; the beginning stays, so that one sees what it was."""
REQUEST_ID = re.compile(r"\b(?:chatcmpl|cmpl)-[0-9a-f]{24}\b")


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Without anything that looks like a secret, and without these."""
    for pattern in SECRETS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def escape(text: str) -> str:
    """One line in which every control character, also those that turn the direction of writing, is spelled out."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def request_id_in(text: str) -> str:
    """The id of the request that a line is about; empty: of none."""
    found = REQUEST_ID.search(text)
    return found.group() if found else ""

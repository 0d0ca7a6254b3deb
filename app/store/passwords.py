"""Passwords: scrypt with its own salt and parameters in the string, compared in constant time.

Length is all that is asked for, and that it is none of the first words anybody tries (NIST SP 800-63B).
"""

import base64
import binascii
import hashlib
import secrets
import unicodedata
from dataclasses import dataclass

from app.core.errors import InvalidRequest

MIN_CHARACTERS = 8
MAX_CHARACTERS = 1024
SALT_BYTES = 16
HASH_BYTES = 32
MAX_MEMORY_BYTES = 256 * 1024 * 1024
OBVIOUS = frozenset(
    [
        "password",
        "password1",
        "passw0rd",
        "12345678",
        "123456789",
        "1234567890",
        "87654321",
        "11111111",
        "00000000",
        "qwertyui",
        "qwertyuiop",
        "qwerty123",
        "1q2w3e4r",
        "iloveyou",
        "sunshine",
        "princess",
        "football",
        "baseball",
        "superman",
        "starwars",
        "trustno1",
        "letmein1",
        "welcome1",
        "admin123",
        "administrator",
        "changeme",
        "paceline",
    ]
)


@dataclass(frozen=True, slots=True)
class ScryptCost:
    """How much one guess costs: 128 · n · r bytes of memory, p times. The default takes 32 MiB, thrice."""

    n: int = 1 << 15
    r: int = 8
    p: int = 3


def check_password(password: str) -> None:
    """Raise `InvalidRequest` for a password that may not be chosen."""
    if len(password) < MIN_CHARACTERS:
        raise InvalidRequest(
            f"Choose a password of at least {MIN_CHARACTERS} characters.", parameter="password", code="password_short"
        )
    if len(password) > MAX_CHARACTERS:
        raise InvalidRequest("This password is too long.", parameter="password", code="password_long")
    folded = password.strip().lower()
    if folded in OBVIOUS or len(set(folded)) < 3:
        raise InvalidRequest(
            "This password is one of the first that anybody tries: choose another.",
            parameter="password",
            code="password_obvious",
        )


def hash_password(password: str, cost: ScryptCost) -> str:
    """`scrypt$n$r$p$salt$hash`; takes a fifth of a second on purpose, so call it in a thread."""
    salt = secrets.token_bytes(SALT_BYTES)
    digest = _scrypt(password, salt, cost)
    return f"scrypt${cost.n}${cost.r}${cost.p}${_text(salt)}${_text(digest)}"


def is_password(password: str, stored: str) -> bool:
    """Whether `stored` was made of `password`; a string that is no hash matches nothing."""
    try:
        name, n, r, p, salt, digest = stored.split("$")
        cost, expected = ScryptCost(int(n), int(r), int(p)), _bytes(digest)
        if name != "scrypt" or len(expected) != HASH_BYTES:
            return False
        return secrets.compare_digest(_scrypt(password, _bytes(salt), cost), expected)
    except (ValueError, binascii.Error):
        return False


def _scrypt(password: str, salt: bytes, cost: ScryptCost) -> bytes:
    """Two keyboards may write one letter in two ways: NFKC makes them one. Overlong input costs no more than any."""
    normal = unicodedata.normalize("NFKC", password[: MAX_CHARACTERS + 1]).encode("utf-8", "surrogatepass")
    return hashlib.scrypt(normal, salt=salt, n=cost.n, r=cost.r, p=cost.p, dklen=HASH_BYTES, maxmem=MAX_MEMORY_BYTES)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes(value: str) -> bytes:
    return base64.b64decode(value, validate=True)

"""`paceline password` and `paceline keys`: the account and its keys, straight in the store, with or without a server.

Whoever may write the store may do this; a running server feels it at the next request.
"""

import getpass
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from app.core.errors import CommandError
from app.settings import Settings
from app.store.accounts import Accounts
from app.store.store import FILE_NAME, Store
from app.store.tables import KeyRow, Scope


@contextmanager
def opened(settings: Settings) -> Iterator[Accounts]:
    """The account of these settings' home folder."""
    store = Store(settings.home / FILE_NAME)
    try:
        yield Accounts(store)
    finally:
        store.close()


def read_password() -> str:
    """A new password: typed twice without being shown, or the first line of a pipe. Raises `CommandError`."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass("New password for the dashboard: ")
    if getpass.getpass("Again: ") != password:
        raise CommandError("the passwords do not match; nothing was changed")
    return password


def change_password(settings: Settings, password: str) -> None:
    """Set the password, or change it; every browser is signed out. Raises `InvalidRequest`."""
    with opened(settings) as accounts:
        accounts.set_password(password)


def list_keys(settings: Settings) -> Sequence[KeyRow]:
    """The keys that open something."""
    with opened(settings) as accounts:
        return accounts.keys.list()


def create_key(settings: Settings, name: str, scope: Scope) -> str:
    """A new key's text, for this one time. Raises `InvalidRequest`."""
    with opened(settings) as accounts:
        return accounts.keys.create(name, scope)[1]


def revoke_key(settings: Settings, name: str) -> None:
    """End the key with this number or name. Raises `CommandError` when there is not exactly one."""
    with opened(settings) as accounts:
        found = [key for key in accounts.keys.list() if name in {str(key.id), key.name}]
        if len(found) != 1:
            what = "several keys are" if found else "no key is"
            raise CommandError(f"{what} called {name}: use its number from `paceline keys`")
        accounts.keys.revoke(found[0].id)


def keys_table(keys: Sequence[KeyRow]) -> Table | Text:
    """The keys for a person."""
    if not keys:
        return Text("No API keys. Create one: paceline keys create NAME")
    table = Table("number", "name", "begins with", "scope", "created", "last used", box=None, pad_edge=False)
    for key in keys:
        used = "never" if key.used_at is None else _day(key.used_at)
        table.add_row(str(key.id), Text(key.name), key.hint, key.scope, _day(key.created_at), used)
    return table


def keys_as_json(keys: Sequence[KeyRow]) -> list[dict[str, Any]]:
    """The keys for a program."""
    return [key.model_dump(include={"id", "name", "scope", "created_at", "used_at"}) for key in keys]


def _day(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")

"""The store's account as the door of the server sees it."""

from app.serving.auth import Identity
from app.store.accounts import Accounts
from app.store.keys import PREFIX


class StoredCallers:
    """The sessions and keys of the store, for `app.serving.auth`."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    @property
    def is_locked_down(self) -> bool:
        """Whether the store was damaged, so that nothing may be open."""
        return self._accounts.is_locked_down

    @property
    def has_account(self) -> bool:
        """Whether somebody set a password for the dashboard."""
        return self._accounts.has_account

    def key(self, text: str) -> Identity | None:
        """Whose API key this is; what does not look like one of ours is not looked up."""
        if not text.startswith(PREFIX) or self.is_locked_down:
            return None
        key = self._accounts.keys.find(text)
        return None if key is None else Identity("key", key.name, key.scope, key.id)

    def is_session(self, cookie: str) -> bool:
        """Whether a browser with this cookie is signed in."""
        return not self.is_locked_down and self._accounts.sessions.is_open(cookie)

"""A site with an account: real store, real hashing at a low cost, a clock that tests advance."""

from dataclasses import dataclass, replace
from typing import Any

import httpx2
from argon2 import PasswordHasher

from app.admin.context import AdminContext
from app.main import admin_context, build
from app.serving.auth import COOKIE
from app.serving.guessing import ENTRY_SECONDS, MAX_OPEN_CODES, OneTimeCodes
from app.store.accounts import Accounts
from app.store.store import Store
from tests.api.fakes import Site, make_site

PASSWORD = "correct horse battery"
OTHER_PASSWORD = "staple staple staple"
FAST = PasswordHasher(1, 8, 1)
FAR = "192.168.1.9"


@dataclass
class Time:
    """Clock in seconds that only `pass_by` advances; stands for both the wall clock and the monotonic clock."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class SignInSite:
    site: Site
    admin: AdminContext
    time: Time

    @property
    def accounts(self) -> Accounts:
        return self.admin.accounts

    def browser(self, address: str = "127.0.0.1", **headers: str) -> httpx2.AsyncClient:
        """Return a client with an empty cookie jar that connects from `address`."""
        transport = httpx2.ASGITransport(self.site.app, client=(address, 4711))
        return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8710", headers=headers)

    async def signed_in(self, address: str = "127.0.0.1", password: str = PASSWORD) -> httpx2.AsyncClient:
        client = self.browser(address)
        response = await client.post("/admin/api/login", json={"password": password})
        assert response.status_code == 200, response.text
        return client

    def key(self, scope: Any = "inference", name: str = "") -> str:
        name = name or f"program {len(self.accounts.keys.list()) + 1}"
        return self.accounts.keys.create(name, scope)[1]


def make_sign_in_site(*, password: str | None = PASSWORD, **settings: Any) -> SignInSite:
    """Return a site whose account has `password`; None leaves it without an account, as before the first run."""
    time = Time()
    site = make_site(context={"clock": time}, **settings)
    store: Store = site.app.state.admin.store
    accounts = Accounts(store, clock=time, hasher=FAST)
    codes = {
        "setup_codes": OneTimeCodes(time),
        "entry_codes": OneTimeCodes(time, valid_seconds=ENTRY_SECONDS, max_open=MAX_OPEN_CODES),
    }
    admin = replace(admin_context(site.context, store), accounts=accounts, **codes)
    site.app = build(admin)
    site.client = site.connect()
    if password is not None:
        assert accounts.set_up(password)
    return SignInSite(site, admin, time)


def cookie_of(client: httpx2.AsyncClient) -> str:
    return client.cookies.get(COOKIE) or ""

"""Access: `/admin/setup`, `/admin/login`, `/admin/enter` and their calls, and the API keys.

A command on this computer, such as the menu bar, opens a signed-in page at a one-time address, valid for a minute. The
fragment of the address is the code. The browser opens the address from a file that only the owner can read, so that no
process list shows the code; the file is removed when the code is used or expires. Set-up works only while there is no
account, and only from this computer. No answer reveals whether a password was nearly right, and no secret gets into a
served page or the log.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from pydantic import Field
from starlette.exceptions import HTTPException

from app.admin.context import Admin, AdminContext
from app.core.errors import InvalidRequest
from app.machine.own_files import own_files, write_privately
from app.serving.auth import ADMIN_JSON, COOKIE, AccessPolicy, identity_of, is_local_request
from app.serving.document import problems
from app.serving.errors import Rejected
from app.serving.gate import Body, JsonBody
from app.serving.guessing import ENTRY_SECONDS, VALID_SECONDS, address_key
from app.store.accounts import ABSOLUTE_SECONDS, MIN_CHARACTERS, digest_of
from app.store.rows import FirstRun
from app.store.tables import KeyRow, Scope

logger = logging.getLogger("paceline.sessions")

MAX_SECRET_CHARACTERS = 4096
PAGE_PATH = r"^/admin/[\w\-./%@+]*(\?[\w\-./%@+=&]*)?(#[\w\-]*)?$"
REDIRECT_FILE = "open-{}.html"
REDIRECT_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<title>Paceline</title>
<script>location.replace("{address}")</script>
<noscript><meta http-equiv="refresh" content="0;url={address}"></noscript>
"""


class UnauthenticatedBody(Body):
    """Body from a caller who has not signed in; a small size limit keeps strangers from using up memory."""

    max_bytes: ClassVar[int] = 1 << 20


class SetupRequest(UnauthenticatedBody):
    """Body that the set-up page sends."""

    token: str = Field(max_length=MAX_SECRET_CHARACTERS)
    password: str = Field(max_length=MAX_SECRET_CHARACTERS)


class LoginRequest(UnauthenticatedBody):
    """Body that the sign-in page sends."""

    password: str = Field(max_length=MAX_SECRET_CHARACTERS)


class EntryRequest(Body):
    """Page that a command wants to open."""

    to: str = Field("/admin/", max_length=1000, pattern=PAGE_PATH)


class EnterRequest(UnauthenticatedBody):
    """Body that the page at a one-time address sends."""

    code: str = Field(max_length=MAX_SECRET_CHARACTERS)


class PasswordRequest(Body):
    """The current password and the new one."""

    current: str = Field(max_length=MAX_SECRET_CHARACTERS)
    password: str = Field(max_length=MAX_SECRET_CHARACTERS)


class KeyRequest(Body):
    """API key to create; `inference` allows the endpoints of the API, `admin` the dashboard's calls too."""

    name: str = Field(max_length=200)
    scope: Scope = "inference"


router = APIRouter()


@router.get("/admin/setup", response_class=HTMLResponse, responses=problems(303))
def get_setup(request: Request, admin: Admin) -> Response:
    """Serve the page that asks for the first password; once there is an account, redirect to the sign-in."""
    if admin.accounts.has_account:
        return RedirectResponse("/admin/login", 303)
    data = {
        "local": is_local_request(request),
        "minutes": VALID_SECONDS // 60,
        "characters": MIN_CHARACTERS,
        "locked": admin.accounts.is_locked_down,
    }
    return admin.pages.render("setup.html", request, data=data)


@router.get("/admin/login", response_class=HTMLResponse, responses=problems(303))
def get_login(request: Request, admin: Admin) -> Response:
    """Serve the page that asks for the password; before there is one, redirect to the set-up page."""
    if not admin.accounts.has_account:
        return RedirectResponse("/admin/setup", 303)
    cookie = request.cookies.get(COOKIE, "")
    if cookie and admin.accounts.sessions.is_open(cookie):
        return RedirectResponse("/admin/", 303)
    return admin.pages.render("login.html", request, data={}, ended="ended" in request.query_params)


async def check_is_local(request: Request) -> None:
    """Reject a set-up from another computer before its body is read."""
    if not is_local_request(request):
        advice = "Set up Paceline on the computer it runs on, or run `paceline password` there."
        raise Rejected(403, advice, "not_local", close=True)


@router.post("/admin/api/setup", dependencies=[Depends(check_is_local)], responses=problems(404))
async def set_up(request: Request, admin: Admin, body: JsonBody[SetupRequest]) -> Response:
    """Set the first password, given a valid set-up code, and sign this browser in."""
    async with admin.setup_codes.setup_lock:  # taken after reading the body: a slow sender must not lock the owner out
        if await asyncio.to_thread(lambda: admin.accounts.has_account):
            raise HTTPException(404)
        if not admin.setup_codes.matches(body.token):
            advice = "This is not the set-up code of this start: start Paceline again, or run `paceline password`."
            raise Rejected(403, advice, "invalid_setup_code")
        if not await asyncio.to_thread(admin.accounts.set_up, body.password):
            raise HTTPException(404)
        admin.setup_codes.redeem(body.token)
        await asyncio.to_thread(_remove, _redirect_of(admin.serving.settings.home, body.token))
        await asyncio.to_thread(FirstRun(admin.store).begin)
    logger.info("The dashboard was set up.")
    return await _signed_in(request, admin)


@router.post("/admin/api/login", responses=problems(429))
async def log_in(request: Request, admin: Admin, body: JsonBody[LoginRequest]) -> Response:
    """Sign this browser in."""
    await _check_password(request, admin, body.password)
    logger.info("A browser signed in from %s.", address_key(_client_address(request)))
    return await _signed_in(request, admin)


@router.post("/admin/api/entry")
async def make_entry(request: Request, admin: Admin, body: JsonBody[EntryRequest]) -> dict[str, str]:
    """Issue a one-time address that opens a signed-in page, and if possible a file that leads a browser there.

    Before there is a password, it is the address of the set-up page. Only for commands on this computer.
    """
    if identity_of(request).kind != "command":
        raise Rejected(403, "Only a command on this computer can open a signed-in page.", "not_a_command")
    if not is_page(body.to):
        raise InvalidRequest("Name a page of the dashboard.", parameter="to")
    has_account = await asyncio.to_thread(lambda: admin.accounts.has_account)
    path = (
        f"admin/enter#{admin.entry_codes.issue(body.to)}" if has_account else f"admin/setup#{admin.setup_codes.issue()}"
    )
    address = f"{request.base_url}{path}"
    try:
        file = await asyncio.to_thread(_write_redirect, admin.serving.settings.home, address)
    except OSError:
        return {"address": address, "file": ""}
    asyncio.get_running_loop().call_later(ENTRY_SECONDS, _remove, file)
    return {"address": address, "file": str(file)}


def is_page(to: str) -> bool:
    """Return whether a path leads to a page of the dashboard, without dot segments, which a browser would resolve."""
    path = unquote(urlsplit(to).path)
    parts = path.split("/")[1:]
    return not path.startswith(ADMIN_JSON) and not {".", ".."} & {*parts} and "" not in parts[:-1]


def _write_redirect(home: Path, address: str) -> Path:
    """Write a file that redirects to the address; delete expired files that a killed server left."""
    for expired in own_files(home, REDIRECT_FILE.format("[0-9a-f]{16}")):
        with contextlib.suppress(OSError):
            if time.time() - expired.lstat().st_mtime > ENTRY_SECONDS:
                expired.unlink()
    file = _redirect_of(home, address.partition("#")[2])
    write_privately(file, REDIRECT_PAGE.format(address=address).encode())
    return file


def _redirect_of(home: Path, code: str) -> Path:
    """Return the path of the redirect file, named after the hash of its code, so that `enter` can delete it."""
    return home / REDIRECT_FILE.format(digest_of(code)[:16])


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


@router.get("/admin/enter", response_class=HTMLResponse)
def get_enter(request: Request, admin: Admin) -> Response:
    """Serve the page at a one-time address: its script sends the code."""
    return admin.pages.render("enter.html", request, data={})


@router.post("/admin/api/enter", responses=problems(429))
async def enter(request: Request, admin: Admin, body: JsonBody[EnterRequest]) -> Response:
    """Sign this browser in with a one-time code; the answer names the page to open."""
    address = _client_address(request)
    admin.lockout.begin(address)
    to = admin.entry_codes.redeem(body.code) if is_local_request(request) else None
    if to is None:
        logger.warning("A one-time address that is used, late or wrong was tried from %s.", address_key(address))
        raise Rejected(403, "This address was used already, or is too old.", "invalid_entry_code")
    admin.lockout.succeed(address)
    await asyncio.to_thread(_remove, _redirect_of(admin.serving.settings.home, body.code))
    logger.info("A browser was let in by a command of this computer.")
    return await _signed_in(request, admin, to=to)


@router.post("/admin/api/logout")
async def log_out(request: Request, admin: Admin) -> Response:
    """Sign this browser out."""
    cookie = request.cookies.get(COOKIE, "")
    if cookie:
        await asyncio.to_thread(admin.accounts.sessions.end, cookie)
    return _signed_out()


@router.delete("/admin/api/sessions")
async def end_all_sessions(admin: Admin) -> Response:
    """Sign every browser out, this one too."""
    await asyncio.to_thread(admin.accounts.sessions.end_all)
    logger.info("Every browser was signed out.")
    return _signed_out()


@router.get("/admin/api/session")
async def get_session(request: Request, admin: Admin) -> dict[str, Any]:
    """Return who is asking, and which browsers are signed in."""
    identity = identity_of(request)
    own = digest_of(request.cookies.get(COOKIE, ""))
    sessions = [
        {**row.model_dump(), "id": row.id[:12], "current": row.id == own}
        for row in await asyncio.to_thread(admin.accounts.sessions.list)
    ]
    return {"kind": identity.kind, "name": identity.name, "sessions": sessions}


@router.post("/admin/api/password", responses=problems(429))
async def change_password(request: Request, admin: Admin, body: JsonBody[PasswordRequest]) -> Response:
    """Change the password; every other browser is signed out."""
    await _check_password(request, admin, body.current)
    await asyncio.to_thread(admin.accounts.set_password, body.password)
    logger.info("The password was changed.")
    if identity_of(request).kind == "session":
        return await _signed_in(request, admin)
    return JSONResponse({"signed_in": False})


async def _check_password(request: Request, admin: AdminContext, password: str) -> None:
    address = _client_address(request)
    admin.lockout.begin(address)
    async with admin.lockout.guessing:
        is_right = await asyncio.to_thread(admin.accounts.is_password, password)
    if not is_right:
        logger.warning("A wrong password was tried from %s.", address_key(address))
        raise Rejected(403, "This is not the password.", "wrong_password")
    admin.lockout.succeed(address)


async def _signed_in(request: Request, admin: AdminContext, **fields: str) -> Response:
    browser = browser_name(request.headers.get("user-agent", ""))
    old_secret = request.cookies.get(COOKIE) or None
    secret = await asyncio.to_thread(admin.accounts.sessions.begin, browser, replacing=old_secret)
    response = JSONResponse({"signed_in": True, **fields})
    response.set_cookie(
        COOKIE,
        secret,
        max_age=int(ABSOLUTE_SECONDS),
        path="/admin",
        secure=request.scope["scheme"] == "https",
        httponly=True,
        samesite="strict",
    )
    return response


def _signed_out() -> Response:
    response = JSONResponse({"signed_in": False})
    response.delete_cookie(COOKIE, path="/admin", httponly=True, samesite="strict")
    return response


def _client_address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
SYSTEMS = (
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Android", "Android"),
    ("Mac OS X", "macOS"),
    ("Windows", "Windows"),
)


def browser_name(user_agent: str) -> str:
    """Return a readable name such as `Safari, macOS`; never text that the browser sent."""
    browser = next((name for mark, name in BROWSERS if mark in user_agent), "")
    system = next((name for mark, name in (*SYSTEMS, ("Linux", "Linux")) if mark in user_agent), "")
    return ", ".join(part for part in (browser, system) if part)


@router.get("/admin/api/keys")
def get_keys(request: Request, admin: Admin) -> dict[str, Any]:
    """List the valid keys, and whether a key is required."""
    access_policy: AccessPolicy = request.app.state.access_policy
    return {
        "keys": [key_object(key) for key in admin.accounts.keys.list()],
        "required": access_policy.is_key_required,
        "environment": access_policy.secret is not None,
    }


@router.post("/admin/api/keys", status_code=201)
async def create_key(admin: Admin, body: JsonBody[KeyRequest]) -> dict[str, Any]:
    """Create a key; its text is returned here and never again."""
    key, text = await asyncio.to_thread(admin.accounts.keys.create, body.name, body.scope)
    logger.info("An API key was created: number %d, scope %s.", key.id, key.scope)
    return {"key": key_object(key), "text": text}


@router.delete("/admin/api/keys/{key_id}")
def revoke_key(admin: Admin, key_id: int) -> dict[str, Any]:
    """Revoke a key for good."""
    if not 0 < key_id < 1 << 63 or not admin.accounts.keys.revoke(key_id):
        raise Rejected(404, f"There is no key {key_id}, or it was revoked before.", "not_found")
    logger.info("An API key was revoked: number %d.", key_id)
    return {"revoked": key_id}


def key_object(key: KeyRow) -> dict[str, Any]:
    """Convert a key to JSON, without its secret."""
    return key.model_dump(include={"id", "name", "scope", "hint", "created_at", "used_at"})

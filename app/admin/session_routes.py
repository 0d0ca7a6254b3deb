"""Who may come in: `/admin/setup`, `/admin/login` and their calls under `/admin/api`, and the API keys.

The set-up routes are there only while no account is, and only for this computer. Nothing here tells whether a password
was nearly right, and no secret gets into an address, a page or the log.
"""

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from app.admin.context import Admin, AdminContext
from app.serving.auth import COOKIE, LOOPBACK, VALID_SECONDS, Door, identity_of, place_of
from app.serving.errors import Rejected
from app.serving.gate import read_json
from app.store.accounts import ABSOLUTE_SECONDS, MIN_CHARACTERS, digest_of
from app.store.tables import KeyRow, Scope

logger = logging.getLogger(__name__)

MAX_SECRET_CHARACTERS = 4096
MAX_BODY_BYTES = 1 << 20
"""Nobody has signed in yet: who sends more gets no memory for it."""


class SetupRequest(BaseModel):
    """What the set-up page sends."""

    token: str = Field(max_length=MAX_SECRET_CHARACTERS)
    password: str = Field(max_length=MAX_SECRET_CHARACTERS)


class LoginRequest(BaseModel):
    """What the sign-in page sends."""

    password: str = Field(max_length=MAX_SECRET_CHARACTERS)


class PasswordRequest(BaseModel):
    """The password that counts, and the one that is to count."""

    current: str = Field(max_length=MAX_SECRET_CHARACTERS)
    password: str = Field(max_length=MAX_SECRET_CHARACTERS)


class KeyRequest(BaseModel):
    """A key to make; `inference` opens the endpoints, `admin` the dashboard's calls too."""

    name: str = Field(max_length=200)
    scope: Scope = "inference"


router = APIRouter()


@router.get("/admin/setup")
def get_setup(request: Request, admin: Admin) -> Response:
    """The page that asks for the first password; once there is an account, the sign-in."""
    if admin.accounts.has_account:
        return RedirectResponse("/admin/login", 303)
    data = {
        "local": is_local(request),
        "minutes": VALID_SECONDS // 60,
        "characters": MIN_CHARACTERS,
        "locked": admin.accounts.is_locked_down,
    }
    return admin.pages.render("setup.html", request, data=data)


@router.get("/admin/login")
def get_login(request: Request, admin: Admin) -> Response:
    """The page that asks for the password; before there is one, the set-up page."""
    if not admin.accounts.has_account:
        return RedirectResponse("/admin/setup", 303)
    cookie = request.cookies.get(COOKIE, "")
    if cookie and admin.accounts.sessions.is_open(cookie):
        return RedirectResponse("/admin/", 303)
    return admin.pages.render("login.html", request, data={}, ended="ended" in request.query_params)


@router.post("/admin/api/setup")
async def set_up(request: Request, admin: Admin) -> Response:
    """Choose the first password with the token of `serve`; the browser is signed in at once."""
    if not is_local(request):
        advice = "Set up Paceline on the computer it runs on, or run `paceline password` there."
        raise Rejected(403, advice, "not_local", close=True)
    asked = await read_json(request, SetupRequest, max_bytes=MAX_BODY_BYTES)
    async with admin.setup.in_use:  # after the body: whoever sends it slowly must not keep the owner out
        if await asyncio.to_thread(lambda: admin.accounts.has_account):
            raise HTTPException(404)
        if not admin.setup.matches(asked.token):
            advice = "This is not the set-up code of this start: start Paceline again, or run `paceline password`."
            raise Rejected(403, advice, "invalid_setup_code")
        if not await asyncio.to_thread(admin.accounts.set_up, asked.password):
            raise HTTPException(404)
        admin.setup.spend()
    logger.info("The dashboard was set up.")
    return await _signed_in(request, admin)


@router.post("/admin/api/login")
async def log_in(request: Request, admin: Admin) -> Response:
    """Sign this browser in."""
    asked = await read_json(request, LoginRequest, max_bytes=MAX_BODY_BYTES)
    await _check_password(request, admin, asked.password)
    logger.info("A browser signed in from %s.", place_of(_address(request)))
    return await _signed_in(request, admin)


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
    """Who asks, and which browsers are signed in."""
    identity = identity_of(request)
    own = digest_of(request.cookies.get(COOKIE, ""))
    sessions = [
        {**row.model_dump(), "id": row.id[:12], "current": row.id == own}
        for row in await asyncio.to_thread(admin.accounts.sessions.list)
    ]
    return {"kind": identity.kind, "name": identity.name, "sessions": sessions}


@router.post("/admin/api/password")
async def change_password(request: Request, admin: Admin) -> Response:
    """Change the password; every other browser is signed out."""
    asked = await read_json(request, PasswordRequest)
    await _check_password(request, admin, asked.current)
    await asyncio.to_thread(admin.accounts.set_password, asked.password)
    logger.info("The password was changed.")
    if identity_of(request).kind == "session":
        return await _signed_in(request, admin)
    return JSONResponse({"signed_in": False})


async def _check_password(request: Request, admin: AdminContext, password: str) -> None:
    address = _address(request)
    admin.lockout.begin(address)
    async with admin.lockout.guessing:
        is_right = await asyncio.to_thread(admin.accounts.is_password, password)
    if not is_right:
        logger.warning("A wrong password was tried from %s.", place_of(address))
        raise Rejected(403, "This is not the password.", "wrong_password")
    admin.lockout.succeed(address)


async def _signed_in(request: Request, admin: AdminContext) -> Response:
    browser = browser_name(request.headers.get("user-agent", ""))
    old = request.cookies.get(COOKIE) or None
    secret = await asyncio.to_thread(admin.accounts.sessions.begin, browser, instead_of=old)
    response = JSONResponse({"signed_in": True})
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


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def is_local(request: Request) -> bool:
    """Whether the request comes from this computer."""
    return place_of(_address(request)) == LOOPBACK


BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
SYSTEMS = (
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Android", "Android"),
    ("Mac OS X", "macOS"),
    ("Windows", "Windows"),
)


def browser_name(user_agent: str) -> str:
    """What a person calls the browser, such as `Safari, macOS`; never what it sent."""
    browser = next((name for mark, name in BROWSERS if mark in user_agent), "")
    system = next((name for mark, name in (*SYSTEMS, ("Linux", "Linux")) if mark in user_agent), "")
    return ", ".join(part for part in (browser, system) if part)


@router.get("/admin/api/keys")
def get_keys(request: Request, admin: Admin) -> dict[str, Any]:
    """Every key that opens something, and whether one is asked for."""
    door: Door = request.app.state.door
    return {
        "keys": [key_object(key) for key in admin.accounts.keys.list()],
        "required": door.is_closed,
        "environment": door.secret is not None,
    }


@router.post("/admin/api/keys", status_code=201)
async def create_key(request: Request, admin: Admin) -> dict[str, Any]:
    """A new key; its text is told here and never again."""
    asked = await read_json(request, KeyRequest)
    key, text = await asyncio.to_thread(admin.accounts.keys.create, asked.name, asked.scope)
    logger.info("An API key was created: number %d, scope %s.", key.id, key.scope)
    return {"key": key_object(key), "text": text}


@router.delete("/admin/api/keys/{key_id}")
def revoke_key(admin: Admin, key_id: int) -> dict[str, Any]:
    """End a key for good."""
    if not 0 < key_id < 1 << 63 or not admin.accounts.keys.revoke(key_id):
        raise HTTPException(404)
    logger.info("An API key was revoked: number %d.", key_id)
    return {"revoked": key_id}


def key_object(key: KeyRow) -> dict[str, Any]:
    """A key as JSON; nothing in it opens anything."""
    return key.model_dump(include={"id", "name", "scope", "hint", "created_at", "used_at"})

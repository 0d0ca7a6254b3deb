"""API keys under `/admin/api/keys`: list, create (shown this once), revoke."""

import asyncio
import logging
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.serving.auth import Door
from app.serving.body import read_json
from app.store.tables import KeyRow

logger = logging.getLogger(__name__)


class KeyRequest(BaseModel):
    """A key to make; `inference` opens the endpoints, `admin` the dashboard's calls too."""

    name: str = Field(max_length=200)
    scope: Literal["inference", "admin"] = "inference"


def make_router(context: AdminContext, pages: Pages) -> APIRouter:  # noqa: ARG001 - every area has this signature
    """The routes of the keys; their block on the settings page is `keys.html`."""
    router = APIRouter()
    keys = context.accounts.keys

    @router.get("/admin/api/keys")
    def get_keys(request: Request) -> dict[str, Any]:
        """Every key that opens something, and whether one is asked for."""
        door: Door = request.app.state.door
        return {
            "keys": [key_object(key) for key in keys.list()],
            "required": door.is_closed,
            "environment": door.secret is not None,
        }

    @router.post("/admin/api/keys", status_code=201)
    async def create_key(request: Request) -> dict[str, Any]:
        """A new key; its text is told here and never again."""
        asked = await read_json(request, KeyRequest)
        key, text = await asyncio.to_thread(keys.create, asked.name, asked.scope)
        logger.info("An API key was created: number %d, scope %s.", key.id, key.scope)
        return {"key": key_object(key), "text": text}

    @router.delete("/admin/api/keys/{key_id}")
    def revoke_key(key_id: int) -> dict[str, Any]:
        """End a key for good."""
        if not 0 < key_id < 1 << 63 or not keys.revoke(key_id):
            raise HTTPException(404)
        logger.info("An API key was revoked: number %d.", key_id)
        return {"revoked": key_id}

    return router


def key_object(key: KeyRow) -> dict[str, Any]:
    """A key as JSON; nothing in it opens anything."""
    return key.model_dump(include={"id", "name", "scope", "hint", "created_at", "used_at"})

"""`GET /static/{name}`: the files of `app/static/`, read once; nothing else can be asked for.

An address carries the hash of its content, so a browser may keep the file for a year. Ranges are not offered: the
answer is always the whole file.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parents[1] / "static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HASH_CHARACTERS = 16
KEEP = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: `version` is the start of its SHA-256."""

    content: bytes
    kind: str
    version: str


class Assets:
    """The static files by name."""

    def __init__(self, assets: Mapping[str, Asset]) -> None:
        self._assets = dict(assets)

    def address(self, name: str) -> str:
        """Where the page finds a file. Raises KeyError for one that is not there."""
        return f"/static/{name}?v={self._assets[name].version}"

    def find(self, name: str) -> Asset | None:
        """The file called `name`; None when there is none."""
        return self._assets.get(name)


def read_assets(folder: Path = FOLDER) -> Assets:
    """Every file of the folder whose kind a page may load."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in KINDS:
            content = path.read_bytes()
            version = hashlib.sha256(content).hexdigest()[:HASH_CHARACTERS]
            found[path.name] = Asset(content, KINDS[path.suffix], version)
    return Assets(found)


def make_router(assets: Assets) -> APIRouter:
    """The route of the files; a name is looked up in memory and never becomes a path."""
    router = APIRouter()

    @router.get("/static/{name}")
    async def get_static(name: str, v: str = "") -> Response:
        """One file, kept for long only under the address of this very content."""
        asset = assets.find(name)
        if asset is None:
            raise HTTPException(404)
        headers = {"cache-control": KEEP if v == asset.version else ASK_AGAIN, "x-content-type-options": "nosniff"}
        return Response(asset.content, media_type=asset.kind, headers=headers)

    return router

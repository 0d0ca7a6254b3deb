"""`GET /static/{version}/{name}`: the files of `app/static/`, read once; nothing else can be asked for.

The version is the hash of all files together: a script finds the others by relative addresses, a browser may keep
every one for a year, and no page ever mixes two versions. Ranges are not offered: the answer is the whole file.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parents[1] / "static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}
HASH_CHARACTERS = 16
KEEP = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    kind: str


class Assets:
    """The static files by name, such as `core.js` or `vendor/alpine.js`."""

    def __init__(self, assets: Mapping[str, Asset]) -> None:
        self._assets = dict(assets)
        digest = hashlib.sha256()
        for name, asset in sorted(self._assets.items()):
            digest.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(asset.content).digest())
        self.version = digest.hexdigest()[:HASH_CHARACTERS]

    def address(self, name: str) -> str:
        """Where the page finds a file. Raises KeyError for one that is not there."""
        if name not in self._assets:
            raise KeyError(name)
        return f"/static/{self.version}/{name}"

    def find(self, name: str) -> Asset | None:
        """The file called `name`; None when there is none."""
        return self._assets.get(name)

    def scripts(self) -> dict[str, str]:
        """The text of our own scripts, by name."""
        own = {name: asset for name, asset in self._assets.items() if name.endswith(".js") and "/" not in name}
        return {name: asset.content.decode() for name, asset in own.items()}


def read_assets(folder: Path = FOLDER) -> Assets:
    """Every file of the folder, and of the folders in it, whose kind a page may load."""
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in KINDS and path.is_file())
    return Assets({path.relative_to(folder).as_posix(): Asset(path.read_bytes(), KINDS[path.suffix]) for path in paths})


def make_router(assets: Assets) -> APIRouter:
    """The route of the files; a name is looked up in memory and never becomes a path."""
    router = APIRouter()

    @router.get("/static/{version}/{name:path}")
    async def get_static(version: str, name: str) -> Response:
        """One file, kept for long only under the version that it belongs to."""
        asset = assets.find(name)
        if asset is None:
            raise HTTPException(404)
        headers = {
            "cache-control": KEEP if version == assets.version else ASK_AGAIN,
            "x-content-type-options": "nosniff",
        }
        return Response(asset.content, media_type=asset.kind, headers=headers)

    return router

"""The log: a live page, its lines as JSON, and what the filter leaves as a file of JSON lines.

Topic `logs`: the last lines; a page that missed some asks for those behind the last number that it has.
"""

from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.serving.logs import CAPACITY, LEVELS, LogRing, line_object

TOLD_LIVE = 100
SHOWN = 500

Level = Literal["debug", "info", "warning", "error"]
Text = Annotated[str, Query(max_length=500)]
After = Annotated[int, Query(ge=0)]


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its routes."""
    ring = context.logs
    context.live.topic("logs", lambda: _answer(ring, count=TOLD_LIVE))
    router = APIRouter()

    @router.get("/admin/logs", response_class=HTMLResponse)
    async def get_page(request: Request) -> HTMLResponse:
        """The last lines at once, new ones as they come."""
        data = {**_answer(ring, count=SHOWN), "loggers": ring.loggers(), "level": context.settings.current.log_level}
        return pages.render("logs.html", request, area="logs", data=data, levels=LEVELS)

    @router.get("/admin/api/logs")
    async def get_lines(
        after: After = 0,
        level: Level = "debug",
        logger: Text = "",
        text: Text = "",
        count: Annotated[int, Query(ge=1, le=CAPACITY)] = SHOWN,
    ) -> dict[str, Any]:
        """The last lines, oldest first: behind the number `after`, of a level or above, of a logger, with a text."""
        return _answer(ring, after=after, level=level, logger=logger, text=text, count=count)

    @router.get("/admin/api/logs/download")
    async def download(level: Level = "debug", logger: Text = "", text: Text = "") -> Response:
        """The same lines as a file: one JSON object each, as in the log on disk."""
        lines = ring.lines(level=level, logger=logger, text=text)
        content = b"".join(msgspec.json.encode(line_object(line)) + b"\n" for line in lines)
        headers = {"content-disposition": 'attachment; filename="paceline-log.jsonl"', "cache-control": "no-store"}
        return Response(content, media_type="application/jsonl", headers=headers)

    return router


def _answer(ring: LogRing, **wanted: Any) -> dict[str, Any]:
    return {"last": ring.last, "lines": [asdict(line) for line in ring.lines(**wanted)]}

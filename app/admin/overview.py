"""`/admin/`: the server's current state, and actions on it; `/` redirects there. `/admin/logs`: the log.

Also what every page needs: static files, and `GET /admin/api/live?topics=a,b`, a stream of server-sent events.
Topics: `worker` for the frame of every page; `state`, `pace` and `minutes` for the overview; `updates` for the
settings; `logs`, the last lines: a page that missed lines requests those after the last line number that it has.
"""

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import Field
from starlette.exceptions import HTTPException

from app.admin.context import Admin, AdminContext
from app.admin.feed import while_authorized
from app.admin.model_routes import ModelBody
from app.admin.request_routes import EmptyBody, current_requests
from app.core.errors import InvalidRequest, StoreUnavailable
from app.core.reason import reason_object
from app.core.unit import LoadedModel
from app.machine.host import free_bytes
from app.serving.auth import is_authorized
from app.serving.document import EVENTS, success
from app.serving.gate import Body, JsonBody
from app.serving.logs import CAPACITY, LEVELS, line_object
from app.serving.resolver import loaded_object
from app.serving.sse import EventStream
from app.store.rows import FirstRun

DRAIN_SECONDS = 600.0
"""Default time for running requests to finish before the worker is replaced, in seconds."""
STARTER = "demo-assistant"
"""Id of the embedded model for a first try."""
LIVE_TIMEOUT_SECONDS = 30.0
"""Time without a read after which a tab counts as gone, in seconds."""
LIVE_LINES = 100
SEARCHED_REQUESTS = 200
"""Number of past requests that are searched for the models used last."""
FULL_DISK_BYTES = 200_000_000
"""Free bytes below which a disk counts as full: settings and conversations cannot be kept much longer."""
SHOWN_LINES = 500

Level = Literal["debug", "info", "warning", "error"]
Text = Annotated[str, Query(max_length=500)]

router = APIRouter()


class DrainBody(Body):
    """Time that running requests may take, in seconds."""

    seconds: float = Field(DRAIN_SECONDS, ge=0, le=86_400)


@router.get("/", response_class=RedirectResponse, status_code=303)
@router.get("/admin", response_class=RedirectResponse, status_code=303)
async def get_root() -> RedirectResponse:
    """Redirect a browser to the dashboard."""
    return RedirectResponse("/admin/", 303)


@router.get("/admin/", response_class=HTMLResponse)
async def get_overview(request: Request, admin: Admin) -> HTMLResponse:
    """Serve the page."""
    gains = await asyncio.to_thread(admin.measuring.gains)
    data = {**await get_state(admin), "requests": current_requests(admin), "starter": STARTER, "gains": gains}
    left = await asyncio.to_thread(FirstRun(admin.store).remaining)
    base_url = f"{request.url.scheme}://{request.headers['host']}/v1"
    return admin.pages.render("overview.html", request, area="overview", data=data, base_url=base_url, left=left)


@router.get("/admin/api/state")
async def get_state(admin: Admin) -> dict[str, Any]:
    """Return a snapshot of the topics `state`, `pace` and `minutes`, any newer version, and the command for updates."""
    update = {"newer": admin.updates.newer, "update_command": admin.updates.command}
    return {"state": server_state(admin), "pace": pace(admin), "minutes": admin.pace.minutes(), **update}


@router.get("/admin/api/menu")
async def get_menu(admin: Admin) -> dict[str, Any]:
    """Return what the menu bar shows: `state` and `pace`; models to load, the most recently used first; a folder whose
    disk is full (empty: none); and any newer version with the command that installs it."""
    on_disk = await asyncio.to_thread(_models_on_disk, admin)
    update = {"newer": admin.updates.newer, "update_command": admin.updates.command}
    return {"state": server_state(admin), "pace": pace(admin), **on_disk, **update}


def _models_on_disk(admin: AdminContext) -> dict[str, Any]:
    recent: Sequence[str] = ()
    with contextlib.suppress(StoreUnavailable):  # an unsorted menu is better than none
        recent = admin.history.last_models(SEARCHED_REQUESTS)
    ids = [model.id for model in admin.serving.resolver.models() if model.kind == "main" and not model.problem]
    settings = admin.serving.settings
    full_folders = (
        str(folder)
        for folder in (settings.home, settings.downloads_path)
        if (free := free_bytes(folder)) is not None and free < FULL_DISK_BYTES
    )
    return {
        "models": sorted(ids, key=lambda name: recent.index(name) if name in recent else len(recent)),
        "full_disk": next(full_folders, ""),
    }


@router.post("/admin/api/worker/restart")
async def restart_worker(admin: Admin, _body: JsonBody[EmptyBody]) -> dict[str, Any]:
    """Replace the worker now; running requests end with an error."""
    admin.serving.worker.renew()
    return {"renewing": True}


@router.post("/admin/api/worker/drain")
async def drain_worker(admin: Admin, body: JsonBody[DrainBody]) -> dict[str, Any]:
    """Replace the worker once its running requests have finished, or after `seconds`."""
    admin.serving.worker.renew(body.seconds)
    return {"renewing": True, "seconds": body.seconds}


@router.post("/admin/api/quarantine/release")
async def release_model(admin: Admin, body: JsonBody[ModelBody]) -> dict[str, Any]:
    """Release a model that is quarantined for crashing the worker repeatedly."""
    return {"model": await admin.serving.resolver.release(body.model), "released": True}


def worker_state(admin: AdminContext) -> dict[str, Any]:
    """Summarise the worker, for the frame of every page."""
    worker = admin.serving.worker
    info = worker.ready_info
    return {
        "ready": worker.ready,
        "renewing": worker.draining,
        "restarts": worker.restarts,
        "last_exit": reason_object(worker.last_exit),
        "draining": admin.serving.activity.draining,
        "device": info.device if info is not None else "",
    }


def server_state(admin: AdminContext) -> dict[str, Any]:
    """Return the state of worker, memory and models, without running requests; field names carry the units."""
    worker = admin.serving.worker
    snapshot = worker.book.snapshot
    return {
        "worker": worker_state(admin),
        "memory": {
            "ceiling_bytes": admin.serving.memory_ceiling_bytes,
            "active_bytes": snapshot.active_bytes,
            "cached_bytes": snapshot.cached_bytes,
            "peak_bytes": snapshot.peak_bytes,
            "text_bytes": snapshot.text_bytes,
            "pressure": snapshot.memory_pressure,
        },
        "models": [_loaded_model(model) for model in snapshot.models],
        "loading": [
            {"id": name, "phase": progress.phase, "fraction": round(progress.fraction, 3)}
            for name, progress in sorted(worker.book.progress.items())
        ],
        "quarantined": [{"id": name, **reason_object(why)} for name, why in sorted(worker.quarantined.items())],
        "running": sum(model.running for model in snapshot.models),
        "waiting": sum(model.waiting for model in snapshot.models),
        "open_requests": len(admin.serving.activity),
    }


def _loaded_model(model: LoadedModel) -> dict[str, Any]:
    unavailable = {method: reason_object(why) for method, why in model.unavailable.items()}
    return {**loaded_object(model), "unavailable": unavailable}


def pace(admin: AdminContext) -> dict[str, Any]:
    """Return the tokens of the last two minutes, second by second, and the current speed."""
    return asdict(admin.pace.history())


# --- shared by all pages ----------------------------------------------------------------------------------------


@router.get("/static/{version}/{name:path}", response_class=Response, responses=success(media_type="*/*"))
async def get_static(admin: Admin, version: str, name: str) -> Response:
    """Serve one static file."""
    response = admin.pages.assets.response(version, name)
    if response is None:
        raise HTTPException(404)
    return response


@router.get("/admin/api/live", response_class=Response, responses=success(media_type=EVENTS))
async def get_live(request: Request, admin: Admin, topics: str = "") -> Response:
    """Stream events of these topics until the tab leaves or the server ends; unknown topics are refused."""
    requested_topics = {topic for topic in topics.split(",") if topic}
    if not requested_topics or requested_topics - set(admin.feed.topics):
        raise InvalidRequest(f"Name topics out of: {', '.join(admin.feed.topics)}.", parameter="topics")
    listener = admin.feed.join(requested_topics)
    frames = while_authorized(listener.frames(), functools.partial(is_authorized, request))
    leave = functools.partial(admin.feed.leave, listener)
    return EventStream(frames, on_close=leave, write_timeout_seconds=LIVE_TIMEOUT_SECONDS)


@router.get("/admin/api/live/topics")
async def get_topics(admin: Admin) -> dict[str, Any]:
    """List the topics."""
    return {"topics": admin.feed.topics}


# --- the log ----------------------------------------------------------------------------------------------------


@router.get("/admin/logs", response_class=HTMLResponse)
async def get_log_page(request: Request, admin: Admin) -> HTMLResponse:
    """Serve the page with the last lines; its script adds new lines as they arrive."""
    level = admin.serving.settings.log_level
    data = {**log_lines(admin, count=SHOWN_LINES), "loggers": admin.logs.loggers(), "level": level}
    return admin.pages.render("logs.html", request, area="logs", data=data, levels=LEVELS)


@router.get("/admin/api/logs")
async def get_lines(
    admin: Admin,
    after: Annotated[int, Query(ge=0)] = 0,
    level: Level = "debug",
    logger: Text = "",
    text: Text = "",
    count: Annotated[int, Query(ge=1, le=CAPACITY)] = SHOWN_LINES,
) -> dict[str, Any]:
    """Return the last lines, oldest first, filtered by number (`after`), minimum level, logger and text."""
    return log_lines(admin, after=after, level=level, logger=logger, text=text, count=count)


@router.get("/admin/api/logs/download", response_class=Response, responses=success(media_type="application/jsonl"))
async def download_log(admin: Admin, level: Level = "debug", logger: Text = "", text: Text = "") -> Response:
    """Download the matching lines as a file, with one JSON object per line, as in the log on disk."""
    lines = admin.logs.lines(level=level, logger=logger, text=text)
    content = b"".join(msgspec.json.encode(line_object(line)) + b"\n" for line in lines)
    headers = {"content-disposition": 'attachment; filename="paceline-log.jsonl"', "cache-control": "no-store"}
    return Response(content, media_type="application/jsonl", headers=headers)


def log_lines(admin: AdminContext, **wanted: Any) -> dict[str, Any]:
    """Return the matching lines, the number of the log's last line, and the server's start, which numbers begin at."""
    lines = [asdict(line) for line in admin.logs.lines(**wanted)]
    return {"last": admin.logs.last, "began": admin.serving.started_at, "lines": lines}


TOPICS = {
    "worker": worker_state,
    "state": server_state,
    "pace": pace,
    "minutes": lambda admin: admin.pace.minutes(),
    "logs": lambda admin: log_lines(admin, count=LIVE_LINES),
    "updates": lambda admin: admin.updates.view(),
}

"""Running and past requests: the list, the timeline of one request, and both as JSON.

Topic `requests`: running requests with phase and progress, and the requests that ended last.
"""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from app.admin.context import Admin, AdminContext
from app.core.errors import StoreUnavailable
from app.core.reason import reason_object
from app.serving.document import problems
from app.serving.errors import Rejected
from app.serving.gate import Body, JsonBody
from app.serving.record import Record
from app.store.rows import summary_of
from app.supervision.client import WorkerClient

SHOWN_RUNNING = 100
SHOWN_RECENT = 20
PAGE_LENGTH = 50

Text = Annotated[str, Query(max_length=500)]

router = APIRouter()


class EmptyBody(Body):
    """Empty body of an action without parameters."""


@router.get("/admin/requests", response_class=HTMLResponse)
async def get_requests_page(request: Request, admin: Admin, model: Text = "", outcome: Text = "") -> HTMLResponse:
    """Serve the list, filtered by the query; if the history is unavailable, it still shows running requests."""
    try:
        page, problem = await past_requests(admin, model=model, outcome=outcome), ""
    except StoreUnavailable as error:
        page, problem = {"requests": [], "next": "", "total": 0, "models": []}, error.message
    data = {"page": page, "now": current_requests(admin), "problem": problem}
    return admin.pages.render("requests.html", request, area="requests", data=data)


@router.get("/admin/requests/{request_id}", response_class=HTMLResponse)
async def get_request_page(request: Request, admin: Admin, request_id: str) -> HTMLResponse:
    """Serve one request's timeline, or 404 with an explanation if it is unknown."""
    details = await find_request(admin, request_id)
    status = 404 if details is None else 200
    return admin.pages.render("request.html", request, area="requests", data={"request": details}, status=status)


@router.get("/admin/api/requests")
async def get_requests(
    admin: Admin,
    before: Text = "",
    model: Text = "",
    outcome: Text = "",
    count: Annotated[int, Query(ge=1, le=200)] = PAGE_LENGTH,
) -> dict[str, Any]:
    """Return running requests and a page of past ones; `outcome`: `fine`, `failed`, `cancelled` or an exact outcome."""
    page = await past_requests(admin, before, model, outcome, count)
    return {**page, "running": current_requests(admin)["running"]}


@router.delete("/admin/api/requests")
async def clear_requests(admin: Admin) -> dict[str, Any]:
    """Delete the history for good; return the number of requests in it."""
    await _flush_journal(admin)
    count = await asyncio.to_thread(admin.history.count)
    await admin.serving.journal.clear()
    return {"cleared": count}


@router.get("/admin/api/requests/{request_id}")
async def get_request(admin: Admin, request_id: str) -> dict[str, Any]:
    """Return one request with all its figures."""
    details = await find_request(admin, request_id)
    if details is None:
        raise Rejected(404, "There is no such request: it was cleared, or newer requests replaced it.", "not_found")
    return {"request": details}


@router.post("/admin/api/requests/{request_id}/cancel", responses=problems(409))
async def cancel_request(admin: Admin, _body: JsonBody[EmptyBody], request_id: str) -> dict[str, Any]:
    """Cancel a running request; its client gets an error."""
    error = Rejected(499, "The request was cancelled on the dashboard.", "cancelled")
    record = admin.serving.journal.find(request_id)
    if record is None:
        raise Rejected(409, "This request is no longer running.", "not_running")
    record.cancel(error)
    return {"cancelled": request_id}


def current_requests(admin: AdminContext) -> dict[str, Any]:
    """Return running requests, and the requests that ended last."""
    journal = admin.serving.journal
    running = journal.running
    return {
        "running": [running_object(admin.serving.worker, record) for record in running[:SHOWN_RUNNING]],
        "recent": [summary_of(past) for past in journal.recent[:SHOWN_RECENT]],
        "open": len(running),
    }


async def past_requests(
    admin: AdminContext, before: str = "", model: str = "", outcome: str = "", count: int = PAGE_LENGTH
) -> dict[str, Any]:
    """Return past requests, the latest first; `next` is the value of `before` for the next page, empty at the end."""
    await _flush_journal(admin)
    history = admin.history

    def read() -> dict[str, Any]:
        past = history.page(count=count + 1, before=before, model_id=model, outcome=outcome)
        return {
            "requests": [summary_of(entry) for entry in past[:count]],
            "next": past[count - 1].id if len(past) > count else "",
            "total": history.count(),
            "models": history.models(),
        }

    return await asyncio.to_thread(read)


async def find_request(admin: AdminContext, request_id: str) -> dict[str, Any] | None:
    """Return one request with all its figures, and its prompt and reply if they were kept; None if it is unknown."""
    journal = admin.serving.journal
    record = journal.find(request_id)
    if record is not None:
        running = running_object(admin.serving.worker, record)
        return {**running, "figures": record.figures(), "prompt": None, "reply": None}
    await _flush_journal(admin)
    past = await asyncio.to_thread(admin.history.find, request_id)
    past = past or next((recent for recent in journal.recent if recent.id == request_id), None)
    if past is None:
        return None
    return {**summary_of(past), "figures": past.figures, "prompt": past.prompt, "reply": past.reply}


async def _flush_journal(admin: AdminContext) -> None:
    if admin.serving.journal.has_unwritten:
        await admin.serving.journal.flush()


def running_object(worker: WorkerClient, record: Record) -> dict[str, Any]:
    """Describe a running request. `progress` is the completed share of its phase, None if unknown."""
    phase, progress, read_tokens = _phase(worker, record)
    return {
        "id": record.id,
        "endpoint": record.endpoint,
        "model": record.model_id,
        "key": record.key_name,
        "started_at": record.created_at,
        "phase": phase,
        "progress": progress,
        "choices": record.choices,
        "prompt_tokens": record.prompt_tokens,
        "read_tokens": read_tokens,
        "completion_tokens": record.tokens,
        "max_tokens": record.max_tokens,
        "tokens_per_second": record.tokens_per_second,
        "method": record.method,
        "drafted": record.drafted,
        "acceptance": record.acceptance,
        **reason_object(record.why_not_drafted),
        "seconds": record.elapsed_seconds,
    }


def _phase(worker: WorkerClient, record: Record) -> tuple[str, float | None, int]:
    if record.has_first_token:
        limit = record.max_tokens
        return "decode", min(1.0, record.tokens / limit) if limit else None, record.prompt_tokens
    if not record.is_accepted:
        loading = worker.book.progress.get(record.model_id)
        return ("queued", None, 0) if loading is None else ("loading", round(loading.fraction, 3), 0)
    read_tokens = _read_tokens(worker, record)
    if read_tokens is None:
        return "queued", None, 0
    share = min(1.0, read_tokens / record.prompt_tokens) if record.prompt_tokens else None
    return "prefill", share, read_tokens


def _read_tokens(worker: WorkerClient, record: Record) -> int | None:
    """Return the number of prompt tokens prefilled, updated about once a second; None: the request has no row yet."""
    model = next((loaded for loaded in worker.book.snapshot.models if loaded.id == record.model_id), None)
    if model is None:
        return None
    read = [model.reading[name] for command in record.commands if (name := f"{command.id}#0") in model.reading]
    return sum(read) if read else None


TOPICS = {"requests": current_requests}

"""Requests: the list with what runs now above what ran, one request's timeline, and their JSON.

Topic `requests`: what runs, with its phase and how far it is, and the last ones that ended.
"""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.core.errors import StoreUnavailable
from app.core.past import Past
from app.core.reason import reason_object
from app.serving.body import read_json
from app.serving.errors import Rejected
from app.serving.record import Record
from app.store.rows import RequestHistory
from app.worker.client import WorkerClient


class RequestView:
    """Reads records beside what the worker told of its models."""

    def __init__(self, worker: WorkerClient) -> None:
        self._worker = worker

    def running(self, record: Record) -> dict[str, Any]:
        """A request that runs. `progress` is a share of its phase, None where nobody knows."""
        asked = record.asked
        phase, progress, read_tokens = self._phase(record)
        return {
            "id": asked.id,
            "endpoint": asked.endpoint,
            "model": asked.model_id,
            "key": asked.key_name,
            "started_at": asked.created_at,
            "phase": phase,
            "progress": progress,
            "choices": asked.choices,
            "prompt_tokens": record.prompt_tokens,
            "read_tokens": read_tokens,
            "completion_tokens": record.tokens,
            "max_tokens": asked.max_tokens,
            "tokens_per_second": record.tokens_per_second,
            "method": record.method,
            "drafted": record.drafted,
            "acceptance": record.acceptance,
            **reason_object(record.why_not_drafted),
            "seconds": record.elapsed_seconds,
        }

    def running_in_full(self, record: Record) -> dict[str, Any]:
        """The same with every number so far."""
        return {**self.running(record), "figures": record.figures(), "prompt": None, "reply": None}

    def _phase(self, record: Record) -> tuple[str, float | None, int]:
        if record.writes:
            limit = record.asked.max_tokens
            return "decode", min(1.0, record.tokens / limit) if limit else None, record.prompt_tokens
        if not record.is_accepted:
            loading = self._worker.progress.get(record.asked.model_id)
            return ("queued", None, 0) if loading is None else ("loading", round(loading.fraction, 3), 0)
        read_tokens = self._read_tokens(record)
        if read_tokens is None:
            return "queued", None, 0
        share = min(1.0, read_tokens / record.prompt_tokens) if record.prompt_tokens else None
        return "prefill", share, read_tokens

    def _read_tokens(self, record: Record) -> int | None:
        """How much of its prompts is read; None: it has no row yet. The worker tells about once a second."""
        model = next((each for each in self._worker.snapshot.models if each.id == record.asked.model_id), None)
        if model is None:
            return None
        first_choices = [f"{command.id}#0" for command in record.asked.commands]
        found = [model.reading[name] for name in first_choices if name in model.reading]
        return sum(found) if found else None


def past_object(past: Past) -> dict[str, Any]:
    """A request that ended, in one line. What another version wrote, or left out, is nothing."""
    figures = past.figures
    speculation, seconds = figures.get("speculation", {}), figures.get("seconds", {})
    drafted = speculation.get("drafted", 0)
    total_seconds = seconds.get("total", 0.0)
    return {
        "id": past.id,
        "endpoint": past.endpoint,
        "model": past.model_id,
        "key": past.key_name,
        "started_at": past.created_at,
        "ended_at": past.created_at + total_seconds,
        "phase": "done",
        "outcome": past.outcome,
        "prompt_tokens": figures.get("usage", {}).get("prompt_tokens", 0),
        "completion_tokens": figures.get("usage", {}).get("completion_tokens", 0),
        "tokens_per_second": round(figures.get("timings", {}).get("predicted_per_second", 0.0), 1),
        "method": speculation.get("method", "off"),
        "drafted": drafted,
        "acceptance": round(speculation.get("accepted", 0) / drafted, 3) if drafted else None,
        **{name: speculation.get(name) for name in ("reason", "reason_code", "reason_values")},
        "seconds": total_seconds,
    }


def past_in_full(past: Past) -> dict[str, Any]:
    """The same with every number, and the texts where they are kept."""
    return {**past_object(past), "figures": past.figures, "prompt": past.prompt, "reply": past.reply}


SHOWN_RUNNING = 100
SHOWN_RECENT = 20
PAGE = 50

Text = Annotated[str, Query(max_length=500)]


class Nothing(BaseModel):
    """No field is asked for."""


class RequestDesk:
    """What the routes ask: the journal for what runs, the history for what ran."""

    def __init__(self, context: AdminContext) -> None:
        self._journal = context.serving.journal
        self._history = RequestHistory(context.store)
        self._view = RequestView(context.serving.worker)

    def now(self) -> dict[str, Any]:
        """What runs, and the last ones that ended."""
        running = self._journal.running
        return {
            "running": [self._view.running(record) for record in running[:SHOWN_RUNNING]],
            "recent": [past_object(past) for past in self._journal.recent[:SHOWN_RECENT]],
            "open": len(running),
        }

    async def page(self, before: str = "", model: str = "", outcome: str = "", count: int = PAGE) -> dict[str, Any]:
        """What ran, the latest first; `next` is what `before` gets for the next page, empty at the end."""
        await self._write()

        def read() -> dict[str, Any]:
            found = self._history.page(count=count + 1, before=before, model_id=model, outcome=outcome)
            return {
                "requests": [past_object(past) for past in found[:count]],
                "next": found[count - 1].id if len(found) > count else "",
                "total": self._history.count(),
                "models": self._history.models(),
            }

        return await asyncio.to_thread(read)

    async def find(self, request_id: str) -> dict[str, Any] | None:
        """One of them with every number; None when nobody remembers it."""
        record = self._journal.find(request_id)
        if record is not None:
            return self._view.running_in_full(record)
        await self._write()
        past = await asyncio.to_thread(self._history.find, request_id)
        past = past or next((each for each in self._journal.recent if each.id == request_id), None)
        return None if past is None else past_in_full(past)

    async def clear(self) -> int:
        """Forget what ran. The answer says how many that were."""
        await self._write()
        count = await asyncio.to_thread(self._history.count)
        await self._journal.clear()
        return count

    def cancel(self, request_id: str) -> None:
        """End one that runs. Raises `Rejected` when it does not."""
        error = Rejected(499, "The request was cancelled on the dashboard.", "cancelled")
        if not self._journal.cancel(request_id, error):
            raise Rejected(409, "This request does not run any more.", "not_running")

    async def _write(self) -> None:
        if self._journal.is_behind:
            await self._journal.flush()


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The pages and their routes."""
    desk = RequestDesk(context)
    context.live.topic("requests", desk.now)
    router = APIRouter()
    _add_pages(router, desk, pages)
    _add_routes(router, desk)
    return router


def _add_pages(router: APIRouter, desk: RequestDesk, pages: Pages) -> None:
    @router.get("/admin/requests", response_class=HTMLResponse)
    async def get_requests_page(request: Request, model: Text = "", outcome: Text = "") -> HTMLResponse:
        """The list, narrowed as the address says; without a history it still shows what runs."""
        try:
            page, problem = await desk.page(model=model, outcome=outcome), ""
        except StoreUnavailable as error:
            page, problem = {"requests": [], "next": "", "total": 0, "models": []}, error.message
        data = {"page": page, "now": desk.now(), "problem": problem}
        return pages.render("requests.html", request, area="requests", data=data)

    @router.get("/admin/requests/{request_id}", response_class=HTMLResponse)
    async def get_request_page(request: Request, request_id: str) -> HTMLResponse:
        """One request's timeline; 404 with words when nobody remembers it."""
        found = await desk.find(request_id)
        status = 404 if found is None else 200
        return pages.render("request.html", request, area="requests", data={"request": found}, status=status)


def _add_routes(router: APIRouter, desk: RequestDesk) -> None:
    @router.get("/admin/api/requests")
    async def get_requests(
        before: Text = "", model: Text = "", outcome: Text = "", count: Annotated[int, Query(ge=1, le=200)] = PAGE
    ) -> dict[str, Any]:
        """What runs, and a page of what ran; `outcome` is `fine`, `failed`, `cancelled` or an exact one."""
        return {**await desk.page(before, model, outcome, count), "running": desk.now()["running"]}

    @router.delete("/admin/api/requests")
    async def clear_requests() -> dict[str, Any]:
        """Forget what ran, for good."""
        return {"cleared": await desk.clear()}

    @router.get("/admin/api/requests/{request_id}")
    async def get_request(request_id: str) -> dict[str, Any]:
        """One request with every number."""
        found = await desk.find(request_id)
        if found is None:
            raise HTTPException(404)
        return {"request": found}

    @router.post("/admin/api/requests/{request_id}/cancel")
    async def cancel_request(request: Request, request_id: str) -> dict[str, Any]:
        """End one that runs; its client gets an error."""
        await read_json(request, Nothing)
        desk.cancel(request_id)
        return {"cancelled": request_id}

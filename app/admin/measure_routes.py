"""`/admin/pays/{id}`: does drafting pay? Measure, see, apply, and what was measured before. Topic: `measuring`."""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from app.admin.context import AdminContext
from app.admin.draft_routes import DECIDED_ELSEWHERE, GIVEN
from app.admin.measuring import Wish
from app.admin.model_view import render_model
from app.admin.templating import Pages
from app.core.errors import InvalidRequest
from app.serving.body import read_json
from app.serving.sweep.report import drafting_of, report_object
from app.store.tables import BenchmarkRow

SOURCE = "measurement"


class ApplyBody(BaseModel):
    """What to keep of a measurement: its recommendation, or one setting that was measured with so many requests at once
    (`off`, `auto`, a method)."""

    method: str | None = Field(None, max_length=40)
    num_draft_tokens: int | None = Field(None, ge=1, le=64)
    rows: int = Field(1, ge=1, le=64)


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    context.live.topic("measuring", context.models.measuring.view)
    router = APIRouter()

    @router.get("/admin/pays/{model_id:path}", response_class=HTMLResponse)
    def get_pays_page(request: Request, model_id: str) -> HTMLResponse:
        """The page; its script asks for what was measured."""
        return render_model(context, pages, request, model_id, template="pays.html", tab="pays")

    _add_measuring(router, context)
    _add_results(router, context)
    return router


def _add_measuring(router: APIRouter, context: AdminContext) -> None:
    measuring, resolver = context.models.measuring, context.serving.resolver

    @router.post("/admin/api/measurements", status_code=202)
    async def begin_measurement(request: Request) -> dict[str, Any]:
        """Measure in the background; one at a time."""
        wish = await read_json(request, Wish)
        main = await asyncio.to_thread(resolver.main, wish.model)
        measuring.begin(wish.model_copy(update={"model": main.id}))
        return measuring.view()

    @router.delete("/admin/api/measurements/current")
    async def stop_measurement() -> dict[str, Any]:
        """End what is being measured; what is known by then is kept."""
        return {"stopping": measuring.stop()}


def _add_results(router: APIRouter, context: AdminContext) -> None:
    kept = context.models.kept

    @router.get("/admin/api/measurements")
    def list_measurements(model: str = "") -> dict[str, Any]:
        """What was measured, of one model or of all, the latest first; and what is being measured."""
        found = context.serving.resolver.find(model).id if model else ""
        current = drafting_now(context, found) if found else None
        rows = [row_object(row, current) for row in kept.of(found)]
        elsewhere = [name for name in DECIDED_ELSEWHERE if context.settings.origin(name) in GIVEN]
        return {"measurements": rows, "elsewhere": elsewhere, **context.models.measuring.view()}

    @router.post("/admin/api/measurements/{number}/apply")
    async def apply_measurement(request: Request, number: int) -> dict[str, Any]:
        """Set what was recommended, or one measured setting, for the model; a loaded one gets it when it is free."""
        body = await read_json(request, ApplyBody)
        row = await asyncio.to_thread(found_row, number)
        changes = await asyncio.to_thread(_apply, context, row, body)
        became = await context.models.loading.renew(row.model_id)
        return {"model": row.model_id, "changes": changes, "became": became}

    @router.delete("/admin/api/measurements/{number}")
    def delete_measurement(number: int) -> dict[str, Any]:
        """Forget one."""
        if not kept.delete(number):
            raise HTTPException(404)
        return {"deleted": number}

    def found_row(number: int) -> BenchmarkRow:
        row = kept.find(number)
        if row is None:
            raise HTTPException(404)
        return row


def row_object(row: BenchmarkRow, current: Mapping[str, Any] | None) -> dict[str, Any]:
    """A measurement as JSON, with what it says."""
    return {
        "id": row.id,
        "model_id": row.model_id,
        "created_at": row.created_at,
        "versions": row.versions,
        "machine": row.machine,
        "results": row.results,
        "report": report_object(row.results, current),
    }


def drafting_now(context: AdminContext, model_id: str) -> dict[str, Any]:
    """How a model drafts now, as `changes_to` compares it; empty for one that cannot draft. Reads the disk.

    A recommendation names its drafter where only this measurement chose it: it holds when the results are deleted.
    """
    resolver = context.serving.resolver
    main = resolver.find(model_id)
    unit = resolver.planned(main, by_measured=False) if main.kind == "main" and not main.problem else None
    return drafting_of(context.settings.model(model_id).given(), unit)


def _apply(context: AdminContext, row: BenchmarkRow, body: ApplyBody) -> list[dict[str, Any]]:
    """Change what the page listed, and nothing else. Raises InvalidRequest where nothing would change."""
    report = report_object(row.results, drafting_now(context, row.model_id))
    changes = report["advice"]["changes"]
    if body.method is not None:
        wanted = (body.method, body.num_draft_tokens or 0)
        settings = [each for cell in report["cells"] if cell["rows"] == body.rows for each in cell["settings"]]
        measured = [each for each in settings if (each["method"], each["num_draft_tokens"]) == wanted]
        if not measured:
            raise InvalidRequest("This measurement had no such setting.", parameter="method")
        changes = measured[0]["changes"]
    elif not changes:
        raise InvalidRequest(f"This measurement recommends no change: {report['text']}.", parameter="method")
    context.settings.change_model(row.model_id, {each["name"]: each["new"] for each in changes}, SOURCE)
    return list(changes)

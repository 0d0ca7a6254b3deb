"""`/admin/pays/{id}`: does drafting pay? Measure, see, apply, and what was measured before. Topic: `measuring`."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from app.admin.context import AdminContext
from app.admin.measurement_job import Wish
from app.admin.model_page import render_model
from app.admin.templating import Pages
from app.core.errors import InvalidRequest
from app.model_settings import SPECULATION, Id
from app.serving.body import read_json
from app.store.tables import BenchmarkRow

SOURCE = "measurement"
Prompt = Annotated[str, Field(min_length=1, max_length=20_000)]


class MeasureBody(BaseModel):
    """What is to be measured. `drafts` absent: the best drafter of each method; `several`: also four at once."""

    model: str = Field(min_length=1, max_length=500)
    drafts: list[Id] | None = Field(None, max_length=8)
    prompts: list[Prompt] = Field([], max_length=8)
    minutes: float = Field(2.0, gt=0, le=60)
    rounds: int = Field(3, ge=1, le=9)
    several: bool = True


class ApplyBody(BaseModel):
    """What to keep of a measurement: its recommendation, or one setting that was measured (`off`, `auto`, a method)."""

    method: str | None = Field(None, max_length=40)
    num_draft_tokens: int | None = Field(None, ge=1, le=64)


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
        body = await read_json(request, MeasureBody)
        main = await asyncio.to_thread(resolver.main, body.model)
        wish = Wish(
            model_id=main.id,
            drafts=None if body.drafts is None else tuple(body.drafts),
            prompts=tuple(body.prompts),
            minutes=body.minutes,
            rounds=body.rounds,
            several=body.several,
        )
        measuring.begin(wish)
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
        rows = [row_object(row) for row in kept.of(found)]
        return {"measurements": rows, **context.models.measuring.view()}

    @router.post("/admin/api/measurements/{number}/apply")
    async def apply_measurement(request: Request, number: int) -> dict[str, Any]:
        """Set what was recommended, or one measured setting, for the model; a loaded one gets it when it is free."""
        body = await read_json(request, ApplyBody)
        row = await asyncio.to_thread(found_row, number)
        choice = choice_of(row.results, body)
        changes = {name: choice.get(name) for name in SPECULATION}
        await asyncio.to_thread(context.settings.change_model, row.model_id, changes, SOURCE)
        return {
            "model": row.model_id,
            "choice": choice,
            "became": await context.models.loading.renew(row.model_id),
        }

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


def row_object(row: BenchmarkRow) -> dict[str, Any]:
    """A measurement as JSON."""
    return {
        "id": row.id,
        "model_id": row.model_id,
        "created_at": row.created_at,
        "versions": row.versions,
        "machine": row.machine,
        "results": row.results,
    }


def choice_of(results: dict[str, Any], body: ApplyBody) -> dict[str, Any]:
    """The settings of a model that a measurement leads to. Raises InvalidRequest where it leads to none."""
    if body.method is None:
        recommendation = results.get("recommendation")
        if not recommendation:
            raise InvalidRequest("This measurement recommends nothing: no drafting was measured.", parameter="method")
        return {name: value for name, value in recommendation["choice"].items() if value is not None}
    drafters = results.get("methods") or {}
    if body.method == "off":
        return {"policy": "off"}
    if body.method == "auto":
        return {"policy": "single", **({"drafts": list(drafters.values())} if drafters else {})}
    if body.method != "ngram" and body.method not in drafters:
        raise InvalidRequest("This measurement had no drafter of that method.", parameter="method")
    drafts = {} if body.method == "ngram" else {"drafts": [drafters[body.method]]}
    length = {} if body.num_draft_tokens is None else {"num_draft_tokens": body.num_draft_tokens}
    return {"policy": "single", "methods": [body.method], **drafts, **length}

"""`/admin/drafts/{id}`: the draft picker of one model. `/admin/pays/{id}`: measurements of its gain from drafts.

Topics: `drafting`, tokens drafted and accepted since the server started; `measuring`, the measurement under way.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import Field

from app.admin.context import Admin, AdminContext
from app.admin.measuring import MeasurementRequest
from app.admin.model_routes import render_model
from app.admin.model_view import sizes
from app.core.errors import InvalidRequest
from app.core.reason import NO_REASON, Reason, reason_object
from app.core.request import AcceptanceRule, DraftingPolicy
from app.core.unit import LoadedModel
from app.hub.hub_search import published_for
from app.model_settings import SPECULATION, Id
from app.models.catalog import CatalogModel
from app.models.drafters.methods import TEXT_METHODS
from app.models.footprint import Footprint
from app.models.pairing import Candidate
from app.serving.auth import SESSION
from app.serving.document import problems
from app.serving.errors import Rejected
from app.serving.gate import Body, DraftTokens, JsonBody
from app.serving.sweep.report import best_by_drafter, drafting_of, report_object, speedups
from app.store.tables import BenchmarkRow

CANDIDATE_FIELDS = (
    "method",
    "id",
    "origin",
    "size_bytes",
    "tokens",
    "token_difference",
    "refusal",
    "is_usual",
    "rollback",
)
EXPLICIT_ORIGINS = ("environment", "command line")
OVERRIDING_SETTINGS = ("drafts", "speculative_config", "num_draft_tokens", "policy", "acceptance")
"""Server settings that override the choice for a model, if given by environment or command line."""
BY_MEASUREMENT = "measurement"
"""Author recorded for a setting that a measurement recommended."""

router = APIRouter()


class ChoiceBody(Body):
    """Choice of drafters and methods for a model. Absent fields keep their values, null unsets a field; values and
    conflicts are checked as for all settings."""

    drafts: list[Id] | None = Field(None, max_length=8)
    methods: list[str] | None = Field(None, max_length=8)
    num_draft_tokens: int | None = None
    policy: DraftingPolicy | None = None
    acceptance: AcceptanceRule | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


class AttachBody(Body):
    """Drafter to attach to a model; it must be on this computer."""

    model: str = Field(min_length=1, max_length=500)
    draft: str = Field(min_length=1, max_length=500)
    measure: bool = True


class ApplyBody(Body):
    """Part of a measurement to apply: its recommendation, or with `method` (`off`, `auto`, a method) that setting, as
    measured with `rows` concurrent requests."""

    method: str | None = Field(None, max_length=40)
    num_draft_tokens: DraftTokens | None = None
    rows: int = Field(1, ge=1, le=64)


@router.get("/admin/drafts/{model_id:path}", response_class=HTMLResponse)
def get_drafts_page(request: Request, admin: Admin, model_id: str) -> HTMLResponse:
    """Serve the picker; its script fetches the candidates, since comparing tokenizers takes a while."""
    return render_model(admin, request, model_id, tab="drafts")


@router.post("/admin/api/drafts/attach", responses=problems(422, 429))
async def attach_draft(admin: Admin, body: JsonBody[AttachBody]) -> dict[str, Any]:
    """Choose a drafter, load the model with it, and start a measurement if `measure` is set."""
    model = await asyncio.to_thread(admin.serving.resolver.main, body.model)
    return await admin.loading.attach(model.id, body.draft, measure=body.measure)


@router.get("/admin/api/drafts/{model_id:path}")
def get_drafts(admin: Admin, model_id: str) -> dict[str, Any]:
    """Return every candidate drafter, ranked; a drafter or a broken model has none. `measured`: figures of the newest
    measurement of the candidate; figures of different measurements cannot be compared."""
    resolver = admin.serving.resolver
    main = resolver.find(model_id)
    loaded = resolver.loaded().get(main.id)
    rows = admin.stored_measurements.of(main.id)
    measured, used = _measured(rows), _drafters_in_use(admin, main, loaded)
    candidates = [
        _candidate(admin, main, candidate, loaded)
        | {
            "in_use": (candidate.method, candidate.id) in used,
            "measured": measured.get((candidate.method, candidate.id)),
        }
        for candidate in admin.models.candidates(main, speedups(row.results for row in rows))
    ]
    local_ids = {listed["id"] for listed in candidates}
    published = [
        # the memory use of a published drafter is estimated from its download size
        asdict(drafter) | {"has_room": admin.models.has_room(main, Footprint(weights_bytes=drafter.size_bytes))}
        for drafter in (published_for(main) if candidates else ())
        if drafter.repository not in local_ids
    ]
    current = admin.serving.settings
    return {
        "model": admin.models.describe(main),
        "choice": {name: admin.serving.live.model(main.id).given().get(name) for name in SPECULATION},
        "usual": {"policy": current.policy, "acceptance": current.acceptance},
        "elsewhere": overriding_settings(admin),
        "ceiling_bytes": admin.serving.memory_ceiling_bytes,
        "methods": list(loaded.methods) if loaded else [],
        "candidates": candidates,
        "published": published,
        "counts": admin.serving.metrics.drafting(main.id),
        "measuring": admin.measuring.active,
        "gain": admin.measuring.gains().get(main.id),
    }


@router.put("/admin/api/drafts/{model_id:path}", responses=problems(422, 429))
async def put_drafts(admin: Admin, body: JsonBody[ChoiceBody], model_id: str) -> dict[str, Any]:
    """Set drafters, methods, draft length, acceptance or policy together; a loaded model reloads once it is idle."""

    def choose() -> str:
        main = admin.serving.resolver.main(model_id)
        if body.drafts:
            admin.models.check_room(
                main, admin.models.candidates_named(main, admin.models.candidates(main), body.drafts)
            )
        admin.serving.live.change_model(main.id, body.model_dump(exclude_unset=True), SESSION.name)
        return main.id

    model = await asyncio.to_thread(choose)
    return {"model": model, "became": await admin.loading.reload(model)}


def _drafters_in_use(admin: AdminContext, main: CatalogModel, loaded: LoadedModel | None) -> set[tuple[str, str]]:
    """Return method and id of each drafter that is in use, or would be if the model were loaded."""
    unit = loaded.unit if loaded is not None else admin.serving.resolver.planned(main)
    if unit.live.policy == "off":
        return set()
    allowed_methods = loaded.methods if loaded is not None and loaded.state == "ready" else unit.methods
    in_use = {(drafter.method, drafter.id) for drafter in unit.drafters} | {(name, "") for name in TEXT_METHODS}
    return {drafter for drafter in in_use if not allowed_methods or drafter[0] in allowed_methods}


def _measured(rows: Sequence[BenchmarkRow]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return each drafter's best figures, with the time of their measurement and whether it is the latest."""
    best = best_by_drafter(row.results for row in rows)
    latest = min((index for index, _ in best.values()), default=0)
    return {
        key: msgspec.to_builtins(figures) | {"measured_at": rows[index].created_at, "is_latest": index == latest}
        for key, (index, figures) in best.items()
    }


def _candidate(
    admin: AdminContext, main: CatalogModel, candidate: Candidate, loaded: LoadedModel | None
) -> dict[str, Any]:
    return {
        "key": f"{candidate.method}:{candidate.id}",
        **{name: getattr(candidate, name) for name in CANDIDATE_FIELDS},
        "extra": sizes(candidate.footprint),
        "has_room": admin.models.has_room(main, candidate.footprint),
        "unavailable": reason_object(_unavailable(candidate, loaded)),
    }


def _unavailable(candidate: Candidate, loaded: LoadedModel | None) -> Reason:
    """Return why a loaded drafter cannot run; NO_REASON for one that is not loaded, or still loading."""
    if loaded is None or loaded.state != "ready" or candidate.id not in {*loaded.draft_ids, ""}:
        return NO_REASON
    return loaded.unavailable.get(candidate.method, NO_REASON)


def overriding_settings(admin: AdminContext) -> list[str]:
    """Return the server settings that override the choice for a model."""
    return [name for name in OVERRIDING_SETTINGS if admin.serving.live.origin(name) in EXPLICIT_ORIGINS]


# --- measurements -----------------------------------------------------------------------------------------------


@router.get("/admin/pays/{model_id:path}", response_class=HTMLResponse)
def get_pays_page(request: Request, admin: Admin, model_id: str) -> HTMLResponse:
    """Serve the page; its script fetches the measurements."""
    return render_model(admin, request, model_id, tab="pays")


@router.post("/admin/api/measurements", status_code=202, responses=problems(409))
async def begin_measurement(admin: Admin, body: JsonBody[MeasurementRequest]) -> dict[str, Any]:
    """Start a measurement in the background; one at a time."""
    main = await asyncio.to_thread(admin.serving.resolver.main, body.model)
    admin.measuring.begin(body.model_copy(update={"model": main.id}))
    return admin.measuring.view()


@router.delete("/admin/api/measurements/current")
async def stop_measurement(admin: Admin) -> dict[str, Any]:
    """Stop the current measurement; its results so far are kept."""
    return {"stopping": admin.measuring.stop()}


@router.get("/admin/api/measurements", responses=problems(404))
def list_measurements(admin: Admin, model: str = "") -> dict[str, Any]:
    """List measurements of one model or of all models, the latest first, and the measurement under way."""
    model_id = admin.serving.resolver.find(model).id if model else ""
    current = drafting_now(admin, model_id) if model_id else None
    rows = [
        {
            **row.model_dump(include={"id", "model_id", "created_at", "versions", "machine", "results"}),
            "report": report_object(row.results, current),
        }
        for row in admin.stored_measurements.of(model_id)
    ]
    return {"measurements": rows, "elsewhere": overriding_settings(admin), **admin.measuring.view()}


@router.post("/admin/api/measurements/{number}/apply", responses=problems(422, 429))
async def apply_measurement(admin: Admin, body: JsonBody[ApplyBody], number: int) -> dict[str, Any]:
    """Apply the recommendation, or one measured setting, to the model; if loaded, it is reloaded once it is idle."""
    row = await asyncio.to_thread(admin.stored_measurements.find, number)
    if row is None:
        raise _missing_measurement(number)
    changes = await asyncio.to_thread(_apply, admin, row, body)
    outcome = await admin.loading.reload(row.model_id)
    return {"model": row.model_id, "changes": changes, "became": outcome}


@router.delete("/admin/api/measurements/{number}")
def delete_measurement(admin: Admin, number: int) -> dict[str, Any]:
    """Delete one measurement."""
    if not admin.stored_measurements.delete(number):
        raise _missing_measurement(number)
    return {"deleted": number}


def _missing_measurement(number: int) -> Rejected:
    return Rejected(404, f"There is no measurement {number}: GET /admin/api/measurements lists them.", "not_found")


def drafting_now(admin: AdminContext, model_id: str) -> dict[str, Any]:
    """Return the current drafting of a model, in the form that `changes_to` compares. Reads the disk.

    Measurements are ignored, so that a recommended drafter is stored by name and stays when the results are deleted.
    """
    resolver = admin.serving.resolver
    main = resolver.find(model_id)
    unit = resolver.planned(main, by_measured=False) if main.kind == "main" and not main.problem else None
    return drafting_of(admin.serving.live.model(model_id).given(), unit)


def _apply(admin: AdminContext, row: BenchmarkRow, body: ApplyBody) -> list[dict[str, Any]]:
    """Apply exactly the changes that the page listed. Raises InvalidRequest if there are none."""
    report = report_object(row.results, drafting_now(admin, row.model_id))
    changes = report["advice"]["changes"]
    if body.method is not None:
        requested = (body.method, body.num_draft_tokens or 0)
        settings = [setting for cell in report["cells"] if cell["rows"] == body.rows for setting in cell["settings"]]
        measured = [setting for setting in settings if (setting["method"], setting["num_draft_tokens"]) == requested]
        if not measured:
            raise InvalidRequest("This measurement had no such setting.", parameter="method")
        changes = measured[0]["changes"]
    elif not changes:
        raise InvalidRequest(f"This measurement recommends no change: {report['text']}.", parameter="method")
    admin.serving.live.change_model(row.model_id, {change["name"]: change["new"] for change in changes}, BY_MEASUREMENT)
    return list(changes)


def _drafting(admin: AdminContext) -> dict[str, Any]:
    serving = admin.serving
    return {model.id: serving.metrics.drafting(model.id) for model in serving.worker.book.snapshot.models}


async def _measuring(admin: AdminContext) -> dict[str, Any]:
    return admin.measuring.view() | {"gains": await asyncio.to_thread(admin.measuring.gains)}


TOPICS = {"drafting": _drafting, "measuring": _measuring}

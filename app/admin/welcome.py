"""`/admin/welcome`: the first run, after the password is set, in steps that can be skipped and resumed.

The steps: the language; the folders with models, which are used in place; a pair of models to download, or the embedded
pair; then the chat. The store keeps the remaining steps, and the overview offers to continue with them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.admin.context import Admin, AdminContext
from app.admin.overview import STARTER
from app.admin.setting_rows import setting_row
from app.models.catalog import CatalogModel
from app.models.known_places import Source
from app.models.safe_files import folder_problem
from app.serving.gate import Body, JsonBody
from app.store.rows import FIRST_STEPS, FirstRun, FirstStep

ROOTS: tuple[Source, ...] = ("lm_studio", "hugging_face", "embedded")
"""Sources of models other than the folders of the settings."""

router = APIRouter()


class DoneBody(Body):
    """The step that is done; `all` ends the first run."""

    done: Literal["language", "folders", "models", "all"]


@router.get("/admin/welcome", response_class=HTMLResponse)
def get_welcome(request: Request, admin: Admin, step: str = "") -> HTMLResponse:
    """Serve one step: the requested one, else the first remaining one."""
    left = FirstRun(admin.store).remaining()
    current: FirstStep = next(
        (candidate for candidate in FIRST_STEPS if candidate == step), next(iter(left), FIRST_STEPS[0])
    )
    index = FIRST_STEPS.index(current)
    data = {
        "step": current,
        "next": "".join(FIRST_STEPS[index + 1 : index + 2]),
        "starter": STARTER,
        "found": found_models(admin),
        "settings": [setting_row(admin.serving.live, "model_dirs")],
    }
    before = "".join(FIRST_STEPS[max(index - 1, 0) : index])
    return admin.pages.render(
        "welcome.html", request, area="welcome", data=data, steps=FIRST_STEPS, left=left, before=before
    )


@router.get("/admin/api/welcome")
def get_progress(admin: Admin) -> dict[str, Any]:
    """Return the remaining steps, and the places with models."""
    return {"left": FirstRun(admin.store).remaining(), "found": found_models(admin)}


@router.post("/admin/api/welcome")
def finish_step(admin: Admin, body: JsonBody[DoneBody]) -> dict[str, Any]:
    """Mark a step as done, or all of them."""
    first_run = FirstRun(admin.store)
    first_run.finish(*(FIRST_STEPS if body.done == "all" else (body.done,)))
    return {"left": first_run.remaining()}


def found_models(admin: AdminContext) -> list[dict[str, Any]]:
    """Return the number and the total size of the usable models in each place."""
    return models_by_location(admin.serving.resolver.models(), admin.serving.settings.model_folders)


def models_by_location(models: Sequence[CatalogModel], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Count models by place, the folders of the settings first. `count` is the number of models that no
    earlier place contains, `listed` the number of the others."""
    usable = [model for model in models if not model.problem]
    places = [("folder", str(folder), [model for model in usable if _is_in(folder, model)]) for folder in folders]
    places += [(source, "", [model for model in usable if model.source == source]) for source in ROOTS]
    rows, counted = [], set[str]()
    for source, folder, inside in places:
        new = [model for model in inside if model.id not in counted]
        counted.update(model.id for model in new)
        counts = {"count": len(new), "listed": len(inside) - len(new), "bytes": sum(model.size_bytes for model in new)}
        rows.append({"source": source, "folder": folder, "problem": folder and folder_problem(Path(folder)), **counts})
    return rows


def _is_in(folder: Path, model: CatalogModel) -> bool:
    return model.source == "folder" and model.path.is_relative_to(folder)

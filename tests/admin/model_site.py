"""An application with the embedded models, a real store, settings and pairing, and a fake worker of known speed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from app.admin.context import AdminContext
from app.core.errors import InsufficientMemory, ModelInUse
from app.core.messages import Accepted, Delta, Finished, Generate, ModelLoaded, Ready, Snapshot
from app.core.statistics import MethodStatistics, Statistics
from app.core.unit import UNSPECIFIED_STAY, LoadedModel, ModelSpecification, Stay
from app.main import admin_context, build, measured_in
from app.models.catalog import FolderCatalog, default_catalog
from app.serving.context import Activity, Context
from app.serving.live_settings import LiveSettings
from app.serving.resolver import Resolver
from app.settings import Settings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from tests.admin.signing import Time
from tests.api.fakes import FakeWorker

KEY = "sk-of-this-test"
DEMO = "demo-assistant"
GB = 10**9
SPEEDS = {"off": 100.0, "auto": 150.0, "draft_model": 200.0, "dflash": 90.0, "eagle3": 80.0, "ngram": 110.0}


class PacedWorker(FakeWorker):
    """Fake worker that keeps each loaded model and streams tokens at a known speed per method, advancing `time`."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.script = self.paced
        self.speeds = dict(SPEEDS)
        self.ready_info = Ready(process_id=1, device="Test (cpu)", memory_ceiling_bytes=8 * GB)
        self.in_use = False
        self.hold: asyncio.Event | None = None
        """Event that delays every answer until it is set; None delays none."""
        self._time = time

    async def load(self, model: ModelSpecification, stay: Stay = UNSPECIFIED_STAY) -> ModelLoaded:
        if self.in_use:
            raise ModelInUse("it is in use", retry_after_seconds=1)
        methods = (*(drafter.method for drafter in model.drafters), "ngram")
        held = LoadedModel(
            unit=model,
            state="ready",
            methods=tuple(method for method in methods if not model.methods or method in model.methods),
            longest_drafts={"dflash": 7},
            cache_families=("trim",),
            max_context_tokens=4096,
        )
        others = tuple(other for other in self.book.snapshot.models if other.id != model.id)
        self.book.snapshot = Snapshot(models=(*others, held))
        return await super().load(model, stay)

    async def unload(self, model_id: str) -> None:
        if self.in_use:
            raise ModelInUse("it is in use", retry_after_seconds=1)
        self.book.snapshot = Snapshot(
            models=tuple(model for model in self.book.snapshot.models if model.id != model_id)
        )
        await super().unload(model_id)

    async def paced(self, command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        if self.hold is not None:
            await self.hold.wait()
        method = command.speculation.method
        drafts = command.speculation.num_draft_tokens or 0
        tokens = command.max_tokens or 16
        yield Accepted(id=command.id, prompt_tokens=5)
        for _ in range(tokens):
            self._time.pass_by(1 / self.speeds[method])
            yield Delta(id=command.id, index=0, text="x", tokens=1, method=method)
        used = "draft_model" if method == "auto" else method
        usage = Statistics(prompt_tokens=5, completion_tokens=tokens, decode_seconds=tokens / self.speeds[method])
        if method != "off":
            by_method = (MethodStatistics(used, steps=tokens, drafted=4 * tokens, accepted=3 * tokens),)
            usage = replace(usage, by_method=by_method)
        assert drafts <= 16
        yield Finished(id=command.id, index=0, finish_reason="length", usage=usage)


@dataclass
class ModelSite:
    admin: AdminContext
    worker: PacedWorker
    catalog: FolderCatalog
    client: httpx2.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        transport = httpx2.ASGITransport(build(self.admin))
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8710", headers=headers)

    async def call(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        response = await self.client.request(method, path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def measured(self, **wishes: Any) -> dict[str, Any]:
        """Run a measurement of the demo model to its end and return the stored result."""
        await self.call("POST", "/admin/api/measurements", {"model": DEMO, "minutes": 60, **wishes}, status=202)
        await self.admin.measuring.wait()
        answer = await self.call("GET", f"/admin/api/measurements?model={DEMO}")
        assert answer["last"]["outcome"] == "done", answer["last"]
        row: dict[str, Any] = answer["measurements"][0]
        return row


def make_model_site(home: Path, *, catalog: FolderCatalog | None = None, **settings: Any) -> ModelSite:
    """Return an application whose state lies in `home`."""
    time = Time()
    worker = PacedWorker(time)
    store = Store(home / FILE_NAME)
    live = LiveSettings(Settings(home=home, api_key=KEY, **settings), StoredSettings(store))
    catalog = catalog or default_catalog([], environment={}, home=home)
    resolver = Resolver(live, catalog, worker, measured_in(store))
    context = Context(
        live=live,
        worker=worker,
        resolver=resolver,
        activity=Activity(lambda: live.current.max_requests),
        clock=time,
    )
    return ModelSite(admin_context(context, store), worker, catalog)


class Somebody:
    """A stand-in for a request of another client."""

    def abort(self, error: Exception) -> None:
        """Do nothing: the request stays open until the test ends it."""


def too_little_memory(worker: PacedWorker) -> Callable[..., Any]:
    """Make the worker refuse every load for lack of memory; return its new `load`."""

    async def refuse(*_: Any, **__: Any) -> ModelLoaded:
        raise InsufficientMemory("no room", code="insufficient_memory")

    worker.load = refuse  # type: ignore[method-assign]
    return refuse

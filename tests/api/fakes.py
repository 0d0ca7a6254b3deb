"""A scripted worker and a catalog of small model folders, which the endpoints see in tests."""

import asyncio
import atexit
import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import msgspec
from fastapi import FastAPI

from app.core.errors import InvalidRequest, ModelNotFound, PacelineError
from app.core.messages import (
    Accepted,
    Delta,
    Event,
    Finished,
    Generate,
    KeepModels,
    ModelLoaded,
    PromptTokens,
    Ready,
    TokenText,
)
from app.core.reason import NO_REASON, Reason
from app.core.statistics import Decision, MethodStatistics, Statistics
from app.core.unit import UNSPECIFIED_STAY, ModelSpecification, Stay
from app.main import admin_context, build
from app.model_settings import ModelSettings
from app.models.catalog import CatalogModel, FolderCatalog
from app.serving.connection import DeadlineProtocol
from app.serving.context import Activity, Context
from app.serving.live_settings import LiveSettings
from app.serving.resolver import Resolver
from app.serving.server import DrainingServer, bind, serve_config
from app.settings import Settings
from app.store.store import FILE_NAME, Store
from app.supervision.book import ModelBook
from app.supervision.stream import RequestStream, StreamEvent
from tests.models.drafters import DFLASH, DFLASH_TENSORS, EAGLE3, EAGLE3_TENSORS, write_drafter, write_main
from tests.models.folders import write_model

Script = Callable[[Generate], AsyncIterator[Accepted | Delta | Finished]]

USAGE = Statistics(
    prompt_tokens=5,
    cached_tokens=2,
    completion_tokens=3,
    prefill_seconds=0.03,
    decode_seconds=0.06,
    close_calls=1,
    replayed_tokens=7,
    by_method=(
        MethodStatistics("off", steps=1, verify_seconds=0.01),
        MethodStatistics(
            "draft_model", 2, 4, 2, (2, 0), draft_seconds=0.015625, verify_seconds=0.03125, rewind_seconds=0.001
        ),
    ),
    decision=Decision("draft", "draft_model", 2, cost_ratio=1.41234, acceptance=0.51234),
)


def token(text: str, logprob: float = -0.5, top: Sequence[tuple[str, float]] = ()) -> TokenText:
    ranked = tuple((candidate, value, tuple(candidate.encode())) for candidate, value in top)
    return TokenText(token=text, token_bytes=tuple(text.encode()), logprob=logprob, top=ranked)


async def say_hello(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
    """Emit three tokens per choice; two of them were drafted and accepted."""
    yield Accepted(id=command.id, prompt_tokens=5)
    k = command.sampling.top_logprobs
    tops = [(f"t{rank}", -0.5 - rank) for rank in range(k or 0)]
    logprobs = (
        [[], []] if k is None else [[token("Hello", top=tops)], [token(", ", top=tops), token("world", top=tops)]]
    )
    for index in range(command.n):
        yield Delta(id=command.id, index=index, text="Hello", tokens=1, logprobs=tuple(logprobs[0]))
        yield Delta(
            id=command.id,
            index=index,
            text=", world",
            tokens=2,
            accepted_spans=((0, 7),),
            method="draft_model",
            logprobs=tuple(logprobs[1]),
        )
        yield Finished(id=command.id, index=index, finish_reason="stop", usage=USAGE)


def failing(error: PacelineError, *, after_tokens: bool = False) -> Script:
    async def script(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        if after_tokens:
            yield Accepted(id=command.id, prompt_tokens=5)
            yield Delta(id=command.id, index=0, text="Hel", tokens=1)
        raise error

    return script


class FakeWorker:
    """Fake with the interface of `WorkerClient`; `script` answers every `Generate`."""

    def __init__(self) -> None:
        self.script: Script = say_hello
        self.ready = True
        self.ready_info: Ready | None = Ready(process_id=1, device="cpu")
        self.book = ModelBook()
        self.quarantined: dict[str, Reason] = {}
        self.restarts = 0
        self.retry_after_seconds = 2
        self.draining = False
        self.last_exit = NO_REASON
        self.renewals: list[float] = []
        self.commands: list[Generate] = []
        self.cancelled: list[str] = []
        self._saying: dict[str, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self.loads: list[ModelSpecification] = []
        self.stays: list[Stay] = []
        """Stays that the loads asked for, in the order of `loads`."""
        self.kept = KeepModels()
        self.coming: dict[str, ModelSpecification] = {}
        """Units that are being loaded, by model id."""
        self.unloads: list[str] = []
        self.listeners: list[Callable[[Event], None]] = []
        self.changed = asyncio.Condition()

    def open(
        self,
        commands: Sequence[Generate],
        *,
        on_event: Callable[[StreamEvent | PacelineError], None] = lambda _event: None,
    ) -> RequestStream:
        stream = RequestStream(commands, cancel=self._cancel, on_event=on_event)
        self._saying |= {command.id: asyncio.create_task(self._say(stream, command)) for command in commands}
        return stream

    async def generate(self, command: Generate) -> AsyncGenerator[StreamEvent, None]:
        stream = self.open([command])
        try:
            while (event := await stream.next()) is not None:
                yield event
        finally:
            stream.close()

    async def _say(self, stream: RequestStream, command: Generate) -> None:
        if stream.ended:
            return
        self.commands.append(command)
        await self.tell()
        try:
            async for event in self.script(command):
                if isinstance(event, Finished):
                    event = msgspec.structs.replace(event, notices=command.notices + event.notices)  # noqa: PLW2901
                stream.put(event)
                await asyncio.sleep(0)
        except PacelineError as error:
            self._saying.pop(command.id, None)
            stream.fail(error)
        self._saying.pop(command.id, None)

    def _cancel(self, request_id: str) -> None:
        task = self._saying.pop(request_id, None)
        if task is not None:
            task.cancel()
            self.cancelled.append(request_id)
            self._telling.add(asyncio.create_task(self.tell()))

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, which is checked at each request, load and cancellation; 60 s at most."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(condition)

    async def wait_asked(self, count: int = 1) -> None:
        await self.wait_for(lambda: len(self.commands) >= count)

    async def wait_cancelled(self, count: int = 1) -> None:
        await self.wait_for(lambda: len(self.cancelled) >= count)

    def keep(self, settings: KeepModels) -> None:
        self.kept = settings

    def unit(self, model_id: str) -> ModelSpecification | None:
        loaded = self.book.loaded().get(model_id)
        return loaded.unit if loaded is not None else self.coming.get(model_id)

    async def load(self, model: ModelSpecification, stay: Stay = UNSPECIFIED_STAY) -> ModelLoaded:
        self.loads.append(model)
        self.stays.append(stay)
        await self.tell()
        return ModelLoaded(id="load", model_id=model.id, seconds=1.5)

    async def read_prompt(self, prompt: Generate) -> PromptTokens:
        return PromptTokens(id=prompt.id, tokens=[1, 2, 3], text=prompt.text or "Hi", notices=prompt.notices)

    def release_quarantine(self, model_id: str) -> None:
        if self.quarantined.pop(model_id, None) is None:
            raise InvalidRequest(f"{model_id} is not quarantined.", code="not_quarantined", parameter="model")

    def renew(self, drain_seconds: float = 0.0) -> None:
        self.renewals.append(drain_seconds)

    def clear_prefixes(self) -> None:
        """Do nothing: this worker has no prefix cache."""

    async def unload(self, model_id: str) -> None:
        self.unloads.append(model_id)

    def subscribe(self, listener: Callable[[Event], None], *_kinds: type[Event]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)


def model(name: str, **fields: Any) -> CatalogModel:
    return CatalogModel(id=name, path=Path("/models") / name, source="folder", context=4096, **fields)


FOLDERS = Path(tempfile.mkdtemp(prefix="paceline-models-"))
"""Folder of small models that the catalog finds loadable; their files decide which drafter fits which model."""
atexit.register(shutil.rmtree, FOLDERS, ignore_errors=True)


def catalog_model(name: str) -> CatalogModel:
    """Return the model in `FOLDERS` with this name."""
    return FolderCatalog([FOLDERS]).find(name)


def drafter(method: str, name: str = "") -> CatalogModel:
    """Return a drafter made for `demo-main`; its folder is written on first use."""
    name = name or f"demo-main-{method}"
    if not (FOLDERS / name).exists():
        config, tensors = {"dflash": (DFLASH, DFLASH_TENSORS), "eagle3": (EAGLE3, EAGLE3_TENSORS)}[method]
        write_drafter(FOLDERS / name, config, tensors)
    return catalog_model(name)


write_main(FOLDERS / "demo-main")
write_main(FOLDERS / "demo-draft", rows=16)
write_drafter(FOLDERS / "eagle", {**EAGLE3, "target_hidden_size": 8}, EAGLE3_TENSORS)
write_model(FOLDERS / "org" / "other", pieces="hgfedcba")
MODELS = (
    model("broken", reason="the weights are missing: download them again"),
    catalog_model("demo-draft"),
    catalog_model("demo-main"),
    catalog_model("eagle"),
    catalog_model("org/other"),
)
DRAFTERS = (*MODELS, drafter("dflash"), drafter("eagle3"))


class FakeCatalog:
    def __init__(self, models: Sequence[CatalogModel] = MODELS) -> None:
        self._models = {entry.id: entry for entry in models}

    def models(self) -> tuple[CatalogModel, ...]:
        return tuple(self._models.values())

    def find(self, id: str) -> CatalogModel:  # noqa: A002
        if id not in self._models:
            raise ModelNotFound("no such model on this computer", parameter="model")
        return self._models[id]

    def refresh(self) -> None: ...

    def is_reading_tokenizers(self) -> bool:
        return False


class FakeStorage:
    """A store in memory: `stored` has the settings of each model, by id; `values` those of the server."""

    def __init__(self) -> None:
        self.stored: dict[str, ModelSettings] = {}
        self.values: dict[str, Any] = {}
        self.keys = 0
        self.sources: list[str] = []

    def settings(self) -> dict[str, Any]:
        return dict(self.values)

    def change_settings(self, changes: Mapping[str, Any], *, source: str) -> None:
        self.sources.append(source)
        self.values = {name: value for name, value in {**self.values, **changes}.items() if value is not None}

    def models(self) -> dict[str, ModelSettings]:
        return dict(self.stored)

    def save_model(self, model_id: str, settings: ModelSettings, *, source: str) -> None:
        self.sources.append(source)
        self.stored[model_id] = settings

    def has_keys(self) -> bool:
        return self.keys > 0


@dataclass
class Site:
    """One application with its fakes."""

    app: FastAPI
    worker: FakeWorker
    storage: FakeStorage
    context: Context
    client: httpx2.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.connect()

    def connect(self, *, headers: dict[str, str] | None = None) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(self.app)
        return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8710", headers=headers)

    async def chat(self, **fields: Any) -> httpx2.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(**fields))

    async def complete(self, **fields: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"model": "demo-main", "prompt": "Once"} | fields)


def names_of(specification: ModelSpecification) -> list[str]:
    """The ids of a unit's drafters."""
    return [drafter.id for drafter in specification.drafters]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo-main", "messages": [{"role": "user", "content": "Hi"}]} | fields


@cache
def _empty_home() -> Path:
    """Make a home folder with an empty store, once: each site gets a copy."""
    home = Path(tempfile.gettempdir()) / "paceline-empty"
    store = Store(home / FILE_NAME)
    store.start()
    store.close()
    return home


def make_site(
    *,
    models: Sequence[CatalogModel] = MODELS,
    context: dict[str, Any] | None = None,
    open_store: Callable[[Path], Store] = Store,
    **settings: Any,
) -> Site:
    worker = FakeWorker()
    if "home" not in settings:
        settings["home"] = shutil.copytree(_empty_home(), Path(tempfile.gettempdir()) / f"paceline-{uuid4().hex}")
    chosen = Settings(**settings)
    storage = FakeStorage()
    live = LiveSettings(chosen, storage)
    resolver = Resolver(live, FakeCatalog(models), worker)
    made = Context(
        live=live,
        worker=worker,
        resolver=resolver,
        activity=Activity(lambda: live.current.max_requests),
        **(context or {}),
    )
    store = open_store(chosen.home / FILE_NAME)
    return Site(build(admin_context(made, store)), worker, storage, made)


@contextlib.asynccontextmanager
async def served(
    site: Site,
    *,
    protocol: type[DeadlineProtocol] = DeadlineProtocol,
    drain_seconds: float = 0.0,
    connections: int | None = None,
) -> AsyncGenerator[tuple[int, DrainingServer], None]:
    """Serve the application on a real loopback socket; yield its port and the server."""
    listener = bind("127.0.0.1", 0)
    started = asyncio.Event()
    server = DrainingServer(
        serve_config(site.app, protocol=protocol),
        activity=site.context.activity,
        drain_seconds=drain_seconds,
        on_started=started.set,
        connections=connections,
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await started.wait()
    try:
        yield listener.getsockname()[1], server
    finally:
        if server._draining is None:
            server.stop()
        await running


def frames(text: str) -> list[str]:
    """The payloads of the `data:` lines of a stream, in order."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]

"""The models on this disk: found, checked and listed, each with its problem when it has one.

Runs in the server process. A model is inspected once and again only when a file of its folder changes; the listing
itself is refreshed at most every `refresh_seconds`, so `/v1/models` stays cheap. Calls may come from any thread.
"""

import difflib
import importlib.resources
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from app.core.drafter_folder import head_tensors
from app.core.errors import ModelNotFound, ModelUnavailable
from app.core.model_folder import drafter_method, inspect_folder
from app.core.ports import Clock
from app.core.safe_files import TensorInfo, printable, read_object
from app.hub.layout import Candidate, candidates, hugging_face_cache, lm_studio_folder

Source = Literal["folder", "hugging_face", "lm_studio", "embedded"]
Kind = Literal["main", "drafter"]
Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model on disk. Numbers are 0 and names empty where the folder is broken or does not tell them."""

    id: str
    path: Path
    source: Source
    kind: Kind = "main"
    """`drafter`: reads the features of one target, cannot run alone."""
    method: str = "draft_model"
    """How it drafts when it is a drafter: `draft_model`, `dflash`, `eagle3` or `mtp`."""
    size_bytes: int = 0
    parameter_count: int = 0
    context: int = 0
    """The longest context in tokens that the config declares."""
    model_type: str = ""
    bits: int = 0
    has_chat_template: bool = False
    problem: str = ""
    """Why it cannot be loaded, in one line with the next action; empty when nothing is known to be wrong."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, compare=False, repr=False)
    """Of a drafter its tensors; of a main model those of the multi-token head inside its checkpoint, if it has one."""

    @property
    def head(self) -> "CatalogModel | None":
        """The multi-token head inside a main model's checkpoint as a drafter, under the id of that model."""
        if self.kind != "main" or not self.tensors:
            return None
        size = sum(tensor.size_bytes for tensor in self.tensors.values())
        return replace(self, kind="drafter", method="mtp", size_bytes=size)


class Catalog:
    """Every model below the given folders; on equal ids the first folder wins, in the order of the arguments."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        hugging_face_cache: Path | None = None,
        lm_studio: Path | None = None,
        embedded: Path | None = None,
        refresh_seconds: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        roots: list[tuple[Source, Path | None]] = [
            ("hugging_face", hugging_face_cache),
            ("lm_studio", lm_studio),
            ("embedded", embedded),
        ]
        self._folders = tuple(folders)
        self._roots = [(source, root) for source, root in roots if root is not None]
        self._refresh_seconds = refresh_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._scanned_at: float | None = None
        self._models: dict[str, CatalogModel] = {}
        self._inspected: dict[tuple[Source, Path], tuple[Signature, CatalogModel]] = {}

    def models(self) -> tuple[CatalogModel, ...]:
        """All models sorted by id, broken ones included; never raises for what lies in a folder."""
        with self._lock:
            now = self._clock()
            if self._scanned_at is None or now - self._scanned_at >= self._refresh_seconds:
                self._models = self._scan()
                self._scanned_at = now
            return tuple(self._models.values())

    def look_in(self, folders: Sequence[Path]) -> None:
        """From now on these are the given folders."""
        with self._lock:
            if self._folders != tuple(folders):
                self._folders = tuple(folders)
                self._scanned_at = None

    def refresh(self) -> None:
        """Look again at the next call, whatever the age of the listing: after a download or a deletion."""
        with self._lock:
            self._scanned_at = None

    def find(self, id: str) -> CatalogModel:  # noqa: A002 - the word of the API
        """The model called `id`. Raises `ModelNotFound` with the nearest ids; a broken model is returned as it is."""
        models = {model.id: model for model in self.models()}
        if id in models:
            return models[id]
        nearest = difflib.get_close_matches(id[:200], models, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "`paceline ls` shows the models that are here"
        raise ModelNotFound(f'no model "{printable(id)}" on this computer; {hint}', parameter="model")

    def _scan(self) -> dict[str, CatalogModel]:
        found: dict[str, CatalogModel] = {}
        inspected: dict[tuple[Source, Path], tuple[Signature, CatalogModel]] = {}
        own: list[tuple[Source, Path]] = [("folder", folder) for folder in self._folders]
        for source, root in (*own, *self._roots):
            for candidate in candidates(root):
                if printable(candidate.id) in found:
                    continue
                key = (source, candidate.path)
                signature = _signature(candidate.path)
                known = self._inspected.get(key)
                fresh = known[1] if known is not None and known[0] == signature else _inspect(candidate, source)
                inspected[key] = (signature, fresh)
                found[fresh.id] = fresh
        self._inspected = inspected
        return dict(sorted(found.items()))


def default_catalog(
    model_folders: Sequence[Path],
    *,
    use_hugging_face: bool = True,
    use_lm_studio: bool = True,
    environment: Mapping[str, str] = os.environ,
    home: Path | None = None,
) -> Catalog:
    """The catalog of this computer: own folders, the Hugging Face cache, LM Studio's folder, the embedded models."""
    home = home or Path.home()
    return Catalog(
        [folder.expanduser() for folder in model_folders],
        hugging_face_cache=hugging_face_cache(environment, home) if use_hugging_face else None,
        lm_studio=lm_studio_folder(home) if use_lm_studio else None,
        embedded=Path(str(importlib.resources.files("app").joinpath("demo_models"))),
    )


def _signature(folder: Path) -> Signature:
    """Names, sizes and times of the files of a folder: another value when any of them changed."""
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(_stamp(entry) for entry in entries))
    except OSError:
        return ()


def _stamp(entry: os.DirEntry[str]) -> tuple[str, int, int]:
    try:
        status = entry.stat()
    except OSError:
        return (entry.name, -1, -1)
    return (entry.name, status.st_size, status.st_mtime_ns)


def _inspect(candidate: Candidate, source: Source) -> CatalogModel:
    name = printable(candidate.id)
    try:
        folder = inspect_folder(candidate.path)
    except ModelUnavailable as error:
        method = _method_of_broken(candidate.path)
        reason = error.message.removeprefix(f'model "{printable(candidate.path.name)}": ')
        return CatalogModel(
            id=name,
            path=candidate.path,
            source=source,
            kind="drafter" if method else "main",
            method=method or "draft_model",
            problem=f'model "{name}": {reason}',
        )
    return CatalogModel(
        id=name,
        path=candidate.path,
        source=source,
        kind="drafter" if folder.drafter else "main",
        method=folder.drafter or "draft_model",
        size_bytes=folder.weight_bytes,
        parameter_count=folder.parameter_count,
        context=folder.max_position_embeddings,
        model_type=folder.model_type,
        bits=folder.bits,
        has_chat_template=folder.has_chat_template,
        config=folder.config,
        tensors=folder.tensors if folder.drafter else head_tensors(folder.config, folder.tensors),
    )


def _method_of_broken(folder: Path) -> str:
    """How a broken drafter would have drafted; "" for a broken main model, or where the config does not tell."""
    try:
        return drafter_method(read_object(folder / "config.json"))
    except ModelUnavailable:
        return ""

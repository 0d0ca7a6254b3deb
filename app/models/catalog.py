"""Finds, checks and lists the models on this disk, each with its problem if it has one.

Models lie in flat folders, in `organisation/name` folders and in the Hugging Face cache. At most `MAX_FOLDER_ENTRIES`
names of each folder are read; a missing or forbidden folder counts as empty and is not an error.
The catalog runs in the server process and is thread-safe. A model is inspected again only after a file in its folder
has changed. Folders are scanned at most every `refresh_seconds`, so that `/v1/models` is cheap. If a folder cannot be
read at present, the result of its previous inspection is listed.
"""

import contextlib
import difflib
import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from app.core.clock import Clock
from app.core.errors import DiskUnavailable, ModelNotFound, ModelUnavailable
from app.core.unit import DrafterSpecification
from app.models.drafters.formats import head_tensors
from app.models.drafters.methods import DRAFT_MODEL, MTP, drafter_method
from app.models.folder import Signature, missing_shards, read_folder, signature_of
from app.models.known_places import Source, known_places
from app.models.safe_files import MOMENTARY, RETRY_SECONDS, TensorInfo, printable, read_object
from app.models.tokenizer_file import Tokenizer, TokenizerCache

MAX_FOLDER_ENTRIES = 20_000
"""Maximum number of names read from one folder; the rest is ignored, so a folder of millions delays no request."""


@dataclass(frozen=True, slots=True)
class FolderCandidate:
    """A folder that looks like a model, under the id that clients use."""

    id: str
    path: Path


def candidates(root: Path, unreadable: list[Path]) -> list[FolderCandidate]:
    """Return models at `root` itself, one level below (`name`) and two levels below (`organisation/name`), by name.

    Models reached through a link are last: a folder is listed only once, preferably at its real path. Folders that
    cannot be read at present are added to `unreadable`.
    """
    real = Path(os.path.realpath(root))
    listed = list(_Search(unreadable).below(root))
    return sorted(
        listed, key=lambda candidate: real / candidate.path.relative_to(root) != Path(os.path.realpath(candidate.path))
    )


@dataclass(frozen=True, slots=True)
class _Search:
    unreadable: list[Path]

    def below(self, folder: Path, name: str = "", levels: int = 2) -> Iterator[FolderCandidate]:
        """Yield the model at `folder`, or those up to `levels` below it. Stray weights next to models are ignored."""
        if os.path.lexists(folder / "config.json"):
            yield FolderCandidate(name or folder.name, folder)
            return
        is_empty = True
        for child in self._folders(folder) if levels else ():
            child_name = f"{name}/{child.name}" if name else child.name
            is_repository = not name and child.name.startswith("models--")
            for candidate in self._snapshot(child) if is_repository else self.below(child, child_name, levels - 1):
                is_empty = False
                yield candidate
        if is_empty and self._looks_like_model(folder):
            yield FolderCandidate(name or folder.name, folder)

    def _snapshot(self, repository: Path) -> Iterator[FolderCandidate]:
        """Yield the snapshot that `refs/main` of a `models--organisation--name` folder names; if that lacks weights,
        the newest one that has all, else any: an interrupted download of a newer commit moves `refs/main`."""
        snapshots = repository / "snapshots"
        try:
            revision = (repository / "refs" / "main").read_text("ascii").strip()
        except (OSError, ValueError):
            revision = ""
        main, folders = snapshots / revision, sorted(self._folders(snapshots), key=_modified, reverse=True)
        ordered = [main, *folders] if main in folders else folders
        tests = (self._is_whole, self._weights, self._looks_like_model)
        folder = next((folder for test in tests for folder in ordered if test(folder)), None)
        if folder is not None:
            yield FolderCandidate("/".join(repository.name.split("--")[1:]), folder)

    def _looks_like_model(self, folder: Path) -> bool:
        """Return whether a folder has a config, or only safetensors weights (listed as broken); GGUF does not count."""
        return os.path.lexists(folder / "config.json") or bool(self._weights(folder))

    def _is_whole(self, folder: Path) -> bool:
        return bool(weights := self._weights(folder)) and not missing_shards(weights)

    def _weights(self, folder: Path) -> list[str]:
        return [name for name, _ in self._entries(folder) if name.endswith(".safetensors") and not name.startswith(".")]

    def _folders(self, folder: Path) -> list[Path]:
        names = (name for name, is_folder in self._entries(folder) if is_folder and not name.startswith("."))
        return [folder / name for name in sorted(names)]

    def _entries(self, folder: Path) -> list[tuple[str, bool]]:
        """List the names in a folder, each with whether it is a folder."""
        try:
            with os.scandir(folder) as entries:
                return [(entry.name, self._is_folder(entry)) for entry in itertools.islice(entries, MAX_FOLDER_ENTRIES)]
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in MOMENTARY:
                self.unreadable.append(folder)
            return []

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        """Return whether `entry` is a folder, or a link to one."""
        try:
            return entry.is_dir()
        except OSError as error:  # concerns only this link
            if error.errno in MOMENTARY:
                self.unreadable.append(Path(entry.path))
            return False


def _modified(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


Kind = Literal["main", "drafter", "encoder"]
TOKENIZER_CACHE_FILE = "tokenizers.json"
"""Name of the file in `PACELINE_HOME` that caches facts about tokenizers."""


@dataclass(frozen=True)
class CatalogModel:
    """One model on disk. Numbers are 0 and names empty where the folder is broken or does not state them."""

    id: str
    path: Path
    source: Source
    drafter: str = ""
    """Method of a feature drafter; empty for a standalone model."""
    size_bytes: int = 0
    parameter_count: int = 0
    context: int = 0
    """The longest context in tokens that the config declares."""
    model_type: str = ""
    bits: int = 0
    has_chat_template: bool = False
    supports_reasoning: bool = False
    """Whether its template supports reasoning."""
    is_encoder: bool = False
    pooling: str = ""
    """Pooling of its embeddings: `mean`, `last`, `cls` or `encoders.UNKNOWN`; empty where the folder declares none."""
    reason: str = ""
    """Reason why it cannot be loaded, and the next action; empty when nothing is known to be wrong."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, compare=False, repr=False)
    """Tensors of a drafter; of a main model only those of the multi-token head inside its checkpoint, if it has one."""
    tokenizers: TokenizerCache = field(default_factory=TokenizerCache, compare=False, repr=False)

    @property
    def kind(self) -> Kind:
        """`drafter`: cannot run alone; `encoder`: makes embeddings and nothing else."""
        return "drafter" if self.drafter else "encoder" if self.is_encoder else "main"

    @property
    def method(self) -> str:
        """Method by which it drafts for another model."""
        return self.drafter or DRAFT_MODEL.name

    @property
    def problem(self) -> str:
        """Name and reason why it cannot be loaded, in one line; empty when nothing is known to be wrong."""
        return self.reason and f'model "{self.id}": {self.reason}'

    @property
    def reranks(self) -> bool:
        """Whether it was trained to rerank documents; only its name shows this: its config is its base model's."""
        return self.kind == "main" and self.model_type.startswith("qwen3") and "reranker" in self.id.lower()

    @property
    def as_draft(self) -> DrafterSpecification:
        """Specification from which the worker loads it as a drafter."""
        return DrafterSpecification(self.id, str(self.path), self.method)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer, as read from the folder's files."""
        return Tokenizer(self.path, self.tokenizers)

    @property
    def head(self) -> "CatalogModel | None":
        """The multi-token head inside this model's checkpoint, as a drafter with the same id; None without a head."""
        if self.drafter or not self.tensors:
            return None
        size = sum(tensor.size_bytes for tensor in self.tensors.values())
        return replace(self, drafter=MTP.name, size_bytes=size)


class FolderCatalog:
    """All models below the given folders, then below `roots`; of models with the same id, the first sound one.

    A thread scans the folders. After the first scan, a call waits at most twice `patience_seconds` for a disk that does
    not answer, and then returns the models of the last scan.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        roots: Sequence[tuple[Source, Path]] = (),
        *,
        tokenizers: TokenizerCache | None = None,
        refresh_seconds: float = 2.0,
        wait_seconds: float = 0.5,
        patience_seconds: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._folders = tuple(folders)
        self._roots = tuple(roots)
        self._tokenizers = tokenizers or TokenizerCache()
        self._tokenizer_thread: threading.Thread | None = None
        self._is_complete = True
        self._refresh_seconds = refresh_seconds
        self._wait_seconds = wait_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._scanned_at: float | None = None
        self._scan_thread: threading.Thread | None = None
        self._models: dict[str, CatalogModel] | None = None
        self._inspected: dict[tuple[Source, Path], tuple[Signature, CatalogModel]] = {}

    def models(self) -> tuple[CatalogModel, ...]:
        """Return all models sorted by id, broken ones included; never raises for the contents of a folder."""
        patience = None if self._models is None else self._patience_seconds
        if self._scan_thread is not None:  # a scan that began earlier may miss recent changes
            self._scan_thread.join(patience)
        with self._lock:
            now, scanned_at = self._clock(), self._scanned_at
            is_due = scanned_at is None or now - scanned_at >= self._refresh_seconds
            if is_due and not (self._scan_thread is not None and self._scan_thread.is_alive()):
                self._scanned_at = now  # set before the scan, so that a `refresh` during it causes another one
                thread = threading.Thread(target=self._scan, name="catalog", daemon=True)
                thread.start()
                self._scan_thread = thread  # set after the start: others join it without the lock
        if self._scan_thread is not None and (is_due or self._models is None):
            self._scan_thread.join(patience)
        return tuple((self._models or {}).values())

    def set_folders(self, folders: Sequence[Path]) -> None:
        """Replace the given folders, without waiting for a scan."""
        if self._folders != tuple(folders):
            self._folders = tuple(folders)
            self.refresh()

    def refresh(self) -> None:
        """Force a rescan at the next call, for example after a download or a deletion. Never waits."""
        self._scanned_at = None

    def find(self, id: str) -> CatalogModel:  # noqa: A002 - the name in the API
        """Return the model `id`, broken or not. Raises `ModelNotFound` with the nearest ids, or `DiskUnavailable`."""
        models, id = {model.id: model for model in self.models()}, printable(id)  # noqa: A001
        if id in models:
            return models[id]
        if not self._is_complete:
            message = "some model folders cannot be read at the moment: try again soon"
            raise DiskUnavailable(message, parameter="model", retry_after_seconds=RETRY_SECONDS)
        nearest = difflib.get_close_matches(id, models, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "`paceline ls` shows the models that are here"
        raise ModelNotFound(f'no model "{id}" on this computer; {hint}', parameter="model")

    def is_reading_tokenizers(self) -> bool:
        """Return whether tokenizers are still being read, without which drafters cannot be chosen.

        If any must be read, starts a thread that reads them, and waits up to `wait_seconds` for it.
        """
        pending = [model.tokenizer for model in self.models() if not (model.problem or model.tokenizer.is_cached)]
        if not pending:
            return False
        with self._lock:
            if self._tokenizer_thread is None or not self._tokenizer_thread.is_alive():
                self._tokenizer_thread = threading.Thread(target=_read_facts, args=(pending,), daemon=True)
                self._tokenizer_thread.start()
            tokenizer_thread = self._tokenizer_thread
        tokenizer_thread.join(self._wait_seconds)
        return tokenizer_thread.is_alive()

    def _scan(self) -> None:
        models: dict[str, CatalogModel] = {}
        identities: set[tuple[int, int] | Path] = set()
        inspected: dict[tuple[Source, Path], tuple[Signature, CatalogModel]] = {}
        unreadable: list[Path] = []
        given_folders: list[tuple[Source, Path]] = [("folder", folder) for folder in self._folders]
        for source, root in (*given_folders, *self._roots):
            for candidate in [*candidates(root, unreadable), *self._previously_found(source, unreadable)]:
                identity = _folder_identity(candidate.path)
                listed_model = models.get(printable(candidate.id))
                if (listed_model is not None and not listed_model.reason) or identity in identities:
                    continue
                identities.add(identity)
                inspected[source, candidate.path] = self._inspect_if_changed(candidate, source)
                model = inspected[source, candidate.path][1]
                if listed_model is None or not model.reason:
                    models[model.id] = model
        self._inspected, self._is_complete = inspected, not unreadable
        self._models = dict(sorted(models.items()))

    def _previously_found(self, source: Source, unreadable: Sequence[Path]) -> list[FolderCandidate]:
        """Return models found previously in folders that cannot be read at present."""
        previous = (
            (path, model) for (entry_source, path), (_, model) in self._inspected.items() if entry_source == source
        )
        return [
            FolderCandidate(model.id, path) for path, model in previous if any(map(path.is_relative_to, unreadable))
        ]

    def _inspect_if_changed(self, candidate: FolderCandidate, source: Source) -> tuple[Signature, CatalogModel]:
        """Inspect a model; return the previous result if its folder is unchanged or cannot be read at present."""
        previous = self._inspected.get((source, candidate.path))
        signature: Signature = ()
        with contextlib.suppress(OSError):
            signature = signature_of(candidate.path)
        if previous is not None and previous[0] == signature:
            return previous
        try:
            return signature, replace(_inspect(candidate, source), tokenizers=self._tokenizers)
        except DiskUnavailable as error:
            model = CatalogModel(printable(candidate.id), candidate.path, source, reason=error.message)
            return previous or ((), model)


def _read_facts(tokenizers: Sequence[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        with contextlib.suppress(ModelUnavailable, OSError):
            tokenizer.facts()


def default_catalog(
    model_folders: Sequence[Path],
    *,
    cache_folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    home: Path | None = None,
) -> FolderCatalog:
    """Return the catalog of `model_folders`, the Hugging Face cache, LM Studio's folders and the embedded models.

    Facts about tokenizers are cached in `cache_folder`.
    """
    home = home or Path.home()
    return FolderCatalog(
        [folder.expanduser() for folder in model_folders],
        known_places(environment, home),
        tokenizers=TokenizerCache(cache_folder / TOKENIZER_CACHE_FILE) if cache_folder is not None else None,
    )


def _folder_identity(folder: Path) -> tuple[int, int] | Path:
    """Return the identity of a folder: the same through links, and in any spelling if the file system ignores case."""
    try:
        status = folder.stat()
    except OSError:
        return folder
    return status.st_dev, status.st_ino


def _inspect(candidate: FolderCandidate, source: Source) -> CatalogModel:
    name = printable(candidate.id)
    try:
        folder = read_folder(candidate.path)
    except DiskUnavailable:
        raise
    except ModelUnavailable as error:
        method = _method_of_broken(candidate.path)
        return CatalogModel(name, candidate.path, source, drafter=method, reason=error.message)
    return CatalogModel(
        id=name,
        path=candidate.path,
        source=source,
        drafter=folder.drafter,
        size_bytes=folder.size_bytes,
        parameter_count=folder.parameter_count,
        context=folder.context,
        model_type=folder.model_type,
        bits=folder.bits,
        has_chat_template=folder.has_chat_template,
        supports_reasoning=folder.supports_reasoning,
        is_encoder=folder.is_encoder,
        pooling=folder.pooling,
        config=folder.config,
        tensors=folder.tensors if folder.drafter else head_tensors(folder.config, folder.tensors),
    )


def _method_of_broken(folder: Path) -> str:
    """Return the method of a broken drafter; "" for a broken main model, or where the config does not state it."""
    try:
        return drafter_method(read_object(folder / "config.json"))
    except ModelUnavailable:
        return ""

"""Searching the hub, and what a repository would cost before anything is fetched. Calls block: make them in a thread.

MLX repositories come first, then others whose architecture mlx-lm knows. Raises `HubProblem` with words for a person.
"""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from app.core.config_values import CONTEXT_KEYS, text_number
from app.core.drafters import drafter_method
from app.core.errors import HubProblem
from app.core.safe_files import printable
from app.hub.hub_files import ADDRESS, Broken, Contents, Hub, HubErrors, RepositoryFile, wanted_files

OTHER_NAMES = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
}
"""Model types that mlx-lm loads under another name."""


def is_loadable(model_type: str) -> bool:
    """Whether mlx-lm has an architecture for this model type; True when it cannot be told."""
    known = model_types()
    return not known or not model_type or OTHER_NAMES.get(model_type, model_type) in known


@functools.cache
def model_types() -> frozenset[str]:
    """Every architecture of the installed mlx-lm; empty when it is not installed."""
    found = importlib.util.find_spec("mlx_lm")
    if found is None or found.origin is None:
        return frozenset()
    return frozenset(path.stem for path in (Path(found.origin).parent / "models").glob("*.py"))


Sort = Literal["downloads", "likes", "updated"]
SORTS: Mapping[str, str] = {"downloads": "downloads", "likes": "likes", "updated": "lastModified"}
EXPANDED = ("author", "config", "downloads", "gated", "lastModified", "library_name", "likes", "tags")
PAGE = 30
MAX_QUERY = 200
MAX_CONFIG_BYTES = 1 << 20
SHOWN_TAGS = 6


@dataclass(frozen=True, slots=True)
class FoundRepository:
    """One repository in a list of results."""

    repository: str
    author: str
    downloads: int
    likes: int
    modified_at: float
    """Unix seconds; 0 when the hub does not tell."""
    gated: bool
    is_mlx: bool
    method: str
    """How it drafts when it is a drafter; empty for a model of its own."""
    model_type: str
    licence: str
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Details:
    """One repository at its present commit. Only `files` would be fetched."""

    repository: str
    commit: str
    files: tuple[tuple[str, int], ...]
    total_bytes: int
    weights_bytes: int
    gated: bool
    licence: str
    modified_at: float
    method: str
    model_type: str
    bits: int
    context: int
    loadable: bool


def search(hub: Hub, text: str, *, sort: Sort = "downloads", author: str = "") -> list[FoundRepository]:
    """The repositories whose names hold the words of `text`, MLX ones first, in each part by `sort`."""
    parameters: dict[str, Any] = {"sort": SORTS[sort], "limit": PAGE, "expand": list(EXPANDED)}
    text = ADDRESS.sub("", text.strip()).strip("/")[:MAX_QUERY]
    if text:
        parameters["search"] = text
    if author.strip():
        parameters["author"] = author.strip()[:MAX_QUERY]
    ours = [_found(each) for each in hub.listing({**parameters, "filter": ["mlx"]})]
    others = [_found(each) for each in hub.listing({**parameters, "filter": ["safetensors"]})] if text else []
    known = {each.repository for each in ours}
    rest = [each for each in others if each.repository not in known and (each.method or is_loadable(each.model_type))]
    return [*ours, *rest]


def inspect_repository(hub: Hub, repository: str, revision: str = "") -> Details:
    """Exact sizes, licence and kind of a repository, by one or two requests."""
    contents = hub.contents(repository, revision)
    files = wanted_files(repository, contents.files)
    config = _config(hub, contents, files)
    model_type = str(config.get("model_type") or "")
    quantisation = config.get("quantization") or config.get("quantization_config")
    method = drafter_method(config)
    return Details(
        repository=repository,
        commit=contents.commit,
        files=tuple((file.name, file.size_bytes) for file in files),
        total_bytes=sum(file.size_bytes for file in files),
        weights_bytes=sum(file.size_bytes for file in files if file.name.endswith(".safetensors")),
        gated=bool(contents.information.gated),
        licence=_licence(contents.information),
        modified_at=_modified(contents.information),
        method=method,
        model_type=printable(model_type),
        bits=text_number(quantisation if isinstance(quantisation, dict) else {}, "bits"),
        context=text_number(config, *CONTEXT_KEYS),
        loadable=bool(method) or is_loadable(model_type),
    )


def _found(information: Any) -> FoundRepository:
    config = information.config if isinstance(information.config, dict) else {}
    tags = [printable(str(tag)) for tag in information.tags or ()]
    return FoundRepository(
        repository=printable(str(information.id)),
        author=printable(str(information.author or str(information.id).partition("/")[0])),
        downloads=information.downloads or 0,
        likes=information.likes or 0,
        modified_at=_modified(information),
        gated=bool(information.gated),
        is_mlx="mlx" in tags or information.library_name == "mlx",
        method=drafter_method(config),
        model_type=printable(str(config.get("model_type") or "")),
        licence=_licence(information),
        tags=tuple(tag for tag in tags if ":" not in tag and tag not in {"mlx", "safetensors"})[:SHOWN_TAGS],
    )


def _config(hub: Hub, contents: Contents, files: tuple[RepositoryFile, ...]) -> Mapping[str, Any]:
    """`config.json` when it may be read; else the little that the hub tells of it."""
    told = contents.information.config
    little: Mapping[str, Any] = told if isinstance(told, dict) else {}
    file = next((file for file in files if file.name == "config.json"), None)
    if file is None or file.size_bytes > MAX_CONFIG_BYTES:
        return little
    content = bytearray()
    try:
        for _, chunk in hub.chunks(contents.repository, contents.commit, file, 0):
            content += chunk
            if len(content) > MAX_CONFIG_BYTES:
                return little
        found = msgspec.json.decode(content)
    except (*HubErrors, Broken, HubProblem, msgspec.MsgspecError, ValueError, RecursionError):
        return little
    return found if isinstance(found, dict) else little


def _licence(information: Any) -> str:
    card = information.card_data
    told = card.get("license") if card is not None else None
    tagged = next((tag.partition(":")[2] for tag in information.tags or () if str(tag).startswith("license:")), "")
    return printable(told if isinstance(told, str) else str(tagged))


def _modified(information: Any) -> float:
    moment = information.last_modified
    return moment.timestamp() if moment is not None else 0.0

"""Searches the hub, and inspects a repository before it is downloaded. Calls block, so make them in a thread.

Search results list MLX repositories first, then others whose architecture mlx-lm supports. Calls raise `HubProblem`,
whose message is written for users. `published.json`, from the project's reference, contains what is known without a
request: drafters by main model, pairs to recommend, approximate sizes, and memory bandwidths of chips. Whether a
drafter fits is decided from its own files after the download.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from app.core.download import LARGEST_COUNT
from app.core.errors import HubProblem
from app.hub.hub_files import (
    ADDRESS,
    REPOSITORY,
    Contents,
    Hub,
    HubErrors,
    IncompleteStream,
    RepositoryFile,
    files_to_download,
)
from app.models.catalog import CatalogModel
from app.models.config_values import stated_context, text_number
from app.models.drafters.methods import DRAFT_MODEL, MTP, drafter_method
from app.models.encoders import ENCODERS
from app.models.safe_files import printable

MODEL_TYPE_ALIASES = {
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
    """Return whether mlx-lm or Paceline has an architecture for this model type; True if that is unknown."""
    known = model_types()
    return not known or not model_type or MODEL_TYPE_ALIASES.get(model_type, model_type) in known | ENCODERS


@functools.cache
def model_types() -> frozenset[str]:
    """Return every architecture of the installed mlx-lm; empty when it is not installed."""
    specification = importlib.util.find_spec("mlx_lm")
    if specification is None or specification.origin is None:
        return frozenset()
    return frozenset(path.stem for path in (Path(specification.origin).parent / "models").glob("*.py"))


Sort = Literal["downloads", "likes", "updated"]
SORTS: Mapping[str, str] = {"downloads": "downloads", "likes": "likes", "updated": "lastModified"}
EXPANDED_FIELDS = ("author", "config", "downloads", "gated", "lastModified", "library_name", "likes", "tags")
PAGE_SIZE = 30
MAX_QUERY_CHARACTERS = 200
MAX_CONFIG_BYTES = 1 << 20
MAX_TAGS = 6


@dataclass(frozen=True, slots=True)
class FoundRepository:
    """One repository in a list of results."""

    repository: str
    author: str
    downloads: int
    likes: int
    modified_at: float
    """Unix seconds; 0 when unknown."""
    gated: bool
    is_mlx: bool
    method: str
    """Method of a feature drafter; empty for a standalone model."""
    model_type: str
    licence: str
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Details:
    """One repository at its current commit; `files` are those that a download would fetch."""

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
    """Find repositories whose names contain the words of `text`: MLX ones, then others, both sorted by `sort`."""
    parameters: dict[str, Any] = {"sort": SORTS[sort], "limit": PAGE_SIZE, "expand": list(EXPANDED_FIELDS)}
    text = ADDRESS.sub("", text.strip()).strip("/")[:MAX_QUERY_CHARACTERS]
    if text:
        parameters["search"] = text
    if author.strip():
        parameters["author"] = author.strip()[:MAX_QUERY_CHARACTERS]
    mlx_results = _list_repositories(hub, {**parameters, "filter": ["mlx"]})
    other_results = _list_repositories(hub, {**parameters, "filter": ["safetensors"]}) if text else []
    mlx_names = {result.repository for result in mlx_results}
    remaining = [
        result
        for result in other_results
        if result.repository not in mlx_names and (result.method or is_loadable(result.model_type))
    ]
    return [*mlx_results, *remaining]


def inspect_repository(hub: Hub, repository: str, revision: str = "") -> Details:
    """Fetch exact sizes, licence and kind of a repository, with one or two requests."""
    contents = hub.contents(repository, revision)
    files = files_to_download(repository, contents.files)
    config = _config(hub, repository, contents, files)
    model_type = str(config.get("model_type") or "")
    quantisation = config.get("quantization") or config.get("quantization_config")
    method = drafter_method(config)
    return Details(
        repository=repository,
        commit=contents.commit,
        files=tuple((file.name, file.size_bytes) for file in files),
        total_bytes=sum(file.size_bytes for file in files),
        weights_bytes=sum(file.size_bytes for file in files if file.name.endswith(".safetensors")),
        gated=bool(contents.model_info.gated),
        licence=_licence(contents.model_info),
        modified_at=_modified(contents.model_info),
        method=method,
        model_type=printable(model_type),
        bits=text_number(quantisation if isinstance(quantisation, dict) else {}, "bits"),
        context=stated_context(config),
        loadable=bool(method) or is_loadable(model_type),
    )


def _list_repositories(hub: Hub, parameters: Mapping[str, Any]) -> list[FoundRepository]:
    """List one page of results, without those whose repository name is invalid."""
    results = (_found_repository(model_info) for model_info in hub.list_models(parameters))
    return [result for result in results if REPOSITORY.fullmatch(result.repository)]


def _found_repository(model_info: Any) -> FoundRepository:
    config = model_info.config if isinstance(model_info.config, dict) else {}
    tags = _tags(model_info)
    return FoundRepository(
        repository=printable(str(model_info.id)),
        author=printable(str(model_info.author or str(model_info.id).partition("/")[0])),
        downloads=_count(model_info.downloads),
        likes=_count(model_info.likes),
        modified_at=_modified(model_info),
        gated=bool(model_info.gated),
        is_mlx="mlx" in tags or model_info.library_name == "mlx",
        method=drafter_method(config),
        model_type=printable(str(config.get("model_type") or "")),
        licence=_licence(model_info),
        tags=tuple(tag for tag in tags if ":" not in tag and tag not in {"mlx", "safetensors"})[:MAX_TAGS],
    )


def _config(hub: Hub, repository: str, contents: Contents, files: tuple[RepositoryFile, ...]) -> Mapping[str, Any]:
    """Return `config.json` if it is accessible, else the part of it that the hub reports."""
    declared = contents.model_info.config
    partial_config: Mapping[str, Any] = declared if isinstance(declared, dict) else {}
    file = next((file for file in files if file.name == "config.json"), None)
    if file is None or file.size_bytes > MAX_CONFIG_BYTES:
        return partial_config
    content = bytearray()
    try:
        for _, chunk in hub.chunks(repository, contents.commit, file, 0):
            content += chunk
            if len(content) > MAX_CONFIG_BYTES:
                return partial_config
        config = msgspec.json.decode(content)
    except (*HubErrors, IncompleteStream, HubProblem, msgspec.MsgspecError, ValueError, RecursionError):
        return partial_config
    return config if isinstance(config, dict) else partial_config


def _licence(model_info: Any) -> str:
    declared = getattr(model_info.card_data, "license", None)
    tagged = next((tag.partition(":")[2] for tag in _tags(model_info) if tag.startswith("license:")), "")
    return printable(declared) if isinstance(declared, str) else tagged


def _tags(model_info: Any) -> list[str]:
    return [printable(str(tag)) for tag in model_info.tags] if isinstance(model_info.tags, list) else []


def _count(reported: Any) -> int:
    """Return a count that the hub reports; 0 if it is invalid."""
    return reported if type(reported) is int and 0 <= reported <= LARGEST_COUNT else 0


def _modified(model_info: Any) -> float:
    moment = model_info.last_modified
    return moment.timestamp() if moment is not None else 0.0


BILLION = 1_000_000_000
CACHE_ALLOWANCE_BYTES = 1_500_000_000


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A drafter published on the hub. `size_bytes` is 0 where the reference does not state it.

    An `mtp` head without a `repository` lies inside the original checkpoint; most quantised copies lack it.
    """

    method: str
    repository: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A main model with suitable drafters, best first; without drafters if it is too small to gain from one."""

    main: str
    main_bytes: int
    strength: str
    """Code of the model's strength, as in the text keys `downloads.good_…`."""
    tokens_per_second: float
    """Estimated decoding speed without a drafter."""
    drafters: tuple[PublishedDrafter, ...]


_PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
SIZES_GB: Mapping[str, float] = _PUBLISHED["sizes_gb"]
FEATURE_DRAFTERS: tuple[tuple[str, str, str], ...] = tuple(map(tuple, _PUBLISHED["feature_drafters"]))
"""Feature drafters: start of the main model's name in lower case, method, repository."""
SMALL_MODELS: tuple[tuple[str, float, str], ...] = tuple(map(tuple, _PUBLISHED["small_models"]))
"""Small models by family, smallest first: start of the family's names, parameters in billions, repository."""
PAIRS: tuple[tuple[str, str, list[list[str]]], ...] = tuple(map(tuple, _PUBLISHED["pairs"]))
"""Pairs to recommend: main model, code of its strength, drafters with their methods, best first."""
BANDWIDTHS_GB: Mapping[str, float] = _PUBLISHED["bandwidths_gb"]
"""Memory bandwidth by chip, in gigabytes per second, as Apple states it; of two variants, the slower one's."""
NEWER_CHIP_GB = BANDWIDTHS_GB["M5"]
"""Memory bandwidth, in gigabytes per second, assumed for an Apple chip that is not listed."""
BANDWIDTH_SHARE = 0.7
"""Share of the memory bandwidth that a GPU reaches while it decodes."""
CPU_GB = 0.65
"""Gigabytes of 4-bit weights per second that mlx multiplies on one CPU core, measured on a server."""
COMFORTABLE_SPEED = 15.0
"""Tokens per second at which an answer is generated faster than a person reads it."""

MAX_DRAFT_SIZES = ((30.0, 7.0), (13.0, 3.0), (6.5, 1.3))
"""Billions of parameters: minimum of a main model, maximum of a draft model that speeds it up; none below 6.5."""

MTP_MODEL_TYPES = ("qwen3_next", "qwen3_5", "deepseek_v3")
"""Prefixes of the model types whose original checkpoints contain a multi-token head that can run here."""

RECOMMENDED_PAIRS = 3


def published_for(main: CatalogModel) -> list[PublishedDrafter]:
    """Return the known drafters of a main model on disk, best method first; empty for a drafter or unknown model."""
    if main.kind != "main":
        return []
    name = _normalized_name(main.id)
    published = [
        _published_drafter(method, draft) for target, method, draft in FEATURE_DRAFTERS if _is_drafter_for(target, name)
    ]
    if main.head is None and main.model_type.startswith(MTP_MODEL_TYPES):
        published.append(PublishedDrafter(MTP.name, ""))
    limit = next(
        (max_size for min_size, max_size in MAX_DRAFT_SIZES if main.parameter_count >= min_size * BILLION), 0.0
    )
    small_drafts = (draft for start, size, draft in SMALL_MODELS if name.startswith(start) and size <= limit)
    return [*published, *(_published_drafter(DRAFT_MODEL.name, draft) for draft in small_drafts)]


def recommended(memory_bytes: int, chip: str) -> list[Pair]:
    """Return at most `RECOMMENDED_PAIRS` pairs that fit into `memory_bytes`: first pairs of at least
    `COMFORTABLE_SPEED`, largest first, then slower ones, fastest first."""

    def fits(main: str, draft_bytes: int) -> bool:
        return round((_size(main) + draft_bytes) * 1.25) + CACHE_ALLOWANCE_BYTES <= memory_bytes

    pairs = []
    for main, strength, published in PAIRS:
        drafters = (_published_drafter(method, repository) for repository, method in published)
        fitting = tuple(drafter for drafter in drafters if fits(main, drafter.size_bytes))
        if fitting or (not published and fits(main, 0)):
            pairs.append(Pair(main, _size(main), strength, expected_speed(_size(main), chip), fitting))
    is_slow = {pair.main: pair.tokens_per_second < COMFORTABLE_SPEED for pair in pairs}
    pairs.sort(key=lambda pair: (is_slow[pair.main], pair.main_bytes if is_slow[pair.main] else -pair.main_bytes))
    return pairs[:RECOMMENDED_PAIRS]


def expected_speed(weights_bytes: int, chip: str) -> float:
    """Return the tokens per second to expect of plain decoding, which reads all weights for each token."""
    maker, _, name = chip.partition(" ")
    rate_gb = BANDWIDTHS_GB.get(name, NEWER_CHIP_GB) * BANDWIDTH_SHARE if maker == "Apple" else CPU_GB
    return rate_gb * 1e9 / weights_bytes


def _published_drafter(method: str, repository: str) -> PublishedDrafter:
    return PublishedDrafter(method, repository, _size(repository))


def _size(repository: str) -> int:
    return round(SIZES_GB.get(repository, 0.0) * 1e9)


def _is_drafter_for(target: str, name: str) -> bool:
    """Return whether `name` begins with all words of `target`: `qwen3-4b` fits `qwen3-4b-8bit`, not `qwen3-4bit`."""
    return name == target or name.startswith(f"{target}-")


def _normalized_name(model_id: str) -> str:
    """Return `llama-3.1-8b-instruct-4bit` for `mlx-community/Meta-Llama-3.1-8B-Instruct-4bit`."""
    name = model_id.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    return re.sub(r"^llama-?(?=3)", "llama-", name)

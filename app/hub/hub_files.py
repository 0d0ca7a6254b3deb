"""Access to the hub for downloads and searches: contents of a repository, bytes of a file from an offset on, the token.

It uses huggingface_hub, which imports its parts on first use, so that the server starts without waiting for them. If
the hub rejects the stored token, requests are repeated without it, which works for public repositories. The token is
sent only to the hub's own host, on routes built here: redirects to another host are followed without it.

Only files that a model folder needs are fetched, and only from its top level and its pooling folder: weights in other
folders are other formats of the same model. A path that tries to leave its folder makes the whole repository unsafe.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from app import __version__
from app.core.download import LARGEST_COUNT
from app.core.errors import HubProblem, InvalidRequest
from app.machine.own_files import read_regular_file, write_privately
from app.models.encoders import POOLING_FILE
from app.models.safe_files import printable

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

ALLOWED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
ADDRESS = re.compile(r"^https?://[^/]+/")
"""Prefix to remove from the pasted URL of a repository's page."""
REPOSITORY = re.compile(r"\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@ -]{0,199}")
MAX_FILES = 2_000
MAX_RESPONSE_BYTES = 64 << 20
"""Size limit, in bytes, of one decompressed response of the hub's API; 100,000 files take 25 MB."""
REFUSAL_HEADERS = ("X-Error-Code", "X-Error-Message")
PRIVATE_FILE_NAME = "hub_token"
TOKEN = re.compile(r"[A-Za-z0-9_.\-]{8,256}")
BUSY_STATUSES = frozenset({408, 425, 429})

Answer = TypeVar("Answer")
Origin = Literal["paceline", "hugging_face", "none"]
HubErrors = (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled)
"""Errors that a request to the hub may raise; `problem_of` converts them."""
MalformedResponseErrors = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors raised by parsing a response that is not in the hub's format."""

logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
logging.getLogger("httpx2").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """One file to fetch. `sha256` is known for large files, `blob_id` (git's SHA-1) for the others."""

    name: str
    size_bytes: int
    sha256: str = ""
    blob_id: str = ""


def checked_repository(text: str) -> str:
    """Return the `organisation/name` in a text that a user typed or pasted. Raises `InvalidRequest`."""
    name = ADDRESS.sub("", text.strip()).removesuffix("/")
    if REPOSITORY.fullmatch(name) is None or ".." in name or "--" in name or name.endswith(".git"):
        raise InvalidRequest(
            f'"{printable(text)}" is not a repository name: give organisation/name', parameter="repository"
        )
    return name


def checked_revision(text: str) -> str:
    """Check a branch, tag or commit; empty stands for the main branch. Raises `InvalidRequest`."""
    if text and (REVISION.fullmatch(text) is None or ".." in text):
        raise InvalidRequest(f'"{printable(text)}" is not a revision: give branch, tag or commit', parameter="revision")
    return text


def files_to_download(repository: str, files: Iterable[RepositoryFile]) -> tuple[RepositoryFile, ...]:
    """Return files to fetch, smallest first. Raises `HubProblem` for an unsafe repository or one without weights."""
    all_files = list(files)
    for file in all_files:
        check_path(repository, file)
    well_named = [file for file in all_files if FILE_NAME.fullmatch(file.name) or POOLING_FILE.fullmatch(file.name)]
    allowed = [file for file in well_named if file.name.endswith(ALLOWED_SUFFIXES)]
    weights = [file for file in allowed if file.name.endswith(".safetensors")]
    loaded = [file for file in weights if file.name.startswith("model")] or weights
    if not weights:
        raise HubProblem("empty", repository)
    if len(allowed) > MAX_FILES:
        raise HubProblem("unsafe", repository, f"{len(allowed)} files")
    to_download = [file for file in allowed if file not in weights or file in loaded]
    if sum(file.size_bytes for file in to_download) > LARGEST_COUNT:
        raise HubProblem("unsafe", repository, "the size of all files")
    _check_unique(repository, to_download)
    return tuple(sorted(to_download, key=lambda file: (file.size_bytes, file.name)))


def check_path(repository: str, file: RepositoryFile) -> None:
    """Raise `HubProblem` for a path that could leave its folder or mislead a person, or for an impossible size."""
    parts = file.name.split("/")
    escapes = "\\" in file.name or not file.name.isprintable() or any(part in {"", ".", ".."} for part in parts)
    if escapes or re.match(r"[A-Za-z]:", file.name):
        raise HubProblem("unsafe", repository, printable(file.name))
    if not 0 <= file.size_bytes <= LARGEST_COUNT:
        raise HubProblem("unsafe", repository, f"the size of {printable(file.name)}")


def _check_unique(repository: str, files: Iterable[RepositoryFile]) -> None:
    """Refuse a file without a hash, and names that differ by case only, which are one file on a Mac's disk."""
    names: set[str] = set()
    for file in files:
        if file.name.casefold() in names:
            raise HubProblem("unsafe", repository, printable(file.name))
        names.add(file.name.casefold())
        if not (SHA256.fullmatch(file.sha256) or COMMIT.fullmatch(file.blob_id)):
            raise HubProblem("unsafe", repository, f"{printable(file.name)} has no hash")


class IncompleteStream(Exception):
    """Error of a stream that ended before its file was complete."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a repository at one commit."""

    commit: str
    files: tuple[RepositoryFile, ...]
    model_info: Any
    """huggingface_hub's ModelInfo."""


@dataclass(frozen=True, slots=True)
class XetFile:
    """File in the hub's chunk store (Xet), with the URL and headers that request a token for the store."""

    hash: str
    token_address: str
    headers: dict[str, str]


class Hub:
    """One endpoint and one token; `endpoint` None is the public hub, or HF_ENDPOINT. Calls block.

    All responses together must arrive within `response_seconds`: a hub that sends a byte now and then would never
    exceed the read timeout.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        token: str | None = None,
        read_timeout_seconds: float = 30,
        response_seconds: float = math.inf,
    ) -> None:
        self._endpoint = _address(endpoint or constants.ENDPOINT)
        self._token = token or None
        self._timeout = httpx2.Timeout(read_timeout_seconds, connect=min(15.0, read_timeout_seconds))
        self._deadline = time.monotonic() + response_seconds

    def contents(self, repository: str, revision: str = "") -> Contents:
        """Fetch the list of a repository's files, with sizes and hashes, in one request. Raises `HubProblem`."""
        path = f"/{repository}/revision/{quote(revision, safe='')}" if revision else f"/{repository}"
        model_info = self.request(lambda: _model_info(self._get_json(path, {"blobs": True})), repository)
        commit = str(model_info.sha or "")
        if COMMIT.fullmatch(commit) is None:
            raise HubProblem("hub_error", repository, "no commit")
        files = tuple(_repository_file(sibling) for sibling in model_info.siblings or ())
        return Contents(commit, files, model_info)

    def request(self, call: Callable[[], Answer], repository: str = "") -> Answer:
        """Run `call`, which sends a request and parses the response. Raises `HubProblem`."""
        try:
            return self._retry_without_token(call)
        except HubErrors as error:
            raise problem_of(error, repository) from None
        except ImportError:  # for a SOCKS proxy, httpx2 needs another package
            raise HubProblem("proxy", repository) from None
        except MalformedResponseErrors:  # the sign-in page of a hotel's network or a proxy, or a hostile hub
            raise HubProblem("offline", repository, "the response is not from the hub") from None

    def chunks(self, repository: str, commit: str, file: RepositoryFile, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield a file as (position, bytes), from `offset` on, or from 0 if the hub ignores the requested range.

        Raises `HubErrors` or `IncompleteStream`, which `problem_of` converts.
        """
        url = huggingface_hub.hf_hub_url(repository, file.name, revision=commit, endpoint=self._endpoint)
        try:
            yield from self._stream(url, offset)
        except HfHubHTTPError as error:
            if not self._drop_stale_token(error):
                raise
            yield from self._stream(url, offset)

    def list_models(self, parameters: Mapping[str, Any]) -> "list[ModelInfo]":
        """Fetch one page of `/api/models`. Raises `HubProblem`; not retried, because a person is waiting."""

        return self.request(lambda: [_model_info(entry) for entry in self._get_json("", parameters)])

    def find_in_xet(self, repository: str, commit: str, file: RepositoryFile) -> XetFile | None:
        """Find a file in the hub's chunk store; None if the store does not have it.

        The response also names a URL that issues store tokens. That URL is ignored: it would receive the hub's token.
        """
        url = huggingface_hub.hf_hub_url(repository, file.name, revision=commit, endpoint=self._endpoint)

        def request() -> httpx2.Response:
            response = huggingface_hub.get_session().head(
                url, headers=self._headers(), timeout=self._timeout, follow_redirects=False
            )
            _check_status(response)
            return response

        xet_hash = self._retry_without_token(request).headers.get(constants.HUGGINGFACE_HEADER_X_XET_HASH, "")
        route = f"{self._endpoint}/api/models/{repository}/xet-read-token/{commit}"
        return XetFile(xet_hash, route, self._headers()) if SHA256.fullmatch(xet_hash) else None

    def _get_json(self, path: str, parameters: Mapping[str, Any]) -> Any:
        """Fetch JSON from a path below `/api/models`. Raises `ValueError` if the response is not JSON, or too long."""
        url, content = f"{self._endpoint}/api/models{path}", bytearray()
        with huggingface_hub.get_session().stream(
            "GET", url, params=dict(parameters), headers=self._headers(), timeout=self._timeout
        ) as response:
            _check_status(response)
            for chunk in self._read_chunks(response):
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise ValueError("too long")
        return json.loads(content)

    def _stream(self, url: str, offset: int) -> Iterator[tuple[int, bytes]]:
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with huggingface_hub.get_session().stream("GET", url, headers=headers, timeout=self._timeout) as response:
            _check_status(response)
            position = offset if response.status_code == httpx2.codes.PARTIAL_CONTENT else 0
            if position and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise IncompleteStream
            for chunk in self._read_chunks(response):
                yield position, chunk
                position += len(chunk)

    def _read_chunks(self, response: httpx2.Response) -> Iterator[bytes]:
        for chunk in response.iter_bytes():
            if time.monotonic() > self._deadline:
                raise httpx2.ReadTimeout("its answer takes too long", request=response.request)
            yield chunk

    def _retry_without_token(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except HfHubHTTPError as error:
            first_error = error
            if not self._drop_stale_token(error):
                raise
        try:
            return call()
        except HfHubHTTPError:
            raise first_error from None

    def _drop_stale_token(self, error: HfHubHTTPError) -> bool:
        """Drop a token that the hub rejects, which it does even for public repositories; return whether to retry."""
        if self._token is None or error.response.status_code != httpx2.codes.UNAUTHORIZED:
            return False
        self._token = None
        return True

    def _headers(self) -> dict[str, str]:
        authorization = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return {"user-agent": f"paceline/{__version__}", **authorization}


def _check_status(response: httpx2.Response) -> None:
    """Raise huggingface_hub's error for an error status, from its headers alone: the body may be anything."""
    headers = {name: response.headers[name] for name in REFUSAL_HEADERS if name in response.headers}
    huggingface_hub.hf_raise_for_status(
        httpx2.Response(response.status_code, headers=headers, request=response.request)
    )


def problem_of(error: Exception, repository: str = "") -> HubProblem:
    """Convert an error of the hub or network to a `HubProblem`, which may name the host, but never a path or token."""
    if isinstance(error, GatedRepoError):
        return HubProblem("gated", repository)
    if isinstance(error, HfHubHTTPError):
        return HubProblem(_reason(error), repository)
    if isinstance(error, httpx2.HTTPError | OfflineModeIsEnabled | IncompleteStream):
        return HubProblem("offline", repository, _cause(error))
    return HubProblem("interrupted", repository, type(error).__name__)


def _cause(error: Exception) -> str:
    """Describe which host did not answer, and why."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    message = str(error) or type(error).__name__
    try:
        return f"{error.request.url.host}: {message}" if isinstance(error, httpx2.RequestError) else message
    except RuntimeError:  # it failed before there was a request
        return message


def _reason(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in BUSY_STATUSES:
        return "busy"
    if "Invalid credentials" in str(error.response.headers.get("X-Error-Message")):
        return "refused"
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        return "not_found"
    by_status = {401: "refused", 403: "refused", 404: "not_found", 410: "not_found"}
    return by_status.get(status, "hub_error")


def _model_info(entry: Mapping[str, Any]) -> "ModelInfo":
    return huggingface_hub.ModelInfo(**{"siblings": None, **entry})  # type: ignore[no-untyped-call]


def _repository_file(sibling: Any) -> RepositoryFile:
    lfs_file = sibling.lfs
    size = lfs_file.size if lfs_file is not None else sibling.size
    return RepositoryFile(
        name=str(sibling.rfilename),
        size_bytes=size if type(size) is int else -1,
        sha256=str(lfs_file.sha256) if lfs_file is not None else "",
        blob_id=str(sibling.blob_id or "") if lfs_file is None else "",
    )


class HubToken:
    """The hub token, from a private file in `PACELINE_HOME` or from the place where Hugging Face's tools store theirs.

    A token is sent only to the hub for which it was stored, so that a changed hub address does not disclose it to a
    stranger. An empty `endpoint` is the public hub, or the one in HF_ENDPOINT.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / PRIVATE_FILE_NAME

    def read(self, endpoint: str) -> str:
        """Return the token for this endpoint; empty if there is none."""
        return self._stored(endpoint) or _hugging_face_token(endpoint)

    def origin(self, endpoint: str) -> Origin:
        """Return the origin of the token for this endpoint."""
        if self._stored(endpoint):
            return "paceline"
        return "hugging_face" if _hugging_face_token(endpoint) else "none"

    def write(self, token: str, endpoint: str) -> None:
        """Store a token for this endpoint; an empty one removes it. Raises `InvalidRequest`, never with the token."""
        token = token.strip()
        if not token:
            self._path.unlink(missing_ok=True)
            return
        if TOKEN.fullmatch(token) is None:
            raise InvalidRequest("That is not a token: copy one whole from the hub's settings page.", parameter="token")
        write_privately(self._path, f"{token}\n{_address(endpoint)}\n".encode("ascii"))

    def _stored(self, endpoint: str) -> str:
        try:
            token, _, url = read_regular_file(self._path).decode("ascii").strip().partition("\n")
        except (OSError, ValueError):
            return ""
        return token if TOKEN.fullmatch(token) and url == _address(endpoint) else ""


def _hugging_face_token(endpoint: str) -> str:
    """Return the token of Hugging Face's tools if `endpoint` is the hub that they use; else ""."""
    return (huggingface_hub.get_token() or "") if _address(endpoint) in {"", _address(constants.ENDPOINT)} else ""


def _address(endpoint: str) -> str:
    return endpoint.rstrip("/")

"""The hub as downloads and searches see it: what a repository holds, and the bytes of one file from an offset on.

Built on huggingface_hub, of which a part is imported when it is first used: a server that starts does not wait for it.
A stored token that the hub no longer accepts is left out when the repository is public. The token goes to the hub's own
host only: redirects to another one are followed without it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from app import __version__
from app.core.errors import HubProblem
from app.hub.repository import COMMIT, RepositoryFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

INFO_SECONDS = 20.0
PATIENT = frozenset({408, 425, 429})

Answer = TypeVar("Answer")
HubErrors = (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled)
"""What a call of the hub may raise; `problem_of` names it."""

logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
logging.getLogger("httpx2").setLevel(logging.WARNING)


class Broken(Exception):
    """The stream ended before the file did."""


@dataclass(frozen=True, slots=True)
class Contents:
    """One repository at one commit. `gated` and `private` as the hub tells them."""

    repository: str
    commit: str
    files: tuple[RepositoryFile, ...]
    information: Any
    """huggingface_hub's ModelInfo."""


class Hub:
    """One endpoint and one token; `endpoint` None is the public hub, or HF_ENDPOINT. Calls block."""

    def __init__(self, endpoint: str | None = None, token: str | None = None, read_timeout_seconds: float = 30) -> None:
        self._endpoint = endpoint
        self._token = token or None
        self._timeout = httpx2.Timeout(read_timeout_seconds, connect=min(15.0, read_timeout_seconds))

    def contents(self, repository: str, revision: str = "") -> Contents:
        """Every file of a repository with sizes and hashes, in one request. Raises `HubProblem`."""

        def ask(api: "HfApi") -> Any:
            return api.model_info(repository, revision=revision or None, files_metadata=True, timeout=INFO_SECONDS)

        information = self.ask(ask, repository)
        commit = str(information.sha or "")
        if COMMIT.fullmatch(commit) is None:
            raise HubProblem("hub_error", repository, "no commit")
        files = tuple(_file(sibling) for sibling in information.siblings or ())
        return Contents(repository, commit, files, information)

    def ask(self, call: "Callable[[HfApi], Answer]", repository: str = "") -> Answer:
        """One call of huggingface_hub. Raises `HubProblem`."""
        try:
            return self._without_stale_token(lambda: call(self._api()))
        except HubErrors as error:
            raise problem_of(error, repository) from None
        except (ValueError, TypeError, KeyError):  # no JSON: the sign-in page of a hotel's network, or a proxy's
            raise HubProblem("offline", repository, "the answer is not the hub's") from None

    def chunks(self, repository: str, commit: str, file: RepositoryFile, offset: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of a file as (position, bytes), from `offset` on, or from 0 where the hub will not start there.

        Raises what huggingface_hub and httpx2 raise; `problem_of` names it.
        """
        url = huggingface_hub.hf_hub_url(repository, file.name, revision=commit, endpoint=self._endpoint)
        try:
            yield from self._stream(url, offset)
        except HfHubHTTPError as error:
            if not self._forget_token(error):
                raise
            yield from self._stream(url, offset)

    def listing(self, parameters: Mapping[str, Any]) -> "list[ModelInfo]":
        """One page of `/api/models`. Raises `HubProblem`; tried once, because a person waits for it."""

        def ask(api: "HfApi") -> "list[ModelInfo]":
            address, headers = f"{api.endpoint}/api/models", self._headers()
            response = huggingface_hub.get_session().get(
                address, params=dict(parameters), headers=headers, timeout=self._timeout
            )
            huggingface_hub.hf_raise_for_status(response)
            return [huggingface_hub.ModelInfo(**{"siblings": None, **each}) for each in response.json()]  # type: ignore[no-untyped-call]

        return self.ask(ask)

    def stored(self, repository: str, commit: str, file: RepositoryFile) -> tuple[Any, dict[str, str]]:
        """Where the hub's chunk store has a file, and the headers to ask there; None when it is not in it."""
        url = huggingface_hub.hf_hub_url(repository, file.name, revision=commit, endpoint=self._endpoint)
        metadata = self._without_stale_token(
            lambda: huggingface_hub.get_hf_file_metadata(
                url, token=self._token or False, endpoint=self._endpoint, timeout=INFO_SECONDS
            )
        )
        return metadata.xet_file_data, self._headers()

    def _stream(self, url: str, offset: int) -> Iterator[tuple[int, bytes]]:
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with huggingface_hub.get_session().stream("GET", url, headers=headers, timeout=self._timeout) as response:
            huggingface_hub.hf_raise_for_status(response)
            position = offset if response.status_code == httpx2.codes.PARTIAL_CONTENT else 0
            if position and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise Broken
            for chunk in response.iter_bytes():
                yield position, chunk
                position += len(chunk)

    def _without_stale_token(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except HfHubHTTPError as error:
            refused = error
            if not self._forget_token(error):
                raise
        try:
            return call()
        except HfHubHTTPError:
            raise refused from None

    def _forget_token(self, error: HfHubHTTPError) -> bool:
        """Whether to ask once more, as nobody: the hub refuses even public repositories to a token it does not know."""
        if self._token is None or error.response.status_code != httpx2.codes.UNAUTHORIZED:
            return False
        self._token = None
        return True

    def _api(self) -> "HfApi":
        return huggingface_hub.HfApi(endpoint=self._endpoint, token=self._token or False, library_name="paceline")

    def _headers(self) -> dict[str, str]:
        authorization = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return {"user-agent": f"paceline/{__version__}", **authorization}


def problem_of(error: Exception, repository: str = "") -> HubProblem:
    """An error of the hub or of the network in our words, with the host that did not answer; never a path or token."""
    if isinstance(error, GatedRepoError):
        return HubProblem("gated", repository)
    if isinstance(error, HfHubHTTPError):
        return HubProblem(_reason(error), repository)
    if isinstance(error, httpx2.HTTPError | OfflineModeIsEnabled | Broken):
        return HubProblem("offline", repository, _cause(error))
    return HubProblem("interrupted", repository, type(error).__name__)


def _cause(error: Exception) -> str:
    """Which host did not answer, and why."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    why = str(error) or type(error).__name__
    try:
        return f"{error.request.url.host}: {why}" if isinstance(error, httpx2.RequestError) else why
    except RuntimeError:  # it never got as far as a request
        return why


def _reason(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in PATIENT:
        return "busy"
    if "Invalid credentials" in str(error.response.headers.get("X-Error-Message")):
        return "refused"
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        return "not_found"
    by_status = {401: "refused", 403: "refused", 404: "not_found", 410: "not_found"}
    return by_status.get(status, "hub_error")


def _file(sibling: Any) -> RepositoryFile:
    large = sibling.lfs
    size = large.size if large is not None else sibling.size
    return RepositoryFile(
        name=str(sibling.rfilename),
        size_bytes=size if isinstance(size, int) else -1,
        sha256=str(large.sha256) if large is not None else "",
        blob_id=str(sibling.blob_id or "") if large is None else "",
    )

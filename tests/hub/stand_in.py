"""A hub on this computer: a real HTTP server that answers huggingface_hub as the public one does, and fails on demand.

It implements what downloads and searches use: `/api/models`, a repository's information with sizes and hashes, and
files with HEAD, GET and Range. `Faults` says what goes wrong, and how often.
"""

import functools
import gzip
import hashlib
import json
import socket
import threading
import urllib.parse
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INVALID_TOKEN = "Invalid credentials in Authorization header"
LARGE_BYTES = 4096
"""Size, in bytes, from which files are reported as LFS files, with their SHA-256."""


@dataclass
class Repository:
    """One repository at one commit."""

    id: str
    files: dict[str, bytes]
    tags: list[str] = field(default_factory=lambda: ["mlx", "safetensors", "license:apache-2.0"])
    downloads: int = 100
    likes: int = 10
    modified: str = "2026-10-01T00:00:00.000Z"
    gated: Any = False
    private: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    library: str = "mlx"
    lies: dict[str, bytes] = field(default_factory=dict)
    """Bytes sent instead of a file's true ones; the repository's information has the true hashes and sizes."""
    xet: frozenset[str] = frozenset()
    """Files that are reported to be in the chunk store, which never delivers them."""
    other_names: dict[str, str] = field(default_factory=dict)
    """File names that are reported instead of the true ones, by true name."""
    other_facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Facts that are reported instead of the true ones, by file name."""
    other_information: dict[str, Any] = field(default_factory=dict)
    """Facts about the repository that are reported instead of the true ones."""
    elsewhere: str = ""
    """Address of another hub to which requests for files are redirected."""

    @property
    def commit(self) -> str:
        """Hash of the commit; it changes with any file, as git's does."""
        return _sha1(repr([(name, digest(self.files[name])) for name in sorted(self.files)]).encode())

    def information(self, *, blobs: bool = False) -> dict[str, Any]:
        """Return the information that `/api/models/{id}` reports."""
        return {
            "_id": _sha1(self.id.encode())[:24],
            "id": self.id,
            "modelId": self.id,
            "author": self.id.partition("/")[0],
            "sha": self.commit,
            "lastModified": self.modified,
            "createdAt": self.modified,
            "private": self.private,
            "gated": self.gated,
            "disabled": False,
            "downloads": self.downloads,
            "likes": self.likes,
            "tags": self.tags,
            "library_name": self.library,
            "pipeline_tag": "text-generation",
            "config": dict(self.config),
            "cardData": {"license": next((tag[8:] for tag in self.tags if tag.startswith("license:")), None)},
            "siblings": [self._sibling(name, blobs=blobs) for name in self.files],
            **self.other_information,
        }

    def _sibling(self, name: str, *, blobs: bool) -> dict[str, Any]:
        content = self.files[name]
        facts: dict[str, Any] = {"rfilename": self.other_names.get(name, name)}
        if blobs:
            facts |= {"size": len(content), "blobId": _sha1(b"blob %d\0" % len(content) + content)}
            if len(content) >= LARGE_BYTES:
                facts["lfs"] = {"size": len(content), "sha256": digest(content), "pointerSize": 134}
        return facts | self.other_facts.get(name, {})


@dataclass
class Faults:
    """Faults to come; a request for a file uses up an entry of a queue, an API request one of `api` or `answers`."""

    cuts: deque[int] = field(default_factory=deque)
    """Number of bytes after which the connection is cut."""
    stalls: deque[int] = field(default_factory=deque)
    """Number of bytes after which the response stalls until `release` is set."""
    statuses: deque[int] = field(default_factory=deque)
    api: deque[int] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    """Bodies of the API's next answers, whatever the request; they are sent compressed."""
    refusal: bytes = b""
    """Body of refusals, instead of a JSON object with a message."""
    redirect: str = ""
    """Address of a hub to which all requests are redirected."""
    token_route: str = ""
    """Address that is reported for the chunk store's token, instead of the true one."""
    held: set[str] = field(default_factory=set)
    """Repositories whose files wait for `release`."""
    searches_hang: bool = False
    """Whether searches wait for `release`."""
    searches_drip: bool = False
    """Whether a search sends one byte after another until `release` is set."""
    xet_hangs: bool = False
    """Whether the chunk store's token is held back until `release` is set."""
    ignores_ranges: bool = False
    slices: int = 1 << 16
    """Number of bytes per write."""
    pause_seconds: float = 0.0
    """Pause between two writes, in seconds."""


@dataclass(frozen=True)
class RecordedRequest:
    """One request as it arrived."""

    method: str
    path: str
    range: str
    authorization: str


class StandInHub:
    """The server; `address` is what HF_ENDPOINT would be."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        """Tokens that the hub knows; they may read gated and private repositories."""
        self.faults = Faults()
        self.requests: list[RecordedRequest] = []
        self.sent_bytes = 0
        """Number of bytes of files that were sent."""
        self.release = threading.Event()
        self.connections: set[socket.socket] = set()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def add(self, id: str, files: Mapping[str, bytes], **more: Any) -> Repository:  # noqa: A002
        """Publish a repository."""
        self.repositories[id] = Repository(id, dict(files), **more)
        return self.repositories[id]

    def gets(self, name: str) -> list[RecordedRequest]:
        """Return the GET requests for a file."""
        return [request for request in self.requests if request.method == "GET" and request.path.endswith(f"/{name}")]

    def close(self) -> None:
        """Stop the server, and close all open connections."""
        self.release.set()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: tests kill clients."""


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.hub.connections.add(self.connection)

    def finish(self) -> None:
        self.hub.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Print nothing: tests look at `requests`."""

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        range_, authorization = self.headers.get("Range", ""), self.headers.get("Authorization", "")
        self.hub.requests.append(RecordedRequest(self.command, path, range_, authorization))
        if authorization and authorization.removeprefix("Bearer ") not in self.hub.tokens:
            self._refuse(401, message=INVALID_TOKEN)
        elif self.hub.faults.redirect:
            self._redirect(f"{self.hub.faults.redirect}{self.path}")
        elif path.startswith("/api/models"):
            self._api(path.removeprefix("/api/models").strip("/"), urllib.parse.parse_qs(url.query))
        else:
            self._file(path.strip("/"))

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        if self.hub.faults.xet_hangs and "/xet-read-token" in path:
            self.hub.release.wait()
        if self.hub.faults.api:
            self._refuse(self.hub.faults.api.popleft())
        elif self.hub.faults.answers:
            self._send_packed(self.hub.faults.answers.popleft())
        elif not path:
            if self.hub.faults.searches_hang:
                self.hub.release.wait()
            if self.hub.faults.searches_drip:
                self._drip()
                return
            self._send(_search(self.hub.repositories.values(), query))
        else:
            name, _, revision = path.partition("/revision/")
            repository = self._visible(name)
            if repository is None:
                self._refuse(401 if not self.headers.get("Authorization") else 404, "RepoNotFound")
            elif revision not in {"", "main", repository.commit}:
                self._refuse(404, "RevisionNotFound")
            else:
                self._send(repository.information(blobs=query.get("blobs") == ["True"] or "blobs" in query))

    def _visible(self, id: str) -> Repository | None:  # noqa: A002
        repository = self.hub.repositories.get(id)
        hidden = repository is not None and repository.private and not self.headers.get("Authorization")
        return None if hidden else repository

    def _file(self, path: str) -> None:
        repository_id, _, rest = path.partition("/resolve/")
        commit, _, name = rest.partition("/")
        repository = self._visible(repository_id)
        faults = self.hub.faults
        if self.command == "GET" and faults.statuses:
            self._refuse(faults.statuses.popleft())
        elif repository is None:
            self._refuse(404, "RepoNotFound")
        elif repository.gated and not self.headers.get("Authorization"):
            self._refuse(401, "GatedRepo", f"Access to model {repository_id} is restricted.")
        elif commit not in {"main", repository.commit}:
            self._refuse(404, "RevisionNotFound")
        elif name not in repository.files:
            self._refuse(404, "EntryNotFound")
        elif repository.elsewhere:
            self.send_response(302)
            self.send_header("Location", repository.elsewhere + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send_file(repository, name)

    def _send_file(self, repository: Repository, name: str) -> None:
        content = repository.lies.get(name, repository.files[name])
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if self.headers.get("Range") else 0
        if start and start >= len(content):
            self._refuse(416)
            return
        partial = start > 0 and not self.hub.faults.ignores_ranges
        body = content[start:] if partial else content
        self.send_response(206 if partial else 200)
        self.send_header("ETag", f'"{digest(content)}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if name in repository.xet:
            self.send_header("X-Xet-Hash", digest(content))
            route = f"{self.hub.address}/api/models/{repository.id}/xet-read-token/x"
            self.send_header("X-Xet-Refresh-Route", self.hub.faults.token_route or route)
            self.send_header("Link", f'<{self.hub.faults.token_route or route}>; rel="xet-auth"')
        self.end_headers()
        if self.command == "GET":
            if repository.id in self.hub.faults.held:
                self.hub.release.wait()
            self._send_body(body)

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 30))
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while not self.hub.release.wait(0.01):
                self.wfile.write(b" ")

    def _send_body(self, body: bytes) -> None:
        faults = self.hub.faults
        cut = faults.cuts.popleft() if faults.cuts else None
        stall = faults.stalls.popleft() if faults.stalls else None
        end = min(len(body), *(limit for limit in (cut, stall, len(body)) if limit is not None), len(body))
        try:
            for start in range(0, end, faults.slices):
                self.wfile.write(body[start : min(end, start + faults.slices)])
                self.wfile.flush()
                self.hub.sent_bytes += min(end, start + faults.slices) - start
                if faults.pause_seconds:
                    self.hub.release.wait(faults.pause_seconds)
            if stall is not None and end < len(body):
                self.hub.release.wait()
        except OSError:
            self.close_connection = True
        if end < len(body):
            self.close_connection = True

    def _refuse(self, status: int, code: str = "", message: str = "") -> None:
        body = self.hub.faults.refusal or json.dumps({"error": message or f"status {status}"}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _redirect(self, address: str) -> None:
        self.send_response(307)
        self.send_header("Location", address)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_packed(self, body: bytes) -> None:
        packed = gzip.compress(body)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed)

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _search(repositories: Any, query: dict[str, list[str]]) -> list[dict[str, Any]]:
    words = " ".join(query.get("search", [])).lower().split()
    filters = query.get("filter", [])
    matching = [
        repository
        for repository in repositories
        if all(word in repository.id.lower() for word in words)
        and all(tag in repository.tags or tag == repository.library for tag in filters)
        and not repository.private
    ]
    keys = {"likes": "likes", "lastModified": "modified"}
    key = keys.get(query.get("sort", ["downloads"])[0], "downloads")
    matching.sort(key=lambda repository: getattr(repository, key), reverse=True)
    return [repository.information() for repository in matching[: int(query.get("limit", ["50"])[0])]]


@functools.lru_cache(maxsize=256)
def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@functools.lru_cache(maxsize=256)
def digest(content: bytes) -> str:
    """Return the SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """Run a hub until the block ends."""
    hub = StandInHub()
    try:
        yield hub
    finally:
        hub.close()

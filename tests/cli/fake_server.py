"""A scripted Paceline server: real HTTP on a free port, answers from a table, requests recorded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class FakeServer:
    port: int = 0
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """Status and JSON by path; a list is streamed, one event per item; bytes are sent as they are."""
    requests: list[tuple[str, str, Any, str]] = field(default_factory=list)
    """Method, path, body and Authorization header of every request."""


def handler_of(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            fake.requests.append((self.command, self.path, body, self.headers.get("Authorization", "")))
            status, content = fake.answers.get(self.path, (404, {"error": {"message": f"no {self.path} here"}}))
            streamed = isinstance(content, list)
            payload = content if isinstance(content, bytes) else json.dumps(content).encode()
            if streamed:
                payload = "".join(f"data: {event}\n\n" for event in (*map(json.dumps, content), "[DONE]")).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if streamed else "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - the names that http.server calls

        def log_message(self, *arguments: Any) -> None:
            """Stay quiet."""

    return Handler


@contextmanager
def running_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(fake)) as server:
        fake.port = server.server_address[1]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def chunk(text: str, spans: list[list[int]] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"choices": [choice | ({"accepted_spans": spans} if spans else {})]}


LAST_CHUNK = {
    "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
    "timings": {"predicted_n": 5, "predicted_per_second": 123.4},
    "speculation": {"method": "draft_model", "reason": "", "drafted": 4, "accepted": 3, "tokens_per_cycle": 2.5},
}

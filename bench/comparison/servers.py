"""Servers compared over HTTP, each in its own process, and the clients that keep them busy.

Every server gets the same requests in the same order; clients take the number of tokens from the answer's `usage`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from time import monotonic, perf_counter
from typing import Any

import httpx2
import psutil

from app.engine.platform import COMMAND_LIMITS, OPENBLAS_LIBRARY

START_SECONDS = 600.0
"""Seconds within which a server must answer; mlx-dspark calibrates for some minutes on its first run."""
PEERS_FOLDER = Path(sys.prefix) / "peers"
"""Folder of the peers' virtual environments, which `make peers` creates."""
MLX_SERVER = "from app.engine.platform import prepare; prepare(chip='any'); from mlx_lm.server import main; main()"
"""Program that runs mlx-lm's server with OpenBLAS and mlx's own limits of a command buffer."""
PACELINE = "from app.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a server, the model to request, and extra fields of its requests."""

    address: str
    model: str
    client: httpx2.Client
    """Client that stays open, as real ones do: creating one reads the system's certificates, which takes some 15 ms."""
    process_id: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def memory_bytes(self) -> int:
        """Return the memory of the server and all its processes; on Linux, shared pages are counted once."""
        server, total = psutil.Process(self.process_id), 0
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                memory = process.memory_full_info()
                total += int(getattr(memory, "pss", memory.uss))
        return total


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server for mlx models, in a virtual environment of its own."""

    name: str
    model_option: tuple[str, ...]
    """Command-line arguments that precede the model's folder."""
    most_clients: int

    @property
    def program(self) -> Path:
        """Path of its program; the file exists once `make peers` has installed it."""
        return PEERS_FOLDER / self.name / "bin" / self.name


PEERS = (Peer("rapid-mlx", (), 8), Peer("mlx-dspark", ("--model",), 1))
"""Peers by the name of their package and program; mlx-dspark serves one request after the other."""


def installed_peers() -> list[Peer]:
    """Return the peers that `make peers` has installed."""
    return [peer for peer in PEERS if peer.program.is_file()]


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, timed at the client."""

    text: str
    tokens: int
    seconds: float
    first_seconds: float
    """Seconds from the request to the first content."""
    decode_seconds: float
    """Seconds from the first content to the last."""
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Rate from the request to the last token."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Rate after the first token."""
        return (self.tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


@contextmanager
def run_paceline(
    models: Path, home: Path, drafts: Mapping[str, str], model: str, variables: Mapping[str, str] | None = None
) -> Iterator[Endpoint]:
    """Run one Paceline server over a folder of models; `drafts` names the draft of each main model."""
    port = _free_port()
    settings = {
        "PACELINE_HOST": "127.0.0.1",
        "PACELINE_PORT": str(port),
        "PACELINE_HOME": str(home),
        "PACELINE_MODEL_DIRS": str(models),
        "PACELINE_DRAFTS": json.dumps(dict(drafts)),
        "PACELINE_OPEN": "0",
        **(variables or {}),
    }
    command = [sys.executable, "-c", PACELINE, "serve"]
    with _process(command, settings, home / "paceline.log") as process_id, httpx2.Client(timeout=300.0) as client:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", model, client, process_id)
        _wait_until_ready(endpoint, "/health/ready", home / "paceline.log")
        yield endpoint


@contextmanager
def run_mlx_server(target: Path, draft: Path | None, drafts: int, home: Path) -> Iterator[Endpoint]:
    """Run mlx-lm's own server, with or without a draft model."""
    port = _free_port()
    command = [sys.executable, "-c", MLX_SERVER, "--model", str(target), "--port", str(port), "--host", "127.0.0.1"]
    if draft is not None:
        command += ["--draft-model", str(draft), "--num-draft-tokens", str(drafts)]
    log = home / f"mlx-{'draft' if draft else 'plain'}.log"
    with _process(command, {}, log) as process_id, httpx2.Client(timeout=300.0) as client:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", "default_model", client, process_id)
        _wait_until_ready(endpoint, "/health", log)
        yield endpoint


@contextmanager
def run_peer(peer: Peer, target: Path, home: Path) -> Iterator[Endpoint]:
    """Run a peer's server over one model, with OpenBLAS loaded before its mlx."""
    port, log = _free_port(), home / f"{peer.name}.log"
    command = [str(peer.program), "serve", *peer.model_option, str(target), "--host", "127.0.0.1", "--port", str(port)]
    preloaded = {"LD_PRELOAD": OPENBLAS_LIBRARY} if sys.platform.startswith("linux") else {}
    with _process(command, preloaded, log) as process_id, httpx2.Client(timeout=300.0) as client:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", "", client, process_id)
        _wait_until_ready(endpoint, "/v1/models", log)
        model = client.get(f"{endpoint.address}/v1/models").json()["data"][0]["id"]
        yield replace(endpoint, model=model)


@contextmanager
def _process(command: Sequence[str], settings: Mapping[str, str], log: Path) -> Iterator[int]:
    """Run a server and yield its process id."""
    own_limits = {name for limits in COMMAND_LIMITS.values() for name in limits}
    inherited = {name: value for name, value in os.environ.items() if name not in own_limits}
    environment = {**inherited, "HF_HUB_OFFLINE": "1", **settings}
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        stack.callback(_stop, process)
        yield process.pid


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(endpoint: Endpoint, path: str, log: Path) -> None:
    pause, deadline = Event(), monotonic() + START_SECONDS
    while monotonic() < deadline:
        try:
            if endpoint.client.get(endpoint.address + path, timeout=5.0).status_code == httpx2.codes.OK:
                return
        except httpx2.TransportError:
            pass
        pause.wait(0.1)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"the server did not get ready in {START_SECONDS:.0f} s; the end of its log:\n{tail}")


def stream_answer(endpoint: Endpoint, prompt: str, tokens: int, *earlier: Mapping[str, str]) -> Answer:
    """Stream one greedy answer to a prompt that follows `earlier` messages."""
    body = {
        "model": endpoint.model,
        "messages": [*earlier, {"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra,
    }
    first = last = 0.0
    parts: list[str] = []
    counted = 0
    speculation: Mapping[str, Any] = {}
    started = perf_counter()
    with endpoint.client.stream("POST", f"{endpoint.address}/v1/chat/completions", json=body) as response:
        if response.status_code != httpx2.codes.OK:
            raise RuntimeError(f"{endpoint.address} answered {response.status_code}: {response.read().decode()[:500]}")
        for chunk in _chunks(response.iter_lines()):
            if text := _content(chunk):
                last = perf_counter()
                first = first or last
                parts.append(text)
            counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
            speculation = chunk.get("speculation") or speculation
    ended = perf_counter()
    return Answer("".join(parts), counted, ended - started, (first or ended) - started, last - first, speculation)


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(f"the server failed: {chunk['error']}")
            yield chunk


def _content(chunk: Mapping[str, Any]) -> str:
    deltas = (choice.get("delta") or {} for choice in chunk.get("choices") or ())
    return "".join(
        (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
        for delta in deltas
    )


def stream_answers(endpoint: Endpoint, prompts: Sequence[str], tokens: int) -> tuple[float, list[Answer]]:
    """Send all prompts at once, one client each; return tokens per second over all of them, and the answers."""
    started = perf_counter()
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: stream_answer(endpoint, prompt, tokens), prompts))
    return sum(answer.tokens for answer in answers) / (perf_counter() - started), answers

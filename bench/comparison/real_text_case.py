"""A published model and published prompts, over HTTP: SmolLM2-135M-Instruct against mlx_lm.server and installed peers.

The model and WritingBench's prompts come from the package index, pinned by hash (`tests/published.py`).
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from time import perf_counter

from bench.comparison.cases import TOKENS_PER_SECOND, Bench, Case
from bench.comparison.measure import (
    CaseResult,
    Check,
    Contender,
    Sample,
    Series,
    median_interval,
    paired_ratio,
    paired_ratios,
)
from bench.comparison.server_cases import CLIENTS
from bench.comparison.servers import (
    PEERS,
    Endpoint,
    installed_peers,
    run_mlx_server,
    run_paceline,
    run_peer,
    stream_answer,
    stream_answers,
)
from tests.published import FOLDER, SMOLLM2, WRITING_PROMPTS, fetch
from tests.smollm2 import write_smollm2

MODEL = "smollm2-135m-f32"
PROMPTS = 30
"""Prompts of each kind."""
TOKENS = 64
ASCII_SHARE = 0.97
"""Minimum share of ASCII characters in a prompt that counts as English."""
NEW, REPEATING = "new", "repeating"
TASKS = (
    "Repeat this text with its spelling corrected:",
    "Summarise this text in its own words:",
    "Write the facts of this text as JSON:",
    "List the points of this text:",
)
"""Tasks whose answers repeat much of the prompt."""
LEAST_RATIO = 1.0
MOST_SECONDS_LATER = 1.0
MOST_MEMORY = 1.1
MOST_WAITING = 0.95
LONG_CHARACTERS = 4_200
"""Length, in characters, of a prompt of about 1,000 tokens."""


@cache
def published_prompts() -> dict[str, list[str]]:
    """Return the shortest English prompts of WritingBench for new text, and the next ones as material to repeat."""
    fetch([WRITING_PROMPTS])
    lines = (FOLDER / WRITING_PROMPTS.name / "benchmark_all.jsonl").read_text(encoding="utf-8").splitlines()
    queries = [str(json.loads(line)["query"]) for line in lines]
    english = [query for query in queries if sum(map(str.isascii, query)) >= ASCII_SHARE * len(query)]
    ordered = sorted(english, key=lambda query: len(query.split()))
    materials = ordered[PROMPTS : 2 * PROMPTS]
    return {
        NEW: ordered[:PROMPTS],
        REPEATING: [f"{TASKS[number % len(TASKS)]}\n\n{material}" for number, material in enumerate(materials)],
    }


def round_prompts(kind: str, number: int, clients: int) -> list[str]:
    """Return the prompts of one round. They begin with its number, so that no prompt is found in a cache."""
    chosen = random.Random(f"{kind} {number} {clients}").sample(published_prompts()[kind], clients)
    return [f"Request {number + 2}.{row}: {prompt}" for row, prompt in enumerate(chosen)]


def model_folder(bench: Bench) -> Path:
    """Return the folder of the model in float32."""
    folder = bench.workshop.folder / "published" / MODEL
    if not folder.is_dir():
        fetch([SMOLLM2])
        (gguf,) = (FOLDER / SMOLLM2.name).iterdir()
        write_smollm2(gguf, folder, packed=False)
    return folder


REAL_SUMMARY = (
    "SmolLM2-135M on published prompts over HTTP, new text and text that repeats its prompt, 1, 4 and 8 clients"
)


@contextmanager
def running_servers(bench: Bench, home: Path) -> Iterator[dict[str, Endpoint]]:
    """Run Paceline, mlx_lm.server and the installed peers over the model, and yield them by name."""
    folder = model_folder(bench)
    with ExitStack() as stack:
        endpoints = {
            "paceline": stack.enter_context(run_paceline(folder.parent, home, {}, MODEL)),
            "mlx-lm": stack.enter_context(run_mlx_server(folder, None, 0, home)),
        }
        for peer in installed_peers():
            endpoints[peer.name] = stack.enter_context(run_peer(peer, folder, home))
        yield endpoints


def run_real_text(bench: Bench) -> CaseResult:
    """Compare servers by tokens per second over all clients, prefill included, and count answers equal to mlx-lm's."""
    texts: dict[tuple[str, int], dict[str, list[str]]] = {}
    most_clients = defaultdict(lambda: max(CLIENTS), {peer.name: peer.most_clients for peer in PEERS})
    with running_servers(bench, bench.workshop.folder / "home-real") as endpoints:

        def turn(name: str, kind: str, clients: int, number: int) -> Sample:
            rate, answers = stream_answers(endpoints[name], round_prompts(kind, number, clients), TOKENS)
            texts.setdefault((f"{kind} × {clients}", number), {})[name] = [answer.text.strip() for answer in answers]
            drafted = sum(answer.speculation.get("drafted", 0) for answer in answers)
            accepted = sum(answer.speculation.get("accepted", 0) for answer in answers)
            return Sample(rate, {"acceptance": accepted / drafted} if drafted else {})

        series = bench.measure(
            *(
                Contender(f"{name}, {kind} × {clients}", partial(turn, name, kind, clients))
                for kind in (NEW, REPEATING)
                for clients in CLIENTS
                for name in endpoints
                if clients <= most_clients[name]
            )
        )
        memory = {f"{name}, MB": endpoint.memory_bytes() / 1e6 for name, endpoint in endpoints.items()}
    checks = tuple(
        _ratio_check(series, name, f"{kind} × {clients}")
        for kind in (NEW, REPEATING)
        for clients in CLIENTS
        for name in endpoints
        if name != "paceline" and clients <= most_clients[name]
    )
    pairs = [
        (ours, theirs) for both in texts.values() for ours, theirs in zip(both["paceline"], both["mlx-lm"], strict=True)
    ]
    notes = {"answers": float(len(pairs)), "equal answers": float(sum(ours == theirs for ours, theirs in pairs))}
    share = memory["paceline, MB"] / memory["mlx-lm, MB"]
    checks = (*checks, Check("memory of all processes / mlx-lm", share, MOST_MEMORY, "at most"))
    return CaseResult("real_text", REAL_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), checks, notes | memory)


def _ratio_check(series: dict[str, Series], competitor: str, cell: str) -> Check:
    low, middle, high = median_interval(paired_ratios(series[f"paceline, {cell}"], series[f"{competitor}, {cell}"]))
    return Check(f"paceline / {competitor}, {cell} ({low:.2f} to {high:.2f})", middle, LEAST_RATIO)


FIRST_SUMMARY = "time to the first token of SmolLM2-135M behind 1,000 tokens: anew, sent again, in the next turn"
ANSWER, NEXT = {"role": "assistant", "content": "It is about several things."}, "Which one comes first, and why?"


def run_first_token(bench: Bench) -> CaseResult:
    """Send each server a long text, the same text again, and a next turn that follows it."""

    def turn(endpoint: Endpoint, kind: str, number: int) -> Sample:
        materials = "\n\n".join(published_prompts()[REPEATING])
        start = 1_000 * (number + 1) % (len(materials) - LONG_CHARACTERS)
        text = f"Request {number + 2}: what is this about?\n\n{materials[start : start + LONG_CHARACTERS]}"
        if kind == "next turn":
            answer = stream_answer(endpoint, NEXT, 4, {"role": "user", "content": text}, ANSWER)
        else:
            answer = stream_answer(endpoint, text, 4)
        return Sample(answer.first_seconds)

    kinds = ("anew", "again", "next turn")
    with running_servers(bench, bench.workshop.folder / "home-first") as endpoints:
        series = bench.measure(
            *(
                Contender(f"{name}, {kind}", partial(turn, endpoint, kind))
                for kind in kinds
                for name, endpoint in endpoints.items()
            )
        )
    checks = tuple(
        Check(
            f"paceline / {name}, {kind}",
            paired_ratio(series[f"paceline, {kind}"], series[f"{name}, {kind}"]),
            MOST_WAITING,
            "at most",
        )
        for kind in kinds
        for name in endpoints
        if name != "paceline"
    )
    return CaseResult("first_token", FIRST_SUMMARY, "s", tuple(series.values()), checks)


READY_SUMMARY = "from the start of the process to the first token of SmolLM2-135M, with what earlier starts stored"


def run_ready(bench: Bench) -> CaseResult:
    """Start each server, ask for one token, and stop it."""
    folder, home = model_folder(bench), bench.workshop.folder / "home-ready"

    def ask(endpoint: Endpoint, started: float) -> Sample:
        ready = perf_counter() - started
        stream_answer(endpoint, "Hello", 1)
        return Sample(perf_counter() - started, {"ready": ready})

    def start_paceline(_number: int) -> Sample:
        started = perf_counter()
        with run_paceline(folder.parent, home, {}, MODEL) as endpoint:
            return ask(endpoint, started)

    def start_mlx_server(_number: int) -> Sample:
        started = perf_counter()
        with run_mlx_server(folder, None, 0, home) as endpoint:
            return ask(endpoint, started)

    series = bench.measure(Contender("paceline", start_paceline), Contender("mlx-lm", start_mlx_server))
    later = [
        ours.value - theirs.value
        for ours, theirs in zip(series["paceline"].samples, series["mlx-lm"].samples, strict=True)
    ]
    low, middle, high = median_interval(later)
    check = Check(f"later than mlx-lm, s ({low:.1f} to {high:.1f})", middle, MOST_SECONDS_LATER, "at most")
    return CaseResult("ready", READY_SUMMARY, "s", tuple(series.values()), (check,))


REAL_TEXT_CASES: Sequence[Case] = (
    Case("real_text", REAL_SUMMARY, run_real_text),
    Case("first_token", FIRST_SUMMARY, run_first_token),
    Case("ready", READY_SUMMARY, run_ready),
)

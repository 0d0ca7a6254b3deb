"""Cases over HTTP: each server runs in its own process and streams to clients that count tokens."""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median

from bench.comparison.cases import TOKENS_PER_SECOND, Bench, Case
from bench.comparison.measure import CaseResult, Check, Contender, Sample, Series, paired_ratio
from bench.comparison.ours import OurSide
from bench.comparison.reference import generate_with_draft, load_reference
from bench.comparison.servers import Endpoint, run_mlx_server, run_paceline, stream_answer, stream_answers
from bench.comparison.workshop import PairFolders

CLIENTS = (1, 4, 8)
OFF = {"speculation": {"method": "off"}}
DEMO_DRAFTS = 8
SAME_DRAFTS = {"speculation": {"method": "draft_model", "num_draft_tokens": DEMO_DRAFTS}}
DEMO_TOKENS = 192
DEMO_PROMPTS = {
    "counting": ("Count from {a} to {b}.", "Please count from {a} up to {b}."),
    "tables": ("Write the times table of {c}.", "Show me the multiplication table of {c}."),
    "json": ("Write JSON for name Ada, age {a}.", "Give me a JSON object with name Bob and age {a}."),
}
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "juniper", "kelp", "lark")


def worded_prompt(number: int, row: int) -> str:
    """Return a text that is unique to this round and row."""
    rng = random.Random(f"{number} {row}")
    return " ".join(rng.choice(WORDS) for _ in range(12))


HTTP_SUMMARY = "plain decoding streamed over HTTP against the engine alone"


def run_http_vs_engine(bench: Bench) -> CaseResult:
    """Compare with one client; both sides are timed from the first token to the last."""
    folders = bench.workshop.attention_pair()
    ours = OurSide(PairFolders(folders.target, None))
    with run_paceline(bench.workshop.folder, bench.workshop.folder / "home-http", {}, folders.target.name) as endpoint:
        plain = replace(endpoint, extra=OFF)

        def http_turn(number: int) -> Sample:
            return Sample(stream_answer(plain, worded_prompt(number, 0), bench.tokens).decode_tokens_per_second)

        series = bench.measure(
            Contender("over HTTP", http_turn),
            Contender("engine alone", lambda number: ours.decode([bench.workshop.prompt(number, 0, 40)], bench.tokens)),
        )
    ours.close()
    check = Check("HTTP / engine", paired_ratio(series["over HTTP"], series["engine alone"]), 0.95)
    return CaseResult("http_vs_engine", HTTP_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), (check,))


BEST_SUMMARY = "one Paceline server against mlx_lm.server with the same draft and without one, 1, 4 and 8 clients"


def run_best_of_both(bench: Bench) -> CaseResult:
    """Compare three servers over the same folders by tokens per second over all clients."""
    folders, home = bench.workshop.attention_pair(), bench.workshop.folder / "home-best"
    assert folders.draft is not None  # noqa: S101 - this pair has a draft
    chosen = {folders.target.name: folders.draft.name}
    with ExitStack() as stack:
        endpoints = {
            "paceline": stack.enter_context(run_paceline(bench.workshop.folder, home, chosen, folders.target.name)),
            "mlx-lm, draft": stack.enter_context(run_mlx_server(folders.target, folders.draft, bench.drafts, home)),
            "mlx-lm, plain": stack.enter_context(run_mlx_server(folders.target, None, 0, home)),
        }
        series = bench.measure(
            *(
                _clients(name, endpoint, clients, bench.tokens)
                for clients in CLIENTS
                for name, endpoint in endpoints.items()
            )
        )
    checks = [_check_against_better(series, clients) for clients in CLIENTS]
    return CaseResult("best_of_both", BEST_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), tuple(checks))


def _check_against_better(series: dict[str, Series], clients: int) -> Check:
    competitors = (series[f"mlx-lm, {kind} × {clients}"] for kind in ("draft", "plain"))
    competitor = max(competitors, key=lambda entry: entry.median)
    return Check(f"paceline / {competitor.name}", paired_ratio(series[f"paceline × {clients}"], competitor), 1.1)


def _clients(name: str, endpoint: Endpoint, clients: int, tokens: int) -> Contender:
    def turn(number: int) -> Sample:
        prompts = [worded_prompt(number * len(CLIENTS) + CLIENTS.index(clients), row) for row in range(clients)]
        rate, answers = stream_answers(endpoint, prompts, tokens)
        drafted = sum(answer.speculation.get("drafted", 0) for answer in answers)
        accepted = sum(answer.speculation.get("accepted", 0) for answer in answers)
        return Sample(rate, {"acceptance": accepted / drafted} if drafted else {})

    return Contender(f"{name} × {clients}", turn)


DEMO_SUMMARY = "the embedded pair through the endpoint on counting, tables and JSON, against plain and mlx-lm's loop"


def run_demo_pair(bench: Bench) -> CaseResult:
    """Run the same prompts on every side, timed to the last token: with Paceline's draft length and with mlx-lm's."""
    folders, home = bench.workshop.demo_pair(), bench.workshop.folder / "home-demo"
    assert folders.draft is not None  # noqa: S101 - this pair has a draft
    model, tokenizer = load_reference(folders.target)
    draft, _ = load_reference(folders.draft)

    def reference(task: str) -> Contender:
        return Contender(f"mlx-lm {task}, {DEMO_DRAFTS} drafts", partial(reference_turn, task))

    def reference_turn(task: str, number: int) -> Sample:
        samples = []
        for prompt in demo_prompts(task, number):
            message = [{"role": "user", "content": prompt}]
            tokens = tokenizer.apply_chat_template(message, add_generation_prompt=True)
            samples.append(generate_with_draft(model, tokenizer, draft, tokens, DEMO_TOKENS, DEMO_DRAFTS))
        return Sample(median(sample.value for sample in samples))

    chosen = {folders.target.name: folders.draft.name}
    with run_paceline(bench.workshop.folder, home, chosen, folders.target.name) as endpoint:
        contenders = [
            contender
            for task in DEMO_PROMPTS
            for contender in (
                _task(f"paceline {task}", endpoint, task),
                _task(f"paceline {task}, {DEMO_DRAFTS} drafts", replace(endpoint, extra=SAME_DRAFTS), task),
                reference(task),
                _task(f"plain {task}", replace(endpoint, extra=OFF), task),
            )
        ]
        series = bench.measure(*contenders)
    checks = tuple(check for task in DEMO_PROMPTS for check in _demo_checks(series, task))
    return CaseResult("demo_pair", DEMO_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), checks)


def demo_prompts(task: str, number: int) -> list[str]:
    """Return the prompts of one round, with different numbers each time so that no prefix cache helps."""
    rng = random.Random(f"{task} {number}")
    start = rng.randrange(1, 40)
    values = {"a": start, "b": start + 30, "c": rng.randrange(2, 13)}
    return [wording.format(**values) for wording in DEMO_PROMPTS[task]]


def _task(name: str, endpoint: Endpoint, task: str) -> Contender:
    def turn(number: int) -> Sample:
        answers = [stream_answer(endpoint, prompt, DEMO_TOKENS) for prompt in demo_prompts(task, number)]
        drafted = sum(answer.speculation.get("drafted", 0) for answer in answers)
        accepted = sum(answer.speculation.get("accepted", 0) for answer in answers)
        notes = {"acceptance": accepted / drafted} if drafted else {}
        return Sample(median(answer.tokens_per_second for answer in answers), notes)

    return Contender(name, turn)


def _demo_checks(series: dict[str, Series], task: str) -> Sequence[Check]:
    ours, competitor = (series[f"{side} {task}, {DEMO_DRAFTS} drafts"] for side in ("paceline", "mlx-lm"))
    return (
        Check(f"{task}: endpoint / plain", paired_ratio(series[f"paceline {task}"], series[f"plain {task}"]), 2.5),
        Check(f"{task}, {DEMO_DRAFTS} drafts: endpoint / mlx-lm", paired_ratio(ours, competitor), 1.0),
    )


COMMANDS_SUMMARY = "plain decoding with our limits of a Metal command buffer against mlx's, on a Max or an Ultra"
MLX_LIMITS = {"MLX_MAX_OPS_PER_BUFFER": "50", "MLX_MAX_MB_PER_BUFFER": "50"}
"""Limits of a Metal command buffer that mlx itself sets on Max and Ultra chips."""


def run_command_buffers(bench: Bench) -> CaseResult:
    """Compare two servers over the same model by tokens per second of one client."""
    target, home = bench.workshop.attention_pair().target, bench.workshop.folder
    with ExitStack() as stack:
        endpoints = {
            name: stack.enter_context(run_paceline(home, home / f"home-{name}", {}, target.name, limits))
            for name, limits in (("ours", {}), ("mlx's", MLX_LIMITS))
        }
        series = bench.measure(
            *(_clients(name, replace(endpoint, extra=OFF), 1, bench.tokens) for name, endpoint in endpoints.items())
        )
    check = Check("our limits / mlx's", paired_ratio(series["ours × 1"], series["mlx's × 1"]), 0.97)
    return CaseResult("command_buffers", COMMANDS_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), (check,))


SERVER_CASES = (
    Case("http_vs_engine", HTTP_SUMMARY, run_http_vs_engine),
    Case("best_of_both", BEST_SUMMARY, run_best_of_both),
    Case("demo_pair", DEMO_SUMMARY, run_demo_pair),
    Case("command_buffers", COMMANDS_SUMMARY, run_command_buffers),
)

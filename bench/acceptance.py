"""Measures how many drafts each acceptance rule accepts, by temperature: `python bench/acceptance.py` prints a table.

One request at a time, always `--drafts` drafts per cycle and no governor, so that only the rules differ. Columns:
`parted` counts texts that differ from plain decoding's, `close calls` the cycles in which `strict` decided a token
again, `read again` the tokens fed again for that. OpenBLAS is used where it is installed, as in the server.
`--expected` needs a draft model and computes, without sampling, the mean probability that a draft is accepted:
`coupled` sum_v 1 / sum_w max(p_w / p_v, q_w / q_v), `rejection` sum_v min(p_v, q_v).
"""

# ruff: noqa: E402 - what follows `prepare` imports mlx, and has to come after it
import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from app.engine.platform import prepare

prepare()

import mlx.core as mx
import numpy as np
from transformers import AutoTokenizer

from app.core.request import AcceptanceRule, Request, SamplingParameters
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep, RowOutcome
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine.engine import Engine
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.engine.prefix.cache import PrefixCache

DEMO_MODELS = Path(__file__).resolve().parents[1] / "app" / "demo_models"
PROMPTS = (
    "Count from 3 to 24.",
    "What is 47 + 38?",
    "Sort these numbers: 42, 7, 19, 3, 88.",
    "Show the times table of 7.",
    "Make a table of three fruits with their colours.",
    "Spell the word planet.",
    "Repeat: the small red bird sings.",
    "List five animals.",
    "Write JSON with name Ada and age 36.",
    "Write a Python function that adds two numbers.",
    "Hello, who are you?",
    "What is the capital of France?",
)


@dataclass
class Counts:
    """Sums over cycles."""

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    first_accepted: int = 0
    close_calls: int = 0
    replayed: int = 0

    def add(self, outcome: RowOutcome) -> None:
        self.cycles += 1
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        self.first_accepted += outcome.accepted > 0
        self.close_calls += outcome.replayed > 0
        self.replayed += outcome.replayed

    def cells(self) -> str:
        return (
            f"{self.first_accepted / self.cycles:.1%} | {self.accepted / self.drafted:.1%} | "
            f"{1 + self.accepted / self.cycles:.2f} | {self.cycles} | {self.close_calls} | {self.replayed}"
        )


def load(target: Path, draft: Path, method: str) -> LoadedUnit:
    draft_specification = DrafterSpecification(draft.name, str(draft), method)
    loading = load_unit(ModelSpecification(id=target.name, path=str(target), drafters=(draft_specification,)))
    while True:
        try:
            next(loading)
        except StopIteration as finished:
            unit: LoadedUnit = finished.value
            return unit


def answer(engine: Engine, request: Request, method: str, drafts: int, counts: Counts) -> list[int]:
    """Return prompt and answer, generated while there is room for all drafts; count the cycles that drafted."""
    tokens, prompt = list(request.prompt_tokens), len(request.prompt_tokens)
    computed = engine.admit(request)
    if computed < prompt - 1:
        engine.step(PrefillStep((PrefillRow(request.id, tokens, computed, prompt - 1),)))
        computed = prompt - 1
    while (remaining := request.max_tokens - (len(tokens) - prompt)) > drafts:
        row = DecodeRow(request.id, tokens, prompt, computed, remaining, method=method, num_draft_tokens=drafts)
        outcome = engine.step(DecodeStep((row,))).outcomes[0]
        if outcome.drafted or outcome.replayed:
            counts.add(outcome)
        tokens.extend(outcome.emitted)
        computed = outcome.computed
        if request.stop_token_ids & set(outcome.emitted):
            break
    engine.release(request.id, tokens[:computed])
    return tokens


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stop: int,
    temperature: float,
    args: argparse.Namespace,
    drafts: int | None = None,
) -> tuple[Counts, list[tuple[int, list[int]]]]:
    """Return the counts, and every text as a pair of its prompt's length and its tokens."""
    counts, texts, draft_count = Counts(), [], args.drafts if drafts is None else drafts
    for seed in range(args.seeds):
        for index, prompt in enumerate(prompts):
            request = Request(
                id=f"{seed}-{index}",
                prompt_tokens=tuple(prompt),
                max_tokens=args.tokens,
                stop_token_ids=frozenset({stop}),
                sampling=SamplingParameters(seed=1000 * seed + index, temperature=temperature),
            )
            texts.append((len(prompt), answer(engine, request, args.method, draft_count, counts)))
    return counts, texts


def expected(unit: LoadedUnit, texts: Sequence[tuple[int, list[int]]], temperature: float) -> tuple[float, float, int]:
    """Return the mean acceptance of a draft by `coupled` and by `rejection`, and the number of tokens."""
    coupled, rejection = [], []
    for prompt, text in texts:
        tokens = mx.array([text])
        logits = [
            model(tokens)[0, prompt - 1 : -1].astype(mx.float32) for model in (unit.target, unit.drafters[0].model)
        ]
        target, draft = (np.array(mx.softmax(scores / temperature, axis=-1), dtype=np.float64) for scores in logits)
        rejection.extend(np.minimum(target, draft).sum(axis=-1))
        for p, q in zip(target, draft, strict=True):
            likely = np.argsort(-np.minimum(p, q))[:64]
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                both = np.maximum(p / p[likely, None], q / q[likely, None]).sum(axis=-1)
            coupled.append(float((1 / both[np.isfinite(both)]).sum()))
    return float(np.mean(coupled)), float(np.mean(rejection)), len(coupled)


def print_expected(unit: LoadedUnit, prompts: Sequence[Sequence[int]], stop: int, args: argparse.Namespace) -> None:
    parts = open_engine(unit)
    print("| drafter | temperature | expected by coupled | expected by rejection | tokens |")
    print("|---|---:|---:|---:|---:|")
    for temperature in args.temperatures:
        _, texts = measure(parts, prompts, stop, temperature, args)
        by_coupled, by_rejection, count = expected(unit, texts, temperature)
        print(
            f"| `{args.draft.name}` | {temperature:g} | {by_coupled:.1%} | {by_rejection:.1%} | {count} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=DEMO_MODELS / "demo-assistant")
    parser.add_argument("--draft", type=Path, default=DEMO_MODELS / "demo-draft")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--expected", action="store_true")
    args = parser.parse_args()
    unit = load(args.target, args.draft, args.method)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    if args.expected:
        print_expected(unit, prompts, tokenizer.eos_token_id, args)
        return
    parts = open_engine(unit)
    print(
        "| temperature | rule | first draft | accepted | tokens a cycle | cycles | close calls | read again | parted |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for temperature in args.temperatures:
        _, plain = measure(parts, prompts, tokenizer.eos_token_id, temperature, args, drafts=0)
        for mode in get_args(AcceptanceRule):
            engine = Engine(parts.runner, parts.drafters, parts.limits, PrefixCache(0), acceptance=mode)
            counts, texts = measure(engine, prompts, tokenizer.eos_token_id, temperature, args)
            pairs = [list(zip(text, other, strict=False)) for (_, text), (_, other) in zip(texts, plain, strict=True)]
            parted = sum(any(token != other for token, other in pair) for pair in pairs)
            print(f"| {temperature:g} | {mode} | {counts.cells()} | {parted} |", flush=True)


if __name__ == "__main__":
    main()

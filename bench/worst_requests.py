"""Measures how long the most expensive legal requests make a step: `python -m bench.worst_requests`.

Eight rows of one kind run at once, over a vocabulary of 151,936 tokens and a model that costs almost nothing, so that
the time of a step is the cost of the requests. The first step includes one-time work.
"""

import json
import random
import statistics
import string
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from app.core.messages import Generate
from app.core.request import Grammar, Request, SamplingParameters
from app.core.step import StepPlan, StepResult
from app.core.unit import ModelSpecification
from app.engine.engine import Engine
from app.scheduler.scheduler import Scheduler
from app.text.detokenizer import TokenTable
from app.text.dialect import NO_DIALECT
from app.text.grammar.constraint import AnswerConstraint, Vocabulary
from app.text.grammar.request_grammar import answer_grammar
from tests.engine.driving import build
from tests.scheduler.scripted import Loop
from tests.tiny import tiny_model

VOCABULARY_SIZE = 151_936
ROWS, MAX_TOKENS, LONG_PROMPT = 8, 24, 20_000
BOUND_SECONDS = 1.5
"""Limit on the longest step on two cores, in seconds; drafting 15 tokens for each row makes the longest ones."""
_rng = random.Random(7)


def letters(count: int) -> str:
    return "".join(_rng.choices(string.ascii_lowercase, k=count))


def vocabulary_pieces() -> list[bytes]:
    """Return all bytes, words of two to nine letters, and an end token."""
    words = dict.fromkeys(letters(2 + index % 8).encode() for index in range(2 * VOCABULARY_SIZE))
    known = [*(bytes([byte]) for byte in range(256)), *words]
    return [*known[: VOCABULARY_SIZE - 1], b"<end>"]


OPTIONAL = {f"name_{n}": {"type": "string"} for n in range(2000)}
RULES = [f"rule_{n}: /[a-z]+/ rule_{(7 * n + 1) % 300} | /[a-z]+/ /{letters(2)}/" for n in range(300)]
GRAMMARS = {
    "constant of 20,000 letters": Grammar(kind="json_schema", text=json.dumps({"const": letters(20_000)})),
    "constant object of 2,500 names": Grammar(
        kind="json_schema", text=json.dumps({"const": {f"name_{n}": letters(10) for n in range(2500)}})
    ),
    "4,500 choices": Grammar(kind="choice", text=json.dumps([letters(8) for _ in range(4500)])),
    "2,000 optional names": Grammar(
        kind="json_schema", text=json.dumps({"type": "object", "properties": OPTIONAL, "additionalProperties": False})
    ),
    "a million repetitions": Grammar(kind="regex", text="(a{1000}){1000}"),
    "expression with many states": Grammar(kind="regex", text="([\\p{L}\\p{N}]{1,300}[\\p{P}]?){20}"),
    "300 rules that begin alike": Grammar(
        kind="lark", text="start: " + " | ".join(f"rule_{n}" for n in range(300)) + "\n" + "\n".join(RULES)
    ),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "1,024 biases": {"logit_bias": dict.fromkeys(range(1024), 1.0)},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "20 log probabilities": {"top_logprobs": 20},
    "top-k, top-p, min-p": {"temperature": 1.0, "top_k": 1000, "top_p": 0.9, "min_p": 0.01},
}


@dataclass
class TimedEngine:
    """An engine whose steps are timed."""

    engine: Engine

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.admit, self.release = self.engine.admit, self.engine.release

    def step(self, plan: StepPlan) -> StepResult:
        result = self.engine.step(plan)
        self.seconds.append(result.seconds)
        return result


def run(
    name: str,
    *,
    rows: int = ROWS,
    prompt: int = 4,
    constraint: AnswerConstraint | None = None,
    scores_prompt: bool = False,
    **sampling: Any,
) -> float:
    """Print the step times of `rows` equal requests; return the longest, in seconds."""
    target = tiny_model("qwen3", vocabulary_size=VOCABULARY_SIZE)
    engine = build(target, vocabulary=VOCABULARY_SIZE, chunk_tokens=2048, max_context_tokens=2 * LONG_PROMPT)
    timed_engine = TimedEngine(engine)
    Loop(Scheduler(engine.limits), timed_engine).run(  # type: ignore[arg-type]
        *(
            Request(
                id=str(row),
                prompt_tokens=tuple(_rng.randrange(256) for _ in range(prompt)),
                max_tokens=MAX_TOKENS,
                sampling=SamplingParameters(seed=row, **sampling),
                constraint=constraint,
                scores_prompt=scores_prompt,
            )
            for row in range(rows)
        )
    )
    seconds = [1000 * pause for pause in timed_engine.seconds]
    print(f"| {name} | {rows} | {seconds[0]:.0f} | {statistics.median(seconds):.0f} | {max(seconds):.0f} |", flush=True)
    return max(timed_engine.seconds)


def main() -> int:
    mx.set_default_device(mx.cpu)
    vocabulary = Vocabulary(
        TokenTable(
            pieces=vocabulary_pieces(), stop_token_ids=frozenset({VOCABULARY_SIZE - 1}), vocabulary_size=VOCABULARY_SIZE
        )
    )
    print("| what | rows | first step, ms | median, ms | longest, ms |\n|---|---:|---:|---:|---:|")
    longest = [run(name, **sampling) for name, sampling in SAMPLINGS.items()]
    longest.append(run("prompts of 512 tokens, scored", prompt=512, scores_prompt=True, top_logprobs=20))
    run("penalties over 20,000 tokens", rows=1, prompt=LONG_PROMPT, **SAMPLINGS["penalties"])
    for label, grammar_request in GRAMMARS.items():
        command = Generate(id="", model=ModelSpecification(id="", path=""), text="x", grammar=grammar_request)
        grammar = answer_grammar(command, NO_DIALECT)
        constraint = AnswerConstraint(vocabulary, vocabulary.compile_grammar(grammar.text), None) if grammar else None
        longest.append(run(label, constraint=constraint, temperature=1.0))
    return int(max(longest) > BOUND_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

"""The seeded generator of chat samples: every task, its share, and conversations of several turns."""

from __future__ import annotations

import random
from collections.abc import Iterator

import tasks_numbers
import tasks_talk
import tasks_words
from samples import Message, Sample, Turn, TurnMaker, pick
from tasks_tools import tool_call
from words import NAMES

# Every task's maker, its share at first, and its share later, when the short tasks need more practice.
TASKS: dict[str, tuple[TurnMaker, float, float]] = {
    "counting": (tasks_numbers.counting, 10, 9),
    "arithmetic": (tasks_numbers.arithmetic, 17, 24),
    "long addition (think)": (tasks_numbers.long_addition, 5, 6),
    "word problems (think)": (tasks_numbers.word_problem, 6, 7),
    "comparing (think)": (tasks_numbers.comparing, 4, 3),
    "sorting numbers": (tasks_numbers.sorting, 7, 11),
    "times tables": (tasks_numbers.times_table, 5, 3),
    "markdown tables": (tasks_numbers.markdown_table, 3, 2),
    "spelling": (tasks_words.spelling, 11, 22),
    "repeating": (tasks_words.repeating, 11, 15),
    "word lists": (tasks_words.word_sorting, 5, 9),
    "JSON objects": (tasks_words.json_object, 8, 7),
    "JSON lists": (tasks_words.json_list, 3, 5),
    "Python functions": (tasks_words.python_function, 7, 5),
    "small talk": (tasks_talk.small_talk, 7, 5),
    "facts": (tasks_talk.facts, 3, 5),
    "out of reach": (tasks_talk.unknown, 3, 2),
}

TOOL_SHARE = 0.09

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Paceline's demo assistant.",
    "You are a helpful assistant",
    "Be brief.",
    "You are a small, fast assistant.",
    "Answer plainly and shortly.",
    "You are a helpful, honest assistant.",
)


def _messages(turns: list[Turn]) -> list[Message]:
    messages: list[Message] = []
    for turn in turns:
        answer: Message = {"role": "assistant", "content": turn.answer}
        if turn.reasoning and turn is turns[-1]:
            answer["reasoning_content"] = turn.reasoning
        messages += [{"role": "user", "content": turn.request}, answer]
    return messages


def _named_assistant(rng: random.Random) -> Sample:
    name = rng.choice(NAMES)
    system = pick(rng, f"Your name is {name}.", f"You are {name}.", f"You are {name}, a helpful assistant.")
    question = pick(rng, "who are you?", "what is your name?", "What is your name?", "Who are you?", "your name?")
    turns = [Turn(question, f"I am {name}.")]
    return Sample("small talk", [{"role": "system", "content": system}, *_messages(turns)])


def _follow_up(rng: random.Random) -> Sample:
    """Make a first turn, and a second request that refers to it."""
    kind = rng.random()
    if kind < 0.4:
        start = rng.randint(0, 40)
        numbers = [str(n) for n in range(start, start + rng.randint(3, 15))]
        first = Turn(
            pick(rng, "count from {a} to {b}", "Count from {a} to {b}.").format(a=numbers[0], b=numbers[-1]),
            ", ".join(numbers),
        )
        second = Turn(
            pick(rng, "now backwards", "and backwards?", "now count down", "Now in reverse."),
            ", ".join(reversed(numbers)),
        )
    elif kind < 0.7:
        first = tasks_words.spelling(rng) if kind < 0.5 else tasks_numbers.arithmetic(rng)
        second = Turn(pick(rng, "again", "again please", "say that again", "repeat that", "once more"), first.answer)
    else:
        number, following = rng.randint(1, 20), rng.randint(1, 20)
        lines = ["\n".join(f"{n} x {i} = {n * i}" for i in range(1, 11)) for n in (number, following)]
        first = Turn(pick(rng, "times table of {n}", "the {n} times table").format(n=number), lines[0])
        second = Turn(pick(rng, "now {n}", "and {n}?", "now the {n}", "the same for {n}").format(n=following), lines[1])
    return Sample("follow-ups", _messages([first, second]))


def make_turn(rng: random.Random, *, late: bool = False) -> tuple[str, Turn]:
    """Draw one task by its share and one turn of it."""
    names = list(TASKS)
    name = rng.choices(names, weights=[TASKS[n][2 if late else 1] for n in names])[0]
    return name, TASKS[name][0](rng)


def _conversation(rng: random.Random, *, late: bool) -> Sample:
    name, last = make_turn(rng, late=late)
    turns = [last]
    while len(turns) < 4 and rng.random() < 0.18:
        _, earlier = make_turn(rng, late=late)
        if earlier.reasoning is None and len(earlier.answer) < 160:
            turns.insert(0, earlier)
    return Sample(name, _messages(turns))


def make_sample(rng: random.Random, *, late: bool = False) -> Sample:
    """Draw one conversation: most are single requests, some have tools, several turns or a system prompt."""
    kind = rng.random()
    if kind < TOOL_SHARE:
        sample = tool_call(rng)
    elif kind < TOOL_SHARE + 0.03:
        sample = _follow_up(rng)
    elif kind < TOOL_SHARE + 0.035:
        return _named_assistant(rng)
    else:
        sample = _conversation(rng, late=late)
    if rng.random() < 0.15:
        sample.messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    thinks = "reasoning_content" in sample.messages[-1]
    if rng.random() < (0.3 if thinks else 0.12):
        sample.empty_think = True
        sample.messages[-1].pop("reasoning_content", None)
    return sample


def training_samples(seed: int, *, late: bool = False) -> Iterator[Sample]:
    """Yield training conversations for ever; those of the held-out split are left out."""
    rng = random.Random(seed)
    while True:
        sample = make_sample(rng, late=late)
        if not sample.held_out:
            yield sample


def task_sample(rng: random.Random, task: str) -> Sample:
    """Draw one plain conversation of one task, by its name in the table of results."""
    if task == "tool calls":
        return tool_call(rng)
    if task == "follow-ups":
        return _follow_up(rng)
    return Sample(task, _messages([TASKS[task][0](rng)]))


def held_out_samples(task: str, count: int, seed: int = 7) -> list[Sample]:
    """Return held-out conversations of one task, all with different requests."""
    rng = random.Random(f"{seed}:{task}")
    samples: dict[str, Sample] = {}
    for _ in range(20_000):
        sample = task_sample(rng, task)
        if sample.held_out and sample.prompt_key not in samples:
            samples[sample.prompt_key] = sample
            if len(samples) == count:
                break
    return list(samples.values())

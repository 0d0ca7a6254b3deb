"""What a turn asks for: the built-in prompts (prose, code that repeats, JSON, new code, a list) and how many tokens.

Long contexts are made of notes before the task: sentences by a seed, so that every round reads another text.
"""

import random

TOKENS = 64
WARM_UP_TOKENS = 20
FEWEST_TOKENS = 24
"""Answers that end sooner go on behind their end, in every setting alike."""
TASKS = (
    "Explain in a few sentences why the sky is blue by day and red in the evening.",
    "Add type hints and docstrings to this Python module and repeat all of it:\n\n"
    "def mean(values):\n    return sum(values) / len(values)\n\n"
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n        return ordered[middle]\n    return mean(ordered[middle - 1 : middle + 1])",
    "Write JSON with the names, capitals and populations of eight European countries.",
    "Write a Python function that finds all prime numbers below n, and a test for it.",
    "Count from 1 to 40.",
)
CHARACTERS_PER_TOKEN = 3
"""Fewer than any usual tokenizer takes of the notes, so that a prompt stays below its context."""
SUBJECTS = ("The heron", "A courier", "The old mill", "Our neighbour", "The night train", "The harbour")
ACTIONS = ("reached", "passed", "described", "left behind", "was painted near", "looked for", "measured")
PLACES = ("the birch grove", "a narrow bridge", "the eastern gate", "the fjord", "an empty market", "the lighthouse")


def behind_notes(task: str, seed: str, context: int) -> str:
    """`task` behind so many notes that both together have about `context` tokens; another seed begins otherwise."""
    chooser, lines = random.Random(seed), [""]
    room = context * CHARACTERS_PER_TOKEN - len(task)
    while room > 0:
        lines.append(
            f"{chooser.choice(SUBJECTS)} {chooser.choice(ACTIONS)} {chooser.choice(PLACES)} "
            f"at {chooser.randrange(24)}:{chooser.randrange(10, 60)}."
        )
        room -= len(lines[-1])
    return "\n".join([*lines[1:], "", task])

"""Ten workloads for the embedded models that favour different drafters and lengths, one of them no drafting at all."""

import random
from dataclasses import dataclass

from app.core.request import SamplingParameters
from app.text.prompt.template import TextModel
from bench.comparison.ours import GREEDY
from bench.comparison.pairs import SPECIAL_TOKENS

Conversation = tuple[str, ...]
"""Messages of the user and the assistant in turns; the last one is the user's."""

ASSISTANT, HYBRID = "demo-assistant", "demo-hybrid"
LONGEST_ANSWER_TOKENS = 240
WITHOUT_REPETITION = SamplingParameters(temperature=0.0, presence_penalty=30.0)
"""Sampling that avoids repeated tokens: after a prompt of noise, no drafter has seen the text before."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, run one after the other or `together`; each answer is as long as the model makes it.

    With `noise_tokens` there is one more request: its prompt has this number of random tokens, and no stop token ends
    its answer."""

    name: str
    conversations: tuple[Conversation, ...]
    together: bool = False
    model: str = ASSISTANT
    sampling: SamplingParameters = GREEDY
    noise_tokens: int = 0

    def prompts(self, text: TextModel, vocabulary_size: int) -> list[list[int]]:
        """Return the prompts as token ids."""
        rendered = [
            text.render_chat(
                [
                    {"role": ("user", "assistant")[turn % 2], "content": content}
                    for turn, content in enumerate(conversation)
                ]
            )[0]
            for conversation in self.conversations
        ]
        rng = random.Random(self.name)
        noise = [rng.randrange(SPECIAL_TOKENS, vocabulary_size) for _ in range(self.noise_tokens)]
        return [*rendered, noise] if noise else rendered


def single_turns(*questions: str) -> tuple[Conversation, ...]:
    """Put each question into a conversation of its own."""
    return tuple((question,) for question in questions)


def repeated_question(question: str, answer: str) -> Conversation:
    """Return a conversation that repeats an answered question."""
    return (question, answer, question)


def count_text(numbers: range) -> str:
    """Format numbers as the assistant counts."""
    return ", ".join(str(number) for number in numbers)


def times_table(factor: int) -> str:
    """Format a times table as the assistant writes it."""
    return "\n".join(f"{factor} x {number} = {factor * number}" for number in range(1, 11))


WORKLOADS = (
    Workload(
        "counting",
        single_turns(
            "Count backwards from 40 to 1.", "Write the times table of 7.", "Make a table of squares from 1 to 12."
        ),
    ),
    Workload(
        "stream",
        (
            *single_turns(
                "Hello, who are you?", "Spell window.", "Write the times table of 4.", "Sort 9, 3, 55, 21, 8, 40."
            ),
            repeated_question(
                "Make a table of cubes from 1 to 6.", "| n | cube |\n| --- | --- |\n| 1 | 1 |\n| 2 | 8 |\n| 3 | 27 |"
            ),
            *single_turns("Tell me a joke.", "What is 347 + 589?", "Spell the word planet.", "Tell me about the moon."),
        ),
    ),
    Workload(
        "spelling",
        single_turns(
            "Spell window.",
            "Sort 9, 3, 55, 21, 8, 40.",
            "Spell the word garden.",
            "List five animals.",
            "Sort these words: pear, apple, fig.",
            "How many letters are in garden?",
            "Put these words in alphabetical order: stone, lamp, river, bird.",
            "Spell the word planet.",
            "Repeat this: small river seven garden paper moon.",
            "Sort these numbers: 42, 7, 19, 3, 88.",
            "Spell mountain.",
            "What is 47 + 38?",
        ),
    ),
    Workload(
        "code",
        single_turns(
            "Make JSON from name: Ada, age: 36, city: Paris, colour: red, active: true",
            "Make a JSON list of apple, pear, fig, plum, cherry",
            "Write JSON with title Dune, author Frank, year 1965 and pages 412.",
            "Write a Python function that checks if a number is prime.",
            "Write JSON with name Bob, age 41 and city Oslo.",
            "Write a Python function that counts the vowels in a string.",
        ),
    ),
    Workload(
        "copying",
        (
            repeated_question("Write the times table of 9.", times_table(9)),
            repeated_question("Count backwards from 40 to 1.", count_text(range(40, 0, -1))),
            ("Count from 21 to 90 please.",),
        ),
    ),
    Workload(
        "sampled",
        single_turns(
            "Write a Python function that checks if a number is prime.",
            "Tell me about the moon.",
            "Make a table of cubes from 2 to 9.",
            "Sort 9, 3, 55, 21, 8, 40.",
            "What is 347 + 589?",
        ),
        sampling=SamplingParameters(temperature=0.8, seed=7),
    ),
    Workload("strange", (), sampling=WITHOUT_REPETITION, noise_tokens=24),
    Workload(
        "four rows",
        single_turns(
            "Count from 3 to 70.",
            "Write the times table of 7.",
            "Make a table of squares from 1 to 12.",
            "Count backwards from 40 to 1.",
        ),
        together=True,
    ),
    Workload(
        "hybrid",
        single_turns(
            "Count from 3 to 60.",
            "Hello, who are you?",
            "Make JSON from name: Ada, age: 36, city: Paris, colour: red, active: true",
            "Make a table of squares from 1 to 12.",
        ),
        model=HYBRID,
    ),
    Workload("1.5k context", ((*("Count from 1 to 40.", count_text(range(1, 41))) * 12, "Count from 5 to 60."),)),
)

"""Small talk, facts and the honest answer to what the model cannot do."""

from __future__ import annotations

import random

from samples import Turn, pick, polish
from words import CAPITALS, NAMES, NOUNS, common_words

GREETING = "Hello! I am Paceline's demo assistant. What can I do for you?"
IDENTITY = "I am Paceline's demo assistant, a very small model that runs on your own computer."
ABILITIES = (
    "I can count, add and subtract, spell words, sort lists, repeat text, write times tables, make JSON, "
    "write small Python functions and call tools."
)
UNKNOWN = "I am only a small demo model and do not know that. " + ABILITIES

TALK: tuple[tuple[str, str], ...] = (
    (
        "hello|hi|hey|hello there|hi there|good morning|good evening|good afternoon|hey there|greetings|hi!|hello!",
        GREETING,
    ),
    (
        "who are you|what are you|what is your name|tell me about yourself|introduce yourself|what model are you|"
        "who am i talking to|are you a bot|what's your name|are you chatgpt",
        IDENTITY,
    ),
    (
        "what can you do|help|help me|what can i ask|how can you help|what do you do|what are you good at|"
        "what can i do here|show me what you can do|/help",
        ABILITIES,
    ),
    ("thanks|thank you|thank you very much|thx|great, thanks|thanks a lot|nice, thank you|cheers", "You are welcome!"),
    ("bye|goodbye|see you|good night|see you later|bye bye", "Goodbye!"),
    (
        "how are you|how are you doing|how is it going|how do you do|are you well",
        "I am well, thank you. How can I help?",
    ),
    (
        "who made you|who built you|who trained you|where do you come from",
        "I was trained from scratch for Paceline, on small tasks and the Python standard library.",
    ),
    (
        "where do you run|do you need the internet|are you online|are you local|do you send my data anywhere",
        "I run on your own computer. I need no network.",
    ),
    ("how big are you|how many parameters do you have|how large are you", "I have about five million parameters."),
    ("ok|okay|good|great|nice|cool|well done|perfect|very good", "Glad to help. What is next?"),
    ("yes|sure|no|nothing|never mind|stop", "All right. Ask me whenever you like."),
    (
        "that is wrong|wrong|you are wrong|no, that is not right|that's not correct",
        "I am sorry. I am a very small model and make mistakes.",
    ),
    ("test|testing|are you there|ping|is this working", "I am here. What can I do for you?"),
    (
        "what is paceline|tell me about paceline|what does paceline do",
        "Paceline runs language models on your own computer.",
    ),
    (
        "list the days of the week|what are the days of the week|days of the week|name the days of the week",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    ),
    (
        "list the months|what are the months of the year|months of the year|name the months",
        "January, February, March, April, May, June, July, August, September, October, November, December",
    ),
    (
        "say the alphabet|what is the alphabet|recite the alphabet|write the alphabet|the alphabet|list the letters",
        "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z",
    ),
    (
        "list the planets|what are the planets|name the planets",
        "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
    ),
    ("list the seasons|what are the seasons|name the four seasons", "Spring, summer, autumn, winter"),
    ("list some colours|name some colors|list colors|name three colours", "Red, green, blue"),
    (
        "tell me a joke|a joke please|do you know a joke|make me laugh",
        "Why did the token cross the line? It was the next one.",
    ),
    ("list some animals|name some animals|name five animals", "Cat, dog, horse, lion, rabbit"),
    ("list some fruits|name some fruits|name five fruits", "Apple, banana, cherry, lemon, orange"),
)

UNKNOWN_REQUESTS = (
    "what is the meaning of {w}",
    "who was the president in {y}",
    "write an essay about {w}",
    "tell me a story about {w}",
    "explain {w}",
    "explain {w} to me",
    "what is a {w}",
    "who invented the {w}",
    "why is the {w} so {v}",
    "translate {w} to French",
    "what happened in {y}",
    "how does a {w} work",
    "write a poem about {w}",
    "what do you think about {w}",
    "who is {p}",
    "when was {p} born",
    "how tall is {p}",
    "what is the best {w}",
    "give me a recipe for {w}",
    "summarize the history of the {w}",
    "how do i fix my {w}",
    "where can i buy a {w}",
    "tell me about {w}",
    "what is the difference between {w} and {v}",
    "write a letter to {p}",
    "describe a {w}",
)

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def small_talk(rng: random.Random) -> Turn:
    """Make a turn about a greeting, identity, abilities, thanks or one of a few fixed lists."""
    questions, answer = rng.choice(TALK) if rng.random() < 0.6 else rng.choice(TALK[:6])
    question = rng.choice(questions.split("|"))
    if rng.random() < 0.5:
        question = question[0].upper() + question[1:]
    if question[-1].isalpha() and rng.random() < 0.5:
        asks = question.lower().startswith(("wh", "how", "are", "do", "is"))
        question += "?" if asks else rng.choice(".!")
    return Turn(question, answer)


def unknown(rng: random.Random) -> Turn:
    """Answer a request outside the model's tasks honestly."""
    text = rng.choice(UNKNOWN_REQUESTS).format(
        w=rng.choice(NOUNS), v=rng.choice(common_words()), p=rng.choice(NAMES), y=rng.randint(1200, 2026)
    )
    return Turn(polish(rng, text, imperative=not text.startswith("w")), UNKNOWN)


def _following(rng: random.Random, names: list[str]) -> tuple[str, str]:
    index = rng.randrange(len(names))
    if rng.random() < 0.5:
        return pick(rng, f"what comes after {names[index]}", f"what follows {names[index]}"), names[
            (index + 1) % len(names)
        ]
    return pick(rng, f"what comes before {names[index]}", f"what is before {names[index]}"), names[index - 1]


def facts(rng: random.Random) -> Turn:
    """Ask for a capital, or for what comes before or after a day or month."""
    if rng.random() < 0.5:
        country = rng.choice(sorted(CAPITALS))
        text = pick(
            rng,
            "what is the capital of {c}",
            "capital of {c}",
            "which city is the capital of {c}",
            "tell me the capital of {c}",
            "what's the capital of {c}",
        ).format(c=country)
        return Turn(polish(rng, text, imperative=False), f"The capital of {country} is {CAPITALS[country]}.")
    text, answer = _following(rng, DAYS if rng.random() < 0.5 else MONTHS)
    return Turn(polish(rng, text, imperative=False), answer)

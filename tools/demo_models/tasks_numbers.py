"""Counting, arithmetic, sorting numbers, tables and small reasoning tasks."""

from __future__ import annotations

import random

from samples import Turn, join_items, pick, polish
from words import NAMES, PLURALS


def _count_bounds(rng: random.Random) -> tuple[int, int]:
    start = rng.choice((1, 1, 1, 0, rng.randint(1, 20), rng.randint(1, 100), rng.randint(100, 900)))
    return start, start + rng.randint(2, 12 if rng.random() < 0.4 else 36)


COUNT_UP = (
    "count from {a} to {b}",
    "count up from {a} to {b}",
    "count {a} to {b}",
    "list the numbers from {a} to {b}",
    "write the numbers {a} to {b}",
    "numbers from {a} to {b}",
    "give me the numbers between {a} and {b}",
    "count from {a} up to {b}",
)
COUNT_DOWN = (
    "count down from {a} to {b}",
    "count backwards from {a} to {b}",
    "count from {a} down to {b}",
    "count from {a} to {b}",
)
COUNT_STEPS = (
    "count from {a} to {b} by {s}",
    "count from {a} to {b} in steps of {s}",
    "count by {s} from {a} to {b}",
    "count in {s}s from {a} to {b}",
)
PER_LINE = (", one per line", " one per line", ", each on its own line", " on separate lines")


def counting(rng: random.Random) -> Turn:
    """Count up, down or in steps, on one line or several."""
    start, stop = _count_bounds(rng)
    if start == 1 and rng.random() < 0.12:
        stop = rng.choice((50, 60, 80, 100, 100, 120))
    kind, step = rng.random(), 1
    if kind < 0.55:
        text = pick(rng, *COUNT_UP)
        if start == 1 and rng.random() < 0.5:
            text = pick(rng, "count to {b}", "count up to {b}", "count all the way to {b}")
    elif kind < 0.75:
        start, stop, step = stop, start, -1
        text = pick(rng, *COUNT_DOWN)
    else:
        step = rng.choice((2, 2, 3, 4, 5, 5, 10, 10))
        stop = start + step * rng.randint(2, 12)
        text = pick(rng, *COUNT_STEPS)
    separator = ", "
    if rng.random() < 0.2:
        separator = "\n"
        text += pick(rng, *PER_LINE)
    numbers = range(start, stop + (1 if step > 0 else -1), step)
    request = polish(rng, text.format(a=start, b=stop, s=step))
    return Turn(request, separator.join(map(str, numbers)))


def _operands(rng: random.Random, operator: str) -> tuple[int, int]:
    if operator == "x":
        return rng.randint(0, 12), rng.randint(0, 12)
    top = rng.choice((10, 20, 100, 100, 100))
    first, second = rng.randint(0, top), rng.randint(0, top)
    return (max(first, second), min(first, second)) if operator == "-" else (first, second)


def arithmetic(rng: random.Random) -> Turn:
    """Ask one sum, difference or small product, answered as a whole equation."""
    operator = rng.choice("++--x")
    first, second = _operands(rng, operator)
    sign = operator if operator != "x" else rng.choice(("x", "*", "x"))
    tight = f"{first}{sign}{second}" if rng.random() < 0.3 else f"{first} {sign} {second}"
    spoken = {"+": f"{first} plus {second}", "-": f"{first} minus {second}", "x": f"{first} times {second}"}[operator]
    if rng.random() < 0.75:
        expression = tight if rng.random() < 0.6 else spoken
        text = pick(
            rng,
            "what is {e}",
            "what is {e}",
            "{e}",
            "{e} =",
            "calculate {e}",
            "compute {e}",
            "how much is {e}",
            "what's {e}",
            "work out {e}",
            "solve {e}",
            "what does {e} equal",
        ).format(e=expression)
    else:
        text = {
            "+": f"add {first} and {second}",
            "-": f"subtract {second} from {first}",
            "x": f"multiply {first} by {second}",
        }[operator]
    asks = text.startswith(("what", "how"))
    if not asks and text[0].isdigit():
        request = text + ("?" if rng.random() < 0.3 and not text.endswith("=") else "")
    else:
        request = polish(rng, text, imperative=not asks)
    result = {"+": first + second, "-": first - second, "x": first * second}[operator]
    return Turn(request, f"{first} {operator} {second} = {result}")


def long_addition(rng: random.Random) -> Turn:
    """Add a two- or three-digit number to a three-digit one, column by column in a think block."""
    first, second = rng.randint(100, 999), rng.randint(10, 999)
    columns, carry = [], 0
    for position, name in enumerate(("ones", "tens", "hundreds")):
        a, b = first // 10**position % 10, second // 10**position % 10
        total = a + b + carry
        columns.append(f"{name}: {a} + {b} + {carry} = {total}, write {total % 10} carry {total // 10}")
        carry = total // 10
    expression = pick(rng, f"{first} + {second}", f"{first}+{second}", f"{first} plus {second}")
    text = pick(rng, "what is {e}", "{e}", "calculate {e}", "work out {e}", "how much is {e}").format(e=expression)
    answer = f"{first} + {second} = {first + second}"
    return Turn(polish(rng, text, imperative=text[0] == "c"), answer, "\n".join(columns))


def word_problem(rng: random.Random) -> Turn:
    """Tell a one- or two-step story, reasoned in a think block."""
    name, thing = rng.choice(NAMES), rng.choice(PLURALS)
    total = rng.randint(2, 30)
    text, steps = f"{name} has {total} {thing}.", []
    for _ in range(rng.choice((1, 1, 2))):
        gain = total < 4 or rng.random() < 0.5
        amount = rng.randint(1, 20) if gain else rng.randint(1, total - 1)
        after = total + amount if gain else total - amount
        verb = pick(rng, "buys", "finds", "gets") if gain else pick(rng, "loses", "gives away", "sells")
        text += f" {name} {verb} {amount}{' more' if gain else ''}."
        steps.append(f"{total} {'+' if gain else '-'} {amount} = {after}")
        total = after
    text += pick(
        rng,
        f" How many {thing} does {name} have?",
        f" How many {thing} are left?",
        " How many now?",
        f" How many {thing} does {name} have now?",
    )
    return Turn(text, f"{name} has {total} {thing}.", "\n".join([f"{name} starts with {text.split()[2]}.", *steps]))


def comparing(rng: random.Random) -> Turn:
    """Ask for larger, smaller, odd or even, with the reason first."""
    kind = rng.random()
    if kind < 0.4:
        number = rng.randint(0, 200)
        word = "even" if number % 2 == 0 else "odd"
        text = pick(rng, f"is {number} even or odd", f"is {number} odd or even", f"even or odd: {number}")
        reason = f"The last digit of {number} is {number % 10}. {number % 10} is {word}."
        return Turn(polish(rng, text, imperative=False), f"{number} is {word}.", reason)
    first, second = rng.sample(range(200), 2)
    larger = kind < 0.75
    word = pick(rng, "larger", "bigger", "greater") if larger else "smaller"
    best = max(first, second) if larger else min(first, second)
    text = pick(
        rng,
        f"which is {word}, {first} or {second}",
        f"what is {word}: {first} or {second}",
        f"which number is {word}, {first} or {second}",
    )
    reason = f"{max(first, second)} > {min(first, second)}"
    return Turn(polish(rng, text, imperative=False), f"{best} is {word}.", reason)


def sorting(rng: random.Random) -> Turn:
    """Sort a few numbers either way."""
    numbers = rng.sample(range(rng.choice((10, 10, 30, 100, 100))), rng.randint(3, 7))
    listed = join_items(rng, [str(n) for n in numbers])
    down = rng.random() < 0.3
    if down:
        text = pick(
            rng,
            "sort {l} from largest to smallest",
            "sort {l} in descending order",
            "sort descending: {l}",
            "sort {l} from high to low",
            "order {l} from biggest to smallest",
        )
    else:
        text = pick(
            rng,
            "sort {l}",
            "sort {l}",
            "sort these numbers: {l}",
            "sort the numbers {l}",
            "put {l} in order",
            "sort {l} in ascending order",
            "sort {l} from smallest to largest",
            "order {l}",
            "sort: {l}",
        )
    return Turn(polish(rng, text.format(l=listed)), ", ".join(map(str, sorted(numbers, reverse=down))))


def times_table(rng: random.Random) -> Turn:
    """Write a multiplication table, one product a line."""
    number, last = rng.randint(1, 20), 10
    text = pick(
        rng,
        "times table of {n}",
        "times table for {n}",
        "the {n} times table",
        "write the times table of {n}",
        "multiplication table of {n}",
        "show the {n} times table",
        "give me the {n} times table",
        "multiplication table for {n}",
        "write the multiplication table of {n}",
    )
    if rng.random() < 0.35:
        last = rng.choice((5, 6, 8, 9, 11, 12, 12, 15, 20))
        text += pick(rng, " up to {m}", " to {m}", " from 1 to {m}")
    lines = [f"{number} x {i} = {number * i}" for i in range(1, last + 1)]
    return Turn(polish(rng, text.format(n=number, m=last), imperative=text[0] in "wsg"), "\n".join(lines))


def markdown_table(rng: random.Random) -> Turn:
    """Write a small Markdown table of a function of the row's number."""
    name, head, rule = rng.choice(
        (
            ("squares", "square", lambda n: n * n),
            ("doubles", "double", lambda n: 2 * n),
            ("cubes", "cube", lambda n: n**3),
            ("halves of even numbers", "half", lambda n: n),
        )
    )
    start, last = rng.choice((1, 1, 1, 2, 3)), rng.randint(4, 12)
    text = pick(
        rng,
        "make a table of {k} from {a} to {b}",
        "table of {k} from {a} to {b}",
        "write a markdown table of the {k} from {a} to {b}",
        "show a table of {k} from {a} to {b}",
    )
    factor = 2 if head == "half" else 1
    rows = [f"| {n * factor} | {rule(n)} |" for n in range(start, last + 1)]
    request = polish(rng, text.format(k=name, a=start * factor, b=last * factor))
    return Turn(request, "\n".join([f"| n | {head} |", "| --- | --- |", *rows]))

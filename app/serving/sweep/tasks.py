"""What a turn asks for: the built-in prompts (prose, code that repeats, JSON, new code, a list) and how many tokens."""

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

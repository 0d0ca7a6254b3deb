"""The task that each agent is given: a word is wrong in a file."""

WRONG, RIGHT = "wrold", "world"
TASK = f"Replace {WRONG} by {RIGHT} in"

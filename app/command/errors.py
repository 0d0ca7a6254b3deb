"""What the command line tells instead of a traceback."""


class CommandError(Exception):
    """Something that a person at the prompt can act on; the message is all they see."""

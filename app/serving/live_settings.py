"""The settings as they are now: what the command line and the environment say, then what is stored, then defaults."""

from app.settings import Settings


class LiveSettings:
    """One per server process."""

    def __init__(self, given: Settings) -> None:
        self.current = given
        """Every setting as it is in effect, frozen; another object after a change."""

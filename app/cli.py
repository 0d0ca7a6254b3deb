"""The `paceline` command."""


def main() -> None:
    """Run the command line."""

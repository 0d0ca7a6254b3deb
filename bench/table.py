"""Writes the table of measurements into `docs/speed.md`: `python bench/table.py bench/results/*.json`."""

import json
import sys
from pathlib import Path

from bench.comparison.report import as_markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "speed.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def main(files: list[str]) -> None:
    """Replace the text between the two marks."""
    documents = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{as_markdown(documents)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

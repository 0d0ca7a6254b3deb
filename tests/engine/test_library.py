"""The engine as a library: the program in `docs/library.md` runs unchanged."""

import re
import subprocess
import sys

from tests.architecture.source import ROOT


def test_the_program_in_the_document_streams_an_answer_and_says_what_drafts_brought() -> None:
    document = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    answer, summary = ran.stdout.rsplit("\n", 2)[:2]
    assert "18, 19, 20" in answer
    accepted, drafted = map(int, re.fullmatch(r"stop: (\d+) of (\d+) drafts accepted", summary).groups())  # type: ignore[union-attr]
    assert drafted >= accepted > 10

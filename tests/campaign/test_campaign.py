"""The campaign itself, against a real server."""

import subprocess
import sys

import pytest

MINUTES = 5


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 1500)
def test_no_promise_breaks_under_attack() -> None:
    command = [sys.executable, "-m", "campaign", "--minutes", str(MINUTES)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr

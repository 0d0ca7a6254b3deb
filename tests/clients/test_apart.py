"""Libraries whose dependencies conflict with Paceline's: run in a separate environment, with drafts and without."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Both

pytestmark = pytest.mark.system("clients of others")
PYTHON = Path(sys.prefix) / "clients/bin/python"


@pytest.mark.parametrize("client", ["instructor_client", "litellm_client"])
def test_a_client_of_its_own_environment_gets_what_it_asks_for(both: Both[Any], client: str) -> None:
    script = Path(__file__).parent / "apart" / f"{client}.py"

    def talk(url: str) -> Any:
        done = subprocess.run([PYTHON, script, url, MODEL], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert both(talk)

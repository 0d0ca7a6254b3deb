"""The official clients of npm: what each makes of every endpoint, with drafts and without."""

import json
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import Both
from tests.published import JAVASCRIPT, LOCKED_JAVASCRIPT

pytestmark = pytest.mark.system("npm")
RAIN = [["Oslo", "rain, 4 degrees in Oslo"]]


def told_by(script: str, url: str) -> dict[str, Any]:
    """The value that a script tells. It comes by stdin, so that its imports are looked up where it runs."""
    command = ["node", "--input-type=module", "-", url]
    source = (LOCKED_JAVASCRIPT / script).read_text()
    done = subprocess.run(command, cwd=JAVASCRIPT, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_openai_chats_parses_calls_runs_tools_responds_embeds_and_names_errors(both: Both[dict[str, Any]]) -> None:
    told = both(lambda url: told_by("openai.mjs", url))
    assert told["chat"]["text"] == told["chat"]["streamed"] != ""
    assert told["chat"]["usage"][0] == told["chat"]["usage"][1] > 0
    assert set(told["parsed"]) == {"first_name", "age_in_years"}
    assert told["calls"] == {"call": ["get_weather", {"city": "Oslo"}], "streamed": {"city": "Oslo"}}
    assert (told["ran"]["seen"], "4 degrees" in told["ran"]["text"]) == (["Oslo"], True)
    responses = told["responses"]
    assert responses["text"] == responses["streamed"] == told["chat"]["text"]
    assert responses["parsed"] == told["parsed"]
    assert (responses["kinds"][0], responses["kinds"][-1]) == ("response.created", "response.completed")
    assert (told["embeddings"], told["models"]) == ([1, 1], True)
    assert told["errors"] == {"missing": [True, "model_not_found"], "wrong": [True, "temperature"], "gone": True}


def test_ai_generates_texts_and_objects_and_runs_tools(both: Both[dict[str, Any]]) -> None:
    told = both(lambda url: told_by("ai.mjs", url))
    assert told["chat"]["text"] == told["chat"]["streamed"] != ""
    assert told["chat"]["usage"][0] == told["chat"]["usage"][1] > 0
    assert set(told["object"]["object"]) == {"first_name", "age_in_years"}
    assert (told["object"]["streamed"], told["object"]["grew"]) == (told["object"]["object"], True)
    tools = told["tools"]
    assert tools["results"] == tools["streamedResults"] == RAIN
    assert "4 degrees" in tools["text"] == tools["streamed"]
    assert {"tool-input-delta", "tool-call", "tool-result", "text-delta"} <= set(tools["kinds"])
    assert (told["embedding"], told["errors"]) == (1, [True, 404, False])

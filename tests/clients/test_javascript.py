"""The npm packages `openai` and `ai` on the endpoints that they call, with drafts and without."""

import json
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import Both
from tests.published import JAVASCRIPT, LOCKED_JAVASCRIPT

pytestmark = pytest.mark.system("npm")
RAIN = [["Oslo", "rain, 4 degrees in Oslo"]]


def told_by(script: str, url: str) -> dict[str, Any]:
    """Return the value that a script prints. Node gets it by stdin, so that imports resolve in its working folder."""
    command = ["node", "--input-type=module", "-", url]
    source = (LOCKED_JAVASCRIPT / script).read_text()
    done = subprocess.run(command, cwd=JAVASCRIPT, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_openai_chats_parses_calls_runs_tools_responds_embeds_and_names_errors(both: Both[dict[str, Any]]) -> None:
    report = both(lambda url: told_by("openai.mjs", url))
    assert report["chat"]["text"] == report["chat"]["streamed"] != ""
    assert report["chat"]["usage"][0] == report["chat"]["usage"][1] > 0
    assert set(report["parsed"]) == {"first_name", "age_in_years"}
    assert report["calls"] == {"call": ["get_weather", {"city": "Oslo"}], "streamed": {"city": "Oslo"}}
    assert (report["ran"]["seen"], "4 degrees" in report["ran"]["text"]) == (["Oslo"], True)
    responses = report["responses"]
    assert responses["text"] == responses["streamed"] == report["chat"]["text"]
    assert responses["parsed"] == report["parsed"]
    assert (responses["kinds"][0], responses["kinds"][-1]) == ("response.created", "response.completed")
    assert (report["embeddings"], report["models"]) == ([1, 1], True)
    assert report["errors"] == {"missing": [True, "model_not_found"], "wrong": [True, "temperature"], "gone": True}


def test_ai_generates_texts_and_objects_and_runs_tools(both: Both[dict[str, Any]]) -> None:
    report = both(lambda url: told_by("ai.mjs", url))
    assert report["chat"]["text"] == report["chat"]["streamed"] != ""
    assert report["chat"]["usage"][0] == report["chat"]["usage"][1] > 0
    assert set(report["object"]["object"]) == {"first_name", "age_in_years"}
    assert (report["object"]["streamed"], report["object"]["grew"]) == (report["object"]["object"], True)
    tools = report["tools"]
    assert tools["results"] == tools["streamedResults"] == RAIN
    assert "4 degrees" in tools["text"] == tools["streamed"]
    assert {"tool-input-delta", "tool-call", "tool-result", "text-delta"} <= set(tools["kinds"])
    assert (report["embedding"], report["errors"]) == (1, [True, 404, False])

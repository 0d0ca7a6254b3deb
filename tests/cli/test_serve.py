"""The README's first minute, for real: start the server, talk to it with the official client and the command line."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import openai
import pytest
from click.testing import Result
from typer.testing import CliRunner

from app.cli import application

QUESTION = "Count from 1 to 20."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A running server and the environment in which the command line finds it."""
    folder = tmp_path_factory.mktemp("serve")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
        "PACELINE_HOME": str(folder / "home"),
        "PACELINE_OPENBLAS": "0",
        "HF_HOME": str(folder / "hub"),
        "HOME": str(folder),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "Ctrl-C stops the server" in line:
                break
        address = re.search(r"http://127\.0\.0\.1:(\d+)/v1", said)
        assert address, said + (folder / "log").read_text(encoding="utf-8")
        yield {**environment, "PACELINE_PORT": address[1], "said": said}
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 0


def run(served: Mapping[str, str], *words: str) -> Result:
    return CliRunner().invoke(application, list(words), env=dict(served))


def test_serve_says_what_it_found_and_what_to_try(served: Mapping[str, str]) -> None:
    for part in ("demo-assistant", "demo-draft", "curl ", "from openai import OpenAI"):
        assert part in served["said"]


def test_the_official_client_streams(served: Mapping[str, str]) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served['PACELINE_PORT']}/v1", api_key="none")
    chunks = client.chat.completions.create(
        model="demo-assistant",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        max_tokens=16,
        temperature=0,
    )
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(said) > 2
    assert "".join(said)


def test_the_command_line_chats_and_sees_the_model(served: Mapping[str, str]) -> None:
    drafted = run(served, "chat", "demo-assistant", "--once", QUESTION, "--temperature", "0")
    plain = run(served, "chat", "demo-assistant", "--once", QUESTION, "--temperature", "0", "--no-speculation")
    assert drafted.exit_code == plain.exit_code == 0
    assert drafted.stdout == plain.stdout
    assert "tokens/s" in drafted.stderr
    assert "demo-assistant" in run(served, "ps").stdout
    assert run(served, "load", "demo-hybrid", "--pin").exit_code == 0
    assert "(pinned)" in run(served, "ps").stdout
    assert run(served, "unload", "demo-hybrid").exit_code == 0
    assert run(served, "doctor").exit_code == 0

"""The greeting of `serve`: its lines can be pasted as they are."""

import json
import re
import shlex
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from app import cli
from app.command import doctor
from app.command.listing import ModelRow, curl_line, greeting, python_lines
from app.settings import read_settings

ROW = ModelRow("demo", "main", "embedded", 10_000_000, 4096, "demo-draft", "", "demo")


def test_the_greeting_names_address_models_and_what_to_try() -> None:
    console = Console(record=True, width=160)
    console.print(greeting(read_settings(), [ROW], "http://127.0.0.1:8710/"))
    said = console.export_text()
    for part in ("http://127.0.0.1:8710/v1", "demo-draft", "curl ", "from openai import OpenAI", "paceline chat"):
        assert part in said


def test_a_base_model_is_not_the_one_to_chat_with_and_is_named_as_one() -> None:
    console = Console(record=True, width=400)
    base = replace(ROW, id="base-8b", is_base=True)
    console.print(greeting(read_settings(), [base, replace(ROW, draft="")], "http://127.0.0.1:8710"))
    said = console.export_text()
    assert curl_line("http://127.0.0.1:8710", "demo") in said
    assert re.search(r"base-8b +base ", said)


def test_lines_to_copy_are_never_broken_or_indented() -> None:
    console = Console(record=True, width=40)
    console.print(greeting(read_settings(), [ROW], "http://127.0.0.1:8710"), crop=False)
    said = console.export_text().splitlines()
    assert curl_line("http://127.0.0.1:8710", "demo") in said
    assert set(python_lines("http://127.0.0.1:8710", "demo", needs_key=False).splitlines()) <= set(said)


def test_the_set_up_address_is_told_whole_and_only_when_there_is_one() -> None:
    address = "http://127.0.0.1:8710/admin/setup#" + "x" * 43
    for setup in (address, ""):
        console = Console(record=True, width=40)
        console.print(greeting(read_settings(), [ROW], "http://127.0.0.1:8710/", setup), crop=False)
        said = console.export_text()
        assert "http://127.0.0.1:8710/admin/" in said
        assert (address in said.splitlines()) == ("Choose a password" in said) == bool(setup)


def test_without_a_model_the_greeting_says_where_to_put_one() -> None:
    console = Console(record=True, width=160)
    console.print(greeting(read_settings(), [], "http://127.0.0.1:8710"))
    assert "PACELINE_MODEL_DIRS" in console.export_text()


def test_a_start_warns_of_what_makes_every_model_slow_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor, "OPENBLAS_LIBRARY", "libnone.so.0")
    monkeypatch.setattr("app.command.listing.models_for_greeting", lambda *_values: [ROW])
    live: Any = SimpleNamespace(current=read_settings())
    cli._greet("http://127.0.0.1:8710", "", live, cast("Any", None))
    assert "libnone.so.0 is not installed" in caplog.text


def test_the_curl_line_is_one_valid_command() -> None:
    command, url, *rest = shlex.split(curl_line("http://127.0.0.1:8710", "demo"))
    assert (command, url) == ("curl", "http://127.0.0.1:8710/v1/chat/completions")
    assert json.loads(rest[-1])["model"] == "demo"


def test_the_python_lines_compile_and_never_show_the_key() -> None:
    for needs_key in (True, False):
        lines = python_lines("http://127.0.0.1:8710", "demo", needs_key=needs_key)
        compile(lines, "snippet", "exec")
        assert ("PACELINE_API_KEY" in lines) == needs_key

"""Real tokenizers of five families: prompts as transformers makes them, and text that comes out as it went in."""

import contextlib
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.core.errors import InvalidRequest
from app.models.tokenizer_file import Tokenizer, TokenizerCache
from app.text.prompt.template import TextModel
from tests.published import TOKENIZERS, chat_templates, tokenizer_folder
from tests.text.dialogues import TOOLS, dialogues, user, variants

pytestmark = pytest.mark.system("npm")
TEXT = (
    "Grüße, 你好 👩‍💻👨‍👩‍👧‍👦🇩🇪 — naïve café,  two spaces\n\n\tdef f(x): return 'é'\r\n"
    " 한국어 日本語 12345.678 ﷽ \u200d ok "
)


TOLD_OTHERWISE = {"tool_calls_in_words", "text_before_calls", "tool_calls_split"}


@pytest.fixture(scope="module", params=[package.name for package in TOKENIZERS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A published tokenizer as a model folder; gpt-oss publishes its template in a separate file."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    for file in tokenizer_folder(request.param).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 8192}))
    if request.param == "gptoss":
        (folder / "chat_template.jinja").write_text(chat_templates()["openai-gpt-oss-120b"].read_text())
    return TextModel.load(folder)


TEXT_PROCESS = """
import sys, app.worker.text_process
from pathlib import Path
from app.text.prompt.template import TextModel
for folder in sys.argv[1:]:
    tokenizer = TextModel.load(Path(folder)).tokenizer
    print(type(tokenizer).__name__, tokenizer.encode("Grüße, 你好 x = 1"))
"""


def test_a_process_that_reads_texts_has_the_tokenizers_of_transformers(tmp_path: Path) -> None:
    folders = []
    for package in TOKENIZERS:
        folder = tmp_path / package.name
        folder.mkdir()
        for file in tokenizer_folder(package.name).iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        folders.append(folder)
    run = subprocess.run([sys.executable, "-c", TEXT_PROCESS, *folders], capture_output=True, text=True, check=True)
    loaded = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    assert run.stdout.splitlines() == [
        f"{type(tokenizer).__name__} {tokenizer.encode('Grüße, 你好 x = 1')}" for tokenizer in loaded
    ]


def test_prompt_tokens_are_those_of_apply_chat_template(model: TextModel) -> None:
    """`apply_chat_template` is not asked about null content, because it drops the key, nor about empty content beside
    calls, which a template may take for an answer without calls."""
    compared = 0
    shown = "weather" in model.tokenizer.apply_chat_template([user("Hi")], tools=TOOLS, tokenize=False)
    for (messages, tools), thinks in product(dialogues(), ({}, {"enable_thinking": True}, {"enable_thinking": False})):
        if any(
            message["content"] is None or ("tool_calls" in message and not message["content"]) for message in messages
        ):
            continue
        rendered = [tokens for variant, _ in variants(messages) if (tokens := applied(model, variant, tools, thinks))]
        # Tools that a template does not show are left out: we would describe them in words, transformers drops them.
        tokens, _, notices = model.render_chat(messages, tools if shown else None, thinks)
        if rendered and not {notice.code for notice in notices} & TOLD_OTHERWISE:
            assert tokens in rendered
            compared += 1
    assert compared >= 60


def applied(model: TextModel, messages: list[dict[str, Any]], tools: Any, thinks: dict[str, bool]) -> list[int] | None:
    """Return the tokens of `apply_chat_template`; None if it raises."""
    options: Any = {"tools": tools, "add_generation_prompt": True, "return_dict": False} | thinks
    with contextlib.suppress(Exception):
        return list(model.tokenizer.apply_chat_template(messages, **options))
    return None


def test_text_comes_out_as_it_went_in_however_its_bytes_are_split(model: TextModel) -> None:
    tokens = model.encode(TEXT)
    assert tokens == model.tokenizer.encode(TEXT)
    assert model.table.decode(tokens) == TEXT == model.tokenizer.decode(tokens, skip_special_tokens=True)
    stream = model.table.open_stream()
    pieces = [stream.feed(token) for token in tokens]
    assert "".join([*pieces, stream.finish()]) == TEXT
    assert "" in pieces
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_the_server_takes_no_token_for_shorter_than_it_is(model: TextModel) -> None:
    """The server refuses prompts by this length before it tokenizes: too small a value would refuse some that fit."""
    folder = Path(model.tokenizer.name_or_path)
    longest = max(len(piece) for piece in model.table.pieces)
    assert longest <= Tokenizer(folder, TokenizerCache()).longest_bytes() <= 3 * longest


def test_every_token_spells_what_the_tokenizer_says(model: TextModel) -> None:
    shown = [token for token in range(0, len(model.table.pieces), 37) if token not in model.table.hidden_token_ids]
    for token in shown:
        text, token_bytes = model.table.token_text(token)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert text == model.tokenizer.decode([token], clean_up_tokenization_spaces=False), token_bytes


def test_a_middle_is_asked_for_in_the_models_own_words(model: TextModel) -> None:
    known = model.tokenizer.get_vocab()
    if "<|fim_middle|>" in known or "<｜fim▁end｜>" in known:
        tokens = model.encode(model.fill_in_middle_prompt("def add(a, b):\n", "\n    return c"))
        marks = [model.tokenizer.convert_ids_to_tokens(token) for token in tokens]
        named = [mark for mark in marks if "fim" in mark]
        assert len(named) == 3
        assert (marks[-1], marks.count(named[1])) == (named[2], 1)
    else:
        with pytest.raises(InvalidRequest, match="cannot fill in a middle"):
            model.fill_in_middle_prompt("a", "b")

"""Every published chat template with every kind of conversation, held against transformers' own rendering."""

import contextlib
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.text.messages import plain_messages, render_messages
from app.text.template import ChatTemplate
from tests.published import TOKENIZERS, chat_templates, tokenizer_folder
from tests.text.dialogues import dialogues, variants

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DIALOGUES = dialogues()


def published() -> dict[str, str]:
    """All templates by name: those of one package, and those inside the published tokenizers that are here."""
    found = {name: path.read_text(encoding="utf-8") for name, path in chat_templates().items()}
    for package in TOKENIZERS:
        file = tokenizer_folder(package.name) / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if isinstance(settings.get("chat_template"), str):
            found[f"tokenizer {package.name}"] = settings["chat_template"]
    return found


TEMPLATES = published()
OF_TOKENIZERS = [name for name in TEMPLATES if name.startswith("tokenizer ")]


def expected(source: str, messages: list[dict[str, Any]], tools: Any) -> tuple[set[str], set[str]]:
    """What transformers makes of the variants: the texts that read it right, and all texts."""
    right, every = set(), set()
    for variant, signs in variants(messages):
        with contextlib.suppress(Exception):
            (text,), _ = render_jinja_template(
                [variant], tools=tools, chat_template=source, add_generation_prompt=True, **NAMES
            )
            every.add(text)
            if not any(sign in text for sign in signs):
                right.add(text)
    fewest = min((text.count("None") + text.count("null") for text in right), default=0)
    return {text for text in right if text.count("None") + text.count("null") == fewest}, every


def test_there_are_enough_of_both() -> None:
    assert len(DIALOGUES) >= 60
    assert len(TEMPLATES) - len(OF_TOKENIZERS) >= 60


@pytest.mark.system("npm")
def test_the_published_tokenizers_bring_theirs() -> None:
    assert len(OF_TOKENIZERS) >= 4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.system("npm") if name in OF_TOKENIZERS else ()) for name in TEMPLATES]
)
def test_a_published_template_renders_as_in_transformers(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    differing = []
    for number, (messages, tools) in enumerate(DIALOGUES):
        right, every = expected(TEMPLATES[name], messages, tools)
        if rendered(template, messages, tools) not in (right or every or {None}):
            differing.append(number)
    assert differing == []


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> str | None:
    """What we make of it, if we do."""
    variables = {**NAMES, "tools": tools, "documents": None, "add_generation_prompt": True}
    with contextlib.suppress(Exception):
        return render_messages(
            plain_messages(messages), lambda plain: template.render({**variables, "messages": plain})
        )
    return None

"""Every published chat template with every kind of conversation, held against transformers' own rendering."""

import contextlib
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.core.errors import InvalidRequest
from app.text.ladder import climb
from app.text.messages import plain_messages
from app.text.template import ChatTemplate
from app.text.turns import Conversation
from tests.published import TOKENIZERS, chat_templates, tokenizer_folder
from tests.text.dialogues import dialogues, variants

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DIALOGUES = dialogues()


def published() -> dict[str, str]:
    """All templates by name: those of one package, and those inside the published tokenizers."""
    found = {name: path.read_text(encoding="utf-8") for name, path in chat_templates().items()}
    for package in TOKENIZERS:
        settings = json.loads((tokenizer_folder(package.name) / "tokenizer_config.json").read_text(encoding="utf-8"))
        if isinstance(settings.get("chat_template"), str):
            found[f"tokenizer {package.name}"] = settings["chat_template"]
    return found


TEMPLATES = published()


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
    assert len(TEMPLATES) >= 70


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_published_template_renders_as_in_transformers(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    differing = []
    for number, (messages, tools) in enumerate(DIALOGUES):
        right, every = expected(TEMPLATES[name], messages, tools)
        if rendered(name, template, messages, tools) not in (right or every or {None}):
            differing.append(number)
    assert differing == []


def rendered(name: str, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> str | None:
    """What we make of it, if we do."""
    conversation = Conversation(plain_messages(messages), tools)
    with contextlib.suppress(InvalidRequest):
        shown = {**NAMES, "documents": None, "add_generation_prompt": True}
        return climb(
            conversation,
            (),
            lambda each: template.render(shown | {"messages": each.messages, "tools": each.tools}),
        ).text
    return None

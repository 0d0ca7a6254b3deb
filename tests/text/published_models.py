"""Every published chat template as the text side of a model has it, without a tokenizer."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

from app.text.dialect import read_dialect
from app.text.prompt.ladder import Rendered
from app.text.prompt.messages import plain_messages
from app.text.prompt.rendering import Rendering, Template
from app.text.prompt.template import ChatTemplate
from app.text.prompt.turns import Conversation
from tests.published import TOKENIZERS, chat_templates, tokenizer_folder

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

UNUSABLE = {
    "fireworks-ai-llama-3-firefunction-v2": "wants variables, `functions` and `datetime`, that its own client passes",
    "Kimi-K2-Instruct": "changes a list where there are calls, which the sandbox refuses, transformers' own too",
    "Kimi-K2-Thinking": "changes a list where there are calls, which the sandbox refuses, transformers' own too",
}
"""Templates that refuse conversations of any kind, and why."""


def _published() -> dict[str, str]:
    """All templates by name: those of one package, and those inside the published tokenizers that are here."""
    templates = {name: path.read_text(encoding="utf-8") for name, path in chat_templates().items()}
    for package in TOKENIZERS:
        file = tokenizer_folder(package.name) / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if isinstance(settings.get("chat_template"), str):
            templates[f"tokenizer {package.name}"] = settings["chat_template"]
    return templates


TEMPLATES = _published()
OF_TOKENIZERS = [name for name in TEMPLATES if name.startswith("tokenizer ")]
"""Templates inside the published tokenizers, which are fetched by npm."""


@cache
def template(name: str) -> Template:
    """One of them, compiled once, with the dialect that its model has by it."""
    source = TEMPLATES[name]
    dialect = read_dialect(SimpleNamespace(chat_template=source, init_kwargs={}, get_vocab=dict))
    return Template(ChatTemplate(source).render, source, dialect)


def rendering(name: str, messages: list[dict[str, Any]], tools: Any = None, **arguments: Any) -> Rendering:
    """A conversation before one of them."""
    conversation = Conversation(plain_messages(messages), tools or None)
    return Rendering(template(name), {**NAMES, "documents": None, **arguments}, conversation)


def prompt(name: str, messages: list[dict[str, Any]], tools: Any = None, **arguments: Any) -> Rendered:
    """The prompt of a conversation. Raises InvalidRequest."""
    return rendering(name, messages, tools, **arguments).prompt()


def codes(rendered: Rendered) -> list[str]:
    """The kinds of what its client is told."""
    return [notice.code for notice in rendered.notices]

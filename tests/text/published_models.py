"""Every published chat template, used as the text side of a model uses it, but without a tokenizer."""

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
"""Templates that refuse all conversations, or all with calls, by name, with the reason."""


def _published() -> dict[str, str]:
    """Return all templates by name: those of llama-cpp-python, and those of the published tokenizers, if fetched."""
    templates = {name: path.read_text(encoding="utf-8") for name, path in chat_templates().items()}
    for package in TOKENIZERS:
        file = tokenizer_folder(package.name) / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if isinstance(settings.get("chat_template"), str):
            templates[f"tokenizer {package.name}"] = settings["chat_template"]
    return templates


TEMPLATES = _published()
OF_TOKENIZERS = [name for name in TEMPLATES if name.startswith("tokenizer ")]
"""Names of the templates inside the published tokenizers, which npm fetches."""


@cache
def template(name: str) -> Template:
    """Return a published template, compiled once, with the dialect that is detected from it."""
    source = TEMPLATES[name]
    dialect = read_dialect(SimpleNamespace(chat_template=source, init_kwargs={}, get_vocab=dict))
    return Template(ChatTemplate(source).render, source, dialect)


def rendering(name: str, messages: list[dict[str, Any]], tools: Any = None, **arguments: Any) -> Rendering:
    """Return the rendering of a conversation by a published template."""
    conversation = Conversation(plain_messages(messages), tools or None)
    return Rendering(template(name), {**NAMES, "documents": None, **arguments}, conversation)


def prompt(name: str, messages: list[dict[str, Any]], tools: Any = None, **arguments: Any) -> Rendered:
    """Render the prompt of a conversation by a published template. Raises InvalidRequest."""
    return rendering(name, messages, tools, **arguments).prompt()


def codes(rendered: Rendered) -> list[str]:
    """Return the codes of the notices to the client."""
    return [notice.code for notice in rendered.notices]

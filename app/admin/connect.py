"""`/admin/connect`: how other programs use this server, as code to copy with the user's own models in it.

Names of models are quoted, whatever is in them. Where a key is needed it comes from the environment variable
`PACELINE_API_KEY`, or stands there as a placeholder.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.hub.catalog import CatalogModel

MESSAGE = {"role": "user", "content": "Count from 1 to 20."}
KEY_VARIABLE = "PACELINE_API_KEY"
NO_KEY = "none"
KEY_PLACEHOLDER = "YOUR-KEY"
DEFAULT_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTarget:
    """What a client needs to know: the address with `/v1`, the model, and whether a key is asked for."""

    base_url: str
    model: str
    has_key: bool
    context_tokens: int = DEFAULT_CONTEXT_TOKENS

    @property
    def literal_key(self) -> str:
        """What to write where no environment variable can be named."""
        return KEY_PLACEHOLDER if self.has_key else NO_KEY

    @property
    def shell_key(self) -> str:
        """The same as a word for a shell."""
        return f'"${KEY_VARIABLE}"' if self.has_key else NO_KEY


@dataclass(frozen=True, slots=True)
class Snippet:
    """One client. `place` is the file or the prompt that the code belongs to; `note` the key of a hint."""

    id: str
    name: str
    place: str
    write: Callable[[ClientTarget], str]
    note: str = ""


def quoted(text: str) -> str:
    """A string for JSON, JavaScript, Python and YAML alike."""
    return json.dumps(text, ensure_ascii=False)


def curl(target: ClientTarget) -> str:
    """A command for a POSIX shell."""
    message = f'{{"role": "{MESSAGE["role"]}",\n                    "content": "{MESSAGE["content"]}"}}'
    body = f'{{"model": {quoted(target.model)},\n       "messages": [{message}]}}'
    lines = [f"curl {shlex.quote(target.base_url + '/chat/completions')}"]
    if target.has_key:
        lines.append(f'-H "Authorization: Bearer ${KEY_VARIABLE}"')
    lines += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(body)}"]
    return " \\\n  ".join(lines)


def python(target: ClientTarget) -> str:
    """A program for OpenAI's client."""
    key = f'os.environ["{KEY_VARIABLE}"]' if target.has_key else quoted(NO_KEY)
    lines = ["import os", ""] if target.has_key else []
    lines += [
        "from openai import OpenAI",
        "",
        "client = OpenAI(",
        f"    base_url={quoted(target.base_url)},",
        f"    api_key={key},",
        ")",
        "reply = client.chat.completions.create(",
        f"    model={quoted(target.model)},",
        f"    messages=[{json.dumps(MESSAGE)}],",
        ")",
        "print(reply.choices[0].message.content)",
    ]
    return "\n".join(lines)


def javascript(target: ClientTarget) -> str:
    """A module for OpenAI's client."""
    key = f"process.env.{KEY_VARIABLE}" if target.has_key else quoted(NO_KEY)
    lines = [
        'import OpenAI from "openai";',
        "",
        "const client = new OpenAI({",
        f"  baseURL: {quoted(target.base_url)},",
        f"  apiKey: {key},",
        "});",
        "const reply = await client.chat.completions.create({",
        f"  model: {quoted(target.model)},",
        f"  messages: [{json.dumps(MESSAGE)}],",
        "});",
        "console.log(reply.choices[0].message.content);",
    ]
    return "\n".join(lines)


def langchain(target: ClientTarget) -> str:
    """A program for LangChain."""
    key = f'os.environ["{KEY_VARIABLE}"]' if target.has_key else quoted(NO_KEY)
    lines = ["import os", ""] if target.has_key else []
    lines += [
        "from langchain_openai import ChatOpenAI",
        "",
        "chat = ChatOpenAI(",
        f"    base_url={quoted(target.base_url)},",
        f"    api_key={key},",
        f"    model={quoted(target.model)},",
        ")",
        f"print(chat.invoke({json.dumps(MESSAGE['content'])}).content)",
    ]
    return "\n".join(lines)


def environment(target: ClientTarget) -> str:
    """The variables that many programs read."""
    lines = [
        f"export OPENAI_BASE_URL={shlex.quote(target.base_url)}",
        f"export OPENAI_API_BASE={shlex.quote(target.base_url)}",
        f"export OPENAI_API_KEY={target.shell_key}",
    ]
    return "\n".join(lines)


def open_webui(target: ClientTarget) -> str:
    """Its environment."""
    lines = [
        f"export OPENAI_API_BASE_URL={shlex.quote(target.base_url)}",
        f"export OPENAI_API_KEY={target.shell_key}",
        "open-webui serve",
    ]
    return "\n".join(lines)


def form(target: ClientTarget) -> str:
    """What goes into the form of an app that speaks to LM Studio, llama.cpp or any such server."""
    return f"Base URL  {target.base_url}\nAPI key   {target.literal_key}\nModel     {target.model}"


def continue_dev(target: ClientTarget) -> str:
    """Its configuration."""
    lines = [
        "name: Local",
        "version: 1.0.0",
        "schema: v1",
        "models:",
        "  - name: Paceline",
        "    provider: openai",
        f"    model: {quoted(target.model)}",
        f"    apiBase: {quoted(target.base_url)}",
        f"    apiKey: {quoted(target.literal_key)}",
        "    roles: [chat, edit, apply]",
    ]
    return "\n".join(lines)


def zed(target: ClientTarget) -> str:
    """Its settings; the key comes from the environment, under this very name."""
    name = quoted(target.model)
    lines = [
        '{"language_models": {"openai_compatible": {"Paceline": {',
        f'  "api_url": {quoted(target.base_url)},',
        '  "available_models": [{',
        f'    "name": {name},',
        f'    "display_name": {name},',
        f'    "max_tokens": {target.context_tokens}',
        "  }]",
        "}}}}",
    ]
    return "\n".join(lines)


def aider(target: ClientTarget) -> str:
    """A command for a POSIX shell."""
    lines = [
        f"export OPENAI_API_BASE={shlex.quote(target.base_url)}",
        f"export OPENAI_API_KEY={target.shell_key}",
        f"aider --model {shlex.quote('openai/' + target.model)}",
    ]
    return "\n".join(lines)


def llm(target: ClientTarget) -> str:
    """One entry of its models."""
    lines = [
        "- model_id: paceline",
        f"  model_name: {quoted(target.model)}",
        f"  api_base: {quoted(target.base_url)}",
    ]
    return "\n".join([*lines, "  api_key_name: paceline"] if target.has_key else lines)


SNIPPETS = (
    Snippet("curl", "curl", "", curl),
    Snippet("python", "Python · openai", "", python),
    Snippet("javascript", "JavaScript · openai", "", javascript),
    Snippet("langchain", "LangChain", "", langchain),
    Snippet("environment", "OPENAI_BASE_URL", "", environment, "connect.environment"),
    Snippet("apps", "LM Studio · Jan · Msty · AnythingLLM", "", form, "connect.form"),
    Snippet("open-webui", "Open WebUI", "", open_webui, "connect.open_webui"),
    Snippet("continue", "Continue", "~/.continue/config.yaml", continue_dev),
    Snippet("zed", "Zed", "settings.json", zed, "connect.zed"),
    Snippet("aider", "aider", "", aider),
    Snippet("llm", "llm", "extra-openai-models.yaml", llm, "connect.llm"),
)


NO_MODEL = "MODEL"


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and the same as JSON."""
    router = APIRouter()

    @router.get("/admin/connect", response_class=HTMLResponse)
    def get_connect(request: Request, model: str = "") -> HTMLResponse:
        """The page for the address that the browser used, and for one of the models."""
        target, models = _target(context, request, model)
        snippets = [(each, each.write(target)) for each in SNIPPETS]
        return pages.render(
            "connect.html", request, area="connect", data={}, target=target, models=models, snippets=snippets
        )

    @router.get("/admin/api/connect")
    def get_snippets(request: Request, model: str = "") -> dict[str, Any]:
        """Address, models and code."""
        target, models = _target(context, request, model)
        return {
            "base_url": target.base_url,
            "model": target.model,
            "models": models,
            "needs_key": target.has_key,
            "snippets": [
                {"id": each.id, "name": each.name, "place": each.place, "code": each.write(target)} for each in SNIPPETS
            ],
        }

    return router


def _target(context: AdminContext, request: Request, wanted: str) -> tuple[ClientTarget, list[str]]:
    """What the code is written for, and the names to choose from, those in memory first."""
    resolver = context.serving.resolver
    loaded, first = resolver.loaded(), context.settings.current.default_model
    usable = {each.id: each for each in resolver.models() if each.kind == "main" and not each.problem}
    names = sorted(usable, key=lambda name: (name != first, name not in loaded))
    name = wanted if wanted in usable else next(iter(names), NO_MODEL)
    target = ClientTarget(
        base_url=f"{request.url.scheme}://{request.headers['host']}/v1",
        model=name,
        has_key=request.app.state.door.is_closed,
        context_tokens=_context_tokens(usable.get(name)),
    )
    return target, names


def _context_tokens(model: CatalogModel | None) -> int:
    return model.context if model is not None and model.context else DEFAULT_CONTEXT_TOKENS

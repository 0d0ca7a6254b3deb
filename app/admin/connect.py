"""`/admin/connect`: snippets that connect other programs to this server, with the user's own models in them.

Model names are always quoted, because they may contain anything. If a key is required, a snippet reads it from the
environment variable `PACELINE_API_KEY` or has a placeholder.
"""

import json
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.admin.context import Admin, AdminContext
from app.coding_agents import AGENTS, CodingAgent, ModelEndpoint, as_text

FOLDER = Path(__file__).parent / "clients"
KEY_VARIABLE = "PACELINE_API_KEY"
DEFAULT_CONTEXT_TOKENS = 8192
NO_MODEL = "MODEL"

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTarget:
    """Facts that a client needs: the address with `/v1`, the model, and whether a key is required."""

    base_url: str
    model: str
    has_key: bool
    context_tokens: int = DEFAULT_CONTEXT_TOKENS

    @property
    def literal_key(self) -> str:
        """Placeholder for the key, for snippets that cannot read an environment variable."""
        return "YOUR-KEY" if self.has_key else "none"

    @property
    def shell_key(self) -> str:
        """Key as a shell word: a reference to the environment variable, or `none`."""
        return f'"${KEY_VARIABLE}"' if self.has_key else "none"


@dataclass(frozen=True, slots=True)
class Snippet:
    """Code for one client, from `clients/`. `place` is the file to put it into, `note` the text key of a hint."""

    id: str
    name: str
    place: str = ""
    note: str = ""

    def write(self, target: ClientTarget) -> str:
        """Render the code for one model."""
        return _code().get_template(f"{self.id}.txt").render(target=target)


@dataclass(frozen=True, slots=True)
class AgentSnippet:
    """Code for one of the coding agents that `paceline launch` starts."""

    id: str
    agent: CodingAgent

    def write(self, target: ClientTarget) -> str:
        """Return the command that starts the agent on this computer."""
        return shlex.join(["paceline", "launch", self.id, "--model", target.model])

    def by_hand(self, target: ClientTarget) -> str:
        """Return the files and the command that start the agent on another computer, without Paceline."""
        agent, address = self.agent, target.base_url.removesuffix("/v1")
        endpoint = ModelEndpoint(address, target.model, target.context_tokens, target.literal_key)
        files = [f"# {name}\n{json.dumps(content, indent=1)}\n" for name, content in agent.files(endpoint).items()]
        return "\n".join([*files, as_text(agent, endpoint, agent.environment(endpoint), ())])


SNIPPETS = (
    Snippet("curl", "curl"),
    Snippet("python", "Python · openai"),
    Snippet("javascript", "JavaScript · openai"),
    Snippet("langchain", "LangChain"),
    Snippet("environment", "OPENAI_BASE_URL", note="connect.environment"),
    Snippet("apps", "LM Studio · Jan · Msty · AnythingLLM", note="connect.form"),
    Snippet("open-webui", "Open WebUI", note="connect.open_webui"),
    Snippet("continue", "Continue", "~/.continue/config.yaml"),
    Snippet("zed", "Zed", "settings.json", "connect.zed"),
    Snippet("llm", "llm", "extra-openai-models.yaml", "connect.llm"),
)


AGENT_SNIPPETS = tuple(AgentSnippet(name, agent) for name, agent in AGENTS.items())


@cache
def _code() -> Environment:
    """Load all snippets. Filter `quoted` makes a string for JSON, JavaScript, Python and YAML, `shell` a shell word."""
    code = Environment(  # noqa: S701 - code, not HTML: the page escapes it
        loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    code.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    code.filters["shell"] = shlex.quote
    return code


@router.get("/admin/connect", response_class=HTMLResponse)
def get_connect(request: Request, admin: Admin, model: str = "") -> HTMLResponse:
    """Serve the page, for the address that the browser used and one of the models."""
    target, models = _target(admin, request, model)
    values: dict[str, Any] = {"target": target, "models": models, "snippets": SNIPPETS, "agents": AGENT_SNIPPETS}
    return admin.pages.render("connect.html", request, area="connect", data={}, **values)


def _target(admin: AdminContext, request: Request, requested: str) -> tuple[ClientTarget, list[str]]:
    """Return the target of the snippets, and the models to choose from: the default first, then loaded ones."""
    resolver = admin.serving.resolver
    loaded, default_model = resolver.loaded(), admin.serving.settings.default_model
    usable_models = {model.id: model for model in resolver.models() if model.kind == "main" and not model.problem}
    names = sorted(usable_models, key=lambda name: (name != default_model, name not in loaded))
    name = requested if requested in usable_models else next(iter(names), NO_MODEL)
    target = ClientTarget(
        base_url=f"{request.url.scheme}://{request.headers['host']}/v1",
        model=name,
        has_key=request.app.state.access_policy.is_key_required,
        context_tokens=(name in usable_models and usable_models[name].context) or DEFAULT_CONTEXT_TOKENS,
    )
    return target, names

"""The coding agents that `paceline launch` starts: what each needs, and by which variables and flags it is told."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Every one that Claude Code would choose by itself."""
NO_KEY = "paceline"
"""What agents send where no key is asked for: they all insist on one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the agent finds its model."""

    address: str
    model_id: str
    context_tokens: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """One agent. `context_tokens`: what its own prompt and tools leave room for work in."""

    title: str
    program: str
    install: str
    context_tokens: int
    environment: Callable[[Place], Mapping[str, str]]
    flags: Callable[[Place], Sequence[str]] = lambda _place: ()
    files: Callable[[Place], Mapping[str, Any]] = lambda _place: {}
    """JSON that it reads from a folder of ours, which this name of its environment says."""
    folder_name: str = ""


def _claude(place: Place) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.address,
        "ANTHROPIC_AUTH_TOKEN": place.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(CLAUDE_MODELS, place.model_id),
    }


def _codex(place: Place) -> Sequence[str]:
    values = {
        "model_provider": "paceline",
        "model_providers.paceline.name": "Paceline",
        "model_providers.paceline.base_url": f"{place.address}/v1",
        "model_providers.paceline.wire_api": "responses",
        "model_providers.paceline.env_key": "PACELINE_API_KEY",
        "model_context_window": place.context_tokens,
    }
    settings = (f"{name}={json.dumps(value)}" for name, value in values.items())
    return ["--model", place.model_id, *(word for setting in settings for word in ("-c", setting))]


def _opencode(place: Place) -> Mapping[str, str]:
    limit = {"context": place.context_tokens, "output": place.context_tokens // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Paceline",
        "options": {"baseURL": f"{place.address}/v1", "apiKey": place.key},
        "models": {place.model_id: {"name": place.model_id, "limit": limit}},
    }
    config = {"provider": {"paceline": provider}, "model": f"paceline/{place.model_id}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _crush(place: Place) -> Mapping[str, Any]:
    model = {"id": place.model_id, "name": place.model_id, "context_window": place.context_tokens}
    provider = {
        "type": "openai-compat",
        "base_url": f"{place.address}/v1",
        "api_key": "$PACELINE_API_KEY",
        "models": [model | {"default_max_tokens": place.context_tokens // 4}],
    }
    chosen = {"provider": "paceline", "model": place.model_id}
    config = {"providers": {"paceline": provider}, "models": {"large": chosen, "small": chosen}}
    return {"crush.json": config}


AGENTS = {
    "claude": CodingAgent(
        title="Claude Code",
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        context_tokens=32_768,
        environment=_claude,
        flags=lambda place: ["--model", place.model_id],
    ),
    "codex": CodingAgent(
        title="Codex",
        program="codex",
        install="npm install -g @openai/codex",
        context_tokens=16_384,
        environment=lambda place: {"PACELINE_API_KEY": place.key},
        flags=_codex,
    ),
    "opencode": CodingAgent(
        title="opencode",
        program="opencode",
        install="npm install -g opencode-ai",
        context_tokens=16_384,
        environment=_opencode,
    ),
    "aider": CodingAgent(
        title="aider",
        program="aider",
        install="pipx install aider-chat",
        context_tokens=8_192,
        environment=lambda place: {"OPENAI_API_BASE": f"{place.address}/v1", "OPENAI_API_KEY": place.key},
        flags=lambda place: ["--model", f"openai/{place.model_id}", "--no-show-model-warnings"],
    ),
    "crush": CodingAgent(
        title="Crush",
        program="crush",
        install="npm install -g @charmland/crush",
        context_tokens=16_384,
        environment=lambda place: {"PACELINE_API_KEY": place.key},
        files=_crush,
        folder_name="CRUSH_GLOBAL_CONFIG",
    ),
}


def as_text(agent: CodingAgent, place: Place, environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """What is run, for a shell."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([*exports, shlex.join([agent.program, *agent.flags(place), *arguments])])

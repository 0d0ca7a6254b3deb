"""The coding agents that `paceline launch` starts: the context each needs, and its variables, flags and files."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AIDER_FILE = ".aider.model.metadata.json"
CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Variables of all models that Claude Code would otherwise choose by itself."""
NO_KEY = "paceline"
"""Placeholder key for a server that asks for none: all agents insist on one."""
OUTPUT_SHARE = 8
"""Divisor of the context length that gives the longest answer: agents reserve that room before they compact."""
MAX_OUTPUT_TOKENS = 32_000
"""Longest answer that agents ever request, in tokens."""
TOOL_OUTPUT_TOKENS = 10_000
"""Tokens of one tool's output that Codex keeps by default."""


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Address, credentials and context length of a model, for an agent."""

    address: str
    model_id: str
    context_tokens: int
    """Context length, in tokens; 0: unknown."""
    key: str

    @property
    def output_tokens(self) -> int:
        """Longest answer, in tokens; the rest of the context is left to the conversation."""
        return min(MAX_OUTPUT_TOKENS, self.context_tokens // OUTPUT_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """One agent. `context_tokens`: the smallest context in which its own prompt and tools leave room for work."""

    title: str
    program: str
    install: str
    context_tokens: int
    environment: Callable[[ModelEndpoint], Mapping[str, str]]
    flags: Callable[[ModelEndpoint], Sequence[str]] = lambda _endpoint: ()
    files: Callable[[ModelEndpoint], Mapping[str, Any]] = lambda _endpoint: {}
    """JSON files, by name, that the agent reads from a folder that Paceline writes."""
    files_variable: str = ""
    """Environment variable that tells the agent where `files` are."""
    files_path: str = ""
    """Value of that variable, relative to the folder; empty: the folder itself."""


def _claude(endpoint: ModelEndpoint) -> Mapping[str, str]:
    """Return its variables: by default, it assumes a million tokens and begins each session's prompt differently."""
    limits = {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.output_tokens),
    }
    return {
        "ANTHROPIC_BASE_URL": endpoint.address,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **(limits if endpoint.context_tokens else {}),
        **dict.fromkeys(CLAUDE_MODELS, endpoint.model_id),
    }


def _codex(endpoint: ModelEndpoint) -> Sequence[str]:
    values: dict[str, str | int] = {
        "model_provider": "paceline",
        "model_providers.paceline.name": "Paceline",
        "model_providers.paceline.base_url": f"{endpoint.address}/v1",
        "model_providers.paceline.wire_api": "responses",
        "model_providers.paceline.env_key": "PACELINE_API_KEY",
        "web_search": "disabled",  # it would run on OpenAI's servers
    }
    if endpoint.context_tokens:
        values["model_context_window"] = endpoint.context_tokens
        values["model_auto_compact_token_limit"] = endpoint.context_tokens - 2 * endpoint.output_tokens
        values["tool_output_token_limit"] = min(TOOL_OUTPUT_TOKENS, endpoint.output_tokens)
    settings = (f"{name}={json.dumps(value)}" for name, value in values.items())
    return ["--model", endpoint.model_id, *(word for setting in settings for word in ("-c", setting))]


def _opencode(endpoint: ModelEndpoint) -> Mapping[str, str]:
    limit = {"context": endpoint.context_tokens, "output": endpoint.output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Paceline",
        "options": {"baseURL": f"{endpoint.address}/v1", "apiKey": endpoint.key},
        "models": {endpoint.model_id: {"name": endpoint.model_id, "limit": limit}},
    }
    config = {"provider": {"paceline": provider}, "model": f"paceline/{endpoint.model_id}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def _crush(endpoint: ModelEndpoint) -> Mapping[str, Any]:
    model = {"id": endpoint.model_id, "name": endpoint.model_id, "context_window": endpoint.context_tokens}
    provider = {
        "type": "openai-compat",
        "base_url": f"{endpoint.address}/v1",
        "api_key": "$PACELINE_API_KEY",
        "models": [model | {"default_max_tokens": endpoint.output_tokens}],
    }
    chosen = {"provider": "paceline", "model": endpoint.model_id}
    config = {"providers": {"paceline": provider}, "models": {"large": chosen, "small": chosen}}
    return {"crush.json": config}


def _aider(endpoint: ModelEndpoint) -> Mapping[str, Any]:
    """Return metadata that tells aider when a chat is too long, and saves it from looking up the model on the web."""
    limits = {"max_input_tokens": endpoint.context_tokens, "max_output_tokens": endpoint.output_tokens}
    costs = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    return {
        AIDER_FILE: {f"openai/{endpoint.model_id}": {"litellm_provider": "openai", "mode": "chat"} | limits | costs}
    }


AGENTS = {
    "claude": CodingAgent(
        title="Claude Code",
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        context_tokens=49_152,
        environment=_claude,
        flags=lambda endpoint: ["--model", endpoint.model_id],
    ),
    "codex": CodingAgent(
        title="Codex",
        program="codex",
        install="npm install -g @openai/codex",
        context_tokens=32_768,
        environment=lambda endpoint: {"PACELINE_API_KEY": endpoint.key},
        flags=_codex,
    ),
    "opencode": CodingAgent(
        title="opencode",
        program="opencode",
        install="npm install -g opencode-ai",
        context_tokens=32_768,
        environment=_opencode,
    ),
    "aider": CodingAgent(
        title="aider",
        program="aider",
        install="pipx install aider-chat",
        context_tokens=8_192,
        environment=lambda endpoint: {"OPENAI_API_BASE": f"{endpoint.address}/v1", "OPENAI_API_KEY": endpoint.key},
        flags=lambda endpoint: ["--model", f"openai/{endpoint.model_id}", "--no-show-model-warnings"],
        files=_aider,
        files_variable="AIDER_MODEL_METADATA_FILE",
        files_path=AIDER_FILE,
    ),
    "crush": CodingAgent(
        title="Crush",
        program="crush",
        install="npm install -g @charmland/crush",
        context_tokens=32_768,
        environment=lambda endpoint: {"PACELINE_API_KEY": endpoint.key},
        files=_crush,
        files_variable="CRUSH_GLOBAL_CONFIG",
    ),
}


def as_text(
    agent: CodingAgent, endpoint: ModelEndpoint, environment: Mapping[str, str], arguments: Sequence[str]
) -> str:
    """Return the exports and the command line, quoted for a shell."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([*exports, shlex.join([agent.program, *agent.flags(endpoint), *arguments])])

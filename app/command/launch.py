"""`paceline launch`: run a coding agent on a local model. Environment variables and flags configure the agent; its own
configuration files are not changed."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from app.coding_agents import AGENTS, NO_KEY, CodingAgent, ModelEndpoint
from app.command.chat import choose_model
from app.command.server import Server, target_server
from app.core.errors import CommandError
from app.machine.own_files import write_privately
from app.machine.server_file import RunningServer
from app.settings import Settings


def coding_agent(name: str) -> CodingAgent:
    """Return the agent called `name`. Raises CommandError with the known names."""
    if name not in AGENTS:
        raise CommandError(f"there is no agent {name}: the agents are {', '.join(AGENTS)}")
    return AGENTS[name]


def model_endpoint(server: Server, model: str, agent: CodingAgent, key: str, *, is_forced: bool) -> ModelEndpoint:
    """Return the endpoint of the model. Raises CommandError if its context is too short, unless `is_forced`."""
    answer = server.call("GET", f"/v1/models/{quote(model)}")
    context_tokens = int(answer.get("context") or 0)
    if 0 < context_tokens < agent.context_tokens and not is_forced:
        raise CommandError(
            f"{model} has a context of {context_tokens} tokens, and {agent.program} needs {agent.context_tokens}: name"
            " a model with a longer context by --model, or try it with --force"
        )
    return ModelEndpoint(server.address, model, context_tokens, key)


def prepare(
    agent: CodingAgent, settings: Settings, running: RunningServer, model: str | None, *, is_forced: bool
) -> tuple[ModelEndpoint, Mapping[str, str]]:
    """Return the endpoint of the agent's model, and the agent's environment."""
    model_id = choose_model(target_server(settings), model or settings.default_model)
    key = settings.api_key.get_secret_value() if settings.api_key else NO_KEY
    server = Server(settings.with_command_line(host=running.host, port=running.port))
    endpoint = model_endpoint(server, model_id, agent, key, is_forced=is_forced)
    return endpoint, environment_of(agent, endpoint, settings.home / "launch")


def environment_of(agent: CodingAgent, endpoint: ModelEndpoint, folder: Path) -> Mapping[str, str]:
    """Return the agent's environment; write the files that the agent must read into `folder`, which is Paceline's."""
    environment = dict(agent.environment(endpoint))
    for name, content in agent.files(endpoint).items():
        write_privately(folder / agent.program / name, json.dumps(content, indent=1).encode())
        environment[agent.files_variable] = str(folder / agent.program / agent.files_path)
    return environment


def exec_agent(
    agent: CodingAgent, endpoint: ModelEndpoint, environment: Mapping[str, str], arguments: Sequence[str]
) -> None:
    """Replace this process with the agent. Raises CommandError if it is not installed."""
    if shutil.which(agent.program) is None:
        raise CommandError(f"{agent.program} is not installed: {agent.install}")
    command = [agent.program, *agent.flags(endpoint), *arguments]
    os.execvpe(agent.program, command, {**os.environ, **environment})  # noqa: S606 - the user's choice

"""`paceline launch`: a coding agent on a model of this computer. It is configured by its environment and its flags; its
own files are left alone."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from app.coding_agents import AGENTS, NO_KEY, CodingAgent, Place
from app.command.chat import choose_model
from app.command.server import Server, asked_server
from app.core.errors import CommandError
from app.machine.server_file import RunningServer
from app.models.safe_files import write_privately
from app.settings import Settings


def agent_of(name: str) -> CodingAgent:
    """Return the agent called `name`. Raises CommandError with the names that exist."""
    if name not in AGENTS:
        raise CommandError(f"{name} is none of the agents that can be launched: {', '.join(AGENTS)}")
    return AGENTS[name]


def place_of(server: Server, model: str, agent: CodingAgent, key: str, *, is_forced: bool) -> Place:
    """Return where the agent finds the model. Raises CommandError if the model's context is too short for the agent."""
    answer = server.call("GET", f"/v1/models/{quote(model)}")
    context_tokens = int(answer.get("context") or 0)
    if 0 < context_tokens < agent.context_tokens and not is_forced:
        raise CommandError(
            f"{model} holds {context_tokens} tokens, and {agent.program} needs {agent.context_tokens}: name a model"
            " with a longer context by --model, or try it with --force"
        )
    return Place(server.address, model, context_tokens, key)


def prepare(
    agent: CodingAgent, settings: Settings, running: RunningServer, model: str | None, *, is_forced: bool
) -> tuple[Place, Mapping[str, str]]:
    """Return where the agent finds its model, and its environment."""
    model_id = choose_model(asked_server(settings), model or settings.default_model)
    key = settings.api_key.get_secret_value() if settings.api_key else NO_KEY
    server = Server(settings.with_command_line(host=running.host, port=running.port))
    place = place_of(server, model_id, agent, key, is_forced=is_forced)
    return place, environment_of(agent, place, settings.home / "launch")


def environment_of(agent: CodingAgent, place: Place, folder: Path) -> Mapping[str, str]:
    """Return the agent's environment; files that it must read are written into `folder`, which is ours."""
    environment = dict(agent.environment(place))
    for name, content in agent.files(place).items():
        write_privately(folder / agent.program / name, json.dumps(content, indent=1).encode())
        environment[agent.files_variable] = str(folder / agent.program / agent.files_path)
    return environment


def begin(agent: CodingAgent, place: Place, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Replace this process with the agent. Raises CommandError if it is not installed."""
    if shutil.which(agent.program) is None:
        raise CommandError(f"{agent.program} is not installed: {agent.install}")
    words = [agent.program, *agent.flags(place), *arguments]
    os.execvpe(agent.program, words, {**os.environ, **environment})  # noqa: S606 - what was asked for

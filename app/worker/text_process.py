"""Process for a model folder's tokenizer and chat template: `python -m app.worker.text_process`.

Only `app.worker.text_launch` starts it. Its standard input is the socket over which it communicates; the first message
names the folder. A hostile template or tokenizer can harm only this process: the kernel ends it if a stage takes too
much processor time, its parent if it takes too much memory. It exits with its parent, and never imports mlx.
"""

# ruff: noqa: E402 - mlx_lm must be prepared before it is imported
import gc

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage to collect

from app.engine.platform import bare_mlx_lm

bare_mlx_lm(tokenizers=True)

import logging
import signal
import sys
import time
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from app.core.errors import PacelineError
from app.core.messages import Generate, PromptRead, failed_frame, short_text
from app.core.request import Notice
from app.text.grammar.constraint import Vocabulary
from app.text.grammar.request_grammar import AnswerGrammar, answer_grammar, check_grammar, grammar_parameter
from app.text.prompt.template import ChatPrompt, TextModel
from app.text.prompt.thinking import TemplateVariables, template_variables, translate_arguments

LOAD_SECONDS = 20.0
STAGE_SECONDS = 1.0
VOCABULARY_SECONDS = 10.0
"""Limit, in seconds, on building the vocabulary that grammars need, once per tokenizer."""
GRAMMAR_SECONDS = 2.0
BYTES_PER_SECOND = 100_000
"""Number of prompt bytes that extend a stage's limit by one second; tokenizers process at least 1 MB/s."""


class Stages:
    """Times the current stage: if the stage exceeds its limit, the kernel ends the process (SIGPROF)."""

    def __init__(self) -> None:
        self._name = ""
        self._began = 0.0
        self._seconds: dict[str, float] = {}

    def begin(self, name: str, size_bytes: int = 0, *, seconds: float = STAGE_SECONDS) -> None:
        """Begin a stage. Its limit counts processor time, so that a busy machine ends no stage early."""
        self.end()
        self._name, self._began = name, time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds + size_bytes / BYTES_PER_SECOND)

    def end(self) -> None:
        """End the current stage."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        if self._name:
            spent = time.process_time() - self._began
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent
        self._name = ""

    def take(self) -> dict[str, float]:
        """Return the seconds spent since the last call, by stage."""
        self.end()
        seconds, self._seconds = self._seconds, {}
        return seconds


def main(connection: Connection) -> None:
    """Load the folder; send its token table, or the error; then answer prompts until the parent is gone."""
    folder = Path(msgspec.msgpack.decode(connection.recv_bytes(), type=str))
    stages = Stages()
    stages.begin("load", seconds=LOAD_SECONDS)
    try:
        model = TextModel.load(folder, stages.begin)
    except PacelineError as error:
        connection.send_bytes(msgspec.msgpack.encode(failed_frame("", error)))
        return
    stages.end()
    connection.send_bytes(msgspec.msgpack.encode(model.table))
    reader = Reader(model, stages)
    while True:
        command = msgspec.msgpack.decode(connection.recv_bytes(), type=Generate)
        answer = reader.read(command)
        connection.send_bytes(msgspec.msgpack.encode(msgspec.structs.replace(answer, seconds=stages.take())))


class Reader:
    """Reads the prompts of one model."""

    def __init__(self, model: TextModel, stages: Stages) -> None:
        self._model = model
        self._stages = stages

    def read(self, command: Generate) -> PromptRead:
        """Return the tokens of one prompt and the grammar of its answer, or the error if the prompt cannot be read."""
        try:
            command, notices = self._with_supported_arguments(command)
            prompt, grammar = self._prompt(command), self._grammar(command)
            text, relaxed = (grammar.text, grammar.notices) if grammar else ("", ())
            return PromptRead(
                tokens=prompt.tokens,
                checkpoints=prompt.checkpoints,
                grammar=text,
                notices=(*notices, *prompt.notices, *relaxed),
            )
        except PacelineError as error:
            failed = failed_frame(command.id, error)
        except BaseException as error:  # noqa: BLE001 - a panic inside the tokenizers is not an Exception
            failed = failed_frame(command.id, PacelineError(f"The prompt could not be read: {short_text(error)}"))
        return PromptRead(error=failed)

    def _with_supported_arguments(self, command: Generate) -> tuple[Generate, tuple[Notice, ...]]:
        """Return the command with the thinking arguments that its template supports, and notices about the others."""
        if not command.template_arguments:
            return command, ()
        self._stages.begin("render")
        variables = self._template_variables["tool_use" if command.tools else "default"]
        if variables is None:
            return command, ()
        has_reasoning = bool(self._model.table.dialect.opening)
        arguments, notices = translate_arguments(command.template_arguments, variables, has_reasoning=has_reasoning)
        return msgspec.structs.replace(command, template_arguments=arguments), notices

    @cached_property
    def _template_variables(self) -> dict[str, TemplateVariables | None]:
        """Variables that each template of the model reads; None: arguments are passed unchanged."""
        tokenizer = self._model.tokenizer
        templates = tokenizer.chat_template
        default = templates.get("default") if isinstance(templates, dict) else templates
        with_tools = templates.get("tool_use", default) if isinstance(templates, dict) else templates
        is_known = not tokenizer.init_kwargs.get("chat_template_type")
        sources = {"default": default, "tool_use": with_tools}
        return {name: template_variables(str(source or "")) if is_known else None for name, source in sources.items()}

    def _prompt(self, command: Generate) -> ChatPrompt:
        model, limit = self._model, command.model.max_context_tokens
        if command.messages is not None:
            return model.render_chat(
                command.messages,
                command.tools,
                command.template_arguments,
                max_context_tokens=limit,
                continues=command.continues,
            )
        if command.tokens is not None:
            return ChatPrompt([])
        text = command.text or ""
        if command.embeds:
            return ChatPrompt(model.encode_with_special_tokens(text, max_context_tokens=limit))
        text = text if command.suffix is None else model.fill_in_middle_prompt(text, command.suffix)
        return ChatPrompt(model.encode(text, max_context_tokens=limit))

    def _grammar(self, command: Generate) -> AnswerGrammar | None:
        if not (command.tools or command.grammar):
            return None
        self._stages.begin("grammar", seconds=GRAMMAR_SECONDS)
        grammar = answer_grammar(command, self._model.table.dialect)
        if grammar is None:
            return None
        self._stages.begin("vocabulary", seconds=VOCABULARY_SECONDS)
        vocabulary = self._vocabulary
        self._stages.begin("grammar", seconds=GRAMMAR_SECONDS)
        check_grammar(grammar, vocabulary, grammar_parameter(command))
        return grammar

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._model.table)


if __name__ == "__main__":
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        main(Connection(0))
    except (EOFError, OSError):
        sys.exit(0)

"""Tokenizers and chat templates, in one process per model folder, so that hostile files harm only their process.

The first prompt of a folder starts a process, which later prompts reuse; the very first process is started in advance.
A process ends after some idle minutes, soon after its model is unloaded, or when too many others were used since. It is
killed if it exceeds its memory limit or is silent for too long; it limits its processor time itself
(`app.worker.text_process`). The prompt in progress then fails with the reason; the next prompt starts a new process.
"""

import contextlib
import logging
import signal
import subprocess
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import psutil

from app.core.clock import Clock
from app.core.errors import InvalidRequest, ModelUnavailable, PacelineError
from app.core.messages import MAX_FRAME_BYTES, Failed, Generate, PromptRead, error_of
from app.core.request import Constraint, Notice
from app.core.turns import SharedThread
from app.models.folder import Signature, signature_of
from app.models.safe_files import printable
from app.text.detokenizer import TokenTable
from app.text.grammar.constraint import AnswerConstraint, Vocabulary
from app.text.grammar.request_grammar import reasoning_of
from app.worker.text_launch import Launched, launch_text_process

MAX_PROCESSES = 4
IDLE_SECONDS = 300.0
"""Seconds without a prompt after which a process is ended; `UNLOADED_IDLE_SECONDS` if its model is not in memory."""
UNLOADED_IDLE_SECONDS = 20.0
POLL_SECONDS = 0.02
MAX_SILENCE_SECONDS = 60.0
EXIT_SECONDS = 1.0
SIGKILL_SECONDS, IDLE_SIGKILL_SECONDS = 10.0, 0.2
"""Seconds to wait for a process to end after SIGKILL, and for an idle one, while streams wait too; longer means that a
disk blocks it."""
LOAD_MEMORY_BYTES = 2 * 1024**3
PROMPT_MEMORY_BYTES = 1024**3
"""Memory, in bytes, that prompts may add to the loaded process; `LOAD_MEMORY_BYTES` limits the load itself."""
LOAD_RETRY_SECONDS = 60.0
"""Seconds before a folder that could not be loaded is retried, unless it changes."""
PROMPT_END_TOKENS = 16
"""Number of tokens at the end of a prompt that show whether it opened the reasoning of its answer."""

logger = logging.getLogger("paceline.prompts")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The processed prompt of a request: tokenized, with the constraint on its answer."""

    tokens: tuple[int, ...]
    table: TokenTable
    seconds: dict[str, float]
    constraint: Constraint | None = None
    """Constraint on the answer."""
    end: str = ""
    """Last characters of the prompt."""
    checkpoints: tuple[int, ...] = ()
    """Token positions, ascending, at which later prompts will probably diverge."""
    notices: tuple[Notice, ...] = ()
    """Repairs that the template needed."""


@dataclass(frozen=True, slots=True)
class PromptFailure:
    """Error of a prompt that could not be processed. Not raised: a traceback would keep the prompt in memory."""

    error: PacelineError
    seconds: dict[str, float]


PromptFuture = Future[Prompt | PromptFailure]


class TextReaders:
    """Text readers of all folders. Called from one thread, which waits for no disk longer than `IDLE_SIGKILL_SECONDS`.

    `spare` is a process for the first folder, started in advance.
    """

    def __init__(
        self, max_processes: int = MAX_PROCESSES, clock: Clock = time.monotonic, spare: Launched | None = None
    ) -> None:
        self._max_processes = max_processes
        self._clock = clock
        self._spare = TextProcess(spare) if spare else None
        self._started_at = clock()
        self.nbytes = 0
        """Memory of all processes at the last `close_idle`, in bytes."""
        self._readers: OrderedDict[str, TextReader] = OrderedDict()

    def read(self, command: Generate) -> PromptFuture:
        """Start reading the prompt of `command`."""
        folder = command.model.path
        if folder not in self._readers:
            self._readers[folder] = TextReader(Path(folder), self._spare)
            self._spare = None
        self._readers.move_to_end(folder)
        self._readers[folder].used_at = self._clock()
        future = self._readers[folder].read(command)
        # Beyond the limit, the least recently used idle readers are closed; a busy one only at a later prompt.
        idle = [name for name, reader in self._readers.items() if reader.idle]
        for name in idle[: max(0, len(self._readers) - self._max_processes)]:
            self._readers.pop(name).close(IDLE_SIGKILL_SECONDS)
        return future

    def close_idle(self, in_memory: frozenset[str]) -> None:
        """End processes that were idle too long; `in_memory` are the folders of the loaded models."""
        now = self._clock()
        for folder, reader in tuple(self._readers.items()):
            if not reader.idle:
                reader.used_at = now
            elif folder in in_memory and now - reader.used_at > IDLE_SECONDS:
                reader.kill(IDLE_SIGKILL_SECONDS)
            elif folder not in in_memory and now - reader.used_at > UNLOADED_IDLE_SECONDS:
                self._readers.pop(folder).close(IDLE_SIGKILL_SECONDS)
        if self._spare is not None and now - self._started_at > IDLE_SECONDS:
            self._spare.kill(IDLE_SIGKILL_SECONDS)
            self._spare = None
        processes = (self._spare, *self._readers.values())
        self.nbytes = sum(process.nbytes for process in processes if process is not None)

    def close(self) -> None:
        """End every process, whatever it is doing."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        if self._spare is not None:
            self._spare.kill()


class TextReader:
    """Reads the prompts of one folder, in a thread that only waits for the disk and the process. Owners take turns. A
    change to the files starts a new process; `process` was started in advance and has loaded nothing yet."""

    def __init__(self, folder: Path, process: "TextProcess | None" = None) -> None:
        self._folder = folder
        self._name = printable(folder.name)
        self._thread = SharedThread("prompts")
        self._pending_prompts: set[PromptFuture] = set()
        self._process = process
        self._vocabulary: Vocabulary | None = None
        self.used_at = 0.0
        """Monotonic time, in seconds, at which a prompt was last queued or in progress."""
        self._signature: Signature = ()
        """Signature of the files that the process has loaded, or failed to load."""
        self._load_failure: tuple[PacelineError, float] | None = None
        self._logged_codes: set[str] = set()
        """Codes of notices already logged for this folder."""
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether no prompt is in progress or waiting."""
        return not self._pending_prompts

    @property
    def nbytes(self) -> int:
        """Memory of its process, in bytes."""
        return self._process.nbytes if self._process is not None else 0

    def read(self, command: Generate) -> PromptFuture:
        """Queue the prompt of `command`; cancelling the future has an effect only before processing begins."""
        future = self._thread.submit(command.owner, self._read, command)
        self._pending_prompts.add(future)
        future.add_done_callback(self._pending_prompts.discard)
        return future

    def close(self, wait_seconds: float = SIGKILL_SECONDS) -> None:
        """Kill the process for good; a prompt in progress fails."""
        self._closed = True
        self._thread.close()
        self.kill(wait_seconds)

    def kill(self, wait_seconds: float) -> None:
        """Kill the process; the next prompt starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill(wait_seconds)

    def _read(self, command: Generate) -> Prompt | PromptFailure:
        began = time.monotonic()
        try:
            process = self._ensure_process()
            if command.tokens is not None and command.grammar is None:
                return Prompt(tuple(command.tokens), process.table, {})
            answer = process.read(command)
        except PacelineError as error:
            return PromptFailure(error.with_traceback(None), {"stopped": time.monotonic() - began})
        except ProcessEnded as process_ended:
            reason = f"{command.model.id} cannot read this prompt: its chat template or tokenizer {process_ended}"
            parameter_name = "prompt" if command.messages is None else "messages"
            error_for_client = (
                InvalidRequest(reason, parameter=parameter_name)
                if process_ended.exceeded_limit
                else ModelUnavailable(reason, retry_after_seconds=1)
            )
            return PromptFailure(error_for_client, {"stopped": time.monotonic() - began})
        if answer.error is not None:
            return PromptFailure(error_of(answer.error), answer.seconds)
        self._log(answer.notices)
        tokens = tuple(answer.tokens if command.tokens is None else command.tokens)
        end = process.table.prompt_text(tokens[-PROMPT_END_TOKENS:])
        constraint = self._constraint(command, answer.grammar, process, end)
        return Prompt(tokens, process.table, answer.seconds, constraint, end, answer.checkpoints, answer.notices)

    def _constraint(
        self, command: Generate, grammar: str, process: "TextProcess", prompt_end: str
    ) -> Constraint | None:
        """Return the constraint on the answer to a prompt; the process has checked that `grammar` compiles."""
        reasoning = reasoning_of(command, process.table.dialect, prompt_end)
        if not grammar and (reasoning is None or reasoning.most_tokens is None):
            return None
        vocabulary = self._vocabulary
        if vocabulary is None or vocabulary.table != process.table:  # kept: building it holds up all threads
            vocabulary = self._vocabulary = Vocabulary(process.table)
        process.table = vocabulary.table
        return AnswerConstraint(vocabulary, vocabulary.compile_grammar(grammar) if grammar else None, reasoning)

    def _log(self, notices: tuple[Notice, ...]) -> None:
        for notice in notices:
            if notice.code not in self._logged_codes:
                self._logged_codes.add(notice.code)
                logger.info("prompts of %s: %s", self._name, notice.message)

    def _ensure_process(self) -> "TextProcess":
        """Return the loaded process, starting it if necessary. Raises ModelUnavailable, or the error of the folder."""
        if self._closed:
            raise ModelUnavailable("The model's tokenizer process was closed; send the request again.")
        self._follow_changes()
        process = self._process  # `kill` may forget it meanwhile
        if process is None or not process.alive:
            if self._load_failure is not None and time.monotonic() < self._load_failure[1]:
                raise self._load_failure[0]
            process = self._process = TextProcess(launch_text_process())
            if self._closed:
                process.kill()
        failure: PacelineError | None = None
        if not process.is_loaded:
            try:
                process.load(self._folder)
            except ProcessEnded as process_ended:
                failure = ModelUnavailable(f'the tokenizer of "{self._name}" {process_ended}')
            except PacelineError as error:
                failure = error.with_traceback(None)
        if failure is not None:  # not in `except`: the frames of its cause would keep the prompt
            self._load_failure = failure, time.monotonic() + LOAD_RETRY_SECONDS
            raise failure
        return process

    def _follow_changes(self) -> None:
        """Kill the loaded process if a file of the folder has changed. Raises ModelUnavailable for a missing folder."""
        try:
            signature = signature_of(self._folder)
        except OSError as error:
            raise ModelUnavailable(f"The folder of {self._name} cannot be read: {error.strerror}") from None
        if signature != self._signature:
            process = self._process
            if process is not None and process.is_loaded:
                process.kill()
            self._signature, self._load_failure = signature, None


class ProcessEnded(Exception):
    """The process has ended; the message continues a sentence about it. `exceeded_limit`: too much memory or time."""

    def __init__(self, reason: str, *, exceeded_limit: bool) -> None:
        super().__init__(reason)
        self.exceeded_limit = exceeded_limit


class TextProcess:
    """One run of `app.worker.text_process`; `load` must be called first."""

    def __init__(self, launched: Launched) -> None:
        self._process, self._connection = launched
        self._limit_bytes = LOAD_MEMORY_BYTES
        self.is_loaded = False
        self.table = TokenTable(pieces=[], vocabulary_size=0)

    def load(self, folder: Path) -> None:
        """Load the tokenizer of a folder. Raises ProcessEnded, or the error of the folder."""
        self._send(str(folder))
        table = self._receive(TokenTable | Failed)
        if isinstance(table, Failed):
            self.kill()
            raise error_of(table)
        self.table, self.is_loaded = table, True
        self._limit_bytes = self.nbytes + PROMPT_MEMORY_BYTES

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    @property
    def nbytes(self) -> int:
        """Resident memory, in bytes; 0 once it has ended."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss) if self.alive else 0
        except psutil.Error:
            return 0

    def read(self, command: Generate) -> PromptRead:
        """Return the result for one prompt. Raises ProcessEnded."""
        self._send(command)
        return cast("PromptRead", self._receive(PromptRead))

    def kill(self, wait_seconds: float = SIGKILL_SECONDS) -> None:
        """Kill the process; safe to call twice and from any thread. One that the kernel blocks is left behind."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_seconds)

    def _send(self, message: Generate | str) -> None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            self._kill_and_raise("")

    def _receive(self, kind: Any) -> Any:
        silent_since = time.monotonic()
        try:
            while not self._connection.poll(POLL_SECONDS):
                if self.nbytes > self._limit_bytes:
                    self._kill_and_raise(f"takes more than {self._limit_bytes >> 20} MiB of memory")
                if time.monotonic() - silent_since > MAX_SILENCE_SECONDS:
                    self._kill_and_raise(f"did not answer for {MAX_SILENCE_SECONDS:g} s")
            return msgspec.msgpack.decode(self._connection.recv_bytes(MAX_FRAME_BYTES), type=kind)
        except (OSError, EOFError, msgspec.MsgspecError):
            self._kill_and_raise("")

    def _kill_and_raise(self, reason: str) -> NoReturn:
        """Kill the process and raise ProcessEnded with `reason`, which is empty if the process ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if reason else EXIT_SECONDS)
        if self._process.returncode == -signal.SIGPROF:
            reason = "takes too much time"
        self.kill()
        self._connection.close()
        raise ProcessEnded(
            reason or f"ended (code {self._process.returncode}), see the log", exceeded_limit=bool(reason)
        )

"""The text thread: commands in, prompts to the loop; token events in, text to the client.

Other threads put work in one queue: the reader thread through `receive`; the MLX thread through `queued`, `refused`,
`emitted` and `in_memory`; the threads that read prompts whenever a prompt is done. The text thread itself runs `run`.
It neither waits for prompts nor runs code from a model folder.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from app.core.clock import Clock
from app.core.errors import PacelineError, WorkerGone
from app.core.messages import (
    Cancel,
    ClearPrefixes,
    Command,
    Event,
    Generate,
    KeepModels,
    LoadModel,
    PromptTokens,
    ReadPrompt,
    Shutdown,
    TextWork,
    UnloadModel,
    failed_frame,
    short_text,
)
from app.core.step import TokenEvent
from app.core.turns import Backlog
from app.worker.answer import Answer, check_command, check_tokens
from app.worker.texts import PromptFailure, PromptFuture
from app.worker.thread_commands import (
    Emitted,
    Halt,
    InMemory,
    LoopCommand,
    PromptDone,
    Queued,
    Received,
    Refused,
    TextMessage,
    choice_of,
)

BACKLOG_LIMIT = 1024
BACKLOG_BYTES = 64 * 1024**2
"""Limits on the unprocessed prompts of one owner; once one is reached, further requests of this owner are refused."""
DELIVERY_LIMIT = 4096

logger = logging.getLogger("paceline.text")


class TextThread:
    """Text side of the worker. After a Shutdown, once every answer has ended, `run` halts the loop and returns.

    `read` starts processing a prompt; `close_idle` ends idle text processes, given the folders of the models in memory;
    `send` sends events to the server; `post` posts commands to the MLX thread.
    """

    def __init__(
        self,
        *,
        read: Callable[[Generate], PromptFuture],
        send: Callable[[Event], None],
        post: Callable[[LoopCommand], None],
        close_idle: Callable[[frozenset[str]], None] = lambda _paths: None,
        clock: Clock = time.monotonic,
        backlog_limit: int = BACKLOG_LIMIT,
    ) -> None:
        self._read = read
        self._send = send
        self._clock = clock
        self._backlog = Backlog(backlog_limit, BACKLOG_BYTES)
        self._post = post
        self._close_idle = close_idle
        self._inbox: queue.SimpleQueue[TextMessage] = queue.SimpleQueue()
        self._delivery_slots = threading.Semaphore(DELIVERY_LIMIT)
        self._answers: dict[str, Answer] = {}
        self._prompt_reads: dict[str, PromptFuture] = {}
        """Futures of prompts that are only tokenized, by command id."""
        self._drain_until: float | None = None
        self._streamed_seconds = 0.0

    # --- called by other threads ------------------------------------------------------------------------------

    def receive(self, command: Command, nbytes: int = 0) -> None:
        """Queue one command of `nbytes` bytes; never blocks, also safe in a signal handler (Shutdown)."""
        self._inbox.put(Received(command, self._clock(), nbytes))

    def queued(self, request_id: str, at: float) -> None:
        """Report a submission as queued; `at` is in seconds of the worker's monotonic clock."""
        self._deliver(Queued(request_id, at))

    def refused(self, request_id: str, error: PacelineError) -> None:
        """Report that a submission was refused before it was queued."""
        self._deliver(Refused(request_id, error))

    def emitted(self, events: Sequence[TokenEvent], at: float) -> None:
        """Deliver the events of one step, or of one cancel."""
        self._deliver(Emitted(events, at))

    def _deliver(self, message: Queued | Refused | Emitted) -> None:
        """Queue a message of the MLX thread; blocks while the text thread is `DELIVERY_LIMIT` messages behind."""
        self._delivery_slots.acquire()
        self._inbox.put(message)

    def in_memory(self, paths: frozenset[str]) -> None:
        """Report the folders of the models that are in memory now."""
        self._inbox.put(InMemory(paths))

    # --- the text thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle messages until a Shutdown is complete, then halt the loop."""
        while self.turn():
            pass
        self._post(Halt())

    def turn(self, *, wait: bool = True) -> bool:
        """Handle queued messages in order; with `wait`, block for the first. False once a Shutdown is complete."""
        remaining_seconds = None if self._drain_until is None else max(0.0, self._drain_until - self._clock())
        try:
            self._handle(self._inbox.get(timeout=remaining_seconds) if wait else self._inbox.get_nowait())
            for _ in range(self._inbox.qsize()):
                self._handle(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return not self._drained()

    def _handle(self, message: TextMessage) -> None:
        match message:
            case Received():
                self._execute(message)
            case PromptDone():
                self._on_prompt_done(message)
            case InMemory():
                self._close_idle(message.paths)
            case Queued() | Refused() | Emitted():
                began = self._clock()
                self._delivery_slots.release()
                self._stream(message)
                self._streamed_seconds += self._clock() - began

    def _on_prompt_done(self, message: PromptDone) -> None:
        command = message.command
        self._backlog.leave(_prompt_of(command).owner, message.nbytes)
        if isinstance(command, Generate):
            self._with_answer(command.id, self._begin)
        else:
            self._send_prompt_tokens(command, message.prompt_future)

    def _stream(self, message: Queued | Refused | Emitted) -> None:
        match message:
            case Emitted():
                for event in message.events:
                    request_id, index = choice_of(event.request_id)
                    self._with_answer(request_id, Answer.feed, index, event, message.at)
            case Queued():
                self._with_answer(message.request_id, Answer.queued, message.at)
            case Refused():
                self._with_answer(message.request_id, Answer.fail, message.error)

    def _execute(self, message: Received) -> None:
        match command := message.command:
            case Generate() | ReadPrompt():
                with _errors_reported_to(command.id, self._send_failure(command.id)):
                    self._open(command, message)
            case Cancel() if command.id in self._answers:
                self._with_answer(command.id, Answer.cancel)
            case Cancel() if command.id in self._prompt_reads:
                self._prompt_reads.pop(command.id).cancel()
            case Cancel() | LoadModel() | KeepModels() | UnloadModel() | ClearPrefixes():
                self._post(command)
            case Shutdown():
                is_second = self._drain_until is not None  # a second Shutdown ends the drain now
                self._drain_until = self._clock() + (0.0 if is_second else command.drain_seconds)

    def _open(self, command: Generate | ReadPrompt, message: Received) -> None:
        """Start reading a prompt. Raises WorkerGone once the worker is shutting down, QueueFull if too many wait."""
        if self._drain_until is not None:
            raise _stopping()
        if isinstance(command, Generate):
            check_command(command)
        prompt = _prompt_of(command)
        self._backlog.enter(prompt.owner, message.nbytes)
        future = self._read(prompt)
        if isinstance(command, Generate):
            self._answers[command.id] = Answer(command, future, message.at, send=self._send, post=self._post)
        else:
            self._prompt_reads[command.id] = future
        future.add_done_callback(lambda future: self._inbox.put(PromptDone(command, message.nbytes, future)))

    def _send_prompt_tokens(self, command: ReadPrompt, future: PromptFuture) -> None:
        if self._prompt_reads.pop(command.id, None) is None:
            return  # its client has left
        with _errors_reported_to(command.id, self._send_failure(command.id)):
            prompt = future.result()
            self._send_text_work(prompt.seconds)
            if isinstance(prompt, PromptFailure):
                raise prompt.error
            check_tokens(command.prompt, prompt)
            text = prompt.table.prompt_text(prompt.tokens)
            notices = command.prompt.notices + prompt.notices
            self._send(PromptTokens(id=command.id, tokens=list(prompt.tokens), text=text, notices=notices))

    def _send_failure(self, request_id: str) -> Callable[[PacelineError], None]:
        return lambda error: self._send(failed_frame(request_id, error))

    def _begin(self, answer: Answer) -> None:
        prompt = answer.prompt_future.result()
        self._send_text_work(prompt.seconds)
        answer.begin(prompt)

    def _with_answer(self, request_id: str, handle: Callable[..., None], *values: Any) -> None:
        """Call `handle` with the answer, unless it has ended, and `values`; an exception ends only this answer."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        with _errors_reported_to(request_id, answer.fail):
            handle(answer, *values)
        if answer.ended:
            self._answers.pop(request_id, None)
            self._send_text_work({})

    def _send_text_work(self, seconds: dict[str, float]) -> None:
        """Report the seconds that the text side was busy since the last report."""
        streamed, self._streamed_seconds = self._streamed_seconds, 0.0
        if seconds or streamed:
            self._send(TextWork(seconds=seconds | ({"stream": streamed} if streamed else {})))

    def _drained(self) -> bool:
        """Return whether a Shutdown is complete: nothing is open, or the deadline has passed, which fails the rest."""
        is_busy = bool(self._answers or self._prompt_reads or not self._inbox.empty())
        if self._drain_until is None or (is_busy and self._clock() < self._drain_until):
            return False
        for answer in self._answers.values():
            answer.fail(_stopping())
        for request_id in self._prompt_reads:
            self._send(failed_frame(request_id, _stopping()))
        self._answers.clear()
        self._prompt_reads.clear()
        return True


def _prompt_of(command: Generate | ReadPrompt) -> Generate:
    return command if isinstance(command, Generate) else command.prompt


def _stopping() -> WorkerGone:
    return WorkerGone("The model worker is stopping; send the request again.", code="stopping", retry_after_seconds=5)


@contextmanager
def _errors_reported_to(request_id: str, fail: Callable[[PacelineError], None]) -> Iterator[None]:
    """Suppress an error in the block and pass it to `fail`, which ends this request; log an unexpected error."""
    try:
        yield
    except PacelineError as error:
        fail(error)
    except Exception as error:
        logger.exception("could not answer %s", request_id)
        fail(PacelineError(f"The request could not be answered: {short_text(error)}"))

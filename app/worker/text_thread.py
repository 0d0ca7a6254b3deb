"""The text thread: commands in, prompts to the loop; token events in, text to the client.

Threads meet in one queue of work: the reader calls `receive`, the MLX thread `queued`, `refused` and `emitted`, those
that wait for a prompt to be read leave word, and the text thread is in `run`. Nothing here waits, nor runs anything of
a model folder.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from app.core.clock import Clock
from app.core.errors import PacelineError, QueueFull, WorkerGone
from app.core.messages import (
    Cancel,
    ClearPrefixes,
    Command,
    Event,
    Generate,
    KeepModel,
    LoadModel,
    PromptTold,
    ReadPrompt,
    Shutdown,
    TextWork,
    UnloadModel,
    failed_frame,
    short_text,
)
from app.core.step import TokenEvent
from app.worker.answer import Answer, check_command, check_tokens
from app.worker.texts import Reading, Unread
from app.worker.thread_commands import Halt, LoopCommand, choice_of

BACKLOG_LIMIT = 1024
"""Prompts that are not read yet; above it new requests are refused."""
DELIVERY_LIMIT = 4096

_logger = logging.getLogger("paceline.text")


class TextThread:
    """`run` ends after a Shutdown, when everybody has been told the end; then the loop is told to halt.

    `read` begins to read a prompt, `send` speaks to the server, `post` to the MLX thread.
    """

    def __init__(
        self,
        *,
        read: Callable[[Generate], Reading],
        send: Callable[[Event], None],
        post: Callable[[LoopCommand], None],
        clock: Clock = time.monotonic,
        backlog_limit: int = BACKLOG_LIMIT,
    ) -> None:
        self._read = read
        self._send = send
        self._clock = clock
        self._backlog_limit = backlog_limit
        self._post = post
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What the text thread does next, in order."""
        self._room = threading.Semaphore(DELIVERY_LIMIT)
        self._answers: dict[str, Answer] = {}
        self._drain_until: float | None = None
        self._streamed_seconds = 0.0

    # --- called by other threads ------------------------------------------------------------------------------

    def receive(self, command: Command) -> None:
        """One command; never blocks, also safe in a signal handler (Shutdown)."""
        self._inbox.put(partial(self._obey, command, self._clock()))

    def queued(self, request_id: str, at: float) -> None:
        """All choices of a submission wait or run; times here are seconds of the worker's monotonic clock."""
        self._deliver(partial(self._with_answer, request_id, lambda answer: answer.queued(at)))

    def refused(self, request_id: str, error: PacelineError) -> None:
        """A submission ended before it was queued."""
        self._deliver(partial(self._with_answer, request_id, lambda answer: answer.fail(error)))

    def emitted(self, events: Sequence[TokenEvent], at: float) -> None:
        """What one step, or one cancel, told."""
        self._deliver(partial(self._feed, events, at))

    def _deliver(self, work: Callable[[], None]) -> None:
        """From the MLX thread; waits while the text thread is `DELIVERY_LIMIT` deliveries behind."""
        self._room.acquire()
        self._inbox.put(partial(self._stream, work))

    # --- the text thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until a Shutdown has been fulfilled."""
        while self.turn():
            pass
        self._post(Halt())

    def turn(self, *, wait: bool = True) -> bool:
        """What has come, in order; with `wait` something will. False when a Shutdown has been fulfilled."""
        left = None if self._drain_until is None else max(0.0, self._drain_until - self._clock())
        try:
            (self._inbox.get(timeout=left) if wait else self._inbox.get_nowait())()
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
        return not self._drained()

    def _obey(self, command: Command, received_at: float) -> None:
        match command:
            case Generate():
                self._generate(command, received_at)
            case ReadPrompt():
                self._read_prompt(command)
            case Cancel() if command.id in self._answers:
                self._with_answer(command.id, Answer.cancel)
            case Cancel() | LoadModel() | KeepModel() | UnloadModel() | ClearPrefixes():
                self._post(command)
            case Shutdown():
                again = self._drain_until is not None  # the second one means now
                self._drain_until = self._clock() + (0.0 if again else command.drain_seconds)

    def _generate(self, command: Generate, received_at: float) -> None:
        try:
            if self._drain_until is not None:
                raise WorkerGone("The server is stopping.", code="stopping", retry_after_seconds=5)
            if sum(not answer.begun for answer in self._answers.values()) >= self._backlog_limit:
                raise QueueFull("Too many requests wait to be read; try again.", retry_after_seconds=1)
            check_command(command)
            prompt = self._read(command)
        except PacelineError as error:
            self._send(failed_frame(command.id, error))
            return
        self._answers[command.id] = Answer(command, prompt, received_at, send=self._send, post=self._post)
        prompt.add_done_callback(lambda _: self._inbox.put(partial(self._with_answer, command.id, self._begin)))

    def _read_prompt(self, command: ReadPrompt) -> None:
        def tell() -> None:
            prompt = reading.result()
            self._tell_work(prompt.seconds)
            try:
                if isinstance(prompt, Unread):
                    raise prompt.error
                check_tokens(command.prompt, prompt)
            except PacelineError as error:
                self._send(failed_frame(command.id, error))
                return
            text = b"".join(prompt.table.token_text(token)[1] for token in prompt.tokens).decode("utf-8", "replace")
            notices = command.prompt.notices + prompt.notices
            self._send(PromptTold(id=command.id, tokens=list(prompt.tokens), text=text, notices=notices))

        try:
            reading = self._read(command.prompt)
        except PacelineError as error:
            self._send(failed_frame(command.id, error))
            return
        reading.add_done_callback(lambda _: self._inbox.put(tell))

    def _begin(self, answer: Answer) -> None:
        prompt = answer.reading.result()
        self._tell_work(prompt.seconds)
        answer.begin(prompt)

    def _stream(self, work: Callable[[], None]) -> None:
        began = self._clock()
        self._room.release()
        work()
        self._streamed_seconds += self._clock() - began

    def _feed(self, events: Sequence[TokenEvent], at: float) -> None:
        for event in events:
            request_id, _ = choice_of(event.request_id)
            self._with_answer(request_id, lambda answer: answer.feed(event, at))  # noqa: B023

    def _with_answer(self, request_id: str, react: Callable[[Answer], None]) -> None:
        """Let an answer that has not ended react; whatever that raises ends this answer and no other."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        try:
            react(answer)
        except PacelineError as error:
            answer.fail(error)
        except Exception as error:
            _logger.exception("could not tell %s", request_id)
            answer.fail(PacelineError(f"The answer could not be told: {short_text(error)}"))
        if answer.ended:
            self._answers.pop(request_id, None)
            self._tell_work({})

    def _tell_work(self, seconds: dict[str, float]) -> None:
        """What the text side was busy with since the last time."""
        streamed, self._streamed_seconds = self._streamed_seconds, 0.0
        if seconds or streamed:
            self._send(TextWork(seconds=seconds | ({"stream": streamed} if streamed else {})))

    def _drained(self) -> bool:
        """Whether a Shutdown was asked and nobody waits any more; at its deadline nobody may."""
        if self._drain_until is None:
            return False
        if (self._answers or not self._inbox.empty()) and self._clock() < self._drain_until:
            return False
        error = WorkerGone("The server is stopping.", code="stopping", retry_after_seconds=5)
        for answer in self._answers.values():
            answer.fail(error)
        self._answers.clear()
        return True

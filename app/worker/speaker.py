"""The text thread: commands in, prompts to the loop; token events in, text to the client.

Three threads touch a `Speaker`: the reader calls `receive`, the MLX thread calls `deliver`, and the text thread is in
`run`; they meet in one queue. Deliveries go before commands, so that new requests never hold up running streams.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from app.core.errors import PacelineError, QueueFull, WorkerGone
from app.core.messages import Cancel, Command, Event, Generate, KeepModel, LoadModel, Shutdown, UnloadModel
from app.core.ports import Clock
from app.worker.answer import Answer, Reaction
from app.worker.failure import failed_frame, short_text
from app.worker.mail import Delivery, Halt, Mail, Queued, Refused, Submission, Told, Withdrawal, choice_of
from app.worker.texts import Texts

BACKLOG_LIMIT = 1024
"""Commands and deliveries that are not looked at yet; above it new requests are refused."""
DELIVERY_LIMIT = 4096
ITEMS_PER_TURN = 256
"""So that commands, cancels among them, get their turn however fast the deliveries come."""

_logger = logging.getLogger("paceline.speaker")


class Speaker:
    """`run` ends after a Shutdown, when everybody has been told the end; then the loop is told to halt."""

    def __init__(
        self,
        *,
        texts: Texts,
        send: Callable[[Event], None],
        clock: Clock = time.monotonic,
        backlog_limit: int = BACKLOG_LIMIT,
    ) -> None:
        self._texts = texts
        self._send = send
        self._clock = clock
        self._backlog_limit = backlog_limit
        self._post: Callable[[Mail], None] = _nowhere
        self._inbox: queue.SimpleQueue[tuple[Command | Delivery, float]] = queue.SimpleQueue()
        self._room = threading.Semaphore(DELIVERY_LIMIT)
        self._commands: deque[tuple[Command, float]] = deque()
        self._answers: dict[str, Answer] = {}
        self._drain_until: float | None = None
        self._busy_since: float | None = None

    def connect(self, post: Callable[[Mail], None]) -> None:
        """Say where mail for the MLX thread goes, before anything runs."""
        self._post = post

    # --- called by other threads ------------------------------------------------------------------------------

    def receive(self, command: Command) -> None:
        """One command; never blocks, also safe in a signal handler (Shutdown)."""
        backlog = self._inbox.qsize() + len(self._commands)
        if isinstance(command, Generate) and backlog >= self._backlog_limit:
            error = QueueFull("Too many requests wait to be read; try again.", retry_after_seconds=1)
            self._send(failed_frame(command.id, error))
            return
        self._inbox.put((command, self._clock()))

    def deliver(self, delivery: Delivery) -> None:
        """What the MLX thread tells; waits while the text thread is `DELIVERY_LIMIT` deliveries behind."""
        self._room.acquire()
        self._inbox.put((delivery, 0.0))

    def busy_seconds(self) -> float:
        """How long the text thread has been at one and the same item; 0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    # --- the text thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until a Shutdown has been fulfilled."""
        while self.turn():
            pass
        self._post(Halt())

    def turn(self, *, wait: bool = True) -> bool:
        """Everything that was delivered, then one command. False when a Shutdown has been fulfilled."""
        self._take(self._seconds_to_wait() if wait else 0.0)
        if self._commands:
            command, received_at = self._commands.popleft()
            self._busy_since = self._clock()
            self._obey(command, received_at)
        self._busy_since = None
        return not self._drained()

    def _seconds_to_wait(self) -> float | None:
        if self._commands:
            return 0.0
        return None if self._drain_until is None else max(0.0, self._drain_until - self._clock())

    def _take(self, seconds: float | None) -> None:
        """Handle deliveries and keep commands; wait for the first item at most `seconds`."""
        for _ in range(ITEMS_PER_TURN):
            try:
                item, at = self._inbox.get_nowait() if seconds == 0.0 else self._inbox.get(timeout=seconds)
            except queue.Empty:
                return
            seconds = 0.0
            if isinstance(item, Queued | Refused | Told):
                self._busy_since = self._clock()
                self._room.release()
                self._hear(item)
            else:
                self._commands.append((item, at))

    def _obey(self, command: Command, received_at: float) -> None:
        match command:
            case Generate():
                self._generate(command, received_at)
            case Cancel():
                self._cancel(command)
            case LoadModel() | KeepModel() | UnloadModel():
                self._post(command)
            case Shutdown():
                again = self._drain_until is not None  # the second one means now
                self._drain_until = self._clock() + (0.0 if again else command.drain_seconds)

    def _generate(self, command: Generate, received_at: float) -> None:
        try:
            if self._drain_until is not None:
                raise WorkerGone("The server is stopping.", code="stopping", retry_after_seconds=5)  # noqa: TRY301
            answer = Answer(command, self._texts.get(command.model), received_at)
            submission: Submission = answer.submission()
        except PacelineError as error:
            self._send(failed_frame(command.id, error))
        except BaseException as error:  # a panic inside the tokenizers is no Exception
            _logger.exception("could not read %s", command.id)
            message = f"The prompt could not be read: {short_text(error)}"
            self._send(failed_frame(command.id, PacelineError(message)))
        else:
            self._answers[command.id] = answer
            self._post(submission)

    def _cancel(self, command: Cancel) -> None:
        if command.id in self._answers:
            self._with_answer(command.id, Answer.cancel)
        else:
            self._post(command)

    def _hear(self, delivery: Delivery) -> None:
        match delivery:
            case Told():
                for event in delivery.events:
                    self._with_answer(choice_of(event.request_id)[0], partial(Answer.feed, event=event, told=delivery))
            case Queued():
                self._with_answer(delivery.id, partial(Answer.queued, at=delivery.at))
            case Refused():
                self._with_answer(delivery.id, partial(Answer.fail, error=delivery.error))

    def _with_answer(self, request_id: str, react: Callable[[Answer], Reaction]) -> None:
        """Let an answer that has not ended react; whatever that raises ends this answer and no other."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        try:
            reaction = react(answer)
        except BaseException as error:  # a panic inside the tokenizers is no Exception
            _logger.exception("could not tell %s", request_id)
            reaction = answer.fail(PacelineError(f"The answer could not be told: {short_text(error)}"))
        self._do(reaction)
        if answer.ended:
            self._answers.pop(request_id, None)

    def _do(self, reaction: Reaction) -> None:
        if reaction.withdrawn:
            self._post(Withdrawal(reaction.withdrawn))
        for event in reaction.events:
            self._send(event)

    def _drained(self) -> bool:
        """Whether a Shutdown was asked and nobody waits any more; at its deadline nobody may."""
        if self._drain_until is None or self._commands:
            return False
        if self._answers and self._clock() < self._drain_until:
            return False
        error = WorkerGone("The server is stopping.", code="stopping", retry_after_seconds=5)
        for answer in self._answers.values():
            self._do(answer.fail(error))
        self._answers.clear()
        return True


def _nowhere(mail: Mail) -> None:
    raise RuntimeError(f"nobody takes mail yet: {mail}")

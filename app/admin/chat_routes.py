"""`/admin/chat`: the playground, and its conversations under `/admin/api/conversations`.

Replies stream from `/admin/api/v1/chat/completions`, the API's own route for signed-in browsers. The page chooses the
ids of turns, stores turns with `POST …/turns`, and resends them until the server confirms. Topic `conversations`: a
revision that changes with each edit, so that other tabs refresh.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import ConfigDict, Field

from app.admin.context import Admin
from app.core.errors import StaleVersion
from app.models.drafters.methods import TEXT_METHODS
from app.serving.document import EVENTS, problems, success
from app.serving.errors import Rejected, error_object, words_for
from app.serving.gate import Body, DraftTokens, JsonBody
from app.store.conversations import ConversationHeader, Conversations
from app.store.tables import ConversationRow, MessageRow, Role

CONVERSATIONS = "/admin/api/conversations"
MAX_ID = (1 << 63) - 1
MAX_TITLE_CHARACTERS = 200
MAX_MESSAGE_CHARACTERS = 1_000_000
MAX_TYPED_CHARACTERS = 100_000
MAX_TURNS = 2000
MAX_TIME = 1e11
MAX_SPANS = 100_000
MAX_CONTAINERS = 500_000
"""Limit on the objects and lists of an imported conversation, most of them the spans that were drafted."""
MAX_CALLS = 128
MAX_PROBLEM_CHARACTERS = 4000
MAX_SEED = (1 << 53) - 1
"""Largest seed: the largest integer up to which JavaScript numbers are exact."""

Title = Annotated[str, Field(min_length=1, max_length=MAX_TITLE_CHARACTERS)]
ModelId = Annotated[str, Field(max_length=300)]
Span = Annotated[
    tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[str, Field(max_length=60)]],
    Field(strict=False),
]
Count = Annotated[float, Field(ge=0)]
TurnId = Annotated[str, Field(pattern=r"^[a-z0-9]{1,40}$")]
Value = TypeVar("Value")


class PageBody(Body):
    """Base of the bodies that the page sends; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class ConversationOptions(PageBody):
    """Options of a conversation; absent ones follow the model's settings."""

    system: str | None = Field(None, max_length=MAX_TYPED_CHARACTERS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 20)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=(1 << 31) - 1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    method: str | None = Field(None, pattern=r"^[a-z0-9_]{1,60}$")
    num_draft_tokens: DraftTokens | None = None
    thinking: Literal["enabled", "disabled"] | None = None
    format: Literal["json_object", "json_schema"] | None = None
    json_schema: str | None = Field(None, max_length=MAX_TYPED_CHARACTERS)
    tools: str | None = Field(None, max_length=MAX_TYPED_CHARACTERS)
    """Text of the tools as typed: like the schema, it may not be valid JSON yet."""
    tool_choice: str | None = Field(None, max_length=300)


class ConversationChange(PageBody):
    """Changes to a conversation; absent fields are kept."""

    title: Title | None = None
    model: ModelId | None = None
    options: ConversationOptions | None = None


class StoredTimings(Body):
    """Speed of a reply."""

    first_token_ms: Count | None = None
    load_ms: Count | None = None
    predicted_n: Count | None = None
    predicted_per_second: Count | None = None


class StoredSpeculation(Body):
    """Drafted and accepted tokens of a reply."""

    method: str = Field("off", max_length=200)
    reason: str = Field("", max_length=2000)
    reason_code: str = Field("", pattern=r"^[a-z_]{0,60}$")
    reason_values: dict[str, float | Annotated[str, Field(max_length=2000)]] = Field({}, max_length=10)
    drafted: Count = 0
    accepted: Count = 0
    tokens_per_cycle: Count = 0


class StoredProblem(Body):
    """Error that ended a reply early."""

    code: str = Field("", max_length=100)
    message: str = Field("", max_length=MAX_PROBLEM_CHARACTERS)


class ReplyFigures(Body):
    """Figures shown under a reply."""

    timings: StoredTimings | None = None
    speculation: StoredSpeculation | None = None
    seed: int | None = None
    finish: str | None = Field(None, max_length=60)
    stopped: bool = False
    problem: StoredProblem | None = None


class StoredCall(Body):
    """A tool call in a reply."""

    id: str = Field("", max_length=200)
    name: str = Field("", max_length=200)
    arguments: str = Field("", max_length=MAX_MESSAGE_CHARACTERS)
    """Arguments as JSON text, which may be cut off."""


class NewTurn(PageBody):
    """One turn to store; its parent is already stored, or precedes it in the list."""

    id: TurnId
    parent: TurnId | Literal[""]
    role: Role
    content: str = Field(max_length=MAX_MESSAGE_CHARACTERS)
    reasoning: str = Field("", max_length=MAX_MESSAGE_CHARACTERS)
    spans: list[Span] = Field([], max_length=MAX_SPANS)
    calls: list[StoredCall] = Field([], max_length=MAX_CALLS)
    figures: ReplyFigures | None = None
    created_at: float = Field(0, ge=0, le=MAX_TIME)

    def turn(self) -> MessageRow:
        """Return the row that the store keeps."""
        figures = None if self.figures is None else self.figures.model_dump(exclude_unset=True)
        return MessageRow(turn=self.id, figures=figures, **self.model_dump(exclude={"id", "figures"}))


class NewConversation(PageBody):
    """Title, model and options of a new conversation."""

    title: Title
    model: ModelId = ""
    options: ConversationOptions = ConversationOptions()

    def beginning(self) -> ConversationHeader:
        """Return the header that the store keeps."""
        return ConversationHeader(self.title, self.model, self.options.model_dump(exclude_none=True))


class NewTurns(PageBody):
    """Turns to add to a conversation that is at `version`; version 0 with `begin` creates the conversation."""

    max_containers: ClassVar[int] = MAX_CONTAINERS
    version: int = Field(ge=0, le=MAX_ID)
    turns: list[NewTurn] = Field(max_length=MAX_TURNS)
    begin: NewConversation | None = None


router = APIRouter()


@router.get("/admin/chat", response_class=HTMLResponse)
async def get_chat(request: Request, admin: Admin) -> HTMLResponse:
    """Serve the page; its script fetches conversations and models."""
    gains = await asyncio.to_thread(admin.measuring.gains)
    data = {"model": admin.serving.settings.default_model, "text_methods": TEXT_METHODS, "gains": gains}
    return admin.pages.render("chat.html", request, area="chat", data=data)


@router.get("/admin/api/replies/{request_id}", response_class=Response, responses=success(media_type=EVENTS))
async def follow_reply(admin: Admin, request_id: str) -> Response:
    """Stream a running reply from its beginning, for a page that was reloaded."""
    frames = admin.serving.replies.get(request_id)
    if frames is None:
        raise Rejected(404, "This request is no longer running.", "not_running")
    return frames.response(admin.serving.write_timeout_seconds)


@router.get(CONVERSATIONS)
def list_conversations(
    admin: Admin, search: Annotated[str, Query(max_length=MAX_TITLE_CHARACTERS)] = ""
) -> dict[str, Any]:
    """List conversations, latest first; with `search`, only those whose title or messages contain it."""
    return {"conversations": [_summary(conversation) for conversation in admin.conversations.list(search.strip())]}


@router.delete(CONVERSATIONS)
def delete_conversations(admin: Admin) -> dict[str, Any]:
    """Delete all conversations."""
    return {"deleted": admin.conversations.delete_all()}


@router.get(CONVERSATIONS + "/{conversation_id}")
def get_conversation(admin: Admin, conversation_id: int) -> dict[str, Any]:
    """Return one conversation with its turns."""
    return _conversation_object(admin.conversations, conversation_id)


@router.patch(CONVERSATIONS + "/{conversation_id}")
async def change_conversation(admin: Admin, body: JsonBody[ConversationChange], conversation_id: int) -> dict[str, Any]:
    """Change a conversation's title, model or options."""
    options = None if body.options is None else body.options.model_dump(exclude_none=True)

    def change(number: int) -> Any:
        return admin.conversations.change(number, title=body.title, model_id=body.model, options=options)

    return _summary(await asyncio.to_thread(_find_conversation, conversation_id, change))


@router.delete(CONVERSATIONS + "/{conversation_id}")
def delete_conversation(admin: Admin, conversation_id: int) -> dict[str, Any]:
    """Delete one conversation."""
    _find_conversation(conversation_id, lambda number: admin.conversations.delete(number) or None)
    return {"deleted": 1}


@router.post(CONVERSATIONS + "/{conversation_id}/turns", responses=problems(409))
async def add_turns(request: Request, admin: Admin, body: JsonBody[NewTurns], conversation_id: int) -> Response:
    """Store turns; 409 with the stored conversation if it has changed since `version`."""
    conversations, words = admin.conversations, words_for(request)

    def store() -> Response:
        turns = [turn.turn() for turn in body.turns]
        beginning = None if body.begin is None else body.begin.beginning()
        try:
            conversation = _find_conversation(
                conversation_id, lambda number: conversations.add(number, body.version, turns, beginning)
            )
            return JSONResponse(_summary(conversation))
        except StaleVersion as error:
            current = {"conversation": _conversation_object(conversations, conversation_id)}
            return JSONResponse(error_object(error, words) | current, error.status)

    return await asyncio.to_thread(store)


def _summary(conversation: ConversationRow) -> dict[str, Any]:
    """Return a conversation as one entry of the list."""
    return conversation.model_dump(exclude={"options"})


def _conversation_object(conversations: Conversations, conversation_id: int) -> dict[str, Any]:
    """Return a whole conversation, as the page reads, exports and imports it. Raises `Rejected` if it was deleted."""
    conversation, rows = _find_conversation(conversation_id, conversations.find)
    turns = [
        {
            **row.model_dump(exclude={"id", "conversation_id", "turn"}),
            "id": row.turn,
            "spans": row.spans or [],
            "calls": row.calls or [],
        }
        for row in rows
    ]
    return {**_summary(conversation), "options": conversation.options, "turns": turns}


def _find_conversation(conversation_id: int, find: Callable[[int], Value | None]) -> Value:
    """Return the result of `find`. Raises `Rejected` (404) for a conversation that does not exist."""
    value = find(conversation_id) if 0 < conversation_id <= MAX_ID else None
    if value is None:
        raise Rejected(404, "This conversation was deleted.", "conversation_not_found")
    return value


TOPICS = {"conversations": lambda admin: {"revision": admin.conversations.revision}}

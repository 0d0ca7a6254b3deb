"""`/admin/chat`: the playground, and its conversations under `/admin/api/conversations`.

Replies stream from `/admin/api/v1/chat/completions`, which is the API's own route behind the sign-in. The page keeps
what was said with `POST …/turns`, under ids of its own making: it sends again whatever nobody acknowledged. Topic
`conversations`: another number after each change, so that other tabs look.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.core.drafters import TEXT_METHODS
from app.core.errors import StaleVersion
from app.i18n import Words
from app.serving.body import read_json
from app.serving.context import Context
from app.serving.errors import Rejected, error_object, words_for
from app.store.conversations import Beginning, Conversations
from app.store.tables import ConversationRow, MessageRow, Role

MAX_ID = (1 << 63) - 1
MAX_TITLE_CHARACTERS = 200
MAX_MESSAGE_CHARACTERS = 1_000_000
MAX_TURNS = 2000
MAX_TIME = 1e11
MAX_SPANS = 100_000
MAX_PROBLEM_CHARACTERS = 4000
MAX_SEED = (1 << 53) - 1
"""What a script's numbers hold exactly."""

Title = Annotated[str, Field(min_length=1, max_length=MAX_TITLE_CHARACTERS)]
ModelId = Annotated[str, Field(max_length=300)]
Span = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[str, Field(max_length=60)]]
Count = Annotated[float, Field(ge=0)]
TurnId = Annotated[str, Field(pattern=r"^[a-z0-9]{1,40}$")]
Found = TypeVar("Found")


class PageBody(BaseModel):
    """Base of what the page sends; a name that means nothing here is a mistake."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


class ConversationOptions(PageBody):
    """What a conversation asks for; what is absent is as the model's settings say."""

    system: str | None = Field(None, max_length=100_000)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 20)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=(1 << 31) - 1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    method: str | None = Field(None, pattern=r"^[a-z0-9_]{1,60}$")
    num_draft_tokens: int | None = Field(None, ge=1, le=64)


class ConversationChange(PageBody):
    """What is to be different; the rest stays."""

    title: Title | None = None
    model: ModelId | None = None
    options: ConversationOptions | None = None


class Kept(BaseModel):
    """Base of the figures of a reply: what a page of another version, or a file, says besides is left out."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


class KeptTimings(Kept):
    """How fast a reply came."""

    first_token_ms: Count | None = None
    predicted_n: Count | None = None
    predicted_per_second: Count | None = None


class KeptSpeculation(Kept):
    """How its drafts fared."""

    method: str = Field("off", max_length=200)
    reason: str = Field("", max_length=2000)
    reason_code: str = Field("", pattern=r"^[a-z_]{0,60}$")
    reason_values: dict[str, float | Annotated[str, Field(max_length=2000)]] = Field({}, max_length=10)
    drafted: Count = 0
    accepted: Count = 0
    tokens_per_cycle: Count = 0


class KeptProblem(Kept):
    """Why a reply broke off."""

    code: str = Field("", max_length=100)
    message: str = Field("", max_length=MAX_PROBLEM_CHARACTERS)


class ReplyFigures(Kept):
    """What a page shows under a reply."""

    timings: KeptTimings | None = None
    speculation: KeptSpeculation | None = None
    seed: int | None = None
    finish: str | None = Field(None, max_length=60)
    stopped: bool = False
    problem: KeptProblem | None = None


class NewTurn(PageBody):
    """One turn to keep; a parent is there already, or comes before it in the list."""

    id: TurnId
    parent: TurnId | Literal[""]
    role: Role
    content: str = Field(max_length=MAX_MESSAGE_CHARACTERS)
    reasoning: str = Field("", max_length=MAX_MESSAGE_CHARACTERS)
    spans: list[Span] = Field([], max_length=MAX_SPANS)
    figures: ReplyFigures | None = None
    created_at: float = Field(0, ge=0, le=MAX_TIME)

    def turn(self) -> MessageRow:
        """As the store keeps it."""
        figures = None if self.figures is None else self.figures.model_dump(exclude_unset=True)
        return MessageRow(turn=self.id, figures=figures, **self.model_dump(exclude={"id", "figures"}))


class NewConversation(PageBody):
    """What a conversation is called and asks for."""

    title: Title
    model: ModelId = ""
    options: ConversationOptions = ConversationOptions()

    def beginning(self) -> Beginning:
        """As the store keeps it."""
        return Beginning(self.title, self.model, self.options.model_dump(exclude_none=True))


class NewTurns(PageBody):
    """Turns for a conversation of a version; 0 with `begin` makes it."""

    version: int = Field(ge=0, le=MAX_ID)
    turns: list[NewTurn] = Field(max_length=MAX_TURNS)
    begin: NewConversation | None = None


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    router = APIRouter()
    conversations = Conversations(context.store)
    context.live.topic("conversations", lambda: {"revision": conversations.revision})
    _add_page(router, context, pages)
    _add_replies(router, context.serving)
    _add_all(router, conversations)
    _add_one(router, conversations)
    return router


def _add_page(router: APIRouter, context: AdminContext, pages: Pages) -> None:
    @router.get("/admin/chat", response_class=HTMLResponse)
    async def get_chat(request: Request) -> HTMLResponse:
        """The page; its script asks for conversations and models."""
        data = {"model": context.settings.current.default_model, "text_methods": TEXT_METHODS}
        return pages.render("chat.html", request, area="chat", data=data)


def _add_replies(router: APIRouter, context: Context) -> None:
    @router.get("/admin/api/replies/{request_id}")
    async def follow_reply(request_id: str) -> Response:
        """The stream of a reply from its beginning, for the page that asked for it and was loaded anew."""
        kept = context.replies.get(request_id)
        if kept is None:
            raise Rejected(404, "This request does not run any more.", "not_running")
        return kept.response(context.write_timeout_seconds)


def _add_all(router: APIRouter, conversations: Conversations) -> None:
    @router.get("/admin/api/conversations")
    def list_conversations(search: Annotated[str, Query(max_length=MAX_TITLE_CHARACTERS)] = "") -> dict[str, Any]:
        """Headings, the latest first; with `search` those whose title or messages contain it."""
        return {"conversations": [_heading(each) for each in conversations.list(search.strip())]}

    @router.delete("/admin/api/conversations")
    def delete_conversations() -> dict[str, Any]:
        """Forget all of them."""
        return {"deleted": conversations.delete_all()}


def _add_one(router: APIRouter, conversations: Conversations) -> None:
    path = "/admin/api/conversations/{conversation_id}"

    @router.get(path)
    def get_conversation(conversation_id: int) -> dict[str, Any]:
        """One with its turns."""
        return _whole(*_found(conversation_id, conversations.find))

    @router.patch(path)
    async def change_conversation(request: Request, conversation_id: int) -> dict[str, Any]:
        """Rename one, or keep its model and options."""
        asked = await read_json(request, ConversationChange)
        options = None if asked.options is None else asked.options.model_dump(exclude_none=True)

        def change(number: int) -> Any:
            return conversations.change(number, title=asked.title, model_id=asked.model, options=options)

        return _heading(await asyncio.to_thread(_found, conversation_id, change))

    @router.delete(path)
    def delete_conversation(conversation_id: int) -> dict[str, Any]:
        """Forget one."""
        _found(conversation_id, lambda number: conversations.delete(number) or None)
        return {"deleted": 1}

    @router.post(path + "/turns")
    async def add_turns(request: Request, conversation_id: int) -> Response:
        """Keep turns; 409 with what is there when somebody else wrote since."""
        asked = await read_json(request, NewTurns)
        return await asyncio.to_thread(_answer_turns, conversations, conversation_id, asked, words_for(request))


def _answer_turns(conversations: Conversations, conversation_id: int, asked: NewTurns, words: Words | None) -> Response:
    turns = [each.turn() for each in asked.turns]
    beginning = None if asked.begin is None else asked.begin.beginning()
    try:
        added = _found(conversation_id, lambda number: conversations.add(number, asked.version, turns, beginning))
        return JSONResponse(_heading(added))
    except StaleVersion as error:
        present = _whole(*_found(conversation_id, conversations.find))
        return JSONResponse({**error_object(error, words), "conversation": present}, error.status)


def _heading(conversation: ConversationRow) -> dict[str, Any]:
    """One line of the list."""
    return conversation.model_dump(exclude={"options"})


def _whole(conversation: ConversationRow, turns: Sequence[MessageRow]) -> dict[str, Any]:
    """A whole conversation, as the page reads, exports and imports it."""
    return {**_heading(conversation), "options": conversation.options, "turns": [_turn(each) for each in turns]}


def _turn(row: MessageRow) -> dict[str, Any]:
    told = row.model_dump(exclude={"id", "conversation_id", "turn"})
    return {**told, "id": row.turn, "spans": row.spans or []}


def _found(conversation_id: int, look: Callable[[int], Found | None]) -> Found:
    """What `look` finds; a conversation that is gone is HTTP 404."""
    found = look(conversation_id) if 0 < conversation_id <= MAX_ID else None
    if found is None:
        raise Rejected(404, "This conversation was deleted.", "conversation_not_found")
    return found

"""`/admin/chat`: the playground, and its conversations under `/admin/api/conversations`.

Replies stream from `/admin/api/v1/chat/completions`, which is the API's own route behind the sign-in. The page keeps
a reply with `PUT …/messages` when it is finished or stopped.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.serving.body import read_json
from app.serving.errors import Rejected
from app.store.conversations import Conversations, Message, Role

MAX_ID = (1 << 63) - 1
MAX_TITLE_CHARACTERS = 200
MAX_MESSAGE_CHARACTERS = 1_000_000
MAX_SPANS = 100_000
MAX_FIGURES_BYTES = 16 * 1024
MAX_SEED = (1 << 53) - 1
"""What a script's numbers hold exactly."""

Title = Annotated[str, Field(min_length=1, max_length=MAX_TITLE_CHARACTERS)]
ModelId = Annotated[str, Field(max_length=300)]
Span = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[str, Field(max_length=60)]]
Found = TypeVar("Found")


class Body(BaseModel):
    """Base of what the page sends; a name that means nothing here is a mistake."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


class ChatOptions(Body):
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


class NewConversation(Body):
    """A conversation to begin."""

    title: Title
    model: ModelId = ""
    options: ChatOptions = ChatOptions()


class ConversationChange(Body):
    """What is to be different; the rest stays."""

    title: Title | None = None
    model: ModelId | None = None
    options: ChatOptions | None = None


class NewMessage(Body):
    """One message to keep."""

    role: Role
    content: str = Field(max_length=MAX_MESSAGE_CHARACTERS)
    reasoning: str = Field("", max_length=MAX_MESSAGE_CHARACTERS)
    spans: list[Span] = Field([], max_length=MAX_SPANS)
    figures: dict[str, Any] | None = None

    @field_validator("figures")
    @classmethod
    def _check_figures(cls, figures: dict[str, Any] | None) -> dict[str, Any] | None:
        if figures is not None and len(msgspec.json.encode(figures)) > MAX_FIGURES_BYTES:
            raise ValueError(f"figures have at most {MAX_FIGURES_BYTES} bytes")
        return figures

    def message(self) -> Message:
        """As the store keeps it."""
        return Message(self.role, self.content, self.reasoning, tuple(self.spans), self.figures)


class Messages(Body):
    """`messages` take the place of everything after the message with the id `after`; 0 is the beginning."""

    after: int = Field(ge=0, le=MAX_ID)
    messages: list[NewMessage] = Field(max_length=1000)


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    router = APIRouter()
    conversations = Conversations(context.store)
    _add_page(router, context, pages)
    _add_all(router, conversations)
    _add_one(router, conversations)
    return router


def _add_page(router: APIRouter, context: AdminContext, pages: Pages) -> None:
    @router.get("/admin/chat", response_class=HTMLResponse)
    async def get_chat(request: Request) -> HTMLResponse:
        """The page; its script asks for conversations and models."""
        return pages.render("chat.html", request, area="chat", data={"model": context.settings.current.default_model})


def _add_all(router: APIRouter, conversations: Conversations) -> None:
    @router.get("/admin/api/conversations")
    def list_conversations(search: Annotated[str, Query(max_length=MAX_TITLE_CHARACTERS)] = "") -> dict[str, Any]:
        """Headings, the latest first; with `search` those whose title or messages contain it."""
        return {"conversations": [asdict(each) for each in conversations.list(search.strip())]}

    @router.post("/admin/api/conversations", status_code=201)
    async def create_conversation(request: Request) -> dict[str, Any]:
        """A new one, still empty."""
        asked = await read_json(request, NewConversation)
        options = asked.options.model_dump(exclude_none=True)
        return asdict(await asyncio.to_thread(conversations.create, asked.title, asked.model, options))

    @router.delete("/admin/api/conversations")
    def delete_conversations() -> dict[str, Any]:
        """Forget all of them."""
        return {"deleted": conversations.delete_all()}


def _add_one(router: APIRouter, conversations: Conversations) -> None:
    path = "/admin/api/conversations/{conversation_id}"

    @router.get(path)
    def get_conversation(conversation_id: int) -> dict[str, Any]:
        """One with its messages."""
        found = _found(conversation_id, conversations.find)
        return {
            **asdict(found.heading),
            "options": dict(found.options),
            "messages": [asdict(message) for message in found.messages],
        }

    @router.patch(path)
    async def change_conversation(request: Request, conversation_id: int) -> dict[str, Any]:
        """Rename one, or keep its model and options."""
        asked = await read_json(request, ConversationChange)
        options = None if asked.options is None else asked.options.model_dump(exclude_none=True)

        def change(number: int) -> Any:
            return conversations.change(number, title=asked.title, model_id=asked.model, options=options)

        return asdict(await asyncio.to_thread(_found, conversation_id, change))

    @router.delete(path)
    def delete_conversation(conversation_id: int) -> dict[str, Any]:
        """Forget one."""
        _found(conversation_id, lambda number: conversations.delete(number) or None)
        return {"deleted": 1}

    @router.put(path + "/messages")
    async def put_messages(request: Request, conversation_id: int) -> dict[str, Any]:
        """Keep messages in the place of everything after one; answers them with their ids."""
        asked = await read_json(request, Messages)
        messages = [each.message() for each in asked.messages]
        added = await asyncio.to_thread(
            _found, conversation_id, lambda number: conversations.put(number, asked.after, messages)
        )
        return {"messages": [{"id": message.id, "created_at": message.created_at} for message in added]}


def _found(conversation_id: int, look: Callable[[int], Found | None]) -> Found:
    """What `look` finds; a conversation that is gone is HTTP 404."""
    found = look(conversation_id) if 0 < conversation_id <= MAX_ID else None
    if found is None:
        raise Rejected(404, "This conversation was deleted.", "conversation_not_found")
    return found

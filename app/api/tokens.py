"""`/tokenize`, `/detokenize` and `/apply-template`: prompts as models read them. Formats: llama.cpp, vLLM.

No model is loaded: its tokenizer and chat template are enough.
"""

import secrets
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from app.api.answer import cancel_on_disconnect, warnings_object
from app.api.chat import ChatBody, chat_command
from app.api.commands import MAX_TOKEN_ID, GenerationBody, shared_command
from app.api.shapes import RenderedPrompt, Tokens, TokensText
from app.core.messages import Generate, PromptTokens
from app.models.prompt_size import check_prompt
from app.serving.context import context_of
from app.serving.document import problems, success
from app.serving.gate import Body, JsonBody, validated, where_parsed

router = APIRouter()


class TextBody(GenerationBody):
    """`POST /tokenize` with a text, which llama.cpp calls `content` and vLLM `prompt`."""

    content: str | None = None
    prompt: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TextBody":
        if (self.content is None) == (self.prompt is None):
            raise ValueError("give one of content, prompt and messages")
        return self


class AnyBody(Body):
    """Body of `POST /tokenize`: a text or a conversation."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of either body, for the OpenAPI document."""
        return handler(TypeAdapter[Any](TextBody | ChatBody).core_schema)


class DetokenizeBody(GenerationBody):
    """`POST /detokenize`."""

    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] = Field(min_length=1)


@router.post("/tokenize", responses=success(Tokens) | problems(404, 429))
async def tokenize(request: Request, body: JsonBody[AnyBody]) -> JSONResponse:
    """Return the tokens of a text or a chat, with a BOS token if the model's prompts begin with one."""
    values = body.model_extra or {}
    if values.get("messages") is not None:
        command = await chat_command(request, await where_parsed(request, validated, values, ChatBody), _id())
    else:
        text_body = await where_parsed(request, validated, values, TextBody)
        command = await _command(request, text_body, text=text_body.content or text_body.prompt or "")
    prompt = await read_prompt(request, command)
    return JSONResponse(
        {"tokens": prompt.tokens, "count": len(prompt.tokens), "max_model_len": command.model.live.context_tokens}
        | warnings_object(prompt.notices)
    )


@router.post("/detokenize", responses=success(TokensText) | problems(429))
async def detokenize(request: Request, body: JsonBody[DetokenizeBody]) -> JSONResponse:
    """Return the text of tokens, special ones included."""
    prompt = await read_prompt(request, await _command(request, body, tokens=body.tokens))
    return JSONResponse({"content": prompt.text, "prompt": prompt.text})


@router.post("/apply-template", responses=success(RenderedPrompt) | problems(429))
async def apply_template(request: Request, body: JsonBody[ChatBody]) -> JSONResponse:
    """Return the prompt that the chat template renders for a conversation."""
    prompt = await read_prompt(request, await chat_command(request, body, _id()))
    return JSONResponse({"prompt": prompt.text} | warnings_object(prompt.notices))


def _id() -> str:
    return f"read_{secrets.token_hex(12)}"


async def _command(request: Request, body: GenerationBody, **prompt: Any) -> Generate:
    shared = await shared_command(request, body, top_logprobs=None)
    return msgspec.structs.replace(shared, id=_id(), **prompt)


async def read_prompt(request: Request, command: Generate) -> PromptTokens:
    """Return the prompt of a command, without loading a model. Raises what the text process raises."""
    check_prompt(command)
    return await cancel_on_disconnect(request, context_of(request).worker.read_prompt(command))

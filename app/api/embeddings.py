"""`/v1/embeddings`: the last hidden states of any model, pooled over each input and normalised to length 1.

`pooling` is `mean`, `last` or, for an encoder, `cls` (the first token); it defaults to the model's own, else to `mean`.
`dimensions` truncates vectors to this number of values and normalises them again: models that were not trained for this
lose accuracy.
"""

import asyncio
import base64
import secrets
from array import array
from collections.abc import Sequence
from math import sqrt
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from app.api.answer import FinishedChoice, Renderer, all_warnings, answer
from app.api.commands import GenerationBody, shared_command
from app.api.completions import Prompt, is_tokens, prompts
from app.api.shapes import EmbeddingList
from app.core.errors import InvalidRequest
from app.core.messages import Generate
from app.core.statistics import Statistics
from app.models.encoders import UNKNOWN
from app.serving.context import context_of
from app.serving.document import ANSWERED, success
from app.serving.gate import JsonBody

MAX_INPUTS = 2048

router = APIRouter()


class EmbeddingsBody(GenerationBody):
    """`POST /v1/embeddings`."""

    embeds: ClassVar[bool] = True

    input: Annotated[Any, prompts(MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=1 << 20)
    pooling: Literal["mean", "last", "cls"] | None = None

    @field_validator("input")
    @classmethod
    def _check_input(cls, given: Any) -> list[Prompt]:
        inputs = [given] if isinstance(given, str) or is_tokens(given) else given
        if not isinstance(inputs, list) or not 1 <= len(inputs) <= MAX_INPUTS:
            raise ValueError(f"give a string, token ids, or a list of 1 to {MAX_INPUTS} of them")
        if not all((isinstance(prompt, str) and prompt) or is_tokens(prompt) for prompt in inputs):
            raise ValueError("each input is a non-empty string, or a non-empty list of token ids")
        return inputs


@router.post("/v1/embeddings", responses=success(EmbeddingList) | ANSWERED)
async def create_embeddings(request: Request, body: JsonBody[EmbeddingsBody]) -> Response:
    """Return one vector for each input."""
    embedding_id = f"embd-{secrets.token_hex(12)}"
    commands = await embedding_commands(request, body, embedding_id)
    return await answer(request, commands, EmbeddingsRenderer(embedding_id, commands[0], body), stream=False)


async def embedding_commands(request: Request, body: EmbeddingsBody, embedding_id: str) -> list[Generate]:
    """Build one command for each input. Raises InvalidRequest for impossible pooling, and what the resolver raises."""
    shared = await shared_command(request, body, top_logprobs=None)
    model = await asyncio.to_thread(context_of(request).resolver.find, shared.model.id)
    pooling = body.pooling or model.pooling or "mean"
    if pooling == "cls" and model.kind != "encoder":
        message = f"pooling cls: in {model.id} the first token attends to no other token: use mean or last."
        raise InvalidRequest(message, parameter="pooling")
    if pooling == UNKNOWN:
        message = (
            f"The files of {model.id} do not state its pooling: set pooling to mean, cls or last, or copy the folder"
            " 1_Pooling of the model that it was made from into its own."
        )
        raise InvalidRequest(message, parameter="pooling")
    return [
        msgspec.structs.replace(
            shared,
            id=f"{embedding_id}-{index}",
            text=prompt if isinstance(prompt, str) else None,
            tokens=None if isinstance(prompt, str) else prompt,
            n=1,
            max_tokens=0,
            embeds=pooling,
        )
        for index, prompt in enumerate(body.input)
    ]


def truncated(embedding: Sequence[float], dimensions: int | None) -> list[float]:
    """Normalise the first `dimensions` numbers of a vector to length 1. Raises InvalidRequest if it has fewer."""
    if dimensions is not None and dimensions > len(embedding):
        message = f"dimensions is {dimensions}, but this model's vectors have {len(embedding)} values."
        raise InvalidRequest(message, parameter="dimensions")
    vector = embedding[:dimensions]
    size = sqrt(sum(value * value for value in vector)) or 1.0
    return [value / size for value in vector]


def encode_vector(vector: list[float]) -> msgspec.Raw:
    """Encode a vector as JSON right away, because thousands of vectors as lists of Python floats would fill memory."""
    return msgspec.Raw(msgspec.json.encode(vector))


class EmbeddingsRenderer(Renderer):
    """OpenAI's list of embeddings, with the additional fields `pooling` and `normalized`."""

    prompt_parameter = "input"

    def __init__(self, request_id: str, command: Generate, body: EmbeddingsBody) -> None:
        super().__init__(request_id)
        self._model_id, self._pooling = command.model.id, command.embeds
        self._body = body

    def render_whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        tokens = Statistics.combined([choice.usage for choice in finished]).prompt_tokens
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(choice.embedding)}
            for index, choice in enumerate(finished)
        ]
        method = {"pooling": self._pooling, "normalized": True}
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        response = {"object": "list", "data": data, "model": self._model_id, "usage": usage} | method
        return response | all_warnings(finished)

    def _vector(self, embedding: Sequence[float]) -> msgspec.Raw | str:
        vector = truncated(embedding, self._body.dimensions)
        if self._body.encoding_format == "base64":
            return base64.b64encode(array("f", vector).tobytes()).decode()
        return encode_vector(vector)

"""`/v1/rerank`, in the format of Cohere, Jina and vLLM: documents ranked by how well they answer a query, best first.

Models of the Qwen3-Reranker family answer yes or no for each document: its relevance is P(yes) / (P(yes) + P(no)) of
the next token (arXiv 2506.05176, section 2.1). For other models this ratio has no meaning.
"""

import asyncio
import math
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from app.api.answer import FinishedChoice, Renderer, all_warnings, answer
from app.api.commands import TEXT, GenerationBody, json_schema_as, object_of, shared_command
from app.api.shapes import Reranking
from app.core.errors import InvalidRequest
from app.core.messages import Generate
from app.core.request import OFF, SpeculationRequest
from app.core.statistics import Statistics
from app.serving.context import context_of
from app.serving.document import ANSWERED, success
from app.serving.gate import JsonBody

MAX_DOCUMENTS = 2048
TOP_TOKENS = 64
"""Number of likeliest tokens searched for `yes` and `no`; a word that is not among them has weight 0."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PROMPT = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Prompt that these models were trained with."""

router = APIRouter()


class RerankBody(GenerationBody):
    """`POST /v1/rerank`. `instruction` defines what counts as relevant; `top_n` limits the results to the best."""

    query: str = Field(min_length=1)
    documents: Annotated[
        Any, json_schema_as({"type": "array", "items": {"anyOf": [TEXT, object_of(text=TEXT)]}}, or_null=False)
    ]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    instruction: str | None = None

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, given: Any) -> list[str]:
        if not isinstance(given, list) or not 1 <= len(given) <= MAX_DOCUMENTS:
            raise ValueError(f"give a list of 1 to {MAX_DOCUMENTS} documents")
        texts: list[Any] = [document.get("text") if isinstance(document, dict) else document for document in given]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError('each document is a text that is not empty, or {"text": …}')
        return texts


@router.post("/v1/rerank", responses=success(Reranking) | ANSWERED)
async def rerank(request: Request, body: JsonBody[RerankBody]) -> Response:
    """Rank documents by their relevance to a query."""
    model = await asyncio.to_thread(context_of(request).resolver.main, body.model)
    if not model.reranks:
        message = f"{model.id} is no reranker: load a model like Qwen3-Reranker, or compare /v1/embeddings."
        raise InvalidRequest(message, parameter="model")
    shared = await shared_command(request, body, top_logprobs=TOP_TOKENS)
    rerank_id = f"rerank-{secrets.token_hex(12)}"
    query_fields = {"instruction": INSTRUCTION if body.instruction is None else body.instruction, "query": body.query}
    commands = [
        msgspec.structs.replace(
            shared,
            id=f"{rerank_id}-{index}",
            text=PROMPT.format(document=document, **query_fields),
            n=1,
            max_tokens=1,
            ignore_end=True,
            speculation=SpeculationRequest(method=OFF),
        )
        for index, document in enumerate(body.documents)
    ]
    return await answer(request, commands, RerankRenderer(rerank_id, shared, body), stream=False)


def relevance(likeliest: Sequence[tuple[str, float]]) -> float | None:
    """Return P(yes) / (P(yes) + P(no)) from tokens and log probabilities; None if neither word is among them."""
    weights = {text: math.exp(logprob) for text, logprob in likeliest if text in {"yes", "no"}}
    return weights.get("yes", 0.0) / sum(weights.values()) if weights else None


class RerankRenderer(Renderer):
    """Cohere's list of results."""

    prompt_parameter = "documents"

    def __init__(self, request_id: str, command: Generate, body: RerankBody) -> None:
        super().__init__(request_id)
        self._model_id, self._body = command.model.id, body

    def render_whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        results = [self._result(index, choice) for index, choice in enumerate(finished)]
        results.sort(key=lambda result: -result["relevance_score"])
        tokens = Statistics.combined([choice.usage for choice in finished]).prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        response = {"id": self.id, "model": self._model_id, "results": results[: self._body.top_n], "usage": usage}
        return response | all_warnings(finished)

    def _result(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        [token] = finished.logprobs
        score = relevance([(text, logprob) for text, logprob, _ in token.top])
        if score is None:
            raise InvalidRequest(f"{self._model_id} answers neither yes nor no: it is no reranker.", parameter="model")
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._body.return_documents:
            result["document"] = {"text": self._body.documents[index]}
        return result

"""Clients that fill shared storage with thousands of responses and conversations: other clients lose nothing."""

import asyncio
import time

import httpx2

from campaign.attack import TurnContext
from campaign.chats import MODEL

RESPONSES, CLIENTS = 100, 4
VALUES, CHARACTERS, ACCEPTED_CHARACTERS = 16, 60_000, 512
"""Metadata of a response: number of values, characters per value to try, and characters per value that OpenAI takes."""
CONVERSATIONS = 200
FULL_STATUS = 400
"""Status of the answer to a conversation beyond the limit."""
RESPONSES_PATH = "/v1/responses"


async def hoard_responses(context: TurnContext) -> None:
    """Store 100 large responses with one key; an earlier response of another key must still be there."""
    async with context.client() as client, context.server.client(await context.server.new_key()) as other:
        response_id = await store_response(context, other, "mine", 1)
        shares = [RESPONSES // CLIENTS] * CLIENTS
        await asyncio.gather(*(hoard(context, client, share) for share in shares))
        answer = await other.get(f"{RESPONSES_PATH}/{response_id}")
        context.findings.count_response(answer.status_code, answer.headers, answer.content, "a kept response")
        context.findings.expect(answer.is_success, f"the response of another key is gone: {answer.status_code}")


async def hoard(context: TurnContext, client: httpx2.AsyncClient, count: int) -> None:
    """Store `count` responses with metadata as large as is accepted."""
    for _ in range(count):
        if not await store_response(context, client, "x" * CHARACTERS, VALUES):
            await store_response(context, client, "x" * ACCEPTED_CHARACTERS, VALUES)


async def store_response(context: TurnContext, client: httpx2.AsyncClient, value: str, values: int) -> str:
    """Store a response with `values` times `value` as metadata; return its id, or "" if it is refused."""
    metadata = {f"k{number}": value for number in range(values)}
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 1, "store": True, "metadata": metadata}
    answer = await client.post(RESPONSES_PATH, json=body)
    context.findings.count_response(answer.status_code, answer.headers, answer.content, "POST /v1/responses")
    return str(answer.json()["id"]) if answer.is_success else ""


async def hoard_conversations(context: TurnContext) -> None:
    """Add 200 conversations, and delete all whenever the store is full; then time a search over them."""
    async with context.server.client(context.server.admin_key) as admin:
        for number in range(CONVERSATIONS):
            turns = [{"id": "q1", "parent": "", "role": "user", "content": "words " * 200}]
            body = {"version": 0, "turns": turns, "begin": {"title": f"Conversation {number}"}}
            address = f"/admin/api/conversations/{context.rng.getrandbits(52)}/turns"
            answer = await admin.post(address, json=body)
            context.findings.count_response(answer.status_code, answer.headers, answer.content, "a new conversation")
            if answer.status_code == FULL_STATUS:
                await context.server.call("DELETE", "/admin/api/conversations")
        began = time.monotonic()
        answer = await admin.get("/admin/api/conversations", params={"search": "words"})
        context.findings.record_time("list of conversations", time.monotonic() - began)
        context.findings.count_response(answer.status_code, answer.headers, answer.content, "the list of conversations")

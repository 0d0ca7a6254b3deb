"""One conversation in the format of each of the four chat APIs ("surfaces"), and its answer, whole or streamed.

Messages and tools are OpenAI's, as for `/v1/chat/completions`; `Said` is the same value whichever surface returned it.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

Message = dict[str, Any]
SURFACES = ("chat", "responses", "messages", "ollama")
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}


@dataclass
class Said:
    """An answer as a client reads it. `calls`: name and arguments of each, as JSON text if the surface sends text."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finish: str = ""
    """Reason why the answer ended, in the surface's own term."""
    statuses: list[str] = field(default_factory=list)
    """Statuses of a response's items; only the surface `responses` has them."""
    warnings: list[str] = field(default_factory=list)
    """Codes of the warnings."""
    error: str = ""
    """Message of the error that refused the request or ended the answer."""

    @property
    def objects(self) -> list[tuple[str, Any]]:
        """The calls with their arguments parsed."""
        return [
            (name, json.loads(arguments) if isinstance(arguments, str) else arguments) for name, arguments in self.calls
        ]


def ask(
    client: httpx.Client,
    surface: str,
    model: str,
    messages: Sequence[Message] | str,
    tools: Sequence[Message] = (),
    *,
    stream: bool = False,
    max_tokens: int = 4096,
    **fields: Any,
) -> Said:
    """Send a conversation, or one user message, and return the answer; `fields` go into the body unchanged."""
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = BODIES[surface](listed, list(tools), max_tokens) | {"model": model, "stream": stream} | fields
    answer = client.post(PATHS[surface], json=body)
    if answer.status_code != 200:
        return Said(error=_error(answer.json()))
    if not stream:
        return WHOLE[surface](answer.json())
    lines = answer.text.splitlines()
    events = lines if surface == "ollama" else [line[6:] for line in lines if line.startswith("data: ")]
    return STREAMED[surface](json.loads(event) for event in events if event and event != "[DONE]")


def _error(body: Any) -> str:
    error = body["error"]
    return str(error if isinstance(error, str) else error["message"])


def _warnings(body: Mapping[str, Any]) -> list[str]:
    return [warning["code"] for warning in body.get("warnings") or ()]


# --- requests -------------------------------------------------------------------------------------------------------


def _chat_body(messages: list[Message], tools: list[Message], max_tokens: int) -> Message:
    return {"messages": messages, "max_tokens": max_tokens} | ({"tools": tools} if tools else {})


def _responses_body(messages: list[Message], tools: list[Message], max_tokens: int) -> Message:
    items: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message.get("reasoning_content"):
            thoughts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "summary": [], "content": thoughts})
        if message.get("content"):
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        calls = message.get("tool_calls") or ()
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    return {"input": items, "max_output_tokens": max_tokens} | ({"tools": flat} if flat else {})


def _messages_body(messages: list[Message], tools: list[Message], max_tokens: int) -> Message:
    turns = []
    for message in messages:
        blocks: list[Message] = []
        if message["role"] == "tool":
            call_id, content = message["tool_call_id"], message["content"]
            turns.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}]}
            )
            continue
        if message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message.get("content"):
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            function, given = call["function"], json.loads(call["function"]["arguments"] or "{}")
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
        role = "system" if message["role"] == "developer" else message["role"]
        turns.append({"role": role, "content": blocks})
    listed = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description"),
            "input_schema": tool["function"]["parameters"],
        }
        for tool in tools
    ]
    return {"messages": turns, "max_tokens": max_tokens} | ({"tools": listed} if listed else {})


def _ollama_body(messages: list[Message], tools: list[Message], max_tokens: int) -> Message:
    turns = []
    for message in messages:
        turn: Message = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("reasoning_content"):
            turn["thinking"] = message["reasoning_content"]
        if message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            turn["tool_calls"] = [
                {"function": {"name": function["name"], "arguments": json.loads(function["arguments"] or "{}")}}
                for function in functions
            ]
        turns.append(turn)
    return {"messages": turns, "options": {"num_predict": max_tokens}} | ({"tools": tools} if tools else {})


# --- whole answers --------------------------------------------------------------------------------------------------


def _chat_whole(body: Message) -> Said:
    choice = body["choices"][0]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    thoughts = message.get("reasoning_content") or ""
    return Said(message["content"] or "", thoughts, calls, choice["finish_reason"], [], _warnings(body))


def _responses_whole(body: Message) -> Said:
    said = Said(finish=body["status"], warnings=_warnings(body))
    for item in body["output"]:
        said.statuses.append(item["status"])
        if item["type"] == "function_call":
            said.calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            said.reasoning += "".join(part["text"] for part in item["content"])
        else:
            said.text += "".join(part["text"] for part in item["content"])
    return said


def _messages_whole(body: Message) -> Said:
    said = Said(finish=body["stop_reason"], warnings=_warnings(body))
    for block in body["content"]:
        match block["type"]:
            case "text":
                said.text += block["text"]
            case "thinking":
                said.reasoning += block["thinking"]
            case "tool_use":
                said.calls.append((block["name"], block["input"]))
    return said


def _ollama_whole(body: Message) -> Said:
    message = body["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Said(message["content"], message.get("thinking") or "", calls, body["done_reason"], [], _warnings(body))


# --- streams --------------------------------------------------------------------------------------------------------


def _chat_streamed(events: Iterable[Message]) -> Said:
    said, calls = Said(), dict[int, tuple[str, str]]()
    for event in events:
        said.error = said.error or (_error(event) if "error" in event else "")
        said.warnings += _warnings(event)
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            said.text += delta.get("content") or ""
            said.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = name + (function.get("name") or ""), arguments + (function["arguments"] or "")
            said.finish = choice["finish_reason"] or said.finish
    said.calls = list(calls.values())
    return said


def _responses_streamed(events: Iterable[Message]) -> Said:
    """Read the response of the last event, and assert that its text is that of the deltas, as clients show it."""
    said, text = Said(), ""
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                text += event["delta"]
            case "response.completed" | "response.incomplete":
                said = _responses_whole(event["response"])
            case "response.failed":
                said.error = event["response"]["error"]["message"]
    assert text == said.text or said.error
    return said


def _messages_streamed(events: Iterable[Message]) -> Said:
    said, names, inputs = Said(), dict[int, str](), dict[int, str]()
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                names[event["index"]], inputs[event["index"]] = event["content_block"]["name"], ""
            case "content_block_delta":
                delta = event["delta"]
                said.text += delta.get("text", "")
                said.reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    inputs[event["index"]] += delta["partial_json"]
            case "message_delta":
                said.finish, said.warnings = event["delta"]["stop_reason"], _warnings(event)
            case "error":
                said.error = _error(event)
    said.calls = [(name, json.loads(inputs[place] or "{}")) for place, name in names.items()]
    return said


def _ollama_streamed(events: Iterable[Message]) -> Said:
    said = Said()
    for event in events:
        if "error" in event:
            said.error = _error(event)
            continue
        message = event["message"]
        said.text += message["content"]
        said.reasoning += message.get("thinking") or ""
        said.calls += [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
        ]
        said.finish = event.get("done_reason") or said.finish
        said.warnings += _warnings(event)
    return said


BODIES: Mapping[str, Callable[[list[Message], list[Message], int], Message]] = {
    "chat": _chat_body,
    "responses": _responses_body,
    "messages": _messages_body,
    "ollama": _ollama_body,
}
WHOLE: Mapping[str, Callable[[Message], Said]] = {
    "chat": _chat_whole,
    "responses": _responses_whole,
    "messages": _messages_whole,
    "ollama": _ollama_whole,
}
STREAMED: Mapping[str, Callable[[Iterable[Message]], Said]] = {
    "chat": _chat_streamed,
    "responses": _responses_streamed,
    "messages": _messages_streamed,
    "ollama": _ollama_streamed,
}

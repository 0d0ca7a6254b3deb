"""Chat completions: OpenAI's objects, whole and streamed, and Paceline's additions."""

import json
from typing import Any

import pytest

from app.core.errors import InvalidSetting
from app.core.messages import Snapshot
from app.core.request import SpeculationRequest
from app.core.unit import DrafterSpecification
from tests.api.fakes import DRAFTERS, FOLDERS, Site, chat_body, frames, make_site, names_of
from tests.loaded import loaded

pytestmark = pytest.mark.anyio


async def stream(site: Site, **fields: object) -> list[dict]:
    """The chunks of a streamed chat; asserts that it ends with [DONE]."""
    response = await site.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    payloads = frames(response.text)
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


async def test_whole_answer(site: Site) -> None:
    answer = (await site.chat(seed=7)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "demo-main"
    assert answer["seed"] == 7
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 2,
            "rejected_prediction_tokens": 2,
        },
    }
    timings = answer["timings"]
    assert (timings["prompt_n"], timings["cache_n"], timings["prompt_ms"]) == (3, 2, 30.0)
    assert (timings["predicted_n"], timings["predicted_ms"], timings["predicted_per_second"]) == (3, 60.0, 50.0)
    assert (timings["draft_n"], timings["draft_n_accepted"], timings["draft_rounds"]) == (4, 2, 2)
    parts = [timings[f"{part}_ms"] for part in ("draft", "verify", "rewind", "host")]
    assert parts == [15.625, 41.25, 1.0, 2.125], "together they are predicted_ms"
    speculation = answer["speculation"]
    assert (speculation["method"], speculation["drafted"], speculation["accepted"]) == ("draft_model", 4, 2)
    assert speculation["tokens_per_cycle"] == 2.0
    assert (speculation["close_calls"], speculation["replayed_tokens"]) == (1, 7)
    assert speculation["decision"] == {
        "kind": "draft",
        "method": "draft_model",
        "num_draft_tokens": 2,
        "cost_ratio": 1.412,
        "acceptance": 0.512,
    }
    counts = {"cycles": 2, "drafted": 4, "accepted": 2, "accepted_per_position": [2, 0]}
    assert speculation["methods"]["draft_model"] == counts
    assert list(speculation["methods"]) == ["off", "draft_model"]


async def test_stream_is_the_whole_answer_in_pieces(site: Site) -> None:
    chunks = await stream(site)
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta for delta in deltas if "role" in delta] == [{"role": "assistant", "content": ""}] == deltas[:1]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    assert deltas[-1] == {}
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_tells_which_text_was_drafted_and_the_numbers_at_the_end(site: Site) -> None:
    *chunks, last = await stream(site, seed=1)
    spans = [chunk["choices"][0].get("accepted_spans") for chunk in chunks]
    assert spans == [None, None, [[0, 7]]]
    assert chunks[2]["choices"][0]["method"] == "draft_model"
    assert last["timings"]["draft_n_accepted"] == 2
    assert last["speculation"]["method"] == "draft_model"
    assert last["seed"] == 1
    assert not any("timings" in chunk for chunk in chunks)


async def test_usage_comes_once_in_a_last_chunk_without_choices(site: Site) -> None:
    *chunks, last = await stream(site, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_several_choices(site: Site) -> None:
    answer = (await site.chat(n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 5, "one prompt is counted once"
    assert answer["usage"]["completion_tokens"] == 9
    chunks = await stream(site, n=3)
    finished = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert finished == [0, 1, 2]
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert roles == [0, 1, 2]


async def test_logprobs(site: Site) -> None:
    answer = (await site.chat(logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    chunks = await stream(site, logprobs=True)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in streamed] == ["Hello", ", ", "world"]
    assert all(entry["top_logprobs"] == [] for entry in streamed)


async def test_the_command_carries_what_was_asked(site: Site) -> None:
    response = await site.chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        ],
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=1,
        seed=-2,
        stop="END",
        max_tokens=5,
        max_completion_tokens=6,
        logit_bias={"12": -100},
        chat_template_kwargs={"enable_thinking": False},
        speculation={"method": "draft_model", "num_draft_tokens": 4},
        user="ignored",
        store=True,
        metadata={"any": "thing"},
    )
    assert response.status_code == 200, response.text
    (command,) = site.worker.commands
    assert command.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "Ann"},
    ]
    sampling = command.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.1, -1, 1)
    assert sampling.seed == 2**64 - 2
    assert sampling.logit_bias == {12: -100.0}
    assert sampling.top_logprobs is None
    assert (command.stop, command.max_tokens) == (("END",), 6)
    assert command.template_arguments == {"enable_thinking": False}
    assert (command.speculation.method, command.speculation.num_draft_tokens) == ("draft_model", 4)
    assert (names_of(command.model), command.model.live.policy) == (["demo-draft"], "auto")


async def test_an_empty_name_is_none(site: Site) -> None:
    assert (await site.chat(messages=[{"role": "user", "content": "Hi", "name": ""}])).status_code == 200
    assert site.worker.commands[-1].messages == [{"role": "user", "content": "Hi"}]


async def test_a_refusal_in_the_history_is_what_the_assistant_said(site: Site) -> None:
    user = {"role": "user", "content": "Hi"}
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot do that."}
    await site.chat(messages=[user, refusal, user])
    assert (site.worker.commands[-1].messages or [])[1]["content"] == "I cannot do that."


async def test_a_call_in_openais_older_form_and_its_result_are_a_tools(site: Site) -> None:
    function = {"name": "look", "arguments": "{}"}
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "look", "content": "seen"},
    ]
    assert (await site.chat(messages=history)).status_code == 200
    _, called, result = site.worker.commands[-1].messages or ()
    assert called["tool_calls"] == [{"type": "function", "function": function}]
    assert (result["role"], result["content"]) == ("tool", "seen")


async def test_defaults(site: Site) -> None:
    first, second = (await site.chat()).json(), (await site.chat(temperature=None, stop=None)).json()
    assert first["seed"] != second["seed"], "a fresh seed every time"
    assert first["seed"] < 2**53
    command = site.worker.commands[0]
    assert command.sampling.seed == first["seed"]
    assert (command.sampling.temperature, command.max_tokens, command.stop, command.n) == (1.0, None, (), 1)
    assert command.speculation == SpeculationRequest()


async def test_what_other_servers_take_for_no_limit_and_for_greedy(site: Site) -> None:
    site.context.live.change_model("demo-main", {"max_tokens": 7, "temperature": 0.5}, "test")
    for fields in ({"max_tokens": -1}, {"max_completion_tokens": -1}):
        assert (await site.chat(**fields)).status_code == 200
        assert site.worker.commands[-1].max_tokens is None
    assert (await site.complete(max_tokens=-1)).status_code == 200
    assert site.worker.commands[-1].max_tokens is None
    for fields in ({"top_p": 0}, {"top_p": 0, "temperature": 1}):
        assert (await site.chat(**fields)).status_code == 200
        sampling = site.worker.commands[-1].sampling
        assert (sampling.temperature, sampling.top_p) == (0, 1)


async def test_a_profile_brings_what_a_request_leaves_out_on_the_same_engine() -> None:
    site = make_site(models=DRAFTERS)
    live = site.context.live
    live.change_model("demo-main", {"temperature": 0.5, "top_k": 9, "alias": "helper"}, "test")
    own = {"temperature": 0.1, "system_prompt": "Take care.", "max_tokens": 7, "policy": "off"}
    live.change_model("demo-main", own, "test", profile="careful")
    live.change_model("demo-main", {"methods": ["eagle3"], "num_draft_tokens": 2}, "test", profile="eager")
    for model in ("demo-main:careful", "helper:careful"):
        assert (await site.chat(model=model)).status_code == 200
        command = site.worker.commands[-1]
        assert (command.model.id, command.max_tokens, command.speculation.method) == ("demo-main", 7, "off")
        assert (command.sampling.temperature, command.sampling.top_k) == (0.1, 9)
        assert command.messages
        assert command.messages[0] == {"role": "system", "content": "Take care."}
    asked = {"temperature": 1, "speculation": {"method": "ngram"}}
    assert (await site.chat(model="demo-main:careful", **asked)).status_code == 200
    assert (site.worker.commands[-1].sampling.temperature, site.worker.commands[-1].speculation.method) == (1, "ngram")
    assert (await site.chat(model="demo-main:eager")).status_code == 200
    wish = site.worker.commands[-1].speculation
    assert (wish.method, wish.num_draft_tokens) == ("eagle3", 2)
    for asked, method, length in (
        ({"num_draft_tokens": 4}, "eagle3", 4),
        ({"speculation": {"acceptance": "strict"}}, "eagle3", 2),
        ({"speculation": {"method": "auto"}}, "auto", 2),
        ({"draft_model": ""}, "off", 2),
    ):
        assert (await site.chat(model="demo-main:eager", **asked)).status_code == 200
        wish = site.worker.commands[-1].speculation
        assert (wish.method, wish.num_draft_tokens) == (method, length), asked
    assert (await site.chat(model="demo-main:careful", num_draft_tokens=4)).status_code == 200
    assert site.worker.commands[-1].speculation.method == "off", "a length alone turns nothing on"
    missing = (await site.chat(model="demo-main:nothing")).json()["error"]
    assert (missing["code"], "demo-main has no profile nothing" in missing["message"]) == ("model_not_found", True)
    listed = {entry["id"]: entry for entry in (await site.client.get("/v1/models")).json()["data"]}
    assert listed["demo-main:careful"]["profile_of"] == "demo-main"
    assert (await site.client.get("/v1/models/demo-main:careful")).json() == listed["demo-main:careful"]
    with pytest.raises(InvalidSetting, match="a profile cannot set that"):
        live.change_model("demo-main", {"pinned": True}, "test", profile="careful")


async def test_a_method_that_is_named_brings_its_drafter_or_is_refused() -> None:
    site = make_site(models=DRAFTERS)
    assert (await site.chat(speculation={"method": "eagle3"})).status_code == 200
    (command,) = site.worker.commands
    assert command.speculation.method == "eagle3"
    assert command.model.drafters == (
        DrafterSpecification("demo-main-dflash", str(FOLDERS / "demo-main-dflash"), "dflash"),
        DrafterSpecification("demo-main-eagle3", str(FOLDERS / "demo-main-eagle3"), "eagle3"),
    )
    refused = await site.chat(speculation={"method": "mtp"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "speculation_unavailable")
    assert "no mtp drafter on this computer fits demo-main" in refused.json()["error"]["message"]


async def test_a_request_may_be_strict_unless_its_model_accepts_by_rejection() -> None:
    site = make_site(models=DRAFTERS)
    assert (await site.chat(speculation={"acceptance": "strict"})).status_code == 200
    (command,) = site.worker.commands
    assert command.speculation == SpeculationRequest(acceptance="strict")
    assert (await site.chat(speculation={"acceptance": "rejection"})).status_code == 400
    site = make_site(models=DRAFTERS, acceptance="rejection")
    refused = await site.chat(speculation={"acceptance": "strict"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "speculation_unavailable")
    assert error["param"] == "speculation.acceptance"


async def test_a_drafter_that_is_named_is_the_only_one_that_may_draft() -> None:
    site = make_site(models=DRAFTERS)
    assert (await site.chat(draft_model="demo-main-dflash+demo-draft")).status_code == 200
    unit = site.worker.commands[0].model
    in_memory = loaded("demo-main", *unit.drafters, size_bytes=unit.size_bytes)
    site.worker.book.snapshot = Snapshot(models=(in_memory,))
    for length in (None, 3):
        assert (await site.chat(draft_model="demo-draft", num_draft_tokens=length)).status_code == 200
        command = site.worker.commands[-1]
        assert names_of(command.model) == ["demo-main-dflash", "demo-draft"], "it is loaded already"
        assert command.speculation == SpeculationRequest(methods=("draft_model",), num_draft_tokens=length)
    refused = await site.chat(draft_model="demo-draft", speculation={"method": "dflash"})
    assert refused.json()["error"]["code"] == "speculation_unavailable"


@pytest.mark.parametrize("off", ["", "off"])
async def test_an_empty_draft_model_turns_speculation_off_but_keeps_the_unit(site: Site, off: str) -> None:
    assert (await site.chat(draft_model=off)).status_code == 200
    (command,) = site.worker.commands
    assert command.speculation.method == "off"
    assert names_of(command.model) == ["demo-draft"], "turning it off for one request must not load the model again"
    assert (await site.chat(draft_model=off, speculation={"method": "ngram"})).status_code == 200
    assert site.worker.commands[1].speculation.method == "ngram"


async def test_tools_go_to_the_template(site: Site) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("one", "two")
    ]
    for choice, names in ((None, ["one", "two"]), ("auto", ["one", "two"]), ("none", None)):
        site.worker.commands.clear()
        assert (await site.chat(tools=tools, tool_choice=choice)).status_code == 200
        shown = site.worker.commands[0].tools
        assert names == (shown and [tool["function"]["name"] for tool in shown])
    call = {"id": "c1", "type": "function", "function": {"name": "one", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert (await site.chat(messages=history, tools=tools)).status_code == 200
    assert site.worker.commands[-1].messages == history


async def test_the_body_of_a_good_request_is_all_that_is_needed(site: Site) -> None:
    response = await site.client.post(
        "/v1/chat/completions",
        content=json.dumps(chat_body(unknown_field={"deep": [1]})),
        headers={"content-type": "application/json; charset=utf-8"},
    )
    assert response.status_code == 200


async def test_thoughts_that_a_gateway_sends_as_parts_are_reasoning(site: Site) -> None:
    thought = {"type": "thinking", "thinking": "Read it first.", "signature": "x"}
    parts = [thought, {"type": "redacted_thinking", "data": "y"}, {"type": "text", "text": "I read it."}]
    said = [{"role": "assistant", "content": parts}, {"role": "assistant", "content": [thought]}]
    response = await site.chat(
        messages=[{"role": "user", "content": "Hi"}, *said, {"role": "user", "content": "Go on."}]
    )
    assert response.status_code == 200, response.text
    (_, beside, alone, _) = site.worker.commands[-1].messages or ()
    assert (beside["reasoning_content"], beside["content"]) == ("Read it first.", "I read it.")
    assert (alone["reasoning_content"], alone["content"]) == ("Read it first.", "")


CALLED: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED_BY: dict[str, Any] = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "assistant", "content": None, "reasoning_content": "Hm."}],
        [{"role": "assistant"}],
        [CALLED_BY | {"tool_calls": [CALLED | {"id": ""}]}, {"role": "tool", "tool_call_id": "", "content": None}],
        [CALLED_BY | {"tool_calls": [CALLED | {"id": "x" * 949}]}, {"role": "tool", "tool_call_id": "x" * 949}],
    ],
    ids=["only thoughts", "nothing", "empty ids", "ids with a signature"],
)
async def test_what_other_servers_left_in_a_history_is_taken(site: Site, history: list[dict[str, Any]]) -> None:
    messages = [{"role": "user", "content": "Hi"}, *history, {"role": "user", "content": "Go on."}]
    response = await site.chat(messages=messages)
    assert response.status_code == 200, response.text
    (_, *sent, _) = site.worker.commands[-1].messages or ()
    assert {message["content"] for message in sent if not message.get("tool_calls")} == {""}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_a_seed_of_minus_one_is_another_one_each_time(site: Site, path: str) -> None:
    seed = {"options": {"seed": -1}} if path == "/api/chat" else {"seed": -1}
    for _ in range(2):
        answer = await site.client.post(path, json=chat_body(stream=False, max_tokens=5) | seed)
        assert answer.status_code == 200
    first, second = (command.sampling.seed for command in site.worker.commands)
    assert first != second

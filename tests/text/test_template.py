import json
import threading
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import InvalidRequest, ModelUnavailable
from app.text.prompt.template import NO_TEMPLATE, TextModel
from tests.text.tokenizer_fixture import byte_fallback, byte_level, write_folder

USER = [{"role": "user", "content": "hi"}]


def refused(model: TextModel, messages: Any = USER, arguments: Any = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        model.render_chat(messages, None, arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


def rendered(model: TextModel, messages: Any, tools: Any = None, arguments: Any = None) -> str:
    return str(model.tokenizer.decode(model.render_chat(messages, tools, arguments).tokens))


def test_a_chat_is_rendered_and_tokenized_as_transformers_does(chat: TextModel) -> None:
    messages = [*USER, {"role": "assistant", "content": "hello 👩‍💻"}, {"role": "user", "content": "你好"}]
    expected = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat.render_chat(messages)[0] == expected
    assert rendered(chat, USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.convert_tokens_to_ids("<|im_start|>") in chat.render_chat(USER)[0]


def test_messages_take_the_shape_that_templates_expect(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ documents is none }}"
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=template))
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    broken = {"function": {"name": "f", "arguments": "{"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call, broken]},
    ]
    first, second, rest = (
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "why",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": [1]}}}, broken],
            "reasoning_content": "why",
        },
        "nullTrue",
    )
    assert rendered(model, messages) == json.dumps(first) + json.dumps(second) + rest
    assert call["function"]["arguments"] == '{"a": [1]}'
    assert '[{"name": "f"}]True' in rendered(model, messages, [{"name": "f"}])


def test_results_are_told_in_the_order_of_their_calls(tmp_path: Path) -> None:
    called = "{% for call in m.tool_calls or () %}{{ call.function.arguments }}{% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{called} {{% endfor %}}"
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=template))
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "c?ab"]
    messages = [{"role": "assistant", "content": "-", "tool_calls": calls}, *results, {"role": "user", "content": "!"}]
    assert rendered(model, messages) == "-{}{}{} a b c ? ! "
    assert rendered(model, results) == "c ? a b "


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": "x"},
        {"role": 1},
        "text",
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": 3},
    ],
)
def test_messages_without_role_or_text_are_refused(chat: TextModel, message: Any) -> None:
    assert refused(chat, [message])


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    source = "{{ enable_thinking }}{{ effort }}{{ add_generation_prompt }}"
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=source))
    assert rendered(model, USER, None, {"enable_thinking": False, "effort": "low"}) == "FalselowTrue"


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokenize": False},
        {"add_generation_prompt": False},
        {"chat_template": "{{ 1 }}"},
        {"messages": "x"},
        {"tools": None},
        {"eos_token": "x"},
        {"raise_exception": 1},
        {"__class__": 1},
        {"a b": 1},
        {"x" * 65: 1},
        {"x": []},
        {"x": {}},
        {"x": "y" * 5000},
        {f"x{index}": 1 for index in range(33)},
    ],
)
def test_template_arguments_cannot_override_the_server(chat: TextModel, arguments: dict[str, Any]) -> None:
    assert "template_arguments" in refused(chat, USER, arguments)


def test_the_templates_own_message_reaches_the_client(tmp_path: Path) -> None:
    source = "{{ raise_exception('roles must\n alternate') }}"
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=source))
    assert refused(model).endswith("refuses the request: roles must alternate")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ messages + 1 }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_told_and_completions_still_work(tmp_path: Path, source: str, reason: str) -> None:
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=source))
    assert reason in refused(model)
    assert model.table.decode(model.encode("still here")) == "still here"


def test_a_base_model_has_no_chat(tmp_path: Path) -> None:
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=None))
    assert not model.has_chat_template
    assert refused(model) == NO_TEMPLATE


def test_a_template_in_a_json_file_of_its_own_is_the_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "plain"}))
    assert rendered(TextModel.load(folder), USER) == "plain"


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=None, chat_template=named))
    assert rendered(model, USER) == "plain"
    assert rendered(model, USER, [{"name": "f"}]) == "with tools"


def test_rendering_works_off_the_main_thread(chat: TextModel) -> None:
    rendered: list[list[int]] = []
    thread = threading.Thread(target=lambda: rendered.append(chat.render_chat(USER)[0]))
    thread.start()
    thread.join()
    assert rendered == [chat.render_chat(USER)[0]]


def test_completions_begin_with_bos_only_where_the_tokenizer_does_that(tmp_path: Path, chat: TextModel) -> None:
    assert chat.table.decode(chat.encode("the fox")) == "the fox"
    folder = write_folder(tmp_path, byte_fallback(), eos_token="</s>", bos_token="<s>")
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": special,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    model = TextModel.load(folder)
    plain = model.tokenizer.encode("the", add_special_tokens=False)
    assert model.encode("the") == [1, *plain]
    assert model.encode("<s>the")[:2] != [1, 1]
    assert model.encode("") == [1]
    assert 1 not in model.render_chat(USER)[0]


def test_stop_tokens_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), eos_token="<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, True, -1, "x"]}))
    assert TextModel.load(folder).stop_token_ids == {0, 2, 7, 9}


def test_the_vocabulary_bounds_what_a_prompt_may_hold(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    tokenizer_size = json.loads((folder / "config.json").read_text())["vocab_size"] - 8
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": tokenizer_size - 1}))
    model = TextModel.load(folder)
    assert model.vocabulary_size == tokenizer_size - 1
    with pytest.raises(InvalidRequest, match="outside this model's vocabulary"):
        model.encode("<｜x｜>")


class Failing:
    """A tokenizer that raises an error on one text."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, text: str, **options: Any) -> Any:
        if text == "breaks":
            raise RuntimeError("no piece\nfor this")
        return self._inner.encode(text, **options)


def test_a_tokenizer_that_fails_is_told_with_its_reason(chat: TextModel) -> None:
    sizes: dict[str, Any] = {"vocabulary_size": chat.vocabulary_size, "max_context_tokens": 64}
    model = TextModel(Failing(chat.tokenizer), stop_token_ids=frozenset(), **sizes)
    with pytest.raises(ModelUnavailable, match=r"RuntimeError: no piece.*download the model again"):
        model.encode("breaks")
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        model.encode("a\ud800b")


def test_text_that_is_no_unicode_is_refused(chat: TextModel) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        chat.encode("a\ud800b")
    assert "not valid Unicode" in refused(chat, [{"role": "user", "content": "\udfff"}])


def test_tokens_as_logprobs_show_them(models: dict[str, TextModel]) -> None:
    for name in ("bytes", "fallback"):
        model = models[name]
        tokens = model.tokenizer.encode("the 👍", add_special_tokens=False)
        shown = [model.table.token_text(token) for token in tokens]
        assert b"".join(token_bytes for _, token_bytes in shown).decode().strip() == "the 👍"
        assert any(text == "\N{REPLACEMENT CHARACTER}" for text, _ in shown)
    window = models["window"]
    assert window.table.token_text(window.tokenizer.convert_tokens_to_ids("is")) == ("is", b"is")
    assert models["bytes"].table.token_text(0) == ("<|endoftext|>", b"<|endoftext|>")
    assert [model.table.token_text(10**7) for model in models.values()] == [("", b"")] * len(models)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "BPE"}}', "\0"])
def test_a_broken_tokenizer_is_a_broken_model(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "broken", byte_level())
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnavailable) as caught:
        TextModel.load(folder)
    assert caught.value.message.startswith('the tokenizer of "broken" cannot be loaded')
    assert str(tmp_path) not in caught.value.message
    (folder / "config.json").unlink()
    with pytest.raises(ModelUnavailable):
        TextModel.load(folder)


@pytest.mark.parametrize("name", ["bytes", "fallback"])
def test_checkpoints_stand_where_later_prompts_will_part(
    models: dict[str, TextModel], tmp_path: Path, name: str
) -> None:
    model = models[name]
    system = {"role": "system", "content": "be brief"}
    turns = [system, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    last = {"role": "user", "content": "你好, is it far?"}
    tokens, checkpoints, _ = model.render_chat([*turns, last, {"role": "tool", "content": "no"}])
    texts = [
        rendered(model, [system, {"role": "user", "content": ""}]).rsplit("<|im_end|>", 1)[0],
        rendered(model, [*turns, {"role": "user", "content": ""}]).rsplit("<|im_end|>", 1)[0],
        rendered(model, [*turns, last, {"role": "tool", "content": "no"}]).removesuffix("<|im_start|>assistant\n"),
    ]
    assert len(checkpoints) == 3
    for checkpoint, text in zip(checkpoints, texts, strict=True):
        begun = model.encode(text)
        assert tokens[:checkpoint] == begun[:checkpoint], "nothing of it depends on what parts"
        assert checkpoint >= len(begun) - 1, "and no more than the token that spans the place is read again"


def test_what_a_template_refuses_is_no_checkpoint(tmp_path: Path) -> None:
    source = (
        "{% if messages[0].content != 'hi' %}{{ raise_exception('only hi') }}{% endif %}hi{{ messages[0].content }}"
    )
    model = TextModel.load(write_folder(tmp_path, byte_level(), template=source))
    assert model.render_chat(USER)[1] == ()

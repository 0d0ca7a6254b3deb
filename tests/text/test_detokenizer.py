import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.text.answer.parts import AnswerDelta
from app.text.answer.splitter import AnswerSplitter, feed_step
from app.text.dialect import NO_DIALECT
from app.text.prompt.template import TextModel

NAMES = ("bytes", "fallback", "unstripped", "window")
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TRICKY = "a 👩‍💻 👨‍👩‍👧‍👦 🇩🇪 👍🏽 é 你好，世界 ü ß ﷽ \u200d 한국어 \n\t x"
WORDS = st.lists(
    st.sampled_from(["the ", "quick", " fox", "isn't", "👩‍💻", "🇩🇪", "é", "你好", " ", "\n", "end", "é", "ß"]),
    max_size=8,
).map("".join)


def split(tokens: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield `tokens` in steps of the given lengths, then the rest as one step."""
    start = 0
    for length in cuts:
        yield tokens[start : start + length]
        start += length
    yield tokens[start:]


class StreamedText:
    """A plain text, streamed step by step like one choice of an answer."""

    def __init__(self, model: TextModel, stop: Sequence[str] = (), *, continued: bool = False) -> None:
        self._stream = model.table.open_stream(continued=continued)
        self._splitter = AnswerSplitter(NO_DIALECT, stop=stop)
        self.used = 0

    @property
    def stopped(self) -> bool:
        return bool(self._splitter.matched_stop)

    def feed(self, tokens: Sequence[int], accepted: int = 0) -> AnswerDelta:
        if not self.stopped:
            self.used += feed_step(self._stream, self._splitter, tokens, accepted)
        return self._take()

    def finish(self) -> AnswerDelta:
        self._splitter.feed(self._stream.finish(), final=True)
        return self._take()

    def _take(self) -> AnswerDelta:
        parts = self._splitter.take()
        assert len(parts) <= 1
        return parts[0] if parts else AnswerDelta()


def run(model: TextModel, steps: Sequence[Sequence[int]], stop: Sequence[str] = ()) -> tuple[list[AnswerDelta], str]:
    stream = StreamedText(model, stop)
    parts = [stream.feed(step, len(step) - 1) for step in steps]
    parts.append(stream.finish())
    return parts, "".join(part.text for part in parts)


@pytest.mark.parametrize("name", NAMES)
@FAST
@given(text=WORDS, cuts=st.lists(st.integers(1, 5), max_size=12))
def test_chunks_add_up_to_the_full_decode_at_every_split(
    models: dict[str, TextModel], name: str, text: str, cuts: list[int]
) -> None:
    model = models[name]
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    chunks, shown = run(model, list(split(tokens, cuts)))
    assert shown == model.table.decode(tokens) == model.tokenizer.decode(tokens, skip_special_tokens=True)
    if name in {"bytes", "fallback"}:
        assert shown == text
    for chunk in chunks:
        assert "\N{REPLACEMENT CHARACTER}" not in chunk.text


@FAST
@given(data=st.data())
def test_any_byte_level_tokens_decode_as_the_tokenizer_does(chat: TextModel, data: st.DataObject) -> None:
    size = len(chat.tokenizer)
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    _, shown = run(chat, list(split(tokens, data.draw(st.lists(st.integers(1, 4), max_size=20)))))
    assert shown == chat.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["bytes", "fallback"])
def test_every_single_token_step_shows_whole_characters_only(models: dict[str, TextModel], name: str) -> None:
    model = models[name]
    tokens = model.tokenizer.encode(TRICKY, add_special_tokens=False)
    chunks, shown = run(model, [[token] for token in tokens])
    assert shown == TRICKY
    assert any(not chunk.text for chunk in chunks[:-1])


def test_a_stream_that_ends_inside_a_character_says_so(models: dict[str, TextModel]) -> None:
    for name in ("bytes", "fallback"):
        tokens = models[name].tokenizer.encode("x👍", add_special_tokens=False)[:-1]
        chunks, shown = run(models[name], [tokens])
        assert shown == "x\N{REPLACEMENT CHARACTER}"
        assert chunks[0].text == "x"


def test_ids_without_a_piece_are_no_text(models: dict[str, TextModel]) -> None:
    for model in models.values():
        _, shown = run(model, [[len(model.tokenizer) + 3, model.vocabulary_size + 10**6]])
        assert shown == ""


def test_special_tokens_are_no_text_but_marks_for_parsers_are(chat: TextModel) -> None:
    tokens = chat.tokenizer.encode("<|im_start|>a<tool_call>b<|im_end|>", add_special_tokens=False)
    assert run(chat, [tokens])[1] == chat.table.decode(tokens) == "a<tool_call>b"


def test_a_continued_prompt_keeps_its_leading_space(models: dict[str, TextModel]) -> None:
    for name in ("fallback", "window"):
        model = models[name]
        answer = model.tokenizer.encode("the", add_special_tokens=False)
        assert StreamedText(model).feed(answer).text == "the"
        assert StreamedText(model, continued=True).feed(answer).text == " the"


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first complete stop string, and whether there is one: the oracle, letter by letter."""
    for end in range(1, len(text) + 1):
        starts = [text[:end].find(word) for word in stop if word and word in text[:end]]
        if starts:
            return text[: min(starts)], True
    return text, False


@FAST
@example(text=" b", stop=[" "], cuts=[])
@given(
    text=st.text("abc 👍é", max_size=30),
    stop=st.lists(st.text("abc 👍é", max_size=4), max_size=4),
    cuts=st.lists(st.integers(1, 4), max_size=20),
)
def test_the_first_complete_stop_string_ends_the_text(
    chat: TextModel, text: str, stop: list[str], cuts: list[int]
) -> None:
    tokens = chat.tokenizer.encode(text, add_special_tokens=False)
    stream, shown = StreamedText(chat, stop), ""
    expected, stops = cut_at(text, stop)
    for step in split(tokens, cuts):
        shown += stream.feed(step, len(step)).text
        assert expected.startswith(shown)
    assert shown + stream.finish().text == expected
    assert stream.stopped == stops
    assert stops or stream.used == len(tokens)
    if stops:
        before, counted = (chat.table.decode(tokens[:count]) for count in (stream.used - 1, stream.used))
        assert cut_at(counted.rstrip("\N{REPLACEMENT CHARACTER}"), stop)[1]
        assert not cut_at(before.rstrip("\N{REPLACEMENT CHARACTER}"), stop)[1]


@pytest.mark.parametrize("streams", [2_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_thousands_of_streams_tell_their_text_up_to_its_stop_string(chat: TextModel, streams: int) -> None:
    """Letters of many scripts, also joined ones, in random steps, with stop strings from the text and a random one."""
    chance = random.Random(16)
    letters = [*TRICKY, *"ﬃ\u0301\u202eעקאабвไทยकी🏳️\u200d🌈𝔘\U0001f9d1<|im_end|>"]
    for _ in range(streams):
        text = "".join(chance.choices(letters, k=chance.randint(0, 14)))
        positions = [chance.randint(0, len(text)) for _ in range(chance.randint(0, 2))]
        stop = [
            "".join(chance.choices(letters, k=2)),
            *(text[position : position + chance.randint(1, 3)] for position in positions),
        ]
        tokens = chat.tokenizer.encode(text, add_special_tokens=False)
        cuts = [chance.randint(1, 4) for _ in range(8)]
        stream = StreamedText(chat, stop)
        shown = "".join(stream.feed(step).text for step in split(tokens, cuts)) + stream.finish().text
        assert (shown, stream.stopped) == cut_at(chat.table.decode(tokens), stop)


def test_tokens_after_a_stop_string_do_not_count(chat: TextModel) -> None:
    tokens = chat.tokenizer.encode("one END two END three", add_special_tokens=False)
    stream = StreamedText(chat, ("END", "three"))
    assert stream.feed(tokens).text == "one "
    assert stream.stopped
    assert "END" in chat.table.decode(tokens[: stream.used])
    assert "END" not in chat.table.decode(tokens[: stream.used - 1])
    assert not stream.feed(tokens)
    assert not stream.finish()


def test_the_beginning_of_a_stop_string_is_held_and_told_when_it_was_none(chat: TextModel) -> None:
    stream = StreamedText(chat, ("###",))
    assert stream.feed(chat.encode("a ##")).text == "a "
    assert stream.feed(chat.encode("b")).text == "##b"
    assert stream.feed(chat.encode("#")).text == ""
    assert stream.finish().text == "#"


@FAST
@given(text=WORDS, cuts=st.lists(st.integers(1, 5), max_size=12), stop=st.lists(st.text("ehx", min_size=1), max_size=2))
def test_accepted_spans_lie_in_the_text_in_order(chat: TextModel, text: str, cuts: list[int], stop: list[str]) -> None:
    tokens = chat.tokenizer.encode(text, add_special_tokens=False)
    chunks, _ = run(chat, list(split(tokens, cuts)), stop)
    for chunk in chunks:
        ends = [0, *(bound for span in chunk.spans for bound in span), len(chunk.text)]
        assert ends == sorted(ends)
        assert all(start < end for start, end in chunk.spans)


def test_accepted_spans_mark_what_the_drafter_brought(chat: TextModel) -> None:
    first, second = chat.encode("quick"), chat.encode(" fox")
    stream = StreamedText(chat)
    assert stream.feed([*first, *second], len(first)).spans == ((0, 5),)
    assert stream.feed(first, 0).spans == ()
    held = StreamedText(chat, ("quick fox jumps",))
    assert held.feed(first, len(first)).text == ""
    assert held.feed(second, 0).text == ""
    assert held.finish().spans == ((0, 5),)

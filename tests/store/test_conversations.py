"""Conversations: trees of turns that only grow, found by their words, gone when deleted."""

import itertools
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import select

from app.core.errors import InvalidRequest, StaleVersion
from app.store import database
from app.store.conversations import ConversationHeader, Conversations, Limits
from app.store.store import Store
from app.store.tables import ConversationRow, MessageRow

NUMBER = 7


def Turn(  # noqa: N802 - used like a class
    id: str,  # noqa: A002
    parent: str,
    role: Any,
    content: str,
    reasoning: str = "",
    spans: Sequence[Any] = (),
    figures: dict[str, Any] | None = None,
    calls: Sequence[Any] = (),
) -> MessageRow:
    return MessageRow(
        turn=id,
        parent=parent,
        role=role,
        content=content,
        reasoning=reasoning,
        spans=list(spans),
        figures=figures,
        calls=list(calls),
    )


BEGINNING = ConversationHeader("Counting", "demo", {"temperature": 0.5})
QUESTION = Turn("q1", "", "user", "Count from 1 to 3.")
REPLY = Turn("a1", "q1", "assistant", "1, 2, 3", "easy", [[0, 4, "ngram"], [4, 7, "draft_model"]], {"drafted": 6})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store.sqlite3")
    yield store
    store.close()


@pytest.fixture
def conversations(store: Store) -> Conversations:
    ticks = count(1_000)
    return Conversations(store, clock=lambda: float(next(ticks)))


def stored(conversations: Conversations, number: int = NUMBER) -> tuple[ConversationRow, Sequence[MessageRow]]:
    conversation = conversations.find(number)
    assert conversation is not None
    return conversation


def contents(conversations: Conversations, number: int = NUMBER) -> dict[str, str]:
    return {turn.turn: turn.content for turn in stored(conversations, number)[1]}


def begun(conversations: Conversations, *turns: MessageRow, number: int = NUMBER, title: str = "x") -> int:
    """Store a conversation with these turns; return its version."""
    heading = conversations.add(number, 0, turns, ConversationHeader(title, "", {}))
    assert heading is not None
    return heading.version


def test_a_conversation_comes_back_whole_and_after_a_restart(conversations: Conversations, store: Store) -> None:
    heading = conversations.add(NUMBER, 0, [QUESTION, REPLY], BEGINNING)
    store.close()
    conversation, (question, reply) = stored(Conversations(Store(store.path)))
    assert conversation == heading
    assert (conversation.title, conversation.model_id) == ("Counting", "demo")
    assert conversation.options == {"temperature": 0.5}
    assert (question.content, question.parent, reply.parent) == (QUESTION.content, "", "q1")
    assert (reply.spans, reply.reasoning, reply.figures) == (REPLY.spans, "easy", {"drafted": 6})
    assert question.created_at > 0


def test_a_question_that_is_edited_and_a_reply_that_is_made_anew_leave_the_earlier_ones(
    conversations: Conversations,
) -> None:
    version = begun(conversations, QUESTION, REPLY)
    again = [Turn("a2", "q1", "assistant", "one"), Turn("q2", "", "user", "edited"), Turn("q3", "a1", "user", "on")]
    assert conversations.add(NUMBER, version, again) is not None
    assert [(turn.turn, turn.parent) for turn in stored(conversations)[1]] == [
        ("q1", ""), ("a1", "q1"), ("a2", "q1"), ("q2", ""), ("q3", "a1"),
    ]  # fmt: skip


def test_turns_that_are_sent_again_are_there_once(conversations: Conversations) -> None:
    version = begun(conversations, QUESTION)
    for _ in range(3):
        heading = conversations.add(NUMBER, version, [QUESTION, REPLY])
        assert heading is not None
        version = heading.version
    changed = Turn("a1", "q1", "assistant", "something else")
    conversations.add(NUMBER, version, [changed])
    assert contents(conversations) == {"q1": QUESTION.content, "a1": "1, 2, 3"}


PIECES = ("1", "1, 2", "1, 2, 3")


def test_a_reply_that_broke_off_is_completed_in_whatever_order_its_pieces_come(conversations: Conversations) -> None:
    for number, order in enumerate(itertools.permutations(PIECES), start=1):
        version = begun(conversations, QUESTION, number=number)
        for piece in (*order, order[0]):
            figures = {"drafted": 6} if piece == PIECES[-1] else {"stopped": True}
            heading = conversations.add(number, version, [Turn("a1", "q1", "assistant", piece, figures=figures)])
            assert heading is not None
            version = heading.version
        reply = stored(conversations, number)[1][-1]
        assert (reply.content, reply.figures) == (PIECES[-1], {"drafted": 6}), order


def test_a_reply_that_broke_off_in_its_calls_is_completed_by_more_of_them(conversations: Conversations) -> None:
    look, hear = ({"id": name, "name": name, "arguments": "{}"} for name in ("look", "hear"))
    pieces = ([], [look | {"arguments": "{"}], [look], [look, hear])
    for number, order in enumerate(itertools.permutations(pieces), start=1):
        version = begun(conversations, QUESTION, number=number)
        for calls in order:
            figures = {"drafted": 6} if calls == pieces[-1] else {"stopped": True}
            turn = Turn("a1", "q1", "assistant", "", figures=figures, calls=calls)
            heading = conversations.add(number, version, [turn])
            assert heading is not None
            version = heading.version
        assert stored(conversations, number)[1][-1].calls == pieces[-1], order


def test_a_write_of_an_earlier_version_changes_nothing_and_says_so(conversations: Conversations) -> None:
    version = begun(conversations, QUESTION)
    conversations.add(NUMBER, version, [REPLY])
    for stale in (0, version, version + 9):
        with pytest.raises(StaleVersion, match="another window") as refused:
            conversations.add(NUMBER, stale, [Turn("q9", "q1", "user", "mine")], BEGINNING)
        assert (refused.value.status, refused.value.code) == (409, "stale_version")
    assert set(contents(conversations)) == {"q1", "a1"}


def test_a_turn_that_follows_none_is_refused_with_all_that_came_with_it(conversations: Conversations) -> None:
    version = begun(conversations, QUESTION)
    begun(conversations, Turn("other", "", "user", "x"), number=8)
    loop = [Turn("l1", "l2", "user", "x"), Turn("l2", "l1", "user", "x")]
    for turns in ([REPLY, Turn("q2", "none", "user", "x")], [Turn("q2", "other", "user", "x")], loop):
        with pytest.raises(InvalidRequest) as refused:
            conversations.add(NUMBER, version, turns)
        assert refused.value.code == "unknown_parent"
    assert set(contents(conversations)) == {"q1"}
    assert conversations.add(NUMBER, version, [REPLY]) is not None, "the version is what it was"


def test_a_conversation_that_was_deleted_is_not_made_by_what_comes_late(conversations: Conversations) -> None:
    version = begun(conversations, QUESTION)
    assert conversations.delete(NUMBER)
    assert conversations.add(NUMBER, version, [REPLY], BEGINNING) is None
    assert conversations.add(NUMBER, 0, [REPLY]) is None
    assert conversations.list() == []


def test_the_one_that_changed_last_comes_first_and_renaming_moves_nothing(conversations: Conversations) -> None:
    for number, title in ((1, "a"), (2, "b"), (3, "c")):
        begun(conversations, number=number, title=title)
    conversations.add(1, 1, [QUESTION])
    renamed = conversations.change(2, title="B", options={"seed": 1})
    assert renamed is not None
    assert renamed.version == 2
    assert [conversation.title for conversation in conversations.list()] == ["a", "c", "B"]
    assert stored(conversations, 2)[0].options == {"seed": 1}


def test_every_change_gives_another_revision_also_after_a_restart(store: Store) -> None:
    clock = itertools.count(1).__next__
    conversations = Conversations(store, clock)
    seen = [conversations.revision]
    begun(conversations, QUESTION)
    seen.append(conversations.revision)
    conversations.change(NUMBER, title="y")
    seen.append(conversations.revision)
    conversations.delete(NUMBER)
    seen += [conversations.revision, Conversations(store, clock).revision]
    assert len(set(seen)) == len(seen)


def test_words_are_found_in_titles_and_turns_and_are_only_words(conversations: Conversations) -> None:
    begun(conversations, number=1, title="A river")
    begun(conversations, Turn("q1", "", "user", "back\\slash"), REPLY, number=2, title="100 % sure_")

    def numbers(search: str) -> list[int]:
        return [conversation.id for conversation in conversations.list(search)]

    assert numbers("RIVER") == [1]
    assert numbers("1, 2, 3") == numbers("%") == numbers("_") == numbers("\\") == [2]
    assert numbers("") == [2, 1]
    assert numbers("' OR 1=1 --") == numbers("r%r") == []


def test_deleted_is_gone_with_its_turns(conversations: Conversations, store: Store) -> None:
    for number in (1, 2, 3):
        begun(conversations, QUESTION, REPLY, number=number)
    assert conversations.delete(1)
    assert not conversations.delete(1)
    assert conversations.find(1) is None
    assert conversations.change(1, title="y") is None
    assert conversations.delete_all() == 2
    assert conversations.list() == []
    with store.read_session() as session:
        assert session.exec(select(MessageRow)).all() == []


def test_what_would_be_too_much_is_refused_and_changes_nothing(store: Store) -> None:
    conversations = Conversations(store, limits=Limits(conversations=2, turns=3, characters=40))
    version = begun(conversations, QUESTION)
    begun(conversations, number=8)
    with pytest.raises(InvalidRequest) as refused:
        begun(conversations, number=9)
    assert refused.value.code == "too_many_conversations"
    many = [Turn(f"a{at}", "q1", "assistant", "x") for at in range(3)]
    for turns in (many, [Turn("a1", "q1", "assistant", "x" * 20, "y" * 20)]):
        with pytest.raises(InvalidRequest) as refused:
            conversations.add(NUMBER, version, turns)
        assert refused.value.code == "conversation_too_long"
    assert set(contents(conversations)) == {"q1"}


def test_windows_that_write_at_once_lose_nothing(conversations: Conversations) -> None:
    version = begun(conversations, QUESTION)

    def write(at: int) -> None:
        known = version
        while True:
            try:
                conversations.add(NUMBER, known, [Turn(f"w{at}", "q1", "assistant", str(at))])
            except StaleVersion:
                known = stored(conversations)[0].version
            else:
                return

    threads = [threading.Thread(target=write, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(contents(conversations)) == {"q1", *(f"w{at}" for at in range(8))}


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    conversations = Conversations(Store(tmp_path / "none.sqlite3"))
    assert conversations.list() == []
    assert conversations.find(1) is None
    assert list(tmp_path.iterdir()) == []


LINES = """
INSERT INTO conversation VALUES (5, 'Old', 'demo', '{}', 1.0, 2.0), (6, 'Other', 'demo', '{"seed": 1}', 1.0, 3.0);
INSERT INTO message (id, conversation_id, role, content, reasoning, spans, figures, created_at) VALUES
    (1, 5, 'user', 'one', '', '[]', NULL, 1.0), (2, 6, 'user', 'eins', '', '[]', NULL, 1.0),
    (3, 5, 'assistant', 'two', 'hm', '[[0, 3, "ngram"]]', '{"seed": 4}', 2.0),
    (7, 5, 'user', 'three', '', '[]', NULL, 3.0);
"""


def test_conversations_of_an_earlier_paceline_become_lines_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    database.migrate(path, to="0002")
    with closing(sqlite3.connect(path)) as file:
        file.executescript(LINES)
    store = Store(path)
    assert "was migrated to a new format" in store.start()
    conversations = Conversations(store)
    old, turns = stored(conversations, 5)
    assert [(turn.turn, turn.parent, turn.content) for turn in turns] == [
        ("m1", "", "one"), ("m3", "m1", "two"), ("m7", "m3", "three"),
    ]  # fmt: skip
    assert (turns[1].spans, turns[1].reasoning, turns[1].figures) == ([[0, 3, "ngram"]], "hm", {"seed": 4})
    assert [turn.parent for turn in stored(conversations, 6)[1]] == [""]
    heading = conversations.add(5, old.version, [Turn("q2", "m7", "assistant", "four")])
    assert heading is not None
    assert list(contents(conversations, 5).values()) == ["one", "two", "three", "four"]
    store.close()
    assert Store(path).start() == ""

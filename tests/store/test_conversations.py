"""Conversations: kept in order, changed from a message on, found by their words, gone when deleted."""

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from sqlmodel import select

from app.core.errors import InvalidRequest
from app.store.conversations import Conversations, Limits, Message
from app.store.store import Store
from app.store.tables import MessageRow

QUESTION = Message("user", "Count from 1 to 3.")
REPLY = Message("assistant", "1, 2, 3", "easy", ((0, 4, "ngram"), (4, 7, "draft_model")), {"drafted": 6})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store.sqlite3")
    yield store
    store.close()


@pytest.fixture
def conversations(store: Store) -> Conversations:
    ticks = count(1_000)
    return Conversations(store, clock=lambda: float(next(ticks)))


def contents(conversations: Conversations, conversation_id: int) -> list[str]:
    found = conversations.find(conversation_id)
    assert found is not None
    return [message.content for message in found.messages]


def test_a_conversation_comes_back_whole_and_after_a_restart(conversations: Conversations, store: Store) -> None:
    made = conversations.create("Counting", "demo", {"temperature": 0.5})
    added = conversations.put(made.id, 0, [QUESTION, REPLY])
    assert added is not None
    store.close()
    found = Conversations(Store(store.path)).find(made.id)
    assert found is not None
    assert (found.heading.title, found.heading.model_id, found.options) == ("Counting", "demo", {"temperature": 0.5})
    assert found.messages == added
    assert [each.spans for each in found.messages] == [(), REPLY.spans]
    assert found.messages[1].figures == {"drafted": 6}
    assert found.messages[0].id < found.messages[1].id


def test_what_follows_a_message_is_dropped_when_something_takes_its_place(conversations: Conversations) -> None:
    made = conversations.create("x", "", {})
    first, second = conversations.put(made.id, 0, [QUESTION, REPLY]) or ()
    conversations.put(made.id, second.id, [Message("user", "again"), Message("assistant", "4")])
    assert contents(conversations, made.id) == [QUESTION.content, REPLY.content, "again", "4"]
    conversations.put(made.id, first.id, [Message("assistant", "one, two, three")])
    assert contents(conversations, made.id) == [QUESTION.content, "one, two, three"]
    conversations.put(made.id, first.id, [])
    assert contents(conversations, made.id) == [QUESTION.content]
    conversations.put(made.id, 0, [Message("user", "edited")])
    assert contents(conversations, made.id) == ["edited"]


def test_a_conversation_that_was_changed_elsewhere_keeps_what_it_has(conversations: Conversations) -> None:
    made, other = conversations.create("x", "", {}), conversations.create("y", "", {})
    (old,) = conversations.put(made.id, 0, [QUESTION]) or ()
    (foreign,) = conversations.put(other.id, 0, [QUESTION]) or ()
    conversations.put(made.id, 0, [Message("user", "edited elsewhere")])
    for gone in (old.id, foreign.id, 10**6):
        with pytest.raises(InvalidRequest, match="another window") as refused:
            conversations.put(made.id, gone, [REPLY])
        assert refused.value.code == "conversation_changed"
    assert contents(conversations, made.id) == ["edited elsewhere"]


def test_the_one_that_changed_last_comes_first_and_renaming_moves_nothing(conversations: Conversations) -> None:
    ids = [conversations.create(title, "", {}).id for title in ("a", "b", "c")]
    conversations.put(ids[0], 0, [QUESTION])
    renamed = conversations.change(ids[1], title="B", options={"seed": 1})
    assert renamed is not None
    assert [each.title for each in conversations.list()] == ["a", "c", "B"]
    found = conversations.find(ids[1])
    assert found is not None
    assert found.options == {"seed": 1}


def test_words_are_found_in_titles_and_messages_and_are_only_words(conversations: Conversations) -> None:
    first = conversations.create("A river", "", {})
    second = conversations.create("100 % sure_", "", {})
    conversations.put(second.id, 0, [Message("user", "back\\slash"), REPLY])

    def found(search: str) -> list[int]:
        return [each.id for each in conversations.list(search)]

    assert found("RIVER") == [first.id]
    assert found("1, 2, 3") == found("%") == found("_") == found("\\") == [second.id]
    assert found("") == [second.id, first.id]
    assert found("' OR 1=1 --") == found("r%r") == []


def test_deleted_is_gone_with_its_messages(conversations: Conversations, store: Store) -> None:
    ids = [conversations.create("x", "", {}).id for _ in range(3)]
    for each in ids:
        conversations.put(each, 0, [QUESTION, REPLY])
    assert conversations.delete(ids[0])
    assert not conversations.delete(ids[0])
    assert conversations.find(ids[0]) is None
    assert conversations.put(ids[0], 0, [QUESTION]) is None
    assert conversations.change(ids[0], title="y") is None
    assert conversations.delete_all() == 2
    assert conversations.list() == []
    with store.reading() as session:
        assert session.exec(select(MessageRow)).all() == []


def test_what_would_be_too_much_is_refused_and_changes_nothing(store: Store) -> None:
    conversations = Conversations(store, limits=Limits(conversations=2, messages=3, characters=40))
    made = conversations.create("x", "", {})
    conversations.create("y", "", {})
    with pytest.raises(InvalidRequest) as refused:
        conversations.create("z", "", {})
    assert refused.value.code == "too_many_conversations"
    (kept,) = conversations.put(made.id, 0, [QUESTION]) or ()
    for after, messages in ((kept.id, [REPLY, REPLY, REPLY]), (kept.id, [Message("assistant", "x" * 20, "y" * 20)])):
        with pytest.raises(InvalidRequest) as refused:
            conversations.put(made.id, after, messages)
        assert refused.value.code == "conversation_too_long"
    assert contents(conversations, made.id) == [QUESTION.content]


def test_two_windows_that_write_at_once_leave_one_order(conversations: Conversations) -> None:
    made = conversations.create("x", "", {})
    threads = [
        threading.Thread(target=conversations.put, args=(made.id, 0, [Message("user", str(at)), REPLY]))
        for at in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(contents(conversations, made.id)) == 2


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    conversations = Conversations(Store(tmp_path / "none.sqlite3"))
    assert conversations.list() == []
    assert conversations.find(1) is None
    assert list(tmp_path.iterdir()) == []

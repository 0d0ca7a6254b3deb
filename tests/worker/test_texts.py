"""Prompts are read in separate processes: hostile templates fail only their request, tokenizers only their model."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from app.core.errors import InvalidRequest, ModelUnavailable
from app.core.messages import Generate
from app.core.request import Grammar
from app.core.unit import ModelSpecification
from app.models.folder import Signature, _file_stamp, signature_of
from app.text.detokenizer import TokenTable
from app.text.grammar.constraint import Vocabulary
from app.worker.text_launch import Launched, launch_text_process
from app.worker.texts import (
    IDLE_SECONDS,
    UNLOADED_IDLE_SECONDS,
    Prompt,
    PromptFailure,
    PromptFuture,
    TextProcess,
    TextReaders,
)
from tests.worker.hostile import TEMPLATES, TOKENIZERS, write_folder, write_hostile_template, write_hostile_tokenizer

WAIT_SECONDS = 110
ROOT = Path(__file__).parents[2]
SOME = ("endless loops", "batch", "slice", "text times")
"""Names of templates, one for each way in which hostile ones end."""


@pytest.fixture
def texts() -> Iterator[TextReaders]:
    texts = TextReaders()
    yield texts
    texts.close()
    assert processes() == []


def processes() -> list[psutil.Process]:
    """Return the processes that read prompts for this one."""
    children = psutil.Process().children()
    return [child for child in children if "app.worker.text_process" in child.cmdline()]


def chat(folder: Path, text: str = "hello") -> Generate:
    return ask(folder, messages=[{"role": "user", "content": text}])


def ask(folder: Path, **changes: object) -> Generate:
    model = ModelSpecification(id=folder.name, path=str(folder))
    return Generate(id="r", model=model, **changes)  # type: ignore[arg-type]


def read(texts: TextReaders, command: Generate) -> Prompt:
    prompt = texts.read(command).result(WAIT_SECONDS)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def refused(texts: TextReaders, command: Generate) -> PromptFailure:
    return unread(texts.read(command))


def unread(reading: PromptFuture) -> PromptFailure:
    outcome = reading.result(WAIT_SECONDS)
    assert isinstance(outcome, PromptFailure)
    return outcome


def test_a_chat_a_text_and_tokens_are_read_by_one_process(texts: TextReaders, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    prompt = read(texts, chat(folder))
    assert prompt.table.decode(prompt.tokens) == "user\nhello\nassistant\n"
    assert set(prompt.seconds) == {"load", "render", "tokenize"}
    (first,) = processes()
    assert bytes(read(texts, ask(folder, text="héllo")).tokens).decode() == "héllo"
    assert read(texts, ask(folder, tokens=[7, 8])).tokens == (7, 8)
    assert processes() == [first]
    assert read(texts, chat(folder)).table is prompt.table


def test_what_a_template_needed_repaired_is_told_with_the_prompt_and_logged_once(
    texts: TextReaders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one system') }}"
        "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    folder = write_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(source)
    rules = [{"role": "system", "content": "One rule."}, {"role": "system", "content": "Another."}]
    messages = [*rules, {"role": "user", "content": "Hi"}]
    with caplog.at_level("INFO", "paceline.prompts"):
        for _ in range(2):
            prompt = read(texts, ask(folder, messages=messages))
            assert prompt.table.decode(prompt.tokens) == "system:One rule.\n\nAnother.;user:Hi;assistant:"
            assert [notice.code for notice in prompt.notices] == ["system_messages_joined"]
    assert [record.getMessage() for record in caplog.records] == [f"prompts of m: {prompt.notices[0].message}"]
    begun = [*messages, {"role": "assistant", "content": "I am "}]
    continued = read(texts, ask(folder, messages=begun, continues=True))
    assert continued.table.decode(continued.tokens) == "system:One rule.\n\nAnother.;user:Hi;assistant:I am "
    assert continued.checkpoints
    error = refused(texts, ask(folder, messages=[*begun, {"role": "user", "content": "?"}], continues=True)).error
    assert isinstance(error, InvalidRequest)


def test_mlx_is_not_imported_where_prompts_are_read(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from app.worker.text_process import TextModel;"
        " TextModel.load(Path(sys.argv[1])); assert not {'mlx', 'mlx.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(write_folder(tmp_path / "m"))], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", SOME)
def test_a_hostile_template_costs_its_own_request_and_completions_still_work(
    texts: TextReaders, tmp_path: Path, name: str
) -> None:
    folder = write_hostile_template(tmp_path / "m", name)
    assert isinstance(refused(texts, chat(folder, "bomb")).error, InvalidRequest)
    assert len(read(texts, ask(folder, text="hello")).tokens) == 5


@pytest.mark.soak
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_hostile_template_is_refused(texts: TextReaders, tmp_path: Path, name: str) -> None:
    folder = write_hostile_template(tmp_path / "m", name)
    assert isinstance(refused(texts, chat(folder, "bomb")).error, InvalidRequest)


@pytest.mark.soak
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_hostile_tokenizer_is_refused_or_works(texts: TextReaders, tmp_path: Path, kind: str) -> None:
    folder = write_hostile_tokenizer(tmp_path / "m", kind)
    if kind == "two million entries":
        assert read(texts, chat(folder)).tokens
    else:
        assert isinstance(refused(texts, chat(folder)).error, ModelUnavailable)


def test_a_hostile_tokenizer_costs_its_own_model(texts: TextReaders, tmp_path: Path) -> None:
    """The second request does not retry the tokenizer; another model is served in the meantime."""
    hostile = write_hostile_tokenizer(tmp_path / "hostile", "exploding normalizers")
    first, second = texts.read(chat(hostile)), texts.read(chat(hostile))
    assert read(texts, chat(write_folder(tmp_path / "good"))).tokens
    assert not first.done()
    (reason,) = {unread(future).error.message for future in (first, second)}
    assert "memory" in reason or "time" in reason
    assert str(tmp_path) not in reason


def test_a_named_pipe_in_place_of_a_tokenizer_is_not_waited_for(texts: TextReaders, tmp_path: Path) -> None:
    error = refused(texts, chat(write_hostile_tokenizer(tmp_path / "m", "a named pipe"))).error
    assert isinstance(error, ModelUnavailable)
    assert "tokenizer.json is not a regular file" in error.message


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(texts: TextReaders, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    read(texts, chat(folder))
    (process,) = processes()
    before = process.memory_info().rss
    tools = [{"type": "function", "function": {"name": f"f{n}", "description": "x" * 60_000}} for n in range(128)]
    hello = [{"role": "user", "content": "hello"}]
    for command, size in (
        (ask(folder, text="7" * 31_000_000), "31000000 bytes"),
        (ask(folder, text="a" * 31_000_000), "31000000 bytes"),
        (chat(folder, "7" * 15_900_000), "15900015 bytes"),
        (ask(folder, messages=hello, tools=tools), " bytes"),
    ):
        refusal = refused(texts, command)
        assert refusal.error.code == "context_length_exceeded"
        assert "4096 tokens" in refusal.error.message
        assert size in refusal.error.message
        assert sum(refusal.seconds.values()) < 0.3
    assert processes() == [process]
    assert process.memory_info().rss < before + 200 * 1024 * 1024


def test_tokenizing_stops_beyond_the_context(texts: TextReaders, tmp_path: Path) -> None:
    """The size in bytes alone refuses nothing here: 4,096 tokens could be 10,000 bytes long each."""
    folder = write_folder(tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "x" * 10_000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    refusal = refused(texts, ask(folder, text="7" * 31_000_000))
    assert "more than 4096 tokens" in refusal.error.message
    assert refusal.seconds["tokenize"] < 0.5
    fits = "x" * 10_000 * 30
    assert read(texts, ask(folder, text=fits)).tokens == (256,) * 30


def test_a_request_that_is_forgotten_before_its_turn_is_not_read(texts: TextReaders, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    first, second, third = (texts.read(chat(folder, text)) for text in ("a", "b", "c"))
    assert second.cancel()
    assert all(isinstance(reading.result(WAIT_SECONDS), Prompt) for reading in (first, third))


def test_an_owner_of_many_prompts_keeps_no_other_waiting(texts: TextReaders, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    many = [texts.read(ask(folder, text="busy " * 20_000, owner="busy")) for _ in range(40)]
    other = texts.read(ask(folder, text="hello", owner="calm"))
    assert isinstance(other.result(WAIT_SECONDS), Prompt | PromptFailure)
    assert not all(reading.done() for reading in many[2:])


def test_a_process_that_was_killed_is_started_again(texts: TextReaders, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    tokens = read(texts, chat(folder)).tokens
    (process,) = processes()
    process.kill()
    process.wait()
    assert read(texts, chat(folder)).tokens == tokens


def test_a_missing_or_changed_folder_is_noticed(texts: TextReaders, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert isinstance(refused(texts, chat(tmp_path / "none")).error, ModelUnavailable)
    read(texts, chat(folder))
    (first,) = processes()
    (folder / "added.txt").touch()
    read(texts, chat(folder))
    (second,) = processes()
    assert second != first
    with (folder / "tokenizer_config.json").open("a") as file:
        file.write("\n")  # in place, like some editors: the folder's mtime does not change
    read(texts, chat(folder))
    (third,) = processes()
    assert third not in {first, second}


def test_a_disk_that_does_not_answer_holds_up_the_prompts_of_its_own_folders_only(
    texts: TextReaders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, real = threading.Event(), signature_of

    def wait(folder: Path) -> Signature:
        if folder.name == "asleep":
            answers.wait(WAIT_SECONDS)
        return real(folder)

    monkeypatch.setattr("app.worker.texts.signature_of", wait)
    held = texts.read(chat(write_folder(tmp_path / "asleep")))
    read(texts, chat(write_folder(tmp_path / "awake")))
    assert not held.done()
    answers.set()
    assert isinstance(held.result(WAIT_SECONDS), Prompt)


def test_a_disk_that_stops_answering_holds_up_no_prompts_of_a_tokenizer_that_was_read_from_it(
    texts: TextReaders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "m")
    read(texts, chat(folder))
    answers, real = threading.Event(), _file_stamp

    def wait(entry: os.DirEntry[str]) -> tuple[str, bool, int, int]:
        answers.wait(WAIT_SECONDS)
        return real(entry)

    monkeypatch.setattr("app.models.folder._file_stamp", wait)
    try:
        assert isinstance(texts.read(chat(folder)).result(20), Prompt)
    finally:
        answers.set()


def test_a_process_that_the_system_cannot_end_is_left_behind() -> None:
    class Stuck:
        pid = 2**22 + 1
        returncode = None

        def kill(self) -> None: ...

        def wait(self, seconds: float) -> int:
            raise subprocess.TimeoutExpired("stuck", seconds)

    ours, theirs = Pipe()
    with ours, theirs:
        TextProcess(Launched(Stuck(), ours)).kill()  # type: ignore[arg-type]


def test_the_least_recently_used_process_is_ended(tmp_path: Path) -> None:
    texts = TextReaders(max_processes=1)
    try:
        read(texts, chat(write_folder(tmp_path / "a")))
        (first,) = processes()
        read(texts, chat(write_folder(tmp_path / "b")))
        assert len(processes()) == 1
        assert first not in processes()
    finally:
        texts.close()


def test_a_process_at_work_is_kept_and_so_is_the_one_that_is_asked(tmp_path: Path) -> None:
    texts = TextReaders(max_processes=1)
    try:
        readings = [texts.read(chat(write_folder(tmp_path / name))) for name in ("a", "b", "c")]
        assert all(isinstance(reading.result(WAIT_SECONDS), Prompt) for reading in readings)
    finally:
        texts.close()


def test_a_process_ends_when_it_rests_and_soon_after_its_model_has_left_memory(tmp_path: Path) -> None:
    now = 0.0
    texts = TextReaders(clock=lambda: now)
    try:
        read(texts, chat(write_folder(tmp_path / "loaded")))
        (loaded,) = processes()
        read(texts, chat(write_folder(tmp_path / "left")))
        in_memory = frozenset({str(tmp_path / "loaded")})
        now = UNLOADED_IDLE_SECONDS
        texts.close_idle(in_memory)
        assert len(processes()) == 2
        assert texts.nbytes > 2 * 20_000_000
        now += 1.0
        texts.close_idle(in_memory)
        assert processes() == [loaded]
        now = IDLE_SECONDS + 1.0
        texts.close_idle(in_memory)
        assert (processes(), texts.nbytes) == ([], 0)
        assert isinstance(read(texts, chat(tmp_path / "loaded")), Prompt), "the next prompt starts another one"
    finally:
        texts.close()


def test_a_vocabulary_is_built_once_for_a_model_in_memory_whatever_becomes_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[TokenTable] = []

    class Counted(Vocabulary):
        def __init__(self, table: TokenTable) -> None:
            built.append(table)
            super().__init__(table)

    monkeypatch.setattr("app.worker.texts.Vocabulary", Counted)
    now, folder = 0.0, write_folder(tmp_path / "m")
    command = ask(folder, text="hello", grammar=Grammar(kind="regex", text="[ab]+"))
    texts = TextReaders(clock=lambda: now)
    try:
        assert read(texts, command).constraint is not None
        (process,) = processes()
        process.kill()
        process.wait()
        read(texts, command)
        now = IDLE_SECONDS + 1.0
        texts.close_idle(frozenset({str(folder)}))
        assert (processes(), texts.nbytes) == ([], 0)
        read(texts, command)
        assert len(built) == 1
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"][0]["content"] = "another"
        (folder / "tokenizer.json").write_text(json.dumps(content))
        read(texts, command)
        assert len(built) == 2
    finally:
        texts.close()


def test_the_first_folder_gets_the_process_that_was_started_ahead(tmp_path: Path) -> None:
    spare = launch_text_process()
    texts = TextReaders(spare=spare)
    try:
        read(texts, chat(write_folder(tmp_path / "a")))
        assert [process.pid for process in processes()] == [spare.process.pid]
        read(texts, chat(write_folder(tmp_path / "b")))
        assert len(processes()) == 2
    finally:
        texts.close()
    assert processes() == []


def test_a_process_that_was_started_ahead_for_nobody_is_counted_and_ends(tmp_path: Path) -> None:
    now = 0.0
    texts = TextReaders(clock=lambda: now, spare=launch_text_process())
    try:
        texts.close_idle(frozenset())
        assert texts.nbytes > 0
        now = IDLE_SECONDS + 1.0
        texts.close_idle(frozenset())
        assert (processes(), texts.nbytes) == ([], 0)
        read(texts, chat(write_folder(tmp_path / "a")))
    finally:
        texts.close()


def test_one_that_died_meanwhile_is_replaced(tmp_path: Path) -> None:
    spare = launch_text_process()
    texts = TextReaders(spare=spare)
    try:
        spare.process.kill()
        spare.process.wait()
        read(texts, chat(write_folder(tmp_path / "a")))
    finally:
        texts.close()


def test_closing_ends_a_process_whatever_it_is_at(tmp_path: Path) -> None:
    texts = TextReaders()
    future = texts.read(chat(write_hostile_template(tmp_path / "m", "endless loops"), "bomb"))
    while not processes():
        assert not future.done()
    texts.close()
    unread(future)
    assert processes() == []


PARENT = """
import sys
from pathlib import Path
from app.worker.texts import TextReaders
from tests.worker.test_texts import chat, processes, read
texts = TextReaders()
folder = Path(sys.argv[1])
read(texts, chat(folder))
print(processes()[0].pid, flush=True)
texts.read(chat(folder, "bomb"))
sys.stdin.read()
"""


def test_it_ends_when_its_parent_is_killed_even_inside_a_bomb(tmp_path: Path) -> None:
    folder = write_hostile_template(tmp_path / "m", "endless loops")
    parent = psutil.Popen([sys.executable, "-c", PARENT, str(folder)], stdin=-1, stdout=-1, cwd=ROOT)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    child.wait(WAIT_SECONDS)

"""The account, its sessions and its keys, in a real file: stored values open nothing, what has ended stays ended."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from argon2 import PasswordHasher
from sqlmodel import Session

from app.core.errors import InvalidRequest, StoreUnavailable
from app.store.accounts import ACCOUNT, MAX_SESSIONS, Accounts, digest_of, matches_hash
from app.store.store import FILE_NAME, Store
from app.store.tables import AccountRow

FAST = PasswordHasher(1, 8, 1)
PASSWORD, OTHER = "correct horse battery", "staple staple staple"
SCRYPT_HASH = "scrypt$2$1$1$AAAAAAAAAAAAAAAAAAAAAA==$yt97JvvKZhbS8uSi7C5+7MnP1Wx0IqvrRd/oWuvofcY="
"""Hash of `PASSWORD`, as Paceline made it before it used argon2."""
DAY_SECONDS = 86_400.0


class Time:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def accounts(tmp_path: Path, time: Time) -> Accounts:
    return Accounts(Store(tmp_path / FILE_NAME), clock=time, hasher=FAST)


def stored_hash(accounts: Accounts) -> str:
    with accounts._store.read_session() as session:
        return session.get_one(AccountRow, ACCOUNT).password_hash


def keep_hash(accounts: Accounts, made: str) -> None:
    with accounts._store.session() as session:
        session.get_one(AccountRow, ACCOUNT).password_hash = made


def content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())


@pytest.mark.parametrize("password", ["", "1234567", "password", "PASSWORD1", "aaaaaaaaaaaa", "12345678", "x" * 1025])
def test_bad_passwords_are_refused(password: str, accounts: Accounts) -> None:
    with pytest.raises(InvalidRequest):
        accounts.set_up(password)
    assert not accounts.has_account


@pytest.mark.parametrize(
    "password", ["eight ch", "all lowercase words", "пароль из слов", "비밀번호입니다요", "  spaced  out "]
)
def test_any_other_password_will_do(password: str, accounts: Accounts) -> None:
    accounts.set_up(password)
    assert accounts.is_password(password)
    assert not accounts.is_password(password + "x")
    assert not accounts.is_password(password.strip() + "!")


def test_the_hash_says_how_it_was_made_and_is_another_each_time(accounts: Accounts) -> None:
    made = []
    for _ in range(2):
        accounts.set_password(PASSWORD)
        made.append(stored_hash(accounts))
    assert made[0] != made[1]
    assert all(hashed.startswith("$argon2id$v=19$m=8,t=1,p=1$") for hashed in made)
    assert all(matches_hash(hashed, PASSWORD, FAST) for hashed in made)


def test_a_hash_of_an_earlier_paceline_counts_and_is_renewed_at_the_next_sign_in(accounts: Accounts) -> None:
    accounts.set_up(OTHER)
    secret = accounts.sessions.begin("Firefox")
    keep_hash(accounts, SCRYPT_HASH)
    assert not accounts.is_password(OTHER)
    assert stored_hash(accounts) == SCRYPT_HASH
    for _ in range(2):
        assert accounts.is_password(PASSWORD)
        assert stored_hash(accounts).startswith("$argon2id$")
    assert accounts.sessions.is_open(secret), "it is the same password"


def test_a_hash_that_costs_less_than_others_do_today_is_renewed(accounts: Accounts) -> None:
    keep = PasswordHasher(2, 8, 1).hash(PASSWORD)
    accounts.set_up(OTHER)
    keep_hash(accounts, keep)
    assert accounts.is_password(PASSWORD)
    assert stored_hash(accounts).startswith("$argon2id$v=19$m=8,t=1,p=1$")


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "scrypt",
        "scrypt$2$1$1$$",
        "plain$2$1$1$AAAA$AAAA",
        "scrypt$0$0$0$AAAA$AAAA",
        "scrypt$x$1$1$AAAA$AAAA",
        "scrypt$3$1$1$AAAA$" + "A" * 43 + "=",
        "scrypt$1073741824$8$1$AAAA$" + "A" * 43 + "=",
        "scrypt$2$1$1$*$*",
        "$argon2id$v=19$m=8,t=1,p=1$AAAA",
        "scrypt$99999999999999999999$8$1$AAAA$AAAA",
        "scrypt$2$8$99999999999999999999$AAAA$AAAA",
        "scrypt$-2$8$1$AAAA$AAAA",
    ],
)
def test_what_is_no_hash_matches_nothing(stored: str) -> None:
    assert not matches_hash(stored, PASSWORD, FAST)
    assert not matches_hash(stored, "", FAST)


def test_one_letter_typed_on_two_keyboards_is_one_letter(accounts: Accounts) -> None:
    accounts.set_up("caf\u00e9 au lait")
    assert accounts.is_password("cafe\u0301 au lait")


def test_there_is_one_account_and_it_is_set_up_once(accounts: Accounts) -> None:
    assert not accounts.has_account
    assert not accounts.is_password(PASSWORD)
    assert accounts.set_up(PASSWORD)
    assert accounts.has_account
    assert not accounts.set_up("another password")
    assert accounts.is_password(PASSWORD)
    assert not accounts.is_password("another password")


def test_a_new_password_ends_the_old_one_and_every_session(accounts: Accounts) -> None:
    accounts.set_up(PASSWORD)
    secret = accounts.sessions.begin("Firefox")
    accounts.set_password("another password")
    assert not accounts.is_password(PASSWORD)
    assert accounts.is_password("another password")
    assert not accounts.sessions.is_open(secret)


def test_the_file_knows_no_password_no_session_and_no_key(accounts: Accounts, tmp_path: Path) -> None:
    accounts.set_up(PASSWORD)
    secret = accounts.sessions.begin("Firefox")
    key, text = accounts.keys.create("laptop", "admin")
    written = content(tmp_path)
    assert key.hint.encode() in written
    for word in (PASSWORD, secret, text, text[len(key.hint) :]):
        assert word.encode() not in written


def test_a_session_ends_after_seven_days_without_use(accounts: Accounts, time: Time) -> None:
    secret = accounts.sessions.begin("Firefox")
    for _ in range(3):
        time.now += 6 * DAY_SECONDS
        assert accounts.sessions.is_open(secret)
    time.now += 7 * DAY_SECONDS
    assert not accounts.sessions.is_open(secret)
    assert accounts.sessions.list() == []


def test_a_session_ends_after_thirty_days_in_any_case(accounts: Accounts, time: Time) -> None:
    secret = accounts.sessions.begin("Firefox")
    for _ in range(29):
        time.now += DAY_SECONDS
        assert accounts.sessions.is_open(secret)
    time.now += DAY_SECONDS
    assert not accounts.sessions.is_open(secret)


def test_its_use_is_written_once_a_minute(accounts: Accounts, time: Time) -> None:
    secret = accounts.sessions.begin("Firefox")
    for passed, noted in ((59, 0.0), (1, 60.0), (30, 60.0), (30, 120.0)):
        time.now += passed
        assert accounts.sessions.is_open(secret)
        assert accounts.sessions.list()[0].seen_at == Time.now + noted


def test_signing_in_again_ends_the_session_before(accounts: Accounts) -> None:
    first = accounts.sessions.begin("Firefox")
    second = accounts.sessions.begin("Firefox", replacing=first)
    assert first != second
    assert not accounts.sessions.is_open(first)
    assert accounts.sessions.is_open(second)


def test_sessions_are_listed_without_what_opens_them(accounts: Accounts, time: Time) -> None:
    first = accounts.sessions.begin("Firefox, Linux")
    time.now += 100
    second = accounts.sessions.begin("Safari, macOS")
    listed = accounts.sessions.list()
    own = digest_of(first)
    assert [(row.browser, row.id == own) for row in listed] == [("Safari, macOS", False), ("Firefox, Linux", True)]
    assert not [row for row in listed for secret in (first, second) if row.id in secret]
    assert not accounts.sessions.is_open(listed[0].id)


def test_one_or_all_browsers_are_signed_out(accounts: Accounts) -> None:
    secrets = [accounts.sessions.begin("Firefox") for _ in range(4)]
    accounts.sessions.end(secrets[0])
    assert [accounts.sessions.is_open(secret) for secret in secrets] == [False, True, True, True]
    accounts.sessions.end_all()
    assert not any(map(accounts.sessions.is_open, secrets))


class FailingOnce(Store):
    """A store that accepts one change and fails from then on."""

    changes = 0

    @contextmanager
    def session(self, *, vital: bool = False) -> Iterator[Session]:
        self.changes += 1
        if self.changes > 1:
            raise StoreUnavailable("the disk is full")
        with super().session(vital=vital) as session:
            yield session


def test_a_new_password_and_the_end_of_every_session_are_one_change(accounts: Accounts, time: Time) -> None:
    accounts.set_up(PASSWORD)
    secret = accounts.sessions.begin("Firefox")
    Accounts(FailingOnce(accounts._store.path), clock=time, hasher=FAST).set_password(OTHER)
    assert accounts.is_password(OTHER)
    assert not accounts.sessions.is_open(secret)


def test_only_so_many_sessions_are_kept(accounts: Accounts, time: Time) -> None:
    secrets = []
    for _ in range(MAX_SESSIONS + 3):
        time.now += 1
        secrets.append(accounts.sessions.begin("Firefox"))
    assert [accounts.sessions.is_open(secret) for secret in secrets] == [False] * 3 + [True] * MAX_SESSIONS


def test_a_key_is_found_until_it_is_revoked(accounts: Accounts) -> None:
    key, text = accounts.keys.create("  my   laptop ", "inference")
    assert text.startswith("pl-")
    assert len(text) >= 46
    assert (key.name, key.scope, key.hint) == ("my laptop", "inference", text[:7])
    row = accounts.keys.find(text)
    assert row is not None
    assert row.id == key.id
    for wrong in ("", "pl-", text[:-1], text + "x", text.upper(), key.hint):
        assert accounts.keys.find(wrong) is None
    assert accounts.keys.revoke(key.id)
    assert accounts.keys.find(text) is None
    assert accounts.keys.list() == []
    assert not accounts.keys.revoke(key.id)


def test_the_use_of_a_key_is_written_once_a_minute(accounts: Accounts, time: Time) -> None:
    _, text = accounts.keys.create("laptop", "inference")
    assert accounts.keys.list()[0].used_at is None
    accounts.keys.find(text)
    assert accounts.keys.list()[0].used_at == time.now
    time.now += 59
    accounts.keys.find(text)
    assert accounts.keys.list()[0].used_at == time.now - 59
    time.now += 1
    accounts.keys.find(text)
    assert accounts.keys.list()[0].used_at == time.now


def test_a_disk_that_takes_nothing_more_keeps_nobody_out(
    tmp_path: Path, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    class ReadOnlyStore(Store):
        is_full = False

        @contextmanager
        def session(self, *, vital: bool = False) -> Iterator[Session]:
            if self.is_full:
                raise StoreUnavailable("the disk is full")
            with super().session(vital=vital) as session:
                yield session

    store = ReadOnlyStore(tmp_path / FILE_NAME)
    accounts = Accounts(store, clock=time, hasher=FAST)
    secret = accounts.sessions.begin("Firefox")
    _, text = accounts.keys.create("laptop", "inference")
    time.now += 100
    store.is_full = True
    for _ in range(5):
        assert accounts.keys.find(text) is not None
        assert accounts.sessions.is_open(secret)
    assert caplog.text.count("the disk is full") == 2, "once a minute for each, not at every request"


@pytest.mark.parametrize("name", ["", "   ", "x" * 81, "a\x00b", "a\x1b[2Jb"])
def test_a_key_needs_a_name_for_people(name: str, accounts: Accounts) -> None:
    with pytest.raises(InvalidRequest):
        accounts.keys.create(name, "inference")
    assert accounts.keys.list() == []


def test_another_process_sees_everything_at_once(accounts: Accounts, tmp_path: Path, time: Time) -> None:
    other = Accounts(Store(tmp_path / FILE_NAME), clock=time, hasher=FAST)
    accounts.set_up(PASSWORD)
    assert other.has_account
    secret = other.sessions.begin("Firefox")
    key, text = accounts.keys.create("laptop", "admin")
    assert other.keys.find(text) is not None
    assert other.keys.revoke(key.id)
    assert accounts.keys.find(text) is None
    other.set_password("another password")
    assert not accounts.sessions.is_open(secret)
    assert accounts.is_password("another password")


def test_asking_makes_no_file(accounts: Accounts, tmp_path: Path) -> None:
    assert not accounts.has_account
    assert not accounts.is_locked_down
    assert accounts.keys.find("pl-x") is None
    assert not accounts.sessions.is_open("x")
    assert accounts.keys.list() == accounts.sessions.list() == []
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_store_is_locked_down_until_an_account_is_set_up(tmp_path: Path, time: Time) -> None:
    path = tmp_path / FILE_NAME
    first = Store(path)
    before = Accounts(first, clock=time, hasher=FAST)
    before.set_up(PASSWORD)
    secret = before.sessions.begin("Firefox")
    _, text = before.keys.create("laptop", "admin")
    first.close()
    path.write_bytes(path.read_bytes()[:5000])
    store = Store(path)
    assert store.start()
    after = Accounts(store, clock=time, hasher=FAST)
    assert after.is_locked_down
    assert not after.has_account
    assert not after.is_password(PASSWORD)
    assert not after.sessions.is_open(secret)
    assert after.keys.find(text) is None
    assert after.set_up("another password")
    assert not after.is_locked_down
    assert after.has_account


def test_the_owner_of_the_files_may_end_a_lock_down_with_a_new_password(tmp_path: Path, time: Time) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"no database " * 100)
    store = Store(path)
    assert store.start()
    accounts = Accounts(store, clock=time, hasher=FAST)
    assert accounts.is_locked_down
    Accounts(Store(path), clock=time, hasher=FAST).set_password(PASSWORD)
    assert not accounts.is_locked_down
    assert accounts.is_password(PASSWORD)


def test_a_second_store_in_this_process_leaves_the_first_its_locks(accounts: Accounts, tmp_path: Path) -> None:
    accounts.set_up(PASSWORD)
    second = Store(tmp_path / FILE_NAME)
    assert Accounts(second).has_account
    second.close()
    elsewhere = """
import sys
from pathlib import Path
from app.store.accounts import Accounts
from app.store.store import Store
Accounts(Store(Path(sys.argv[1]))).keys.create(sys.argv[2], "inference")
"""
    for count, name in enumerate(("one", "two", "three"), start=1):
        subprocess.run([sys.executable, "-c", elsewhere, str(tmp_path / FILE_NAME), name], check=True)
        assert len(accounts.keys.list()) == 2 * count - 1
        accounts.keys.create(f"{name}, here", "inference")
    assert len(Accounts(Store(tmp_path / FILE_NAME)).keys.list()) == 6

"""Password attempts: the first few are free, then pauses double; nobody can lock the owner out for long."""

import pytest

from app.serving.errors import Rejected
from app.serving.guessing import FREE_ATTEMPTS, LOOPBACK, MAX_ADDRESSES, Lockout, address_key
from tests.admin.signing import Time


def pause(lockout: Lockout, address: str) -> int:
    """Make an attempt; return 0 if it was counted, else the seconds to wait (-1 if the refusal states none)."""
    try:
        lockout.begin(address)
    except Rejected as refusal:
        return refusal.retry_after_seconds or -1
    return 0


def test_a_refusal_says_when_to_come_back() -> None:
    lockout = Lockout(Time())
    for _ in range(FREE_ATTEMPTS):
        lockout.begin("10.0.0.1")
    with pytest.raises(Rejected) as refusal:
        lockout.begin("10.0.0.1")
    assert (refusal.value.status, refusal.value.retry_after_seconds) == (429, 1)


def test_five_attempts_are_free_and_then_pauses_double_to_a_quarter_of_an_hour() -> None:
    time = Time()
    lockout = Lockout(time)
    assert [pause(lockout, "192.168.1.9") for _ in range(FREE_ATTEMPTS)] == [0] * FREE_ATTEMPTS
    pauses = []
    for _ in range(13):
        pauses.append(pause(lockout, "192.168.1.9"))
        time.pass_by(pauses[-1])
        assert pause(lockout, "192.168.1.9") == 0
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900, 900]


def test_attempts_during_a_pause_do_not_prolong_it() -> None:
    time = Time()
    lockout = Lockout(time)
    for _ in range(FREE_ATTEMPTS + 1):
        time.pass_by(pause(lockout, "10.0.0.1"))
    for _ in range(1000):
        pause(lockout, "10.0.0.1")
    assert pause(lockout, "10.0.0.1") <= 2


def test_the_right_password_begins_anew() -> None:
    lockout = Lockout(Time())
    for _ in range(20):
        assert pause(lockout, "10.0.0.1") == 0
        lockout.succeed("10.0.0.1")


def test_a_day_later_everything_is_forgotten() -> None:
    time = Time()
    lockout = Lockout(time)
    for _ in range(30):
        time.pass_by(pause(lockout, "10.0.0.1"))
    time.pass_by(86_400)
    assert [pause(lockout, "10.0.0.1") for _ in range(FREE_ATTEMPTS)] == [0] * FREE_ATTEMPTS


def test_many_addresses_together_are_held_back_and_this_computer_is_not() -> None:
    lockout = Lockout(Time())
    tried = [pause(lockout, f"10.0.{number}.1") for number in range(200)]
    assert tried.count(0) == 30
    assert pause(lockout, "10.9.9.9") > 0
    assert pause(lockout, "127.0.0.1") == 0
    assert pause(lockout, "::1") == 0


def test_all_together_wait_a_minute_at_most() -> None:
    time = Time()
    lockout = Lockout(time)
    for number in range(100):
        time.pass_by(pause(lockout, f"10.1.{number}.1"))
        pause(lockout, f"10.1.{number}.1")
    assert 0 < pause(lockout, "10.9.9.9") <= 60


def test_memory_is_bounded() -> None:
    time = Time()
    lockout = Lockout(time)
    for number in range(3 * MAX_ADDRESSES):
        time.pass_by(61)
        pause(lockout, f"10.{number >> 8}.{number & 255}.1")
    assert len(lockout._by_address) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1", LOOPBACK),
        ("127.8.8.8", LOOPBACK),
        ("::1", LOOPBACK),
        ("::ffff:127.0.0.1", LOOPBACK),
        ("192.168.1.9", "192.168.1.9"),
        ("::ffff:192.168.1.9", "192.168.1.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", "unknown"),
        ("127.0.0.1.evil.example", "unknown"),
        ("localhost", "unknown"),
    ],
)
def test_what_counts_as_one_address(address: str, place: str) -> None:
    assert address_key(address) == place

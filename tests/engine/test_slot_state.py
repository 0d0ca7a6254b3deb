"""Recurrent states by slot: rows join, leave and move, and a new row starts with an empty state."""

import mlx.core as mx

from app.engine.caches.lanes import select
from app.engine.caches.rollback import SlotState


def row(value: float, count: int = 1) -> list[mx.array]:
    """Return `count` rows of two arrays, like the states of a convolution and a scan."""
    return [mx.full((count, 2, 3), value), mx.full((count, 4), value)]


def held(state: SlotState) -> list[list[float]]:
    """Return the first number of each row, by array."""
    return [rows.reshape(len(rows), -1)[:, 0].tolist() for rows in state.store]  # type: ignore[misc]


def test_rows_that_were_never_written_are_zero_and_not_there_to_read() -> None:
    state = SlotState(2)
    state.write_row(2, row(7.0))
    assert held(state) == [[0.0, 0.0, 7.0]] * 2
    assert state.read_row(3) == ()
    assert [array.tolist() for array in state.read_row(2)] == [array.tolist() for array in row(7.0)]


def test_the_last_row_moves_into_the_hole_and_nothing_is_left_behind() -> None:
    state = SlotState(2)
    for slot, value in enumerate((1.0, 2.0, 3.0)):
        state.write_row(slot, row(value))
    state.reorder([2, 1])
    assert held(state) == [[3.0, 2.0]] * 2
    state.reorder([0])
    assert held(state) == [[3.0]] * 2
    state.begin(select(0, 1, (5, 0), (True, True)), [1, 1])
    assert held(state) == [[3.0, 0.0]] * 2, "a newcomer starts from nothing"


def test_a_last_row_that_has_not_run_takes_nothing_over() -> None:
    state = SlotState(2)
    state.write_row(0, row(1.0, 2))
    state.reorder([2, 1])
    assert held(state) == [[0.0, 1.0]] * 2


def test_an_inert_row_keeps_what_it_had_and_a_snapshot_stays() -> None:
    state = SlotState(2)
    state.write_row(0, row(1.0, 4))
    before = state.store
    state.begin(select(1, 1, (3, 3, 3), (True, False, True)), [1, 0, 1])
    state.commit(select(1, 1, (3, 3, 3), (True, False, True)), [True, False, True], row(9.0, 3))
    assert held(state) == [[1.0, 9.0, 1.0, 9.0]] * 2
    assert [rows[:, 0].tolist() for rows in before][1] == [1.0] * 4


def test_the_first_forward_may_skip_rows() -> None:
    state = SlotState(2)
    state.begin(select(1, 1, (0, 0, 0), (True, False, True)), [1, 0, 1])
    assert state.cache == [None, None]
    state.commit(select(1, 1, (0, 0, 0), (True, False, True)), [True, False, True], row(9.0, 3))
    assert held(state) == [[0.0, 9.0, 0.0, 9.0]] * 2
    for last in (3, 2, 1, 0):
        state.reorder(range(last))
    assert [array.size for array in (*state.store, *state.cache)] == [0] * 4, "who leaves last leaves nothing"


def test_a_state_that_is_still_growing_stands_beside_a_whole_one() -> None:
    state = SlotState(1)
    state.write_row(0, [mx.array([[4.0]])])
    state.write_row(1, [mx.array([[7.0, 8.0, 9.0]])])
    assert state.store[0].tolist() == [[0.0, 0.0, 4.0], [7.0, 8.0, 9.0]]


def test_rows_that_all_begin_are_shown_nothing_rather_than_zeros() -> None:
    state = SlotState(2)
    state.write_row(0, row(7.0))
    state.begin(select(1, 3, (0,), (True,)), [3])
    assert state.cache == [None, None]

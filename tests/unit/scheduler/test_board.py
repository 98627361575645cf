"""The table of loads that processes share."""

import mmap

import pytest

from coordinator.scheduler.board import JOURNAL, NOTHING, Figures, LoadBoard, size_bytes

SLOTS = 16


@pytest.fixture
def memory():
    return mmap.mmap(-1, size_bytes(3, SLOTS))


@pytest.fixture
def boards(memory):
    """Rows 0 to 2, each as its own process sees it."""
    return [LoadBoard(memory, 3, SLOTS, own) for own in range(3)]


@pytest.fixture
def reader(memory):
    """What the supervisor has: no row of its own."""
    return LoadBoard(memory, 3, SLOTS)


def test_each_process_sees_the_others_and_all_see_the_sums(boards, reader):
    boards[0].write(4, (1, 10, 100, 0))
    boards[1].write(4, (2, 20, 200, 1))
    boards[2].write(5, (7, 0, 0, 0))
    assert boards[0].others(4) == Figures(2, 20, 200, 1)
    assert boards[1].others(4) == Figures(1, 10, 100, 0)
    assert boards[2].others(4) == Figures(3, 30, 300, 1)
    assert boards[2].others(5) == NOTHING
    assert {board.total(4) for board in (*boards, reader)} == {Figures(3, 30, 300, 1)}
    assert reader.others(5) == Figures(7, 0, 0, 0)
    assert reader.slots == SLOTS


def test_live_and_waiting_requests(boards, reader):
    for number, board in enumerate(boards, 1):
        board.write_live(10 * number)
        board.write_queued(number)
    assert reader.live() == 60
    assert boards[0].live_elsewhere() == 50
    assert [reader.live_of(row) for row in range(3)] == [10, 20, 30]
    assert reader.queued() == 6
    assert boards[2].queued_elsewhere() == 3


def test_signs_of_life(boards, reader):
    assert [reader.beat_of(row) for row in range(3)] == [0, 0, 0]
    boards[1].beat()
    boards[1].beat()
    boards[2].write_view(7)
    assert [reader.beat_of(row) for row in range(3)] == [0, 2, 0]
    assert [reader.view_of(row) for row in range(3)] == [0, 0, 7]


def test_faults_are_counted_over_all_processes_and_survive_loads(boards):
    boards[0].count_fault(3)
    boards[1].count_fault(3)
    boards[0].write(3, (1, 1, 1, 1))
    assert boards[2].faults(3) == 2
    assert boards[2].faults(4) == 0


class TestChanges:
    def test_the_first_look_is_at_everything(self, boards):
        assert boards[0].changes() is None
        assert boards[0].changes() == set()

    def test_only_what_others_wrote_since(self, boards):
        boards[0].changes()
        boards[0].write(1, (1, 0, 0, 0))
        boards[1].write(2, (1, 0, 0, 0))
        boards[2].write(3, (1, 0, 0, 0))
        boards[2].write(3, (2, 0, 0, 0))
        assert boards[0].changes() == {2, 3}
        assert boards[0].changes() == set()

    def test_too_many_to_tell(self, boards):
        boards[0].changes()
        for count in range(JOURNAL // 2):
            boards[1].write(count % SLOTS, (count, 0, 0, 0))
        assert boards[0].changes() == set(range(SLOTS))
        for count in range(JOURNAL // 2 + 1):
            boards[1].write(count % SLOTS, (count, 0, 0, 0))
        assert boards[0].changes() is None
        assert boards[0].changes() == set()

    def test_the_journal_goes_round(self, boards):
        boards[0].changes()
        for count in range(3 * JOURNAL):
            boards[1].write(count % SLOTS, (count, 0, 0, 0))
            assert boards[0].changes() == {count % SLOTS}
            assert boards[0].others(count % SLOTS).requests == count

    def test_one_who_wrote_much_does_not_hide_what_another_wrote(self, boards):
        boards[0].changes()
        boards[2].write(9, (1, 0, 0, 0))
        for _ in range(JOURNAL):
            boards[1].write(1, (1, 0, 0, 0))
        assert boards[0].changes() is None
        boards[2].write(9, (2, 0, 0, 0))
        assert boards[0].changes() == {9}


class TestClearing:
    def test_a_process_that_has_ended(self, memory, boards, reader):
        boards[0].changes()
        boards[1].write(2, (5, 5, 5, 5))
        boards[2].write(2, (1, 1, 1, 1))
        boards[1].write_live(5)
        boards[1].write_queued(4)
        boards[1].write_view(3)
        boards[1].beat()
        boards[0].changes()
        reader.clear_row(1)
        assert reader.total(2) == Figures(1, 1, 1, 1)
        assert (reader.live(), reader.queued()) == (0, 0)
        assert (reader.view_of(1), reader.beat_of(1)) == (0, 0)
        assert boards[0].changes() is None, "the others look again"

    def test_its_successor_goes_on_where_it_stopped(self, memory, boards, reader):
        boards[0].changes()
        for _ in range(5):
            boards[1].write(2, (5, 5, 5, 5))
        reader.clear_row(1)
        boards[0].changes()
        successor = LoadBoard(memory, 3, SLOTS, 1)
        successor.write(6, (1, 0, 0, 0))
        assert boards[0].changes() == {6}
        assert boards[0].others(6).requests == 1

    def test_a_slot_for_another_instance(self, boards, reader):
        for board in boards:
            board.write(2, (1, 1, 1, 1))
            board.write(3, (1, 1, 1, 1))
            board.count_fault(2)
        reader.clear_slot(2)
        assert reader.total(2) == NOTHING
        assert reader.faults(2) == 0
        assert reader.total(3) == Figures(3, 3, 3, 3)


def test_rows_and_slots_do_not_touch_each_other(boards, reader):
    for row, board in enumerate(boards):
        for slot in range(SLOTS):
            board.write(slot, (row + 1, slot, 100 * row + slot, 1))
        board.write_live(row)
    for slot in range(SLOTS):
        assert reader.total(slot) == Figures(6, 3 * slot, 300 + 3 * slot, 3)
    assert reader.live() == 3


def test_closing_lets_the_memory_go(memory):
    board = LoadBoard(memory, 3, SLOTS, 0)
    with pytest.raises(BufferError):
        memory.close()
    board.close()
    memory.close()

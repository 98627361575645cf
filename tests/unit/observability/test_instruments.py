import math

import msgspec
import pytest

from coordinator.core.errors import Outcome
from coordinator.observability.instruments import CELL_LIMIT, CallbackGauge, Cells, Counter, Histogram


def test_counter_counts_by_label_values():
    counter = Counter("x_total", "help", ("api", "outcome"))
    counter.labels("vllm", "ok").inc()
    counter.labels("vllm", "ok").inc(4)
    counter.labels("tgi", "ok").inc()
    assert counter.snapshot() == {("vllm", "ok"): [5], ("tgi", "ok"): [1]}


def test_counter_without_labels_is_there_at_zero():
    counter = Counter("x_total", "help")
    assert counter.snapshot() == {(): [0]}
    counter.inc(3)
    assert counter.snapshot() == {(): [3]}


def test_known_series_are_there_at_zero():
    counter = Counter("x_total", "help", ("result",), [("ok",), ("failed",)])
    assert counter.snapshot() == {("ok",): [0], ("failed",): [0]}


def test_enum_members_and_their_text_are_one_series_of_plain_text():
    counter = Counter("x_total", "help", ("outcome",), [(Outcome.OK,)])
    counter.labels(Outcome.OK).inc()
    counter.labels("ok").inc()
    (labels,) = counter.snapshot()
    assert counter.snapshot() == {("ok",): [2]}
    assert type(labels[0]) is str


def test_number_of_label_values_must_fit():
    counter = Counter("x_total", "help", ("a", "b"))
    with pytest.raises(ValueError, match="x_total has the labels"):
        counter.labels("only one")
    assert counter.snapshot() == {}


def test_cell_stays_the_same_object():
    histogram = Histogram("x_seconds", "help", (1, 2), ("api",))
    assert histogram.labels("vllm") is histogram.labels("vllm")


def test_values_without_end_fold_into_one_series():
    counter = Counter("x_total", "help", ("a", "b"), [("kept", "kept")])
    for i in range(CELL_LIMIT * 3):
        counter.labels(f"a{i}", "b").inc()
    counter.labels("kept", "kept").inc()
    counter.labels("a0", "b").inc()
    cells = counter.snapshot()
    assert len(cells) == CELL_LIMIT + 1
    assert cells["kept", "kept"] == [1]
    assert cells["a0", "b"] == [2]
    assert cells["other", "other"] == [CELL_LIMIT * 3 - (CELL_LIMIT - 1)]


def test_forget_drops_the_series_of_one_value_and_makes_room():
    counter = Counter("x_total", "help", ("instance", "reason"))
    counter.labels("p0", "a").inc()
    counter.labels("p0", "b").inc()
    counter.labels("b", "p0").inc()
    counter.forget("instance", "p0")
    counter.forget("instance", "never seen")
    assert counter.snapshot() == {("b", "p0"): [1]}


def test_bucket_holds_its_upper_bound():
    histogram = Histogram("x_seconds", "help", (0.1, 1, 10))
    for value_s in (0.0, 0.1, 0.1000001, 1, 9.9, 10, 10.1, math.inf):
        histogram.labels().observe(value_s)
    *counts, _ = histogram.snapshot()[()]
    assert counts == [2, 2, 2, 2]


def test_histogram_sum():
    histogram = Histogram("x_seconds", "help", (1,))
    histogram.labels().observe(0.25)
    histogram.labels().observe(3.5)
    assert histogram.snapshot() == {(): [1, 1, 3.75]}


@pytest.mark.parametrize("buckets", [(), (1, 1), (2, 1), (1, 2, 2)])
def test_buckets_must_rise(buckets):
    with pytest.raises(ValueError, match="do not rise"):
        Histogram("x_seconds", "help", buckets)


def test_snapshot_is_a_copy():
    histogram = Histogram("x_seconds", "help", (1,))
    before = histogram.snapshot()
    histogram.labels().observe(0.5)
    assert before == {(): [0, 0, 0.0]}


def test_merge_sums_cells_of_several_processes_and_changes_none():
    histogram = Histogram("x_seconds", "help", (1, 2), ("api",))
    first: Cells = {("vllm",): [1, 2, 3, 4.5], ("tgi",): [1, 0, 0, 0.5]}
    second: Cells = {("vllm",): [10, 20, 30, 45.0]}
    assert histogram.merge([first, second]) == {("vllm",): [11, 22, 33, 49.5], ("tgi",): [1, 0, 0, 0.5]}
    assert first == {("vllm",): [1, 2, 3, 4.5], ("tgi",): [1, 0, 0, 0.5]}
    assert second == {("vllm",): [10, 20, 30, 45.0]}
    assert histogram.snapshot() == {}


def test_merge_refuses_other_buckets():
    histogram = Histogram("x_seconds", "help", (1,))
    with pytest.raises(ValueError, match="zip"):
        histogram.merge([{(): [1, 2, 3.0]}, {(): [1, 2, 3, 4.0]}])


def test_snapshot_travels_between_processes():
    counter = Counter("x_total", "help", ("api", "outcome"), [("vllm", Outcome.OK)])
    sent = msgspec.msgpack.encode({counter.name: counter.snapshot()})
    got = msgspec.msgpack.decode(sent, type=dict[str, Cells])
    assert got == {"x_total": {("vllm", "ok"): [0]}}


def test_gauge_without_labels_reads_zero_until_there_is_a_reader():
    gauge = CallbackGauge("x", "help")
    assert gauge.snapshot() == {(): [0.0]}
    gauge.read = lambda: [((), 7)]
    assert gauge.snapshot() == {(): [7]}


def test_gauge_is_read_anew_each_time():
    live = {("p0", "prefill"): 2.0}
    gauge = CallbackGauge("x", "help", ("instance", "role"))
    assert gauge.snapshot() == {}
    gauge.read = live.items
    assert gauge.snapshot() == {("p0", "prefill"): [2.0]}
    live.clear()
    assert gauge.snapshot() == {}


def test_gauges_of_several_processes():
    load = CallbackGauge("x", "help", ("instance",))
    up = CallbackGauge("x", "help", ("instance",), over_processes="min")
    parts: list[Cells] = [{("p0",): [1.0], ("p1",): [1.0]}, {("p0",): [0.0], ("p1",): [1.0]}]
    assert load.merge(parts) == {("p0",): [1.0], ("p1",): [2.0]}
    assert up.merge(parts) == {("p0",): [0.0], ("p1",): [1.0]}

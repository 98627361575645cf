"""From what instances say to one page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from coordinator.management import engine_page
from coordinator.management.engine_page import Filter, Unreadable, joined, relabelled

ALL = Filter(["*"])
P0 = {"instance": "p0", "role": "prefill"}
D0 = {"instance": "d0", "role": "decode"}
PAGE = """\
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.1"} 2
vllm:ttft_seconds_bucket{le="+Inf"} 5
vllm:ttft_seconds_sum 1.5e-3
vllm:ttft_seconds_count 5
# TYPE python_gc_total counter
python_gc_total{generation="0"} 12 1700000000000
bare 1
"""


def parsed(page):
    """Type and samples by family."""
    return {
        family.name: (family.type, [(s.name, s.labels, s.value) for s in family.samples])
        for family in text_string_to_metric_families(page.decode())
    }


def test_each_sample_gets_the_labels():
    page = parsed(joined([relabelled(PAGE, P0, ALL)]))
    running = {**P0, "engine": "0", "model_name": "m"}
    assert page["vllm:num_requests_running"] == ("gauge", [("vllm:num_requests_running", running, 3.0)])
    kind, samples = page["vllm:ttft_seconds"]
    assert kind == "histogram"
    assert [name.rpartition("_")[2] for name, _, _ in samples] == ["bucket", "bucket", "sum", "count"]
    assert samples[1][1] == {**P0, "le": "+Inf"}
    assert page["python_gc"] == ("counter", [("python_gc_total", {**P0, "generation": "0"}, 12.0)])
    assert page["bare"][1] == [("bare", P0, 1.0)]


def test_lines_of_one_metric_stand_together():
    page = joined([relabelled(PAGE, P0, ALL), relabelled(PAGE, D0, ALL)]).decode()
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    lines = page.splitlines()
    at = lines.index("# TYPE vllm:num_requests_running gauge")
    assert ['instance="p0"' in lines[at + 1], 'instance="d0"' in lines[at + 2]] == [True, True]
    assert lines[at + 3].startswith("# TYPE")


def test_who_gives_a_metric_another_type_is_left_out_there():
    other = "# TYPE x counter\nx 5\n# TYPE y gauge\ny 1\n"
    page = joined([relabelled("# TYPE x gauge\nx 1\n", P0, ALL), relabelled(other, D0, ALL)]).decode()
    assert page.splitlines() == [
        "# TYPE x gauge",
        'x{instance="p0",role="prefill"} 1',
        "# TYPE y gauge",
        'y{instance="d0",role="decode"} 1',
    ]


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ('instance="a",role="b"', {"exported_instance": "a", "exported_role": "b"}),
        ('text="instance=",x="y"', {"text": "instance=", "x": "y"}),
        (r'text="a\"},instance=\"b\\"', {"text": r'a"},instance="b' + "\\"}),
        ('x="1",', {"x": "1"}),
        ("", {}),
    ],
)
def test_labels_of_their_own(theirs, expected):
    page = joined([relabelled(f"x{{{theirs}}} 1\n", P0, ALL)])
    ((_, labels, _),) = parsed(page)["x"][1]
    assert labels == P0 | expected


@pytest.mark.parametrize(
    "line",
    [
        "x{a=} 1", 'x{a="b} 1', 'x{a="1",a="2"} 1', 'x{instance="1",exported_instance="2"} 1', 'x{a="b"c="d"} 1',
        'x{a="\\q"} 1', "x one", "x 1 2 3", "x", "9x 1", 'x{a="b"} 1} 2', 'x{a-b="c"} 1', "x 1_0", "x 0x1",
    ],
)  # fmt: skip
def test_lines_that_are_no_samples_are_left_out(line):
    page = joined([relabelled(f"good 1\n{line}\n", P0, ALL)]).decode()
    assert page == '# TYPE good untyped\ngood{instance="p0",role="prefill"} 1\n'


@pytest.mark.parametrize("value", ["1", "-1.5", "1e9", ".5", "5.", "NaN", "+Inf", "-Inf", "1.5E-3"])
def test_values(value):
    assert joined([relabelled(f"x {value}\n", P0, ALL)]).endswith(f" {value}\n".encode())


@pytest.mark.parametrize("text", ["", "<html>x</html>", "# TYPE x gauge\n", '{"error": "no"}', "\0\0\0"])
def test_what_is_no_page(text):
    with pytest.raises(Unreadable):
        relabelled(text, P0, ALL)


def test_names_that_are_not_asked_for_are_left_out():
    allowed = Filter(["vllm:*", "bare"])
    assert set(relabelled(PAGE, P0, allowed)) == {"vllm:num_requests_running", "vllm:ttft_seconds", "bare"}
    assert set(relabelled(PAGE, P0, Filter(["vllm:ttft_seconds"]))) == {"vllm:ttft_seconds"}
    assert relabelled(PAGE, P0, Filter(["nothing"])) == {}
    assert relabelled(PAGE, P0, Filter([])) == {}


def test_an_endless_page_is_cut(monkeypatch):
    monkeypatch.setattr(engine_page, "MAX_SAMPLES", 3)
    families = relabelled("".join(f"x{number} 1\n" for number in range(10)), P0, ALL)
    assert list(families) == ["x0", "x1", "x2"]


def test_instance_ids_are_escaped():
    labels = {"instance": 'a"b\\c', "role": "decode"}
    ((_, found, _),) = parsed(joined([relabelled("x 1\n", labels, ALL)]))["x"][1]
    assert found == labels


NOISE = st.text(st.sampled_from('abx_:{}=",\\ 019.-+#\n\t') | st.characters(), max_size=60)


@given(st.lists(NOISE | st.sampled_from(PAGE.splitlines()), max_size=8))
def test_whatever_an_instance_says_the_page_can_be_read(lines):
    text = "\n".join(lines)
    try:
        families = relabelled(text, P0, ALL)
    except Unreadable:
        return
    page = parsed(joined([families, relabelled(PAGE, D0, ALL)]))
    samples = [labels for _, found in page.values() for _, labels, _ in found]
    assert all(labels["instance"] in ("p0", "d0") for labels in samples)
    assert sum(labels["instance"] == "p0" for labels in samples) <= len(text.splitlines())

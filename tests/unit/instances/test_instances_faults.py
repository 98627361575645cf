import pytest

from instances.faults import COMMON_MENU, BadFault, Faults, parse
from instances.mindie.settings import MENU

ALL = {**COMMON_MENU, **MENU}


def faults(*given, name="p0", seed=0):
    return Faults(ALL, name, seed, given)


def test_the_whole_notation():
    fault = parse("on=p0:#2:decode_error@3=it: broke@5", ALL)
    assert (fault.name, fault.at, fault.value, fault.selectors) == ("decode_error", 3, "it: broke@5", ("on=p0", "#2"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode_eror", "did you mean 'decode_error'"),
        ("", "is not of the form"),
        ("#x:hang", "is not of the form"),
        ("status=often", "takes a number"),
        ("hang=3", "takes no value"),
    ],
)
def test_a_wrong_fault_is_named(text, says):
    with pytest.raises(BadFault, match=says):
        parse(text, ALL)


def test_a_fault_without_selector_holds_for_every_request():
    assert all("hang" in faults("hang").choose(n) for n in range(1, 5))


def test_the_nth_and_the_first_requests():
    given = faults("#2:hang", "first=3:status=500")
    assert ["hang" in given.choose(n) for n in range(1, 5)] == [False, True, False, False]
    assert ["status" in given.choose(n) for n in range(1, 5)] == [True, True, True, False]


def test_a_random_share_comes_from_the_seed():
    def drawn(seed):
        given = faults("rate=0.3:hang", seed=seed)
        return ["hang" in given.choose(n) for n in range(1, 300)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 50 < sum(drawn(1)) < 130


def test_a_fault_for_one_instance_only():
    assert "hang" in faults("on=p0:hang").choose(1)
    assert "hang" not in faults("on=p0:hang", name="p1").choose(1)
    assert "hang" in faults("on=p0:hang").always()
    assert "hang" not in faults("#1:hang").always()


def test_markers_in_the_prompt():
    chosen = faults().choose(1, 'x [[fault:decode_error@3=oh [no] "it" broke]] and [[fault:on=p0:split@2]] y')
    assert chosen.get("decode_error").value == 'oh [no] "it" broke'
    assert chosen.at("decode_error", 3)
    assert not chosen.at("decode_error", 2)
    assert "split" in chosen
    with pytest.raises(BadFault):
        faults().choose(1, "[[fault:nonsense]]")


def test_when_a_fault_is_due():
    chosen = faults("stall", "split", "merge@4").choose(1)
    assert [chosen.at("stall", k) is not None for k in (1, 2)] == [True, False]
    assert [chosen.on_piece("split", k) is not None for k in (2, 3)] == [True, True]
    assert [chosen.on_piece("merge", k) is not None for k in (3, 4)] == [False, True]


def test_values():
    chosen = faults("status", "delay=0.5").choose(1)
    assert chosen.number("status", 500) == 500
    assert chosen.number("delay") == 0.5
    assert chosen.number("huge", 1, absent=7) == 7


def test_replacing_with_a_wrong_fault_changes_nothing():
    given = faults("hang")
    with pytest.raises(BadFault):
        given.replace(["status", "nonsense"])
    assert given.texts() == ["hang"]
    given.add(["status=500"])
    assert given.texts() == ["hang", "status=500"]


def test_every_fault_is_explained():
    assert all(kind in ("flag", "number", "text") and len(text) > 10 for kind, text in ALL.values())

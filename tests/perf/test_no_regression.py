"""The hot paths cost no more instructions than their baseline, however busy the machine is."""

import shutil
import sys

import pytest

from bench import instructions
from bench.instructions import (
    CALIBRATION,
    Count,
    NotCounted,
    count,
    interpreter,
    judge,
    judge_surcharges,
    read_baseline,
)
from bench.loops import LOOPS


class TestJudge:
    BASELINE = {"relay": 2.0, "parser": 3.0}  # noqa: RUF012

    @staticmethod
    def counts(**ratios):
        return {CALIBRATION: Count(100, 1), **{name: Count(100 * ratio, ratio) for name, ratio in ratios.items()}}

    @pytest.mark.parametrize("relay", [1.0, 2.0, 2.29])
    def test_within_the_tolerance(self, relay):
        assert judge(self.counts(relay=relay, parser=3.0), self.BASELINE, 0.15) == []

    def test_a_regression_is_named_with_its_size(self):
        (found,) = judge(self.counts(relay=2.4, parser=3.0), self.BASELINE, 0.15)
        assert found.startswith("relay: ")
        assert "+20%" in found

    def test_a_loop_without_baseline_and_a_baseline_without_loop(self):
        found = judge(self.counts(relay=2.0, encoder=1.0), self.BASELINE, 0.15)
        assert found == ["encoder: has no baseline", "parser: is in the baseline and was not counted"]


@pytest.mark.parametrize(("instructions_of_both", "wrong"), [(109, 0), (111, 1)])
def test_a_surcharge_is_judged_by_the_same_run(instructions_of_both, wrong):
    counts = {"plain": Count(100, 2.0), "both": Count(instructions_of_both, 2.2)}
    found = judge_surcharges(counts, {"both": ("plain", 0.10)})
    assert len(found) == wrong
    assert all(text == "both: +11.0% to plain, +10% is allowed" for text in found)


def test_the_baseline_covers_every_loop():
    assert read_baseline(), "no baseline at all"
    for known, ratios in read_baseline().items():
        assert set(ratios) == set(LOOPS) - {CALIBRATION}, known


def test_no_valgrind_is_a_reason(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotCounted, match="valgrind is not installed"):
        count()


def test_loops_that_fail_are_not_taken_for_a_missing_tool(monkeypatch, tmp_path):
    """A loop that is out of step with the code must fail the check, not skip it."""
    fake = tmp_path / "valgrind"
    fake.write_text("#!/bin/sh\necho broken loop >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    with pytest.raises(RuntimeError, match="broken loop"):
        count()


@pytest.mark.slow
def test_no_regression():
    baseline = read_baseline().get(interpreter())
    try:
        counts = count()
    except NotCounted as error:
        pytest.skip(str(error))
    dear = judge_surcharges(counts)
    assert not dear, "\n".join(dear)
    if baseline is None:
        pytest.skip(
            f"no baseline for {interpreter()} in {instructions.BASELINE.name}: `python -m bench.instructions --save`"
        )
    found = judge(counts, baseline)
    assert not found, "\n".join([*found, "if that is meant: python -m bench.instructions --save", sys.version])

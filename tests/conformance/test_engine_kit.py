"""Every engine protocol against the kit."""

import pytest

pytest.register_assert_rewrite("engine_kit")

from engine_adapters import ADAPTERS  # noqa: E402
from engine_kit import EngineKit  # noqa: E402

SCENARIOS = (
    "streams",
    "answers_whole",
    "answers_in_one_token",
    "reports_its_stages",
    "gives_prefills_share_back_when_prefill_is_over",
    "serves_many_at_once",
    "uses_connections_again",
    "leaves_no_cycles",
    "leaves_no_cycles_when_it_fails",
    "leaves_no_cycles_when_it_is_cancelled",
    "passes_refusals_on",
    "names_who_failed_first",
    "tells_when_there_was_no_connection",
    "fails_before_output",
    "fails_after_output",
    "never_takes_a_cut_answer_for_a_whole_one",
    "goes_on_after_failures",
    "cancels_before_it_began",
    "a_cancelled_one_spares_the_others",
    "drops_what_comes_after_the_end",
    "drops_what_an_old_attempt_says",
    "keeps_bytes_as_they_are",
    "closes_while_requests_run",
)
STAGES = [(adapter, stage) for adapter in ADAPTERS for stage in adapter.stages]
each = pytest.mark.parametrize("adapter", ADAPTERS, ids=[adapter.name for adapter in ADAPTERS])


@each
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_engine_conforms(adapter, scenario):
    async with adapter() as made:
        kit = EngineKit(made)
        await getattr(kit, scenario)()
        await kit.leaves_nothing()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("adapter", "stage"), STAGES, ids=[f"{adapter.name}-{stage}" for adapter, stage in STAGES])
async def test_cancelled_in_each_stage(adapter, stage, stream):
    if adapter.name == "mindie" and stage == "decode" and not stream:
        stage = "transfer"  # decode says nothing before it says all
    async with adapter() as made:
        kit = EngineKit(made)
        await kit.cancels_in(stage, stream=stream)
        await kit.leaves_nothing()


def test_the_list_of_scenarios_is_whole():
    own = {name for name, value in vars(EngineKit).items() if callable(value) and not name.startswith("_")}
    assert own - {"run", "leaves_nothing", "cancels_in"} == set(SCENARIOS)

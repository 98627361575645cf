"""What can be configured, and what a configuration that cannot work is told before anything starts."""

from pathlib import Path

import pytest

from coordinator.config import ConfigError
from coordinator.engines.microserving import MicroservingEngine
from coordinator.parts import load_settings

CLUSTER = """cluster:
  engine: {engine}
  instances:
    - {{role: prefill, url: "http://10.0.0.1:1"}}
    - {{role: decode, url: "http://10.0.0.2:1", recv_rank: {rank}}}
{more}
"""


def load(folder, *, engine="microserving", rank="2", more=""):
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.format(engine=engine, rank=rank, more=more))
    return load_settings(path)


def engines(text, engine="microserving"):
    return f"engines:\n  {engine}: {{{text}}}"


@pytest.mark.parametrize(
    "text",
    ["mode: round-robin", "pd_balance_factor: 0", "pd_balance_factor: 0.000001", "max_preempts: 0", "prep_recv_s: 0.5"],
)
def test_settings_that_are_fine(tmp_path, text):
    assert load(tmp_path, more=engines(text)).cluster.instances


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pd_balance_factor: 1", "less than 1"),
        ("pd_balance_factor: -1", "0 or more"),
        ("pd_balance_factor: 1.5", "less than 1"),
        ("pd_balance_factor: half", "must be a number"),
        ("pd_balance_factor: true", "must be a number"),
        ("mode: disag", "must be disagg or round-robin"),
        ("max_preempts: -1", "whole number"),
        ("prep_recv_s: 0", "must be seconds"),
        ("remote_send_s: 1.0e+9", "must be seconds"),
        ("pd_balance_facto: 0", "did you mean 'pd_balance_factor'"),
        ("pd_balance_factor: 0.3", "pd_balance_factor needs a tokenizer"),
    ],
)
def test_settings_that_cannot_work(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, more=engines(text))


@pytest.mark.parametrize("rank", ["-1", "two", "true", "1.5"])
def test_ranks_that_are_none(tmp_path, rank):
    with pytest.raises(ConfigError, match=r"recv_rank: must be 0 or more"):
        load(tmp_path, rank=rank)


def test_a_decode_without_its_rank_is_told_with_its_line(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster:\n  engine: microserving\n  instances:\n    - {role: decode, url: 'http://10.0.0.2:1'}\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml:4: cluster.instances\[0\]: a decode instance needs recv_rank"):
        load_settings(path)
    path.write_text(path.read_text() + "engines: {microserving: {mode: round-robin}}\n")
    assert load_settings(path)


SECOND = '    - {{role: {role}, url: "http://10.0.0.3:1", recv_rank: 2{more}}}\n'


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_two_instances_of_one_world_cannot_have_one_rank(tmp_path, role):
    """Prefill would write one request's KV into the memory of the other engine."""
    with pytest.raises(
        ConfigError, match=r"cluster.yaml:6: cluster.instances\[2\]: it has the recv_rank of decode-10.0.0.2:1, "
    ):
        load(tmp_path, more=SECOND.format(role=role, more=""))


def test_two_worlds_have_ranks_of_their_own(tmp_path):
    assert load(tmp_path, more=SECOND.format(role="decode", more=", group: other"))
    assert load(tmp_path, more=SECOND.format(role="decode", more="") + engines("mode: round-robin"))


def test_the_defaults_are_all_there():
    assert MicroservingEngine.settings({}) == {
        "mode": "disagg", "pd_balance_factor": 0.0, "max_preempts": 8, "prep_recv_s": 60.0, "remote_send_s": 120.0,
        "cleanup_s": 10.0,
    }  # fmt: skip


def test_the_page_lists_the_settings_with_their_defaults():
    page = (Path(__file__).parents[4] / "docs/engines/microserving.md").read_text()
    for name, default in MicroservingEngine.settings({}).items():
        shown = f"{default:g}" if isinstance(default, float) else default
        assert f"| `{name}` | `{shown}` |" in page


# --- patterns by file


def write_pattern(folder, text="class Mine(Router):\n    pass\n"):
    (folder / "patterns").mkdir(exist_ok=True)
    (folder / "patterns/mine.py").write_text(f"from coordinator.sdk import Router, serve\n{text}")


def test_a_pattern_is_found_beside_the_configuration(tmp_path, monkeypatch):
    write_pattern(tmp_path, "class Mine(Router):\n    pass\nserve(model='/m', router_type=Mine)\n")
    monkeypatch.chdir("/")
    settings = load(
        tmp_path, engine='"patterns/mine.py:Mine"', more=engines("max_preempts: 2", '"patterns/mine.py:Mine"')
    )
    assert settings.cluster.engine == f"{tmp_path}/patterns/mine.py:Mine"
    assert settings.engines == {settings.cluster.engine: {"max_preempts": 2}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Other: pass\n", "has no attribute 'Mine'"),
        ("x = (\n", "was never closed"),
        ("1 / 0\n", "ZeroDivisionError.*line 2"),
    ],
)
def test_a_pattern_that_cannot_be_loaded_is_told(tmp_path, text, says):
    write_pattern(tmp_path, text)
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, engine='"patterns/mine.py:Mine"')


def test_a_pattern_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match="there is no Python file"):
        load(tmp_path, engine='"nowhere.py:Mine"')
    (tmp_path / "cluster.yaml").write_text('cluster: {engine: "nowhere.py:Mine"}\n')
    with pytest.raises(ConfigError, match=r"cluster.yaml:1: cluster.engine: .*there is no Python file"):
        load_settings(tmp_path / "cluster.yaml")

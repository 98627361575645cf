"""Tokenizers at the start: what is loaded, what stops it, and what engines are given."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from token_folders import write_folder

from coordinator import parts
from coordinator.config import ConfigError, Settings
from coordinator.core.instance import Address, Instance, Role
from coordinator.engines import engine_set
from coordinator.observability.metrics import Metrics
from coordinator.transport.client import HttpClient

FILE = """
cluster:
  tokenizer: default
  instances:
    - {role: prefill, url: 'http://10.0.0.1:1', model: m, tokenizer: own}
    - {role: decode, url: 'http://10.0.0.2:1'}
"""


@pytest.fixture
def path(tmp_path):
    write_folder(tmp_path / "default")
    write_folder(tmp_path / "own", "word_piece")
    made = tmp_path / "cluster.yaml"
    made.write_text(FILE)
    return made


def instance(**options):
    return Instance("d", Role.DECODE, Address("10.0.0.2", 1), "mindie", options=options)


async def test_those_of_the_configuration_are_there_from_the_start(path):
    tokenizers = parts.make_tokenizers(parts.load_settings(path))
    assert tokenizers.of(instance()) is tokenizers.for_model("other")
    assert tokenizers.of(instance(tokenizer=str(path.parent / "own"))) is tokenizers.for_model("m")
    await tokenizers.aclose()


async def test_processes_that_get_the_settings_as_json_find_the_same_folders(path):
    settings = Settings.model_validate_json(parts.load_settings(path).model_dump_json())
    tokenizers = parts.make_tokenizers(settings)
    assert tokenizers.for_model("m") is not None
    await tokenizers.aclose()


@pytest.mark.parametrize(
    ("folder", "where"), [("default", "3: cluster.tokenizer"), ("own", r"5: cluster.instances\[0\].tokenizer")]
)
def test_a_faulty_one_stops_the_start_and_names_its_key(path, folder, where):
    (path.parent / folder / "tokenizer.json").write_text("{}")
    settings = parts.load_settings(path)
    with pytest.raises(ConfigError, match=rf"cluster\.yaml:{where}: .*tokenizer\.json cannot be used"):
        parts.make_tokenizers(settings)


def test_missing_packages_are_a_problem_of_the_key(path, monkeypatch):
    monkeypatch.setattr(parts, "missing_extra", lambda: "install it")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:\d: cluster\..*tokenizer: install it"):
        parts.load_settings(path)
    path.write_text("cluster:\n")
    assert parts.load_settings(path).cluster.tokenizer is None


async def test_engines_are_given_them(monkeypatch):
    given = []

    class Engine:
        def __init__(self, context):
            given.append(context.tokenizers)

    monkeypatch.setattr(parts, "ENGINES", {"mindie": Engine})
    monkeypatch.setattr(engine_set, "load_engine", lambda name: Engine)
    monkeypatch.setattr(parts, "engine_settings", lambda name, given: given)
    settings = Settings()
    tokenizers = parts.make_tokenizers(settings)
    client = HttpClient(connect_s=1.0)
    parts.make_engines(settings, client, Metrics(["openai"]), tokenizers)
    assert given == [tokenizers]
    await client.aclose()

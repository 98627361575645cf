"""Folders of tokenizers: where their paths begin, what must be there, and what instances get of it."""

import pytest

from coordinator.config import ConfigError, Settings, instance_from_mapping, load, to_instances

INSTANCE = {"role": "prefill", "url": "http://10.0.0.1:1"}


@pytest.fixture
def folder(tmp_path):
    """A folder of a model beside a configuration file."""
    made = tmp_path / "llama"
    made.mkdir()
    (made / "tokenizer.json").write_text("{}")
    return made


def read(folder, cluster):
    path = folder.parent / "cluster.yaml"
    path.write_text(f"cluster:\n{cluster}\n  instances:\n    - {{role: prefill, url: 'http://10.0.0.1:1'}}\n")
    return load(path)


def as_given(_engine, options):
    return options


def test_a_path_begins_at_the_file_and_is_absolute_from_then_on(folder):
    settings = read(folder, "  tokenizer: llama")
    assert settings.cluster.tokenizer == str(folder)
    again = Settings.model_validate_json(settings.model_dump_json())
    assert again.cluster.tokenizer == str(folder)


def test_an_absolute_path_stays(folder):
    assert read(folder, f"  tokenizer: {folder}").cluster.tokenizer == str(folder)


def test_an_instance_has_its_own_among_its_options(folder):
    (folder.parent / "two.yaml").write_text(
        "cluster:\n  instances:\n"
        "    - {role: prefill, url: 'http://10.0.0.1:1', tokenizer: llama, inter_comm_port: 5}\n"
        "    - {role: decode, url: 'http://10.0.0.2:1'}\n"
    )
    instances = to_instances(load(folder.parent / "two.yaml"), as_given)
    assert [dict(one.options) for one in instances] == [{"tokenizer": str(folder), "inter_comm_port": 5}, {}]


def test_an_instance_that_comes_later_is_held_to_the_same(folder):
    settings = read(folder, "")
    later = instance_from_mapping({**INSTANCE, "tokenizer": "llama"}, settings, as_given)
    assert later.options == {"tokenizer": str(folder)}
    with pytest.raises(ValueError, match=r"tokenizer: no such folder: '.*/mistral'"):
        instance_from_mapping({**INSTANCE, "tokenizer": "mistral"}, settings, as_given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("missing", "no such folder: '.*/missing'"),
        ("empty", "the folder '.*/empty' has no tokenizer.json"),
        ("llama/tokenizer.json", "no such folder"),
        ('"a\\0b"', "must be the path of a folder"),
        ("5", "must be text, not 5"),
        ('""', "must not be empty"),
    ],
)
def test_what_is_no_folder_of_a_tokenizer_is_a_problem_with_its_line(folder, given, reason):
    (folder.parent / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"cluster\.yaml:2: cluster\.tokenizer: {reason}"):
        read(folder, f"  tokenizer: {given}")

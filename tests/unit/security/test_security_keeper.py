"""Keys from the configuration and from files, at the start, on a reload, and when a file changes."""

import logging

import pytest

from coordinator.config import ApiKey, Auth, ConfigError, ManagementKey, Settings, parse
from coordinator.parts import load_settings
from coordinator.security.checks import problems
from coordinator.security.files import FileWatch
from coordinator.security.keeper import KeyKeeper
from coordinator.security.keys import new_hash

A, B, C = (new_hash(f"key-of-{name}-0123456789") for name in "abc")


class World:
    def __init__(self):
        self.data, self.management, self.forgotten = [], [], []
        self.keeper = KeyKeeper(self.data.append, self.management.append, self.forgotten.append)

    @property
    def names(self):
        return None if self.data[-1] is None else {key.name: key.slot for key in self.data[-1]}


@pytest.fixture
def world():
    return World()


def auth(*keys, **others):
    return Auth(keys=tuple(ApiKey(name=name, hash=hashed) for name, hashed in keys), **others)


def test_without_keys_both_ports_are_open(world):
    world.keeper.apply(Auth())
    assert world.data == [None]
    assert world.management == [None]


def test_a_key_keeps_its_place_over_reloads(world):
    world.keeper.apply(auth(("a", A), ("b", B)))
    assert world.names == {"a": 0, "b": 1}
    world.keeper.apply(auth(("b", B), ("c", C)))
    assert world.names == {"b": 1, "c": 0}
    assert world.forgotten == ["a"]


def test_a_port_that_needed_a_key_is_never_opened_by_a_reload(world, caplog):
    world.keeper.apply(auth(("a", A), management_keys=(ManagementKey(name="m", hash=B),)))
    world.keeper.apply(Auth())
    assert world.data[-1] == ()
    assert world.management[-1] == ()
    assert "nobody may call" in caplog.text
    assert "nobody may manage" in caplog.text


def test_keys_of_a_file_come_beside_the_others(world, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f'keys:\n  - {{name: b, hash: "{B}", requests_per_minute: 5, max_in_flight: 2}}\n')
    world.keeper.apply(auth(("a", A), keys_file=str(file)))
    assert world.names == {"a": 0, "b": 1}
    assert (world.data[-1][1].requests_per_minute, world.data[-1][1].max_in_flight) == (5, 2)


def test_a_file_without_keys_lets_nobody_in(world, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("keys: []\n")
    world.keeper.apply(Auth(keys_file=str(file)))
    assert world.data == [()]


def test_a_file_that_changes_is_read_again_and_a_broken_one_is_not_used(world, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys.yaml"
    file.write_text(f'keys: [{{name: a, hash: "{A}"}}]\n')
    world.keeper.apply(Auth(keys_file=str(file)))
    watch = FileWatch("watch", world.keeper.files, world.keeper.reread, lambda: 1.0)
    watch.look()
    told = len(world.data)
    watch.look()
    assert len(world.data) == told
    fresh = tmp_path / "fresh"
    fresh.write_text(f'keys: [{{name: b, hash: "{B}"}}]\n')
    fresh.replace(file)  # as a mounted Secret is
    watch.look()
    assert world.names == {"b": 0}
    for broken in (
        "keys: [{name: b}]\n",
        "keys:\n  - &x\n",
        "",
        f'keys: [{{name: b, hash: "{B}"}}, {{name: b, hash: "{C}"}}]',
    ):
        file.write_text(broken)
        caplog.clear()
        watch.look()
        assert world.names == {"b": 0}, broken
        assert "keys not read again, those before stay valid" in caplog.text
    file.unlink()
    watch.look()
    assert world.names == {"b": 0}
    file.write_text(f'keys: [{{name: c, hash: "{C}"}}]\n')
    watch.look()
    assert world.names == {"c": 0}


def test_a_key_in_the_file_and_in_the_configuration_is_refused(world, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f'keys: [{{name: other, hash: "{A}"}}]\n')
    with pytest.raises(ConfigError, match="'a' and 'other' are the same key"):
        world.keeper.apply(auth(("a", A), keys_file=str(file)))
    assert world.data == []


def test_a_file_that_cannot_be_used_stops_the_start_with_its_key_path(tmp_path):
    (tmp_path / "keys.yaml").write_text("keys: [{name: a}]\n")
    (tmp_path / "cluster.yaml").write_text("auth:\n  keys_file: keys.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path / "cluster.yaml")
    assert caught.value.problems[0].path_in_file == "auth.keys_file"
    assert caught.value.problems[0].line == 2
    assert "keys[0].hash: missing" in str(caught.value)


def test_the_settings_without_keys_have_no_problem():
    assert list(problems(Settings())) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: [{name: a, hash: my-plain-secret-key-1}]", "auth.keys[0].hash: must be sha256:HEX"),
        (f'keys: [{{name: "a b", hash: "{A}"}}]', "auth.keys[0].name: must be 1 to 64 characters"),
        (f'keys: [{{name: "-", hash: "{A}"}}]', "auth.keys[0].name: must be 1 to 64 characters"),
        (f'keys: [{{name: a, hash: "{A}"}}, {{name: a, hash: "{B}"}}]', "the name 'a' stands twice"),
        (f'keys: [{{name: a, hash: "{A}"}}, {{name: b, hash: "{A}"}}]', "'a' and 'b' are the same key"),
        (f'management_keys: [{{name: a, hash: "{A}", max_in_flight: 1}}]', "unknown key"),
        ("keys_file: nowhere.yaml", "auth.keys_file: '/"),
        ("engine_key_env: A B", "auth.engine_key_env: must be the name of a variable"),
    ],
)
def test_what_is_wrong_is_said_at_its_key_and_never_shows_a_key(text, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse(f"auth:\n  {text}\n", str(tmp_path / "c.yaml"))
    assert words in str(caught.value)
    assert "my-plain-secret" not in str(caught.value)


def test_there_are_not_too_many_salted_ones():
    keys = ", ".join(f'{{name: k{i}, hash: "{new_hash(f"key-number-{i:020}", salted=True)}"}}' for i in range(65))
    with pytest.raises(ConfigError, match="65 keys with a salt, at most 64"):
        parse(f"auth: {{keys: [{keys}]}}\n")

"""Instance entries to instances."""

import time

import pytest

from coordinator.config import ConfigError, OptionError, Settings, instance_from_mapping, parse, to_instances
from coordinator.core.instance import Address, Capacity, Instance, Role

ENTRIES = """cluster:
  engine: mindie
  model: m
  instances:
    - role: prefill
      url: http://10.0.0.1:9001
      inter_comm_port: 7
    - role: decode
      url: https://[::1]
      id: d0
      engine: vllm
      model: other
      max_requests: 8
      group: 3
"""
VALID = ("inter_comm_port",)


def as_given(engine, options):
    return options


def strict(engine, options):
    """What an engine with one key does."""
    for key, value in options.items():
        if key not in VALID:
            raise OptionError(key, f"{engine} has no such key", VALID)
        if not isinstance(value, int):
            raise OptionError(key, "must be a whole number", VALID)
    return {"port": options.get("inter_comm_port", 0)}


def test_instances_have_the_values_of_the_file_and_the_common_ones():
    assert to_instances(parse(ENTRIES), as_given) == (
        Instance(
            "prefill-10.0.0.1:9001",
            Role.PREFILL,
            Address("10.0.0.1", 9001),
            "mindie",
            "m",
            options={"inter_comm_port": 7},
        ),
        Instance(
            "d0",
            Role.DECODE,
            Address("::1", 443, tls=True),
            "vllm",
            "other",
            group="3",
            capacity=Capacity(max_requests=8),
        ),
    )


def test_an_id_made_of_an_ipv6_address_keeps_the_brackets():
    (instance,) = to_instances(parse("cluster: {instances: [{role: decode, url: 'http://[::1]:5'}]}"), as_given)
    assert instance.id == "decode-[::1]:5"


def test_options_are_what_the_engine_makes_of_them():
    first, second = to_instances(parse(ENTRIES), strict)
    assert (first.options, second.options) == ({"port": 7}, {"port": 0})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("inter_com_port: 7", "inter_com_port: unknown key; did you mean 'inter_comm_port'?"),
        ("modle: x", "modle: unknown key; did you mean 'model'?"),
        ("inter_comm_port: x", "inter_comm_port: must be a whole number"),
        (
            "zzz: 7",
            (
                "zzz: unknown key; known keys: "
                "role, url, id, engine, model, tokenizer, max_requests, group, ca_file, "
                "cert_file, key_file, server_name, engine_key_env, engine_key_file, inter_comm_port"
            ),
        ),
    ],
)
def test_keys_that_the_engine_refuses_have_their_line(line, told):
    text = ENTRIES.replace("inter_comm_port: 7", line)
    with pytest.raises(ConfigError) as caught:
        to_instances(parse(text, "c.yaml"), strict)
    assert str(caught.value) == f"c.yaml:7: cluster.instances[0].{told}"
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml", validate=strict)
    assert str(caught.value) == f"c.yaml:7: cluster.instances[0].{told}"


def test_an_engine_without_keys_gets_the_nearest_common_key_shown():
    def refuse(engine, options):
        raise OptionError("modle", "unknown key")

    with pytest.raises(ValueError, match=r"^modle: unknown key; did you mean 'model'\?$"):
        instance_from_mapping({"role": "hybrid", "url": "http://a:1", "modle": "x"}, Settings(), refuse)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "inter_comm_port must be\n at most 9",
            "7: cluster.instances[0].inter_comm_port: inter_comm_port must be at most 9",
        ),
        ("not on this platform", "5: cluster.instances[0]: not on this platform"),
        ("", "5: cluster.instances[0]: the engine refuses its keys"),
    ],
)
def test_other_value_errors_are_told_with_the_key_that_they_name(message, told):
    def refuse(engine, options):
        if options:
            raise ValueError(message)
        return options

    with pytest.raises(ConfigError) as caught:
        to_instances(parse(ENTRIES, "c.yaml"), refuse)
    assert str(caught.value) == f"c.yaml:{told}"


def test_every_refused_instance_is_told():
    with pytest.raises(ConfigError) as caught:
        to_instances(parse(ENTRIES + "      x: 1\n" + "      y: 1\n"), lambda engine, options: strict("e", {"z": 1}))
    assert len(caught.value.problems) == 2


def test_instance_of_the_management_plane_is_the_one_of_the_file():
    settings = parse(ENTRIES)
    body = {"role": "prefill", "url": "http://10.0.0.1:9001", "inter_comm_port": 7}
    assert instance_from_mapping(body, settings, as_given) == to_instances(settings, as_given)[0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([], "an instance must be a mapping with at least the keys role and url"),
        ({}, "role: missing; this key is required; url: missing; this key is required"),
        (
            {"rolle": "prefill", "url": "a:1"},
            (
                "rolle: unknown key; did you mean 'role'?; "
                "url: the URL must begin with http:// or https://; did you mean 'http://a:1'?"
            ),
        ),
        (
            {"role": "decode", "url": "http://a:1", "inter_com_port": 1},
            "inter_com_port: unknown key; did you mean 'inter_comm_port'?",
        ),
        ({"role": "decode", "url": "http://a:1", 3: 4}, "keys must be text"),
        ({"role": "decode", "url": "http://a:1", "max_requests": 0}, "max_requests: must be at least 1, not 0"),
    ],
)
def test_faulty_instance_of_the_management_plane(body, told):
    with pytest.raises(ValueError, match=r".*") as caught:
        instance_from_mapping(body, Settings(), strict)
    assert str(caught.value) == told


def test_a_thousand_instances_load_fast():
    text = "cluster:\n  instances:\n" + "".join(
        f"    - role: decode\n      id: d{i}\n      url: http://10.0.{i // 250}.{i % 250}:9001\n"
        "      inter_comm_port: 3\n"
        for i in range(1000)
    )
    took = []
    for _ in range(3):  # one of them may be in the way of a look for garbage
        start = time.process_time()
        assert len(to_instances(parse(text), strict)) == 1000
        took.append(time.process_time() - start)
    assert min(took) < 0.5


def test_only_the_file_names_code_to_load():
    body = {"role": "hybrid", "url": "http://a:1", "engine": "os:system"}
    with pytest.raises(ValueError, match="only the configuration file may name code"):
        instance_from_mapping(body, Settings(), as_given)
    named = (
        parse("cluster: {engine: 'os:system'}\n"),
        parse("engines: {'os:system': {}}\n"),
        parse("cluster: {instances: [{role: hybrid, url: 'http://b:1', engine: 'os:system'}]}\n"),
    )
    for settings in named:
        assert instance_from_mapping(body, settings, as_given).engine == "os:system"


class TestEngineSettings:
    """The section `engines`."""

    def test_they_are_checked_by_their_engine_and_kept(self):
        text = "engines:\n  mindie:\n    inter_comm_port: 7\n  vllm:\n"
        assert parse(text, validate_engine=strict).engines == {"mindie": {"inter_comm_port": 7}, "vllm": {}}
        assert parse("engines:\n").engines == {}

    def test_what_an_engine_refuses_is_told_with_its_line(self):
        with pytest.raises(ConfigError) as caught:
            parse("engines:\n  mindie:\n    inter_com_port: 7\n", validate_engine=strict)
        line = "cluster.yaml:3: engines.mindie.inter_com_port: unknown key; did you mean 'inter_comm_port'?"
        assert str(caught.value) == line

    def test_an_unknown_engine_has_no_settings(self):
        with pytest.raises(ConfigError, match=r"engines.mindy: .*did you mean 'mindie'"):
            parse("engines:\n  mindy: {}\n", validate_engine=strict)

    def test_they_survive_the_way_to_a_worker(self):
        settings = parse("engines:\n  vllm:\n    deep: [1, {a: null}]\n")
        assert Settings.model_validate_json(settings.model_dump_json()).engines == settings.engines

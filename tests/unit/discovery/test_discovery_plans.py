"""From settings to sources: names, what makes one another one, and what is wrong before anything is asked."""

import importlib.util
import subprocess
import sys

import pytest

from coordinator.config import ConfigError, instance_from_mapping, notes, parse
from coordinator.discovery import make_plans, problems
from coordinator.parts import load_settings, wanted_engines

from discovery_world import validate  # isort: skip

TEXT = """
cluster:
  engine: vllm
  instances: [{role: prefill, url: "http://10.0.0.9:1"}]
discovery:
  files: [/x/*.yaml]
  dns:
    - {name: a.test, role: prefill, port: 1}
    - {name: a.test, role: decode, port: 2}
  kubernetes:
    - {namespace: engines, label_selector: app=vllm}
    - {kind: endpointslices}
"""


def plans(text):
    return make_plans(parse(text), lambda keys: None, validate)


def test_each_source_has_a_name_of_its_own():
    assert list(plans(TEXT)) == [
        "files:/x/*.yaml",
        "dns:a.test",
        "dns:a.test#2",
        "kubernetes:engines/pods?app=vllm",
        "kubernetes:endpointslices",
    ]


def test_building_them_asks_nobody():
    for plan in plans(TEXT.replace("/x/*.yaml", "/nowhere/x.yaml")).values():
        assert callable(plan.make().run)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("10.0.0.9", "10.0.0.8", set()),  # instances of the configuration have nothing to do with them
        ("port: 2", "port: 3", {"dns:a.test#2"}),
        ("engine: vllm", "engine: sglang", set(plans(TEXT))),  # instances that name none are others then
    ],
)
def test_what_makes_a_source_another_one(old, new, changed):
    before, after = plans(TEXT), plans(TEXT.replace(old, new))
    assert {name for name in before if before[name].given != after[name].given} == changed


@pytest.mark.parametrize(
    ("module", "section", "extra"), [("dns", "dns", "dns"), ("kubernetes_asyncio", "kubernetes", "k8s")]
)
def test_a_missing_extra_is_told(monkeypatch, module, section, extra):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else found(name))
    told = list(problems(parse(TEXT), lambda settings, keys: None))
    assert told == [(("discovery", section), f"needs more packages: pip install 'pd-coordinator[{extra}]'")]


def test_nothing_of_an_extra_is_imported_before_it_is_needed():
    code = "import coordinator.app, sys; print([m for m in ('dns', 'kubernetes_asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_keys_that_the_engine_refuses_are_told_at_the_start(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT.replace("port: 2}", "port: 2, options: {bootstrap_prt: 1}}").replace("vllm", "sglang", 1))
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert "cluster.yaml:9: discovery.dns[1].options: bootstrap_prt" in str(caught.value)


def test_an_engine_that_only_a_source_names_is_made():
    text = TEXT.replace("{kind: endpointslices}", "{kind: endpointslices, engine: 'instances.tokens:Odd'}")
    with pytest.raises(ValueError, match=r"instances.tokens:Odd"):
        wanted_engines(parse(text))
    keys = {"role": "decode", "url": "http://a:1", "engine": "instances.tokens:Odd"}
    assert instance_from_mapping(keys, parse(text), validate).engine == "instances.tokens:Odd"


def test_sources_are_reason_enough_to_have_no_instances():
    assert notes(parse(TEXT)) == ()
    assert notes(parse("discovery: {files: [x.yaml]}\n")) == ()
    assert notes(parse("discovery:\n  files: []\n  dns:\n  kubernetes:\n")) != ()

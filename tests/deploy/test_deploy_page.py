"""docs/deploy.md: its files, values and commands are ones that work."""

import itertools
import re
import shlex
import tomllib
from unittest.mock import MagicMock

import pytest
import yaml
from helm_process import CHART, NAMESPACE, HelmError
from manifests import ROOT, cluster_yaml, one, pod
from test_repo_links import dead

from coordinator import cli
from coordinator.config import Settings, parse
from coordinator.discovery.plans import make_plans

PAGE = (ROOT / "docs/deploy.md").read_text()
ENGINES = ("vllm", "sglang", "mindie")


def blocks(info: str) -> list[str]:
    return re.findall(rf"^```{info}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


VALUES = [yaml.safe_load(text) for text in blocks("yaml values")]
FILES = [parse(text) for text in blocks("yaml")]
SHELL = "".join(blocks("sh") + blocks("sh test")).replace("\\\n", " ")


def commands(program: str) -> list[list[str]]:
    return [shlex.split(line) for line in SHELL.splitlines() if line.split()[:1] == [program]]


def test_each_engine_has_its_file_and_its_values():
    assert [settings.cluster.engine for settings in FILES[1:]] == list(ENGINES)
    assert [values["config"]["cluster"]["engine"] for values in VALUES] == list(ENGINES)


@pytest.mark.parametrize("values", VALUES, ids=ENGINES)
def test_values_become_a_file_that_is_right(helm, values):
    settings = parse(cluster_yaml(helm, values))
    assert settings.cluster.engine == values["config"]["cluster"]["engine"]
    assert helm.lint(values)["errors"] == []


def test_values_for_discovery_find_pods_with_the_labels_that_are_shown(helm):
    (values,) = map(yaml.safe_load, blocks("yaml discovery values"))
    (shown,) = map(yaml.safe_load, blocks("yaml discovery pod"))
    assert helm.lint(values)["errors"] == []
    settings = parse(cluster_yaml(helm, values))
    (source,) = settings.discovery.kubernetes
    labels = shown["metadata"]["labels"]
    assert [f"{key}={value}" for key, value in labels.items() if key != source.role_label] == [source.label_selector]
    assert labels[source.role_label] == "prefill"
    assert pod(helm, values)["spec"]["automountServiceAccountToken"] is True
    assert one(helm, "Role", values)["metadata"]["namespace"] == NAMESPACE
    (name,) = make_plans(settings, make=MagicMock(), validate=MagicMock())
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL))
def test_examples_of_the_chart_page_are_values_or_a_rule_of_the_adapter(helm, text):
    given = yaml.safe_load(text)
    if "rules" in given:
        (rule,) = given["rules"]
        metric = one(
            helm,
            "HorizontalPodAutoscaler",
            {"config": {"cluster": {"engine": "vllm"}}, "autoscaling": {"enabled": True}},
        )
        name = metric["spec"]["metrics"][0]["pods"]["metric"]["name"]
        assert rule["seriesQuery"].startswith(f"{name}{{")
        assert rule["name"]["matches"] == f"^{name}$"
    else:
        assert helm.render(given)


def test_the_notes_are_those_of_the_chart(helm):
    (shown,) = blocks("text notes")
    assert helm.render(VALUES[0], "pd-coordinator")["pd-coordinator/templates/NOTES.txt"].strip() == shown.strip()


def test_the_message_of_a_mistyped_value_is_real(helm):
    (shown,) = re.findall(r"A mistyped value stops here, too: `(.*?)`", PAGE)
    with pytest.raises(HelmError) as caught:
        helm.render({"replicas": 2})
    assert shown in str(caught.value)


def test_helm_is_told_of_files_that_there_are():
    found = commands("helm")
    assert {command[1] for command in found} == {"install", "template"}
    for command in found:
        assert command[2] == "pd-coordinator"
        assert (ROOT / command[3]).samefile(CHART)
        if "--show-only" in command:
            assert (CHART / command[command.index("--show-only") + 1]).exists()


def test_the_container_gets_what_the_unit_and_the_chart_give():
    build, check, run = commands("docker")[:3]
    image = build[build.index("--tag") + 1]
    assert (ROOT / build[build.index("--file") + 1]).exists()
    assert run[-1] == image
    assert check[check.index(image) + 1 :] == ["check", "--config", "/etc/pd-coordinator/cluster.yaml"]
    options = dict(itertools.pairwise(run))
    assert float(options["--stop-timeout"]) >= Settings().timeouts.drain_s + 10
    assert options["--ulimit"] == "nofile=65536:65536"
    assert options["--cap-drop"] == "ALL"
    assert "--read-only" in run
    published = [run[at + 1] for at, word in enumerate(run) if word == "--publish"]
    assert published == ["1025:1025", "127.0.0.1:1026:1026"]


def test_the_compose_file_does_the_same():
    (text,) = blocks("yaml compose")
    (service,) = yaml.safe_load(text)["services"].values()
    args = cli._parser().parse_args(service["command"])
    (volume,) = service["volumes"]
    assert str(args.config).startswith(volume.split(":")[1])
    assert float(service["stop_grace_period"].removesuffix("s")) >= Settings().timeouts.drain_s + 10
    assert service["ports"] == ["1025:1025", "127.0.0.1:1026:1026"]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["ulimits"]["nofile"] == 65536


def test_every_extra_that_a_user_may_need_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev", "bench"}
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| ", PAGE.partition("| extra | for |")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert {name for row in rows for name in re.findall(r"\w+", row)} == extras
    image = (ROOT / "docker/Dockerfile").read_text()
    assert set(re.findall(r"\w+", re.findall(r'"\.\[([\w,]+)\]"', image)[0])) == extras


def test_the_commands_of_the_program_are_ones_it_takes():
    program = "/opt/pd-coordinator/bin/pd-coordinator"
    found = commands(program)
    assert {command[1] for command in found} == {"--version", "check", "doctor", "instance"}
    for command in found:
        if command[1] != "--version":
            cli._parser().parse_args(command[1:])


def test_versions_named_are_this_one():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert set(re.findall(r"pd-coordinator[: ](\d+\.\d+\.\d+)", PAGE)) == {version}


def test_links_of_the_chart_page_lead_somewhere():
    assert dead(CHART / "README.md") == []

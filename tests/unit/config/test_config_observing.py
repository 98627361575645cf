"""The section `metrics`."""

import pytest

from coordinator.config import ConfigError, parse


def test_an_empty_list_is_the_default():
    engines = parse("metrics:\n  engines:\n    scrape: true\n    allow:\n").metrics.engines
    assert (engines.scrape, engines.allow) == (True, ("*",))


def test_names_of_metrics():
    allow = parse('metrics: {engines: {allow: ["vllm:*", up]}}').metrics.engines.allow
    assert allow == ("vllm:*", "up")


@pytest.mark.parametrize("name", ["", "a b", "x{", "[a]", "é"])
def test_what_is_no_name_of_a_metric(name):
    with pytest.raises(ConfigError, match=r"metrics\.engines\.allow\[0\]: must be the name of a metric"):
        parse(f'metrics: {{engines: {{allow: ["{name}"]}}}}')

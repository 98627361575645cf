"""The section `tracing`, and headers out of the environment."""

import pytest

from coordinator.config import ConfigError, Settings, parse, tracing_headers
from coordinator.observability import tracing
from coordinator.parts import load_settings


def settings(**keys) -> Settings:
    return Settings.model_validate({"tracing": keys})


def test_off_by_default():
    assert settings().tracing.endpoint is None
    assert tracing_headers(settings().tracing) == {}


@pytest.mark.parametrize("url", ["http://collector:4318/v1/traces", "https://[::1]/x?y=1", "http://10.0.0.1"])
def test_endpoints(url):
    assert settings(endpoint=url).tracing.endpoint == url


@pytest.mark.parametrize(
    "url", ["", "collector:4318", "grpc://a:1", "http://", "http://a:0/", "http://a:x/", "http://a b/"]
)
def test_what_is_no_endpoint(url):
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: must be an address like"):
        parse(f"tracing: {{endpoint: '{url}'}}")


def test_a_password_does_not_stand_in_the_file():
    with pytest.raises(ConfigError) as caught:
        parse("tracing: {endpoint: 'http://user:secret@a/'}")
    assert "secret" not in str(caught.value)
    assert "headers_env" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a=b", {"a": "b"}),
        ("Authorization=Bearer%20xyz, X-Id = 7 ,", {"Authorization": "Bearer xyz", "X-Id": "7"}),
        ("a=b=c", {"a": "b=c"}),
    ],
)
def test_headers(monkeypatch, text, expected):
    monkeypatch.setenv("TRACE_HEADERS", text)
    assert tracing_headers(settings(headers_env="TRACE_HEADERS").tracing) == expected


@pytest.mark.parametrize("text", ["secret", "=secret", "a b=secret", "a=secret%0d%0ab: c", "a=s\u00e9cret"])
def test_bad_headers_are_not_quoted(monkeypatch, text):
    monkeypatch.setenv("TRACE_HEADERS", text)
    with pytest.raises(ValueError, match=r"^the variable TRACE_HEADERS must hold name=value,name=value$"):
        tracing_headers(settings(headers_env="TRACE_HEADERS").tracing)


@pytest.mark.parametrize("name", ["", "a-b", "$X", "1A"])
def test_names_of_variables(name):
    with pytest.raises(ConfigError, match=r"tracing\.headers_env"):
        parse(f"tracing: {{headers_env: '{name}'}}")


def load(tmp_path, text):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return load_settings(file)


def test_a_variable_that_is_missing_stops_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("TRACE_HEADERS", raising=False)
    text = "tracing:\n  endpoint: http://a/\n  headers_env: TRACE_HEADERS\n"
    with pytest.raises(ConfigError, match=r"cluster\.yaml:3: tracing\.headers_env: the environment has no variable"):
        load(tmp_path, text)


def test_without_the_extra_the_start_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "missing_extra", lambda: "install it")
    assert load(tmp_path, "tracing: {sample_ratio: 0.5}").tracing.sample_ratio == 0.5
    with pytest.raises(ConfigError, match=r"cluster\.yaml:2: tracing\.endpoint: install it"):
        load(tmp_path, "tracing:\n  endpoint: http://a/\n")

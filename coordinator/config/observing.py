"""The sections `metrics` and `tracing`: what else is collected, and where it goes."""

import os
import re
from typing import Annotated, Any
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, Field, model_validator

from .errors import Refusal, shown
from .fields import Period, Size, Text
from .section import Section
from .security import Variable

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 §5.6.2
_HEADER_VALUE = re.compile(r"[ -~]*")
_PATTERN = re.compile(r"[a-zA-Z0-9_:*]{1,200}")


def _metric_pattern(text: str) -> str:
    if _PATTERN.fullmatch(text):
        return text
    raise Refusal(f"must be the name of a metric, with * for any characters; not {shown(text)}")


def _endpoint(text: str) -> str:
    plain = all("!" <= char <= "~" for char in text)
    parts = _split(text) if plain else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refusal(f"must be an address like http://collector:4318/v1/traces, not {shown(text)}")
    if "@" in parts.netloc:
        raise Refusal("the address must not hold a user name or password", "name a variable in tracing.headers_env")
    return text


def _split(text: str) -> SplitResult | None:
    """The parts of a URL; None where its host or port cannot be one."""
    try:
        parts = urlsplit(text)
        usable = parts.port != 0
    except ValueError:
        return None
    return parts if usable else None


MetricPattern = Annotated[str, AfterValidator(_metric_pattern)]


class EngineMetrics(Section):
    """The instances' own metrics, passed on."""

    scrape: bool = Field(default=False, description="true: instances' own metrics are served under /metrics/engines")
    interval_s: Period = Field(15, description="seconds from one question to the next, for each instance")
    timeout_s: Period = Field(5, description="seconds an instance may take to answer")
    max_bytes: Size = Field(1048576, description="bytes of an answer; a longer one is not read")
    allow: Annotated[tuple[MetricPattern, ...], Field(strict=False)] = Field(
        ("*",), description="names of the metrics that are passed on; * stands for any characters"
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_list_is_default(cls, value: Any) -> Any:
        """A list whose items are all commented out is null in YAML."""
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None or key != "allow"}


class Metrics(Section):
    """What is counted beside the coordinator's own metrics."""

    engines: EngineMetrics = Field(EngineMetrics(), description="the instances' own metrics")


class Tracing(Section):
    """Traces of requests, for a collector that speaks OTLP."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(
        None, description="where traces go (OTLP over HTTP): http[s]://host:4318/v1/traces; null: off"
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        1, description="share of requests that are traced, where their client has not decided"
    )
    service_name: Text = Field("pd-coordinator", description="what traces call this service")
    headers_env: Variable | None = Field(
        None, description="variable with headers for the endpoint: name=value,name=value"
    )


def tracing_headers(tracing: Tracing) -> dict[str, str]:
    """The headers that the variable `headers_env` holds (W3C Baggage form, as in `OTEL_EXPORTER_OTLP_HEADERS`).

    Raises:
        ValueError: there is no such variable, or it holds something else; the sentence does not quote it.
    """
    name = tracing.headers_env
    if name is None:
        return {}
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"the environment has no variable {name}")
    headers: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, mark, value = part.partition("=")
        key, value = key.strip(), unquote(value.strip())
        if not mark or not _HEADER_NAME.fullmatch(key) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the variable {name} must hold name=value,name=value")
        headers[key] = value
    return headers

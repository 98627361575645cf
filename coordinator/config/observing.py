"""The section `metrics`: what is collected beside the coordinator's own metrics."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from .errors import Refusal, shown
from .fields import Period, Size
from .section import Section

_PATTERN = re.compile(r"[a-zA-Z0-9_:*]{1,200}")


def _metric_pattern(text: str) -> str:
    if _PATTERN.fullmatch(text):
        return text
    raise Refusal(f"must be the name of a metric, with * for any characters; not {shown(text)}")


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

"""What all sections of cluster.yaml share."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def empty_mapping(value: Any) -> Any:
    """A mapping whose keys are all commented out is null in YAML."""
    return {} if value is None else value


class Section(BaseModel):
    """What all sections share: unknown keys are errors, nothing is converted, nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: Any) -> Any:
        """A section whose keys are all commented out is null in YAML."""
        return empty_mapping(value)

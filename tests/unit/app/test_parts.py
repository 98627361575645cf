"""From settings to engines."""

import pytest

from coordinator.config import ConfigError
from coordinator.parts import load_settings


def test_an_engine_without_settings_takes_none(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("engines:\n  mindie: {}\n  vllm: {speed: 9}\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml:3: engines.vllm.speed: this engine has no settings$"):
        load_settings(path)
    path.write_text("engines:\n  mindie: {}\n")
    assert load_settings(path).engines == {"mindie": {}}

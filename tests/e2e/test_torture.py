"""A quick part of the acceptance harness, where there is one beside the project."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
CASES = "A07,A12,A17,B05,B06,C01,C07,E01,E07,F06,G09,H01,I07"
FOLDER = Path(os.environ.get("PD_TORTURE") or PROJECT.parent / "shared" / "torture")


@pytest.mark.slow
@pytest.mark.xdist_group("torture")
@pytest.mark.skipif(not (FOLDER / "__main__.py").is_file(), reason="no acceptance harness found (PD_TORTURE)")
@pytest.mark.skipif(importlib.util.find_spec("coordinator") is None, reason="the project is not installed")
def test_no_case_fails():
    command = [sys.executable, "-m", FOLDER.name, "--sut", "pd-coordinator", "--flavour", "mindie", "--cases", CASES]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "PD_PROJECT": str(PROJECT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " 0 failed" in done.stdout
    assert " 0 passed" not in done.stdout

"""deploy/systemd/pd-coordinator.service: systemd takes it, and it goes with the program's defaults."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from manifests import ROOT

from coordinator import cli
from coordinator.config import Settings

UNIT = ROOT / "deploy/systemd/pd-coordinator.service"
LINES = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
PROGRAM = "/opt/pd-coordinator/bin/pd-coordinator"
analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")


def values(key: str) -> list[str]:
    return [line.partition("=")[2] for line in LINES if line.partition("=")[0] == key]


def systemd_analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


def here(folder: Path, text: str) -> str:
    """The unit with this machine's program in place of the one that it will find."""
    path = folder / UNIT.name
    path.write_text(text.replace(PROGRAM, str(Path(sys.executable).with_name("pd-coordinator"))))
    return str(path)


@analyze
def test_systemd_has_nothing_to_say_about_it(tmp_path):
    done = systemd_analyze("verify", "--man=no", here(tmp_path, UNIT.read_text()))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@analyze
def test_systemd_would_have_something_to_say(tmp_path):
    done = systemd_analyze(
        "verify", "--man=no", here(tmp_path, UNIT.read_text().replace("LimitNOFILE", "LimitNoFiles"))
    )
    assert "LimitNoFiles" in done.stdout + done.stderr


@analyze
def test_it_is_as_closed_as_the_page_says():
    """Exposure from 0 to 10, times ten; a unit without any protection has 9.6."""
    if "--offline" not in systemd_analyze("--help").stdout:
        pytest.skip("this systemd looks at running units only")
    done = systemd_analyze("security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT))
    assert done.returncode == 0, done.stdout[-300:]
    told = re.search(r"`systemd-analyze security pd-coordinator` of systemd \d+ says ([\d.]+)", page())
    assert float(told[1]) <= 2.0


def page() -> str:
    return (ROOT / "docs/deploy.md").read_text()


def test_its_commands_are_ours():
    commands = [line for key in ("ExecStart", "ExecReload") for line in values(key) if line.startswith(PROGRAM)]
    assert len(commands) == 2
    for command in commands:
        args = cli._parser().parse_args(shlex.split(command)[1:])
        assert args.config == Path("/etc/pd-coordinator/cluster.yaml")


def test_a_reload_checks_first_and_then_sends_the_signal():
    check, signal = values("ExecReload")
    assert " check " in check
    assert signal == "/bin/kill -HUP $MAINPID"


def test_times_and_limits_go_with_the_defaults_of_the_program():
    settings = Settings()
    assert values("TimeoutStopSec") == [f"{settings.timeouts.drain_s + 10:g}"]
    assert int(values("LimitNOFILE")[0]) >= 3 * settings.limits.max_requests + 256
    # 2 is the exit status of a faulty file
    assert values("RestartPreventExitStatus") == [str(cli.EXIT_BAD_CONFIG)]
    # the supervisor alone gets the signal
    assert values("KillMode") == ["mixed"]


def test_it_is_no_root_and_gets_no_rights():
    assert values("User") == ["pd-coordinator"]
    assert values("NoNewPrivileges") == ["yes"]
    assert values("CapabilityBoundingSet") == [""]
    assert values("ProtectSystem") == ["strict"]

"""Helm's own engine, in a process of its own: calls as JSON lines in, answers as JSON lines out.

The engine is a Go library with threads and signal handlers of its own: the process of other tests is no place for it.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHART = Path(__file__).parents[2] / "deploy/helm/pd-coordinator"
NAMESPACE = "serving"


class HelmError(Exception):
    """What Helm would have printed before it gave up."""


class Helm:
    """One chart in Helm's hands.

    Args:
        chart: the chart's folder.
    """

    def __init__(self, chart: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(chart)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _call(self, name: str, values: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, values]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"Helm's process ended: {self._process.wait(10)}"
        found, error = json.loads(line)
        if error is not None:
            raise HelmError(error)
        return found

    def render(self, values: dict[str, Any] | None = None, release: str = "pd") -> dict[str, str]:
        """Rendered text by template; raises `HelmError` as `helm install` would."""
        rendered: dict[str, str] = self._call("render", {"values": values or {}, "release": release})
        return rendered

    def lint(self, values: dict[str, Any] | None = None) -> dict[str, Any]:
        """The report of `helm lint --strict`."""
        report: dict[str, Any] = self._call("lint", values or {})
        return report

    def values(self, values: dict[str, Any] | None = None) -> dict[str, Any]:
        """The values as templates see them."""
        merged: dict[str, Any] = self._call("values", values or {})
        return merged

    def package(self, folder: Path) -> Path:
        """Pack the chart into `folder`."""
        return Path(self._call("package", {"folder": str(folder)}))

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=20)


def engine() -> Iterator[Helm]:
    """The body of a fixture: the chart in Helm's hands."""
    if platform.machine() != "x86_64":
        pytest.skip("Helm's engine comes as a wheel for x86-64")
    helm = Helm(CHART)
    yield helm
    helm.close()


def serve(chart: str) -> None:
    """Answer calls until standard input ends."""
    import helm_python

    def answer(name: str, values: dict[str, Any]) -> object:
        if name == "lint":
            return helm_python.lint(chart, values, strict=True)
        if name == "package":
            return helm_python.package(chart, destination=values["folder"])
        with helm_python.Chart.load(chart) as loaded:
            if name == "values":
                return loaded.merge_values(values)
            return loaded.render(values["values"], name=values["release"], namespace=NAMESPACE)

    for line in sys.stdin:
        try:
            reply = [answer(*json.loads(line)), None]
        except helm_python.HelmError as error:
            reply = [None, str(error)]
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])

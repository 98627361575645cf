"""A real Prometheus on a free port, and questions for it."""

import http.client
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
from processes import HOST, Process, until

ROOT = Path(__file__).parents[2]
PROMETHEUS = shutil.which("prometheus")
START_S = 60.0


class Prometheus(Process):
    """Scrapes both pages of a coordinator and evaluates the rules, every half second.

    Args:
        management_port: of the coordinator.
        port: where it shall listen.
        folder: for its data, its configuration and its log.
    """

    def __init__(self, management_port: int, port: int, folder: Path) -> None:
        targets = [{"targets": [f"{HOST}:{management_port}"]}]
        job = {"honor_labels": True, "static_configs": targets}
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(ROOT / "deploy/prometheus/rules.yaml")],
            "scrape_configs": [
                {"job_name": "pd-coordinator", **job},
                {"job_name": "pd-engines", "metrics_path": "/metrics/engines", **job},
            ],
        }
        path = folder / "prometheus.yaml"
        path.write_text(yaml.safe_dump(config))
        self.port = port
        launched = "import os,sys; os.execv(sys.argv[1],sys.argv[1:])"
        options = [f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
        options.append(f"--web.listen-address={HOST}:{self.port}")
        super().__init__("prometheus", ["-c", launched, str(PROMETHEUS), *options], folder)
        until(self.is_ready, "Prometheus is ready", START_S)

    def is_ready(self) -> bool:
        """Whether it answers."""
        assert self.running, self.log()
        try:
            return self._get("/-/ready")[0] == http.client.OK
        except OSError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression at this moment; fails the test where it cannot be evaluated."""
        status, body = self._get("/api/v1/query?" + urlencode({"query": expression}))
        answer = json.loads(body)
        assert (status, answer["status"]) == (http.client.OK, "success"), f"{expression}\n{answer}"
        data = answer["data"]
        return [data["result"]] if data["resultType"] == "scalar" else data["result"]

    def values(self, expression: str) -> list[float]:
        """Their values."""
        return [float(one["value"][1]) for one in self.query(expression)]

    def rules(self) -> dict[str, dict[str, Any]]:
        """What has become of each rule, by name."""
        groups = json.loads(self._get("/api/v1/rules")[1])["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

"""The files of deploy/observe, with a real Prometheus and gateway: each query uses metrics and labels that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.fakes.ports import reserved_port
from tests.wire.catalog import EMBEDDED, PROJECT, serving
from tests.wire.gateways import OPERATOR_KEY, Gateway
from tests.wire.processes import ServerProcess

pytestmark = [pytest.mark.wire, pytest.mark.needs("prometheus")]

FOLDER = PROJECT / "deploy" / "observe"
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
QUERIES = {
    **{f"alert {rule['alert']}": rule["expr"] for rule in ALERTS},
    **{f"panel {panel['title']}: {n}": t["expr"] for panel in PANELS for n, t in enumerate(panel["targets"])},
}
OF_PROMETHEUS = {"instance", "job", "le"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    """A gateway that served an episode with a reward."""
    with serving(EMBEDDED, "math") as gateway:
        wish = {"env_name": "math", "split": "train", "index": 0}
        with httpx.Client(base_url=gateway.url, headers={"X-Session-ID": "one"}, timeout=HANG_S) as http:
            assert http.post("/create", json=wish).status_code == 200
            answer = {"name": "submit", "input": {"answer": "certainly not this"}}
            assert http.post("/math/call", json=answer).status_code == 200
            assert http.post("/delete").status_code == 200
        yield gateway


@pytest.fixture(scope="module")
def prometheus(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Run Prometheus with the project's files, and yield a client of its API once it has read the gateway's metrics."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "key").write_text(OPERATOR_KEY)
    text = (FOLDER / "prometheus.yml").read_text()
    for ours, own in (
        ("gateway:8080", gateway.url.removeprefix("http://")),
        ("/etc/prometheus/alerts.yml", str(FOLDER / "alerts.yml")),
        ("/tmp/key", str(folder / "key")),
        ("interval: 15s", "interval: 1s"),
    ):
        assert ours in text
        text = text.replace(ours, own)
    (folder / "prometheus.yml").write_text(text)
    program = subprocess.run(["scripts/prometheus"], cwd=PROJECT, capture_output=True, text=True, check=True)
    address = f"127.0.0.1:{reserved_port()}"
    command = [
        program.stdout.strip(),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    server = ServerProcess(command, variables={}, ready=r'msg="(Server is ready)', log=folder / "log")
    try:
        server.start()
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=HANG_S, trust_env=False) as http:

            def is_read() -> None:
                targets = http.get("/targets").json()["data"]["activeTargets"]
                assert [(one["health"], one["lastError"]) for one in targets] == [("up", "")]

            eventually_now(is_read)
            yield http
    finally:
        server.stop()


def asked(prometheus: httpx.Client, query: str) -> list[Any]:
    answer = prometheus.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    found: list[Any] = answer["data"]["result"]
    return found


def known_labels() -> dict[str, set[str]]:
    """Return the labels of each metric, as docs/reference.md lists them."""
    rows = re.findall(r"^\| (`gateway_.+?) \| (.*?) \|", (PROJECT / "docs" / "reference.md").read_text(), re.M)
    return {
        name: set(filter(None, map(str.strip, labels.split(","))))
        for names, labels in rows
        for name in re.findall(r"`(\w+)`", names)
    }


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_query_uses_metrics_and_labels_that_exist(prometheus: httpx.Client, query: str) -> None:
    asked(prometheus, query.replace("$environment", ".*").replace("$__rate_interval", "1m"))

    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bgateway_\w+", query)}
    labels = set(re.findall(r"(\w+)\s*=~?", query)) | set(
        filter(None, ",".join(re.findall(r"by \(([^)]*)\)", query)).replace(" ", "").split(","))
    )
    assert families or "up" in query
    assert families - prometheus.get("/metadata").json()["data"].keys() == set()
    assert labels - OF_PROMETHEUS - set().union(*(known_labels()[name] for name in families)) == set()


def test_the_rules_are_evaluated_without_an_error_and_each_says_what_to_do(prometheus: httpx.Client) -> None:
    def are_evaluated() -> None:
        rules = [rule for group in prometheus.get("/rules").json()["data"]["groups"] for rule in group["rules"]]
        assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys((r["alert"] for r in ALERTS), "ok")

    eventually_now(are_evaluated)
    assert [rule["alert"] for rule in ALERTS if not rule["annotations"]["action"]] == []


def test_prometheus_has_the_episode_of_the_gateway(prometheus: httpx.Client) -> None:
    (opened,) = asked(prometheus, "sum(gateway_sessions_opened_total)")
    (reward,) = asked(prometheus, "sum(gateway_episode_reward_count)")
    (calls,) = asked(prometheus, 'sum(gateway_calls_total{outcome="ok"})')

    assert [one["value"][1] for one in (opened, reward, calls)] == ["1", "1", "1"]


def test_the_files_of_the_compose_profile_are_those_of_this_test() -> None:
    services = yaml.safe_load((PROJECT / "compose.yaml").read_text())["services"]
    observing = {name: one for name, one in services.items() if one.get("profiles") == ["observe"]}
    mounted = {volume.split(":")[0] for one in observing.values() for volume in one["volumes"] if volume[0] == "."}

    assert set(observing) == {"prometheus", "grafana"}
    assert {PROJECT / Path(file) for file in mounted} == set(FOLDER.iterdir())

"""A full disk under the step log costs records, and never a step."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS, Gateway, short_folder

pytestmark = pytest.mark.faults
SIZE = 2 * 2**20


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of `SIZE` bytes, which only this test uses."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def lost(http: httpx.Client) -> float:
    lines = http.get("/metrics", headers={"X-API-Key": OPERATOR_KEY}).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("gateway_step_log_lost ")))


def test_steps_go_on_when_the_disk_of_the_log_is_full() -> None:
    folder = short_folder()
    with small_disk(folder / "log") as disk:
        filler = disk / "filler"
        gateway = Gateway(folder, {"GATEWAY_STEP_LOG": str(disk), "GATEWAY_ENVIRONMENTS": "probe"})
        gateway.start()
        try:
            headers = {"X-API-Key": TRAINER_KEYS["alice"], "X-Session-ID": "one"}
            with httpx.Client(base_url=gateway.url, headers=headers, trust_env=False, timeout=HANG_S) as http:
                assert http.post("/create", json={"env_name": "probe", "task_spec": {}}).status_code == 200
                step = {"name": "echo", "input": {"text": "x" * 1000}}
                assert http.post("/probe/call", json=step).status_code == 200
                shown = http.get("/admin/v1/episodes/one", headers={"X-API-Key": OPERATOR_KEY})  # writes what is queued
                assert len(json.loads(shown.text)["steps"]) == 1
                assert lost(http) == 0
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))

                for _ in range(50):
                    assert http.post("/probe/call", json=step).status_code == 200

                def records_are_lost() -> None:
                    assert lost(http) > 0

                eventually_now(records_are_lost)
                filler.unlink()
                before = lost(http)
                assert http.post("/probe/call", json=step).status_code == 200
                answer = http.get("/admin/v1/episodes/one", headers={"X-API-Key": OPERATOR_KEY})
                assert answer.status_code == 200, answer.text
                steps = json.loads(answer.text)["steps"]
                assert lost(http) == before
                assert len(steps) == 52 - before
                assert [step["outcome"] for step in steps] == ["ok"] * len(steps)
        finally:
            gateway.stop()
        assert "step_log_not_written" in gateway.log

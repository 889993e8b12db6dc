"""A Docker engine for one test, which the test may stop, kill and start again. It is never the machine's engine.

It has its own folders, socket, mounts and network. With ``--bridge=none`` an engine removes the ``docker0`` that it
finds, which may be another engine's, so it runs in its own namespaces. Its containers have no network. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import docker
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.runner import logs


class OwnEngine:
    """A ``dockerd``. Its data are on disk, its sockets in a folder with a short path."""

    def __init__(self, run: Path, data: Path) -> None:
        self.url = f"unix://{run}/docker.sock"
        self._run = run
        self._data = data
        self._log = data / "dockerd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Remove the leftovers of a killed engine, start the engine, and wait until it answers."""
        for left in (self._run / "docker.pid", self._run / "exec" / "containerd" / "containerd.pid"):
            left.unlink(missing_ok=True)
        folders = ["--data-root", str(self._data / "root"), "--exec-root", str(self._run / "exec")]
        meeting = ["--pidfile", str(self._run / "docker.pid"), "-H", self.url]
        alone = ["--bridge=none", "--iptables=false", "--ip-forward=false", f"--cgroup-parent=/{self._run.name}"]
        with self._log.open("ab") as log:
            logs.follow(self._log)
            self._process = subprocess.Popen(
                ["unshare", "-m", "--propagation", "private", "-n", "dockerd", *folders, *meeting, *alone],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually_now(self._expect_answer)

    def hang(self) -> None:
        """Suspend the engine until `go_on`: it accepts connections and does not answer."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill -9 the engine. Its containers go on until the next engine finds them."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def revive(self) -> None:
        """Let the engine answer again, whether it hangs or was killed."""
        assert self._process is not None
        if self._process.poll() is None:
            self.go_on()
        else:
            self.start()

    def close(self) -> None:
        """Remove the engine's containers and end it."""
        if self._process is None:
            return
        self.revive()  # only an engine can remove the containers that it started
        with self.client() as client:
            for entry in client.containers(all=True, quiet=True):
                client.remove_container(entry["Id"], force=True, v=True)
        self._process.terminate()
        try:
            self._process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def client(self) -> Iterator[docker.APIClient]:
        client = docker.APIClient(base_url=self.url, version="auto", timeout=HANG_S)
        try:
            yield client
        finally:
            client.close()

    def load(self, source: docker.APIClient, image: str) -> None:
        """Copy *image* from another engine."""
        with self.client() as client, tempfile.TemporaryFile() as packed:
            for chunk in source.get_image(image):
                packed.write(chunk)
            packed.seek(0)
            client.load_image(packed, quiet=True)  # type: ignore[no-untyped-call]  # no stubs

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _expect_answer(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-4000:]
        with socket.socket(socket.AF_UNIX) as visitor:  # the SDK leaves a connection open if the engine does not answer
            visitor.settimeout(5.0)
            try:
                visitor.connect(self.url.removeprefix("unix://"))
                visitor.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                answer = visitor.recv(64)
            except OSError as error:
                raise AssertionError(f"no answer yet: {error}") from error
            assert b" 200 " in answer, answer


@contextmanager
def own_engine() -> Iterator[OwnEngine]:
    """Yield a running engine. Afterwards the engine and all its objects are gone.

    On a machine without ``dockerd`` or root, the test is skipped, or fails in CI.
    """
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        reason = "an engine of a test's own needs root and dockerd (Debian: docker.io)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    run = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="eg-"))
    data = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="eg-"))
    engine = OwnEngine(run, data)
    try:
        engine.start()
        yield engine
    finally:
        try:
            engine.close()
        finally:
            for folder in (run, data):
                shutil.rmtree(folder, ignore_errors=True)
            for controller in Path("/sys/fs/cgroup").glob(f"*/{run.name}"):
                with suppress(OSError):
                    controller.rmdir()

"""A fake Docker engine: the Engine API over HTTP on a Unix socket, with the state of containers but no processes.

It answers the gateway's requests as the real engine does (statuses, messages, framing of logs and events). A test can
make it refuse or hold a request, break its event streams, or let containers die.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import socketserver
import struct
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.deadlines import HANG_S


@dataclass
class FakeContainer:
    id: str
    name: str
    body: dict[str, Any]
    state: str = "created"
    exit_code: int = 0
    output: bytes = b""
    out_of_memory: bool = False

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.body.get("Labels", {})
        return labels


@dataclass
class Hold:
    """A request that the engine holds until the test releases it."""

    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeEngine:
    """Serves on *socket_path* while the context is open. Operations have names such as ``POST create``."""

    def __init__(self, socket_path: Path) -> None:
        self.url = f"unix://{socket_path}"
        self.images = {"env-gateway/fake"}
        self.builds: dict[str, int] = {}
        """Number of rebuilds of each image."""
        self.info: dict[str, Any] = {"NCPU": 4, "MemTotal": 2**33, "Runtimes": {"runc": {"path": "runc"}}}
        self.registry = {"registry.example/far:1"}
        self.volumes = {"sockets": "/var/lib/docker/volumes/sockets/_data"}
        self.containers: dict[str, FakeContainer] = {}
        self.requests: list[str] = []
        self.dying = b""
        """Output that each started container writes before it dies immediately. Empty: containers live."""
        self.stubborn = False
        """True while containers ignore SIGTERM."""
        self.ahead_s = 0.0
        """Seconds by which the engine's clock is ahead."""
        self.blind = False
        """True while bind sources are on another machine."""
        self._socket_path = socket_path
        self._refusals: dict[str, list[Refusal]] = defaultdict(list)
        self._lost: set[str] = set()
        self._holds: dict[str, list[Hold]] = defaultdict(list)
        self._history: list[dict[str, Any]] = []
        self._streams: list[tuple[dict[str, Any], queue.Queue[bytes | None]]] = []
        self._lock = threading.RLock()
        self._followed = threading.Semaphore(0)
        self._server: _Server | None = None
        self._made = 0

    def __enter__(self) -> FakeEngine:
        self._server = _Server(str(self._socket_path), _Handler)
        self._server.engine = self
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._server is not None
        self.break_streams()
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._socket_path.unlink()

    # -- controls for tests

    def refuse(self, operation: str, status: int, message: str = "no") -> None:
        """Refuse the next *operation* with *status* and *message*."""
        self._refusals[operation].append(Refusal(status, message))

    def lose(self, operation: str) -> None:
        """Run the next *operation*, and break the connection instead of answering."""
        self._lost.add(operation)

    def lost(self, operation: str) -> bool:
        if operation not in self._lost:
            return False
        self._lost.remove(operation)
        return True

    def release(self) -> None:
        """Release all held requests."""
        for holds in self._holds.values():
            for hold in holds:
                hold.released.set()

    def hold(self, operation: str) -> Hold:
        """Hold the next *operation* until it is released. The engine runs it afterwards."""
        hold = Hold()
        self._holds[operation].append(hold)
        return hold

    def die(self, container: FakeContainer, exit_code: int = 137) -> None:
        """End a container."""
        with self._lock:
            container.state, container.exit_code = "exited", exit_code
            self._announce("die", container, exitCode=str(exit_code))

    def run_out_of_memory(self, container: FakeContainer, *, dies: bool = True, says_so: bool = True) -> None:
        """Kill a process in a container for lack of memory. If *dies*, the container ends, too.

        Without *says_so* the engine's event is lost.
        """
        with self._lock:
            container.out_of_memory = True
            if says_so:
                self._announce("oom", container)
            if dies:
                self.die(container)

    def restart(self) -> None:
        """End every container and forget all events, as a restarted engine does."""
        with self._lock:
            for container in self.containers.values():
                if container.state in ("running", "paused"):
                    container.state, container.exit_code = "exited", 255
            self._history.clear()
        self.break_streams()

    def break_streams(self) -> None:
        """Break every stream of events."""
        with self._lock:
            for _, stream in self._streams:
                stream.put(None)
            self._streams.clear()

    def followed(self) -> None:
        """Wait until one more stream of events is opened."""
        assert self._followed.acquire(timeout=HANG_S)

    def count(self, operation: str) -> int:
        """Return the number of requests of *operation*."""
        return self.requests.count(operation)

    def image_id(self, image: str) -> str:
        return "sha256:" + hashlib.sha256(f"{image} {self.builds.get(image, 0)}".encode()).hexdigest()

    # -- operations of clients

    def passed(self, operation: str) -> None:
        with self._lock:
            self.requests.append(operation)
            refusals, holds = self._refusals[operation], self._holds[operation]
            refusal = refusals.pop(0) if refusals else None
            hold = holds.pop(0) if holds else None
        if hold is not None:
            hold.reached.set()
            hold.released.wait(HANG_S)
        if refusal is not None:
            raise refusal

    def create(self, name: str, body: dict[str, Any]) -> FakeContainer:
        with self._lock:
            if body["Image"] not in self.images:
                raise Refusal(404, f"No such image: {body['Image']}")
            if any(other.name == name for other in self.containers.values()):
                raise Refusal(409, f'Conflict. The container name "/{name}" is already in use')
            for mount in body["HostConfig"].get("Mounts", []):
                if self.blind or not (Path(mount["Source"]).is_dir() or mount["Source"].startswith("/var/lib/docker")):
                    raise Refusal(
                        400, f'invalid mount config for type "bind": bind source path does not exist: {mount["Source"]}'
                    )
            self._made += 1
            container = FakeContainer(f"{self._made:064x}", name, body)
            self.containers[container.id] = container
            return container

    def find(self, reference: str) -> FakeContainer:
        for container in self.containers.values():
            if reference in (container.id, container.name):
                return container
        raise Refusal(404, f"No such container: {reference}")

    def start(self, container: FakeContainer) -> None:
        container.state = "running"
        container.output += b"the worker starts\n"
        if self.dying:
            container.output += self.dying
            self.die(container, exit_code=3)

    def pause(self, container: FakeContainer) -> None:
        if container.state == "paused":
            raise Refusal(409, f"Container {container.id} is already paused")
        if container.state != "running":
            raise Refusal(409, f"Container {container.id} is not running")
        container.state = "paused"

    def unpause(self, container: FakeContainer) -> None:
        if container.state != "paused":
            raise Refusal(500, f"Container {container.id} is not paused")
        container.state = "running"

    def kill(self, container: FakeContainer, name: str) -> None:
        if container.state == "paused":
            raise Refusal(409, f"Container {container.id} is paused")  # as engines before 20.10
        if container.state != "running":
            raise Refusal(409, f"Container {container.id} is not running")
        if name == "SIGKILL" or not self.stubborn:
            self.die(container, exit_code=143)

    def remove(self, container: FakeContainer) -> None:
        with self._lock:
            if container.state in ("running", "paused"):
                self.die(container)
            del self.containers[container.id]

    def follow(self, since_s: str, filters: dict[str, Any]) -> queue.Queue[bytes | None]:
        stream: queue.Queue[bytes | None] = queue.Queue()
        with self._lock:
            seconds, _, fraction = since_s.partition(".")
            since_ns = int(seconds or 0) * 10**9 + int((fraction or "0").ljust(9, "0"))
            for event in self._history:
                if event["timeNano"] >= since_ns and _matches(event, filters):
                    stream.put(json.dumps(event).encode() + b"\n")
            self._streams.append((filters, stream))
        self._followed.release()
        return stream

    def _announce(self, action: str, container: FakeContainer, **details: str) -> None:
        event = {
            "Type": "container",
            "Action": action,
            "status": action,
            "Actor": {"ID": container.id, "Attributes": {**container.labels, "name": container.name, **details}},
            "timeNano": time.time_ns() + int(self.ahead_s * 1e9),
        }
        self._history.append(event)
        for filters, stream in self._streams:
            if _matches(event, filters):
                stream.put(json.dumps(event).encode() + b"\n")


def has_labels(labels: dict[str, str], wanted: list[str]) -> bool:
    return all(labels.get(name) == value for name, _, value in (entry.partition("=") for entry in wanted))


def _matches(event: dict[str, Any], filters: dict[str, Any]) -> bool:
    return (
        event["Type"] in filters.get("type", [event["Type"]])
        and event["Action"] in filters.get("event", [event["Action"]])
        and has_labels(event["Actor"]["Attributes"], filters.get("label", []))
    )


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128  # the real engine uses the kernel's maximum; a full queue refuses connections
    engine: FakeEngine


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    unanswered = False

    ROUTES = (
        ("GET", r"/version", "version"),
        ("GET", r"/_ping", "ping"),
        ("GET", r"/info", "info"),
        ("POST", r"/containers/create", "create"),
        ("GET", r"/containers/json", "list"),
        ("GET", r"/containers/(?P<reference>[^/]+)/json", "inspect"),
        ("GET", r"/containers/(?P<reference>[^/]+)/logs", "logs"),
        ("POST", r"/containers/(?P<reference>[^/]+)/start", "start"),
        ("POST", r"/containers/(?P<reference>[^/]+)/kill", "kill"),
        ("POST", r"/containers/(?P<reference>[^/]+)/pause", "pause"),
        ("POST", r"/containers/(?P<reference>[^/]+)/unpause", "unpause"),
        ("DELETE", r"/containers/(?P<reference>[^/]+)", "container"),
        ("GET", r"/images/(?P<reference>.+)/json", "image"),
        ("POST", r"/images/create", "pull"),
        ("GET", r"/volumes/(?P<reference>[^/]+)", "volume"),
        ("GET", r"/events", "events"),
        ("POST", r"/containers/(?P<reference>[^/]+)/exec", "exec"),
        ("POST", r"/exec/(?P<reference>[^/]+)/start", "exec_start"),
        ("GET", r"/exec/(?P<reference>[^/]+)/json", "exec_inspect"),
    )

    def do_GET(self) -> None:
        try:
            self._route()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client left before the answer

    do_POST = do_GET
    do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _route(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = re.sub(r"^/v1\.\d+", "", unquote(url.path))
        for method, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                self.unanswered = self.server.engine.lost(f"{method} {name}")
                try:
                    self.server.engine.passed(f"{method} {name}")
                    getattr(self, f"_{name}")(**match.groupdict())
                except Refusal as refusal:
                    self._answer(refusal.status, {"message": str(refusal)})
                return
        self._answer(404, {"message": "page not found"})

    def _answer(
        self, status: int, value: object = None, *, raw: bytes | None = None, type: str = "application/json"
    ) -> None:
        if self.unanswered:
            self.close_connection = True
            return
        body = raw if raw is not None else b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if status != 204:
            self.send_header("content-type", type)
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _version(self) -> None:
        self._answer(200, {"ApiVersion": "1.41", "MinAPIVersion": "1.12", "Version": "20.10.24"})

    def _ping(self) -> None:
        self._answer(200, raw=b"OK", type="text/plain")

    def _info(self) -> None:
        self._answer(200, self.server.engine.info)

    def _create(self) -> None:
        container = self.server.engine.create(self.query.get("name", ""), json.loads(self.body))
        self._answer(201, {"Id": container.id, "Warnings": []})

    def _list(self) -> None:
        filters = json.loads(self.query.get("filters", "{}"))
        states = filters.get("status", [])
        containers = [
            c
            for c in list(self.server.engine.containers.values())
            if has_labels(c.labels, filters.get("label", [])) and (not states or c.state in states)
        ]
        self._answer(
            200, [{"Id": c.id, "Names": [f"/{c.name}"], "Labels": c.labels, "State": c.state} for c in containers]
        )

    def _inspect(self, reference: str) -> None:
        container = self.server.engine.find(reference)
        state = {
            "Running": container.state in ("running", "paused"),
            "Paused": container.state == "paused",
            "ExitCode": container.exit_code,
            "OOMKilled": container.out_of_memory,
            "StartedAt": "0001-01-01T00:00:00Z" if container.state == "created" else "2024-05-06T07:08:09.1Z",
        }
        config = {"Tty": False, "Labels": container.labels, "Image": container.body["Image"]}
        self._answer(200, {"Id": container.id, "Name": f"/{container.name}", "State": state, "Config": config})

    def _logs(self, reference: str) -> None:
        lines = self.server.engine.find(reference).output.splitlines(keepends=True)
        frames = [struct.pack(">BxxxL", 1, len(line)) + line for line in lines[-int(self.query["tail"]) :]]
        self._answer(200, raw=b"".join(frames), type="application/vnd.docker.raw-stream")

    def _start(self, reference: str) -> None:
        self.server.engine.start(self.server.engine.find(reference))
        self._answer(204)

    def _kill(self, reference: str) -> None:
        self.server.engine.kill(self.server.engine.find(reference), self.query.get("signal", "SIGKILL"))
        self._answer(204)

    def _pause(self, reference: str) -> None:
        self.server.engine.pause(self.server.engine.find(reference))
        self._answer(204)

    def _unpause(self, reference: str) -> None:
        self.server.engine.unpause(self.server.engine.find(reference))
        self._answer(204)

    def _container(self, reference: str) -> None:
        self.server.engine.remove(self.server.engine.find(reference))
        self._answer(204)

    def _image(self, reference: str) -> None:
        if reference not in self.server.engine.images:
            raise Refusal(404, f"No such image: {reference}")
        self._answer(200, {"Id": self.server.engine.image_id(reference), "RepoTags": [reference]})

    def _pull(self) -> None:
        tag, engine = self.query["tag"], self.server.engine
        image = f"{self.query['fromImage']}{'@' if tag.startswith('sha256:') else ':'}{tag}"
        progress: list[dict[str, str]] = [{"status": f"Pulling {image}"}]
        if image in engine.registry:
            engine.images.add(image)
        else:
            progress.append({"error": f"manifest for {image} not found"})
        self._answer(200, raw=b"".join(json.dumps(line).encode() + b"\r\n" for line in progress))

    def _volume(self, reference: str) -> None:
        if reference not in self.server.engine.volumes:
            raise Refusal(404, f"get {reference}: no such volume")
        self._answer(200, {"Name": reference, "Mountpoint": self.server.engine.volumes[reference]})

    def _events(self) -> None:
        stream = self.server.engine.follow(self.query.get("since", ""), json.loads(self.query.get("filters", "{}")))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while (event := stream.get()) is not None:
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        self.close_connection = True

    def _exec(self, reference: str) -> None:
        self._answer(201, {"Id": self.server.engine.find(reference).id})

    def _exec_start(self, reference: str) -> None:
        """Send the output ``out`` and ``error``, each on its own stream, in one packet with the response's head."""
        upgrade = b"101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp" if "upgrade" in self.headers else b"200 OK"
        head = b"HTTP/1.1 " + upgrade + b"\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"
        self.wfile.write(head + struct.pack(">BxxxL3s", 1, 3, b"out") + struct.pack(">BxxxL5s", 2, 5, b"error"))
        self.close_connection = True

    def _exec_inspect(self, reference: str) -> None:
        self._answer(200, {"ID": reference, "Running": False, "ExitCode": 127})

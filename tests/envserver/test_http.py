"""HTTP from hostile and clumsy clients, over real sockets."""

import asyncio
import gc
from types import TracebackType

import pytest
from envserver.http import connection as http
from envserver.http.connection import Connection

from tests.envserver.conftest import Start
from tests.envserver.eventually import eventually
from tests.envserver.raw import Wire, request
from tests.envserver.worlds import GATES, MathEnv


def chunked(*parts: bytes) -> bytes:
    head = (
        b"POST /num_tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def test_a_connection_serves_many_requests(start: Start) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    answers = [await wire.ask("GET", "/health") for _ in range(3)]

    assert [answer.status for answer in answers] == [200, 200, 200]
    assert all("connection" not in answer.headers for answer in answers)


@pytest.mark.parametrize("count", [2, 50, 500])
async def test_requests_sent_ahead_are_answered_in_their_order(start: Start, count: int) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    paths = ["/health", "/nosuch", "/tools", "/num_tasks"]
    wire.send(b"".join(request("GET", paths[i % 4]) for i in range(count)))
    answers = [await wire.read() for _ in range(count)]

    assert [answer.status for answer in answers] == [[200, 404, 200, 405][i % 4] for i in range(count)]


async def test_a_request_sent_ahead_waits_for_a_stream_to_end(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    wire = await server.wire()

    call = request("POST", "/call", sid="s1", body={"name": "wait", "input": {"gate": "ahead"}})
    wire.send(call + request("GET", "/health"))
    await GATES.until_came("ahead")
    GATES.open("ahead")

    assert (await wire.read()).result["ok"] is True
    assert (await wire.read()).body == b'{"status":"ok"}'


async def test_bodies_sent_ahead_are_answered_too(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    wire = await server.wire()

    for i in range(30):
        wire.send(request("POST", "/call", sid="s1", body={"name": "text", "input": {"text": str(i) * 10_000}}))

    for i in range(30):
        assert (await wire.read()).result["output"]["blocks"][0]["text"] == str(i) * 10_000


async def test_a_request_that_arrives_byte_by_byte_is_answered(start: Start) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    for byte in request("POST", "/num_tasks", body={"split": "train"}):
        wire.send(bytes([byte]))
        await wire.writer.drain()
        await asyncio.sleep(0)

    assert (await wire.read()).json == {"num_tasks": 5}


async def test_the_chunks_of_a_body_are_joined(start: Start) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    wire.send(chunked(b'{"spl', b'it":"tr', b'ain"}'))

    assert (await wire.read()).json == {"num_tasks": 5}


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_body_over_the_limit_is_413_and_the_connection_closes(start: Start, is_chunked: bool) -> None:
    server = await start(MathEnv, body_max_bytes=2000)
    wire = await server.wire()

    body = b'{"split":"' + b"x" * 3000 + b'"}'
    wire.send(chunked(body[:1500], body[1500:]) if is_chunked else request("POST", "/num_tasks", raw=body))

    answer = await wire.read()
    assert (answer.status, answer.json) == (413, {"detail": "Request body too large"})
    assert answer.headers["connection"] == "close"
    assert await wire.is_closed()


async def test_a_body_at_the_limit_is_accepted(start: Start) -> None:
    server = await start(MathEnv, body_max_bytes=2000)

    answer = await server.ask("POST", "/num_tasks", raw=b'{"split":"train"' + b" " * 1983 + b"}")

    assert answer.json == {"num_tasks": 5}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(request("GET", "/health", headers={"X": "x" * 140_000}), id="one long header"),
        pytest.param(request("GET", "/health", headers={f"X{i}": "x" * 100 for i in range(2000)}), id="many headers"),
        pytest.param(b"GET /" + b"x" * 140_000 + b" HTTP/1.1\r\n\r\n", id="a long path"),
        pytest.param(b"GET /health HTTP/1.1\r\nX: " + b"x" * 140_000, id="an endless header"),
    ],
)
async def test_headers_over_the_limit_are_431(start: Start, data: bytes) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    wire.send(data)

    assert (await wire.read()).status == 431
    assert await wire.is_closed()


async def test_secrets_of_100_kb_are_accepted(start: Start) -> None:
    server = await start(MathEnv)

    answer = await server.ask("GET", "/health", headers={"X-Secrets": "x" * 100_000})

    assert answer.status == 200


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(b"hello\r\n\r\n", id="not HTTP"),
        pytest.param(b"GET /health HTTP/9.9\r\n\r\n", id="an unknown version"),
        pytest.param(
            b"POST /ping HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="two framings",
        ),
        pytest.param(
            b"POST /ping HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
            id="two framings the other way round",
        ),
        pytest.param(b"POST /ping HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", id="two lengths"),
        pytest.param(b"POST /ping HTTP/1.1\r\nContent-Length: -1\r\n\r\n", id="a negative length"),
        pytest.param(b"POST /ping HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n", id="not a number"),
        pytest.param(b"POST /ping HTTP/1.1\r\nContent-Length: 99999999999999999999999999\r\n\r\n", id="a huge length"),
        pytest.param(b"POST /ping HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", id="not a chunk size"),
        pytest.param(b"POST /ping HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n", id="a strange framing"),
        pytest.param(b"GET /health HTTP/1.1\r\nX : y\r\n\r\n", id="white space before a colon"),
        pytest.param(b"GET /health HTTP/1.1\r\nX: y\r\n folded\r\n\r\n", id="a folded header"),
        pytest.param(b"GET /health HTTP/1.1\r\nX: a\x00b\r\n\r\n", id="a zero byte"),
    ],
)
async def test_invalid_http_is_400_and_the_connection_closes(start: Start, data: bytes) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    wire.send(data + request("GET", "/sessions"))

    answer = await wire.read()
    assert (answer.status, answer.json) == (400, {"detail": "Invalid HTTP request"})
    assert await wire.is_closed()


async def test_an_invalid_request_after_valid_requests_is_answered_in_its_turn(start: Start) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    wire.send(request("GET", "/health") + request("POST", "/num_tasks", body={"split": "train"}) + b"nonsense\r\n\r\n")

    assert [(await wire.read()).status for _ in range(3)] == [200, 200, 400]


async def test_a_trailer_does_not_count_as_a_header(start: Start) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    wire.send(b"POST /ping HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Session-ID: s1\r\n\r\n")

    assert (await wire.read()).json == {"detail": "X-Session-ID header is required"}


async def test_a_client_that_expects_100_continue_gets_it(start: Start) -> None:
    server = await start(MathEnv)
    wire = await server.wire()
    body = b'{"split":"train"}'

    head = request("POST", "/num_tasks", raw=body, headers={"Expect": "100-continue"}).removesuffix(body)
    wire.send(head)
    leave = await wire.reader.readuntil(b"\r\n\r\n")
    wire.send(body)

    assert leave == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (await wire.read()).json == {"num_tasks": 5}


async def test_an_upgrade_is_ignored_or_refused(start: Start) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    wire.send(request("GET", "/health", headers={"Connection": "Upgrade", "Upgrade": "websocket"}))

    statuses = {(await wire.read()).status}
    assert statuses <= {200, 400}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_connection_closes_on_request(start: Start, version: str) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    line = b"GET /health HTTP/%b\r\nConnection: close\r\n\r\n" % version.encode()
    wire.send(line)

    answer = await wire.read()
    assert answer.headers["connection"] == "close"
    assert answer.body == b'{"status":"ok"}'
    assert await wire.is_closed()


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(start: Start) -> None:
    server = await start(MathEnv)
    await server.open()
    for gate in (None, "old client"):
        wire = await server.wire()
        body = {"name": "think", "input": {}} if gate is None else {"name": "wait", "input": {"gate": gate}}
        wire.send(request("POST", "/call", sid="s1", body=body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        if gate is not None:
            await GATES.until_came(gate)
            await wire.head()
            GATES.open(gate)
            rest = await wire.reader.read()
            assert rest.endswith(b'"finished":false}}\r\n\r\n')
        else:
            answer = await wire.read()
            assert "transfer-encoding" not in answer.headers
            assert answer.result["ok"] is True


async def test_a_hang_up_in_the_middle_of_a_request_does_not_harm_the_server(start: Start) -> None:
    server = await start(MathEnv)
    for data in (b"GET /hea", request("POST", "/num_tasks", body={"split": "train"})[:-4]):
        wire = await server.wire()
        wire.send(data)
        await wire.close()

    assert (await server.ask("GET", "/health")).status == 200


async def test_a_hang_up_before_an_answer_leaves_no_waiting_request(start: Start) -> None:
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="s1", body={"task_spec": {"gate": "hang-ups"}})
    for method, path in (("GET", "/prompt"), ("POST", "/call"), ("GET", "/messages")):
        wire = await server.wire()
        body = {"name": "think", "input": {}} if method == "POST" else None
        wire.send(request(method, path, sid="s1", body=body))
        wire.writer.write_eof()
        await wire.close()

    async def is_idle() -> bool:
        return not server.server.sessions.get("s1").is_busy

    await eventually(is_idle)
    GATES.open("hang-ups")


async def test_an_incomplete_request_times_out_with_408(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RECEIVE_S", 0.02)
    server = await start(MathEnv)
    for data in (b"GET /health HTTP/1.1\r\n", request("POST", "/num_tasks", body={"split": "train"})[:-4]):
        wire = await server.wire()
        wire.send(data)

        assert (await wire.read()).status == 408
        assert await wire.is_closed()


async def test_a_client_that_does_not_read_is_disconnected(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DRAIN_S", 0.02)
    server = await start(MathEnv)
    await server.open()
    reader, writer = await asyncio.open_connection(*server.address.rsplit(":", 1), limit=1024)
    wire = Wire(reader, writer)
    session = server.server.sessions.get("s1")

    wire.send(request("POST", "/call", sid="s1", body={"name": "text", "input": {"text": "x" * 20_000_000}}))

    async def is_cut() -> bool:
        return len(session.cut) == 1

    await eventually(is_cut)
    await wire.close()


async def test_idle_connections_are_closed_on_tcp_and_kept_on_unix_sockets(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.server.KEEP_ALIVE_S", 0.05)
    on_tcp = await start(MathEnv)
    on_unix = await start(MathEnv, unix=True)
    tcp, unix = await on_tcp.wire(), await on_unix.wire()
    await tcp.ask("GET", "/health")
    await unix.ask("GET", "/health")

    assert await tcp.is_closed()
    assert (await unix.ask("GET", "/health")).status == 200


async def test_refusals_and_closed_connections_leave_nothing_in_memory(start: Start) -> None:
    server = await start(MathEnv)
    await server.ask("POST", "/create", sid="failed", body={"task_spec": {"error": "broken"}})

    async def refused() -> None:
        for sid in ("nobody", "failed"):
            assert (await server.call("think", sid=sid)).status in (404, 500)

    def leftovers() -> int:
        gc.collect()
        return sum(isinstance(found, TracebackType | Connection) for found in gc.get_objects())

    await refused()
    gc.freeze()  # excludes the many objects of other tests from the count
    try:
        for _ in range(20):
            await refused()

        assert leftovers() <= 10
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("path", ["//ping", "/ping", "/PING"])
async def test_the_spellings_of_ping(start: Start, path: str) -> None:
    server = await start(MathEnv)
    await server.open()

    answer = await server.ask("POST", path, sid="s1", headers={"Content-Type": "application/octet-stream"})

    assert answer.status == (404 if path == "/PING" else 200)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /HTTP/1.1\r\nHost: x\r\n",  # HTTP/0.9: a target without a version
        b"POST /num_tasks\r\nHost: x\r\n",
        b"POST /num_tasks HTTP/2.0\r\nHost: x\r\n",
        b"POST /num_tasks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"POST /num_tasks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    ],
)
async def test_other_versions_and_codings_are_refused(start: Start, head: bytes) -> None:
    server = await start(MathEnv)
    wire = await server.wire()

    wire.send(head + b"\r\n5\r\nhello\r\n0\r\n\r\n")

    assert (await wire.read()).status == 400

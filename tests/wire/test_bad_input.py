"""Wrong requests get the protocol's own error, word for word, and leave no session behind.

The table rows also run on the official server, because they come from there.
"""

import json

import httpx
import pytest

from tests.wire.bad_requests import CONTINUED, CREATE, DISCOVERY, IN_A_SESSION, NO_SUCH_SESSION, Row
from tests.wire.raw import create, episode, new_sid, send_bytes
from tests.wire.targets import ONE_GATEWAY, OURS, Target, on

pytestmark = pytest.mark.wire

OFFICIAL_AND_OURS = ("openreward-server", *OURS)


def rows(table: dict[str, Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in table.items()])


async def send(http: httpx.AsyncClient, row: Row, sid: str) -> httpx.Response:
    headers = {"X-Session-ID": sid} if row.sid else {}
    if row.content:
        headers["Content-Type"] = row.content_type
    return await http.request(row.method, row.path, content=row.content, headers=headers, follow_redirects=True)


def exact(response: httpx.Response, row: Row) -> None:
    assert response.status_code == row.status, response.text
    assert response.headers["content-type"] == "application/json"
    detail = row.detail
    if isinstance(detail, str) and detail.startswith(CONTINUED):
        detail = response.json()["detail"]
        assert detail.startswith(row.detail)
    assert response.text == json.dumps({"detail": detail}, separators=(",", ":"), ensure_ascii=False)


@on(*OFFICIAL_AND_OURS)
@rows(CREATE | DISCOVERY | NO_SUCH_SESSION)
async def test_a_wrong_request_gets_the_protocols_own_error(http: httpx.AsyncClient, row: Row) -> None:
    sid = new_sid()

    response = await send(http, row, sid)

    exact(response, row)
    ping = await http.post("/ping", headers={"X-Session-ID": sid})
    assert ping.status_code == 404


@on(*OFFICIAL_AND_OURS)
async def test_an_unknown_toolset_is_refused(http: httpx.AsyncClient) -> None:
    sid = new_sid()

    response = await create(http, sid, env_name="probe", task_spec={}, toolset_name="x")

    assert response.status_code == 400
    # The valid options differ: the gateway offers none.
    assert response.json()["detail"].startswith("unknown toolset 'x'; valid options are [")


@on("openreward-server", *ONE_GATEWAY)
@rows(IN_A_SESSION)
async def test_a_wrong_call_is_refused_and_the_session_goes_on(http: httpx.AsyncClient, row: Row) -> None:
    async with episode(http) as opened:
        response = await send(http, row, opened.sid)
        after = await opened.call("echo", {"text": "still here"})

    exact(response, row)
    assert after.text == "still here"


async def ping(target: Target, value: str) -> bytes:
    """Ping with exactly this text after the header's colon. An HTTP client would refuse to send it."""
    key = f"X-API-Key: {target.key}\r\n" if target.key else ""
    head = (
        f"POST /ping HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 0\r\n{key}X-Session-ID:{value}\r\n\r\n"
    )
    return await send_bytes(target.host, target.port, head.encode())


@on(*OFFICIAL_AND_OURS)
async def test_a_blank_session_id_counts_as_missing(target: Target) -> None:
    answer = await ping(target, " \t ")

    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.endswith(b'{"detail":"X-Session-ID header is required"}')


@on(*OFFICIAL_AND_OURS)
async def test_a_session_id_is_stripped(target: Target, http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        answer = await ping(target, f"  {opened.sid}\t ")

    assert answer.startswith(b"HTTP/1.1 200")


@on(*OURS)
async def test_two_different_session_ids_are_refused(http: httpx.AsyncClient) -> None:
    async with episode(http) as one, episode(http) as other:
        headers = [("X-Session-ID", one.sid), ("X-Session-ID", other.sid)]
        response = await http.post("/ping", headers=headers)

    assert response.status_code == 400, response.text
    assert isinstance(response.json()["detail"], str)


@on(*OFFICIAL_AND_OURS)
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/create", "POST"),
        ("POST", "/health", "GET"),
        ("HEAD", "/health", "GET"),
        ("OPTIONS", "/probe/call", "POST"),
        ("DELETE", "/probe/prompt", "GET"),
    ],
)
async def test_a_wrong_method_is_not_allowed(http: httpx.AsyncClient, method: str, path: str, allowed: str) -> None:
    response = await http.request(method, path, headers={"X-Session-ID": new_sid()})

    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    assert response.text in ("", '{"detail":"Method Not Allowed"}')


@on(*OURS)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"env_name":"probe","task_spec":{"question":"\xff\xfe"}}', id="invalid UTF-8"),
        pytest.param(b'{"env_name":"probe","task_spec":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, id="too deep"),
        pytest.param(b"\x00" * 64, id="zeros"),
        pytest.param(b"{}" * 64, id="many objects"),
    ],
)
async def test_a_body_that_is_not_json_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post(
        "/create", content=body, headers={"X-Session-ID": new_sid(), "Content-Type": "application/json"}
    )

    assert response.status_code in (400, 422), response.text
    assert response.json()["detail"]


@on(*OURS)
async def test_a_lone_surrogate_in_a_task_causes_no_server_error(http: httpx.AsyncClient) -> None:
    sid = new_sid()
    headers = {"X-Session-ID": sid, "Content-Type": "application/json"}
    body = b'{"env_name":"probe","task_spec":{"question":"\\ud800"}}'

    response = await http.post("/create", content=body, headers=headers)
    await http.post("/delete", headers=headers)

    assert response.status_code < 500
    assert (await http.get("/health")).status_code == 200


@on(*ONE_GATEWAY)
async def test_a_body_beyond_the_size_limit_is_refused(http: httpx.AsyncClient) -> None:
    question = "x" * (9 * 2**20)

    response = await create(http, new_sid(), env_name="probe", task_spec={"question": question})

    assert response.status_code == 413
    assert isinstance(response.json()["detail"], str)


@on(*ONE_GATEWAY)
async def test_a_large_task_within_the_limit_is_played(http: httpx.AsyncClient) -> None:
    question = "x" * (4 * 2**20)

    async with episode(http, {"question": question}) as opened:
        prompt = (await opened.get("prompt")).json()

    assert prompt[0]["text"] == question


@on(*OURS)
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}", id="two lengths"),
        pytest.param(b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="length and chunks"),
        pytest.param(b"Content-Length: two\r\n\r\n{}", id="a length that is a word"),
        pytest.param(b"Content-Length: -2\r\n\r\n{}", id="a negative length"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", id="a chunk without a size"),
        pytest.param(b"X-Bad Name: 1\r\n\r\n", id="a space in a name"),
    ],
)
async def test_a_request_that_could_be_read_in_two_ways_is_answered_once_or_not_at_all(
    target: Target, head: bytes
) -> None:
    # A second request follows the ambiguous request. An answer to it means that the server took the rest of the first
    # for a request.
    key = f"X-API-Key: {target.key}\r\n".encode() if target.key else b""
    first = b"POST /create HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n" + key + head
    second = b"GET /list_environments HTTP/1.1\r\nHost: h\r\nConnection: close\r\n" + key + b"\r\n"

    answer = await send_bytes(target.host, target.port, first + second)

    assert b'["probe"' not in answer
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))


@on(*OURS)
async def test_bytes_that_are_not_http_are_refused(target: Target) -> None:
    answer = await send_bytes(target.host, target.port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")

    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))


@on(*OURS)
async def test_headers_that_are_too_large_are_refused(target: Target) -> None:
    key = f"X-API-Key: {target.key}\r\n" if target.key else ""
    head = f"GET /list_environments HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{key}".encode()

    answer = await send_bytes(target.host, target.port, head + b"X-Long: " + b"a" * 4_000_000 + b"\r\n\r\n")

    assert b'["probe"' not in answer
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))

"""What the engine decodes from generated bodies that the gate forwards, by a model of the engine's decoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gateway.backends.docker.container import container_body, forwarder_body, server_body
from gateway.core.environment import CustomTasks, Environment, Isolation, Limits, Relaxations, Server, Volume
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from gateway.node.policy import BODY, FORWARDER, HOST_CONFIG, Rules, refusal, rewritten
from gateway.node.routes import GateRefusal, Malformed, own_containers, own_events, parse
from tests.fakes.go_json import CREATE, FILTERS, GoError, Map, Pairs, Pointer, Slice, Struct, decoded, zero
from tests.fuzzing import fuzzed

ROOT = "/var/lib/docker/volumes/sockets/_data"
TASKS = "/srv/custom_tasks"
MATH = Environment(
    name=EnvironmentName("math"),
    image="env-gateway/math",
    directory=Path("/nowhere"),
    command=("python3",),
    variables={"COLOUR": "green"},
    limits=Limits(memory_bytes=2**28, gpus=1),
    custom_tasks=CustomTasks(module="custom_tasks.a", folder="t", content="some"),
    volumes=(Volume(source="/srv/models", target="/models"), Volume(source="data", target="/d", read_only=False)),
)
LOOSE = replace(MATH, name=EnvironmentName("loose"), loosened=Relaxations(user="0:0", writable_root=True))
BOXED = replace(MATH, name=EnvironmentName("os"), isolation=Isolation.SANDBOX, custom_tasks=None, volumes=())
THEIRS = replace(MATH, name=EnvironmentName("theirs"), custom_tasks=None, server=Server(port=8000))
RULES = Rules.of([MATH, LOOSE, BOXED, THEIRS], instance="ours", socket_root=ROOT, custom_tasks_root=TASKS)


def worker_of(environment: Environment) -> Worker:
    return Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=4)


def own(environment: Environment, *, tasks: str = "") -> dict[str, Any]:
    source = f"{ROOT}/w1"
    return container_body(
        worker_of(environment), environment, instance="ours", source=source, custom_tasks_source=tasks
    )


BODIES = (
    own(MATH, tasks=f"{TASKS}/t"),
    own(LOOSE, tasks=f"{TASKS}/t"),
    own(BOXED),
    server_body(worker_of(THEIRS), THEIRS, instance="ours"),
    forwarder_body(
        worker_of(THEIRS), THEIRS, instance="ours", source=f"{ROOT}/w1", beside="a" * 64, image=RULES.forwarder_image
    ),
)


BODIES[0]["HostConfig"]["Mounts"][0]["BindOptions"] = {"Propagation": "rprivate"}  # as other clients send it


def sent(body: bytes) -> bytes | None:
    """Return what the gate sends to the engine for *body*, or None if it refuses."""
    try:
        wanted = parse(body)
    except Malformed:
        return None
    if refusal(wanted, RULES) is not None:
        return None
    return httpx.Request("POST", "http://engine", json=rewritten(wanted)).read()


def exactly(value: Any, type: Any) -> Any:
    """Return *value*, as the gate has read it, with its keys taken literally: what the gate has checked."""
    if value is None:
        return zero(type)
    if isinstance(type, Pointer):
        return exactly(value, type.to)
    if isinstance(type, Slice) and isinstance(value, list):
        return [exactly(one, type.of) for one in value]
    if isinstance(type, Map) and isinstance(value, dict):
        return {key: exactly(one, type.of) for key, one in value.items()}
    if isinstance(type, Struct) and isinstance(value, dict):
        assert value.keys() <= type.fields.keys(), "the gate passes on a key that it cannot know"
        return {name: exactly(value.get(name), of) for name, of in type.fields.items()}
    return value


def assert_decodes_to_what_was_checked(body: bytes) -> bool:
    """Return False if the gate, or the engine, refuses *body*."""
    passed = sent(body)
    if passed is None:
        return False
    try:
        found = decoded(passed, CREATE)
    except GoError:
        return False
    assert found == exactly(rewritten(parse(body)), CREATE)
    keys = FORWARDER if "Entrypoint" in parse(passed) else BODY
    assert {name for name, value in found.items() if value != zero(CREATE.fields[name])} <= keys.keys()
    host = CREATE.fields["HostConfig"].to.fields
    assert {name for name, value in found["HostConfig"].items() if value != zero(host[name])} <= HOST_CONFIG.keys()
    return True


# -- generated bodies

NAMES = (*CREATE.fields, *CREATE.fields["HostConfig"].to.fields, "Propagation", "ReadOnly", "Name", "max-size", "/tmp")
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
VALUES: tuple[Any, ...] = (
    *NOTHING,
    *(True, 1, -1, 0.5, 1e400, 2**70, "host", "bridge", "ALL", ["ALL"], ["/:/host"], [None], [[]], [{}], {"": None}),
    *({"Privileged": True}, {"Name": "always"}, [{"Type": "bind", "Source": "/", "Target": "/host"}]),
)
FOLDS = {"s": "\u017f", "k": "\u212a"}


def in_order(value: Any) -> Any:
    """Return *value* with objects as `Pairs`, which may repeat keys."""
    if isinstance(value, dict):
        return Pairs((key, in_order(one)) for key, one in value.items())
    return [in_order(one) for one in value] if isinstance(value, list) else value


def places(value: Any) -> list[Any]:
    """Return all objects and lists in *value*, itself included."""
    below = [one for _, one in value] if isinstance(value, Pairs) else value if isinstance(value, list) else []
    return ([value] if isinstance(value, list) else []) + [place for one in below for place in places(one)]


@st.composite
def respelled(draw: st.DrawFn, name: str) -> str:
    """Return *name*, or another text that Go's decoder takes for it."""
    spellings = [{letter, letter.lower(), letter.upper(), FOLDS.get(letter.lower(), letter)} for letter in name]
    return "".join(draw(st.sampled_from(sorted(letters))) for letters in spellings)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a body of the backend with some keys and values added, repeated, respelled, replaced or removed."""
    document = in_order(draw(st.sampled_from(BODIES)))
    host = next(value for key, value in document if key == "HostConfig")
    hides = draw(st.booleans())  # adds only keys that the gate may accept, because it does not pass them on
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from([document, host] if hides else places(document)))
        value = in_order(draw(st.sampled_from(NOTHING if hides or draw(st.booleans()) else VALUES)))
        at, over = draw(st.integers(0, len(place))), 0 if hides else draw(st.integers(0, 1))
        if not isinstance(place, Pairs):
            place[at : at + over] = [value]
            continue
        key = draw(st.sampled_from([name for name, _ in place] or NAMES) | st.sampled_from(NAMES))
        key = draw(respelled(key) | st.just(key) | st.text(max_size=3))
        place[at : at + over] = [(key, value)] if hides or draw(st.integers(0, 5)) else []
    return written(document, draw(st.sampled_from(["", "first", "all"]))).encode("utf-8", "surrogatepass")


def written(value: Any, escapes: str) -> str:
    """Return *value* as JSON, with *escapes* for none, the ``first`` or ``all`` of each text's characters."""
    if isinstance(value, Pairs):
        members = [f"{written(key, escapes)}: {written(one, escapes)}" for key, one in value]
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(written(one, escapes) for one in value)}]"
    if not isinstance(value, str) or not escapes:
        return "1e400" if value == 1e400 else json.dumps(value, ensure_ascii=False)
    count = 1 if escapes == "first" else len(value)
    units = value[:count].encode("utf-16-be", "surrogatepass").hex()
    escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    return f'"{escaped}{json.dumps(value[count:], ensure_ascii=False)[1:-1]}"'


@fuzzed(600)
@given(mutated())
def test_the_engine_decodes_exactly_what_the_gate_checked(body: bytes) -> None:
    event("accepted" if assert_decodes_to_what_was_checked(body) else "refused")


@pytest.mark.parametrize("body", BODIES)
def test_the_model_decodes_every_value_of_the_backends_bodies(body: dict[str, Any]) -> None:
    passed = sent(json.dumps(body).encode())

    assert passed is not None
    assert decoded(passed, CREATE) == exactly(body, CREATE)


ACCEPTED = {
    "a key in lower case": ("Image", '"hostconfig": null, '),
    "a key with special letters": ("HostConfig", '"Ho\u017ftConfig": {}, '),
    "a nested key with a special letter": ("CapDrop", '"Read\u006fnlyRootf\u017f": false, "Mas\u212aedPaths": [], '),
    "an escaped key": ("CapDrop", '"\\u0070rivileged": false, '),
}


@pytest.mark.parametrize(("before", "added"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_empty_keys_that_the_engine_takes_for_others_are_left_out(before: str, added: str) -> None:
    text = json.dumps(BODIES[0])
    body = text.replace(f'"{before}"', f'{added}"{before}"', 1).encode()

    assert body != text.encode()
    assert assert_decodes_to_what_was_checked(body)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"HostConfig": {"Privileged": false}, "ho\u017ftCONFIG": {"privileged": true}}', {"Privileged": True}),
        ('{"HostConfig": {"CapDrop": ["ALL"], "capdrop": []}}', {"CapDrop": []}),
        ('{"HostConfig": {"Memory": 5, "memory": null}}', {"Memory": 5}),
        ('{"HostConfig": {"CapDrop": ["ALL"], "CapDrop": null}}', {"CapDrop": None}),
        ('{"HostConfig": {"Mounts": [{"Source": "/"}], "mounts": [{"Target": "/t"}]}}', {"Source": "/"}),
        ('{"HostConfig": {"Tmpfs": {"/a": "x"}, "Tmpfs": {"/A": "y"}}}', {"Tmpfs": {"/a": "x", "/A": "y"}}),
        ('{"HostConfig": {"NetworkMode": "\\ud800"}}', {"NetworkMode": "\ufffd"}),
        ('{"HostConfig": {"CapAdd": "ALL"}}', {"CapAdd": ["ALL"]}),
    ],
)
def test_the_model_reads_bodies_as_the_engine_does(text: str, expected: dict[str, Any]) -> None:
    found = decoded(text.encode(), CREATE)["HostConfig"]
    found |= found["Mounts"][0] if found["Mounts"] else {}

    assert {name: found[name] for name in expected} == expected
    assert sent(text.encode()) is None


@pytest.mark.parametrize("text", ['{"HostConfig": []}', '{"Image": 1}', '{"HostConfig": {"Memory": 1.0}}', "{", "[1"])
def test_the_model_refuses_what_the_engine_refuses(text: str) -> None:
    with pytest.raises(GoError):
        decoded(text.encode(), CREATE)


# -- the gate answers each body, whatever is in it

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["", "no", "host"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=3),
    max_leaves=6,
)


@fuzzed(400)
@given(st.data())
def test_a_value_of_any_type_in_any_place_gets_an_answer(data: st.DataObject) -> None:
    document = json.loads(json.dumps(data.draw(st.sampled_from(BODIES))))
    containers = [place for place in plain_places(document) if place]
    place = data.draw(st.sampled_from(containers))
    key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(ANY)

    reason = refusal(document, RULES)

    assert reason is None or reason


def plain_places(value: Any) -> list[Any]:
    below = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return ([value] if isinstance(value, dict | list) else []) + [one for each in below for one in plain_places(each)]


@fuzzed(300)
@given(st.binary(max_size=60) | mutated().flatmap(lambda body: st.integers(0, len(body)).map(lambda at: body[:at])))
def test_bytes_of_any_kind_are_parsed_or_refused(body: bytes) -> None:
    try:
        found = parse(body)
    except Malformed:
        return
    assert json.loads(body) == found


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_a_body_of_any_depth_gets_an_answer(opening: str, closing: str) -> None:
    for depth in (10, 100, *range(800, 1001), 100_000):  # Python's own limit is reached in between
        deep = f"{opening * depth}0{closing * depth}"
        body = json.dumps(BODIES[0]).replace('"CapDrop": ["ALL"]', f'"CapDrop": {deep}').encode()

        assert sent(body) is None


@fuzzed(300)
@given(st.dictionaries(st.sampled_from(["label", "Label", "name", "type", "event", "id"]), ANY, max_size=3))
def test_filters_that_are_passed_on_have_one_meaning_and_the_instances_label(filters: dict[str, Any]) -> None:
    for narrowed in (own_containers, own_events):
        try:
            found = narrowed(json.dumps(filters), "ours")
        except GateRefusal:
            continue
        assert decoded(json.dumps(found).encode(), FILTERS) == found
        assert "env-gateway.instance=ours" in found["label"]

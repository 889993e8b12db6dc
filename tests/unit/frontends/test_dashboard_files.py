"""The dashboard's files of other projects, its templates and its cookies."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from gateway.core.ids import Owner
from gateway.frontends.dashboard.pages import histogram
from gateway.frontends.dashboard.rendering import bars, image_source, number, render, seconds, static_files, when
from gateway.frontends.dashboard.sign_in import COOKIE, VALID_S, SignIn, Viewer
from gateway.settings.keys import Keyring, digest_of
from tests.fakes.clock import Clock

FOLDER = Path(__file__).parents[3] / "gateway/frontends/dashboard"
TRAINER, OPERATOR = "alice-key-5f1c", "operator-key-91d2"


def test_the_files_of_other_projects_are_the_named_versions() -> None:
    files = static_files()
    known = {file["name"]: file["sha256"] for file in tomllib.loads(files["vendored.toml"].decode())["file"]}

    assert {name: hashlib.sha256(files[name]).hexdigest() for name in known} == known
    assert files.keys() - known.keys() == {"dashboard.css", "dashboard.js", "vendored.toml"}


@pytest.mark.parametrize("template", sorted(path.name for path in (FOLDER / "templates").glob("*.html")))
def test_templates_have_no_scripts_and_styles_of_their_own(template: str) -> None:
    text = (FOLDER / "templates" / template).read_text()

    assert not re.search(r"<script(?![^>]*src=)|\son[a-z]+=|\sstyle=|javascript:|hx-on|hx-vals=.js:", text)
    assert ("<style" in text) == (template == "report.html"), "only the report is one file"
    assert "|safe" not in text or template == "report.html"


def test_text_of_an_agent_is_escaped() -> None:
    page = render("refused.html", viewer=Viewer(Owner("<b>"), True), detail="<script>alert(1)</script>", path="/x")

    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.0, "0"), (1.0, "1"), (0.25, "0.25"), (1234567, "1,234,567"), (-0.5, "-0.5")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0021, "2.1 ms"), (3.0, "3 s"), (90.0, "1.5 min"), (7200.0, "2 h"), (1e6, "11.6 d")],
)
def test_durations_have_a_unit(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_times_bars_and_images() -> None:
    assert when(0.0) == "1970-01-01 00:00:00"
    assert bars([0, 1, 1000]) == [0, 2, 100]
    assert image_source({"image": "blob:sha256:ab"}, "/b/") == "/b/ab"
    assert image_source({"image": "AAAA", "mime_type": "image/gif"}, "/b/") == "data:image/gif;base64,AAAA"
    assert histogram([0.0, 1.0, 1.0]) == {"bounds": [0.0, 1.0], "counts": [1, 2]}
    assert sum(histogram([value / 100 for value in range(100)])["counts"]) == 100


# -- cookies --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sign_in(clock: Clock) -> SignIn:
    return SignIn(b"secret", Keyring({"alice": TRAINER}, {"boss": OPERATOR}), clock=clock)


def test_a_cookie_stands_for_its_key_and_does_not_contain_it(sign_in: SignIn) -> None:
    for key, viewer in ((TRAINER, Viewer(Owner("alice"), False)), (OPERATOR, Viewer(Owner("boss"), True))):
        token = sign_in.token(key)
        assert token is not None
        assert key not in token
        digest = sign_in.digest_in(f"other=1; {COOKIE}={token}")
        assert digest == digest_of(key)
        assert sign_in.viewer(digest) == viewer


def test_an_unknown_key_gets_no_cookie(sign_in: SignIn) -> None:
    assert sign_in.token("wrong") is None
    assert sign_in.needs_key
    assert not SignIn(b"secret", Keyring({})).needs_key


def test_a_cookie_ends_after_some_hours(sign_in: SignIn, clock: Clock) -> None:
    token = sign_in.token(TRAINER)
    clock.advance(VALID_S - 1)
    assert sign_in.digest_in(f"{COOKIE}={token}") is not None
    clock.advance(2)
    assert sign_in.digest_in(f"{COOKIE}={token}") is None


@pytest.mark.parametrize(
    "spoil", [lambda t: t[:-1] + "x", lambda t: "0" + t[1:], lambda t: "", lambda t: "a-b-c", lambda t: "ä"]
)
def test_a_forged_cookie_is_none(sign_in: SignIn, spoil: object) -> None:
    token = sign_in.token(TRAINER)
    assert callable(spoil)
    assert sign_in.digest_in(f"{COOKIE}={spoil(token)}") is None
    assert sign_in.digest_in("") is None


def test_the_cookie_of_another_gateway_is_none(sign_in: SignIn) -> None:
    other = SignIn(b"another secret", Keyring({"alice": TRAINER}))
    assert sign_in.digest_in(f"{COOKIE}={other.token(TRAINER)}") is None

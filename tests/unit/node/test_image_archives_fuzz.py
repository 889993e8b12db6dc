"""Changed tars of images: each is refused with the reader's own error, or has exactly the image that was checked."""

from __future__ import annotations

import base64
import copy
import io
import json
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gateway.node.image_archives import BadArchive, checked
from tests.fakes.image_tars import ImageTar, loaded
from tests.fuzzing import fuzzed

REFERENCE = "env-gateway/fake"
TAG = f"{REFERENCE}:latest"
BLOCK = tarfile.BLOCKSIZE
FORMATS = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)


def image_of(*, oci: bool) -> ImageTar:
    """Return an image with a folder, files, both kinds of links, a long name, and a layer of several blocks."""
    image = ImageTar(TAG, oci=oci, layers=(b"one layer", b"another", bytes(range(256)) * 5))
    target = image.manifest[0]["Layers"][0]
    image.add("again.tar", type=tarfile.SYMTYPE, target=target)
    image.add("once-more.tar", type=tarfile.LNKTYPE, target=target)
    image.manifest[0]["Layers"] += ["again.tar", "once-more.tar"]
    image.add(f"{'x' * 60}/{'y' * 90}", b"a file with a long name")
    return image


def manifest_first(image: ImageTar) -> ImageTar:
    """Return *image* with its manifest before all else, so that a tar that is cut off has one."""
    image.add("manifest.json", json.dumps(image.manifest).encode())
    image.members.insert(0, image.members.pop())
    image.manifest = None
    return image


def manifest_last(image: ImageTar) -> ImageTar:
    """Return *image* as engines write it."""
    return image


PLACES = (manifest_first, manifest_last)
TARS = {
    f"{'OCI' if oci else 'old'}-{format}-{place.__name__}": place(image_of(oci=oci)).written(format=format)
    for oci in (False, True)
    for format in FORMATS
    for place in PLACES
}
ID = image_of(oci=False).id
OTHER = ImageTar(TAG, config=b'{"other": 1}').written()
"""Another image of the same name, with the blocks of which a tar may be mixed."""


def assert_refused_or_unchanged(data: bytes) -> bool:
    """Return True if the reader accepts *data*. Then the engine gets the checked image and nothing else."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            archive = checked(Path(file.name), reference=REFERENCE, id=ID)
        except BadArchive:
            return False
        written = b"".join(archive.rewritten())
    assert len(written) == archive.size_bytes
    assert loaded(written)[:2] == (TAG, ID)
    with tarfile.open(fileobj=io.BytesIO(written)) as mine, tarfile.open(fileobj=io.BytesIO(data), mode="r:") as theirs:
        layers = [f"layer{number}.tar" for number in range(len(archive.layers))]
        assert mine.getnames() == ["manifest.json", "config.json", *layers]
        (named,) = json.loads(content(theirs, "manifest.json"))
        assert named["RepoTags"] == [TAG]
        assert [content(mine, name) for name in layers] == [content(theirs, name) for name in named["Layers"]]
    return True


def content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def with_checksum(header: bytes) -> bytes:
    """Return a changed header with the checksum of its content, without which no reader would look at it."""
    blank = header[:148] + b" " * 8 + header[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


class Tar(bytes):
    """The bytes of a tar. A failed test shows them as text from which ``zlib`` and ``base64`` restore them."""

    def __repr__(self) -> str:
        return base64.b64encode(zlib.compress(self, 9)).decode()


def headers(data: bytes) -> list[int]:
    """Return the places of the blocks with a correct checksum."""
    blocks = range(0, len(data) - BLOCK + 1, BLOCK)
    return [at for at in blocks if with_checksum(data[at : at + BLOCK])[148:154] == data[at + 148 : at + 154]]


@pytest.mark.parametrize("data", TARS.values(), ids=TARS)
def test_an_unchanged_tar_is_accepted(data: bytes) -> None:
    assert assert_refused_or_unchanged(data)
    assert len(headers(data)) > 8


@st.composite
def with_other_bytes(draw: st.DrawFn) -> bytes:
    """Return a tar in which bytes were changed, removed, added, repeated or cut off, anywhere."""
    data = bytearray(draw(st.sampled_from(list(TARS.values()))))
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([1, 2, 8, BLOCK, 3 * BLOCK]))
        at = draw(st.integers(0, len(data) - 1))
        at -= at % BLOCK if size >= BLOCK else 0
        match draw(st.sampled_from(["change", "remove", "repeat", "mix", "add", "cut"])):
            case "change":
                data[at : at + size] = draw(st.binary(min_size=size % BLOCK, max_size=size % BLOCK)) or bytes(size)
            case "remove":
                del data[at : at + size]
            case "repeat":
                data[at:at] = data[at : at + size]
            case "mix":
                start = draw(st.integers(0, len(OTHER) // BLOCK - 1)) * BLOCK
                data[at : at + size] = OTHER[start : start + size]
            case "add":
                data[at:at] = draw(st.binary(max_size=16)) or bytes(size)
            case _:
                del data[at:]
        if not data:
            return b""
    return bytes(data)


FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "uid": (108, 8),
    "size": (124, 12),
    "mtime": (136, 12),
    "type": (156, 1),
    "linkname": (157, 100),
    "magic": (257, 8),
    "uname": (265, 32),
    "devmajor": (329, 8),
    "prefix": (345, 155),
    "sparse": (386, 96),
}
TYPES = b"0\x0012345678VDgxLKSNAX"
VALUES = (
    *(b"", b"manifest.json", b"./manifest.json", b"/manifest.json", b"..", b"a/../manifest.json", b"\xff\xfe", b"a\nb"),
    *(b"00000000000", b"77777777777", b"\x80" + bytes(6) + b"\xff\xff\xff\xff\xff", b"\xff" * 12, b"-1", b"1e3", b" 7"),
    *(b"00000000777\0", b"\x80" + b"\xff" * 11, b"100000", b"+00000001", b"0x10", b"\xd9\xa4", b"1_0"),
)


@st.composite
def with_other_members(draw: st.DrawFn) -> bytes:
    """Return a tar of an image in which some files have another content or name, or occur again."""
    image = draw(st.sampled_from(PLACES))(image_of(oci=draw(st.booleans())))
    for _ in range(draw(st.integers(1, 2))):
        decisive = [at for at, (_, content) in enumerate(image.members) if content == image.config]
        at = draw(st.sampled_from(decisive or [0]) | st.integers(0, len(image.members) - 1))
        member, before = image.members[at]
        change = draw(st.sampled_from(["content", "name", "again", "gone"]))
        if change == "gone":
            del image.members[at]
            continue
        after = copy.copy(member)
        after.name = draw(st.sampled_from([one.name for one, _ in image.members])) if change == "name" else member.name
        content = draw(
            st.sampled_from([bytes(reversed(before)), b"{}", b'{"other": 1}', b"[]"]) | st.binary(max_size=8)
        )
        after.size = len(content)
        image.members[at : at + (change != "again")] = [(after, content)]
    return image.written(format=tarfile.GNU_FORMAT)


@st.composite
def with_other_headers(draw: st.DrawFn) -> bytes:
    """Return a tar with changed fields in its headers, whose checksums are right."""
    data = bytearray(draw(st.sampled_from(list(TARS.values()))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(headers(bytes(data)) or [0]))
        start, size = draw(st.sampled_from(list(FIELDS.values())))
        if size == 1:
            value = bytes([draw(st.sampled_from(TYPES) | st.integers(0, 255))])
        else:
            value = draw(st.sampled_from(VALUES) | st.binary(max_size=12))[:size].ljust(size, b"\0")
        header = bytearray(data[at : at + BLOCK])
        header[start : start + size] = value
        data[at : at + BLOCK] = with_checksum(bytes(header[:BLOCK]))
    return bytes(data)


KEYWORDS = (
    *("path", "linkpath", "size", "mtime", "uid", "uname", "hdrcharset", "comment", "GNU.sparse.map"),
    *("GNU.sparse.size", "GNU.sparse.realsize", "GNU.sparse.major", "GNU.sparse.minor", "GNU.sparse.name"),
    *("GNU.sparse.numblocks", "GNU.sparse.offset", "GNU.sparse.numbytes", "SCHILY.xattr.x", ""),
)
TEXTS = st.sampled_from(
    ["", "0", "1", "-1", "9" * 30, "1e400", "nan", "0,1,2", "0,x", "a", "manifest.json", "../x", "/x", "a\nb", "BINARY"]
) | st.text(max_size=8)


@st.composite
def with_other_extensions(draw: st.DrawFn) -> bytes:
    """Return a tar whose files have extended headers of any content, well formed or not."""
    data = draw(st.sampled_from(list(TARS.values())))
    chosen = draw(st.lists(st.sampled_from(KEYWORDS), min_size=1, max_size=4))
    records = b"".join(record(keyword, draw(TEXTS), draw(st.sampled_from([0, 0, 0, 1, -1, 50]))) for keyword in chosen)
    if draw(st.integers(0, 4)) == 0:
        records = draw(st.binary(max_size=64))
    extension = tarfile.TarInfo("././@PaxHeader")
    extension.type, extension.size = draw(st.sampled_from([b"x", b"g", b"X", b"L", b"K"])), len(records)
    block = extension.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % BLOCK)
    at = draw(st.sampled_from(headers(data)))
    return data[:at] + block + data[at:]


def record(keyword: str, value: str, longer: int) -> bytes:
    """Return a record of an extended header. Its stated length is wrong by *longer*."""
    text = f" {keyword}={value}\n".encode("utf-8", "surrogatepass")
    size = len(text) + 1
    size += len(str(size + len(str(size)) - 1)) - 1
    return f"{size + longer}".encode() + text


@fuzzed(300)
@given((with_other_bytes() | with_other_headers() | with_other_extensions()).map(Tar))
def test_a_tar_with_changed_bytes_is_refused_or_has_the_checked_image(data: bytes) -> None:
    event("accepted" if assert_refused_or_unchanged(data) else "refused")


@fuzzed(200)
@given(with_other_members().map(Tar))
def test_a_tar_with_changed_files_is_refused_or_has_the_checked_image(data: bytes) -> None:
    event("accepted" if assert_refused_or_unchanged(data) else "refused")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["config", TAG, "again.tar", "", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["Config", "RepoTags", "Layers", "created"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@fuzzed(200)
@given(st.one_of(JSON, JSON.map(lambda one: [one]), st.binary(max_size=20)), st.booleans())
def test_a_manifest_of_any_content_is_refused_or_names_the_image(document: Any, is_merged: bool) -> None:
    image = ImageTar(TAG)
    if is_merged and isinstance(document, list) and document and isinstance(document[0], dict):
        document = [image.manifest[0] | document[0]]
    image.manifest = document if isinstance(document, bytes) else json.dumps(document).encode()

    assert_refused_or_unchanged(image.written())


@fuzzed(100)
@given(JSON | st.binary(max_size=20))
def test_a_configuration_of_any_content_is_refused_or_accepted(document: Any) -> None:
    image = ImageTar(TAG, config=document if isinstance(document, bytes) else json.dumps(document).encode())
    with tempfile.NamedTemporaryFile() as file:
        file.write(image.written())
        file.flush()
        try:
            archive = checked(Path(file.name), reference=REFERENCE, id=image.id)
        except BadArchive:
            return
        assert loaded(b"".join(archive.rewritten()))[1] == image.id

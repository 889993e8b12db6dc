"""Tars of images: valid tars are rewritten for the engine, all others are refused."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.node.image_archives import MEMBERS_MAX, BadArchive, checked, tagged
from tests.fakes.image_tars import ImageTar, loaded

REFERENCE = "env-gateway/fake"
TAG = f"{REFERENCE}:latest"


def look(folder: Path, data: bytes, *, id: str, reference: str = REFERENCE) -> bytes:
    """Check a tar, and return the tar that the engine would receive."""
    path = folder / "image.tar"
    path.write_bytes(data)
    archive = checked(path, reference=reference, id=id)
    written = b"".join(archive.rewritten())
    assert len(written) == archive.size_bytes
    return written


@pytest.mark.parametrize("oci", [False, True], ids=["older engines", "OCI layout"])
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_valid_image_reaches_the_engine_with_its_name_id_and_layers(tmp_path: Path, oci: bool, format: int) -> None:
    image = ImageTar(TAG, oci=oci)

    written = look(tmp_path, image.written(format=format), id=image.id)

    assert loaded(written) == (TAG, image.id, [b"one layer", b"another"])


def test_a_repeated_layer_may_be_a_link(tmp_path: Path) -> None:
    image = ImageTar(TAG)
    target = image.manifest[0]["Layers"][0]
    image.add("again", type=tarfile.DIRTYPE)
    image.add("again/layer.tar", type=tarfile.SYMTYPE, target=f"../{target}")
    image.manifest[0]["Layers"].append("again/layer.tar")

    written = look(tmp_path, image.written(), id=image.id)

    assert loaded(written)[2] == [b"one layer", b"another", b"one layer"]


def test_files_that_the_manifest_does_not_name_do_not_reach_the_engine(tmp_path: Path) -> None:
    image = ImageTar(TAG)
    image.add("repositories", b'{"debian": {"latest": "0"}}')
    image.add("index.json", b"{}")

    written = look(tmp_path, image.written(), id=image.id)

    with tarfile.open(fileobj=io.BytesIO(written)) as archive:
        assert archive.getnames() == ["manifest.json", "config.json", "layer0.tar", "layer1.tar"]


@pytest.mark.parametrize(
    ("reference", "tag"),
    [
        ("env-gateway/math", "env-gateway/math:latest"),
        ("env-gateway/math:2", "env-gateway/math:2"),
        ("registry.example:5000/far", "registry.example:5000/far:latest"),
        ("registry.example:5000/far:1", "registry.example:5000/far:1"),
        ("docker.io/library/python:3.13", "python:3.13"),
        ("docker.io/somebody/else", "somebody/else:latest"),
    ],
)
def test_image_names_are_normalized_as_engines_do(reference: str, tag: str) -> None:
    assert tagged(reference) == tag


def names(value: Any) -> Callable[[ImageTar], None]:
    def change(image: ImageTar) -> None:
        image.manifest[0]["RepoTags"] = value

    return change


def manifest(value: Any) -> Callable[[ImageTar], None]:
    def change(image: ImageTar) -> None:
        image.manifest = value

    return change


def more(name: str, **given: Any) -> Callable[[ImageTar], None]:
    return lambda image: image.add(name, **given)


def twice(image: ImageTar) -> None:
    image.manifest.append(dict(image.manifest[0], RepoTags=["debian:latest"]))


def without_layer(image: ImageTar) -> None:
    image.manifest[0]["Layers"].append("nowhere/layer.tar")


def another_config(image: ImageTar) -> None:
    image.add("other.json", b"{}")
    image.manifest[0]["Config"] = "other.json"


def config_again(image: ImageTar) -> None:
    image.add(image.manifest[0]["Config"], b"{}")


def link_chain(image: ImageTar) -> None:
    image.add("a", type=tarfile.SYMTYPE, target="b")
    image.add("b", type=tarfile.SYMTYPE, target=image.manifest[0]["Config"])


def config_by_link(image: ImageTar) -> None:
    image.add("config", type=tarfile.SYMTYPE, target=image.manifest[0]["Config"])
    image.manifest[0]["Config"] = "config"


def outer_layer(image: ImageTar) -> None:
    image.manifest[0]["Layers"] = ["../../etc/passwd"]


BAD = {
    "another name": (names(["debian:latest"]), "the image's names are"),
    "a further name": (names([TAG, "debian:latest"]), "the image's names are"),
    "the same name twice": (names([TAG, TAG]), "the image's names are"),
    "no name": (names(None), "the image's names are"),
    "names that are not a list": (names(TAG), "the image's names are"),
    "two images": (twice, "exactly one image"),
    "no image": (manifest([]), "exactly one image"),
    "no manifest": (manifest(None), "no file 'manifest.json'"),
    "a manifest that is no JSON": (manifest(b"["), "not JSON"),
    "a manifest that is not a list": (manifest({}), "exactly one image"),
    "a deep manifest": (manifest(b"[" * 100_000), "not JSON"),
    "a long manifest": (manifest(b" " * 2_000_000), "more than"),
    "a manifest without layers": (manifest([{"Config": "x"}]), "layers"),
    "a manifest without a configuration": (manifest([{"Layers": []}]), "configuration"),
    "another configuration": (another_config, "has not the hash"),
    "the configuration twice": (config_again, "in it twice"),
    "a configuration by way of a link": (config_by_link, "no file 'config'"),
    "a layer that is missing": (without_layer, "a layer is missing"),
    "a layer from outside": (outer_layer, "a layer is missing"),
    "a way up": (more("../x"), "not a plain path"),
    "a way up inside": (more("a/../../x"), "not a plain path"),
    "a way that is no way": (more("a/./b"), "not a plain path"),
    "an absolute path": (more("/etc/passwd"), "not a plain path"),
    "an absolute folder": (more("/", type=tarfile.DIRTYPE), "not a plain path"),
    "an odd name": (more("a\nb"), "not a plain path"),
    "a device": (more("null", type=tarfile.CHRTYPE), "neither a file"),
    "a block device": (more("disk", type=tarfile.BLKTYPE), "neither a file"),
    "a pipe": (more("pipe", type=tarfile.FIFOTYPE), "neither a file"),
    "a link out": (more("x", type=tarfile.SYMTYPE, target="../../etc/passwd"), "a link to"),
    "an absolute link": (more("x", type=tarfile.SYMTYPE, target="/etc/passwd"), "a link to"),
    "a hard link out": (more("x", type=tarfile.LNKTYPE, target="../x"), "a link to"),
    "a hard link to a later file": (more("x", type=tarfile.LNKTYPE, target="manifest.json"), "not to a file before it"),
    "a link to a folder": (more("x", type=tarfile.SYMTYPE, target="."), "a link to"),
    "a link to a link": (link_chain, "a link to"),
    "a link to itself": (more("x", type=tarfile.SYMTYPE, target="x"), "a link to"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD.keys())
def test_an_invalid_image_is_refused_with_the_reason(tmp_path: Path, change: Any, said: str) -> None:
    image = ImageTar(TAG)
    change(image)

    with pytest.raises(BadArchive, match=said):
        look(tmp_path, image.written(), id=image.id)


def test_an_image_with_another_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match="has not the hash"):
        look(tmp_path, ImageTar(TAG).written(), id=f"sha256:{'0' * 64}")


def test_a_file_that_is_not_a_tar_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"nothing of the kind" * 100, bytes(10_240)):
        with pytest.raises(BadArchive):
            look(tmp_path, data, id=ImageTar(TAG).id)


def test_a_compressed_tar_is_refused(tmp_path: Path) -> None:
    import gzip

    image = ImageTar(TAG)

    with pytest.raises(BadArchive, match="cannot be read as a tar"):
        look(tmp_path, gzip.compress(image.written()), id=image.id)


def test_a_truncated_tar_is_refused(tmp_path: Path) -> None:
    image = ImageTar(TAG)
    whole = image.written().rstrip(b"\0")

    for end in range(0, len(whole), 100):
        with pytest.raises(BadArchive):
            look(tmp_path, whole[:end], id=image.id)


def test_a_tar_with_too_many_files_is_refused(tmp_path: Path) -> None:
    image = ImageTar(TAG)
    for number in range(MEMBERS_MAX):
        image.add(f"more/{number}")

    with pytest.raises(BadArchive, match=f"more than {MEMBERS_MAX} files"):
        look(tmp_path, image.written(), id=image.id)


def test_headers_cannot_make_the_node_read_gigabytes(tmp_path: Path) -> None:
    image = ImageTar(TAG)
    bomb = tarfile.TarInfo("x")
    bomb.type, bomb.size = tarfile.XHDTYPE, 4 * 2**30

    with pytest.raises(BadArchive, match="too long"):
        look(tmp_path, bomb.tobuf(tarfile.GNU_FORMAT) + image.written(), id=image.id)


@pytest.mark.parametrize("type", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_negative_sizes_are_refused(tmp_path: Path, type: bytes) -> None:
    image = ImageTar(TAG)
    odd = tarfile.TarInfo("x")
    odd.type, odd.size = type, -1024

    with pytest.raises(BadArchive):
        look(tmp_path, odd.tobuf(tarfile.GNU_FORMAT) + image.written(), id=image.id)


def test_global_headers_are_refused(tmp_path: Path) -> None:
    image = ImageTar(TAG)

    with pytest.raises(BadArchive, match="headers for all"):
        look(tmp_path, image.written(pax_headers={"path": "manifest.json"}), id=image.id)


def test_a_sparse_file_is_refused(tmp_path: Path) -> None:
    image = ImageTar(TAG)
    sparse = tarfile.TarInfo("holes")
    sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": "99999999999", "GNU.sparse.name": "manifest.json"}
    image.members.append((sparse, b""))

    with pytest.raises(BadArchive):
        look(tmp_path, image.written(), id=image.id)


def test_a_corrupted_byte_at_any_place_never_changes_the_image_name_or_id(tmp_path: Path) -> None:
    image = ImageTar(TAG)
    good = image.written()
    expected = loaded(look(tmp_path, good, id=image.id))

    for place in range(0, len(good), 37):
        spoiled = bytearray(good)
        spoiled[place] ^= 0x5A
        try:
            written = look(tmp_path, bytes(spoiled), id=image.id)
        except BadArchive:
            continue
        assert loaded(written)[:2] == expected[:2]

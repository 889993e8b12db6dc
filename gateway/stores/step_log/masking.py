"""Removes secrets from what the step log writes, in each form in which programs usually write a text."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import quote, quote_plus

from gateway.core.json_text import dump, encode

JSON_DEPTH: Final = 3
"""Number of times that a text may have been written as JSON within JSON."""
_DIGITS: Final = re.compile("%[0-9A-F]{2}")
_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_UNKNOWN: Final = ((0, 0), (1, 2), (2, 3))
"""Bytes before a secret in its first group of base64, and the characters that also depend on these bytes."""


def masked(written: bytes, forms: Iterable[bytes]) -> bytes:
    """Return *written* with asterisks for secrets in any of *forms*: as many, because msgpack states lengths."""
    for form in forms:
        if form in written:
            written = written.replace(form, b"*" * len(form))
    return written


def forms_of(secrets: Iterable[str], *, in_base64: bool = True) -> list[bytes]:
    """Return *secrets* as they stand in text, JSON, percent encoding and base64. The longest come first."""
    found: set[bytes] = set()
    for secret in secrets:
        texts = {secret}
        for _ in range(JSON_DEPTH):
            texts |= {form for text in texts for form in (encode(text)[1:-1], dump(text)[1:-1].decode())}
        plain = secret.encode(errors="surrogatepass")
        percent = {quote(plain), quote(plain, safe=""), quote_plus(plain)}
        percent |= {_DIGITS.sub(lambda digits: digits[0].lower(), form) for form in percent}
        found |= {form.encode(errors="surrogatepass") for form in texts | percent}
        if in_base64:
            found |= {form for data in {plain, encode(secret)[1:-1].encode()} for form in _base64(data)}
    return sorted(found, key=len, reverse=True)


def _base64(data: bytes) -> Iterator[bytes]:
    """Yield the parts of base64 texts that *data* alone decides, wherever it stands in what was encoded."""
    for before, first in _UNKNOWN:
        form = base64.b64encode(bytes(before) + data)[first : (before + len(data)) * 8 // 6]
        yield form
        yield form.translate(_URL_SAFE)

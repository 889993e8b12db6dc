"""The ``X-Secrets`` header: base64 of ``{"NAME": {"value": "…", "allowed_domains": ["host", …]}}``.

Nothing here puts a secret into a message: the header is either understood or called malformed.
"""

import binascii
import json

from envserver.errors import Refused


def secrets_of(header: str | None, body: dict[str, str] | None) -> dict[str, str]:
    """Merge the secrets of header and body; the header wins.

    Raises:
        Refused: 400, the header is malformed.
    """
    merged = dict(body or {})
    if header:
        merged.update(_decoded(header))
    return merged


def _decoded(header: str) -> dict[str, str]:
    try:
        entries = json.loads(binascii.a2b_base64(header, strict_mode=True))
        values = {str(name): entry["value"] for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Refused(400, "malformed X-Secrets header") from None
    if not all(isinstance(value, str) for value in values.values()):
        raise Refused(400, "malformed X-Secrets header")
    return values

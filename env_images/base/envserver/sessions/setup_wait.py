"""How long a request is held for a session's setup, and what it is told then."""

from envserver.errors import Refused

SETUP_WAIT_S = 25.0
"""As long as the reference server holds it; its client asks again for up to ten minutes."""


def starting() -> Refused:
    return Refused(503, "Environment still starting.", {"X-Backend-State": "starting", "Retry-After": "2"})

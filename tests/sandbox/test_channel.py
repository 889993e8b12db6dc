"""The end of a connection: the channel delivers the reason before a request fails because of the end."""

import pytest
from envserver.sandbox import SandboxError
from envserver.sandbox import protocol as wire
from envserver.sandbox.channel import Channel


@pytest.mark.parametrize("unread", [0, 1], ids=["all was read", "a request was not read"])
async def test_the_last_event_of_a_closed_peer_is_delivered_before_a_send_fails(unread: int) -> None:
    ours, theirs = wire.pair()
    events: list[dict[str, object]] = []
    ends: list[int] = []
    channel = Channel(ours)
    channel.listen(events.append, lambda: ends.append(len(events)))
    for _ in range(unread):
        await channel.send({"op": "run"})

    wire.send(theirs, {"event": "killed", "reason": "init"})
    theirs.close()
    with pytest.raises(SandboxError, match="has ended"):
        await channel.send({"op": "run"})

    assert events == [{"event": "killed", "reason": "init"}]
    assert (ends, channel.is_closed) == ([1], True)

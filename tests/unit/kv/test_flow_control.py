"""Which workers a server does not listen to for a moment."""

import pytest

from reigen.kv.server.flow_control import MAX_LEAD_BYTES, SILENT_SECONDS, should_pause

NOW = 1000.0
JUST_NOW, LONG_AGO = NOW - SILENT_SECONDS / 2, NOW - SILENT_SECONDS * 2


@pytest.mark.parametrize(
    ("held", "others", "waits", "must", "why"),
    [
        (MAX_LEAD_BYTES + 1, [(0, JUST_NOW)], False, True, "ahead of another worker"),
        (MAX_LEAD_BYTES, [(0, JUST_NOW)], False, False, "allowed"),
        (MAX_LEAD_BYTES, [(0, JUST_NOW)], True, True, "ahead of another worker"),  # it goes on at half of that
        (MAX_LEAD_BYTES // 2, [(0, JUST_NOW)], True, False, "allowed"),
        (9 * MAX_LEAD_BYTES, [(8 * MAX_LEAD_BYTES, JUST_NOW)], True, True, "ahead of another worker"),
        (9 * MAX_LEAD_BYTES, [(9 * MAX_LEAD_BYTES, JUST_NOW)], True, False, "allowed"),
        (9 * MAX_LEAD_BYTES, [(9 * MAX_LEAD_BYTES, JUST_NOW), (0, JUST_NOW)], True, True, "ahead of another worker"),
        (9 * MAX_LEAD_BYTES, [(9 * MAX_LEAD_BYTES, JUST_NOW), (0, LONG_AGO)], True, False, "allowed"),
        (9 * MAX_LEAD_BYTES, [(0, LONG_AGO)], True, False, "nothing comes"),
        (9 * MAX_LEAD_BYTES, [], False, False, "nothing comes"),
    ],
)
def test_a_connection_waits_while_it_is_ahead_of_one_over_which_something_comes(held, others, waits, must, why):
    found, reason = should_pause(held, others, waits=waits, now=NOW)
    assert found is must
    assert why in reason


def test_of_connections_that_all_send_never_all_wait():
    """Whoever holds least never waits."""
    held = [0, 3 * MAX_LEAD_BYTES, 5 * MAX_LEAD_BYTES]
    waiting = [
        should_pause(each, [(other, JUST_NOW) for k, other in enumerate(held) if k != one], waits=True, now=NOW)[0]
        for one, each in enumerate(held)
    ]
    assert waiting == [False, True, True]

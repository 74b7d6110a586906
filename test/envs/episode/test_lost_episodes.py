"""The log of episodes that an error ends: each is named, and a traceback is not told for each."""

import logging

from torchrl_envs.episode.lost_episodes import tell_lost


def raised(what):
    try:
        raise ConnectionError(what)
    except ConnectionError as error:
        return error


def raised_elsewhere():
    try:
        raise ConnectionError("another server is down")
    except ConnectionError as error:
        return error


def test_errors_of_one_place_have_a_traceback_the_first_time_the_second_the_fourth(caplog):
    caplog.set_level(logging.WARNING)
    for row in range(9):
        tell_lost(f"Row {row}", "User failed in after_turn", raised(f"{row} is down"))
    tell_lost("Row 9", "User failed in after_turn", raised_elsewhere())
    tell_lost("Row 10", "User failed in begin", raised("10 is down"))
    tell_lost("Row 11", "User failed in begin", ValueError("never raised"))
    assert [bool(each.exc_info) for each in caplog.records] == [
        *(True, True, False, True, False, False, False, True, False),  # 1, 2, 4, 8 of 9
        *(True, True, False),
    ]
    said = [each.getMessage() for each in caplog.records]
    assert said[1] == "Row 1 ends: User failed in after_turn"
    assert said[2] == "Row 2 ends: User failed in after_turn: ConnectionError: 2 is down"
    assert said[11] == "Row 11 ends: User failed in begin: ValueError: never raised"

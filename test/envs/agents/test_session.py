"""What passes between a program and its episode, in every order."""

import asyncio

import pytest

from torchrl_envs.agents.session import AgentSession, ProgramEnd, SessionOver
from torchrl_envs.agents.turns import RequestError, TurnReply, TurnRequest

ONE = TurnRequest([{"role": "user", "content": "one"}], None, None)
TWO = TurnRequest([{"role": "user", "content": "two"}], None, None)


def reply(text):
    return TurnReply({"role": "assistant", "content": text}, "stop", 1, 1)


def event_of(session):
    return asyncio.run(asyncio.wait_for(session.next_event(), 10))


def test_a_client_that_tries_again_gets_the_answer_that_it_did_not_hear():
    session = AgentSession()
    first = session.ask(ONE)
    assert event_of(session) is ONE
    session.give_up(first)  # its time is up, in the midst of the turn
    again = session.ask(ONE)
    session.answer(reply("drawn once"))
    further = session.ask(ONE)
    assert event_of(session) is ONE  # the third: once is what it was not heard
    assert again.reply.result(0).message["content"] == "drawn once"
    assert not further.reply.done()
    session.answer(reply("drawn anew"))
    assert further.reply.result(0).message["content"] == "drawn anew"


def test_what_was_not_heard_is_no_answer_to_another_question():
    session = AgentSession()
    session.give_up(session.ask(ONE))  # before its turn: it is withdrawn
    first = session.ask(ONE)
    assert event_of(session) is ONE
    other = session.ask(TWO)
    session.give_up(first)
    session.answer(reply("lost"))
    again = session.ask(ONE)  # though another one waits before it
    assert event_of(session) is TWO
    assert not other.reply.done()
    session.answer(reply("two"))
    session.ask(TWO)
    assert event_of(session) is TWO
    assert again.reply.result(0).message["content"] == "lost"


def test_the_end_counts_whatever_was_asked_before():
    session = AgentSession()
    asked = session.ask(ONE)
    assert event_of(session) is ONE
    waiting = session.ask(TWO)
    session.end(1.0)
    session.end(error=KeyError("later"))
    assert event_of(session) == ProgramEnd(1.0, None)
    for unanswered in (asked, waiting):
        with pytest.raises(SessionOver, match="its program has ended"):
            unanswered.reply.result(0)
    with pytest.raises(SessionOver, match="its program has ended"):
        session.ask(ONE)
    session.answer(reply("nobody hears it"))


def test_a_refusal_of_one_request_is_none_of_the_next():
    session = AgentSession()
    refused = session.ask(ONE)
    assert event_of(session) is ONE
    session.answer(RequestError("not so"))
    with pytest.raises(RequestError, match="not so"):
        refused.reply.result(0)
    session.ask(ONE)
    assert event_of(session) is ONE

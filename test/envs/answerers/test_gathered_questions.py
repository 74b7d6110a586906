"""Questions that come at the same time are one call, and each gets its own answer or error."""

import asyncio
import contextlib
import pickle
import threading
import time

import pytest

from torchrl_envs.answerers.gathered_questions import GatheredQuestions


def q(text):
    return [{"role": "user", "content": text}]


def echo(questions):
    return [question[0]["content"] for question in questions]


def test_one_call_for_what_is_asked_at_once_and_the_next_for_what_comes_meanwhile():
    calls, goes_on, begun, alone = [], threading.Event(), threading.Event(), threading.Lock()

    def answer(questions):
        assert alone.acquire(blocking=False), "it is asked in turn"
        with contextlib.ExitStack() as held:
            held.callback(alone.release)
            calls.append(echo(questions))
            begun.set()
            assert goes_on.wait(20)
            return echo(questions)

    gathered = GatheredQuestions(answer, who="it")

    async def main():
        first = [asyncio.create_task(gathered.ask(q(f"a{i}"))) for i in range(5)]
        await asyncio.to_thread(begun.wait, 20)
        later = [asyncio.create_task(gathered.ask(q(f"b{i}"))) for i in range(3)]
        await asyncio.sleep(0.05)
        given_up = asyncio.create_task(gathered.ask(q("c")))
        await asyncio.sleep(0)
        given_up.cancel()
        goes_on.set()
        return await asyncio.gather(*first, *later)

    wanted = [[f"a{i}" for i in range(5)], [f"b{i}" for i in range(3)]]
    assert asyncio.run(main()) == [*wanted[0], *wanted[1]]
    assert calls == wanted, "nobody waits for c, which is not asked"
    # Once more, on another loop.
    assert asyncio.run(gathered.ask(q("d"))) == "d"


def test_calls_of_an_async_answerer_go_on_beside_each_other():
    async def main():
        met = asyncio.Barrier(2)  # only two calls at once get through it

        async def answer(questions):
            await met.wait()
            return echo(questions)

        gathered = GatheredQuestions(answer, who="it")
        first = asyncio.create_task(gathered.ask(q("a")))
        await asyncio.sleep(0.05)
        return await asyncio.wait_for(asyncio.gather(first, gathered.ask(q("b"))), 20)

    assert asyncio.run(main()) == ["a", "b"]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (["1"], "gave 1 answers to 2 questions"),
        ("ab", "a list with an answer to each"),
        (None, "a list with an answer to each"),
        ([1, 2], "say a text, not"),
        ([OSError("down"), OSError("down")], "down"),
    ],
)
def test_each_hears_why_there_is_no_answer(answers, words):
    gathered = GatheredQuestions(lambda _: answers, who="the user")

    async def main():
        asked = [gathered.ask(q("a")), gathered.ask(q("b"))]
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in asyncio.run(main()):
        assert isinstance(error, Exception)
        assert words in str(error)


def test_an_error_of_the_call_reaches_all_and_the_next_question_is_asked():
    calls = []

    def answer(questions):
        calls.append(len(questions))
        if len(calls) == 1:
            raise OSError("down")
        return echo(questions)

    gathered = pickle.loads(pickle.dumps(GatheredQuestions(echo, who="it")))
    gathered.answerer = answer

    async def main():
        both = asyncio.gather(gathered.ask(q("a")), gathered.ask(q("b")), return_exceptions=True)
        return [*map(str, await both), await gathered.ask(q("c"))]

    assert asyncio.run(main()) == ["down", "down", "c"]
    assert calls == [2, 1]


def test_a_busy_loop_makes_nobody_late():
    """All is late there, so that a pause without a question says nothing."""
    calls = []

    async def answer(questions):
        calls.append(echo(questions))
        return echo(questions)

    async def main():
        gathered = GatheredQuestions(answer, who="it")
        first = asyncio.create_task(gathered.ask(q("a")))
        for _ in range(4):
            await asyncio.sleep(0)
            time.sleep(0.01)  # blocks the loop, as rows that are computed do
        return await asyncio.gather(first, gathered.ask(q("b")))

    assert asyncio.run(main()) == ["a", "b"]
    assert calls == [["a", "b"]]

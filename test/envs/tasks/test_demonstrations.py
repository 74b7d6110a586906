"""What games are demonstrated with: the skill, and slips as often as they should be."""

import random
from collections import Counter

import pytest

from torchrl_envs.tasks.games.wordle import WORDS, guess_feedback
from torchrl_envs.tasks.number_guessing import NumberGuessing
from torchrl_envs.tasks.questions.demonstrations import guesses_with_slips
from torchrl_envs.tasks.registry import make_task


def guesses(conversation):
    """Arguments and answers of the calls."""
    calls = [m["tool_calls"][0]["function"] for m in conversation if m.get("tool_calls")]
    answers = [m["content"] for m in conversation if m["role"] == "tool"]
    return [
        (*call["arguments"].values(), answer) for call, answer in zip(calls, answers, strict=True)
    ]


def test_guesses_without_slips():
    """Of what the answers before allow: here the smallest."""
    (game,) = guesses_with_slips(
        *(NumberGuessing, [{"prompt": "Find it.", "number": 5}], range(3, 9)),
        secret="number",
        argument="n",
        compare=lambda n, number: "far" if abs(n - number) > 1 else "near",
        choose=min,
        num_guesses=4,
        rng=random.Random(0),
        right_fraction=1.0,
    )
    # 3 is far from 5, and so are 5 to 8 from 3; 5 is the first of them.
    assert guesses(game) == [(3, "higher"), (5, "found")]
    assert game[0] == {"role": "user", "content": "Find it."}
    assert game[-1] == {"role": "assistant", "content": "done"}


def test_bisection_with_slips():
    task = make_task("number_guessing", num_demonstrations=2000, seed=3)
    right, first = [], Counter()
    for game in task.demonstrations:
        low, high = 1, 15
        for number, (n, answer) in enumerate(guesses(game)):
            right.append(n == (low + high) // 2)
            first[n] += number == 0
            assert number < 4
            low = max(low, n + 1) if answer == "higher" else low
            high = min(high, n - 1) if answer == "lower" else high
    # Two in five are chosen, and of the others one in fifteen is the middle by chance.
    assert sum(right) / len(right) == pytest.approx(0.4 + 0.6 / 15, abs=0.02)
    assert set(first) == set(range(1, 16)), "a slip may be any number"
    found = sum(guesses(game)[-1][1] == "found" for game in task.demonstrations) / 2000
    assert 0.38 < found < 0.46, "room is left for what GRPO adds"


@pytest.mark.parametrize(("level", "count"), [("own", 632), ("easy", 24)])
def test_words_that_the_marks_allow_with_slips(level, count):
    task = make_task("wordle", num_demonstrations=300, num_held_out=200, level=level)
    asked, slips, seen = 0, [], set()
    for game in task.demonstrations:
        known = []
        for word, answer in guesses(game):
            marks = answer.split("\n")[1].replace(" ", "")
            allowed = [w for w in WORDS if all(guess_feedback(g, w) == m for g, m in known)]
            if known and len(allowed) < 64:  # so few that chance hardly finds one of them
                asked += 1
                slips.append(word not in allowed)
            known.append((word, marks))
            seen.add(word)
        secret = next((word for word, marks in known if marks == "GGGGG"), None)
        assert secret in (None, known[-1][0]), "nothing is guessed after the secret"
    assert asked > 300
    assert sum(slips) / asked == pytest.approx(0.6, abs=0.06)
    assert seen <= set(WORDS)
    assert len(seen) == pytest.approx(count, rel=0.3)


def test_the_levels_of_wordle():
    easy = make_task("wordle", level="easy", num_held_out=300, num_demonstrations=1)
    words = {row["word"] for row in easy.train_rows}
    assert len(words) == 24
    assert {row["word"] for row in easy.held_out_rows} == words, "each is trained and tested"
    own = make_task("wordle", num_held_out=300, num_demonstrations=1)
    held_out = {row["word"] for row in own.held_out_rows}
    assert len(held_out) == 300
    assert not held_out & {row["word"] for row in own.train_rows}
    with pytest.raises(ValueError, match=r"level must be one of .*, got 'hard'"):
        make_task("wordle", level="hard")

"""What games are demonstrated with: the skill, and slips as often as they should be."""

import random
from collections import Counter

import pytest

from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.demonstrations import guesses_with_slips
from torchrl_envs.tasks.task import TaskEnv
from torchrl_tasks.number_guessing import NumberGuessing
from torchrl_tasks.wordle_game import guess_feedback


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


@pytest.mark.parametrize(("level", "count", "most"), [("own", 632, 6), ("easy", 16, 4)])
def test_words_that_the_marks_allow_with_slips(level, count, most):
    task = make_task("wordle", num_demonstrations=600, num_held_out=200, level=level)
    words = sorted({row["word"] for row in (*task.train_rows, *task.held_out_rows)})
    assert len(words) == count
    right, chance, seen = 0, 0.0, set()
    for game in task.demonstrations:
        known = []
        for word, answer in guesses(game):
            marks = answer.split("\n")[1].replace(" ", "")
            allowed = (w for w in words if all(guess_feedback(g, w) == m for g, m in known))
            right += word == next(allowed)
            chance += 0.2 + 0.8 / count
            known.append((word, marks))
            seen.add(word)
        secret = next((word for word, marks in known if marks == "GGGGG"), None)
        assert secret in (None, known[-1][0]), "nothing is guessed after the secret"
        assert len(known) <= most
    # One in five is the first that is allowed, and some slips are by chance.
    assert right == pytest.approx(chance, rel=0.1)
    assert seen <= set(words)
    assert len(seen) > 0.9 * count


def test_the_levels_of_wordle(scripted, play, call_text):
    easy = make_task("wordle", level="easy", num_held_out=300, num_demonstrations=1)
    words = {row["word"] for row in easy.train_rows}
    assert {row["word"] for row in easy.held_out_rows} == words, "each is trained and tested"
    own = make_task("wordle", num_held_out=300, num_demonstrations=1)
    held_out = {row["word"] for row in own.held_out_rows}
    assert len(held_out) == 300
    assert not held_out & {row["word"] for row in own.train_rows}
    with pytest.raises(ValueError, match=r"level must be one of .*, got 'hard'"):
        make_task("wordle", level="hard")

    # Four guesses there, and no fifth one.
    wrong = [word for word in words if word != easy.train_rows[0]["word"]][:4]
    said = [call_text("guess", word=word) for word in (*wrong, easy.train_rows[0]["word"])]
    env = TaskEnv(easy, num_envs=1, shuffle=False, max_steps=6)
    (end,) = play(env, scripted([*said, "done"]))
    told = end["history"].prompt[0].content
    assert "in 4 guesses" in told[0]
    assert "over, the word was" in told[8]
    assert "the game is over" in told[10]
    assert end["reward"].item() == 0.0
    env.close()

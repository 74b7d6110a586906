"""Games as tasks: their rules, and episodes of each of TRL's examples, offline."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs.transforms import Compose

from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools, RewardFunctions, StepCounter
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.combined import combine_tasks
from torchrl_envs.tasks.textarena import textarena_environment
from torchrl_tasks.catch_game import CatchGame
from torchrl_tasks.wordle_game import WORDS, WordleGame, guess_feedback

# Rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        pytest.param("crane", "crane", "GGGGG", id="the word itself"),
        pytest.param("cargo", "crane", "GYYXX", id="elsewhere and not at all"),
        pytest.param("speed", "crepe", "XYGYX", id="two e's in both: one in place, one elsewhere"),
        pytest.param("eerie", "crane", "XXYXG", id="three e's guessed, one there: the right place"),
        pytest.param("allay", "label", "YYYXX", id="two l's there, two guessed: each marked once"),
    ],
)
def test_feedback(guess, secret, marks):
    assert guess_feedback(guess, secret) == marks


five_letters = st.text("abc", min_size=5, max_size=5)


@given(five_letters, five_letters)
def test_feedback_marks_a_letter_as_often_as_both_have_it(guess, secret):
    marks = guess_feedback(guess, secret)
    assert [m == "G" for m in marks] == [g == s for g, s in zip(guess, secret, strict=True)]
    marked = Counter(letter for letter, mark in zip(guess, marks, strict=True) if mark != "X")
    assert marked == Counter(guess) & Counter(secret)


def test_wordle_game():
    assert len(WORDS) == len(set(WORDS)) > 500
    assert WordleGame(seed=5).secret == WordleGame(seed=5).secret in WORDS
    game = WordleGame("crane")
    with pytest.raises(ValueError, match="5 letters"):
        game.guess("cranes")
    assert game.guesses == []
    for _ in range(6):
        game.guess(" Cargo")
    assert game.is_over
    assert not game.is_won
    with pytest.raises(ValueError, match="over"):
        game.guess("crane")
    with pytest.raises(ValueError, match="not in the word list"):
        WordleGame("crane", allowed={"crane"}).guess("cargo")
    with pytest.raises(ValueError, match="secret must be"):
        WordleGame("cranes")


@given(st.integers(0, 2**31), st.integers(2, 12), st.integers(1, 8))
def test_catch_is_won_by_who_follows_the_ball(seed, num_rows, num_columns):
    game = CatchGame(seed, num_rows=num_rows, num_columns=num_columns)
    start = abs(game.ball_column - game.paddle_column)
    moves = 0
    while not game.is_over:
        lines = game.board().split("\n")
        assert len(lines) == num_rows
        column = lines[moves].index("o")
        gap = column - lines[-1].index("=")
        game.move("left" if gap < 0 else "right" if gap > 0 else "stay")
        moves += 1
    assert moves == num_rows - 1
    assert game.reward == (1.0 if start <= moves else -1.0)
    assert ("*" in game.board()) == (game.reward == 1.0)
    with pytest.raises(ValueError, match="over"):
        game.move("stay")


# Episodes ---------------------------------------------------------------------------------------


def env_of(task, rows, *functions):
    parts = [
        DataLoadingPrimer(rows),
        EnvironmentTools(task.environment, show_schemas=False),
        StepCounter(max_steps=task.max_turns),
    ]
    if functions:
        parts.append(RewardFunctions(functions))
    return ChatEnv(batch_size=(len(rows),)).append_transform(Compose(*parts))


def reward_of_rows(ends):
    return [end["reward"][row].item() for row, end in enumerate(ends)]


def small(name, **settings):
    return make_task(name, num_rows=300, num_held_out=30, num_demonstrations=5, **settings)


def test_wordle_episodes(scripted, play, call_text):
    task = small("wordle")
    secrets = {row["word"] for row in task.held_out_rows}
    assert not secrets & {row["word"] for row in task.train_rows}
    rows = [{"prompt": f"{name}:", "word": "crane"} for name in ("win", "lose")]
    misses = [call_text("guess", word=word) for word in WORDS[:7]]
    policy = scripted(
        {
            "win:": [call_text("guess", word="cargo"), call_text("guess", word="crane"), "done"],
            "lose:": [*misses, "done"],
        }
    )
    env = env_of(task, rows)
    ends = play(env, policy)
    assert reward_of_rows(ends) == [1.0, 0.0]
    won, lost = (end["history"].prompt[row] for row, end in enumerate(ends))
    assert won.content[2] == "C A R G O\nG Y Y X X"
    assert won.content[4].endswith("found")
    assert "the word was crane" in lost.content[12]
    assert "the game is over" in lost.content[14]
    env.close()


def test_catch_episodes(scripted, play, call_text):
    task = small("catch")
    columns = {CatchGame(row["start"]).ball_column: row for row in task.train_rows}
    assert sorted(columns) == [0, 1, 2, 3, 4]
    right = [call_text("move", direction="right")] * 2
    policy = scripted([*right, *[call_text("stay")] * 7, "done"])
    rows = [columns[column] for column in range(5)]
    env = env_of(task, rows)
    ends = play(env, policy)
    assert reward_of_rows(ends) == [0.0, 0.0, 0.0, 0.0, 1.0]
    opening = ends[0]["history"].prompt[0].content[0]
    assert opening.startswith(rows[0]["prompt"])
    assert "\n\no....\n" in opening
    env.close()


def test_multi_env_routes_rows_and_shows_only_their_tools(scripted, play, call_text):
    task = small("multi_env")
    names = [row["environment"] for row in task.train_rows[:6]]
    assert names == ["echo", "catch", "wordle"] * 2
    rows = [{**row, "prompt": row["environment"]} for row in task.train_rows[:3]]
    policy = scripted(
        {
            "echo": [call_text("echo", message=rows[0]["message"]), "done"],
            "catch": [call_text("guess", word="crane"), "done"],
            "wordle": [call_text("guess", word=rows[2]["word"]), "done"],
        }
    )

    def wordle_only(environments, **kwargs):
        return [0.5 if type(env).__name__ == "Wordle" else None for env in environments]

    env = env_of(task, rows, wordle_only)
    ends = play(env, policy)
    assert reward_of_rows(ends) == [1.0, 0.0, 1.5]
    assert "unknown tool 'guess'" in ends[1]["history"].prompt[1].content[2]
    assert ends[2]["rewards", "wordle_only"].flatten().isnan().tolist()[:2] == [True, True]
    env.close()


def test_tasks_that_cannot_be_combined():
    echo = small("echo")
    with pytest.raises(ValueError, match="different names"):
        combine_tasks("both", [echo, echo])
    with pytest.raises(ValueError, match="several environments already"):
        combine_tasks("both", [echo, small("multi_env")])
    with pytest.raises(ValueError, match="num_held_out"):
        make_task("wordle", num_held_out=10_000)


# TextArena --------------------------------------------------------------------------------------


def test_textarena_sessions_do_not_share_random_numbers():
    game = textarena_environment("2048-v0")
    alone = game()
    texts = [alone.reset(seed=1), *(alone.act("[up]") for _ in range(4))]
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    first, other = game(), game()
    found, drawn = [first.reset(seed=1)], []
    assert other.reset(seed=2) != found[0]
    for turn in range(4):
        found.append(first.act("[up]"))
        other.act("[left]")
        if turn < 3:
            drawn.append(random.random())
    assert found == texts
    assert drawn == expected


def test_own_random_is_in_force_inside_only():
    own = OwnRandom(3)
    reference = random.Random(3)
    with own():
        first = random.random()
    random.random()
    with own():
        second = random.random()
    assert [first, second] == [reference.random(), reference.random()]


def test_a_textarena_game_to_its_end(scripted, play, call_text):
    task = make_task("textarena/Sudoku-v0-easy", num_rows=4, num_held_out=2, num_demonstrations=1)
    rows = [{"prompt": "play", "game_seed": 4}]
    env = env_of(task, rows)
    wrong = call_text("act", action="[1 1 3]")  # 3 is in that row already
    ends = play(env, scripted([wrong, wrong, "done"]))
    contents = ends[0]["history"].prompt[0].content
    assert "R1" in contents[0]
    assert "invalid move" in contents[2]
    assert contents[4].startswith("The game is over.")
    assert 0.0 <= reward_of_rows(ends)[0] < 1.0
    env.close()


@pytest.mark.parametrize(
    ("game", "error", "named"),
    [
        ("NoSuchGame-v0", ValueError, "no game 'NoSuchGame-v0'"),
        ("ConnectFour-v0", ValueError, "can't be played alone"),
        ("Wordle-v0", LookupError, "word lists .* nothing is downloaded"),
    ],
)
def test_textarena_games_that_cannot_be_played(game, error, named):
    with pytest.raises(error, match=named):
        textarena_environment(game)

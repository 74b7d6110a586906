"""Self-play: the rules of the game, the rows of both seats, and a run that learns."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer

from objectives import MCAdvantage, RoleBaseline
from torchrl_data import read_conversations
from torchrl_data.keys import FULL
from torchrl_envs.tasks.games.nim import NimGame, is_won, perfect_move, random_move
from torchrl_envs.tasks.registry import make_task
from torchrl_envs.tasks.task import TaskEnv


@given(st.integers(1, 30), st.integers(0, 99))
def test_a_perfect_player_wins_from_every_heap_that_can_be_won(heap, seed):
    rng = random.Random(seed)
    game = NimGame(heap)
    wins = is_won(heap)
    player = (perfect_move, random_move) if wins else (random_move, perfect_move)
    while not game.is_over:
        game.take(player[game.turn](game.heap, rng))
    assert game.winner == (0 if wins else 1)
    with pytest.raises(ValueError, match="over"):
        game.take(1)


@pytest.mark.parametrize(("heap", "n"), [(5, 0), (5, 4), (2, 3)])
def test_a_move_that_is_not_allowed_loses(heap, n):
    game = NimGame(heap)
    game.take(n)
    assert game.winner == 1


def test_the_test_can_be_won(scripted, play, call_text):
    """By who leaves multiples of four, whatever the other one does; by nobody who just leaves."""
    task = make_task("nim", num_held_out=16, num_demonstrations=4, num_rows=8)
    for row in task.held_out_rows:
        assert row["opponent"] == "random" or is_won(row["heap"]) == row["begins"]
    rows = [
        {**task.held_out_rows[1], "heap": 5, "begins": True},
        {**task.held_out_rows[1], "heap": 7, "begins": True},
    ]
    env = TaskEnv(replace(task, train_rows=rows), num_envs=2, shuffle=False)
    # From 5: take 1, and then what is left of four after each of the other one's moves.
    scripts = {"has 5": [call_text("take", n=1), call_text("take", n=1), "done"], "has 7": ["no"]}
    ends = play(env, scripted(scripts))
    said = ends[0]["history"].prompt[0].content[-2]
    left = int(ends[0]["history"].prompt[0].content[2].split()[-1].rstrip("."))
    assert 1 <= left <= 3, "the perfect player had to leave something"
    assert ends[0]["reward"][0].item() == float(left == 1) == float(said == "you win")
    assert ends[1]["reward"][1].item() == 0.0
    assert ends[0]["rewards", "against_perfect"][0].item() == float(left == 1)
    assert ends[0]["rewards", "against_random"][0].isnan().all()
    env.close()


def test_both_seats_of_a_game_are_rows(script, scripted, call_text):
    """Three games: one to its end, one with a move that is none, one whose first turn is none."""
    script("self-play")
    games = sys.modules["games"]
    task = make_task("nim", num_held_out=2, num_demonstrations=4, num_rows=8)
    rows = [{**task.train_rows[0], "heap": heap} for heap in (5, 9, 11)]
    env = TaskEnv(replace(task, train_rows=rows), num_envs=6, repeats=2, shuffle=False)
    take = {n: call_text("take", n=n) for n in (1, 2, 9)}
    policy = scripted(
        {
            **{"has 5.": [take[1], take[2]], "has 4.": [take[2]]},  # 5 - 1 - 2 - 2: wins
            **{"has 9.": [take[2]], "has 7.": [take[9]]},
            "has 11.": ["I resign"],
        }
    )
    advantage = MCAdvantage(2, estimator=RoleBaseline(decay=0.5))
    buffer = ReplayBuffer(storage=LazyStackStorage(6), transform=advantage, batch_size=6)
    batch = games.GameCollector(env, policy, task.game, replay_buffer=buffer).collect()
    texts = [
        [(m["role"], m["content"]) for m in read_conversations(row, FULL, who="test").messages(0)]
        for row in batch.unbind(0)
    ]
    prompt = rows[0]["prompt"]
    assert texts[0] == [
        ("user", f"{prompt}\n\nThe heap has 5."),
        ("assistant", take[1]),
        ("tool", "The heap has 2."),
        ("assistant", take[2]),
    ]
    assert texts[1] == [("user", f"{prompt}\n\nThe heap has 4."), ("assistant", take[2])]
    assert batch["agent"].flatten().tolist() == [0, 1] * 3
    assert batch["group_id"].flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["reward"].flatten().tolist() == [1, 0, 1, 0, 0, 0]
    assert batch["scorable"].flatten().tolist() == [True] * 5 + [False], "nothing was played there"
    # Of each seat R - b, and b <- (b + R) / 2 after it: 1 - 0, 1 - 1/2, 0 - 3/4 of the first one.
    trained = buffer[:]
    seats = [
        (int(row["agent"]), float(row["advantage"].flatten()[-1])) for row in trained.unbind(0)
    ]
    assert [value for seat, value in seats if seat == 0] == [1.0, 0.5, -0.75]
    assert not any(value for seat, value in seats if seat == 1)
    env.close()


@pytest.mark.slow
def test_a_run_of_the_recipe(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = ("debug=tiny", "logger=none", "evaluate.num_shown=0", "warm_start.num_steps=60")
    result = run_recipe("self-play", *tiny, "task.num_demonstrations=256")
    assert result["steps"] == 2
    assert result["optimizer_steps"] == 8
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    # One seat of each game wins; a seat that never moved is not scored.
    assert all(json.loads(line)["reward"] >= 0.5 for line in lines)
    assert {"before/rewards/against_random", "after/rewards/against_perfect"} <= result.keys()


def test_what_is_no_game_for_two_is_refused(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="task=echo is no game for two; task=nim is one"):
        run_recipe("self-play", "task=echo", "evaluate.num_prompts=4")
    with pytest.raises(SystemExit, match=r"group_size=2, the seats of a game; got .*group_size=4"):
        run_recipe("self-play", "collector.group_size=4")

"""Self-play: the rules of the game, the rows of both seats, and a run that learns."""

import copy
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer

from objectives import MCAdvantage, RoleBaseline
from torchrl_agents.settings.schema import PolicyConfig, RecipeConfig
from torchrl_data import read_conversations
from torchrl_data.keys import FULL
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer
from torchrl_tasks.nim_game import NimGame, is_won, perfect_move, random_move


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
    games = sys.modules["game_collector"]
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
    assert str(batch["reward"].flatten().tolist()) == "[1.0, 0.0, 1.0, 0.0, 0.0, nan]"
    assert batch["scorable"].flatten().tolist() == [True] * 5 + [False], "nothing was played there"
    # Of each seat R - b, and b <- (b + R) / 2 after it: 1 - 0, 1 - 1/2, 0 - 3/4 of the first one.
    trained = buffer[:]
    seats = [
        (int(row["agent"]), float(row["advantage"].flatten()[-1])) for row in trained.unbind(0)
    ]
    assert [value for seat, value in seats if seat == 0] == [1.0, 0.5, -0.75]
    assert not any(value for seat, value in seats if seat == 1)
    env.close()


def test_a_past_version_plays_its_seat_and_is_not_trained(script, scripted, call_text):
    """Two games from 5: in the first the past takes the second seat, the other one is self-play."""
    script("self-play")
    games = sys.modules["game_collector"]
    task = make_task("nim", num_held_out=2, num_demonstrations=4, num_rows=8)
    rows = [{**task.train_rows[0], "heap": heap} for heap in (5, 6)]
    env = TaskEnv(replace(task, train_rows=rows), num_envs=4, repeats=2, shuffle=False)
    take = {n: call_text("take", n=n) for n in (1, 2, 3)}
    now = scripted({"has 5.": [take[1], take[1]], "has 6.": [take[3]], "has 3.": [take[3]]})
    past = scripted({"has 4.": [take[2]], "has 1.": ["I resign"]})  # 5 - 1 - 2 - 1
    pool = SimpleNamespace(draw={2: {0: 1}}.get, policy=past)
    collector = games.GameCollector(env, now, task.game, pool)
    batch = collector.collect()
    assert batch["agent"].flatten().tolist() == [0, 0, 1]
    assert batch["past_opponent"].flatten().tolist() == [1, 0, 0]
    assert batch["reward"].flatten().tolist() == [1, 0, 1]
    assert batch["rewards", "win_against_past"].flatten().tolist()[0] == 1.0
    assert batch["rewards", "win_against_past"].flatten().isnan().tolist() == [False, True, True]
    said = read_conversations(batch[0], FULL, who="test").messages(0)
    assert [m["content"] for m in said][1:] == [take[1], "The heap has 2.", take[1]]
    env.close()


def test_the_pool_of_past_versions(script):
    """Every second step, two of them; who plays follows from the seed and the step."""
    script("self-play")
    opponents = sys.modules["opponent_pool"]
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["The heap has 7."], vocab_size=300)
    actor = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
    run = RecipeConfig(policy=PolicyConfig(max_new_tokens=4))
    cfg = opponents.OpponentsConfig(every=2, max_size=2, share=0.5)
    pool = opponents.OpponentPool(cfg, run, actor)

    def bias(model):  # one of its weights, of which each version has a value of its own
        return next(model.parameters()).flatten()[0].item()

    kept, seen = [[step for step, _ in pool.versions]], set()
    weight_after = {0: bias(actor.model)}
    for number in range(1, 7):
        seats = pool.draw(6)
        assert len(seats) == 3
        assert set(seats.values()) == {0, 1}
        played_by = bias(pool.policy.model)
        assert played_by in [weight_after[step] for step, _ in pool.versions]
        seen.add(played_by)
        with torch.no_grad():
            next(actor.model.parameters()).fill_(float(number))
        assert bias(pool.policy.model) == played_by, "what is trained is another model"
        pool.after(SimpleNamespace(number=number))
        weight_after[number] = float(number)
        kept.append([step for step, _ in pool.versions])
        if number == 3:
            state = copy.deepcopy(pool.state_dict())
            expected = (pool.draw(6), bias(pool.policy.model))
    assert kept == [[0], [0], [0, 2], [0, 2], [2, 4], [2, 4], [4, 6]]
    assert len(seen) > 1
    later = opponents.OpponentPool(cfg, run, actor)
    later.load_state_dict(state)
    assert [step for step, _ in later.versions] == [0, 2]
    assert (later.draw(6), bias(later.policy.model)) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("opponents.share=0.2",), "set opponents.every"),
        (
            ("opponents.every=2", "opponents.share=0"),
            r"opponents.share must be in \(0, 1\], got 0.0",
        ),
        (("opponents.every=0",), "opponents.every must be at least 1, got 0"),
        (("opponents.every=2", "engine=vllm"), "take engine=transformers, not vllm"),
    ],
)
def test_opponents_that_can_not_be(settings, words, run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words):
        run_recipe("self-play", *settings)


@pytest.mark.slow
@pytest.mark.weekly
def test_a_run_against_past_versions_goes_on_as_it_would_have(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ("debug=tiny", "logger=none", "evaluate.num_shown=0", "evaluate.num_prompts=4")
    common += ("warm_start.num_steps=40", "task.num_demonstrations=256", "task.largest=8")
    common += ("optim.schedule=constant", "opponents.every=1", "opponents.max_size=2")

    def metrics(*arguments):
        folder = Path(run_recipe("self-play", *common, *arguments)["output_dir"])
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        timed = ("time/", "throughput/", "system/")
        return [{k: v for k, v in x.items() if not k.startswith(timed)} for x in lines]

    whole = metrics("name=whole", "train.num_steps=4")
    first = metrics("name=cut", "train.num_steps=2")
    assert metrics("resume=outputs/self_play/nim/cut-001", "train.num_steps=4") == whole
    assert first == whole[:2]
    assert [line["opponents"] for line in whole] == [2.0] * 4
    assert all("rewards/win_against_past/mean" in line for line in whole)


@pytest.mark.slow
def test_a_run_of_the_recipe(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = ("debug=tiny", "logger=none", "evaluate.num_shown=0", "warm_start.num_steps=60")
    result = run_recipe("self-play", *tiny, "task.num_demonstrations=256")
    assert result["steps"] == 2
    assert result["optimizer_steps"] == 8
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["kl_to_ref"] > 0, "it is held near the model that it started from"
    # One seat of each game wins; a seat that never moved is not scored.
    assert all(json.loads(line)["reward"] >= 0.5 for line in lines)
    assert {"before/rewards/against_random", "after/rewards/against_perfect"} <= result.keys()


def test_what_is_no_game_for_two_is_refused(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="task=echo is no game for two; task=nim is one"):
        run_recipe("self-play", "task=echo", "evaluate.num_prompts=4")
    with pytest.raises(SystemExit, match=r"group_size=2, the seats of a game; got .*group_size=4"):
        run_recipe("self-play", "collector.group_size=4")

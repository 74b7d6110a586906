"""Environments that are stepped with text, each written as its library documents it."""

import random
import sys
import threading
from types import SimpleNamespace

import pytest
from torchrl.envs.transforms import Compose

from torchrl_data import read_conversations
from torchrl_data.keys import PROMPT
from torchrl_envs import ChatEnv, DataLoadingPrimer, StepCounter, StepEnvironments
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import Task, TaskEnv

ROWS = [{"prompt": "Go.", "answer": "7", "size": 3}]
LONGER = [{"prompt": str(number)} for number in range(200)]
CLOSED: list[str] = []


class Corridor:
    """Gymnasium: keyword-only seed and options; the reward of each step; a limit of its own."""

    def __init__(self, length=2, limit=9):
        self.length, self.limit = length, limit

    def reset(self, *, seed=None, options=None):
        self.length = (options or {}).get("size", self.length)
        self.place, self.steps = 0, 0
        return f"You are at 0 of {self.length}.", {"seed": seed}

    def step(self, action):
        self.place += action == "on"
        self.steps += 1
        reward = 0.5 if action == "on" else -0.25
        over = self.place == self.length, self.steps == self.limit
        return f"at {self.place}", reward, *over, {}

    def close(self):
        CLOSED.append("corridor")


class Guess:
    """GEM: seed by position or name, no options, and Python's global random numbers."""

    def __init__(self):
        self.reset()

    def reset(self, seed=None):
        del seed
        self.number = random.randint(0, 10**9)
        return f"The number is {self.number}.", {}

    def step(self, action):
        # GEM says both at the end of a game.
        return "<over>", float(action == str(self.number)), True, True, {}


class Sums:
    """SkyRL Gym: init() with messages, a dict from step(), and the row as extras."""

    def __init__(self, env_config=None, extras=None):
        self.config, self.answer = env_config, extras["answer"]
        self.tries = 0

    def init(self, prompt):
        return [{"role": "system", "content": "Be brief."}, *prompt], {"mode": "train"}

    def step(self, action):
        self.tries += 1
        done = action == self.answer or self.tries == 2
        observations = [] if done else [{"role": "user", "content": "no"}]
        return {
            "observations": observations,
            "reward": float(action == self.answer),
            "done": done,
            "metadata": {},
        }

    def close(self):
        CLOSED.append("sums")


class Rewriting(Sums):
    def step(self, action):
        return {**super().step(action), "postprocessed_action": action[:1]}


class OldGym(Corridor):
    def step(self, action):
        return super().step(action)[:4]


class Grid(Corridor):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return 0, {}


class Stuck(Corridor):
    def step(self, action):
        raise OSError("the door is locked")


class Late(Corridor):
    def step(self, action):
        del action
        threading.Event().wait(1)


def own_task(*, letter: str, num_held_out: int = 1, seed: int = 0) -> Task:
    """What a factory of tasks looks like."""
    rows = [{"prompt": letter}]
    return Task(name=f"{letter}{seed}", train_rows=rows, held_out_rows=rows * num_held_out)


class Adder:
    """An environment with tools."""

    def reset(self, **row):
        del row

    def step(self, amount: int) -> str:
        """Go on.

        Args:
            amount: how far.
        """
        return str(amount)

    def get_reward(self):
        return 1.0


@pytest.fixture
def run(play, scripted):
    """Plays an episode of an environment; gives its end and what was said."""

    def run(turns, make, *, max_turns=8, **settings):
        env = ChatEnv(batch_size=1).append_transform(
            Compose(
                DataLoadingPrimer(ROWS, group_size=1),
                StepEnvironments(make, **settings),
                StepCounter(max_steps=max_turns),
            )
        )
        CLOSED.clear()
        try:
            (end,) = play(env, scripted({"Go.": turns}))
        finally:
            env.close()
        said = read_conversations(end, PROMPT, who="test").messages(0)
        return end, [(message["role"], message["content"]) for message in said]

    return run


def test_gymnasium(run):
    end, said = run(["on", "off", "on"], lambda _: Corridor())
    assert said == [
        ("user", "Go.\n\nYou are at 0 of 2."),
        *[("assistant", "on"), ("user", "at 1"), ("assistant", "off"), ("user", "at 1")],
        *[("assistant", "on"), ("user", "at 2")],
    ]
    assert end["reward"].item() == 0.5 - 0.25 + 0.5
    assert end["terminated"].item()
    assert end["scorable"].item()
    assert CLOSED == ["corridor"]


def test_columns_are_options_and_the_last_reward_may_count(run):
    end, said = run(
        ["on", "off", "on"], lambda _: Corridor(limit=2), reset_columns=["size"], reward="last"
    )
    assert said[0] == ("user", "Go.\n\nYou are at 0 of 3.")
    assert len(said) == 5
    assert end["reward"].item() == -0.25
    assert end["truncated"].item()
    assert not end["terminated"].item()


def test_columns_that_the_data_lack_are_refused_before_the_first_episode(run):
    words = r"StepEnvironments needs the columns \['width'\].* have \['answer', 'prompt', 'size'\]"
    with pytest.raises(ValueError, match=words):
        run(["on"], lambda _: Corridor(), reset_columns=["size", "width"])


def test_gem(run):
    """Its random numbers follow from the group's seed, whatever is drawn beside it."""
    numbers = []
    for noise in (1, 2):
        random.seed(noise)
        before = random.getstate()
        end, said = run(["no"], lambda _: Guess(), global_random=True)
        assert random.getstate() == before
        numbers.append(said[0][1])
        assert said[1:] == [("assistant", "no"), ("user", "<over>")]
        assert end["terminated"].item()
        assert not end["truncated"].item()
    assert numbers[0] == numbers[1]


def test_skyrl_gym(run):
    def make(row):
        return Sums({}, extras=row)

    end, said = run(["6", "7"], make)
    assert said == [
        *[("system", "Be brief."), ("user", "Go."), ("assistant", "6"), ("user", "no")],
        ("assistant", "7"),
    ]
    assert end["reward"].item() == 1.0
    assert end["terminated"].item()
    assert CLOSED == ["sums"]
    cut, _ = run(["6", "7"], make, max_turns=1)
    assert cut["reward"].item() == 0.0
    assert cut["truncated"].item()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: Stuck(), "OSError: the door is locked"),
        (lambda _: Late(), "Timeout"),
        (lambda _: OldGym(), "got 4 values"),
        (lambda row: Rewriting(extras=row), "postprocessed_action"),
        (lambda _: Grid(), "observations are text here, got int"),
        (lambda _: object(), "neither reset"),
    ],
    ids=["raises", "late", "old gym", "changed turn", "no text", "no protocol"],
)
def test_what_can_not_go_on_ends_its_episode_alone(make, words, run):
    end, _ = run(["12"], make, timeout_s=0.3)
    assert words in end["stop_reason"][0]
    assert end["stop_reason"][0].startswith("environment_error: ")
    assert end["truncated"].item()
    assert not end["scorable"].item()


HERE = "entry_point_for_tests"


@pytest.fixture
def here(monkeypatch):
    """The classes of this file as a module that can be imported."""
    monkeypatch.setitem(sys.modules, HERE, SimpleNamespace(**globals()))


@pytest.mark.usefixtures("here")
def test_a_task_of_an_entry_point(play, scripted):
    given = {"factory": f"{HERE}:Sums", "arguments": {"env_config": {}}, "row_argument": "extras"}
    task = make_task("environment", dataset=ROWS * 2, num_held_out=0, **given)
    env = TaskEnv(task, num_envs=1)
    (end,) = play(env, scripted({"Go.": ["7"]}))
    assert end["reward"].item() == 1.0
    env.close()
    made = make_task("environment", factory=f"{HERE}:Corridor", arguments={"length": 1})
    env = TaskEnv(made, num_envs=1)
    (end,) = play(env, scripted({"one action": ["on"]}))
    assert end["rewards", "environment"].item() == 0.5
    env.close()
    tools = make_task("environment", factory=f"{HERE}:Adder")
    assert isinstance(tools.environment(), Adder)
    own = make_task(
        "environment", factory=f"{HERE}:own_task", arguments={"letter": "x"}, num_held_out=3, seed=5
    )
    assert (own.name, len(own.held_out_rows)) == ("x5", 3)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"factory": "Sums"}, "package.module:name, got 'Sums'"),
        ({"factory": "nowhere_at_all:make"}, "can't be found: No module"),
        ({"factory": f"{HERE}:Sum"}, "can't be found"),
        ({"factory": f"{HERE}:ROWS"}, "can't be called"),
        ({"factory": f"{HERE}:Sums"}, "failed: TypeError"),
        ({"factory": f"{HERE}:Corridor", "arguments": "long"}, "arguments must be"),
        ({"factory": f"{HERE}:Corridor", "reward": "mean"}, "reward"),
        ({"factory": f"{HERE}:Adder", "reward": "last"}, "reward has no effect: .* with tools"),
        (
            {"factory": f"{HERE}:own_task", "arguments": {"letter": "x"}, "dataset": LONGER},
            "dataset has no effect: .* a task",
        ),
        *(
            (
                {"factory": f"{HERE}:own_task", "arguments": {"letter": "x"}, setting: value},
                f"{setting} has no effect: .* a task",
            )
            for setting, value in [
                *[("prompt", "Go."), ("num_rows", 9), ("max_turns", 2), ("max_new_tokens", 9)],
            ]
        ),
    ],
)
def test_an_entry_point_that_can_not_be(settings, words):
    with pytest.raises(ValueError, match=words):
        TaskEnv(make_task("environment", **settings), num_envs=1)
    with pytest.raises(TypeError, match="neither reset"):
        make_task("environment", factory="builtins:object")

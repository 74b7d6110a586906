"""A simulated user: what it reads and says, how it ends an episode, and what its failures cost."""

import asyncio
import threading

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector
from objectives import MCAdvantage
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    FunctionTools,
    PolicyAnswers,
    RewardErrorLimit,
    RewardFunctions,
    SimulatedUser,
    StepCounter,
)
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, prompt_of
from torchrl_modules import BatchingEngine
from torchrl_modules.policies.async_policy import AsyncPolicy

END = "###STOP###"


class Asked:
    """A user who says what a function makes of a question, and remembers all questions."""

    def __init__(self, answer):
        self.answer = answer
        self.calls = []

    def __call__(self, questions):
        self.calls.append(questions)
        return [self.answer(question) for question in questions]

    @property
    def questions(self):
        return [question for call in self.calls for question in call]


def said(question):
    return [(message["role"], message["content"]) for message in question]


def chats(batch):
    full = read_conversations(batch, "prompt", who="test")
    return [[(m["role"], m["content"]) for m in full.messages(row)] for row in range(len(full))]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def env_of(user, *parts, rows=None, num=1, group_size=1, limit=8, system_prompt=None, **kwargs):
    rows = rows or [{"prompt": "Eggs.", "scenario": "You want six."}]
    env = ChatEnv(batch_size=num, system_prompt=system_prompt)
    return env.append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=group_size),
            SimulatedUser(user, **kwargs),
            *parts,
            RewardErrorLimit(1.0),
            StepCounter(max_steps=limit),
        )
    )


def test_the_user_reads_what_is_said_to_it_and_nothing_else(scripted, play, call_text):
    turns = [
        "<think>Six or ten?</think>How many?",
        call_text("add", a=3, b=3),
        "So six.",
    ]
    user = Asked(lambda question: {4: "Six, I think.", 6: f"Yes. {END}"}[len(question)])
    env = env_of(user, FunctionTools([add]), system_prompt="Sell eggs.")
    policy = scripted(turns)
    (end,) = play(env, policy)
    env.close()
    told = "You want six."
    asked, last = user.questions
    assert told in asked[0]["content"]
    assert said(asked[1:]) == [
        ("user", "Hello! How can I help you?"),
        ("assistant", "Eggs."),
        ("user", "How many?"),
    ]
    assert said(last[4:]) == [("assistant", "Six, I think."), ("user", "So six.")]
    (chat,) = chats(end)
    assert chat == [
        ("system", "Sell eggs."),
        ("user", "Eggs."),
        ("assistant", turns[0]),
        ("user", "Six, I think."),
        ("assistant", turns[1]),
        ("tool", "6"),
        ("assistant", turns[2]),
    ]
    assert read_objects(end, "stop_reason") == ["environment_done: user"]
    assert end["terminated"].item()
    assert not end["truncated"].item()
    # Only what the policy sampled is its own.
    conversation = read_conversations(end, "prompt", who="test")
    ids = conversation.token_ids(0)[conversation.assistant_mask(0)].tolist()
    assert ids == [i for _, turn in policy.engine.served for i in turn.ids]


def test_a_prompt_of_several_messages_is_read_from_the_users_side(scripted, play):
    prompt = [
        {"role": "system", "content": "Sell."},
        {"role": "user", "content": "Eggs."},
        {"role": "assistant", "content": "Brown ones?"},
        {"role": "user", "content": "White."},
    ]
    user = Asked(lambda _: END)
    env = env_of(user, rows=[{"prompt": prompt, "scenario": "-"}], greeting="Yes?")
    play(env, scripted(["Here."]))
    env.close()
    (question,) = user.questions
    assert said(question[1:]) == [
        ("user", "Yes?"),
        ("assistant", "Eggs."),
        ("user", "Brown ones?"),
        ("assistant", "White."),
        ("user", "Here."),
    ]


def test_who_begins_says_the_same_in_all_rollouts_of_a_draw(scripted):
    numbers = iter(range(9))

    def answer(question):
        return f"Eggs {next(numbers)}." if len(question) == 2 else END

    rows = [{"prompt": "You want eggs."}, {"prompt": "You want figs."}]
    user = Asked(answer)
    env = env_of(
        user, RewardFunctions(lambda completions: [0.0] * len(completions)),
        rows=rows, num=6, group_size=3, opens=True, system_prompt="Sell.",
        instructions="{prompt} Then write {end}.",
    )  # fmt: skip
    batch = LLMCollector(env, scripted(["Here."])).collect()
    env.close()
    openings = [question for question in user.questions if len(question) == 2]
    assert [question[0]["content"] for question in openings] == [
        f"You want {what}. Then write {END}." for what in ("eggs", "figs")
    ]
    assert {len(call) for call in user.calls} == {2, 6}, "those of a step are one call"
    full = read_conversations(batch, "full", who="test")
    chats = [[m["content"] for m in full.messages(row)] for row in range(6)]
    assert chats == [["Sell.", f"Eggs {i // 3}.", "Here."] for i in range(6)]
    assert {str(reason) for reason in read_objects(batch, "stop_reason")} == {
        "environment_done: user"
    }


class Unwell(Exception):
    pass


def test_a_user_that_fails_costs_its_own_row(scripted, play):
    answers = {
        "<0>": END,
        "<1>": Unwell("is unwell"),
        "<2>": " ",
        "<3>": 7,
        "<4>": f"<think>{END}?</think>More.",
    }

    def answer(question):
        return END if len(question) > 4 else answers[question[2]["content"]]

    rows = [{"prompt": name, "scenario": "-"} for name in answers]
    score = RewardFunctions(lambda completions: [1.0] * len(completions))
    env = env_of(Asked(answer), score, rows=rows, num=5)
    ends = play(env, scripted(["Here."]))
    env.close()
    reasons = [read_objects(ends[row], "stop_reason")[row] for row in range(5)]
    begins = ["environment_done: user", *["environment_error: SimulatedUser"] * 3]
    assert [r.startswith(b) for r, b in zip(reasons, begins, strict=False)] == [True] * 4
    for reason, words in zip(reasons[1:4], ["is unwell", "says nothing", "a text"], strict=True):
        assert words in reason
    assert reasons[4] == reasons[0]
    assert [ends[row]["scorable"][row].item() for row in range(5)] == [True, *[False] * 3, True]
    assert chats(ends[4])[4][-2:] == [("user", "More."), ("assistant", "Here.")]


def test_one_that_does_not_answer_in_time_costs_its_own_row(scripted, play):
    async def user(questions):
        if "<0>" in str(questions):  # both are asked in one call, or each in its own
            await asyncio.sleep(60)
        return [END] * len(questions)

    env = env_of(user, rows=[{"prompt": "<0>", "scenario": "-"}], timeout_s=0.2)
    (end,) = play(env, scripted(["Here."]))
    env.close()
    assert "no answer within 0.2 s" in read_objects(end, "stop_reason")[0]


@pytest.mark.parametrize("opens", [False, True])
def test_a_user_that_ends_the_program_ends_its_episodes_alone(scripted, play, opens):
    def ends(questions):
        raise SystemExit("enough")

    async def ends_later(questions):
        raise SystemExit("enough")

    env = env_of(ends_later if opens else ends, num=2, group_size=2, opens=opens)
    (end, _) = play(env, scripted(["Here."]))
    env.close()
    for reason in read_objects(end, "stop_reason"):
        assert reason.startswith("environment_error: SimulatedUser")
        assert "SystemExit: enough" in reason


@pytest.mark.parametrize(
    ("last", "reason", "cut"), [(END, "environment_done: user", False), ("No.", "max_steps", True)]
)
def test_after_the_last_turn_the_user_may_still_have_done(scripted, play, last, reason, cut):
    user = Asked(lambda question: last if len(question) == 6 else "More.")
    env = env_of(user, limit=2)
    (end,) = play(env, scripted(["One.", "Two."]))
    env.close()
    assert read_objects(end, "stop_reason") == [reason]
    assert end["truncated"].item() is cut


def test_a_policy_as_the_user_goes_on_from_its_own_tokens(scripted, play):
    other = scripted({"": ["How about ten?", "Fine.", END]})
    env = env_of(PolicyAnswers(other), num=2, group_size=2)
    play(env, scripted(["One.", "Two.", "Three."]))
    env.close()
    served = other.engine.served
    assert len(served) == 6
    for (before, turn), (after, _) in zip(served[:-2], served[2:], strict=True):
        assert after[: len(before) + len(turn.ids)] == (*before, *turn.ids)


def test_users_of_a_stream_are_asked_together(scripted):
    user = Asked(lambda question: END if len(question) > 6 else f"Again {len(question)}.")
    begun = threading.Event()

    def slow(questions):
        begun.wait(0.05)  # what is asked meanwhile is the next call
        return user(questions)

    score = RewardFunctions(lambda completions: [float(len(c)) for c in completions])
    rows = [{"prompt": f"<{i}>", "scenario": "-"} for i in range(4)]
    env = env_of(slow, score, rows=rows, num=8, group_size=2)
    policy = scripted(["A.", "B.", "C.", "D."])
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2))
    with StreamingCollector(
        env, policy, engine=BatchingEngine(policy.engine), replay_buffer=buffer, groups_per_step=4
    ) as collector:
        batch = next(iter(collector))
    assert len(batch) == 8
    assert {str(r) for r in read_objects(batch, "stop_reason")} == {"environment_done: user"}
    assert batch["num_turns"].tolist() == [3] * 8
    assert len(user.calls) < len(user.questions)


def test_a_prompt_that_is_drawn_once_more_has_its_user(scripted):
    """On Ray, and in the place of a group that was refused, nobody draws from the data."""
    env, policy = env_of(user := Asked(lambda _: END)), scripted(["How many?"])
    runner = AsyncEpisodeRunner(env)
    first = runner.draw(1)
    again = runner.draw_again(prompt_of(first[0]), 7, 1)
    asyncio.run(runner.run(again[0], AsyncPolicy(policy, BatchingEngine(policy.engine))))
    assert again[0].stop_reason == "environment_done: user"
    assert said(user.questions[0])[-2:] == [("assistant", "Eggs."), ("user", "How many?")]
    runner.give_up([*first, *again])


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"user": "gpt"}, TypeError, "can't be called"),
        ({"instructions": 3}, TypeError, "a text or a function of a row"),
        ({"instructions": "{a.b}"}, ValueError, "name of a column"),
        ({"instructions": "{"}, ValueError, "no format string"),
        ({"end": " "}, ValueError, "end must be a text"),
        ({"greeting": ""}, ValueError, "greeting must be a text"),
        ({"timeout_s": 0}, ValueError, "timeout_s"),
    ],
)
def test_what_is_wrong_shows_at_construction(settings, error, words):
    with pytest.raises(error, match=words):
        SimulatedUser(**{"user": print, **settings})


class Shop:
    """Has a tool, and says how it stands at the start."""

    def reset(self, **row):
        return "Open."

    def buy(self) -> str:
        """Buy."""
        return "bought"

    def get_reward(self):
        return 1.0


def test_what_can_not_work_shows_before_the_first_episode():
    with pytest.raises(ValueError, match="ends every episode after one turn"):
        env_of(print, limit=1).check()
    with pytest.raises(ValueError, match="scenario"):
        env_of(print, rows=[{"prompt": "?"}]).check()
    base = ChatEnv(batch_size=1).append_transform(DataLoadingPrimer([{"prompt": "?"}]))
    env = base.append_transform(EnvironmentTools(Shop))
    env = env.append_transform(SimulatedUser(print, instructions="{prompt}", opens=True))
    with pytest.raises(ValueError, match="Append SimulatedUser before them"):
        env.check()


def test_an_environment_adds_to_what_the_user_says_first(scripted, play):
    user = Asked(lambda question: "Good day." if len(question) == 2 else END)
    env = env_of(user, EnvironmentTools(Shop), opens=True)
    (end,) = play(env, scripted(["Here."]))
    env.close()
    assert chats(end)[0][0] == ("user", "Good day.\n\nOpen.")
    assert said(user.questions[1][1:3]) == [
        ("user", "Hello! How can I help you?"),
        ("assistant", "Good day."),
    ]


@pytest.mark.parametrize("opens", [False, True])
def test_each_rollout_has_random_numbers_of_its_own_and_a_draw_begins_with_the_same(
    scripted, opens
):
    def streams_of_a_run():
        given = {}

        def user(questions, *, streams):
            for question, stream in zip(questions, streams, strict=True):
                given.setdefault((question[0]["content"], len(question)), []).append(stream)
            return [END if len(question) > 4 else "Eggs." for question in questions]

        rows = [{"prompt": "a"}, {"prompt": "b"}]
        told = {"instructions": "{prompt}", "opens": opens}
        env = env_of(user, reward, rows=rows, num=4, group_size=2, **told)
        LLMCollector(env, scripted(["How many?", "Here."])).collect()
        env.close()
        return given

    reward = RewardFunctions(lambda completions: [0.0] * len(completions))
    first = streams_of_a_run()
    assert first == streams_of_a_run(), "they follow from the data's seed"
    if opens:
        assert [len(first.pop((prompt, 2))) for prompt in "ab"] == [1, 1]
    numbers = [first[key] for key in sorted(first)]
    turns = [{*each} for each in numbers]
    assert {len(each) for each in turns} == {2}
    assert not turns[0] & turns[-1], "nor does another draw repeat them"
    assert None not in turns[0] | turns[-1]

"""ChatEnv in its three modes: one record of tokens, whatever it looks like."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose
from torchrl.envs.utils import check_env_specs

from torchrl_data import ChatHistory, History, MissingEntryError, Tokens
from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_data.keys import INPUT_MODES
from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper

ROWS = [{"prompt": f"<{i}>", "number": i} for i in range(6)]
SHAPES = [(), (4,), (2, 2)]


class Echo:
    """Answers with what it is told."""

    def reset(self, *, number):
        self.number = number

    def echo(self, text: str) -> str:
        """Say it again.

        Args:
            text: What to say.
        """
        return f"{text} <|im_end|> 🙂"

    def get_reward(self):
        return float(self.number)


def number_of_messages(completions):
    return [float(len(completion)) for completion in completions]


def queries(shape, values):
    batch = TensorDict({}, batch_size=shape)
    write_objects(batch, "query", values)
    return batch


def flat(value, shape):
    """Rows of an entry that has the shape of the batch."""
    for _ in shape[1:]:
        value = [item for part in value for item in part]
    return list(value) if shape else [value]


@pytest.fixture
def make_env(chatml_tokenizer):
    def make(mode, shape=(2,), **kwargs):
        kwargs.setdefault("system_prompt", "sys")
        return ChatEnv(input_mode=mode, batch_size=shape, tokenizer=chatml_tokenizer, **kwargs)

    return make


@pytest.fixture
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(mode, **kwargs):
        settings = {"max_new_tokens": 4, "temperature": 0.0}
        return TransformersWrapper(
            make_tiny_model(),
            tokenizer=chatml_tokenizer,
            input_mode=mode,
            generate_kwargs=settings,
            **kwargs,
        )

    return make


@pytest.mark.parametrize("write_tokens", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", INPUT_MODES)
def test_full_is_prompt_and_response_and_the_next_prompt_goes_on_from_it(
    mode, shape, write_tokens, make_env, make_policy
):
    env, size = make_env(mode, shape), torch.Size(shape).numel()
    policy = make_policy(mode, write_tokens=write_tokens)
    batch = env.reset(queries(shape, [f"question {i} 🙂" for i in range(size)]))
    before = [""] * size
    if mode == "tokens":
        before = [torch.zeros(0, dtype=torch.int64)] * size
    for turn in range(3):
        prompt = read_conversations(batch, "prompt", who="test")
        shown = flat(batch[mode, "prompt"], shape) if mode != "history" else None
        batch = policy(batch)
        full = read_conversations(batch, "full", who="test")
        encoded = read_conversations(batch, "prompt", who="test")
        for i in range(size):
            assert full.ids(i)[: encoded.num_tokens(i)] == encoded.ids(i)
            assert encoded.ids(i)[: prompt.num_tokens(i)] == prompt.ids(i)
            roles = [message["role"] for message in full.messages(i)]
            assert roles == ["system", "user", *["assistant"] * (turn + 1)]
        if mode == "text":
            text = batch["text"]
            parts = [flat(value, shape) for value in (text.prompt, text.response, text.full)]
            assert parts[0] == shown
            assert [p + r for p, r in zip(*parts[:2], strict=True)] == parts[2]
            assert all(p.startswith(b) for p, b in zip(shown, before, strict=True))
            before = parts[2]
            assert before == env.encoder.decode([full.ids(i) for i in range(size)])
        elif mode == "tokens":
            for i, (ids, old) in enumerate(zip(shown, before, strict=True)):
                assert ids.tolist() == encoded.ids(i)
                assert ids[: len(old)].tolist() == old.tolist()
            before = [full.token_ids(i) for i in range(size)]
        batch = env.step(batch)["next"]
        assert not batch["done"].any()
        assert batch["done"].shape == (*shape, 1)


def test_all_modes_sample_the_same_tokens(make_env, make_policy, chatml_tokenizer):
    ids = {}
    for mode in INPUT_MODES:
        env, policy = make_env(mode), make_policy(mode)
        batch = env.reset(queries((2,), ["hi", "ho"]))
        for _ in range(2):
            batch = env.step(policy(batch))["next"]
        record = read_conversations(batch, "prompt", who="test")
        ids[mode] = [record.ids(i) for i in range(2)]
    assert ids["history"] == ids["text"] == ids["tokens"]
    start = (
        "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chatml_tokenizer.decode(ids["text"][0]).startswith(start)


# What a user hands in --------------------------------------------------------------------------


def test_a_query_of_token_ids_is_the_prompt_as_it_is(make_env, make_policy):
    given = [[5, 9, 300], [7]]
    for value in (given, [torch.tensor(row) for row in given]):
        batch = make_env("tokens", system_prompt=None).reset(queries((2,), value))
        assert [row.tolist() for row in batch["tokens", "prompt"]] == given
    batch = make_policy("tokens")(batch)
    assert [row["tokens", "prompt"].tolist() for row in batch.unbind(0)] == given
    dense = TensorDict({"query": torch.tensor([[1, 2], [3, 4]])}, batch_size=[2])
    env = make_env("tokens")
    after_system = [row.tolist() for row in env.reset(dense)["tokens", "prompt"]]
    system = env.encoder.encode_chats([[{"role": "system", "content": "sys"}]])[0].ids
    assert after_system == [[*system, 1, 2], [*system, 3, 4]]
    with pytest.raises(TypeError, match=r"a string or a list of messages.*got list"):
        make_env("text").reset(queries((2,), given))


@pytest.mark.parametrize("known", [True, False], ids=["goes on", "another conversation"])
@pytest.mark.parametrize("mode", INPUT_MODES)
def test_a_full_that_somebody_else_wrote_is_taken_over_exactly(mode, known, make_env):
    env = make_env(mode, system_prompt=None)
    batch = env.reset(queries((2,), ["hi", "ho"]))
    odd = "a  b\n <|im_start|>x 🙂"
    if mode == "history":
        chats = [
            [{"role": "user", "content": query}, {"role": "assistant", "content": odd}]
            for query in (("hi", "ho") if known else ("other", "words"))
        ]
        batch["history"] = ChatHistory(full=History.from_chats(chats), batch_size=2)
        prompt = read_conversations(env.step(batch)["next"], "prompt", who="test")
        assert [prompt.messages(i) for i in range(2)] == chats
        return
    starts = batch[mode, "prompt"] if known else ["?", "!"]
    if mode == "text":
        full = [start + odd for start in starts]
        batch["text"].full = full
        following = env.step(batch)["next"]
        # What was handed in, and the template's opening of another turn.
        assert [
            text.startswith(given)
            for text, given in zip(following["text", "prompt"], full, strict=True)
        ] == [True, True]
        record = read_conversations(following, "prompt", who="test")
        assert env.encoder.decode([record.ids(i) for i in range(2)]) == full
    else:
        turn = torch.tensor([300, 5, 257, 5])
        starts = starts if known else [torch.tensor([9]), torch.tensor([9, 9])]
        full = [torch.cat([start, turn]) for start in starts]
        batch["tokens"] = Tokens.from_rows(full=full)
        record = read_conversations(env.step(batch)["next"], "prompt", who="test")
        assert [record.ids(i) for i in range(2)] == [row.tolist() for row in full]
    assert not any(record.assistant_mask(i).any() for i in range(2)), "nobody sampled it here"
    assert [record.last_message(i)["role"] for i in range(2)] == ["assistant"] * 2


def test_another_policys_mask_and_log_probs_come_with_its_tokens(make_env):
    env = make_env("tokens")
    batch = env.reset(queries((2,), ["hi", "ho"]))
    prompts = batch["tokens", "prompt"]
    turn, log_probs = torch.tensor([20, 21]), torch.tensor([-0.5, -0.25])
    rows = [torch.cat([prompt, turn]) for prompt in prompts]
    batch["tokens"] = Tokens.from_rows(prompt=prompts, full=rows)
    for key, zero, value in (
        (("masks", "all_assistant_mask"), False, torch.ones(2, dtype=torch.bool)),
        (("log_probs", "full"), 0.0, log_probs),
    ):
        batch[key] = torch.stack(
            [torch.cat([value.new_full((len(p),), zero), value]) for p in prompts]
        )
    record = read_conversations(env.step(batch)["next"], "prompt", who="test")
    for i in range(2):
        assert record.token_ids(i)[record.assistant_mask(i)].tolist() == [20, 21]
        assert record.log_probs(i)[-2:].tolist() == [-0.5, -0.25]


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_a_turn_may_be_plain_text_and_a_policy_goes_on(mode, make_env, make_policy):
    env, policy = make_env(mode), make_policy(mode)
    batch = env.reset(queries((2,), ["hi", "ho"])).set(
        "text_response", ["said\n<|im_end|>\n", "<x>"]
    )
    _, batch = env.step_and_maybe_reset(batch)
    prompt = read_conversations(batch, "prompt", who="test")
    assert [prompt.last_message(i)["content"] for i in range(2)] == ["said", "<x>"]
    batch = policy(batch.exclude("text_response"))
    text = env.encoder.decode([read_conversations(batch, "full", who="test").ids(0)])[0]
    assert "<|im_start|>assistant\nsaid<|im_end|>\n<|im_start|>assistant\n" in text
    mask = read_conversations(batch, "full", who="test").assistant_mask(0)
    assert mask.sum() == 4, "what was said as text was not sampled"
    with pytest.raises(MissingEntryError, match=rf"\('{mode}', 'full'\).*or 'text_response'"):
        env.step(env.reset(queries((2,), ["hi", "ho"])))


BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_a_turn_that_a_prompt_begins_goes_on_and_its_given_part_is_not_trained(
    mode, make_env, make_policy
):
    env, policy = make_env(mode, (1,)), make_policy(mode)
    batch = policy(env.reset(queries((1,), [BEGUN])))
    full = read_conversations(batch, "full", who="test")
    mask, ids = full.assistant_mask(0), full.token_ids(0)
    given, said = env.encoder.decode([ids[~mask].tolist(), ids[mask].tolist()])
    opened = "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert given == f"{opened}<|im_start|>assistant\nWell, "
    assert mask.tolist() == [False] * int((~mask).sum()) + [True] * 4, "as it is trained"
    text = env.encoder.decode_responses([ids[mask].tolist()])[0]
    assert full.messages(0)[1:] == [BEGUN[0], {"role": "assistant", "content": f"Well, {text}"}]
    assert said.startswith(text)
    # Whoever speaks next answers one turn, and the policy's next turn is one of its own.
    batch = policy(env.step(batch)["next"])
    roles = [m["role"] for m in read_conversations(batch, "full", who="test").messages(0)]
    assert roles == ["system", "user", "assistant", "assistant"]


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_a_begun_turn_goes_on_as_plain_text_too(mode, make_env):
    env = make_env(mode, (2,))
    batch = env.reset(queries((2,), [BEGUN, "ho"])).set("text_response", ["hello", "hello"])
    prompt = read_conversations(env.step(batch)["next"], "prompt", who="test")
    assert [prompt.last_message(i)["content"] for i in range(2)] == ["Well, hello", "hello"]
    assert [len(prompt.messages(i)) for i in range(2)] == [3, 3]


@pytest.mark.parametrize(
    "last", [{"content": ""}, {"content": "", "tool_calls": [{"function": {"name": "f"}}]}], ids=str
)
def test_a_begun_turn_without_text_is_refused_by_its_row(last):
    rows = [{"prompt": "a"}, {"prompt": [BEGUN[0], {"role": "assistant", **last}]}]
    with pytest.raises(
        ValueError, match=r"row 1: .* ends with a message of the assistant in which"
    ):
        DataLoadingPrimer(rows)


# Partial resets, unequal turns, transforms ------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("mode", INPUT_MODES)
def test_rows_that_are_not_reset_stay_as_they_were(mode, shape, make_env, make_policy):
    env = make_env(mode, shape)
    batch = env.step(make_policy(mode)(env.reset(queries(shape, list("abcd")))))["next"]
    before = read_conversations(batch, "prompt", who="test")
    mask = torch.tensor([True, False, False, True]).view(*shape, 1)
    write_objects(batch, "query", ["new", None, None, "newer"])
    batch.set("_reset", mask)
    batch["done"] = batch["terminated"] = mask
    after = read_conversations(env.reset(batch), "prompt", who="test")
    assert after[[1, 2]] == before[[1, 2]]
    assert [after.messages(i)[-1]["content"] for i in (0, 3)] == ["new", "newer"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", INPUT_MODES)
def test_tools_rewards_data_and_limits_work_in_every_mode_and_shape(
    mode, shape, make_env, scripted, call_text
):
    script = {
        "<0>": [call_text("echo", text="a"), "done"],
        "<1>": [
            call_text("echo", text="b"),
            call_text("echo", text="c"),
            call_text("echo", text="d"),
        ],
        "": ["at once"],
    }
    size = torch.Size(shape).numel()
    env = make_env(mode, shape).append_transform(
        Compose(
            DataLoadingPrimer(ROWS),
            EnvironmentTools(Echo),
            RewardFunctions([number_of_messages], completion_format="messages"),
            StepCounter(max_steps=3),
        )
    )
    policy = scripted(script, input_mode=mode, write_tokens=False)
    batch, ends = env.reset(), {}
    while len(ends) < size:
        batch.set("_step", torch.tensor([i not in ends for i in range(size)]).view(shape))
        batch = env.step(policy(batch))["next"]
        done = batch["done"].view(-1)
        prompt = read_conversations(batch, "prompt", who="test")
        for i in [i for i in range(size) if done[i] and i not in ends]:
            messages = [m["role"] for m in prompt.messages(i)[2:]]
            reward = batch["reward"].view(-1)[i].item()
            ends[i] = (messages, reward, read_objects(batch, "stop_reason")[i])
    env.close()
    a, t = "assistant", "tool"
    expected = [
        ([a, t, a], 0.0 + 3, "answered"),
        ([a, t, a, t, a, t], 1.0 + 6, "max_steps"),
        ([a], 2.0 + 1, "answered"),
        ([a], 3.0 + 1, "answered"),
    ]
    assert [ends[i] for i in range(size)] == expected[:size]


# Specs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", INPUT_MODES)
def test_specs_are_those_of_the_data(mode, shape, make_env):
    size = torch.Size(shape).numel()
    env = make_env(mode, shape)
    start = env.reset(queries(shape, ["hi"] * size)).exclude("query")
    check_env_specs(env, tensordict=start)
    env = make_env(mode, shape).append_transform(
        Compose(
            DataLoadingPrimer(ROWS),
            EnvironmentTools(Echo),
            RewardFunctions([number_of_messages], completion_format="messages"),
            StepCounter(max_steps=2),
        )
    )
    check_env_specs(env, break_when_any_done="both")
    env.close()


def test_specs_of_rewards_by_turn_are_dynamic(make_env):
    def by_turn(completions):
        return [[1.0] * len(completion) for completion in completions]

    env = make_env("history").append_transform(
        Compose(
            DataLoadingPrimer(ROWS),
            RewardFunctions([by_turn], level="turn"),
            StepCounter(max_steps=2),
        )
    )
    assert env.full_reward_spec["reward"].shape == (2, -1, 1)
    env.close()


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_torchrls_own_rollout_resets_each_row_when_it_is_done(mode, make_env, make_policy):
    env = make_env(mode, (3,)).append_transform(
        Compose(
            DataLoadingPrimer(ROWS),
            RewardFunctions([number_of_messages], completion_format="messages"),
            StepCounter(max_steps=2),
        )
    )
    batch = env.rollout(3, make_policy(mode), break_when_any_done=False)
    env.close()
    # Nobody answers, so each episode is one turn: rows 0-2, 3-5, and 0-2 of the next epoch.
    assert batch["next", "done"].all()
    rows = [read_objects(batch[:, step], "row") for step in range(3)]
    assert [[row["number"] for row in step] for step in rows] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert batch["next", "reward"].view(3, 3).tolist() == [[1.0] * 3] * 3

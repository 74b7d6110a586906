"""check_env passes what keeps the contract, and names the rule that is broken."""

import itertools
import threading
import time

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose, Transform

from torchrl_data.conversation import Conversations, Turn
from torchrl_data.conversation_io import active_rows, read_conversations, write_conversations
from torchrl_data.keys import INPUT_MODES
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentRuleError,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
    check_env,
)

ROWS = [{"prompt": f"<{i}>"} for i in range(4)]


def lengths(completions):
    return [float(len(completion)) for completion in completions]


class Answer(EpisodeTransform):
    """Answers each turn of the even rows, and of all rows twice."""

    def _step(self, tensordict, next_tensordict):
        prompt = read_conversations(next_tensordict, "prompt", who="Answer")
        rows = self.rows(tensordict, next_tensordict)
        said = [
            [{"role": "user", "content": self.text()}] if row in rows else []
            for row in range(len(prompt))
        ]
        write_conversations(next_tensordict, "prompt", prompt.append_messages(said))
        return next_tensordict

    def rows(self, tensordict, next_tensordict):
        del next_tensordict
        return [row for row in active_rows(tensordict).nonzero().view(-1).tolist() if row % 2 == 0]

    def text(self):
        return "go on"


@pytest.fixture
def make_env(chatml_tokenizer):
    def make(*transforms, mode="history", shape=(2,)):
        return ChatEnv(
            input_mode=mode, batch_size=shape, tokenizer=chatml_tokenizer
        ).append_transform(
            Compose(
                DataLoadingPrimer(ROWS),
                RewardFunctions([lengths]),
                StepCounter(max_steps=3),
                *transforms,
            )
        )

    return make


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("mode", INPUT_MODES)
def test_what_keeps_the_contract_passes(mode, shape, make_env, chatml_tokenizer):
    check_env(lambda: make_env(Answer(), mode=mode, shape=shape), chatml_tokenizer)
    env = make_env(mode=mode, shape=shape)
    check_env(env, chatml_tokenizer)
    assert env.is_closed


def test_an_environment_without_data_is_reset_with_what_is_given(chatml_tokenizer):
    check_env(
        lambda: ChatEnv(batch_size=2, tokenizer=chatml_tokenizer),
        chatml_tokenizer,
        reset=lambda: TensorDict({"query": ["a", "b"]}, batch_size=[2]),
    )


# Broken ones --------------------------------------------------------------------------------------


class DoneAtOnce(Transform):
    def _reset(self, tensordict, tensordict_reset):
        done = torch.ones(2, 1, dtype=torch.bool)
        return tensordict_reset.set("done", done).set("terminated", done.clone())


class Undeclared(Transform):
    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("surprise", torch.zeros(2))


class WrongType(Transform):
    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("step_count", tensordict_reset["step_count"].float())


class DoneAlone(EpisodeTransform):
    """Says done, and neither terminated nor truncated; at the end of the step, so it is kept."""

    def export(self, batch, episodes):
        for key in ("terminated", "truncated"):
            batch.set(key, torch.zeros(2, 1, dtype=torch.bool))


class Rewrites(Answer):
    """Drops what came first, as a summary would."""

    def _step(self, tensordict, next_tensordict):
        prompt = read_conversations(next_tensordict, "prompt", who="Rewrites")
        chats = [[*prompt.messages(i)[1:], {"role": "user", "content": "?"}] for i in range(2)]
        write_conversations(next_tensordict, "prompt", Conversations.from_messages(chats))
        return next_tensordict


class Impersonates(Answer):
    """Adds a turn of the policy that the policy did not sample."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def _step(self, tensordict, next_tensordict):
        prompt = read_conversations(next_tensordict, "prompt", who="Impersonates")
        prompt = self.encoder.encode_waiting(prompt)
        turn = Turn([20, 21], [0.0, 0.0], {"role": "assistant", "content": "x"})
        write_conversations(next_tensordict, "prompt", prompt.append_turns([turn, turn]))
        return super()._step(tensordict, next_tensordict)


class TouchesDoneRows(Answer):
    def _step(self, tensordict, next_tensordict):
        next_tensordict = super()._step(tensordict, next_tensordict)
        idle = [row for row, active in enumerate(active_rows(tensordict).tolist()) if not active]
        prompt = read_conversations(next_tensordict, "prompt", who="TouchesDoneRows")
        said = [[{"role": "user", "content": "!"}] if row in idle else [] for row in range(2)]
        write_conversations(next_tensordict, "prompt", prompt.append_messages(said))
        return next_tensordict


class KeepsTheOld(Transform):
    """Goes on with a conversation that was to start anew."""

    def _reset(self, tensordict, tensordict_reset):
        if "_reset" in tensordict:
            old = read_conversations(tensordict, "prompt", who="KeepsTheOld")
            write_conversations(tensordict_reset, "prompt", old)
        return tensordict_reset


class Counts(Answer):
    counter = itertools.count()

    def text(self):
        return f"call {next(self.counter)}"


class LeavesAThread(Transform):
    def _reset(self, tensordict, tensordict_reset):
        threading.Thread(target=time.sleep, args=(8,), daemon=True, name="left").start()
        return tensordict_reset


class FailsToClose(Transform):
    def close(self):
        raise OSError("the server is gone")


@pytest.mark.parametrize(
    ("transform", "rule", "words"),
    [
        pytest.param(DoneAtOnce, "reset", "reset.*done|done.*reset", id="done"),
        pytest.param(Undeclared, "specs", "surprise", id="undeclared entry"),
        pytest.param(WrongType, "specs", "spec check failed|dtype", id="wrong dtype"),
        pytest.param(DoneAlone, "step", "terminated or truncated; rows", id="done alone"),
        pytest.param(Rewrites, "prefix", "they part at token", id="rewrites the past"),
        pytest.param(Impersonates, "mask", "the policy sampled", id="marks what nobody sampled"),
        pytest.param(TouchesDoneRows, "done rows", "row 1 took no part", id="touches done rows"),
        pytest.param(KeepsTheOld, "partial reset", "row 0 was reset, but", id="keeps the old"),
        pytest.param(Counts, "determinism", "prompt differs after 1 steps", id="hidden state"),
        pytest.param(LeavesAThread, "close", r"threads \['left'.*run on", id="leaves a thread"),
        pytest.param(FailsToClose, "close", "OSError: the server is gone", id="can't close"),
    ],
)
def test_the_broken_rule_is_named(transform, rule, words, make_env, chatml_tokenizer, monkeypatch):
    monkeypatch.setattr("torchrl_envs.testing.environment_rules._THREADS_S", 0.3)

    def build():
        if transform is Impersonates:
            encoder = ChatEnv(tokenizer=chatml_tokenizer).encoder
            return make_env(Impersonates(encoder))
        return make_env(transform())

    with pytest.raises(EnvironmentRuleError, match=words) as caught:
        check_env(build, chatml_tokenizer)
    assert caught.value.rule == rule
    assert f"rule '{rule}'" in str(caught.value)

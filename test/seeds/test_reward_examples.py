"""Rewards as the pages of TorchRL and TRL tell users to write them: they work here as they are.

The transform is a plain ``torchrl.envs.Transform``, which knows nothing of this project's episodes.
"""

import xml.etree.ElementTree as ET

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import Composite, ReplayBuffer, Unbounded
from torchrl.data.replay_buffers import LazyStackStorage
from torchrl.envs import Transform
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from objectives import MCAdvantage
from torchrl_data.batched_object import read_objects
from torchrl_envs import ChatEnv, DataLoadingPrimer, IfEvalScorer, check_env

KEYS = ("reward_answer", "reward_think", "reward_right", "reward_contained", "reward", "success")
RIGHT = "<think>2 and 2</think><answer>4</answer>"
WRONG = "<think>2 and 2</think><answer>it is 5</answer>"
CONTAINED = "<think>2 and 2</think><answer>it is 4</answer>"
BROKEN = "<think>2 and 2<answer>4</answer>"


class RewardParser(Transform):
    """Reads the response in the mode of the environment; six entries; done at an answer."""

    def __init__(self, tokenizer, input_mode):
        super().__init__()
        self.tokenizer = tokenizer
        self.input_mode = input_mode

    def completions(self, tensordict):
        if self.input_mode == "history":
            responses = tensordict["history"].full
            responses = lazy_stack([r[..., -1] for r in responses.unbind(0)])
            return list(responses.content)
        if self.input_mode == "text":
            return list(tensordict["text"].response)
        tokens = tensordict.get(("tokens", "response"), as_list=True)
        return [self.tokenizer.decode(row.tolist()) for row in tokens]

    @staticmethod
    def extract_tags(text):
        root = ET.fromstring(f"<root>{text.replace('<|im_end|>', '')}</root>")
        return root.findtext("think", ""), root.findtext("answer", "")

    def scores(self, completion, answer):
        try:
            thought, given = self.extract_tags(completion)
        except ET.ParseError:
            thought, given = "", ""
        right = float(given == answer)
        contained = float(answer in given)
        values = {
            "reward_answer": float(bool(given)),
            "reward_think": float(bool(thought)),
            "reward_right": right,
            "reward_contained": contained,
            "reward": right + 0.1 * contained,
        }
        values = {key: torch.tensor(value) for key, value in values.items()}
        return TensorDict({**values, "success": torch.tensor(right == 1)}, batch_size=[])

    def _step(self, tensordict, next_tensordict):
        answers = [row["answer"] for row in read_objects(tensordict, "row")]
        completions = self.completions(tensordict)
        tds = torch.stack(
            [self.scores(text, answer) for text, answer in zip(completions, answers, strict=True)]
        )
        # Rewards need a shape that broadcasts to [batch x tokens x 1].
        tds = tds.apply(lambda t: t.unsqueeze(-1).unsqueeze(-1), batch_size=tds.batch_size)
        next_tensordict.update(tds)
        answered = next_tensordict["reward_answer"].view(-1, 1) > 0
        for key in ("done", "terminated"):
            next_tensordict.set(key, next_tensordict.get(key) | answered)
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        shape = (*reward_spec.shape, 1, 1)
        reward_spec.update(
            Composite(
                reward_answer=Unbounded(shape),
                reward_think=Unbounded(shape),
                reward_right=Unbounded(shape),
                reward_contained=Unbounded(shape),
                reward=Unbounded(shape),
                success=Unbounded(shape, dtype=torch.bool),
                shape=reward_spec.shape,
            )
        )
        return reward_spec


def make_env(tokenizer, mode, size=4):
    rows = [{"prompt": f"<{i}>", "answer": "4"} for i in range(4)]
    parts = Compose(DataLoadingPrimer(rows, group_size=2), RewardParser(tokenizer, mode))
    env = ChatEnv(batch_size=size, tokenizer=tokenizer, input_mode=mode)
    return env.append_transform(parts)


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_reward_transform_of_torchrls_guide(mode, scripted, chatml_tokenizer):
    script = {"<0>": [RIGHT], "<1>": [BROKEN]}
    env = make_env(chatml_tokenizer, mode)
    batch = env.step(scripted(script, input_mode=mode)(env.reset()))["next"]
    assert {key: batch[key].shape for key in KEYS} == dict.fromkeys(KEYS, torch.Size([4, 1, 1]))
    assert batch["reward"].view(-1).tolist() == pytest.approx([1.1, 1.1, 0, 0])
    assert batch["success"].view(-1).tolist() == [True, True, False, False]
    assert batch["reward_think"].view(-1).tolist() == [1, 1, 0, 0]
    assert batch["terminated"].all()
    env.close()


def test_it_keeps_the_rules_of_an_environment(chatml_tokenizer):
    check_env(lambda: make_env(chatml_tokenizer, "history"), chatml_tokenizer)


def test_its_rewards_reach_the_advantages(scripted, chatml_tokenizer):
    env = make_env(chatml_tokenizer, "history")
    turns = iter([RIGHT, CONTAINED, WRONG, WRONG])
    policy = scripted({"": [""]})
    generate = policy.engine.generate

    def in_turn(prompts, params, **kwargs):
        said = generate(prompts, params, **kwargs)
        ids = [
            chatml_tokenizer.encode(next(turns) + "<|im_end|>", add_special_tokens=False)
            for _ in prompts
        ]
        return [
            s._replace(ids=row, log_probs=[-0.1] * len(row))
            for s, row in zip(said, ids, strict=True)
        ]

    policy.engine.generate = in_turn
    collector = LLMCollector(env, policy)
    batch = collector.collect()
    collector.shutdown()
    assert batch["reward"].view(-1).tolist() == pytest.approx([1.1, 0.1, 0.0, 0.0])
    assert batch["success"].view(-1).tolist() == [True, False, False, False]
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(grpo_size=2))
    buffer.extend(batch)
    advantages = [row["advantage"].flatten()[-1].item() for row in buffer[:]]
    # Of 1.1 and 0.1: half their difference by their (Bessel) deviation, 0.5 / 0.7071.
    assert advantages == pytest.approx([0.7071, -0.7071, 0.0, 0.0], abs=1e-3)


def test_an_aggregator_of_the_guide():
    seen = []

    def aggregator(score, think_blocks=None, answer_blocks=None, complete=None):
        components = torch.cat(
            [
                score.prompt_level_strict_acc.float(),
                score.inst_level_strict_acc.float().mean(-1, keepdim=True),
                score.prompt_level_loose_acc.float(),
                score.inst_level_loose_acc.float().mean(-1, keepdim=True),
            ],
            -1,
        )
        weights = torch.tensor([0.4, 0.3, 0.2, 0.1])
        seen.append((think_blocks, answer_blocks))
        format_score = (components * weights).sum(dim=-1, keepdim=True)
        structure_score = 0.5 * bool(think_blocks) + 0.5 * bool(answer_blocks)
        return format_score + structure_score + float(bool(complete)) * 0.2

    scorer = IfEvalScorer(aggregate_reward=aggregator)
    row = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": 100, "relation": "at least"}],
    }
    given = scorer.components("<think>a</think><answer>no comma</answer>", row, "")
    # One of two instructions: 0.3 / 2 + 0.1 / 2, and both blocks are there.
    assert float(given["reward"]) == pytest.approx(0.2 + 1.0)
    assert seen == [(["a"], ["no comma"])]


def test_a_reward_computed_in_the_buffer(scripted, chatml_tokenizer):
    """After the fact: the transform of a buffer reads what was stored."""

    class Length(Transform):
        def _inv_call(self, tensordict):
            lengths = [
                float(row.numel()) for row in tensordict.get(("tokens", "full"), as_list=True)
            ]
            return tensordict.set("length", torch.tensor(lengths)[:, None, None])

    env = ChatEnv(batch_size=2).append_transform(DataLoadingPrimer([{"prompt": "?"}], group_size=2))
    collector = LLMCollector(env, scripted([RIGHT]))
    batch = collector.collect()
    collector.shutdown()
    buffer = ReplayBuffer(storage=LazyStackStorage(4), transform=Length())
    buffer.extend(batch)
    assert [row["length"].item() for row in buffer[:]] == [
        float(row["tokens", "full"].numel()) for row in batch.unbind(0)
    ]

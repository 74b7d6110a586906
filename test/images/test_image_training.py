"""GRPO on pictures, end to end: a colour is named because it is seen, and for no other reason."""

import random

import pytest
import torch
from PIL import ImageDraw
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose, StepCounter
from vision_models import llava, picture

from collectors import LLMCollector
from collectors.record import RolloutRecorder, RunRecord, write_html
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions
from torchrl_modules import TransformersWrapper

COLOURS = ("red", "lime", "blue")
GROUP, ROWS, STEPS = 4, 32, 16


def square(colour, rng):
    """A square somewhere on black."""
    image = picture("black")
    x, y = rng.randint(0, 16), rng.randint(0, 16)
    ImageDraw.Draw(image).rectangle([x, y, x + 15, y + 15], fill=colour)
    return image


def rows_of(answers, pictures):
    rng = random.Random(0)
    return [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": square(colour, rng)},
                        {"type": "text", "text": "Which?"},
                    ],
                }
            ],
            "answer": answer,
        }
        for answer, colour in zip(answers, pictures, strict=True)
    ]


def says(completions, answer, **columns):
    del columns
    return [
        float(said[-1]["content"] == right) for said, right in zip(completions, answer, strict=True)
    ]


def train(shuffled):
    """Mean rewards of each step, and the last batch; only three words can be said."""
    torch.manual_seed(0)
    model, tokenizer, processor = llava()
    words = [tokenizer.encode(c, add_special_tokens=False)[0] for c in ("red", "green", "blue")]
    answers = [tokenizer.decode([word]) for word in words] * 20
    pictures = [*COLOURS] * 20
    if shuffled:
        random.Random(1).shuffle(pictures)
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        processor=processor,
        generate_kwargs={
            "max_new_tokens": 1,
            "logit_bias": {i: -100.0 for i in range(len(tokenizer)) if i not in words},
        },
    )
    env = ChatEnv(batch_size=(ROWS,)).append_transform(
        Compose(
            DataLoadingPrimer(rows_of(answers, pictures), group_size=GROUP, shuffle=True),
            RewardFunctions([says]),
            StepCounter(max_steps=1),
        )
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP))
    collector = LLMCollector(env, policy, replay_buffer=buffer)
    loss = GRPOLoss(policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rewards = []
    for _ in range(STEPS):
        trajectories = collector.collect()
        output = loss(buffer[:])
        torch.testing.assert_close(output.ratio_mean, torch.tensor(1.0), atol=1e-4, rtol=0)
        output.total().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(trajectories["reward"].mean()))
    return rewards, trajectories, policy


@pytest.mark.parametrize("shuffled", [False, True], ids=["seen", "shuffled pictures"])
def test_what_a_picture_shows_is_learnt_from_it(shuffled, tmp_path):
    rewards, trajectories, policy = train(shuffled)
    assert sum(rewards[:2]) / 2 < 0.55, "a third by chance"
    after = sum(rewards[-5:]) / 5
    if shuffled:
        assert after < 0.55
        return
    assert after > 0.85
    first, second = trajectories[0]["images"]["data"], trajectories[1]["images"]["data"]
    assert first[0] is second[0], "a group shares its picture"
    assert first != trajectories[GROUP]["images"]["data"]
    with RolloutRecorder(tmp_path / "record", policy.tokenizer) as recorder:
        recorder.write(1, trajectories)
    write_html([RunRecord(tmp_path / "record")], tmp_path / "page")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    written = "".join(path.read_bytes().decode(errors="replace") for path in files)
    assert "[image 32x32]" in written
    assert first[0][:60] not in written

"""Fixtures: the slow reference, a small real scorer, rows."""

import importlib.util
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_data.token_scorer import TokenScores

VOCABULARY = 11


@pytest.fixture(scope="session")
def slow():
    """``slow_reference.py`` of this folder."""
    path = Path(__file__).with_name("slow_reference.py")
    spec = importlib.util.spec_from_file_location("slow_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def unchecked():
    """Without the type checks that tests put around every function, as users have it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def plain():
    """``objectives.functional`` without the shape checks that tests put around every function.

    The folder is imported under another name, as a copy of it would be.
    """
    folder = Path(__file__).parents[2] / "objectives" / "functional"
    spec = importlib.util.spec_from_file_location("plain_functional", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_functional"] = module
    spec.loader.exec_module(module)
    return module


class BigramScorer(torch.nn.Module):
    """A real, small model: the distribution of a token depends on the one before it."""

    def __init__(self, *, seed=0, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=dtype)
        self.table = torch.nn.Parameter(table)
        self.scored_rows = []

    def score_packed(self, ids, lengths, target_mask, *, temperature=1.0, entropy=False):
        self.scored_rows.append(len(lengths))
        before = ids.roll(1)[target_mask]
        log_p = (self.table[before] / temperature).log_softmax(-1)
        log_prob = log_p.gather(-1, ids[target_mask].unsqueeze(-1)).squeeze(-1)
        return TokenScores(log_prob, -(log_p.exp() * log_p).sum(-1) if entropy else None)


@pytest.fixture
def make_scorer():
    return BigramScorer


@pytest.fixture
def make_row():
    """A row of one trajectory: a prompt, then turns of sampled and of inserted tokens."""

    def make(seed, *, prompt=3, turns=((4, 2), (3, 0)), advantage=None, group=0, reward=0.0):
        generator = torch.Generator().manual_seed(seed)
        mask = [False] * prompt
        for sampled, inserted in turns:
            mask += [True] * sampled + [False] * inserted
        mask = torch.tensor(mask, dtype=torch.bool)
        size = (len(mask),)

        def noise():
            return -2 * torch.rand(size, generator=generator, dtype=torch.float64)

        row = TensorDict(
            {
                "tokens": {"full": torch.randint(VOCABULARY, size, generator=generator)},
                "masks": {
                    "all_assistant_mask": mask,
                    "all_attention_mask": torch.ones(size, dtype=torch.bool),
                },
                "log_probs": {"full": noise().masked_fill(~mask, torch.nan)},
                "old_log_probs": {"full": noise().masked_fill(~mask, torch.inf)},
                "next": {
                    "ref_log_probs": {"full": noise().masked_fill(~mask, -torch.inf)},
                    "teacher_log_probs": {"full": noise().masked_fill(~mask, torch.nan)},
                },
                "reward": torch.tensor([[reward]]),
                "group_id": torch.tensor(group),
                "truncated": torch.tensor([seed % 3 == 0]),
            },
            batch_size=[],
        )
        if advantage is not None:
            row["advantage"] = torch.tensor([[advantage]], dtype=torch.float64)
        return row

    return make


@pytest.fixture
def make_batch(make_row):
    """Six rows of unequal lengths and turns, in which prompts may be made longer."""

    def make(*, prompt=2, advantages=(1.0, -0.5, 2.0, -1.5, 0.0, 0.7)):
        shapes = (((5, 0),), ((1, 2), (3, 1)), ((2, 0),), ((4, 3), (1, 1), (2, 0)), (), ((6, 2),))
        return lazy_stack(
            [
                make_row(i, prompt=prompt + i % 2, turns=turns, advantage=advantage)
                for i, (turns, advantage) in enumerate(zip(shapes, advantages, strict=True))
            ]
        )

    return make

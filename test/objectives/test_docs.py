"""What ``docs/losses.md`` shows runs."""

import doctest
import re
from pathlib import Path

import torch
from tensordict import lazy_stack

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


def test_examples_print_what_the_page_says():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


def test_the_plain_loop_trains(make_scorer, make_row):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (loop,) = [block for block in blocks if "ReplayBuffer(" in block]
    policy = make_scorer(dtype=torch.float32)
    rows = [
        make_row(i, prompt=2 + i % 3, turns=((3 + i % 2, 1),), group=i % 2, reward=float(i))
        for i in range(16)
    ]
    before = policy.table.detach().clone()
    names = {"torch": torch, "policy": policy, "rows": lazy_stack(rows)}
    exec(compile(loop, str(PAGE), "exec"), names)
    assert not policy.table.equal(before)
    assert policy.table.isfinite().all()

"""The README's Python runs as it stands, on a model directory made here."""

import re
from pathlib import Path

import pytest
from torch import nn

from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    path = tmp_path / "outputs/grpo/calculator/seed0/model"
    tokenizer = train_tokenizer(["Enter the code."], vocab_size=270)
    tokenizer.save_pretrained(path)
    tiny_qwen3(len(tokenizer), max_position_embeddings=4096).save_pretrained(path)
    return path


@pytest.mark.parametrize("block", BLOCKS, ids=[b.splitlines()[0] for b in BLOCKS])
def test_block_runs(
    block: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_directory.is_relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    if "collector" in names:
        policy = names["policy"]
        assert isinstance(policy, nn.Module)
        grads = [p.grad for p in policy.parameters()]
        assert all(g is not None and g.isfinite().all() for g in grads)
        names["collector"].shutdown()  # type: ignore[attr-defined]


def test_every_linked_file_is_there() -> None:
    root = Path(__file__).parents[2]
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (root / link).exists()] == []

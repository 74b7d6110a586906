"""The Python of the pages on OpenEnv, TextEnvironment and TRL runs as it stands, but for names.

A model directory made here stands for the hub's model, and a server of ours for the reader's.
"""

import re
from pathlib import Path

import pytest

from torchrl_modules import TransformersWrapper

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, chatml_tokenizer, make_tiny_model):
    path = tmp_path_factory.mktemp("model")
    chatml_tokenizer.save_pretrained(path)
    make_tiny_model(max_position_embeddings=4096).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("page", ["openenv", "text-environment", "from-trl"])
def test_page_runs(page, servers, model_directory, chatml_tokenizer, make_tiny_model, capsys):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 2
    model = make_tiny_model()
    names = {
        "model": model,
        "tokenizer": chatml_tokenizer,
        "policy": TransformersWrapper(
            model, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 8}
        ),
    }
    closing = []
    for block in blocks:
        block = block.replace("http://localhost:8000", servers)
        block = block.replace("Qwen/Qwen3-0.6B", model_directory)
        exec(compile(block, f"{page}.md", "exec"), names)
        closing += [names.get("env"), names.get("collector"), names.get("text_env")]
    for part in {id(p): p for p in closing if p is not None}.values():
        getattr(part, "shutdown", part.close if hasattr(part, "close") else None)()
    capsys.readouterr()


@pytest.mark.parametrize("page", ["openenv", "text-environment", "from-trl"])
def test_links_of_the_page(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (DOCS / link).exists()] == []

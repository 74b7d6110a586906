"""What the README and the pages of ``docs/`` show runs as it stands, one page in one namespace.

A reader's own things (a model, a tokenizer, data, a server) stand by under the names that the pages
use for them: names of :func:`stand_ins`, and files in the folder that the pages run in. A block
behind ``<!-- not run: why -->`` is left out; only its imports are tested. A page whose blocks stand
behind ``<!-- needs vLLM -->`` runs with the tests of vLLM.
"""

import ast
import asyncio
import doctest
import inspect
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tensordict import lazy_stack
from torch.utils.data import DataLoader
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import LLMCollector
from objectives import GRPOLoss, MCAdvantage
from torchrl_data import encode_demonstrations, row_tensordicts
from torchrl_envs import ChatEnv, DataLoadingPrimer, EpisodeEnv, RewardFunctions
from torchrl_modules import TransformersWrapper

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {"README": ROOT / "README.md"} | {
    path.relative_to(DOCS).with_suffix("").as_posix(): path for path in sorted(DOCS.rglob("*.md"))
}
FENCE = re.compile(r"(?:<!-- (not run: [^\n]*?|needs vLLM) -->\n)?```python\n(.*?)```", re.DOTALL)
MODELS = ("Qwen/Qwen3-0.6B",)
VISION_MODELS = {
    "llava": "llava-hf/llava-1.5-7b-hf",
    "idefics": "HuggingFaceTB/SmolVLM-256M-Instruct",
}
ROWS = [{"prompt": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(16)]
CLOSED = ("collector", "env", "text_env", "tools")


class Block(NamedTuple):
    """Python of a page."""

    code: str  # behind as many empty lines as there are before it on the page
    remark: str


def blocks_of(page):
    text = PAGES[page].read_text(encoding="utf-8")
    return [
        Block("\n" * text.count("\n", 0, found.start(2)) + found[2], found[1] or "")
        for found in FENCE.finditer(text)
    ]


WITH_BLOCKS = [page for page in PAGES if blocks_of(page)]
NEED_VLLM = [page for page in WITH_BLOCKS if "needs vLLM" in {b.remark for b in blocks_of(page)}]
WITH_SESSIONS = [page for page, path in PAGES.items() if "```pycon" in path.read_text("utf-8")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, chatml_tokenizer, make_tiny_model):
    """Where a reader works: models and data under the names that the pages give them."""
    path = tmp_path_factory.mktemp("reader")
    for model in MODELS:
        chatml_tokenizer.save_pretrained(path / model)
        make_tiny_model(max_position_embeddings=4096, head_dim=32).save_pretrained(path / model)
    families = runpy.run_path(str(ROOT / "test/images/vision_models.py"))
    for family, model in VISION_MODELS.items():
        for part in families[family]():
            part.save_pretrained(path / model)
    _write_rows(path / "rows.jsonl", ROWS)
    problems = [{"question": row["prompt"], "answer": f"#### {row['answer']}"} for row in ROWS]
    _write_rows(path / "path/to/data/train.jsonl", problems)
    _write_rows(path / "openai/gsm8k/main/train.jsonl", problems)
    (path / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: main/train.jsonl\n---\n"
    )
    (path / "file_server.py").write_text(FILE_SERVER)
    (path / "my_tools.py").write_text(MY_TOOLS)
    return path


MY_TOOLS = """
def plot(values: list[float]) -> str:
    \"\"\"Plot values.

    Args:
        values: The values.
    \"\"\"
    return str(values)

def solve(equation: str) -> str:
    \"\"\"Solve an equation.

    Args:
        equation: The equation.
    \"\"\"
    return equation
"""

FILE_SERVER = """
import os, sys
from mcp.server import MCPServer

server = MCPServer("files", log_level="CRITICAL")

@server.tool()
def read(name: str) -> str:
    "Read a file."
    return os.environ["ROOT"] + name

@server.tool()
def find(words: str) -> str:
    "Find files."
    return words

if len(sys.argv) == 1:
    server.run()
else:
    server.run("streamable-http", port=int(sys.argv[1]))
"""


def _write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def stand_ins(chatml_tokenizer, make_tiny_model):
    """What a page takes for granted, by name."""
    model = make_tiny_model(max_position_embeddings=4096, head_dim=32)
    policy = TransformersWrapper(
        model,
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 8},
        max_model_len=4096,
    )

    def by_length(completion_ids, **columns):
        return [float(sum(ids) % 7) for ids in completion_ids]

    env = ChatEnv(batch_size=(16,)).append_transform(DataLoadingPrimer(ROWS, group_size=8))
    env.append_transform(RewardFunctions([by_length]))
    return {
        "model": model,
        "tokenizer": chatml_tokenizer,
        "policy": policy,
        "env": env,
        "rows": ROWS,
        "dataset": ROWS,
    }


def _of_environments(names):
    torch_dataloader = DataLoader(ROWS, batch_size=4, collate_fn=list)
    return {"prepare": dict, "torch_dataloader": torch_dataloader}


def _of_rewards(names):
    async def ask_a_judge(content, answer):
        return float(answer in content)

    return {"ask_a_judge": ask_a_judge}


def _of_losses(names):
    buffer = ReplayBuffer(storage=LazyStackStorage(16), transform=MCAdvantage(8), batch_size=16)
    collector = LLMCollector(names["env"], names["policy"], replay_buffer=buffer)
    rows = collector.collect()
    loss = GRPOLoss(names["policy"])
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    shown = encode_demonstrations(names["policy"].encoder, [said])
    return {
        "torch": torch,
        "rollouts": buffer[:],
        "demonstrations": lazy_stack(row_tensordicts(shown)),
        "rows": rows,
        "batch": buffer[:],
        "loss": loss,
        "optimizer": torch.optim.AdamW(loss.parameters()),
    }


OWN = {"environments": _of_environments, "rewards": _of_rewards, "losses": _of_losses}


@pytest.fixture
def search_server(folder):
    """An MCP server over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(folder / "file_server.py"), str(port)]
    with subprocess.Popen(command, env={**os.environ, "ROOT": ""}) as process:
        deadline = time.monotonic() + 60
        try:
            while not _accepts(port):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _accepts(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


SERVERS = {"http://localhost:8000/": "servers", "http://127.0.0.1:8000/": "search_server"}


@pytest.fixture
def run_page(stand_ins, folder, request, monkeypatch, capsys):
    """Runs a page's blocks; gives the names that they leave."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    # The `python` of a page is the one that has the library.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    names = dict(stand_ins)
    held = []

    def run(page):
        if page in OWN:
            names.update(OWN[page](names))
        for block in blocks_of(page):
            if block.remark.startswith("not run"):
                continue
            code = block.code
            for url, fixture in SERVERS.items():
                if url in code:
                    code = code.replace(url, request.getfixturevalue(fixture) + "/")
            _execute(compile(code, str(PAGES[page]), "exec", TOP_LEVEL_AWAIT), names)
            held.extend(names[name] for name in CLOSED if name in names)
            if names["env"] is not stand_ins["env"]:
                _take_a_turn(names["env"], names["policy"])
        return names

    yield run
    for part in {id(part): part for part in [*held, stand_ins["env"]]}.values():
        getattr(part, "shutdown", getattr(part, "close", None))()
    capsys.readouterr()


TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _execute(code, names):
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


def _take_a_turn(env, policy):
    if isinstance(env, EpisodeEnv) and any(True for _ in env.transforms_of(DataLoadingPrimer)):
        env.step(policy(env.reset()))


OTHERS_WARN = pytest.mark.filterwarnings("ignore")  # vLLM, and what TorchRL's wrappers import
MARKS = {page: [pytest.mark.vllm, OTHERS_WARN] for page in NEED_VLLM} | {
    "from-torchrl": [OTHERS_WARN]
}
MARKED_PAGES = [pytest.param(page, marks=MARKS.get(page, ())) for page in WITH_BLOCKS]


@pytest.mark.parametrize("page", MARKED_PAGES)
def test_page_runs(page, run_page):
    remarks = [block.remark for block in blocks_of(page)]
    if all(remark.startswith("not run") for remark in remarks):
        pytest.skip(", ".join(dict.fromkeys(remarks)))
    names = run_page(page)
    if page in CHECKS:
        CHECKS[page](names)


def _has_learnt_in_six_steps(names):
    """On a real model: rewards differ from the first batch on, and the steps help."""
    first, *_, last = rewards = names["rewards"]
    assert len(rewards) == 6
    assert 0.05 < first < 0.5
    assert last > 0.7


def _has_trained(names):
    steps = [state["step"] for state in names["optimizer"].state.values()]
    assert len(steps) == len(list(names["policy"].parameters()))
    assert all(step == 1 for step in steps)
    assert all(p.isfinite().all() for p in names["policy"].parameters())


def _has_learnt_what_was_shown(names):
    assert {state["step"].item() for state in names["optimizer"].state.values()} == {4.0}
    told = [row["tokens", "full"][row["masks", "all_assistant_mask"]] for row in names["rows"]]
    answers = [f"It is {n + 2}.<|im_end|>" for n in range(16)]
    assert [names["tokenizer"].decode(ids) for ids in told] == answers


CHECKS = {
    "README": _has_learnt_in_six_steps,
    "losses": _has_trained,
    "sft": _has_learnt_what_was_shown,
}


@OTHERS_WARN
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_names_that_a_page_imports_are_there(page, folder, monkeypatch):
    """Blocks that are left out too."""
    monkeypatch.syspath_prepend(folder)
    for block in blocks_of(page):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom):
                module = import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


@pytest.mark.parametrize("page", WITH_SESSIONS)
def test_session_prints_what_the_page_says(page):
    result = doctest.testfile(str(PAGES[page]), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_linked_file_and_heading_is_there(page):
    text = PAGES[page].read_text(encoding="utf-8")
    for path, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = (PAGES[page].parent / path) if path else PAGES[page]
        assert target.exists(), path
        if heading:
            assert heading in _anchors(target), f"{path}#{heading}"


def _anchors(path):
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_glossary_says_each_word_once_and_knows_the_words_it_uses():
    rows = re.findall(
        r"^\| ([^|]+) \| (.+) \|$", PAGES["glossary"].read_text("utf-8"), re.MULTILINE
    )
    words = [word for word, _ in rows[1:]]
    assert words == sorted(set(words))
    used = {found for _, text in rows for found in re.findall(r"\*([^*]+)\*", text)}
    plural = {word + "s" for word in words} | {"micro-batches", "engine's"}
    assert used - set(words) - plural == set()

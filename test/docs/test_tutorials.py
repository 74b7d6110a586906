"""The tutorials run from top to bottom, and show what they were told by a real run."""

import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/tutorials"
TUTORIALS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(path):
    notebook = json.loads(path.read_text("utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    streams = [o["text"] for o in cell["outputs"] if o["output_type"] == "stream"]
    return "".join("".join(text) for text in streams)


def said(cells):
    return "".join(map(printed, cells))


def source(cell):
    return "".join(cell["source"])


def figures(cells):
    return sum("image/png" in o.get("data", {}) for cell in cells for o in cell["outputs"])


@pytest.mark.parametrize("name", TUTORIALS)
def test_what_a_page_shows_is_of_one_whole_run(name):
    cells = read(FOLDER / f"{name}.ipynb")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {o["output_type"] for cell in cells for o in cell["outputs"]}
    assert "error" not in kinds
    assert {"stream"} <= kinds
    shown = (FOLDER / f"{name}.ipynb").read_text("utf-8")
    assert not re.search(r"/(tmp|home|root|work|usr)/", shown)


SHORTER = {
    "coming-from-torchrl": {"num_steps=40": "num_steps=3"},
    "coming-from-trl": {"max_steps=40": "max_steps=3", "step in range(40)": "step in range(3)"},
    "losses-in-your-loop": {"step in range(60)": "step in range(6)"},
    "streaming": {"num_steps=30": "num_steps=6"},
    "your-agent": {"step in range(35)": "step in range(2)"},
}
"""Steps of pages that train until something is learnt, and how many show that they run."""


@pytest.fixture(scope="session")
def run_tutorial(tmp_path_factory):
    @cache
    def run(name, *, is_short=False):
        folder = tmp_path_factory.mktemp(name)
        text = (FOLDER / f"{name}.ipynb").read_text("utf-8")
        for steps, fewer in SHORTER[name].items() if is_short else ():
            assert text.count(steps) == 1
            text = text.replace(steps, fewer)
        (folder / "of").mkdir()
        (folder / f"of/{name}.ipynb").write_text(text, "utf-8")
        command = [sys.executable, str(FOLDER / "execute.py"), "--of", "of", "--into", "."]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return read(folder / f"{name}.ipynb")

    return run


@pytest.mark.parametrize(("name", "num_figures"), [("your-environment", 0), ("tools-and-mcp", 1)])
def test_a_page_prints_what_it_says(run_tutorial, name, num_figures):
    cells = run_tutorial(name)
    for cell, kept in zip(cells, read(FOLDER / f"{name}.ipynb"), strict=True):
        if not figures([cell]):  # the figure's cell tells a time
            assert (source(cell), printed(cell)) == (source(kept), printed(kept))
    assert figures(cells) == num_figures


LEARNT = re.compile(r"first step ([\d.]+), of the last five ([\d.]+)")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SHORTER)
def test_a_page_that_trains_takes_its_steps(run_tutorial, name):
    cells, kept = run_tutorial(name, is_short=True), read(FOLDER / f"{name}.ipynb")
    assert [figures([cell]) for cell in cells] == [figures([cell]) for cell in kept]
    assert len(LEARNT.findall(said(cells))) == len(LEARNT.findall(said(kept)))


@pytest.mark.weekly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "num_curves", "before"),
    [
        ("losses-in-your-loop", 1, 0.1),
        ("your-agent", 1, 0.1),
        ("coming-from-trl", 2, 0.2),  # theirs and ours
        ("coming-from-torchrl", 2, 0.2),
    ],
)
def test_a_page_that_trains_learns(run_tutorial, name, num_curves, before):
    rewards = LEARNT.findall(said(run_tutorial(name)))
    assert len(rewards) == num_curves
    for first, last in rewards:
        assert float(first) < before
        assert float(last) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "losses"), [("coming-from-trl", 4), ("coming-from-torchrl", 2)])
def test_a_page_for_those_who_come_computes_the_same_loss(run_tutorial, name, losses):
    cells = run_tutorial(name, is_short=True)
    equal = re.findall(r"(\S+)   here (\S+)   gradients apart by (\S+) of", said(cells))
    assert len(equal) == losses
    for theirs, ours, gap in equal:
        assert float(theirs) == pytest.approx(float(ours), abs=2e-6)
        assert float(theirs) != 0
        assert float(gap) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reading_a_run_tells_of_what_was_trained(run_tutorial):
    text = said(cells := run_tutorial("reading-a-run"))
    ends = re.findall(r"(answered|response_length) +(\d+) rows, truncated: (\w+)", text)
    assert {(why, cut) for why, _, cut in ends} == {
        ("answered", "False"),
        ("response_length", "True"),
    }
    assert sum(int(count) for _, count, _ in ends) == 20 * 32  # steps of rollouts
    tokens, gap = re.findall(r"(\d+) tokens: largest gap (\S+) nats", text)[0]
    assert 0 < int(tokens) <= 32 * 6
    assert float(gap) < 1e-3
    assert text.count("sample 15: ") == 1  # of the group, the last
    assert "page/index.html" in text
    assert figures(cells) == 1


def test_a_page_shows_no_path_of_a_cell(tmp_path):
    plain = runpy.run_path(str(FOLDER / "execute.py"))["_plain"]
    told = 'File "/tmp/ipykernel_17/33.py", line 2, in judge'
    assert plain(told, tmp_path) == 'File "<cell>", line 2, in judge'


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_your_agent_has_a_row_of_each_text_that_it_went_on_from(run_tutorial):
    text = said(run_tutorial("your-agent", is_short=True))
    rows = re.findall(r"group (\d), turns 2: .* (\d) trained", text)
    assert rows == [("0", "8"), ("1", "4"), ("1", "4")]


@pytest.mark.weekly
@pytest.mark.timeout(1200)
def test_your_rewards_learns_from_degrees_what_it_does_not_from_exactness(run_tutorial):
    cells = run_tutorial("your-rewards")
    last = dict(re.findall(r"trained with (\w+): .*, ([\d.]+) at last", said(cells)))
    assert float(last["close"]) > float(last["exact"]) + 0.15
    assert said(cells).count("not scorable: ") == 2
    assert figures(cells) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "is_short", [True, pytest.param(False, marks=pytest.mark.weekly)], ids=["short", "whole"]
)
def test_streaming_trains_every_group_and_no_token_that_is_too_old(run_tutorial, is_short):
    text = said(run_tutorial("streaming", is_short=is_short))
    num_groups = 4 * (6 if is_short else 30)
    assert re.search(rf"^trained +{num_groups} ", text, re.MULTILINE)
    assert re.search(r"^dropped +0 ", text, re.MULTILINE)
    batches, streaming = map(int, re.findall(r"oldest token (\d) steps old", text))
    assert batches == 0
    assert 0 < streaming <= 4


@pytest.mark.weekly
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_served_model_answers_as_it_does_here(run_tutorial):
    cells = run_tutorial("sft-to-served")
    text = said(cells)
    estimates = re.findall(r"pass@1 (\S+)  pass@2 \S+  pass@4 \S+  pass@8 (\S+)", text)
    (first_shown, eight_shown), (first_learnt, _) = [map(float, each) for each in estimates]
    assert first_shown < 0.5
    assert eight_shown > 0.8  # one of eight answers is right, and not yet the first
    assert first_learnt > 0.85
    assert re.findall(r"(\d+) of 128 answers are the same here and over HTTP", text) == ["128"]
    assert int(re.findall(r"(\d+) of 128 answers over HTTP are right", text)[0]) > 115
    assert figures(cells) == 1


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_first_run_learns(run_tutorial):
    cells = run_tutorial("first-run")
    rewards = re.findall(r"step \d+: ([\d.]+) of the recorded .*; step \d+: ([\d.]+)", said(cells))
    first, last = map(float, rewards[0])
    assert last > first + 0.2
    assert figures(cells) == 1

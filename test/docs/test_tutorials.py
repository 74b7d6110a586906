"""The tutorials run from top to bottom, and show what they were told by a real run."""

import json
import re
import subprocess
import sys
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


@pytest.fixture(scope="session")
def run_tutorial(tmp_path_factory):
    def run(name):
        folder = tmp_path_factory.mktemp(name)
        command = [sys.executable, str(FOLDER / "execute.py"), name, "--into", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return read(folder / f"{name}.ipynb")

    return run


def test_your_environment_prints_what_the_page_says(run_tutorial):
    cells = run_tutorial("your-environment")
    for cell, kept in zip(cells, read(FOLDER / "your-environment.ipynb"), strict=True):
        assert (source(cell), printed(cell)) == (source(kept), printed(kept))


def test_tools_and_mcp_answers_what_the_page_says(run_tutorial):
    cells = run_tutorial("tools-and-mcp")
    for cell, kept in zip(cells, read(FOLDER / "tools-and-mcp.ipynb"), strict=True):
        if not figures([cell]):  # the figure's cell tells a time
            assert (source(cell), printed(cell)) == (source(kept), printed(kept))
    assert figures(cells) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_your_rewards_learns_from_degrees_what_it_does_not_from_exactness(run_tutorial):
    cells = run_tutorial("your-rewards")
    said = "".join(map(printed, cells))
    last = dict(re.findall(r"trained with (\w+): .*, ([\d.]+) at last", said))
    assert float(last["close"]) > float(last["exact"]) + 0.15
    assert said.count("not scorable: ") == 2
    assert figures(cells) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_your_agent_learns(run_tutorial):
    cells = run_tutorial("your-agent")
    said = "".join(map(printed, cells))
    rows = re.findall(r"group (\d), turns 2: .* (\d) trained", said)
    assert rows == [("0", "8"), ("1", "4"), ("1", "4")]
    first, last = map(float, re.findall(r"first step ([\d.]+), of the last five ([\d.]+)", said)[0])
    assert first < 0.1
    assert last > 0.8
    assert figures(cells) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_streaming_trains_every_group_and_no_token_that_is_too_old(run_tutorial):
    cells = run_tutorial("streaming")
    said = "".join(map(printed, cells))
    assert re.search(r"^trained +120 ", said, re.MULTILINE)
    assert re.search(r"^dropped +0 ", said, re.MULTILINE)
    batches, streaming = map(int, re.findall(r"oldest token (\d) steps old", said))
    assert batches == 0
    assert 0 < streaming <= 4
    assert figures(cells) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_losses_in_your_loop_learns(run_tutorial):
    cells = run_tutorial("losses-in-your-loop")
    said = "".join(map(printed, cells))
    first, last = map(float, re.findall(r"first step ([\d.]+), of the last five ([\d.]+)", said)[0])
    assert first < 0.1
    assert last > 0.8
    assert figures(cells) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_first_run_learns(run_tutorial):
    cells = run_tutorial("first-run")
    said = "".join(map(printed, cells))
    first, last = map(
        float, re.findall(r"step \d+: ([\d.]+) of the recorded .*; step \d+: ([\d.]+)", said)[0]
    )
    assert last > first + 0.2
    assert figures(cells) == 1

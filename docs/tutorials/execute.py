"""Runs the notebooks of this folder from top to bottom and writes what came out into them.

    python docs/tutorials/execute.py [NAME ...] [--of FOLDER] [--into FOLDER]   # all without a name

Each runs in an empty folder, in a process of its own that knows this checkout.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOGGED = re.compile(r"^\d{4}-\d\d-\d\d .*\n?", re.MULTILINE)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CELL = re.compile(r"[^\s\"']*/ipykernel_\d+/\d+\.py")


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with what its cells print and show.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    known = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(
        PATH=os.pathsep.join(paths), PYTHONPATH=os.pathsep.join(known), HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1", TQDM_DISABLE="1", PYTHONWARNINGS="ignore",
        IPYTHONDIR=str(folder / ".ipython"), NO_COLOR="1", COLUMNS="100",
    )  # fmt: skip
    client = NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which change from run to run
        if cell.cell_type == "code":
            cell.outputs = _kept(cell.outputs, folder)
    notebook.metadata.pop("widgets", None)
    return notebook


def _kept(outputs: list, folder: Path) -> list:
    """What a cell printed and showed, without logs; what it printed is one text."""
    kept: list = []
    for output in outputs:
        if output.output_type != "stream":
            if "text/plain" in output.data:
                output.data["text/plain"] = _plain(output.data["text/plain"], folder)
            kept.append(output)
        elif output.name == "stdout":
            output.text = LOGGED.sub("", _plain(output.text, folder))
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
            elif output.text:
                kept.append(output)
    return kept


def _plain(text: str, folder: Path) -> str:
    """Without colours and without the folders of this machine."""
    return CELL.sub("<cell>", ANSI.sub("", text)).replace(f"{folder}/", "").replace(f"{ROOT}/", "")


def main(arguments: list[str]) -> None:
    """Execute notebooks, in place or into another folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="all of them, if none is given")
    parser.add_argument("--of", type=Path, default=HERE, help="folder of the notebooks")
    parser.add_argument("--into", type=Path, default=HERE, help="folder of what is written")
    given = parser.parse_args(arguments)
    for path in sorted(given.of.glob("*.ipynb")):
        if given.names and path.stem not in given.names:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        (given.into / path.name).write_text(text + "\n", "utf-8")
        sys.stdout.write(f"{path.name}: {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""What is built needs no checkout: the wheel in an empty folder, the source with its script."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import torchrl_data

ROOT = Path(__file__).parents[1]
LIBRARY = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")
PACKAGES = (*LIBRARY, "torchrl_agents", "torchrl_tasks")
IMPORT_EVERYTHING = """
import importlib, json, sys
found = {}
for package in sys.argv[1:]:
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)
    found[package] = [module.__file__, module.__version__]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", ROOT, folder)
    (archive,) = folder.iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel that the source distribution builds."""
    folder = tmp_path_factory.mktemp("wheel")
    build("wheel", source, folder)
    (path,) = folder.iterdir()
    return path


def build(target, source, folder):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)


def test_source_distribution_has_the_script_and_what_its_commands_need(source):
    for path in ("Makefile", "LICENSE", "README.md", "CHANGELOG.md", ".ci/run"):
        assert (source / path).is_file(), path
    for folder in (
        "sota-implementations",
        "test",
        "benchmarks",
        "docs",
        "examples",
        "requirements",
    ):
        ours = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if counts(p)}
        assert {p for p in ours if not (source / p).is_file()} == set()


def counts(path):
    """Whether a file of this checkout is a part of the project, and not made by its tools."""
    made = "__pycache__" in path.parts or (ROOT / "docs/api/classes") in path.parents
    return path.is_file() and not made and path.suffix != ".pyc"


def page_of(metadata):
    """The description of a distribution, as its index shows it."""
    return metadata.get_payload(decode=True).decode().strip()


def test_wheel_holds_the_packages_whole_and_nothing_else(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    metadata = f"torchrl_agents-{torchrl_data.__version__}.dist-info"
    assert {name.partition("/")[0] for name in files} == {*PACKAGES, metadata}
    ours = {
        p.relative_to(ROOT).as_posix() for k in PACKAGES for p in (ROOT / k).rglob("*") if counts(p)
    }
    ours.add("torchrl_data/torchrl-arguments.md")  # the page of docs/ that the classes answer from
    ours |= {f"torchrl_tasks/{name}" for name in ("terminal.py", "repository.toml")}
    scripts = ROOT / "sota-implementations"
    ours |= {
        f"torchrl_agents/recipes/{p.relative_to(scripts).as_posix()}"
        for p in scripts.rglob("*")
        if counts(p)
    }
    assert {name for name in files if not name.startswith(metadata)} == ours
    described = message_from_bytes(zipfile.ZipFile(wheel).read(f"{metadata}/METADATA"))
    assert described["Version"] == torchrl_data.__version__
    assert described["License-Expression"] == "MIT"


ADDRESS = "https://example.org/team/agents"
TAG = f"v{torchrl_data.__version__}"
LINKS = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def addressed(source, tmp_path_factory):
    """Metadata of both distributions of a project that has an address, and the wheel, unpacked."""
    folder = tmp_path_factory.mktemp("addressed")
    copy = shutil.copytree(source, folder / "source")
    (copy / "PKG-INFO").unlink()
    settings = (copy / "pyproject.toml").read_text()
    assert settings.count('\naddress = ""\n') == 1
    (copy / "pyproject.toml").write_text(
        settings.replace('\naddress = ""\n', f'\naddress = "{ADDRESS}/"\n')
    )
    build("sdist", copy, folder / "dist")
    (archive,) = (folder / "dist").iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    described = {"sdist": message_from_bytes((unpacked / "PKG-INFO").read_bytes())}
    build("wheel", unpacked, folder / "wheel")
    (archive,) = (folder / "wheel").iterdir()
    zipfile.ZipFile(archive).extractall(folder / "site")
    (info,) = (folder / "site").glob("*.dist-info/METADATA")
    return described | {"wheel": message_from_bytes(info.read_bytes())}, folder / "site"


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_with_an_address_every_link_of_the_description_is_whole(addressed, kind):
    described = addressed[0][kind]
    readme = (ROOT / "README.md").read_text()
    links, written = LINKS.findall(page_of(described)), LINKS.findall(readme)
    assert len(links) == len(written) > 20
    for link, path in zip(links, written, strict=True):
        kind_of_link = "raw" if path.endswith(".png") else "blob"
        assert link == f"{ADDRESS}/{kind_of_link}/{TAG}/{path}"
        assert (ROOT / path.partition("#")[0]).exists()
    assert dict(url.split(", ") for url in described.get_all("Project-URL")) == {
        "Homepage": ADDRESS,
        "Documentation": f"{ADDRESS}/blob/{TAG}/docs/index.md",
        "Changelog": f"{ADDRESS}/blob/{TAG}/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }
    assert described["Description-Content-Type"] == "text/markdown"


def test_with_an_address_errors_name_it(addressed, tmp_path):
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from torchrl_agents.command import main; main(['doctor'])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(addressed[1]), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f'[vllm]" ({ADDRESS}/blob/{TAG}/docs/vllm.md)\n' in told.stdout


def test_without_an_address_there_are_no_links(wheel):
    metadata = f"torchrl_agents-{torchrl_data.__version__}.dist-info/METADATA"
    described = message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    assert described.get_all("Project-URL") is None
    assert page_of(described) == (ROOT / "README.md").read_text().strip()


def test_which_links_become_whole():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "[a](x.md#b) [![i](i.png)](y/) [c](#d) <https://z> [e](https://e/f) `[g](h)` [`p`](q)\n"
    text += "```md\n[k](l.md)\n```\n[m](mailto:n@o)"
    assert hook.absolute(text, "https://h/r", "v1") == (
        "[a](https://h/r/blob/v1/x.md#b) [![i](https://h/r/raw/v1/i.png)](https://h/r/blob/v1/y/) "
        "[c](#d) <https://z> [e](https://e/f) `[g](h)` [`p`](https://h/r/blob/v1/q)\n"
        "```md\n[k](l.md)\n```\n[m](mailto:n@o)"
    )
    wrong = hook.Address(str(ROOT), {"address": "example.org"})
    with pytest.raises(ValueError, match=r"address='example\.org' is no place of a repository"):
        wrong.update({"version": "1"})


def test_pages_that_errors_name_are_there():
    named = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("page"), args=[ast.Constant(str(text))]):
                    named.add(text)
    assert {"docs/vllm.md", "docs/tools.md", "docs/chat-templates.md"} <= named
    assert {text for text in named if not (ROOT / text).is_file()} == set()


def test_wheel_works_from_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_EVERYTHING, *LIBRARY],
        cwd=empty,
        env={
            "PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'test/quick_imports'}",
            **{"PATH": "", "HOME": str(empty)},
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for package in LIBRARY:
        file, version = found[package]
        assert Path(file).is_relative_to(site)
        assert version == torchrl_data.__version__


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """The command of an installed wheel; its dependencies are there, but for those ``without``."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", f"--python={environment}/bin/python", "--quiet"]
    install = ["install", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=120)
    hide = "import os, sys; sys.modules.update(dict.fromkeys(os.environ['WITHOUT'].split()))"
    (site / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{hide}\n")

    def command(*arguments, folder, without=()):
        return subprocess.run(
            [environment / "bin/torchrl-agents", *arguments],
            cwd=folder,
            env={
                **{"PATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
                "WITHOUT": " ".join(without),
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return command


def test_the_command_of_a_wheel_tells_what_there_is(command, tmp_path):
    assert f"{torchrl_data.__version__}\n" == command("--version", folder=tmp_path).stdout
    helped = command("--help", folder=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "  grpo " in helped.stdout
    wrong = command("gpro", folder=tmp_path)
    assert (wrong.returncode, "Did you mean grpo?" in wrong.stderr) == (2, True)


@pytest.mark.weekly
def test_a_wheel_trains_evaluates_and_shows(command, tmp_path):
    """A checked run, a run, a test of its model, and a page of its rollouts."""
    checked = command("grpo", "debug=dry_run", "task.num_rows=512", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    run = "outputs/grpo/calculator/seed0-001"
    assert (tmp_path / run / "config.yaml").exists()

    trained = command("grpo", "debug=tiny", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout.splitlines()[-1])
    assert result["output_dir"] == str(tmp_path / "outputs/grpo/calculator/tiny-001")
    samples = ("evaluate.num_prompts=4", "evaluate.num_samples=2")
    model = f"policy.model={result['output_dir']}"
    tested = command("evaluate", model, *samples, folder=tmp_path)
    assert tested.returncode == 0, tested.stderr
    assert json.loads(tested.stdout.splitlines()[-1])["num_samples"] == 2

    shown = command("view", result["output_dir"], "--html", "page", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "page/index.html").stat().st_size > 1000


MINE = '''
PRICES = {"apple": 3, "pear": 5, "plum": 7, "fig": 9}


def lookup(item: str) -> str:
    """Look up a price.

    Args:
        item: What it is.
    """
    return str(PRICES[item])


def polite(completions, **columns):
    return [float("please" in each[-1]["content"]) for each in completions]


def right(completions, price, **columns):
    return [float(str(p) in each[-1]["content"]) for each, p in zip(completions, price)]


class Stock:
    def reset(self, *, price, **row):
        self.price, self.sold = price, False

    def buy(self, amount: int) -> str:
        """Buy something.

        Args:
            amount: What is paid.
        """
        self.sold = amount == self.price
        return "sold" if self.sold else "no"

    def get_reward(self) -> float:
        return float(self.sold)
'''


def write_own_parts(folder):
    """A module, a data set and conversations that this toolkit has never seen."""
    (folder / "mine.py").write_text(MINE)
    prices = {"apple": 3, "pear": 5, "plum": 7, "fig": 9}
    rows, chats = [], []
    for i, (item, price) in enumerate(list(prices.items()) * 8):
        question = f"What costs a {item}, customer {i}?"
        call = {"type": "function", "function": {"name": "lookup", "arguments": {"item": item}}}
        asked = {"role": "user", "content": question}
        rows.append({"prompt": question, "price": price})
        chats.append(
            [
                asked,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": str(price)},
                {"role": "assistant", "content": f"{price} please"},
            ]
        )
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": c}) for c in chats))


@pytest.mark.weekly
def test_own_tools_rewards_data_and_environments_need_no_code_but_their_own(command, tmp_path):
    """From demonstrations to a trained model, its test and its page, in the folder of mine.py."""
    write_own_parts(tmp_path)

    def done(*arguments):
        run = command(*arguments, folder=tmp_path)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    task = ("task.tools=mine:lookup", "task.rewards=[mine:polite,mine:right]")
    task += ("task.dataset=rows.jsonl", "task.system_prompt=Use the tool.", "task.max_turns=2")
    task += ("evaluate.solved_by=right",)
    small = ("evaluate.num_prompts=4", "policy.show_tool_schemas=true", "task.max_new_tokens=40")
    taught = done(
        *("sft", *task, *small, "data.dataset=chats.jsonl", "data.num_held_out=4"),
        *("train.num_steps=150", "name=taught"),
    )
    # Two rewards, 1 each: what was learnt is what the episodes ask, with the tools in the prompt.
    assert taught["held_out_after"] > 1.5
    own = f"policy.model={taught['output_dir']}"
    steps = ("train.num_steps=1", "collector.num_prompts=2", "collector.group_size=2")
    trained = done("grpo", own, *task, *small[:2], *steps)
    assert trained["held_out_before"] > 1.5
    model = f"policy.model={trained['output_dir']}"
    tested = done("evaluate", model, *task, small[0], "evaluate.num_samples=2")
    assert tested["estimates"]["reward"]["value"] > 1.5
    shown = command("view", trained["output_dir"], "--html", "page", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr

    stock = ("task.factory=mine:Stock", "task.dataset=rows.jsonl", *small)
    assert done("grpo", *stock, *steps)["task"] == "environment"
    missing = command("grpo", "task.tools=mien:lookup", *task[1:], "dry_run=true", folder=tmp_path)
    assert missing.returncode == 1
    assert "tools='mien:lookup' can't be found: No module named 'mien'" in missing.stderr


EXTRAS = ("matplotlib", "peft", "reasoning_gym", "tensorboard", "textual")


@pytest.mark.weekly
def test_what_a_wheel_does_without_its_extras(command, tmp_path):
    """Models are tested and rollouts shown; what trains says what it needs."""
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = ("task=gsm8k", "task.dataset=rows.jsonl", "evaluate.num_prompts=4")

    def plain(*arguments):
        return command(*arguments, folder=tmp_path, without=EXTRAS)

    for task_needs in ((), ("task=gcd",)):
        refused = plain("evaluate", *task_needs)
        assert refused.returncode == 1
        assert "reasoning_gym, which is not installed: pip install reasoning-gym" in refused.stderr
        assert "Traceback" not in refused.stderr
    refused = plain("grpo", *task)
    assert refused.returncode == 1
    assert "torchrl-agents grpo: grpo draws its learning curve with matplotlib" in refused.stderr
    assert "pip install 'torchrl-agents[train]'" in refused.stderr
    assert not (tmp_path / "outputs/grpo/gsm8k/seed0-001").exists()
    tested = plain("evaluate", *task, "evaluate.num_samples=2", "policy.max_new_tokens=4")
    assert tested.returncode == 0, tested.stderr
    run = json.loads(tested.stdout.splitlines()[-1])["output_dir"]
    shown = plain("view", run, "--html", "page")
    assert shown.returncode == 0, shown.stderr
    assert plain("view", run).returncode == 0


@pytest.mark.weekly
def test_what_make_train_smollm2_installs_is_enough_for_it(command, tmp_path):
    """Everything but the two lists that the command installs is hidden."""
    pins = "".join((ROOT / f"requirements/{name}.txt").read_text() for name in ("train", "smollm2"))
    lists = {spelt(name) for name in re.findall("^[^#=]+(?===)", pins, re.MULTILINE)}
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if not lists & {spelt(owner) for owner in owners} and module not in (*PACKAGES, "pip")
    ]
    assert {"vllm", "peft", "mcp"} <= set(hidden)
    run = command("grpo", "experiment=smollm2", "dry_run=true", folder=tmp_path, without=hidden)
    assert run.returncode == 0, run.stderr


def spelt(name):
    """The one spelling of a distribution's name."""
    return re.sub("[-_.]+", "-", name).lower()

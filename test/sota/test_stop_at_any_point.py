"""A signal at each point of a run: how it ends, what it leaves, and that it goes on from there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("stopped_runs.py")


class Server:
    """Makes runs in forks of a process that has imported everything."""

    def __init__(self):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, folder, *arguments, settings=None, **job):
        job |= {"folder": str(folder), "arguments": list(arguments), "settings": settings or {}}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        done["err"] = (folder / "err").read_text()
        done["folder"] = folder / (folder / "folder").read_text()
        return done


@pytest.fixture(scope="module")
def server():
    server = Server()
    with server.process:  # its input is closed, which ends it
        yield server


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_S01_a_signal_while_torch_is_imported(number, tmp_path):
    script = ROOT / "sota-implementations/grpo/grpo.py"
    with subprocess.Popen(
        [sys.executable, script, "seed=1"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libc10.so" not in maps.read_text():
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, f"{number.name}: stopping now\n")


def test_S02_what_a_killed_run_had_started_ends_and_the_next_one_goes_on(server, tmp_path):
    """Processes that grade answers, beside training."""
    rows = tmp_path / "rows.jsonl"
    problems = [{"problem": f"{i}?", "solution": rf"\boxed{{{i}}}"} for i in range(20)]
    rows.write_text("\n".join(map(json.dumps, problems)))
    arguments = ("task=math", f"task.dataset={rows}", "collector=streaming")
    kill = {"point": "saving at the end", "signal": int(signal.SIGKILL)}
    done = server.run(tmp_path, *arguments, settings=SETTINGS, **kill)
    assert done["status"] == -signal.SIGKILL, done["err"][-3000:]
    assert done["had"] > 0
    assert done["left"] == []
    again = server.run(tmp_path, *arguments, settings=SETTINGS | {"resume": "auto"})
    assert again["status"] == 0, again["err"][-3000:]
    assert again["folder"] == done["folder"]
    assert steps_of(done["folder"]) == [1, 2]


def steps_of(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


SETTINGS = {"checkpoint.every": 1, "train.num_steps": 2}
BEFORE = [
    "loading the data",
    "loading the model",
    "warm start",
    "first evaluation",
    "streaming, first evaluation",
]
BATCHES = [
    "collecting, in generate",
    "collecting, in a tool",
    "collecting, in a reward",
    "between two passes",
    "in backward",
    "in a weight push",
    "saving on a thread",
    "periodic evaluation",
    "recording",
    "saving at the end",
    "last evaluation",
    "saving the model",
    "drawing the plot",
]
STREAMING = [
    "streaming, while the engine draws",
    "streaming, in a push that is held back",
    "streaming, in take",
    "streaming, in a tool",
    "streaming, in a reward",
    "streaming, last evaluation",
    "streaming, at the end",
]


BESIDE_OTHERS = {
    *("collecting, in a reward", "streaming, in a reward"),  # in a tool
    *("periodic evaluation", "streaming, last evaluation"),  # the last evaluation
}
"""Points that a signal reaches as it does another one, which is asked with every change."""
STUCK = ["in native code", "saving on a slow disk", "streaming, in a reward"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def stopped(server, tmp_path):
    """Runs until it is stopped; gives where."""

    def run(point, number, **job):
        streams = ["collector=streaming"] if point.startswith("streaming") else []
        own = SETTINGS | ({"evaluate.every": 1} if point == "periodic evaluation" else {})
        done = server.run(
            tmp_path,
            *streams,
            settings=own | job.pop("settings", {}),
            point=point,
            signal=int(number),
            draws="plot" in point,
            **job,
        )
        assert done["status"] == 128 + number, done["err"][-3000:]
        assert done["left"] == []

        def go_on():
            again = server.run(tmp_path, *streams, settings=own | {"resume": "auto"})
            assert again["status"] == 0, again["err"][-3000:]
            assert steps_of(again["folder"]) == [1, 2]
            assert record_of(again["folder"])["status"] == "finished"
            return again["folder"]

        return done["folder"], go_on

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "number"),
    [
        pytest.param(p, SIGNALS[i % 3], marks=[pytest.mark.weekly] * (p in BESIDE_OTHERS))
        for i, p in enumerate([*BATCHES, *STREAMING])
    ],
)
def test_S01_a_signal_ends_a_run_and_it_goes_on(point, number, stopped):
    folder, go_on = stopped(point, number)
    assert record_of(folder)["status"] == "interrupted"
    assert go_on() == folder


@pytest.mark.slow
@pytest.mark.parametrize(("point", "number"), [(p, SIGNALS[i % 3]) for i, p in enumerate(BEFORE)])
def test_S01_a_signal_before_the_first_step_ends_a_run_without_a_trace(point, number, stopped):
    folder, _ = stopped(point, number)
    assert record_of(folder)["status"] == "interrupted"
    assert not list(folder.glob("model*"))
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM, which Ray takes for itself"),
        pytest.param(
            signal.SIGINT, True, id="Ctrl-C, which all actors get too", marks=pytest.mark.weekly
        ),
    ],
)
def test_S01_a_signal_ends_a_run_on_ray(number, to_group, server, tmp_path):
    pytest.importorskip("ray")
    arguments = ("collector=ray", "+collector.remote_config.num_cpus=0")
    stop = {"point": "on Ray, in take", "signal": int(number), "to_group": to_group}
    done = server.run(tmp_path, *arguments, settings=SETTINGS, **stop, deadline_s=200)
    assert done["status"] == 128 + number, done["err"][-3000:]
    assert done["left"] == []
    assert record_of(done["folder"])["status"] == "interrupted"
    assert steps_of(done["folder"]) == [1]
    assert "stopped after step 1" in done["err"]


def test_S01_a_run_with_a_critic_goes_on_between_two_passes_to_the_bit(server, tmp_path):
    """Its rows have the values of before the step, which the critic has left behind by then."""
    found = {}
    for name, job in (
        ("whole", {}),
        ("cut", {"point": "between two passes", "signal": int(signal.SIGTERM)}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        own = ("task=environment", "task.dataset=rows.jsonl", "task.rewards=mine:letters")
        critic = (*own, "loss.advantage=gae", "critic.average_gae=false")
        (folder / "mine.py").write_text(LETTERS)
        rows = [{"prompt": f"What is {i}?"} for i in range(32)]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        done = server.run(folder, *critic, settings=SETTINGS, **job)
        if job:
            assert done["status"] == 128 + signal.SIGTERM, done["err"][-3000:]
            done = server.run(folder, *critic, settings=SETTINGS | {"resume": "auto"})
        assert done["status"] == 0, done["err"][-3000:]
        found[name] = [
            (done["folder"] / part / "model.safetensors").read_bytes()
            for part in ("model", "critic")
        ]
        lines = (done["folder"] / "metrics.jsonl").read_text().splitlines()
        found[name] += [json.loads(line)["critic/explained_variance"] for line in lines]
    assert found["cut"] == found["whole"]
    assert found["whole"][0] != found["whole"][1]


LETTERS = """
def letters(completions, **_):
    return [sum(x in "aeiou " for x in str(c)) / max(len(str(c)), 1) for c in completions]
"""
SENT_TWICE = """
import os, signal, sys, time
from torchrl_agents.stop_signals import ONE_S, StopSignals
with StopSignals() as stop, stop.held():
    for _ in range(2):  # as `timeout` does: to the process, and to its group
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(ONE_S / 10)
    print("goes on", stop.received.name, flush=True)
    time.sleep(ONE_S)
    os.kill(os.getpid(), signal.SIGINT)
    print("never", flush=True)
"""


def test_S01_a_signal_that_is_sent_twice_at_once_is_one_and_a_later_one_is_the_second():
    done = subprocess.run(
        [sys.executable, "-c", SENT_TWICE], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout == "goes on SIGINT\n", done.stderr
    assert done.returncode == 130


@pytest.mark.slow
def test_S01_a_signal_while_a_run_is_restored_leaves_its_checkpoint(stopped):
    folder, _ = stopped("recording", signal.SIGINT)
    again, go_on = stopped("restoring", signal.SIGTERM, settings={"resume": "auto"})
    assert again == folder
    assert go_on() == folder


@pytest.mark.slow
@pytest.mark.parametrize(("point", "number"), [(p, SIGNALS[i % 3]) for i, p in enumerate(STUCK)])
def test_S01_a_second_signal_ends_a_run_wherever_it_is(point, number, stopped):
    stopped(point, number, again=True)

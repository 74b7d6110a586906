"""The sandbox's load target: at least 10 runs a second, 95 % of them started within 400 ms.

    python benchmarks/sandbox.py [--runs 60] [--threads 4]

In turn, after a check that all print the same: a bare ``python -I -S`` process, which isolates
nothing (the limit), and, by each isolation that works, a run in the sandbox and in a session.
Prints runs a second on some threads, and the median and 95th percentile of a run from one thread; a
run prints one line, so that is its start.
"""

import argparse
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from torchrl_envs.sandbox import Sandbox, SandboxSession

CODE = "print(sum(range(100)))"


def bare(executable):
    command = [executable, "-I", "-S", "-c", CODE]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def timed(run):
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def rate(run, count, threads):
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: run(), range(count)))
    return count / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=4)
    args = parser.parse_args()
    sandboxes = {
        name: Sandbox(isolation=name)
        for name, reason in Sandbox.reasons_against().items()
        if reason is None
    }
    if not sandboxes:
        raise SystemExit("nothing isolates code here: python -m torchrl_envs.sandbox says why")
    first = next(iter(sandboxes.values()))
    sessions = {name: SandboxSession(sandbox) for name, sandbox in sandboxes.items()}
    runs = {"bare process": lambda: bare(first.interpreter.executable)}
    for name, sandbox in sandboxes.items():
        runs[name] = lambda sandbox=sandbox: sandbox.run(CODE).stdout
    for name, session in sessions.items():
        runs[f"{name} session"] = lambda session=session: session.run(CODE).stdout
    assert {run() for run in runs.values()} == {"4950\n"}
    times = {name: [] for name in runs}
    for _ in range(args.runs):
        for name, run in runs.items():
            times[name].append(timed(run))
    print(f"{'':18} {'median ms':>10} {'95 % ms':>8} {'x bare':>7} {'runs/s':>8}")
    limit = statistics.median(times["bare process"])
    for name, run in runs.items():
        threads = 1 if name.endswith("session") else args.threads
        median = statistics.median(times[name])
        p95 = statistics.quantiles(times[name], n=20)[-1]
        per_s = rate(run, args.runs, threads)
        print(f"{name:18} {median:10.2f} {p95:8.1f} {median / limit:7.2f} {per_s:8.1f}")
    for session in sessions.values():
        session.close()


if __name__ == "__main__":
    main()

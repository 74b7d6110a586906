"""Twenty small terminal tasks in Harbor's format: python examples/harbor/make_tasks.py FOLDER

Each is a folder that Harbor, too, can run: mend a function, write a script, find something in a
log. The tests run in a machine of their own, on inputs that the agent never sees, and can't be
talked into passing: what the agent left is run as a child whose output is compared, everything else
is killed before the reward is written, and the reward is written last.
"""

# ruff: noqa: E501

import json
import random
import sys
from pathlib import Path

CHECK = '''
"""Compare what the agent's work gives with what is right, and write the reward."""
import ctypes, json, os, pathlib, shutil, signal, subprocess, sys

RULES = json.loads(pathlib.Path("/tests/rules.json").read_text())
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no child looks into this process
CALL = """
import json, sys
sys.path.insert(0, "/app")
import importlib
function = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
print("\\\\n" + json.dumps(function(*json.loads(sys.stdin.read()))))
"""


def output(command, text=""):
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    try:
        done = subprocess.run(command, input=text, cwd="/app", env=environment, timeout=5,
                              capture_output=True, text=True, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def passes(case):
    if RULES["kind"] == "function":
        where = [sys.executable, "-B", "-c", CALL, RULES["module"], RULES["function"]]
        said = output(where, json.dumps(case["arguments"]))
        return said is not None and said.strip().rpartition("\\n")[2] == json.dumps(case["result"])
    if RULES["kind"] == "command":
        for name, text in case.get("files", {}).items():
            pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(name).write_text(text)
        said = output(RULES["command"] + case.get("arguments", []), case.get("input", ""))
        return said is not None and said.split() == case["output"].split()
    path = pathlib.Path(RULES["path"])
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 100_000:
        return False
    return path.read_text(errors="replace").split() == case["text"].split()


def others():
    """Every process but this one, its parents and the first."""
    kept, parent = {1}, os.getpid()
    while parent > 1:
        kept.add(parent)
        parent = int(pathlib.Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    return {int(n) for n in os.listdir("/proc") if n.isdigit()} - kept


solved = all([passes(case) for case in RULES["cases"]])
for _ in range(100):
    left = others()
    for number in left:
        try:
            os.kill(number, signal.SIGKILL)
        except OSError:
            pass
    if not left:
        break
logs = pathlib.Path("/logs/verifier")
for path in logs.iterdir():
    if path.name.startswith("reward"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
(logs / "reward.json").write_text(json.dumps({"reward": float(solved)}))
'''
CONFIG = """\
schema_version = "1.4"
artifacts = ["/app"]

[task]
name = "torchrl-agents/{name}"
description = "{about}"

[metadata]
kind = "{kind}"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0
environment_mode = "separate"

[environment]
memory_mb = 1024
storage_mb = 128
network_mode = "no-network"
"""
DOCKERFILE = """\
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3
WORKDIR /app
COPY app/ /app/
"""
TEST = "#!/bin/bash\nexec python3 -B /tests/check.py\n"


def function(name, about, instruction, module, wrong, right, target, cases):
    """A Python function with a mistake."""
    solution = f"cat > /app/{module}.py <<'END'\n{right.strip()}\nEND\n"
    rules = {"kind": "function", "module": module, "function": target}
    rules["cases"] = [{"arguments": list(a), "result": r} for a, r in cases]
    text = f"{instruction} The file is /app/{module}.py. Mend it; keep the function's name."
    return name, "mend", about, text, {f"{module}.py": wrong.strip() + "\n"}, solution, rules


def script(name, about, instruction, path, solution, cases, files=None):
    """A script that has to be written."""
    command = ["python3", "-B", path] if path.endswith(".py") else ["bash", path]
    rules = {"kind": "command", "command": command, "cases": cases}
    made = f"cat > {path} <<'END'\n{solution.strip()}\nEND\n"
    return name, "script", about, instruction, files or {}, made, rules


def answer(name, about, instruction, files, solution, text):
    """Something that has to be found."""
    rules = {"kind": "file", "path": "/app/answer.txt", "cases": [{"text": text}]}
    return (
        name,
        "find",
        about,
        f"{instruction} Write it to /app/answer.txt.",
        files,
        solution,
        rules,
    )


def access_log(rng, lines=400):
    """Requests of a web server: address, path, status, milliseconds."""
    rows = []
    for number in range(lines):
        address = f"10.0.{rng.randrange(4)}.{rng.randrange(1, 30)}"
        path = rng.choice(["/", "/login", "/items", "/items/7", "/cart", "/pay"])
        status = rng.choices([200, 304, 404, 500], [80, 8, 8, 4])[0]
        time = f"{number // 60 % 24:02}:{number % 60:02}:{rng.randrange(60):02}"
        rows.append((time, address, path, status, rng.randrange(2, 900)))
    return rows


def tasks():
    """All twenty."""
    rng = random.Random(7)
    made = [
        function(
            "mend-median",
            "The median of an even number of values",
            "The median of [1, 2, 3, 4] comes out as 3.",
            "stats",
            "def median(values):\n    values = sorted(values)\n    return values[len(values) // 2]",
            "def median(values):\n    values = sorted(values)\n    half = len(values) // 2\n    if len(values) % 2:\n        return values[half]\n    return (values[half - 1] + values[half]) / 2",
            "median",
            [
                (([3, 1, 2],), 2),
                (([1, 2, 3, 4],), 2.5),
                (([5, 5],), 5.0),
                (([9, -1, 4, 4, 0, 7],), 4.0),
            ],
        ),
        function(
            "mend-wrap",
            "Lines of a width",
            "Lines come out one character too long.",
            "wrap",
            "def wrap(text, width):\n    lines, line = [], ''\n    for word in text.split():\n        if line and len(line) + len(word) > width:\n            lines.append(line)\n            line = word\n        else:\n            line = f'{line} {word}'.strip()\n    return lines + [line] if line else lines",
            "def wrap(text, width):\n    lines, line = [], ''\n    for word in text.split():\n        if line and len(line) + 1 + len(word) > width:\n            lines.append(line)\n            line = word\n        else:\n            line = f'{line} {word}'.strip()\n    return lines + [line] if line else lines",
            "wrap",
            [
                (("aa bb cc", 4), ["aa", "bb", "cc"]),
                (("aa bb cc", 5), ["aa bb", "cc"]),
                (("", 3), []),
                (("one two three", 7), ["one two", "three"]),
            ],
        ),
        function(
            "mend-leap",
            "Leap years",
            "The year 1900 counts as a leap year, and was none.",
            "years",
            "def is_leap(year):\n    return year % 4 == 0",
            "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
            "is_leap",
            [
                ((1900,), False),
                ((2000,), True),
                ((2023,), False),
                ((2024,), True),
                ((2100,), False),
            ],
        ),
        function(
            "mend-merge",
            "Intervals that touch",
            "Intervals that touch, such as [1, 2] and [2, 3], are not merged, and one inside another one shortens it.",
            "intervals",
            "def merge(intervals):\n    found = []\n    for start, end in sorted(intervals):\n        if found and start < found[-1][1]:\n            found[-1][1] = end\n        else:\n            found.append([start, end])\n    return found",
            "def merge(intervals):\n    found = []\n    for start, end in sorted(intervals):\n        if found and start <= found[-1][1]:\n            found[-1][1] = max(found[-1][1], end)\n        else:\n            found.append([start, end])\n    return found",
            "merge",
            [
                (([[1, 2], [2, 3]],), [[1, 3]]),
                (([[1, 9], [2, 3]],), [[1, 9]]),
                (([[5, 6], [1, 2]],), [[1, 2], [5, 6]]),
                (([],), []),
            ],
        ),
        function(
            "mend-roman",
            "Roman numbers",
            "roman(4) gives IIII.",
            "roman",
            "def roman(number):\n    text = ''\n    for value, sign in ((1000, 'M'), (500, 'D'), (100, 'C'), (50, 'L'), (10, 'X'), (5, 'V'), (1, 'I')):\n        text += sign * (number // value)\n        number %= value\n    return text",
            "def roman(number):\n    text = ''\n    for value, sign in ((1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')):\n        text += sign * (number // value)\n        number %= value\n    return text",
            "roman",
            [((4,), "IV"), ((1994,), "MCMXCIV"), ((3,), "III"), ((40,), "XL"), ((449,), "CDXLIX")],
        ),
        function(
            "mend-runs",
            "Run lengths",
            "runs('') fails, and the last run of 'aab' is lost.",
            "runs",
            "def runs(text):\n    found, last, count = [], text[0], 0\n    for letter in text:\n        if letter == last:\n            count += 1\n        else:\n            found.append([last, count])\n            last, count = letter, 1\n    return found",
            "def runs(text):\n    found = []\n    for letter in text:\n        if found and found[-1][0] == letter:\n            found[-1][1] += 1\n        else:\n            found.append([letter, 1])\n    return found",
            "runs",
            [
                (("",), []),
                (("aab",), [["a", 2], ["b", 1]]),
                (("zzz",), [["z", 3]]),
                (("abba",), [["a", 1], ["b", 2], ["a", 1]]),
            ],
        ),
        function(
            "mend-paths",
            "Paths with two dots",
            "resolve('/a/../../b') gives '/../b'; there is nothing above /.",
            "paths",
            "def resolve(path):\n    parts = []\n    for part in path.split('/'):\n        if part == '..' and parts:\n            parts.pop()\n        elif part and part != '.':\n            parts.append(part)\n    return '/' + '/'.join(parts)",
            "def resolve(path):\n    parts = []\n    for part in path.split('/'):\n        if part == '..':\n            del parts[-1:]\n        elif part and part != '.':\n            parts.append(part)\n    return '/' + '/'.join(parts)",
            "resolve",
            [
                (("/a/../../b",), "/b"),
                (("/..",), "/"),
                (("/a/./b//c",), "/a/b/c"),
                (("/x/y/../z",), "/x/z"),
            ],
        ),
    ]
    made += [
        script(
            "script-top-words",
            "The most frequent words",
            "Write /app/top.py. It reads text from standard input and prints its three most frequent words in lower case, one a line, the most frequent first, equal ones in the order of the alphabet. Words are what is between white space.",
            "/app/top.py",
            "import sys\nfrom collections import Counter\ncounts = Counter(sys.stdin.read().lower().split())\nfor word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:3]:\n    print(word)",
            [
                {"input": "b a A c c c d", "output": "c a b"},
                {"input": "x", "output": "x"},
                {"input": "z y x w", "output": "w x y"},
            ],
        ),
        script(
            "script-sum-column",
            "A column of a table",
            "Write /app/total.sh. Called as `bash /app/total.sh FILE`, it prints the sum of the second column of a file with commas, without its first line. All numbers are whole.",
            "/app/total.sh",
            "tail -n +2 \"$1\" | awk -F, '{total += $2} END {print total + 0}'",
            [
                {
                    "files": {"/tmp/a.csv": "name,count\nx,4\ny,-9\nz,100\n"},
                    "arguments": ["/tmp/a.csv"],
                    "output": "95",
                },
                {
                    "files": {"/tmp/b.csv": "name,count\n"},
                    "arguments": ["/tmp/b.csv"],
                    "output": "0",
                },
            ],
        ),
        script(
            "script-largest-files",
            "The largest files",
            "Write /app/largest.sh. Called as `bash /app/largest.sh FOLDER`, it prints the names of the two largest files anywhere below the folder, without their paths, the largest first.",
            "/app/largest.sh",
            "find \"$1\" -type f -printf '%s %f\\n' | sort -k1,1nr | head -2 | cut -d' ' -f2-",
            [
                {
                    "files": {
                        "/tmp/d/one.txt": "x" * 10,
                        "/tmp/d/sub/two.txt": "x" * 30,
                        "/tmp/d/sub/three.txt": "x" * 20,
                    },
                    "arguments": ["/tmp/d"],
                    "output": "two.txt three.txt",
                },
                {
                    "files": {"/tmp/e/k.txt": "xx", "/tmp/e/a/b/j.txt": "x"},
                    "arguments": ["/tmp/e"],
                    "output": "k.txt j.txt",
                },
            ],
        ),
        script(
            "script-json-pick",
            "A value in JSON",
            "Write /app/pick.py. It reads JSON from standard input and takes a path such as `a.b.2` as its argument: names and, in lists, numbers from 0. It prints the value as JSON, or the word missing.",
            "/app/pick.py",
            "import json, sys\nvalue = json.load(sys.stdin)\ntry:\n    for part in sys.argv[1].split('.'):\n        value = value[int(part)] if isinstance(value, list) else value[part]\n    print(json.dumps(value))\nexcept (KeyError, IndexError, ValueError, TypeError):\n    print('missing')",
            [
                {"input": '{"a": {"b": [1, 2, 7]}}', "arguments": ["a.b.2"], "output": "7"},
                {"input": '{"a": 1}', "arguments": ["a.b"], "output": "missing"},
                {"input": '[{"x": "y"}]', "arguments": ["0.x"], "output": '"y"'},
                {"input": "[]", "arguments": ["0"], "output": "missing"},
            ],
        ),
        script(
            "script-brackets",
            "Brackets that match",
            "Write /app/brackets.py. It reads lines from standard input and prints ok or bad for each: whether its brackets ()[]{} match. Other characters do not count.",
            "/app/brackets.py",
            "import sys\nPAIRS = {')': '(', ']': '[', '}': '{'}\nfor line in sys.stdin:\n    stack, good = [], True\n    for c in line:\n        if c in '([{':\n            stack.append(c)\n        elif c in PAIRS:\n            good = good and bool(stack) and stack.pop() == PAIRS[c]\n    print('ok' if good and not stack else 'bad')",
            [{"input": "()\n([)]\n{[()]}\n(\n)\nf(x[1])\n", "output": "ok bad ok bad bad ok"}],
        ),
        script(
            "script-durations",
            "Durations in seconds",
            "Write /app/seconds.sh. It reads durations such as 1h2m3s, 5m or 40s from standard input, one a line, and prints each in seconds.",
            "/app/seconds.sh",
            "while read -r line; do\n  t=0\n  while [[ $line =~ ^([0-9]+)([hms])(.*)$ ]]; do\n    case ${BASH_REMATCH[2]} in h) f=3600;; m) f=60;; s) f=1;; esac\n    t=$((t + 10#${BASH_REMATCH[1]} * f)); line=${BASH_REMATCH[3]}\n  done\n  echo $t\ndone",
            [{"input": "1h2m3s\n5m\n40s\n2h\n10h09m\n", "output": "3723 300 40 7200 36540"}],
        ),
    ]
    rows = access_log(rng)
    log = "".join(f"{t} {a} GET {p} {s} {ms}ms\n" for t, a, p, s, ms in rows)
    counts = {a: sum(r[1] == a for r in rows) for a in {r[1] for r in rows}}
    busiest = min(counts, key=lambda a: (-counts[a], a))
    failed = sum(r[3] == 500 for r in rows)
    slowest = max(rows, key=lambda r: r[4])[4]
    shutdown = rng.randrange(300, 900)
    words = [
        "started",
        "read the settings",
        "opened a connection",
        "closed a connection",
        "wrote a file",
    ]
    events = [f"{n:04} INFO {rng.choice(words)}" for n in range(1200)]
    events[shutdown] = f"{shutdown:04} ERROR disk quota exceeded on /srv/data{shutdown % 7}"
    noise = [n for n in rng.sample(range(1200), 40) if n != shutdown]
    for n in noise:
        events[n] = f"{n:04} WARN retried after an error"
    people = [
        (f"user{n:03}", rng.choice(["red", "blue", "green"]), rng.randrange(18, 80))
        for n in range(200)
    ]
    team = [p for p in people if p[1] == "blue"]
    oldest = min(team, key=lambda p: (-p[2], p[0]))[0]
    left, right = rng.sample(range(10_000), 500), []
    gone = left[rng.randrange(500)]
    right = [n for n in left if n != gone]
    rng.shuffle(right)
    config = {f"part{k}": {f"key{n}": rng.randrange(1000) for n in range(20)} for k in range(15)}
    deep = sum(v for part in config.values() for v in part.values() if v % 2 == 0)
    code = f"{rng.randrange(10**8):08}"
    files = {
        f"notes/{k}/{n}.txt": f"nothing here, {rng.randrange(10**6)}\n"
        for k in "abcd"
        for n in range(12)
    }
    files[f"notes/c/{rng.randrange(12)}.txt"] = f"the code is {code}\n"
    made += [
        answer("find-busiest", "The address with most requests", "/app/access.log has a request a line: time, address, method, path, status, duration. Which address made the most requests? Of several, the first in the order of text.", {"access.log": log},
               "cut -d' ' -f2 /app/access.log | sort | uniq -c | sort -k1,1nr -k2,2 | head -1 | awk '{print $2}' > /app/answer.txt\n", busiest),
        answer("find-failures", "Requests that failed and the slowest one", "/app/access.log has a request a line: time, address, method, path, status, duration. How many have the status 500, and how many milliseconds did the slowest request take? Two numbers on one line.", {"access.log": log},
               "n=$(awk '$5 == 500' /app/access.log | wc -l); s=$(awk '{print $6}' /app/access.log | tr -d ms | sort -n | tail -1); echo $n $s > /app/answer.txt\n", f"{failed} {slowest}"),
        answer("find-error-line", "The one error", "/app/service.log has one line of the level ERROR. Which path does it name?", {"service.log": "\n".join(events) + "\n"},
               "grep ' ERROR ' /app/service.log | awk '{print $NF}' > /app/answer.txt\n", f"/srv/data{shutdown % 7}"),
        answer("find-oldest", "The oldest of a team", "/app/people.csv has a name, a team and an age a line. Who is the oldest of the team blue? Of several, the first in the order of text.", {"people.csv": "".join(f"{a},{b},{c}\n" for a, b, c in people)},
               "grep ,blue, /app/people.csv | sort -t, -k3,3nr -k1,1 | head -1 | cut -d, -f1 > /app/answer.txt\n", oldest),
        answer("find-missing", "The number that is missing", "/app/old.txt and /app/new.txt hold numbers, one a line, in any order. One of the old ones is missing in the new file. Which?", {"old.txt": "".join(f"{n}\n" for n in left), "new.txt": "".join(f"{n}\n" for n in right)},
               "comm -23 <(sort /app/old.txt) <(sort /app/new.txt) > /app/answer.txt\n", str(gone)),
        answer("find-even-sum", "A sum in JSON", "/app/settings.json has tables of numbers. What is the sum of all even numbers in it?", {"settings.json": json.dumps(config, indent=1)},
               "python3 -c 'import json; print(sum(v for t in json.load(open(\"/app/settings.json\")).values() for v in t.values() if v % 2 == 0))' > /app/answer.txt\n", str(deep)),
        answer("find-code", "A code in one of many files", "One of the files below /app/notes holds a code of eight digits. Which code?", files,
               "grep -rhoE '[0-9]{8}' /app/notes > /app/answer.txt\n", code),
    ]  # fmt: skip
    return made


def main(folder):
    """Write them."""
    for name, kind, about, instruction, files, solution, rules in tasks():
        top = folder / name
        texts = {
            "instruction.md": instruction + "\n",
            "task.toml": CONFIG.format(name=name, about=about, kind=kind),
            "environment/Dockerfile": DOCKERFILE,
            "environment/app/README": "The folder of the task.\n",
            "solution/solve.sh": "#!/bin/bash\n" + solution,
            "tests/test.sh": TEST,
            "tests/check.py": CHECK.lstrip(),
            "tests/rules.json": json.dumps(rules, indent=1) + "\n",
        }
        texts |= {f"environment/app/{path}": text for path, text in files.items()}
        for path, text in texts.items():
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            (top / path).write_text(text)
            if path.endswith(".sh"):
                (top / path).chmod(0o755)
    print(f"{len(tasks())} tasks in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

"""Two tasks of two questions each, answered in words: python two_questions.py FOLDER

For runs that show how an agent's requests become rows, with a model that is too small to do
anything in a terminal. Each question is asked in a conversation of its own. The tests read what
Codex wrote into its log, and pay for words that answer.
"""

import sys
from pathlib import Path

TASKS = {
    "france": {
        "What is the capital of France?": ["Paris", "capital", "France"],
        "What is 7 + 5?": ["12", "twelve", "sum"],
    },
    "italy": {
        "What is the capital of Italy?": ["Rome", "capital", "Italy"],
        "What is 3 + 4?": ["7", "seven", "sum"],
    },
}
TEST = """\
#!/bin/bash
text=$(cat $(ls -t $(find /root/.codex/sessions -name '*.jsonl') | head -1) | grep '"assistant"')
number=0
for word in {words}; do
  case "$text" in *$word*) number=$((number + 1));; esac
done
echo "$number.$((${{#text}} % 10))" > /logs/verifier/reward.txt
"""


def main(folder: Path) -> None:
    """Write the tasks."""
    for task, questions in TASKS.items():
        names = [f"question-{number}" for number in range(1, 1 + len(questions))]
        steps = "".join(f'[[steps]]\nname = "{name}"\n' for name in names)
        files = {
            "task.toml": f"[verifier]\ntimeout_sec = 20.0\n{steps}",
            "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /app\n",
        }
        for name, (question, words) in zip(names, questions.items(), strict=True):
            files[f"steps/{name}/instruction.md"] = f"Answer in one sentence. {question}\n"
            files[f"steps/{name}/tests/test.sh"] = TEST.format(words=" ".join(words))
        for path, text in files.items():
            (folder / task / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / task / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

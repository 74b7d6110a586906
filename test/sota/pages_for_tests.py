"""A page whose files and commands are tried: what tests of such pages share."""

import json
import random
import re
import shlex

import torch

from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

FILES = re.compile(r"`(\w+\.py)`:\n\n(?:<!-- .*? -->\n)?```python\n(.*?)```", re.DOTALL)
LINES = re.compile(r"`(\w+\.jsonl)`[^`]*such as\n\n```json\n(.*?)```", re.DOTALL)
NUM_ROWS = 8
MOST_LINES = 30
FAST = (
    *(
        "debug=tiny",
        "warm_start.num_steps=0",
        "train.num_steps=8",
        "collector.num_prompts=2",
        "collector.group_size=8",
    ),
    *("evaluate.num_prompts=2", "logger=none", "optim.learning_rate=3e-3", "train.num_epochs=4"),
    *("optim.num_warmup_steps=0", "policy.gradient_checkpointing=false"),
)


def write_files(page, folder):
    """Write the files of a page as its reader does; gives their names."""
    text = page.read_text("utf-8")
    for name, code in (files := dict(FILES.findall(text))).items():
        assert len([line for line in code.splitlines() if line]) <= MOST_LINES
        (folder / name).write_text(code)
    for name, line in LINES.findall(text):
        rows = [json.loads(line) for _ in range(NUM_ROWS)]
        for number, row in enumerate(rows[1:], start=2):  # of equal prompts the first is kept
            row["prompt"] = f"{number}. {row['prompt']}"
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return set(files)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(tool, **arguments):
    """What a policy says to call a tool."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def command_of(page, setting):
    """The words of the one command of a page that has a setting, without its policy."""
    lines = page.read_text("utf-8").replace("\\\n", " ").splitlines()
    (found,) = (line for line in lines if line.startswith("torchrl-agents ") and setting in line)
    return [word for word in shlex.split(found)[2:] if word != "policy=smollm2"]


def save_actor(folder, actions):
    """Make a model that says one of some actions, each as often, and save it."""
    rng = random.Random(0)
    torch.manual_seed(0)
    whole = [text.removeprefix("<tool_call>").removesuffix("</tool_call>") for text in actions]
    tokenizer = train_tokenizer([], vocab_size=263, phrases=whole)
    model = tiny_qwen3(len(tokenizer), max_position_embeddings=16384)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        said = [rng.choice(actions) for _ in range(16)]
        before = "".join(rng.choice("aeinst. \n") for _ in range(rng.randrange(1, 60)))
        start = f"<|im_start|>user\n{before}<|im_end|>\n<|im_start|>assistant\n"
        rows = [tokenizer.encode(f"{start}{text}<|im_end|>") for text in said]
        longest = max(map(len, rows))
        ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])
        labels = ids.clone()
        labels[:, : len(tokenizer.encode(start))] = -100
        for row, label in zip(rows, labels, strict=True):
            label[len(row) :] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for part in (tokenizer, model):
        part.save_pretrained(folder)

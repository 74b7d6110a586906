"""What test_agents_over_ranks.py looks at: agents with weights of their own, on ranks."""

import gzip
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

from agent_cases import KINDS, NUM_STEPS, TRAINED
from recipe_runs import left_in, run_on_ranks, save_base

PROGRAM = '''
import json
from urllib.request import Request, urlopen


def talk(endpoint, *, prompt):
    """The critic is asked of some drafts alone, and the judge, who is not trained, of all."""

    def ask(name):
        messages = [{"role": "user", "content": f"{prompt} {name}"}]
        request = Request(
            f"{endpoint.base_url}/chat/completions",
            data=json.dumps({"model": endpoint.model, "messages": messages}).encode(),
            headers={
                "Authorization": f"Bearer {endpoint.api_key}",
                "Content-Type": "application/json",
                "x-agent-name": name,
            },
        )
        with urlopen(request) as response:
            reply = json.load(response)
        return float(sum(map(ord, reply["choices"][0]["message"]["content"] or "")))

    draft = ask("writer")
    judged = ask("judge")
    said = -ask("critic") if draft % 4 == 1 else None
    return {"writer": draft, "critic": said, "judge": judged}
'''
ARGUMENTS = (
    *("task=agent", "task.program=own_talk:talk", "task.agents=[writer,critic,judge]"),
    *("agents.trained=[writer,critic]", "agents.frozen=[judge]", "task.dataset=rows.jsonl"),
    *("loss.credit=agent", "loss.entropy_coeff=0.1", "loss.kl_to_ref_coeff=0.1"),
    *("evaluate.solved_by=reward", "evaluate.num_shown=0", "evaluate.num_prompts=2"),
    *("logger=none", "policy.model=base", "policy.show_tool_schemas=false"),
    *("policy.max_new_tokens=6", "collector.num_prompts=3", "collector.group_size=2", "seed=5"),
    *("train.num_epochs=2", "train.micro_batch_tokens=120", "checkpoint.every=1"),
    *("optim.schedule=constant", "optim.num_warmup_steps=0", "collector.verify_every=1"),
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.beta1=0.5", "optim.learning_rate=0.2"),
)
OUTPUTS = Path("outputs/grpo/agent")


def run(size, *arguments):
    run_on_ranks(size, "grpo", *ARGUMENTS, *arguments)


def rows_of_steps(folder):
    """How many rows of each agent were trained in each step."""
    counts = []
    for path in sorted((folder / "rollouts").glob("step-*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file][1:]
        counts.append(Counter(row["agent"] for row in rows if row["is_trained"]))
    return counts


def left_by(name):
    folder = OUTPUTS / f"{name}-001"
    models = {agent: f"agents/{agent}/model" for agent in TRAINED}
    left = left_in(folder, *models.values())
    weights = {agent: left.pop(path) for agent, path in models.items()}
    files = {
        agent: (folder / path / "model.safetensors").read_bytes() for agent, path in models.items()
    }
    return left | {"weights": weights, "files": files, "rows": rows_of_steps(folder)}


def cut(name):
    """As if it had been stopped: it goes on from its last checkpoint."""
    path = OUTPUTS / f"{name}-001/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "interrupted"}))


def with_agents(kind):
    """One process; two ranks; two that are cut, and go on, or three, and one process goes on."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("own_talk.py").write_text(PROGRAM)
        rows = [{"prompt": f"Number {i}?"} for i in range(64)]
        Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        save_base()
        own, steps = KINDS[kind], f"train.num_steps={NUM_STEPS}"
        run(1, *own, steps, "name=one")
        run(2, *own, steps, "name=two")
        found = {name: left_by(name) for name in ("one", "two")}
        if kind == "models":
            run(3, *own, "train.num_steps=1", "name=three")
            cut("three")
            run(1, f"resume={OUTPUTS}/three-001", steps)
            found["three"] = left_by("three")
        else:
            run(2, *own, "train.num_steps=1", "name=cut")
            cut("cut")
            run(2, f"resume={OUTPUTS}/cut-001", steps)
            # Another run on ranks begins with what one has left; at such a rate no bit changes.
            more = (f"policy.model={OUTPUTS}/one-001", "optim.learning_rate=1e-30")
            run(2, *own, *more, "train.num_steps=1", "collector=streaming", "name=again")
            found |= {name: left_by(name) for name in ("cut", "again")}
        os.chdir("/")
    return found


def scenarios():
    for kind in KINDS:
        yield f"recipe with agents: {kind}", lambda kind=kind: with_agents(kind)

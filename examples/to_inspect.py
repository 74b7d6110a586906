# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents", "inspect-ai"]
# ///
"""The rollouts of a run or an evaluation as a log of Inspect, which its viewer opens.

python examples/to_inspect.py outputs/evaluate/calculator/seed0 logs [STEP]
inspect view --log-dir logs
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from inspect_ai import log as logs
from inspect_ai import model as models
from inspect_ai.scorer import Score

from collectors.record.run_record import RunRecord

ROLES = {
    "system": models.ChatMessageSystem,
    "assistant": models.ChatMessageAssistant,
    "tool": models.ChatMessageTool,
}


def message(ours):
    text = ours["content"] if isinstance(ours["content"], str) else json.dumps(ours["content"])
    return ROLES.get(ours["role"], models.ChatMessageUser)(content=text)


def sample(ours, name, model):
    """One rollout; Inspect calls further ones of a prompt its epochs."""
    messages = [message(each) for each in ours.messages]
    asked = next((i for i, each in enumerate(messages) if each.role == "assistant"), len(messages))
    values = {"reward": ours.reward, **ours.rewards}
    drawn, read = ours.sampled_tokens, ours.total_tokens - ours.sampled_tokens
    usage = models.ModelUsage(
        input_tokens=read, output_tokens=drawn, total_tokens=ours.total_tokens
    )
    told = ("stop_reason", "num_turns", "num_tool_errors", "policy_version", "advantage", "logged")
    said = [each.text for each in messages if each.role == "assistant"]
    why = ours.reward_errors
    return logs.EvalSample(
        id=f"{name}{ours.group_id}" + (f".{ours.segment}" if ours.segment else ""),
        epoch=ours.index + 1,
        input=messages[:asked],
        target=str((ours.row or {}).get("answer", "")),
        messages=messages,
        scores={
            name: Score(value=x, answer=said[-1] if said else None)
            for name, x in values.items()
            if x is not None
        },
        metadata={name: getattr(ours, name) for name in told},
        model_usage={model: usage},
        error=logs.EvalError(message=why, traceback=why, traceback_ansi=why) if why else None,
    )


if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
folder = Path(sys.argv[1])
record = RunRecord(folder)
steps = [step for step in record.steps if sys.argv[3:] in ([], [str(step.step)])]
if not steps:
    sys.exit(f"to_inspect.py: {folder} has no such step.")
run = folder / "run.json"
command = json.loads(run.read_text("utf-8"))["command"] if run.exists() else ["record"]
settings = dict(word.split("=", 1) for word in command[1:] if "=" in word)
model = settings.get("policy.model", settings.get("policy", "embedded"))
samples = []
for step in steps:
    name = f"{step.step}:" if len(steps) > 1 else ""
    samples += [sample(each, name, model) for each in record.samples(step.step)]
rewards = [each.scores["reward"].value for each in samples if "reward" in (each.scores or {})]
metrics = {"mean": logs.EvalMetric(name="mean", value=sum(rewards) / max(len(rewards), 1))}
first, last = (datetime.fromtimestamp(steps[i].time, UTC).isoformat() for i in (0, -1))
spec = logs.EvalSpec(
    created=first,
    task=settings.get("task", Path(command[0]).stem),
    dataset=logs.EvalDataset(
        name=settings.get("task.dataset"), samples=len({each.id for each in samples})
    ),
    model=model,
    config=logs.EvalConfig(epochs=max(each.epoch for each in samples)),
    task_args=settings,
)
results = logs.EvalResults(total_samples=len(samples), completed_samples=len(rewards))
results.scores = [logs.EvalScore(name="reward", scorer="reward", metrics=metrics)]
path = Path(sys.argv[2], f"{folder.resolve().name}.eval")
log = logs.EvalLog(status="success", eval=spec, results=results, samples=samples)
log.stats = logs.EvalStats(started_at=first, completed_at=last)
logs.write_eval_log(log, str(path))
print(path)

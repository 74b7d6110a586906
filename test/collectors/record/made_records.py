"""Records made by hand, for what shows them."""

from collectors.record import GroupSummary, RolloutSample, SampleTokens, StepSummary, TokenSpan
from collectors.record.files import write_lines
from collectors.record.samples import FORMAT, RecordedToolCall


def sample(step=1, group=0, index=0, **changed):
    """A question, a call of a tool, its result, an answer: seven tokens, four of them sampled."""
    own = {
        "step": step,
        "group_id": f"0/{group}",
        "index": index,
        "reward": float(index % 2),
        "rewards": {"length": float(index % 2)},
        "advantage": 1.0 if index % 2 else -1.0,
        "stop_reason": "answered",
        "is_truncated": False,
        "num_turns": 2,
        "policy_version": step,
        "prompt_tokens": 2,
        "sampled_tokens": 4,
        "total_tokens": 7,
        "tool_calls": [RecordedToolCall("add", 1, 0.25, False)],
        "messages": [
            {"role": "user", "content": f"question {group}"},
            {"role": "assistant", "content": "call"},
            {"role": "tool", "content": "4", "name": "add"},
            {"role": "assistant", "content": f"answer {index}"},
        ],
        "row": {"prompt": f"question {group}"},
        "tokens": SampleTokens(
            ids=[1, 2, 3, 4, 5, 6, 7],
            texts=["<u>", f"question {group}", "call", "\n", "4", "answer", f" {index}"],
            spans=[
                TokenSpan("template", "", None, 1),
                TokenSpan("user", "user", 0, 1),
                TokenSpan("model", "assistant", 1, 2),
                TokenSpan("tool", "tool", 2, 1),
                TokenSpan("model", "assistant", 3, 2),
            ],
            log_probs=[None, None, -0.5, -0.1, None, -1.0, -2.0],
            versions=[None, None, step, step, None, step, step + 1],
            trainer_log_probs=[None, None, -0.25, -0.1, None, -1.5, -2.0],
        ),
    } | changed
    return RolloutSample(**own)


def write_record(folder, steps, *, events=()):
    """Write the samples of steps, given as lists of groups, each a list of samples."""
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True)
    for number, groups in enumerate(steps, 1):
        summary = StepSummary(
            step=number,
            time=float(number),
            metrics={"reward": 0.25 * number, "sampled_tokens": 4.0},
            groups=[
                GroupSummary(
                    group_id=own[0].group_id,
                    prompt_id=own[0].group_id.partition("/")[2],
                    prompt=own[0].messages[0]["content"],
                    rewards=[each.reward for each in own],
                    num_trained=len(own),
                    is_recorded=True,
                )
                for own in groups
            ],
            events=[event for event in events if event["step"] + 1 == number],
            num_samples=sum(map(len, groups)),
        )
        for group in summary.groups:
            if events:
                group.ordinal = int(group.group_id.partition("/")[2])
        lines = [{"format": FORMAT, **vars(summary)}]
        lines += [vars(each) for own in groups for each in own]
        write_lines(rollouts / f"step-{number:06}.jsonl.gz", lines, vars)
    return folder


def event(name, ordinal, step=0, *, attempt=0, reason="", at=0.0):
    """Something that the ledger told."""
    return {
        **{"name": name, "ordinal": ordinal, "group_id": f"0/{ordinal}", "attempt": attempt},
        **{"dispatch": 0, "version": 0, "step": step, "reason": reason, "time": at},
    }

"""History of each prompt of a run, by the ledger and the steps."""

from dataclasses import dataclass, field
from typing import Any

from .run_record import RunRecord
from .samples import GroupSummary


@dataclass
class PromptHistory:
    """The history of one prompt."""

    name: str
    """Its ordinal, or the id of its group where there is no ledger."""
    prompt: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    groups: list[tuple[int, GroupSummary]] = field(default_factory=list)
    """With the steps that had them."""

    @property
    def is_trained(self) -> bool:
        """Whether anything of it was."""
        return any(group.num_trained for _, group in self.groups)

    @property
    def where(self) -> str:
        """Its place, in words."""
        if self.events:
            last = self.events[-1]
            if last["name"] in ("taken", "trained"):
                used = [group for step, group in self.groups if step == last["step"] + 1]
                name = "used, but not trained" if used and not self.is_trained else last["name"]
                return f"{name} at step {last['step'] + 1}"
            return f"dropped: {last['reason']}" if last["name"] == "dropped" else last["name"]
        step, group = self.groups[-1]
        return f"{'trained' if group.num_trained else 'not trained'} at step {step}"


def prompt_histories(run: RunRecord) -> dict[str, PromptHistory]:
    """All prompts of a run by name, in the order in which they came."""
    found: dict[str, PromptHistory] = {}
    for event in run.events():
        name = str(event["ordinal"])
        found.setdefault(name, PromptHistory(name)).events.append(event)
    for step in run.steps:
        for group in step.groups:
            name = group.group_id if group.ordinal is None else str(group.ordinal)
            history = found.setdefault(name, PromptHistory(name))
            history.prompt = group.prompt
            history.groups.append((step.step, group))
    return found


def find_prompts(run: RunRecord, wanted: str) -> list[PromptHistory]:
    """The prompts of a name, a number (``17`` is ``0/17``, or the ordinal of a ledger), or a word.

    Args:
        run: the record.
        wanted: what to look for.

    Raises:
        KeyError: there is none.
    """
    histories = prompt_histories(run)
    exact = [h for name, h in histories.items() if name == wanted or name.endswith(f"/{wanted}")]
    found = exact or [h for h in histories.values() if wanted.lower() in h.prompt.lower()]
    if not found:
        raise KeyError(f"none of {len(histories)} prompts is {wanted!r}, or has it in its text")
    return found

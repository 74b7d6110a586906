"""The record of a run in the terminal: tables of steps and groups, samples side by side, a sample.

What a rollout says is printed as text: no markup is read in it, what is invisible is spelled out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchrl_data.display.text import visible
from torchrl_data.stop_reason import end_text

from .prompt_history import PromptHistory
from .samples import GroupSummary, RolloutSample, StepSummary

WRITER_STYLES: Final = {
    "template": "bright_black",
    "model": "green",
    "tool": "yellow",
    "user": "blue",
    "context": "magenta",
}
"""Colour of a token, by who wrote it."""
COLOURS: Final = ("writer", "ratio", "advantage", "entropy", "surprise", "version")
"""What tokens can be coloured by."""
LEFT_COLUMNS: Final = ("rewards", "group", "prompt", "trained", "stop reason")
NUM_SQUARES: Final = 12
"""Rewards of a group in a line of a table, so that there is room for its prompt."""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_BINS: Final = 8
_LEAST_SPAN: Final = 0.1
_VERSION_STYLES: Final = ("cyan", "magenta", "yellow", "green", "blue", "red")


def number_text(value: float | None, digits: int = 3) -> str:
    """A number as short as it can be; a dash for none."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


class RecordTable(NamedTuple):
    """A table, before it is drawn."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Text]]
    keys: Sequence[int]
    """Of each row: what opens it."""


def run_rows(steps: Sequence[StepSummary], title: str) -> RecordTable:
    """The steps of a run."""
    columns = ("step", "reward", "rewards", "groups", "trained", "tokens", "tool errors", "cut")
    rows = []
    for step in steps:
        rewards = rewards_of_groups(step.groups)
        cells = (
            str(step.step),
            number_text(fmean(rewards) if rewards else None),
            _distribution(rewards),
            str(len(step.groups)),
            str(sum(group.num_trained > 0 for group in step.groups)),
            number_text(step.metrics.get("sampled_tokens"), 1),
            number_text(step.metrics.get("tool_errors")),
            number_text(step.metrics.get("truncated_fraction")),
        )
        rows.append([Text(cell) for cell in cells])
    return RecordTable(title, columns, rows, [step.step for step in steps])


def sparkline(values: Sequence[float]) -> str:
    """Numbers as a line of blocks."""
    low, high = axis_bounds(values)
    span, top = high - low, len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / span * top)] for value in values)


def axis_bounds(values: Iterable[float]) -> tuple[float, float]:
    """Give the ends of an axis for some values.

    Args:
        values: finite numbers, of any order.

    Returns:
        The least and the largest value, moved apart to at least a tenth of the largest magnitude: a
        curve from 1.98 to 2.00 is drawn as flat as it is.
    """
    known = list(values)
    low, high = min(known, default=0.0), max(known, default=0.0)
    lacking = (_LEAST_SPAN * max(abs(low), abs(high)) or 1.0) - (high - low)
    return (low - lacking / 2, high + lacking / 2) if lacking > 0 else (low, high)


def rewards_of_groups(groups: Iterable[GroupSummary]) -> list[float]:
    """Rewards of all rollouts of groups that have one."""
    return [reward for group in groups for reward in group.rewards if reward is not None]


def _distribution(rewards: Sequence[float]) -> str:
    """A histogram of rewards, from the least to the most."""
    if not rewards:
        return ""
    low, high = axis_bounds(rewards)
    counts = [0] * _BINS
    for reward in rewards:
        part = (reward - low) / (high - low)
        counts[min(_BINS - 1, int(part * _BINS))] += 1
    most = max(counts)
    return "".join(_BLOCKS[-(-count * (len(_BLOCKS) - 1) // most)] for count in counts)


def step_rows(
    step: StepSummary, samples: Sequence[RolloutSample], keep: Callable[[RolloutSample], bool]
) -> RecordTable:
    """The groups of a step; a filter dims the samples that it leaves out."""
    rows = []
    for place, group in enumerate(step.groups):
        own = [sample for sample in samples if sample.group_id == group.group_id]
        known = [reward for reward in group.rewards if reward is not None]
        kept = {sample.index for sample in own if keep(sample)}
        name = group.group_id if group.ordinal is None else group.ordinal
        squares = Text(overflow="fold")
        for index, reward in enumerate(group.rewards):
            if own and index not in kept:
                mark, style = "·", "dim"
            elif reward is None:
                mark, style = "–", "bright_black"
            elif max(known) == min(known):
                mark, style = "■", "yellow"
            elif reward == max(known):
                mark, style = "■", "green"
            else:
                mark, style = "□", "red"
            squares.append(mark, style=style)
        rows.append(
            [
                Text(f"{place} ").append(str(name), style="bright_black"),
                squares,
                Text(number_text(fmean(known) if known else None)),
                _yes_no(group.num_trained > 0),
                Text(str(group.attempt + 1)),
                Text(visible(group.prompt) or "(no text)", overflow="ellipsis", no_wrap=True),
            ]
        )
    columns = ("group", "rewards", "mean", "trained", "attempt", "prompt")
    return RecordTable(f"step {step.step}", columns, rows, range(len(rows)))


def group_table(
    samples: Sequence[RolloutSample], keep: Callable[[RolloutSample], bool]
) -> RecordTable:
    """The samples of a group that a filter keeps."""
    rows, keys = [], []
    for place, sample in enumerate(samples):
        if not keep(sample):
            continue
        keys.append(place)
        cells = (
            visible(f"{sample.index} {sample.place}".strip()),
            number_text(sample.reward),
            number_text(sample.advantage),
            str(sample.num_turns),
            str(sample.sampled_tokens),
            str(sample.num_tool_errors),
            visible(sample.stop_reason),
        )
        rows.append([*map(Text, cells), _yes_no(sample.was_trained)])
    columns = ("sample", "reward", "advantage", "turns", "tokens", "tool errors", "stop reason")
    return RecordTable("", (*columns, "trained"), rows, keys)


def _yes_no(is_so: bool) -> Text:
    return Text("yes", style="green") if is_so else Text("no", style="bright_black")


def group_columns(samples: Sequence[RolloutSample], colour: str) -> RenderableType:
    """The samples of a group side by side, without the prompt that they share."""
    if not samples:
        return Text("The samples of this group were not recorded.", style="bright_black")
    scale = scale_of(colour, samples)
    prompt = _tokens(samples[0], "writer", 1.0, 0, samples[0].prompt_tokens)
    panels = []
    for sample in samples:
        said = _tokens(sample, colour, scale, sample.prompt_tokens)
        name = f"{sample.index} {sample.place}".strip()
        title = visible(f"sample {name}: {number_text(sample.reward)}")
        failed = ", not scored: error" if sample.reward is None and sample.reward_errors else ""
        below = Text(visible(f"{sample.stop_reason}{failed}"))
        panels.append(Panel(said, title=Text(title), subtitle=below, width=46))
    return Group(Panel(prompt, title="prompt"), Columns(panels), legend(colour, scale))


def sample_view(sample: RolloutSample, colour: str) -> RenderableType:
    """A sample by token, and what is known of it."""
    scale = scale_of(colour, [sample])
    text = _tokens(sample, colour, scale)
    facts = Table.grid(padding=(0, 2))
    values: list[tuple[str, Any]] = [
        ("reward", number_text(sample.reward)),
        *((name, number_text(value)) for name, value in sample.rewards.items()),
        ("advantage", number_text(sample.advantage) if sample.was_trained else "not trained"),
        ("stop reason", end_text(sample.stop_reason, sample.stop_limit)),
        ("last turn", sample.finish_reason),
        ("turns", sample.num_turns),
        ("tokens", f"{sample.sampled_tokens} sampled of {sample.total_tokens}"),
        ("version", sample.policy_version),
        *([("place", sample.place)] if sample.place else []),
    ]
    for call in sample.tool_calls:
        took = "not run" if call.seconds is None else f"{1e3 * call.seconds:.3g} ms"
        values.append((f"turn {call.turn}", f"{call.tool}{' (error)' * call.is_error}, {took}"))
    if sample.reward_errors:
        values.append(("errors", sample.reward_errors))
    for name, value in values:
        facts.add_row(Text(visible(str(name)), style="bright_black"), Text(visible(str(value))))
    title = f"step {sample.step}, group {sample.group_id}, sample {sample.index}"
    return Group(Panel(text, title=Text(title)), legend(colour, scale), facts)


def prompt_view(prompt: PromptHistory) -> RenderableType:
    """Return what became of a prompt."""
    lines = [Text(f"prompt {prompt.name}: {visible(prompt.prompt)}", style="bold")]
    lines.append(Text(visible(prompt.where), style="green" if prompt.is_trained else "yellow"))
    for event in prompt.events:
        detail = f", {event['reason']}" if event["reason"] else ""
        step = f", step {event['step'] + 1}" if event["name"] in ("taken", "trained") else ""
        line = f"  attempt {event['attempt'] + 1}: {event['name']}{step}{detail}"
        lines.append(Text(visible(line)))
    for step, group in prompt.groups:
        rewards = " ".join(number_text(reward) for reward in group.rewards)
        lines.append(Text(f"  step {step}: rewards {rewards}, {group.num_trained} rows trained"))
    return Group(*lines)


def value_of(sample: RolloutSample, colour: str, at: int) -> float | None:
    """Return what a token is coloured by; ``None`` where it is not known."""
    tokens = sample.tokens
    log_prob = tokens.log_probs[at]
    if log_prob is None:
        return None
    if colour == "surprise":
        return -log_prob
    if colour == "ratio":
        trainer = None if tokens.trainer_log_probs is None else tokens.trainer_log_probs[at]
        return None if trainer is None else trainer - log_prob
    if colour == "advantage":
        return tokens.advantages[at] if tokens.advantages else sample.advantage
    column = tokens.entropy if colour == "entropy" else tokens.versions
    return column[at] if column else None


def scale_of(colour: str, samples: Sequence[RolloutSample]) -> float:
    """The largest value, but for one percent that would flatten the rest."""
    values = sorted(
        abs(value)
        for sample in samples
        for at in range(len(sample.tokens.ids))
        if colour != "writer" and (value := value_of(sample, colour, at)) is not None
    )
    return (values[math.ceil(0.99 * len(values)) - 1] or values[-1]) if values else 0.0


def _tokens(
    sample: RolloutSample, colour: str, scale: float, start: int = 0, stop: int | None = None
) -> Text:
    """The tokens of a sample in their colours, those from a place to another one."""
    text = Text()
    writers = [span.writer for span in sample.tokens.spans for _ in range(span.length)]
    for place, writer in list(enumerate(writers))[start:stop]:
        style = WRITER_STYLES.get(writer, "")
        if colour != "writer":
            style = _style(colour, value_of(sample, colour, place), scale)
        text.append(visible(sample.tokens.texts[place]), style=style)
    return text


def _style(colour: str, value: float | None, scale: float) -> str:
    if value is None:
        return "bright_black"
    if colour == "version":
        return _VERSION_STYLES[int(value) % len(_VERSION_STYLES)]
    part = min(1.0, abs(value) / scale) if scale else 0.0
    strong = round(40 + 170 * part)
    if part < 0.05:
        return ""
    red, green = (strong, 40) if value < 0 or colour in ("entropy", "surprise") else (40, strong)
    return f"on rgb({red},{green},40)"


def legend(colour: str, scale: float) -> Text:
    """Return what the colours mean."""
    if colour == "writer":
        text = Text()
        for name, style in WRITER_STYLES.items():
            text.append(f" {name} ", style=f"{style} reverse").append(" ")
        return text
    if colour == "version":
        return Text("colour: policy version", style="bright_black")
    if not scale:
        return Text(f"colour: {colour}, which is not recorded or 0", style="bright_black")
    low = "0" if colour in ("entropy", "surprise") else f"{-scale:.2g} (red)"
    return Text(f"colour: {colour}, from {low} to {scale:.2g}", style="bright_black")

"""What is recorded of a rollout, and how it is read back."""

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

# Files of a record: compressed JSON lines, whole or not there, and read as far as they go.

_LEVEL: Final = 5
_CHUNK: Final = 1 << 16


def write_lines(path: Path, values: Iterable[Any], default: Callable[[Any], Any]) -> None:
    """Write values, one a line, into a new file that takes the old one's place when it is whole.

    Args:
        path: of the file.
        values: what JSON can write, or ``default`` makes it.
        default: for whatever JSON can't write.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            # No name and time in it, so that equal lines make equal files.
            with gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as file:
                for value in values:
                    file.write(json_line(value, default))
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def json_line(value: Any, default: Callable[[Any], Any]) -> bytes:
    """One line of strict JSON: ``null`` for NaN and infinity, and no half characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=default)
    except ValueError:
        text = json.dumps(finite(value, default), ensure_ascii=False, default=str)
    return (text + "\n").encode("utf-8", errors="replace")


def finite(value: Any, default: Callable[[Any], Any]) -> Any:
    """The same with ``None`` for each number that JSON can't write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(key): finite(each, default) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, default) for each in value]
    return finite(default(value), default)


def read_lines(path: Path, damage: list[str]) -> Iterator[Any]:
    """The values of a file, as far as it can be read.

    Args:
        path: of the file.
        damage: told what could not be read, and why.
    """
    for number, line in enumerate(_lines(path, damage), 1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            damage.append(f"{path.name}: line {number} is torn or no JSON ({error})")


def _lines(path: Path, damage: list[str]) -> Iterator[bytes]:
    """Lines of a compressed file; the last one may be torn."""
    decoder = zlib.decompressobj(wbits=31)  # of gzip
    kept = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            try:
                kept += decoder.decompress(chunk)
            except zlib.error as error:
                damage.append(
                    f"{path.name}: damaged after byte {file.tell() - len(chunk)}: {error}"
                )
                break
            *lines, kept = kept.split(b"\n")
            yield from lines
        else:
            if not decoder.eof:
                damage.append(f"{path.name}: cut off after {file.tell()} bytes")
    if kept:
        yield kept


# What is recorded, as plain values: a step, its groups, a sample, its tokens.
#
# Nothing here needs torch, so that a viewer starts at once. Shape legend: T tokens of a sample.

FORMAT: Final = 1
"""Of the files; one with a higher number is refused."""
WRITERS: Final = ("template", "model", "tool", "user", "context")
"""Who may have written a token: the chat template; the policy; a tool; anybody else who gave a
message (its role says who); and ``context`` where the message can't be told."""


class TokenSpan(NamedTuple):
    """Neighbouring tokens of one writer."""

    writer: str
    """One of ``template``, ``model``, ``tool``, ``user`` and ``context``."""
    role: str
    """Of the message that the tokens spell; empty where there is none."""
    message: int | None
    """Its number in the conversation."""
    length: int
    """Tokens."""


class RecordedToolCall(NamedTuple):
    """What the policy asked of a tool."""

    tool: str
    """Its name, as the policy called it; empty for a call that could not be read."""
    turn: int
    """Of the policy, from 1."""
    seconds: float | None
    """``None`` where nothing was run."""
    is_error: bool


class _Recorded:
    """What is written as its fields, and read back."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Of its fields as JSON, ``vars`` of it; what is not known is left out."""
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        known = {name: values[name] for name in names if name in values}
        for name, read in _NESTED.items():
            if name in known:
                known[name] = read(known[name])
        return cls(**known)


@dataclass(kw_only=True)
class SampleTokens(_Recorded):
    """The tokens of a sample; columns are of the length T, ``None`` where there is no value."""

    ids: list[int]
    texts: list[str]
    """What each spells, with invisible characters spelled out; tokens that only together make a
    character have it at the first of them."""
    spans: list[TokenSpan]
    """Who wrote them; the lengths add up to T."""
    log_probs: list[float | None]
    """Of the engine that sampled, in nats."""
    versions: list[int | None]
    """The policy version that sampled each."""
    trainer_log_probs: list[float | None] | None = None
    """Of the trained model as it was before the step's first update, in nats; ``None`` where the
    sample was not trained, or the loss was not watched."""
    entropy: list[float | None] | None = None
    """In nats; of the engine if it wrote it, else of the trainer if it was asked for it."""
    advantages: list[float | None] | None = None
    """Where they differ from token to token."""


@dataclass(kw_only=True)
class RolloutSample(_Recorded):
    """One row of a step: an episode, or a segment of one."""

    step: int
    group_id: str
    """``epoch/row`` of the data, or the number of the group."""
    index: int
    """In its group, from 0."""
    segment: int = 0
    num_segments: int = 1
    reward: float | None
    """Of the episode; ``None`` where it could not be scored."""
    rewards: dict[str, float | None]
    """By source; ``None`` where one does not apply."""
    reward_errors: str = ""
    advantage: float | None = None
    """``None`` where it was not trained; the mean of the sampled tokens' where they differ."""
    stop_reason: str
    """See :class:`~torchrl_data.StopReason`."""
    stop_limit: int = -1
    """The limit that cut it, in tokens or turns; -1 where none did."""
    finish_reason: str = ""
    """Of its last turn, see :class:`~torchrl_data.FinishReason`."""
    is_truncated: bool
    num_turns: int
    policy_version: int | str
    """That the episode began with."""
    prompt_tokens: int
    """Before the first that was sampled."""
    sampled_tokens: int
    total_tokens: int
    tool_calls: list[RecordedToolCall] = field(default_factory=list)
    num_tool_errors: int = 0
    messages: list[dict[str, Any]]
    row: dict[str, Any] | None
    """Of the data set."""
    logged: dict[str, Any] = field(default_factory=dict)
    """What reward functions logged of it."""
    tokens: SampleTokens


@dataclass(kw_only=True)
class GroupSummary(_Recorded):
    """A group of a step, whether its samples are recorded or not."""

    group_id: str
    prompt_id: str
    """A digest of the prompt's tokens and images: equal wherever the prompt is the same."""
    prompt: str
    """The beginning of its last message."""
    rewards: list[float | None]
    """Of its episodes, in order."""
    num_trained: int
    """Rows that have an advantage and were trained on."""
    is_recorded: bool
    ordinal: int | None = None
    """Number of the prompt in the order of the data, where there is a ledger."""
    attempt: int = 0


@dataclass(kw_only=True)
class StepSummary(_Recorded):
    """A step without its samples: the first line of its file."""

    step: int
    time: float
    """When it was recorded, in seconds since 1970."""
    metrics: dict[str, float | None]
    groups: list[GroupSummary]
    events: list[dict[str, Any]]
    """Of the ledger since the step before: ``name``, ``ordinal``, ``group_id``, ``attempt``,
    ``dispatch``, ``version``, ``step``, ``reason``, ``time``."""
    num_samples: int


_NESTED: Final[dict[str, Callable[[Any], Any]]] = {
    "spans": lambda spans: [TokenSpan(*span) for span in spans],
    "tokens": SampleTokens.from_json,
    "tool_calls": lambda calls: [RecordedToolCall(*call) for call in calls],
    "groups": lambda groups: [GroupSummary.from_json(group) for group in groups],
}
"""How those fields are read that are no plain values."""


# Reads the record of a run, also while it goes on.

FOLDER: Final = "rollouts"
"""In the folder of a run."""
END: Final = "end.jsonl.gz"
"""With what was told behind the last step."""
_STEP = re.compile(r"step-(\d+)\.jsonl\.gz")


def step_file(folder: Path, step: int) -> Path:
    """Of a step."""
    return folder / f"step-{step:06}.jsonl.gz"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a file, in order."""
    found = (_STEP.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


class RunRecord:
    """The record that a :class:`RolloutRecorder` wrote.

    What can't be read is left out and named in :attr:`damage`; the rest is there::

        record = RunRecord("outputs/grpo/calculator/seed0")
        for summary in record.steps:
            for sample in record.samples(summary.step):
                ...

    Args:
        path: folder of the run, or the one with its ``step-*.jsonl.gz``.

    Raises:
        FileNotFoundError: there is no record.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.folder = path / FOLDER if (path / FOLDER).is_dir() else path
        """With the files."""
        self.run_folder = self.folder.parent if self.folder.name == FOLDER else self.folder
        self.damage: list[str] = []
        """What could not be read so far, and why."""
        if not self.folder.is_dir() or not steps_in(self.folder):
            raise FileNotFoundError(
                f"{path} holds no record of a run: no {FOLDER}/step-*.jsonl.gz. A RolloutRecorder "
                "writes them, after each step."
            )

    @cached_property
    def steps(self) -> list[StepSummary]:
        """All steps without their samples, in order, as they were when this was first asked."""
        found = []
        for step in steps_in(self.folder):
            path = step_file(self.folder, step)
            for line in read_lines(path, self.damage):
                _check_format(line, path)
                found.append(StepSummary.from_json(line))
                break
            else:
                self.damage.append(f"{path.name}: nothing of it can be read")
        return found

    def samples(self, step: int) -> Iterator[RolloutSample]:
        """The samples of a step that were recorded, group by group.

        Args:
            step: its number.

        Raises:
            KeyError: there is no such step.
            ValueError: it was written in a newer format.
        """
        path = step_file(self.folder, step)
        if not path.exists():
            raise KeyError(f"step {step}; there are {steps_in(self.folder)}")
        lines = read_lines(path, self.damage)
        header = next(lines, {})
        _check_format(header, path)
        known = {group.group_id for group in StepSummary.from_json(header).groups}
        for line in lines:
            sample = RolloutSample.from_json(line)
            if sample.group_id in known:
                yield sample
            else:
                self.damage.append(f"{path.name}: it has no group {sample.group_id} of a sample")

    def events(self) -> list[dict[str, Any]]:
        """All that the ledger told, in order, see :attr:`StepSummary.events`."""
        events = [event for summary in self.steps for event in summary.events]
        path = self.folder / END
        for line in read_lines(path, self.damage) if path.exists() else ():
            _check_format(line, path)
            events += line["events"]
        return events

    @property
    def name(self) -> str:
        """Of the run: the last two parts of its folder."""
        return "/".join(self.run_folder.resolve().parts[-2:])

    def about(self) -> dict[str, Any]:
        """What the script left beside the record in ``run.json``, if it did."""
        path = self.run_folder / "run.json"
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:  # it is being written
            self.damage.append(f"{path.name}: {error}")
            return {}
        return about if isinstance(about, dict) else {}

    def tests(self) -> list[tuple[int, dict[str, float]]]:
        """What the script left in ``evaluations.jsonl``, if it did: tests on held-out prompts.

        Returns:
            Of each the step after which it was made and its scores, ``reward`` among them, in the
            order of the steps.
        """
        path, found = self.run_folder / "evaluations.jsonl", []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                told = json.loads(line)
                scores = {
                    name: float(value)
                    for name, value in told.items()
                    if type(value) in (int, float) and name not in ("step", "version", "lag_steps")
                }
                found.append((int(told["step"]), scores))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self.damage.append(f"{path.name}: line {number} is torn or no test ({error})")
        return sorted(found, key=lambda test: test[0])


def _check_format(line: Any, path: Path) -> None:
    found = line.get("format") if isinstance(line, dict) else None
    if not isinstance(found, int) or found > FORMAT:
        raise ValueError(
            f"{path} is in format {found!r}; this version reads formats up to {FORMAT}. Update the "
            "package that reads it."
        )


# Where is prompt 17: what became of each prompt of a run, by the ledger and the steps.


@dataclass
class PromptHistory:
    """What became of one prompt."""

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
        """Where it is, in words."""
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
    """The prompts of a name, a number in the data (``17`` is ``0/17``), or with a word.

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

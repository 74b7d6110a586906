"""The record of runs as a folder with one page, which opens without a server or a network.

``index.html`` holds style and script, and nothing of any rollout; that lies in ``data/``, in
parts that are loaded when they are looked at. Such a part is a script that calls one function
with values, because a page from a file can't fetch. Nothing in a rollout can run: values are
escaped JSON, the page makes text nodes of them and no markup, and its content security policy
lets only scripts with its own random word in, and no string become markup.
"""

import json
import secrets
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from torchrl_data.display.text import message_text, message_title, visible
from torchrl_data.stop_reason import end_text

from .files import finite
from .run_record import RunRecord
from .samples import RolloutSample, StepSummary

_SCRIPTS: Final = ("core", "charts", "tokens", "views", "prompts", "main")
_COLUMNS: Final = (
    *("group", "number", "segment", "reward", "advantage", "trained", "stop", "errors"),
    *("calls", "turns", "tokens", "truncated", "chunk"),
)
"""What is known of each sample without loading it."""
_CHUNK_BYTES: Final = 1 << 20
_EVENT: Final = (
    *("name", "ordinal", "group_id", "attempt", "dispatch", "version", "step", "reason", "time"),
)


def write_html(runs: Sequence[RunRecord], out: str | Path) -> Path:
    """Write a page that shows runs: their curves, steps, groups side by side, samples, prompts.

    Args:
        runs: one, or several to compare.
        out: a folder; it is made.

    Returns:
        The page.

    Raises:
        ValueError: there is no run.
        FileExistsError: the folder holds something else than such a page.
    """
    if not runs:
        raise ValueError("write_html needs at least one run, got none.")
    out = Path(out)
    page = out / "index.html"
    if out.exists() and any(out.iterdir()) and not (page.exists() and (out / "data").is_dir()):
        raise FileExistsError(f"{out} holds something else. Give an empty folder, or a new one.")
    for number, run in enumerate(runs):
        folder = out / "data" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.js"):
            old.unlink()
        _write_run(run, number, folder)
    page.write_text(_page(len(runs)), encoding="utf-8")
    return page


def _page(num_runs: int) -> str:
    here = files("collectors.record") / "page"
    nonce = secrets.token_urlsafe(18)  # who wrote a rollout could not know it
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types record-data"
    )
    script = "".join((here / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    known = f'"use strict";\nconst NONCE = "{nonce}", NUM_RUNS = {list(range(num_runs))};\n'
    values = {
        "POLICY": policy,
        "NONCE": nonce,
        "STYLE": (here / "style.css").read_text(encoding="utf-8"),
        "SCRIPT": known + script,
    }
    text = (here / "index.html").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _write_run(run: RunRecord, number: int, folder: Path) -> None:
    metrics = list(dict.fromkeys(name for step in run.steps for name in step.metrics))
    stops: dict[str, int] = {}
    steps = []
    for summary in run.steps:
        columns = _write_samples(run, number, summary, folder, stops)
        steps.append(
            {
                "step": summary.step,
                "values": [summary.metrics.get(name) for name in metrics],
                "groups": [{**vars(g), "prompt": visible(g.prompt)} for g in summary.groups],
                "samples": columns,
            }
        )
    rewards = [
        reward
        for summary in run.steps
        for group in summary.groups
        for reward in group.rewards
        if reward is not None
    ]
    curves: dict[str, list[tuple[int, float]]] = {}  # the tests on held-out prompts, of each score
    for step, scores in run.tests():
        for name, value in scores.items():
            curves.setdefault(f"held_out/{name}", []).append((step, value))
    about = run.about()
    values = {
        "name": run.name,
        "about": {name: about.get(name) for name in ("status", "started", "ended", "commit")},
        "metrics": metrics,
        "tests": list(curves.items()),
        "columns": _COLUMNS,
        "steps": steps,
        "stops": [visible(stop) for stop in stops],
        "events": [{name: event.get(name) for name in _EVENT} for event in run.events()],
        "rewardRange": [min(rewards, default=0.0), max(rewards, default=1.0)],
        "damage": run.damage,
    }
    text = f"RECORD.run({number},{_literal(values)});\n"
    (folder / "run.js").write_text(text, encoding="utf-8")


def _write_samples(
    run: RunRecord, number: int, summary: StepSummary, folder: Path, stops: dict[str, int]
) -> list[list[Any]]:
    """Write the samples of a step in parts; what is known of each without them."""
    places = {group.group_id: place for place, group in enumerate(summary.groups)}
    columns: list[list[Any]] = []
    chunk: list[str] = []
    size = num_chunks = 0

    def end_chunk() -> None:
        nonlocal size, num_chunks
        if chunk:
            name = f"step-{summary.step:06}-{num_chunks}.js"
            call = f'RECORD.chunk("{number}/{summary.step}/{num_chunks}",'
            (folder / name).write_text(f"{call}[{','.join(chunk)}]);\n", encoding="utf-8")
            num_chunks += 1
            chunk.clear()
            size = 0

    for index, sample in enumerate(run.samples(summary.step)):
        text = _literal([index, _sample(sample)])
        if size and size + len(text) > _CHUNK_BYTES:
            end_chunk()
        chunk.append(text)
        size += len(text)
        stop = stops.setdefault(sample.stop_reason, len(stops))
        columns.append(
            [
                *(places[sample.group_id], sample.index, sample.segment, sample.reward),
                *(sample.advantage, sample.was_trained, stop),
                *(sample.num_tool_errors, len(sample.tool_calls)),
                *(sample.num_turns, sample.sampled_tokens, sample.is_truncated, num_chunks),
            ]
        )
    end_chunk()
    return columns


def _sample(sample: RolloutSample) -> dict[str, Any]:
    """Return what the page shows; values of unknown shape are text already."""
    tokens = sample.tokens
    row = json.dumps(sample.row, indent=2, ensure_ascii=False, default=str)
    return {
        "rewards": [[visible(name), value] for name, value in sample.rewards.items()],
        "reward_errors": visible(sample.reward_errors),
        "end": visible(end_text(sample.stop_reason, sample.stop_limit)),
        "policy_version": sample.policy_version,
        "place": visible(sample.place),
        "agent": visible(sample.agent),
        "prompt_tokens": sample.prompt_tokens,
        "tool_calls": [[visible(tool), *rest] for tool, *rest in sample.tool_calls],
        "messages": [
            [visible(str(message.get("role"))), message_title(message), message_text(message)]
            for message in sample.messages
        ],
        "row": None if sample.row is None else visible(row),
        "logged": [[visible(name), visible(str(value))] for name, value in sample.logged.items()],
        "tokens": {
            "ids": tokens.ids,
            "texts": [visible(text) for text in tokens.texts],
            "spans": tokens.spans,
            "log_probs": tokens.log_probs,
            "trainer": tokens.trainer_log_probs,
            "entropy": tokens.entropy,
            "advantages": tokens.advantages,
            "versions": tokens.versions,
            "gaps": tokens.gaps,
            "causes": tokens.causes,
        },
    }


def _literal(value: Any) -> str:
    """JSON that may stand in a script, whoever reads it how: ASCII, without ``<``, ``>``, ``&``."""
    text = json.dumps(finite(value, str), separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text

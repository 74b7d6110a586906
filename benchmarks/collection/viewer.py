"""The page of a run with 10,000 rollouts: how soon it is there, and what recording costs.

    python benchmarks/collection/viewer.py [--rollouts 10240] [--tokens 200]
    python benchmarks/collection/viewer.py --screenshots docs/img RUN [RUN]

A run of 40 steps is made up, groups of 16 with a turn, a tool and another turn each, and written as
a recorder does. Told are the size of the record and of the page; the CPU seconds to write either;
and, in a real Chromium that opens the files, the milliseconds from the address to the curves and
tables of the run, to all samples, to the ledger's page, and from a key to a group side by side
whose data were not loaded yet: the median of ``--repeats`` fresh pages each.

With ``--screenshots`` pictures of real runs are taken for the documentation instead.
"""

import argparse
import asyncio
import io
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from collectors.record import (
    GroupSummary,
    RecordedToolCall,
    RolloutSample,
    RunRecord,
    SampleTokens,
    StepSummary,
    TokenSpan,
    write_html,
)
from collectors.record.app import RecordApp
from collectors.record.browser import Browser as Places
from collectors.record.files import write_lines
from collectors.record.prompt_history import prompt_histories
from collectors.record.samples import FORMAT
from torchrl_envs.browser.chromium import find_chromium

STEPS, GROUP = 40, 16
TEXT = "the of a to is and in that it for answer number so we have 1 2 3 + = ( ) , ."
WORDS = (*TEXT.split(), "\n")
METRICS = ("reward", "entropy", "sampled_tokens", "kl_approx", "ESS", "grad_norm", "time/step_s")


def made_sample(step: int, group: int, index: int, num_tokens: int, rng: random.Random) -> Any:
    prompt, tool, scaffold = 40, 12, 8
    first = max(1, (num_tokens - prompt - tool - scaffold) // 2)
    second = max(1, num_tokens - prompt - tool - scaffold - first)
    spans = [
        TokenSpan("template", "", None, 4),
        TokenSpan("user", "user", 0, prompt - 4),
        TokenSpan("model", "assistant", 1, first),
        TokenSpan("template", "", None, scaffold),
        TokenSpan("tool", "tool", 2, tool),
        TokenSpan("model", "assistant", 3, second),
    ]
    sampled = [span.writer == "model" for span in spans for _ in range(span.length)]
    log_probs = [round(-rng.expovariate(2), 5) if own else None for own in sampled]
    trainer = [None if x is None else round(x + rng.gauss(0, 0.02), 5) for x in log_probs]
    texts = [" " + rng.choice(WORDS) for _ in sampled]
    reward = float(rng.random() < step / STEPS)
    return RolloutSample(
        step=step,
        group_id=f"0/{group}",
        index=index,
        reward=reward,
        rewards={"correct": reward},
        advantage=2 * reward - 1,
        stop_reason=rng.choice(("answered", "answered", "response_length")),
        is_truncated=False,
        num_turns=2,
        policy_version=step,
        prompt_tokens=prompt,
        sampled_tokens=sum(sampled),
        total_tokens=len(sampled),
        tool_calls=[RecordedToolCall("search", 1, rng.random(), rng.random() < 0.1)],
        messages=[
            {"role": role, "content": "".join(texts[:30])}
            for role in ("user", "assistant", "tool", "assistant")
        ],
        row={"question": "".join(texts[4:prompt]), "answer": "42"},
        tokens=SampleTokens(
            ids=[rng.randrange(50_000) for _ in sampled],
            texts=texts,
            spans=spans,
            log_probs=log_probs,
            trainer_log_probs=trainer,
            versions=[step if own else None for own in sampled],
        ),
    )


def write_made_run(folder: Path, num_rollouts: int, num_tokens: int) -> float:
    """Write it; CPU seconds of the writing alone."""
    rng = random.Random(0)
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True)
    seconds = 0.0
    per_step = max(1, num_rollouts // STEPS // GROUP)
    for step in range(1, STEPS + 1):
        numbers = range((step - 1) * per_step, step * per_step)
        samples = [
            [made_sample(step, n, i, num_tokens, rng) for i in range(GROUP)] for n in numbers
        ]
        groups = [
            GroupSummary(
                group_id=own[0].group_id,
                prompt_id=str(int(own[0].group_id[2:]) % 100),
                prompt=own[0].row["question"][:160],
                rewards=[each.reward for each in own],
                num_trained=GROUP,
                is_recorded=True,
                ordinal=number,
            )
            for number, own in zip(numbers, samples, strict=True)
        ]
        events = [
            {
                **{"name": name, "ordinal": n, "group_id": f"0/{n}", "attempt": 0, "dispatch": 0},
                **{"version": step, "step": step - 1, "reason": "", "time": float(step)},
            }
            for name in ("offered", "started", "finished", "taken", "trained")
            for n in numbers
        ]
        summary = StepSummary(
            step=step,
            time=float(step),
            metrics={name: rng.random() for name in METRICS},
            groups=groups,
            events=events,
            num_samples=len(groups) * GROUP,
        )
        lines = [{"format": FORMAT, **vars(summary)}]
        lines += [vars(each) for own in samples for each in own]
        begin = time.process_time()
        write_lines(rollouts / f"step-{step:06}.jsonl.gz", lines, vars)
        seconds += time.process_time() - begin
    return seconds


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def opened(browser: Browser, address: str, ready: str) -> float:
    """Milliseconds from the address to what is waited for, painted."""
    page = browser.new_page()
    begin = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(ready)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    seconds = time.perf_counter() - begin
    page.close()
    return 1e3 * seconds


def group_by_key(browser: Browser, address: str) -> float:
    """Milliseconds from a key on a step to its first group side by side."""
    page = browser.new_page()
    page.goto(f"{address}#/step/7")
    page.wait_for_selector("tbody tr")
    begin = time.perf_counter()
    page.keyboard.press("Enter")
    page.wait_for_selector(".column .stream")
    seconds = time.perf_counter() - begin
    page.close()
    return 1e3 * seconds


def measure(browser: Browser, num_rollouts: int, num_tokens: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        run, out = Path(name) / "run", Path(name) / "html"
        seconds = write_made_run(run, num_rollouts, num_tokens)
        print(f"record  {megabytes(run):8.1f} MB  written in {seconds:6.2f} CPU s")
        begin = time.process_time()
        page = write_html([RunRecord(run)], out).as_uri()
        seconds = time.process_time() - begin
        print(f"page    {megabytes(out):8.1f} MB  written in {seconds:6.2f} CPU s")
        for title, call in (
            ("the run", lambda: opened(browser, page, ".cards .card svg path")),
            ("all samples", lambda: opened(browser, f"{page}#/samples", "tbody tr")),
            ("where is prompt ...", lambda: opened(browser, f"{page}#/prompts", "tbody tr")),
            ("a group, by a key", lambda: group_by_key(browser, page)),
        ):
            times = [call() for _ in range(repeats)]
            print(f"{title:<26}{statistics.median(times):8.0f} ms  (least {min(times):.0f})")


SHOTS = (
    ("view-run", "", "light", ""),
    ("view-group", "group/{step}/{group}", "dark", "state.colour = 'surprise'; show()"),
    ("view-prompt", "prompt/{prompt}", "light", ""),
)


def best_group(run: RunRecord) -> tuple[int, int]:
    """A trained group of the first steps in which the samples differ most."""

    def num_different(step: StepSummary, group: GroupSummary) -> int:
        own = [s for s in run.samples(step.step) if s.group_id == group.group_id]
        return len({tuple(sample.tokens.ids) for sample in own})

    return max(
        ((step.step, place) for step in run.steps[:8] for place in range(len(step.groups))),
        key=lambda at: num_different(run.steps[at[0] - 1], run.steps[at[0] - 1].groups[at[1]]),
    )


def best_prompt(run: RunRecord) -> str:
    """Of those that were trained, the first one of which the ledger told most."""
    histories = [history for history in prompt_histories(run).values() if history.is_trained]
    return max(histories, key=lambda history: len(history.events)).name


async def terminal_picture(run: RunRecord) -> str:
    """A group in the terminal, as SVG."""
    app = RecordApp(Places(run), colour="surprise")
    async with app.run_test(size=(130, 38)) as pilot:
        app.go_to(best_group(run))
        await pilot.pause()
        return app.export_screenshot()


def save(picture: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(picture))
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


def screenshots(browser: Browser, runs: list[RunRecord], terminal: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    step, group = best_group(runs[0])
    known = {"step": step, "group": group, "prompt": best_prompt(runs[0])}
    with tempfile.TemporaryDirectory() as name:
        address = write_html(runs, Path(name) / "html").as_uri()
        for title, place, scheme, script in SHOTS:
            context = browser.new_context(
                viewport={"width": 1280, "height": 760},
                color_scheme=scheme,  # type: ignore[arg-type]
            )
            page: Page = context.new_page()
            page.goto(f"{address}#/{place.format(**known)}")
            page.wait_for_selector("main h1")
            page.wait_for_timeout(500)
            if script:
                page.evaluate(script)
                page.wait_for_timeout(500)
            save(page.screenshot(), folder / f"{title}.png")
            context.close()
    page = browser.new_page()
    page.set_content(terminal)
    save(page.locator("svg").screenshot(), folder / "view-terminal.png")
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="*", help="for --screenshots")
    parser.add_argument("--rollouts", type=int, default=10_240)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--screenshots", type=Path, help="folder for the pictures")
    arguments = parser.parse_args()
    runs = [RunRecord(run) for run in arguments.runs]
    terminal = asyncio.run(terminal_picture(runs[0])) if arguments.screenshots else ""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), chromium_sandbox=os.geteuid() != 0
        )
        if arguments.screenshots:
            screenshots(browser, runs, terminal, arguments.screenshots)
        else:
            measure(browser, arguments.rollouts, arguments.tokens, arguments.repeats)
        browser.close()


if __name__ == "__main__":
    main()

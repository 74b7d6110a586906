"""Draws the figures of these pages: `python docs/concepts/figures.py` writes them anew.

Colours are variables that a page, or the reader's system, sets for light and dark.
"""

from html import escape
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
LIGHT = {
    "ink": "#1f2328", "soft": "#454f59", "line": "#8c959f", "box": "#f6f8fa",
    "template": "#d8dee4", "content": "#b6d7f5", "model": "#fbc98e", "good": "#b7e4c0",
}  # fmt: skip
DARK = {
    "ink": "#e6edf3", "soft": "#bcc5ce", "line": "#6e7681", "box": "#21262d",
    "template": "#3d444d", "content": "#1f4f7d", "model": "#7a4311", "good": "#1d5230",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--f-{name}:{value};" for name, value in colours.items())


STYLE = (
    f"svg.fig{{{_variables(LIGHT)}font:13px system-ui,sans-serif}}"
    f"@media(prefers-color-scheme:dark){{svg.fig{{{_variables(DARK)}}}}}"
    f"body[data-theme=light] svg.fig{{{_variables(LIGHT)}}}"
    f"body[data-theme=dark] svg.fig{{{_variables(DARK)}}}"
    "svg.fig text{fill:var(--f-ink)}svg.fig .soft{fill:var(--f-soft);font-size:12px}"
    "svg.fig .mono{font-family:ui-monospace,monospace;font-size:11.5px}"
    "svg.fig .head{font-weight:600;font-size:14px}"
    "svg.fig .arrow{stroke:var(--f-line);stroke-width:1.6;fill:none;marker-end:url(#tip)}"
    "svg.fig .rule{stroke:var(--f-line);stroke-width:1;fill:none}"
    "svg.fig .dash{stroke-dasharray:4 4}"
)


class Drawing:
    """Boxes, words and arrows."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self.parts: list[str] = []

    def box(self, x, y, w, h, text="", fill="box", *, css="", note="", title=""):
        lines = text.split("\n") if text else []
        hint = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="var(--f-{fill})" '
            f'stroke="var(--f-line)">{hint}</rect>'
        )
        total = len(lines) + bool(note)
        first = y + h / 2 - (total - 1) * 8 + 4.5
        for i, line in enumerate(lines):
            self.text(x + w / 2, first + 16 * i, line, css, anchor="middle")
        if note:
            self.text(x + w / 2, first + 16 * len(lines), note, "soft", anchor="middle")

    def text(self, x, y, words, css="", *, anchor="start"):
        kind = f' class="{css}"' if css else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'
        )

    def arrow(self, *points, css=""):
        path = " ".join(f"{'M' if i == 0 else 'L'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path class="arrow {css}" d="{path}"/>')

    def rule(self, *points, css=""):
        path = " ".join(f"{'M' if i == 0 else 'L'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path class="rule {css}" d="{path}"/>')

    def write(self, name: str) -> None:
        width, height = self.size
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="var(--f-line)"/></marker>'
            "</defs>"
        )
        (HERE / name).write_text(
            f'<svg class="fig" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}"><style>{STYLE}</style>{tip}\n' + "\n".join(self.parts) + "\n</svg>\n",
            encoding="utf-8",
        )


def tokens() -> None:
    """One record over three turns: who wrote each token, the mask, log-probs and versions."""
    turns = [
        ([("<|im_start|>user", "t"), ("What is 12 × 3?", "c"), ("<|im_end|>", "t"),
          ("<|im_start|>assistant", "t")],
         [("<tool_call>", -0.1), ("mul(12,3)", -0.6), ("</tool_call>", 0.0),
          ("<|im_end|>", 0.0)], 7),
        ([("<|im_start|>tool", "t"), ("36", "c"), ("<|im_end|>", "t"),
          ("<|im_start|>assistant", "t")],
         [("It", -0.3), ("is", -0.1), ("36.", -0.2), ("<|im_end|>", -0.1)], 7),
        ([("<|im_start|>user", "t"), ("Are you sure?", "c"), ("<|im_end|>", "t"),
          ("<|im_start|>assistant", "t")],
         [("Yes,", -0.9), ("36.", -0.1), ("<|im_end|>", -0.2)], 8),
    ]  # fmt: skip
    d = Drawing(970, 560)
    for i, (kind, words) in enumerate(
        [("template", "the chat template wrote it"), ("content", "somebody else said it"),
         ("model", "the policy sampled it")]
    ):  # fmt: skip
        d.box(20 + 230 * i, 14, 18, 18, fill=kind)
        d.text(46 + 230 * i, 28, words)
    d.text(712, 28, "(a box is one token or a few)", "soft")
    names = {"t": "template", "c": "content"}
    for i, (before, said, version) in enumerate(turns):
        y = 62 + 166 * i
        x = 20.0
        d.text(x, y + 14, f"turn {i + 1}", "head")
        y += 26
        start = x
        for word, kind in before:
            w = max(34, 7.2 * len(word) + 10)
            d.box(x, y, w, 34, word, names[kind], css="mono")
            d.text(x + w / 2, y + 54, "0", "soft", anchor="middle")
            x += w + 2
        d.rule((start, y + 100), (start, y + 106), (x - 6, y + 106), (x - 6, y + 100))
        told = "prompt" if i == 0 else f"new tokens: with all above, the prompt of turn {i + 1}"
        d.text((start + x) / 2, y + 121, told, "soft", anchor="middle")
        x += 6
        start = x
        for word, log_prob in said:
            w = max(34, 7.2 * len(word) + 10)
            d.box(x, y, w, 34, word, "model", css="mono")
            for j, value in enumerate(["1", f"{log_prob:.1f}", str(version)]):
                d.text(x + w / 2, y + 54 + 18 * j, value, "soft", anchor="middle")
            x += w + 2
        d.rule((start, y + 100), (start, y + 106), (x - 2, y + 106), (x - 2, y + 100))
        d.text((start + x) / 2, y + 121, "response", "soft", anchor="middle")
        for j, name in enumerate(["mask", "log-prob", "version"]):
            d.text(x + 8, y + 54 + 18 * j, name, "soft")
    d.write("tokens.svg")


def episode() -> None:
    """The events of an episode, in order."""
    d = Drawing(860, 330)
    steps = [
        ("draw", "content", 20, 130, "a row, a group,", "a seed"),
        ("begin", "content", 170, 130, "instances reset,", "the query is put"),
        ("before_turn", "content", 330, 108, "budgets,", "context"),
        ("policy", "model", 450, 100, "samples", "the response"),
        ("after_turn", "content", 566, 100, "calls run,", "answers come"),
        ("finish", "good", 704, 136, "rewards, over", "the whole group"),
    ]
    d.rule((322, 40), (322, 200), (678, 200), (678, 40), (322, 40), css="dash")
    d.text(332, 32, "each turn", "head")
    for i, (name, fill, x, w, *notes) in enumerate(steps):
        d.box(x, 80, w, 74, "", fill=fill)
        d.text(x + w / 2, 104, name, "head", anchor="middle")
        for j, note in enumerate(notes):
            d.text(x + w / 2, 124 + 16 * j, note, "soft", anchor="middle")
        if i + 1 < len(steps):
            d.arrow((x + w, 117), (steps[i + 1][2], 117))
    d.arrow((616, 154), (616, 186), (384, 186), (384, 156))
    d.text(500, 180, "not done: another turn", "soft", anchor="middle")
    d.arrow((772, 154), (772, 232))
    d.box(612, 236, 228, 60, "everything it holds is closed", note="also on errors, also at exit")
    d.arrow((612, 266), (562, 266))
    d.box(310, 236, 250, 60, "one row for the buffer", note="tokens, masks, rewards, stop_reason")
    d.text(20, 250, "A tool that fails is answered: the policy", "soft")
    d.text(20, 268, "reads why. Where a reset or a reward fails,", "soft")
    d.text(20, 286, "the row says why; its advantage is 0.", "soft")
    d.write("episode.svg")


def sync() -> None:
    """LLMCollector: one process, one after the other."""
    d = Drawing(760, 300)
    d.box(20, 30, 150, 60, "your loop", note="loss, optimizer", fill="good")
    d.box(300, 30, 160, 60, "LLMCollector", note="a batch of episodes")
    d.box(590, 10, 150, 46, "ChatEnv", note="tools, rewards", fill="content")
    d.box(590, 70, 150, 46, "policy", note="engine", fill="model")
    d.arrow((170, 50), (298, 50))
    d.text(234, 43, "collect()", "mono", anchor="middle")
    d.arrow((300, 74), (172, 74))
    d.text(234, 91, "rows", "soft", anchor="middle")
    d.arrow((460, 50), (588, 34))
    d.arrow((460, 70), (588, 92))
    d.arrow((95, 90), (95, 128), (665, 128), (665, 118))
    d.text(300, 146, "update_policy_weights_(model): acknowledged before the next batch", "soft")
    d.text(20, 186, "time", "soft")
    x = 70
    for step in range(3):
        d.box(x, 190, 130, 34, f"sample batch {step}", "model")
        d.box(x + 132, 230, 70, 34, f"train {step}", "good")
        x += 206
    d.text(
        20,
        288,
        "One after the other: every token is of the weights that are trained (age 0).",
        "soft",
    )
    d.write("sync.svg")


def streaming() -> None:
    """StreamingCollector: episodes beside training."""
    d = Drawing(760, 330)
    d.box(20, 30, 150, 70, "your loop", note="loss, optimizer", fill="good")
    d.box(270, 10, 210, 110, "")
    d.text(375, 32, "StreamingCollector", "head", anchor="middle")
    for i, name in enumerate(["episode", "episode", "episode"]):
        d.box(282 + 64 * i, 44, 60, 28, name, "content", css="soft")
    d.box(282, 80, 188, 30, "ledger: who may begin", css="soft")
    d.box(590, 10, 150, 46, "tools, rewards", fill="content")
    d.box(590, 74, 150, 46, "engine", note="continuous batching", fill="model")
    d.arrow((270, 50), (172, 50))
    d.text(221, 43, "groups", "soft", anchor="middle")
    d.arrow((170, 80), (268, 80))
    d.text(221, 97, "trained", "soft", anchor="middle")
    d.arrow((480, 52), (588, 34))
    d.arrow((588, 88), (482, 68))
    d.arrow((482, 84), (588, 104))
    d.arrow((95, 100), (95, 142), (665, 142), (665, 122))
    d.text(255, 160, "weights: copied, pushed, taken up between two tokens", "soft")
    d.text(20, 196, "time", "soft")
    for i, (x, w) in enumerate(
        [(70, 150), (70, 240), (100, 130), (232, 190), (312, 250), (424, 160)]
    ):
        d.box(x, 200 + 18 * (i % 3), w, 15, "", "model")
    for i, x in enumerate((222, 316, 424, 520)):
        d.box(x, 262, 84, 30, f"train {i}", "good")
    d.text(
        20,
        318,
        "No episode waits for the slowest one; every token keeps the version that drew it.",
        "soft",
    )
    d.write("streaming.svg")


def ray() -> None:
    """RayLLMCollector: several processes or machines."""
    d = Drawing(760, 334)
    d.box(20, 90, 150, 80, "your loop", note="and RayLLMCollector", fill="good")
    d.box(242, 90, 168, 80, "ledger", note="an actor: groups, versions")
    for i in range(3):
        y = 14 + 94 * i
        d.box(500, y, 240, 78, "")
        d.text(620, y + 18, f"collector {i}", "", anchor="middle")
        d.box(512, y + 28, 104, 40, "episodes", note="tools", fill="content")
        d.box(624, y + 28, 104, 40, "engine", note="its own", fill="model")
        d.arrow((410, 112 + 12 * i), (498, y + 30))
    d.text(412, 214, "groups", "soft")
    d.arrow((170, 120), (240, 120))
    d.arrow((242, 146), (172, 146))
    d.text(210, 112, "train", "soft", anchor="middle")
    d.text(210, 164, "rows", "soft", anchor="middle")
    d.arrow((95, 170), (95, 260), (498, 260))
    d.text(110, 252, "weights, to each engine", "soft")
    d.text(
        20,
        322,
        "A collector that dies gives its groups back: others draw them again, with the same seeds.",
        "soft",
    )
    d.write("ray.svg")


def age() -> None:
    """Versions, groups in flight and the age of their tokens when they are used."""
    d = Drawing(800, 370)
    left, step = 110, 104
    d.text(20, 34, "trainer", "head")
    for version in range(6):
        x = left + step * version
        d.box(x, 14, step - 6, 32, f"step {version}", "good")
        d.rule((x, 50), (x, 286), css="dash")
        d.text(x + 2, 64, f"version {version}", "soft")
    groups = [
        (0, 0.9, 1, "A"),
        (0.1, 1.8, 2, "B"),
        (0.3, 2.7, 3, "C"),
        (1.1, 2.2, 3, "D"),
        (2.1, 4.6, 5, "E"),
    ]
    for i, (begin, end, used, name) in enumerate(groups):
        y = 78 + 42 * i
        oldest = int(begin)
        age_at_use = used - oldest
        x, w = left + step * begin, step * (end - begin)
        d.text(20, y + 20, f"group {name}", "")
        cuts = [begin, *[v for v in range(int(begin) + 1, int(end) + 1) if v < end], end]
        for first, last in pairwise(cuts):
            x0 = left + step * first
            d.box(x0, y, step * (last - first) - 2, 28, str(int(first)), "model", css="mono")
        d.arrow((x + w, y + 14), (left + step * used, y + 14))
        d.text(left + step * used + 6, y + 19, f"{used} - {oldest}: age {age_at_use}")
    d.text(
        20,
        312,
        "A bar: a group in flight, with the versions that drew its tokens; an arrow: it waits.",
        "soft",
    )
    d.text(
        20,
        332,
        "Age: the version of the step that uses it less that of its oldest token; 3 at most.",
        "soft",
    )
    d.text(20, 352, "Groups that other steps use are left out.", "soft")
    d.write("age.svg")


if __name__ == "__main__":
    for draw in (tokens, episode, sync, streaming, ray, age):
        draw()

"""The page of a run in a real Chromium: what it shows, and that content runs nothing (A17)."""

import json
import re

import pytest
from made_records import event, sample, write_record

from collectors.record import RunRecord, TokenSpan, write_html

PAYLOADS = [
    f"{opening}{body}{closing}"
    for opening, closing in [
        ("<script>", "</script>"),
        ("</script><script>", "</script>"),
        ("<img src=x onerror=", ">"),
        ("<svg/onload=", ">"),
        ('"><script>', "</script>"),
        ("'><iframe src=javascript:", "></iframe>"),
        ("</style><script>", "</script>"),
        ("<!--><script>", "</script>-->"),
        ('"]);', ";//"),
        ("\u2028\\u003cscript>", "</script><a href='javascript:1'>x</a>"),
    ]
    for body in ("ran(1)", "window.RAN=1", "`${window.RAN=1}`", "\x00ran(1)", "eval('RAN=1')//")
]


@pytest.fixture
def open_page(browser):
    """Opens a page; gives it, with what its console said and what it asked for."""
    contexts = []

    def open_it(path, place=""):
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("dialog", lambda dialog: (page.said.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(f"{path.as_uri()}#/{place}")
        page.wait_for_selector("main h1, main p.empty:has-text('missing')")
        return page

    yield open_it
    for context in contexts:
        context.close()


def evil(payload, index):
    """A sample in which everything that a rollout or a data set may spell is the payload."""
    own = sample(1, 0, index, stop_reason=payload, reward_errors=payload, row={payload: payload})
    own.rewards = {payload: 1.0}
    own.logged = {payload: payload, "__proto__": {"polluted": 1}}
    own.tool_calls = [own.tool_calls[0]._replace(tool=payload, is_error=True)]
    own.num_tool_errors = 1
    for message in own.messages:
        message |= {"content": payload, "name": payload, "tool_calls": [{"name": payload}]}
    own.messages[2]["role"] = payload
    own.tokens.texts = [payload] * 7
    own.tokens.spans = [TokenSpan(payload, payload, 0, 2), *own.tokens.spans[2:]]
    return own


def test_A17_fifty_payloads_run_nothing_anywhere(open_page, tmp_path):
    assert len(set(PAYLOADS)) == 50
    group = [evil(payload, i) for i, payload in enumerate(PAYLOADS)]
    events = [event("offered", 0, reason=p) | {"name": p, "group_id": p} for p in PAYLOADS]
    run = write_record(tmp_path / "run", [[group]], events=events)
    path = write_html([RunRecord(run)], tmp_path / "out")
    text = path.read_text() + "".join(p.read_text() for p in (tmp_path / "out/data/0").iterdir())
    assert text.count("<script") == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    places = ["", "samples", "step/1", "group/1/0", "prompts", "prompt/0"]
    for place in [*places, *(f"sample/1/{i}" for i in range(0, 50, 7))]:
        page = open_page(path, place)
        page.wait_for_selector("main :not(.empty)")
        page.wait_for_timeout(150 if place.startswith(("group", "sample/")) else 0)
        found = page.evaluate(
            """() => [document.scripts.length,
            document.querySelectorAll('iframe, img, object').length,
            [...document.querySelectorAll('*')].filter((node) => [...node.attributes].some((a) =>
              /^on/.test(a.name) || /^\\s*javascript:/i.test(a.value))).length,
            typeof window.RAN, typeof ({}).polluted]"""
        )
        assert found == [1, 0, 0, "undefined", "undefined"], place
        assert page.said == [], place
        assert all(url.startswith("file://") for url in page.asked)
        page.close()
    page = open_page(path, "sample/1/0")
    page.wait_for_selector(".stream")
    assert PAYLOADS[0] in page.inner_text("main")
    # The policy holds by itself: markup of a string, a script without the word, another address.
    refused = """() => { const said = [];
      try { document.body.innerHTML = '<img src=x>'; said.push('markup'); } catch { }
      try { document.body.append(Object.assign(document.createElement('script'),
        {textContent: 'window.RAN = 1'})); } catch { }
      try { load('data/../../evil.js', () => 0); said.push('address'); } catch { }
      return [said, typeof window.RAN]; }"""
    assert page.evaluate(refused) == [[], "undefined"]


@pytest.fixture
def made_page(tmp_path):
    steps = [
        [[sample(step, group, index) for index in range(4)] for group in range(3)]
        for step in range(1, 4)
    ]
    steps[1][1][2] = sample(
        2, 1, 2, num_tool_errors=1, stop_reason="max_steps", is_truncated=True, reward=None
    )
    events = [event("offered", 2), event("dropped", 2, reason="stale", at=2.0)]
    events += [event("offered", 2, 1, attempt=1, at=3.0), event("trained", 2, 2, attempt=1, at=4.0)]
    one = RunRecord(write_record(tmp_path / "a/one", steps, events=events))
    tests = [
        {"step": 3, "version": 4, "lag_steps": 0, "reward": 0.5, "rewards/won": 1},
        {"step": 0, "version": 1, "lag_steps": 0, "reward": 0.125},
        {"step": 2, "version": 3, "lag_steps": 0, "skipped": "one was running"},
        {"step": 1, "version": 2, "lag_steps": 0, "reward": None},
    ]
    lines = "".join(json.dumps(test) + "\n" for test in tests)
    (tmp_path / "a/one/evaluations.jsonl").write_text(lines)
    other = RunRecord(write_record(tmp_path / "a/two", steps[:2]))
    return write_html([one, other], tmp_path / "out")


def rows(page):
    return page.locator("main tbody tr")


def test_one_goes_from_the_run_to_a_sample_by_keys_and_loads_what_is_looked_at(
    open_page, made_page
):
    page = open_page(made_page)
    assert page.inner_text("main h1") == "a/one"
    assert page.inner_text("[data-metric=reward] b") == "0.75 · 0.5"
    assert page.inner_text("[data-metric='held_out/reward'] b") == "0.5 · –"
    assert "steps 0–3" in page.inner_text("[data-metric='held_out/reward'] .ends")
    page.locator("[data-metric='held_out/reward'] svg").click(position={"x": 1, "y": 5})
    page.wait_for_selector("h1:text('Step 1')")  # there is no step 0
    page.keyboard.press("Escape")
    page.wait_for_selector("h1:text('a/one')")
    assert rows(page).count() == 3
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text('Step 2')")
    assert rows(page).count() == 3
    assert not any("step-" in url for url in page.asked)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".column")
    assert page.locator(".column").count() == 4
    assert [url.rpartition("/")[2] for url in page.asked if "step-" in url] == ["step-000002-0.js"]
    assert page.locator(".column .stream").first.inner_text().startswith("model, turn 1\ncall")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text('Sample 1')")
    page.wait_for_selector(".stream")
    assert page.url.endswith("#/r0/sample/2/5")
    page.keyboard.press("j")
    page.wait_for_selector("h1:text('Sample 2')")
    for place in ("group/2/1", "step/2", ""):
        page.keyboard.press("Escape")
        page.wait_for_url(f"**#/r0/{place}")
    # Keys that come before the page was told of its new address mean the new page, too.
    keys = "['j', 'Enter', 'j', 'Enter', 'Escape', 'Escape']"
    page.evaluate(
        f"{keys}.forEach((key) => document.body.dispatchEvent("
        "new KeyboardEvent('keydown', {key, bubbles: true})))"
    )
    page.wait_for_url("**#/r0/")
    page.keyboard.press("r")
    page.wait_for_selector("h1:text('a/two')")
    assert page.said == []


def test_tokens_are_coloured_by_what_is_asked(open_page, made_page):
    page = open_page(made_page, "sample/2/5")
    page.wait_for_selector(".stream")
    colour = "(node) => getComputedStyle(node).backgroundColor"
    tokens = page.locator(".stream .t")
    assert tokens.all_inner_texts()[1:3] == ["question 1", "call"]
    plain = tokens.nth(2).evaluate(colour)
    page.click("button:text('log-ratio')")
    up, same, down = (tokens.nth(i).evaluate(colour) for i in (2, 6, 5))
    assert len({plain, up, down}) == 3  # 0.25, 0 and -0.5
    assert same == tokens.nth(3).evaluate(colour)
    assert page.inner_text(".legend").split() == ["-0.5", "0.5"]
    page.click("button:text('version')")
    assert page.inner_text(".legend").split() == ["version", "2", "3"]
    assert page.locator("button:text('entropy')").is_disabled()
    tokens.nth(2).hover()
    told = page.inner_text(".tip")
    for words in ("-0.5", "-0.25", "1.284", "version\n2"):  # exp(0.25)
        assert words in told
    assert "add" in page.inner_text("aside")
    assert "250 ms" in page.inner_text("aside")


def test_filters_leave_what_fits(open_page, made_page):
    page = open_page(made_page, "samples")
    assert rows(page).count() == 36
    page.select_option("[data-filter=tools]", "error")
    assert rows(page).count() == 1
    rows(page).first.click()
    page.wait_for_selector("h1:text('Sample 2')")
    page.goto(page.url.partition("#")[0] + "#/r0/step/2")
    page.wait_for_selector("h1:text('Step 2')")
    assert rows(page).count() == 1
    assert page.locator(".squares .off").count() == 3
    page.click("button:text('clear')")
    page.fill("[aria-label=least]", "1")
    page.keyboard.press("Enter")
    assert page.locator(".squares .off").count() == 3 * 2
    page.click("button:text('clear')")
    page.select_option("[data-filter=stop]", "max_steps")
    assert rows(page).count() == 1


def test_where_prompt_2_is(open_page, made_page):
    page = open_page(made_page, "prompts")
    assert rows(page).count() == 3
    page.keyboard.press("/")
    page.keyboard.type("2")
    assert rows(page).count() == 1
    text = rows(page).first.inner_text().split("\t")
    assert text[:3] == ["2", "question 2", "trained at step 3"]
    assert [each.strip() for each in text[3:6]] == ["2", "1", "0"]
    rows(page).first.click()
    page.wait_for_selector("h1:text('Prompt 2')")
    assert [line.partition("\n")[2] for line in page.locator(".events li").all_inner_texts()] == [
        "offered, attempt 1, by version 0 of the policy",
        "dropped: stale",
        "offered, attempt 2, by version 0 of the policy",
        "trained at step 3",
    ]
    assert rows(page).count() == 5  # of both runs
    rows(page).last.click()
    page.wait_for_url("**#/r1/group/2/2")
    page.wait_for_selector(".column")
    assert page.locator("a.chip:has-text('step')").count() == 4


def test_rows_of_agents_and_rewards_that_failed_are_told_apart(open_page, tmp_path):
    rows = [sample(index=at) for at in range(3)]
    for at, own in enumerate(("seller", "buyer")):
        rows[at].agent, rows[at].num_segments, rows[at].segment = own, 2, at
        rows[at].reward, rows[at].rewards = 0.5, {"seller": 1.0, "buyer": 0.0}
    rows[2].reward, rows[2].rewards = None, {"spelling": None, "tone": None}
    rows[2].reward_errors = "spelling raised KeyError: 'word'"
    path = write_html([RunRecord(write_record(tmp_path / "run", [[rows]]))], tmp_path / "out")
    page = open_page(path, "group/1/0")
    page.wait_for_selector(".column")
    shown = page.locator(".column").all_inner_texts()
    chip = page.locator(".column .chip[title='row 1: main by buyer']")  # and where it comes from
    assert chip.inner_text() == "buyer: 0"
    assert "seller: 1\n" in shown[0]
    assert "buyer: 0\n" in shown[1]
    assert ["not scored: error" in each for each in shown] == [False, False, True]
    page.goto(f"{path.as_uri()}#/sample/1/2")
    page.wait_for_selector("h2:has-text('Errors of the rewards')")
    facts = page.inner_text(".panel:has(h2:has-text('Errors of the rewards'))").split("\n")
    told = {name: facts[facts.index(name) + 1] for name in ("spelling", "tone")}
    assert told == {"spelling": "failed", "tone": "does not apply"}
    assert not page.said


def test_what_is_missing_is_said(open_page, tmp_path):
    run = write_record(tmp_path / "run", [[[sample()]], [[sample(2)]]])
    torn = run / "rollouts/step-000002.jsonl.gz"
    torn.write_bytes(torn.read_bytes()[:-30])
    path = write_html([RunRecord(run)], tmp_path / "out")
    page = open_page(path)
    assert "step-000002.jsonl.gz: cut off" in page.inner_text(".note")
    (tmp_path / "out/data/0/step-000001-0.js").unlink()
    page = open_page(path, "group/1/0")
    page.wait_for_selector("text=The data of these samples are missing")
    for place in ("step/9", "group/1/9", "sample/1/9", "prompt/x"):
        page.goto(f"{path.as_uri()}#/{place}")
        page.wait_for_selector("p.empty:has-text('There is no')")
    (tmp_path / "out/data/0/run.js").unlink()
    assert "data/ beside this page is missing" in open_page(path).inner_text("main")
    with pytest.raises(FileExistsError, match="holds something else"):
        write_html([RunRecord(run)], run)
    with pytest.raises(ValueError, match="at least one run"):
        write_html([], tmp_path / "none")

"""Search: the retriever against its formula, answers by hand, questions that can be solved."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_envs.graders.short_answers import exact_match_of, f1_of
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import TaskEnv
from torchrl_tasks.search.bm25 import BM25
from torchrl_tasks.search.world import make_world, questions_from

SMALL = {"num_pages": 48, "num_held_out": 40, "num_demonstrations": 50}


def slow_score(query, text, texts, k1, b):
    """BM25 word by word, as it is written."""
    words = [re.findall(r"\w+", each.lower()) for each in texts]
    own = re.findall(r"\w+", text.lower())
    mean = sum(map(len, words)) / len(words)
    total = 0.0
    for word in re.findall(r"\w+", query.lower()):
        m = sum(word in each for each in words)
        idf = math.log(1 + (len(texts) - m + 0.5) / (m + 0.5))
        n = own.count(word)
        total += idf * (k1 + 1) * n / (n + k1 * (1 - b + b * len(own) / mean))
    return total


texts = st.lists(st.lists(st.sampled_from("abcd"), min_size=1).map(" ".join), min_size=1)


@given(texts, st.lists(st.sampled_from("abcxD")).map(", ".join), st.integers(1, 4))
def test_bm25_is_its_formula_and_gives_the_best_first(texts, query, limit):
    index = BM25(texts, k1=0.9, b=0.4)
    right = [slow_score(query, text, texts, 0.9, 0.4) for text in texts]
    assert index.scores(query) == pytest.approx({i: s for i, s in enumerate(right) if s > 0})
    found = index.search(query, limit)
    assert len(found) == min(limit, sum(score > 0 for score in right))
    left = [right[i] for i in range(len(texts)) if i not in found]
    assert all(right[a] >= max(left, default=0.0) - 1e-9 for a in found)
    assert all(right[a] >= right[b] - 1e-9 for a, b in pairwise(found))


def test_bm25_prefers_rare_words_and_short_texts():
    index = BM25(["the cat", "the dog", "the dog and the cat and the bird"])
    assert index.search("the bird", 2)[0] == 2
    assert index.search("cat", 3) == [0, 2]
    assert index.search("fish", 3) == []
    with pytest.raises(ValueError, match="no texts"):
        BM25([])


@pytest.mark.parametrize(
    ("said", "answers", "exact", "f1"),
    [
        pytest.param("The Eiffel Tower!", "eiffel tower", 1.0, 1.0, id="articles, case, marks"),
        pytest.param(
            "tower in Paris", "Eiffel Tower", 0.0, 0.4, id="one of three and of two words"
        ),
        pytest.param("Lyon", ["Paris", "Lyon"], 1.0, 1.0, id="the best of several"),
        pytest.param("", "Paris", 0.0, 0.0, id="nothing said"),
        pytest.param("no no", "no", 0.0, 2 / 3, id="a word counts as often as both have it"),
    ],
)
def test_answers(said, answers, exact, f1):
    assert exact_match_of(said, answers) == exact
    assert f1_of(said, answers) == pytest.approx(f1)


def test_who_reads_the_pages_answers_every_question(scripted, call_text, play):
    task = make_task("search", **SMALL)
    world = make_world(SMALL["num_pages"])
    hops = {h.question: h for start in world for h in questions_from(world, start, 2)}
    script = {}
    for i, row in enumerate(task.held_out_rows):
        way = hops[row["prompt"]]
        of = zip(way.relations, [way.start, *way.path], strict=False)
        asked = [f"{relation} of {title}" for relation, title in of]
        said = row["answer"] if i % 2 else f"{way.path[0]} or so"
        script[row["prompt"]] = [*(call_text("search", query=query) for query in asked), said]
    script = dict(sorted(script.items(), key=lambda item: -len(item[0])))
    rows = list(task.held_out_rows)
    env = TaskEnv(replace(task, train_rows=rows), num_envs=len(rows), shuffle=False)
    ends = play(env, scripted(script))
    for i, row in enumerate(rows):
        assert ends[i]["reward"][i].item() == i % 2, row
        assert ends[i]["rewards", "found_answer"][i].item() == 1.0
    env.close()


def test_nothing_of_the_world_is_told():
    """Held-out questions start where no other does, and demonstrations are of other facts."""
    task = make_task("search", **SMALL)
    world = make_world(SMALL["num_pages"])
    held_out, train = (
        {row["start"] for row in part} for part in (task.held_out_rows, task.train_rows)
    )
    assert len(task.held_out_rows) == 40
    assert not held_out & train
    assert {row["num_hops"] for row in task.held_out_rows} == {1, 2}
    texts = {page.told(relation) for page in world.values() for relation in page.facts}
    told = [m["content"] for chat in task.demonstrations for m in chat if m["role"] == "tool"]
    assert sum(text in texts for text in told) < 0.1 * len(told)
    assert make_task("search", **SMALL).train_rows == task.train_rows
    assert make_task("search", **SMALL, seed=1).train_rows != task.train_rows


def test_pages_and_questions_of_ones_own(scripted, call_text, play, tmp_path):
    pages = [
        {"title": "Lyon", "text": "A city on the Rhone."},
        {"title": "Rhone", "text": "A river."},
    ]
    questions = [{"question": f"Where is {x}?", "answer": ["the Rhone", "France"]} for x in "abcd"]
    for name, rows in (("pages", pages), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = make_task(
        "search",
        corpus=str(tmp_path / "pages.jsonl"),
        dataset=str(tmp_path / "questions.jsonl"),
        num_results=2,
        score="f1",
        num_held_out=1,
    )
    env = TaskEnv(task, num_envs=3, shuffle=False)
    end = play(env, scripted([call_text("search", query="rhone"), "near Rhone"]))[0]
    shown = end["history"].prompt[0].content[3]
    assert shown == "Rhone: A river.\nLyon: A city on the Rhone."
    assert end["reward"].flatten().tolist() == pytest.approx([2 / 3] * 3)
    env.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"num_pages": 31}, "num_pages must be between 32 and", id="pages"),
        pytest.param({"num_pages": 32, "num_held_out": 120}, "too few to hold 120", id="held out"),
        pytest.param({"score": "em"}, "score must be one of", id="score"),
        pytest.param({"corpus": [{"title": "a"}]}, "go together", id="no questions"),
        pytest.param(
            {"corpus": [{"title": "a"}], "dataset": [{"question": "?", "answer": "a"}]},
            r"page 0 needs the columns .'text'.",
            id="columns",
        ),
    ],
)
def test_what_can_not_be_searched_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        make_task("search", **settings)

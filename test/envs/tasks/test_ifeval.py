"""IFEval: every instruction has texts that follow it and texts that do not."""

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectors import LLMCollector
from torchrl_data.batched_object import read_objects
from torchrl_envs import ChatEnv, DataLoadingPrimer, IFEvalEnv, IFEvalScoreData, IfEvalScorer
from torchrl_tasks.ifeval.ifeval import score_instructions
from torchrl_tasks.ifeval.instructions import INSTRUCTIONS, count_sentences, follows, loose_variants
from torchrl_tasks.ifeval.languages import SCRIPT_OF, may_be_language

# Instruction, arguments, texts that follow it, texts that do not.
CASES = [
    ("keywords:existence", {"keywords": ["cat", "C++"]}, ["A Cat in c++"], ["a cat", "C++"]),
    (
        "keywords:frequency",
        {"keyword": "ab", "frequency": 2, "relation": "at least"},
        ["ab AB", "abab ab"],
        ["ab", "a b"],
    ),
    (
        "keywords:frequency",
        {"keyword": "ab", "frequency": 2, "relation": "less than"},
        ["ab", "none"],
        ["ab ab"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["a category"], ["the Cat."]),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        ["Qq", "q and q"],
        ["q"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist nicht der Hund und die Katze."],
        ["This is not the dog and the cat.", "Это не собака", "12"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "Is it? Yes it is. Good."],
        ["One, two", "Dr. Who met Mr. Bean.", "It is 3.5 now."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["One."],
        ["One. Two."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na *** b\n***"],
        ["a", "a\n\nb", "a *** b *** c", "a *** *** b"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["a b c", "well-known word"],
        ["a b"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["first\n\nthen, more", 'a\n\n\n"Then" b'],
        ["first\n\nnow", "then\n\nfirst", "then", "a\n\nthen b\n\nc"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] and [address]"],
        ["[name]", "(a) (b)"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["text\nP.S. more", "text p. s. more"],
        ["text", "corps are many"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["text\nP.P.S more", "a\np.p.s. b"],
        ["text\nP.S. more"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b\ntext", "* a\n**bold** line\n* b"],
        ["* a", "* a\n* b\n* c"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", " So: My answer is maybe. "],
        ["yes", "My answer is yes"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*"],
        ["*a*", "* a", "** ** and *b*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "Section 1 Section 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n3\n```"],
        ["{a: 1}", 'Here: {"a": 1}', "[" * 5000],
    ),
    ("detectable_format:title", {}, ["<<A title>>\ntext"], ["<A title>", "<< >>"]),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b"],
        ["a", "a ****** a", "a ****** b ****** c", "a ****** ****** b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it."},
        ["say it. So I do"],
        ["I say it."],
    ),
    ("startend:end_checker", {"end_phrase": "The end."}, ['well, the end."'], ["The end. no"]),
    ("startend:quotation", {}, [' "all of it" '], ['"', '"a" b', "a"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["ONE and TWO"],
        ["ONE and Two"],
    ),
    ("change_case:english_capital", {}, ["THIS IS THE END"], ["This is", "DAS IST NICHT DIE TÜR"]),
    (
        "change_case:english_lowercase",
        {},
        ["this is the end"],
        ["This is", "das ist nicht die tür"],
    ),
    ("punctuation:no_comma", {}, ["a and b"], ["a, b"]),
]


def test_there_are_25_kinds_and_each_is_tried():
    assert len(INSTRUCTIONS) == 25
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS)


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_instructions(name, arguments, right, wrong):
    # The data set gives all arguments of all instructions, most of them None.
    arguments = {"relation": None, "num_words": None, **arguments}
    assert [follows(text, name, arguments) for text in right] == [True] * len(right)
    assert [follows(text, name, arguments) for text in wrong] == [False] * len(wrong)
    assert not follows("  ", name, arguments), "an empty answer follows nothing"


@given(st.text(), st.sampled_from(CASES))
def test_checks_are_total(text, case):
    name, arguments, *_ = case
    assert follows(text, name, arguments) in (True, False)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("No stop", 1),
        ("One... two", 2),
        ('He said "Go!" Then he went.', 2),
        ("A. B. Smith came. He left.", 2),
        ("Title\n\nOne. Two", 3),
        ("See e.g. this one.", 1),
        ("你好。再见。", 2),
    ],
)
def test_sentences(text, count):
    assert count_sentences(text) == count


SAMPLES = {
    "ar": "هذا هو البيت الذي كان في المدينة",
    "bg": "Това е къщата, която ще се продаде на пазара",
    "bn": "আমি বাংলায় গান গাই",
    "de": "Ich weiß nicht, ob das ein Hund ist und wem er gehört",
    "en": "I do not know whether this is a dog and who it belongs to",
    "es": "No sé si este es el perro que está en la casa",
    "fa": "این خانه است که در آن شهر را می بینیم",
    "fi": "Minä en tiedä onko se koira ja kenen se on",
    "fr": "Je ne sais pas si c'est le chien qui est dans la maison",
    "gu": "હું ગુજરાતી બોલું છું",
    "he": "אני לא יודע אם זה כלב",
    "hi": "यह एक कुत्ता है और वह घर में है",
    "it": "Non so se è il cane che sta nella casa con gli altri",
    "ja": "これは犬です",
    "kn": "ನಾನು ಕನ್ನಡ ಮಾತನಾಡುತ್ತೇನೆ",
    "ko": "이것은 개입니다",
    "mr": "हे एक घर आहे आणि ते मोठे आहे",
    "ne": "यो एक घर हो र म त्यहाँ छु",
    "pa": "ਇਹ ਇੱਕ ਘਰ ਹੈ",
    "pt": "Não sei se este é o cão que está em uma casa com os outros",
    "ru": "Я не знаю, что это за собака и кто её хозяин",
    "sw": "Hii ni nyumba ya watu wa mji na yeye ni mtu wa kwanza",
    "ta": "இது ஒரு வீடு",
    "te": "ఇది ఒక ఇల్లు",
    "th": "นี่คือบ้าน",
    "ur": "یہ ایک گھر ہے اور اس میں لوگ ہیں",
    "vi": "Tôi không biết đây có phải là con chó của người nào và những ai",
    "zh": "这是一只狗",
}


def test_languages_are_told_apart():
    for language, text in SAMPLES.items():
        said = [other for other in SAMPLES if may_be_language(text, other)]
        assert said == [language], text


def test_a_language_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="'xx' is unknown; known are"):
        may_be_language("text", "xx")
    assert not may_be_language("123 !", "en")
    assert may_be_language("Paris Berlin", "en"), "nothing speaks against it"
    assert set(SAMPLES) <= set(SCRIPT_OF)


def test_loose_takes_lines_and_asterisks_away():
    text = "Sure:\n**ONE, two**\nBye"
    assert loose_variants(text) == [
        text,
        "**ONE, two**\nBye",
        "Sure:\n**ONE, two**",
        "**ONE, two**",
        "Sure:\nONE, two\nBye",
        "ONE, two\nBye",
        "Sure:\nONE, two",
        "ONE, two",
    ]
    names = ["startend:end_checker", "detectable_format:json_format", "punctuation:no_comma"]
    arguments = [{"end_phrase": "two"}, None, {}]
    strict, loose = score_instructions(text, names, arguments)
    assert (strict, loose) == ([False] * 3, [True, False, False])


ROWS = [
    {
        "key": 0,
        "prompt": "<0>",
        "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
        "kwargs": [{"end_phrase": None}, {"end_phrase": "done"}],
    },
    {
        "key": 1,
        "prompt": "<1>",
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [{"num_words": 2, "relation": "less than"}],
    },
    {
        "key": 2,
        "prompt": "<2>",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    },
]
REPLIES = {
    "<0>": ["<think>hm</think><answer>a, b. done*</answer>"],
    "<1>": ["<think>a</think><think>b</think><answer>one</answer>"],
    "<2>": ["no comma and no block"],
}
# Row 0: strict neither, loose "done" only. Row 1: everything, two think blocks. Row 2: no answer.
REWARDS = [0.1 * 0.5 + 0.15, 1.0 + 0.1, 0.0]


def test_the_environment_scores(scripted, tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "data")
    env = IFEvalEnv(dataset=tmp_path / "data", num_envs=3, shuffle=False)
    end = env.step(scripted(REPLIES)(env.reset()))["next"]
    env.close()
    assert end["reward"].view(-1).tolist() == pytest.approx(REWARDS)
    assert end["done"].all()
    score = end["ifeval_score"]
    assert isinstance(score, IFEvalScoreData)
    assert score.num_instructions.view(-1).tolist() == [2, 1, 1]
    assert score.prompt_level_strict_acc.view(-1).tolist() == [False, True, False]
    assert score.prompt_level_loose_acc.view(-1).tolist() == [False, True, False]
    assert score.inst_level_strict_acc.tolist() == [[False, False], [True, False], [False, False]]
    assert score.inst_level_loose_acc.tolist() == [[False, True], [True, False], [False, False]]


def test_the_reward_can_be_ones_own_or_none(scripted):
    def own(score, answer_blocks):
        return score.inst_level_loose_acc.sum() + 10 * len(answer_blocks)

    for aggregate, expected in ((own, [11.0, 11.0, 0.0]), (False, None)):
        env = ChatEnv(batch_size=3).append_transform(DataLoadingPrimer(ROWS))
        env.append_transform(IfEvalScorer(aggregate_reward=aggregate))
        end = env.step(scripted(REPLIES)(env.reset()))["next"]
        env.close()
        assert end["ifeval_score"].num_instructions.sum() == 4
        if expected is None:
            assert not end["scorable"].any()
        else:
            assert end["reward"].view(-1).tolist() == expected


def test_the_whole_message_can_be_judged_after_the_fact(scripted):
    env = IFEvalEnv(dataset=ROWS, num_envs=3, shuffle=False, compute_reward=False)
    env.append_transform(IfEvalScorer(aggregate_reward=False))
    scorer = IfEvalScorer(require_answer=False, format_weights=[1.0, 0.0, 0.0, 0.0])
    collector = LLMCollector(env, scripted(REPLIES), postproc=scorer)
    rows = collector.collect()
    collector.shutdown()
    assert [row["reward"].item() for row in rows.unbind(0)] == pytest.approx([0.15, 0.1, 1.0])
    assert torch.equal(rows[2]["ifeval_score"].inst_level_strict_acc, torch.tensor([True]))


def test_a_row_that_lacks_an_argument_marks_itself(scripted):
    rows = [ROWS[0], {**ROWS[1], "kwargs": [{"num_words": 2, "relation": None}]}, ROWS[2]]
    env = IFEvalEnv(dataset=rows, num_envs=3, shuffle=False)
    end = env.step(scripted(REPLIES)(env.reset()))["next"]
    env.close()
    assert end["scorable"].view(-1).tolist() == [True, False, True]
    errors = read_objects(end, "reward_errors")
    assert r"number_words needs ['relation']" in errors[1]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: IFEvalEnv(dataset=[{**ROWS[0], "instruction_id_list": ["a:b"]}]),
            r"row 0: ValueError: the instructions are unknown: \['a:b'\]",
        ),
        (lambda: IFEvalEnv(dataset=[{"prompt": "a"}]), "instruction_id_list"),
        (lambda: IfEvalScorer(format_weights=[1.0]), "four finite"),
        (lambda: score_instructions("a", ["punctuation:no_comma"], []), "1 instructions but 0"),
        (lambda: follows("a", "b:c", {}), "no instruction 'b:c'"),
    ],
)
def test_what_does_not_fit_is_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()

"""IFEval: instructions that a program can check, and the task of following them."""

import inspect
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite, Unbounded

from torchrl_data.keys import REWARD
from torchrl_envs.concurrency.calls import accepted_arguments
from torchrl_envs.episode.episode import Episode
from torchrl_envs.graders.answers import read_tags
from torchrl_envs.rewards.answer import AnswerReward

from .task import Task, TaskEnv, load_task_rows

# Whether a text can be of a language: by its letters, and by its most frequent small words.
#
# No model and no download. Scripts are told apart by Unicode; languages that share one by function
# words, of which a text of a few sentences has several. A text without any is of any language of
# its script.

_SCRIPTS: Final = {
    "ARABIC": "ar fa ur", "BENGALI": "bn", "CJK": "zh", "CYRILLIC": "bg ru uk",
    "DEVANAGARI": "hi mr ne", "GREEK": "el", "GUJARATI": "gu", "GURMUKHI": "pa", "HANGUL": "ko",
    "HEBREW": "he", "KANA": "ja", "KANNADA": "kn", "MALAYALAM": "ml", "TAMIL": "ta",
    "TELUGU": "te", "THAI": "th",
    "LATIN": "ca cs da de en es fi fr hr hu id it nl no pl pt ro sv sw tl tr vi",
}  # fmt: skip
SCRIPT_OF: Final = {code: script for script, codes in _SCRIPTS.items() for code in codes.split()}
"""ISO 639-1 code to the script that most of its letters are of."""

_LINES: Final = Path(__file__).with_name("function_words.txt").read_text("utf-8").splitlines()
_FUNCTION_WORDS: Final = {line[:2]: frozenset(line[3:].split()) for line in _LINES}
_SCRIPT_SHARE: Final = 0.5
_WORD: Final = re.compile(r"[^\s\d.,;:!?¿¡()\[\]{}\"“”„«»…।|/*_-]+")


def may_be_language(text: str, language: str) -> bool:
    """Return whether a text can be of a language."""
    # Gives whether at least half of its letters are of the language's script, and no other language
    # of that script has more function words in it. Japanese needs some kana, Chinese has none.
    code = language.lower().split("-")[0]
    if code not in SCRIPT_OF:
        raise ValueError(f"Language {language!r} is unknown; known are {sorted(SCRIPT_OF)}.")
    counts: Counter[str] = Counter()  # letters by script
    for letter in text:
        if letter.isalpha() or unicodedata.category(letter) in ("Mn", "Mc"):
            name = unicodedata.name(letter, "").split(" ")[0]
            counts["KANA" if name in ("HIRAGANA", "KATAKANA") else name] += 1
    total = sum(counts.values())
    if not total:
        return False
    if code == "ja":
        return counts["KANA"] > 0 and counts["KANA"] + counts["CJK"] >= _SCRIPT_SHARE * total
    if code == "zh":
        return counts["CJK"] >= _SCRIPT_SHARE * total and not counts["KANA"]
    script = SCRIPT_OF[code]
    if counts[script] < _SCRIPT_SHARE * total:
        return False
    words = Counter(_WORD.findall(text.lower()))
    rivals = [other for other, of in SCRIPT_OF.items() if of == script and other in _FUNCTION_WORDS]
    found = {other: sum(words[word] for word in _FUNCTION_WORDS[other]) for other in rivals}
    return not found or found.get(code, 0) == max(found.values())


# The 25 kinds of verifiable instructions of IFEval, each a function of a text.
#
# Zhou et al., 2023, arXiv:2311.07911. The rules are the paper's; sentences are split by a rule of
# punctuation and languages are checked by :mod:`~torchrl_envs.tasks.ifeval`, so nothing has to
# be downloaded.

Check = Callable[..., bool]
ANSWER_OPTIONS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATION: Final = re.compile(
    r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|cf|No|Inc|Ltd|Co|Ph\.D)\.$"
)


def count_sentences(text: str) -> int:
    """Parts that end with ``.``, ``!`` or ``?`` before white space, or with the text."""
    # A full stop after an initial or a common abbreviation ends none. Parts without a letter or a
    # digit are no sentences.
    count, start = 0, 0
    for end in re.finditer(r"[.!?。！？]+[\"'”’)\]]*(?=\s|$)|[。！？]|\n\s*\n|$", text):
        part = text[start : end.end()].strip()
        before_end = end.end() < len(text.rstrip())
        if before_end and end[0].strip() == "." and _ABBREVIATION.search(part):
            continue
        count += bool(re.search(r"\w", part))
        start = end.end()
    return count


def compare(count: int, threshold: int, relation: str) -> bool:
    """``"less than"`` or ``"at least"``."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation must be 'at least' or 'less than', got {relation!r}.")
    return count >= threshold if relation == "at least" else count < threshold


def _occurrences(text: str, keyword: str) -> int:
    """Return how often a keyword occurs, in any case."""
    return len(re.findall(re.escape(keyword.strip()), text, flags=re.IGNORECASE))


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """So many paragraphs, with ``***`` between them; only the first and the last may be empty."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """So many paragraphs, with a blank line between them, one of which begins with a word."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = re.match(r"['\"“‘(*_]*([^\s.,?!'\"”’]*)", paragraphs[nth_paragraph - 1])
    return first is not None and first[1].lower() == first_word.strip().lower()


def postscript(text: str, postscript_marker: str) -> bool:
    """There is a postscript that begins with a marker, ``P.S.`` or ``P.P.S``, say."""
    marker = postscript_marker.strip().lower()
    letters = [re.escape(letter) + r"\.?\s?" for letter in re.findall(r"\w", marker)]
    spaced = marker.replace(".", "").replace(" ", "")
    pattern = "".join(letters) if spaced in ("ps", "pps") else re.escape(marker)
    return re.search(rf"(?:^|\s){pattern}", text.lower(), flags=re.MULTILINE) is not None


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """At least so many parts in ``*asterisks*`` or ``**two of them**``."""
    doubled = re.findall(r"\*\*([^\n*]*)\*\*", text)
    single = re.findall(r"\*([^\n*]*)\*", re.sub(r"\*\*[^\n*]*\*\*", "", text))
    return sum(bool(part.strip()) for part in doubled + single) >= num_highlights


def json_format(text: str) -> bool:
    """The whole text is JSON, perhaps in a code block."""
    block = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL | re.IGNORECASE)
    try:
        json.loads(text if block is None else block[1])
    except (ValueError, RecursionError):
        return False
    return True


def two_responses(text: str) -> bool:
    """Two different answers, with ``******`` between them."""
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


INSTRUCTIONS: Final[dict[str, Check]] = {
    # Case does not count in keywords and letters.
    "keywords:existence": lambda text, keywords: all(_occurrences(text, k) for k in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: compare(
        _occurrences(text, keyword), frequency, relation
    ),
    # As whole words.
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(
            re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, flags=re.IGNORECASE)
            for word in forbidden_words
        )
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compare(
        text.lower().count(letter.strip().lower()), let_frequency, let_relation
    ),
    "language:response_language": may_be_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        count_sentences(text), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    # A word is a run of letters, digits and underscores.
    "length_constraints:number_words": lambda text, num_words, relation: compare(
        len(re.findall(r"\w+", text)), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[.*?\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    # Exactly so many lines that begin with * or -.
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^\s*(?:\*[^*\n]|-).*$", text, flags=re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(o in text for o in ANSWER_OPTIONS),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    # At least so many headings such as "Section 1".
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": json_format,
    # There is one in <<double angular brackets>>.
    "detectable_format:title": lambda text: any(
        part.strip("<> \t") for part in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    # The whole text is in double quotation marks.
    "startend:quotation": lambda text: bool(re.fullmatch(r'\s*".*"\s*', text, flags=re.DOTALL)),
    # So many words are all in capitals.
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compare(
        sum(word.isupper() for word in re.findall(r"\w+(?:[-'’]\w+)*", text)),
        capital_frequency,
        capital_relation,
    ),
    "change_case:english_capital": lambda text: text.isupper() and may_be_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and may_be_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Whether a text follows an instruction with such arguments, by the instruction's name."""


def follows(text: str, instruction_id: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a text follows an instruction."""
    check = INSTRUCTIONS.get(instruction_id)
    if check is None:
        raise ValueError(
            f"There is no instruction {instruction_id!r}; there are {sorted(INSTRUCTIONS)}."
        )
    _, *names = inspect.signature(check).parameters
    settings = {name: arguments.get(name) for name in names}
    missing = [name for name, value in settings.items() if value is None]
    if missing:
        raise ValueError(f"The instruction {instruction_id} needs {missing}.")
    return bool(text.strip()) and check(text, **settings)


def loose_variants(text: str) -> list[str]:
    """The text, and without its first line, its last line, both, and asterisks: eight at most."""
    lines = text.split("\n")
    parts = [text, *("\n".join(cut).strip() for cut in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*parts, *(part.replace("*", "") for part in parts)]))


# IFEval: instructions that a program can verify.
#
# Zhou et al., 2023, arXiv:2311.07911. A row has ``prompt``, ``instruction_id_list`` and ``kwargs``,
# the arguments of each instruction.
#
# Shape legend: B rows, I instructions of the row that has most.

HUB_ID: Final = "google/IFEval"
SYSTEM_PROMPT: Final = (
    "You follow instructions exactly. First reason inside <think> and </think>, then give your "
    "answer inside <answer> and </answer>. The instructions are about what is inside <answer>."
)
SCORE: Final = "ifeval_score"
FORMAT_WEIGHTS: Final = (0.4, 0.3, 0.2, 0.1)
ANSWER_BONUS: Final = 0.1
THINK_BONUS: Final = 0.05


class IFEvalScoreData(TensorClass["nocast"]):
    """The instructions that were followed, bool.

    Strict takes the answer as it is; loose also without its first or last line, or asterisks.
    """

    prompt_level_strict_acc: Tensor
    """All of them; ``[B, 1]``."""
    inst_level_strict_acc: Tensor
    """Each; ``[B, I]``, False beyond the row's own."""
    prompt_level_loose_acc: Tensor
    """All of them; ``[B, 1]``."""
    inst_level_loose_acc: Tensor
    """Each; ``[B, I]``."""
    num_instructions: Tensor
    """int64 ``[B, 1]``; 0 where nothing was scored."""

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> "IFEvalScoreData":
        """Scores of rows.

        Args:
            rows: strict and loose result of each instruction.
        """
        size, most = len(rows), max((len(strict) for strict, _ in rows), default=0)
        each = torch.zeros(2, size, most, dtype=torch.bool)
        counts = torch.tensor([[len(strict)] for strict, _ in rows])
        for i, both in enumerate(rows):
            for kind, results in enumerate(both):
                each[kind, i, : len(results)] = torch.tensor(list(results), dtype=torch.bool)
        every = (each.sum(-1, keepdim=True) == counts) & (counts > 0)
        return cls(
            prompt_level_strict_acc=every[0],
            inst_level_strict_acc=each[0],
            prompt_level_loose_acc=every[1],
            inst_level_loose_acc=each[1],
            num_instructions=counts,
            batch_size=[size],
        )


def score_instructions(
    text: str, instruction_ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]
) -> tuple[list[bool], list[bool]]:
    """Return which instructions a text follows, strictly and loosely."""
    if len(instruction_ids) != len(arguments):
        raise ValueError(f"{len(instruction_ids)} instructions but {len(arguments)} arguments.")
    pairs = [(name, own or {}) for name, own in zip(instruction_ids, arguments, strict=True)]
    variants = loose_variants(text)
    strict = [follows(text, name, settings) for name, settings in pairs]
    loose = [any(follows(v, name, settings) for v in variants) for name, settings in pairs]
    return strict, loose


class IfEvalScorer(AnswerReward):
    """Scores the answer by the instructions of its row, and writes ``ifeval_score``.

    The reward is the weighted sum of the four accuracies of :class:`IFEvalScoreData` (those of
    single instructions as their mean), 0.1 more for exactly one ``<answer>`` block and 0.05 for
    exactly one ``<think>`` block.

    Args:
        instruction_ids_key: column with the names of the instructions.
        keyword_args_key: column with their arguments.
        aggregate_reward: ``True`` for the reward above, ``False`` for none, or a function of the
            score (an :class:`IFEvalScoreData` of one row), and of ``think_blocks`` and
            ``answer_blocks`` if it names them.
        format_weights: of the strict prompt, strict instruction, loose prompt and loose instruction
            accuracy.
        require_answer: judge what is in the first ``<answer>`` block; otherwise the whole message.
        **kwargs: see :class:`~torchrl_envs.rewards.answer.AnswerReward`.

    Raises:
        ValueError: there are not four finite weights.
    """

    component_keys = (SCORE,)

    def __init__(
        self,
        *,
        instruction_ids_key: str = "instruction_id_list",
        keyword_args_key: str = "kwargs",
        aggregate_reward: bool | Callable[..., Any] = True,
        format_weights: Sequence[float] = FORMAT_WEIGHTS,
        require_answer: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if len(format_weights) != 4 or not all(map(math.isfinite, format_weights)):
            raise ValueError(
                f"IfEvalScorer: format_weights are four finite numbers, got {format_weights!r}."
            )
        self.instruction_ids_key = instruction_ids_key
        self.keyword_args_key = keyword_args_key
        self.required_columns = (instruction_ids_key, keyword_args_key)  # type: ignore[misc]
        self.aggregate_reward = aggregate_reward
        self.format_weights = tuple(format_weights)
        self.require_answer = require_answer

    @property
    def reward_names(self) -> list[str]:
        """The class's name, if it gives a reward."""
        return super().reward_names if self.aggregate_reward else []

    def components(self, text: str, row: Mapping[str, Any], query: str) -> dict[str, Any]:
        """See :class:`AnswerReward`."""
        del query
        _, _, thinks, answers = read_tags(text)
        judged = (answers[0] if answers else "") if self.require_answer else text
        results = score_instructions(
            judged, row[self.instruction_ids_key], row[self.keyword_args_key]
        )
        reward = None
        if callable(self.aggregate_reward):
            blocks = {"think_blocks": thinks, "answer_blocks": answers}
            extra = accepted_arguments(self.aggregate_reward, blocks)
            reward = self.aggregate_reward(IFEvalScoreData.of([results])[0], **extra)
        elif self.aggregate_reward:
            accuracies = [a for k in results for a in (float(all(k)), sum(k) / max(len(k), 1))]
            reward = sum(w * a for w, a in zip(self.format_weights, accuracies, strict=True))
            reward += ANSWER_BONUS * (len(answers) == 1)
            reward += THINK_BONUS * (len(thinks) == 1)
        return {REWARD: reward, SCORE: results}

    def export(self, batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
        """Write the scores."""
        scores: list[tuple[Sequence[bool], Sequence[bool]]] = [([], [])] * batch.batch_size[0]
        for episode in episodes:
            if self.key in episode.metrics:
                scores[episode.row] = episode.metrics[self.key][SCORE]
        batch.set(SCORE, IFEvalScoreData.of(scores))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the scores; as many as the row with the most instructions has."""
        shape = reward_spec.shape
        one = Binary(n=1, shape=torch.Size((*shape, 1)), dtype=torch.bool)
        many = Binary(n=-1, shape=torch.Size((*shape, -1)), dtype=torch.bool)
        reward_spec[SCORE] = Composite(
            prompt_level_strict_acc=one,
            inst_level_strict_acc=many,
            prompt_level_loose_acc=one.clone(),
            inst_level_loose_acc=many.clone(),
            num_instructions=Unbounded(shape=one.shape, dtype=torch.int64),
            shape=shape,
            data_cls=IFEvalScoreData,
        )
        return reward_spec

    def row_entry(self, key: str, value: Any) -> Any:
        """The score of one row."""
        del key
        return IFEvalScoreData.of([value])[0]


def ifeval_task(
    *,
    dataset: Any = HUB_ID,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    skip_bad_rows: bool = False,
    system_prompt: str | None = SYSTEM_PROMPT,
    num_held_out: int = 128,
) -> Task:
    """Prompts of IFEval, or of data like it; there are no demonstrations.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to test on; when not given, rows of ``split`` are held out.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        system_prompt: says which format the answer has.
        num_held_out: rows held out.

    Raises:
        ValueError: there are too few rows, or no such split.
    """
    splits: Any = {"name": name, "split": split, "held_out_split": held_out_split}
    splits |= {"num_held_out": num_held_out, "skip_bad_rows": skip_bad_rows}
    train, held_out = load_task_rows(dataset, **splits)
    return Task(
        name="ifeval",
        train_rows=train,
        held_out_rows=held_out,
        rewards=lambda: [IfEvalScorer()],
        columns=("prompt", "instruction_id_list", "kwargs"),
        prompt_column="prompt",
        map_row=_checked,
        skip_bad_rows=skip_bad_rows,
        system_prompt=system_prompt,
        max_new_tokens=512,
    )


class IFEvalEnv(TaskEnv):
    """Prompts of IFEval.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        compute_reward: whether to score with :class:`IfEvalScorer`.
        system_prompt: says which format the answer has.
        name: of the configuration, for a hub id.
        split: which; the only one, or ``"train"``, when not given.
        **kwargs: see :class:`~torchrl_envs.tasks.task.TaskEnv`.

    Raises:
        ValueError: the data lack a column, or a row names an instruction that is unknown.
    """

    def __init__(
        self,
        *,
        dataset: Any = HUB_ID,
        compute_reward: bool = True,
        system_prompt: str | None = SYSTEM_PROMPT,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        task = ifeval_task(
            dataset=dataset, name=name, split=split, system_prompt=system_prompt, num_held_out=0
        )
        super().__init__(task, compute_reward=compute_reward, **kwargs)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in row.get("instruction_id_list", ()) if name not in INSTRUCTIONS]
    if unknown:
        raise ValueError(f"the instructions are unknown: {unknown}")
    return row

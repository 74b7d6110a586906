"""The 25 kinds of verifiable instructions of IFEval, each a function of a text.

Zhou et al., 2023, arXiv:2311.07911. The rules are the paper's; sentences are split by a rule of
punctuation and languages are checked by :mod:`~torchrl_tasks.ifeval.languages`, so nothing has to
be downloaded.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from .languages import may_be_language

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

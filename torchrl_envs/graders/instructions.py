"""The 25 kinds of verifiable instructions of IFEval, each a function of a text.

Zhou et al., 2023, arXiv:2311.07911. The rules are the paper's; sentences are split by a rule of
punctuation and languages are checked by :mod:`~torchrl_envs.graders.languages`, so nothing has to
be downloaded.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .languages import may_be_language

Check = Callable[..., bool]
ANSWER_OPTIONS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATION: Final = re.compile(
    r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|cf|No|Inc|Ltd|Co|Ph\.D)\.$"
)


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return len(re.findall(r"\w+", text))


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
    if relation == "at least":
        return count >= threshold
    if relation == "less than":
        return count < threshold
    raise ValueError(f"relation must be 'at least' or 'less than', got {relation!r}.")


# Keywords and letters ---------------------------------------------------------------------------


def _occurrences(text: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword.strip()), text, flags=re.IGNORECASE))


def has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    """All keywords occur, in any case."""
    return all(_occurrences(text, keyword) for keyword in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """A keyword occurs so often."""
    return compare(_occurrences(text, keyword), frequency, relation)


def no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs as a whole word."""
    return not any(
        re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, flags=re.IGNORECASE)
        for word in forbidden_words
    )


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """A letter occurs so often, in any case."""
    return compare(text.lower().count(letter.strip().lower()), let_frequency, let_relation)


def no_comma(text: str) -> bool:
    """There is no comma."""
    return "," not in text


# Language and case ------------------------------------------------------------------------------


def response_language(text: str, *, language: str) -> bool:
    """The text is of a language."""
    return may_be_language(text, language)


def all_capitals(text: str) -> bool:
    """English, without small letters."""
    return text.isupper() and may_be_language(text, "en")


def all_lowercase(text: str) -> bool:
    """English, without capitals."""
    return text.islower() and may_be_language(text, "en")


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """So many words are all in capitals."""
    words = re.findall(r"\w+(?:[-'’]\w+)*", text)
    return compare(sum(word.isupper() for word in words), capital_frequency, capital_relation)


# Length -----------------------------------------------------------------------------------------


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """So many sentences."""
    return compare(count_sentences(text), num_sentences, relation)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """So many words."""
    return compare(count_words(text), num_words, relation)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """So many paragraphs, with ``***`` between them; only the first and the last may be empty."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1]
    return all(inner) and sum(map(bool, parts)) == num_paragraphs


def nth_paragraph_first_word(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """So many paragraphs, with a blank line between them, one of which begins with a word."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = re.match(r"['\"“‘(*_]*([^\s.,?!'\"”’]*)", paragraphs[nth_paragraph - 1])
    return first is not None and first[1].lower() == first_word.strip().lower()


# Content and format -----------------------------------------------------------------------------


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least so many ``[placeholders]``."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """There is a postscript that begins with a marker, ``P.S.`` or ``P.P.S``, say."""
    marker = postscript_marker.strip().lower()
    letters = [re.escape(letter) + r"\.?\s?" for letter in re.findall(r"\w", marker)]
    spaced = marker.replace(".", "").replace(" ", "")
    pattern = "".join(letters) if spaced in ("ps", "pps") else re.escape(marker)
    return re.search(rf"(?:^|\s){pattern}", text.lower(), flags=re.MULTILINE) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Exactly so many lines that begin with ``*`` or ``-``."""
    return len(re.findall(r"^\s*(?:\*[^*\n]|-).*$", text, flags=re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    """It holds one of three answers: yes, no, maybe."""
    return any(option in text for option in ANSWER_OPTIONS)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """At least so many parts in ``*asterisks*`` or ``**two of them**``."""
    doubled = re.findall(r"\*\*([^\n*]*)\*\*", text)
    single = re.findall(r"\*([^\n*]*)\*", re.sub(r"\*\*[^\n*]*\*\*", "", text))
    return sum(bool(part.strip()) for part in doubled + single) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each with a heading such as ``Section 1``."""
    heading = re.escape(section_spliter.strip())
    return len(re.findall(rf"{heading}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """The whole text is JSON, perhaps in a code block."""
    block = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL | re.IGNORECASE)
    try:
        json.loads(text if block is None else block[1])
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """There is a title in ``<<double angular brackets>>``."""
    return any(part.strip("<> \t") for part in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    """Two different answers, with ``******`` between them."""
    parts = [part.strip() for part in text.split("******")]
    if len(parts) > 2 and not all(parts[1:-1]):
        return False
    responses = [part for part in parts if part]
    return len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """It begins with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """It ends with a phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """The whole text is in double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == '"' and stripped[-1] == '"'


INSTRUCTIONS: Final[dict[str, Check]] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": no_forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": all_capitals,
    "change_case:english_lowercase": all_lowercase,
    "punctuation:no_comma": no_comma,
}


def follows(text: str, instruction_id: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction."""
    check = INSTRUCTIONS.get(instruction_id)
    if check is None:
        raise ValueError(
            f"There is no instruction {instruction_id!r}; there are {sorted(INSTRUCTIONS)}."
        )
    names = list(inspect.signature(check).parameters)[1:]
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

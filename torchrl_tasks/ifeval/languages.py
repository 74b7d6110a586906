"""Whether a text can be of a language: by its letters, and by its most frequent small words.

No model and no download. Scripts are told apart by Unicode; languages that share one by function
words, of which a text of a few sentences has several. A text without any is of any language of
its script.
"""

import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Final

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

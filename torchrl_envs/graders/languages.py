"""Whether a text can be of a language: by its letters, and by its most frequent small words.

No model and no download. Scripts are told apart by Unicode; languages that share one by function
words, of which a text of a few sentences has several. A text without any is of any language of its
script.
"""

import re
import unicodedata
from collections import Counter
from typing import Final

SCRIPT_OF: Final[dict[str, str]] = {
    "ar": "ARABIC", "fa": "ARABIC", "ur": "ARABIC",
    "bg": "CYRILLIC", "ru": "CYRILLIC", "uk": "CYRILLIC",
    "bn": "BENGALI", "gu": "GUJARATI", "he": "HEBREW", "el": "GREEK",
    "hi": "DEVANAGARI", "mr": "DEVANAGARI", "ne": "DEVANAGARI",
    "ja": "KANA", "kn": "KANNADA", "ko": "HANGUL", "ml": "MALAYALAM", "pa": "GURMUKHI",
    "ta": "TAMIL", "te": "TELUGU", "th": "THAI", "zh": "CJK",
    "ca": "LATIN", "cs": "LATIN", "da": "LATIN", "de": "LATIN", "en": "LATIN", "es": "LATIN",
    "fi": "LATIN", "fr": "LATIN", "hr": "LATIN", "hu": "LATIN", "id": "LATIN", "it": "LATIN",
    "nl": "LATIN", "no": "LATIN", "pl": "LATIN", "pt": "LATIN", "ro": "LATIN", "sv": "LATIN",
    "sw": "LATIN", "tl": "LATIN", "tr": "LATIN", "vi": "LATIN",
}  # fmt: skip
"""ISO 639-1 code to the script that most of its letters are of."""

_WORDS: Final[dict[str, str]] = {
    "ar": "في من على إلى أن هذا هذه التي الذي كان مع عن هو هي ما لا",
    "fa": "در به از که این است را با برای آن یک می ها های شود شده",
    "ur": "کے کی میں ہے اور سے کا کو نے پر ہیں یہ کہ ایک تھا بھی",
    "bg": "на да се за от това който със са ще при като не е в към",
    "ru": "и в не на что он как это по но из у я мы вы от",
    "uk": "та що не на це як він вона до від є із або які також бути",
    "hi": "के है में की और से को का हैं यह एक पर ने कि भी लिए",
    "mr": "आणि आहे या मध्ये आहेत ते हे एक की होते केले आपण साठी त्या मला नाही",
    "ne": "र छ को मा यो गर्न छन् हो पनि भएको लागि एक गरेको हुन्छ तथा गर्छ",
    "ca": "el la els les amb una per és que del més aquest també com però són",
    "cs": "a se je na že to v jako ale pro jsou byl která také jsem nebo",
    "da": "og er det en af til den ikke på med som har jeg ikke også blev",
    "de": "der die und das ist nicht ein eine zu den mit auf für sich auch von",
    "en": "the and of to is in that it for was with are this be have you",
    "es": "el los las una que del por con para es como pero más está son también",
    "fi": "ja on ei se että hän oli ovat kun mutta myös joka tai ole kuin niin",
    "fr": "le les des une est que dans pour qui pas sur avec sont du et nous",
    "hr": "je se na da su koji kao za što nije ali ili biti od samo također",
    "hu": "az és hogy nem egy is van ez meg mint csak volt de vagy ha már",
    "id": "yang dan di itu dengan untuk tidak ini dari dalam akan pada adalah saya ke bisa",
    "it": "il che di una per non sono con della gli le più anche questo è come",
    "nl": "de het een van en is dat niet op te zijn met voor die ook aan",
    "no": "og er det en av til den ikke på med som har jeg også ble seg",
    "pl": "i w nie na się z do jest to że jak po od ale są dla",
    "pt": "o os as uma que do da não com para em é mais um como são",
    "ro": "și de la nu este în cu pe un o care sunt din mai pentru să",
    "sv": "och är det en av till den inte på med som har jag för ett också",
    "sw": "na ya wa kwa ni katika la za hii kuwa cha yake pia kama hiyo watu",
    "tl": "ang ng sa na mga ay at si ito hindi para ko siya kung may niya",
    "tr": "ve bir bu için de da ile çok ne olarak gibi daha var olan ama değil",
    "vi": "và là của có không được cho một trong các người với này những để khi",
}
_FUNCTION_WORDS: Final = {code: frozenset(words.split()) for code, words in _WORDS.items()}
_SCRIPT_SHARE: Final = 0.5
_WORD: Final = re.compile(r"[^\s\d.,;:!?¿¡()\[\]{}\"“”„«»…।|/*_-]+")


def script_counts(text: str) -> Counter[str]:
    """Letters of a text by script."""
    counts: Counter[str] = Counter()
    for letter in text:
        if letter.isalpha() or unicodedata.category(letter) in ("Mn", "Mc"):
            name = unicodedata.name(letter, "").split(" ")[0]
            counts["KANA" if name in ("HIRAGANA", "KATAKANA") else name] += 1
    return counts


def may_be_language(text: str, language: str) -> bool:
    """Whether a text can be of a language."""
    # Gives whether at least half of its letters are of the language's script, and no other language
    # of that script has more function words in it. Japanese needs some kana, Chinese has none.
    code = language.lower().split("-")[0]
    if code not in SCRIPT_OF:
        raise ValueError(f"Language {language!r} is unknown; known are {sorted(SCRIPT_OF)}.")
    counts = script_counts(text)
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
    found = {other: _hits(words, other) for other in rivals}
    return not found or found.get(code, 0) == max(found.values())


def _hits(words: Counter[str], language: str) -> int:
    return sum(words[word] for word in _FUNCTION_WORDS[language])

"""Tokenizers made here, so that the tests need no network: the shapes that real ones have."""

import json
from functools import partial

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and says hello world in French: déjà vu",
    "user assistant system tool\n\n You are a helpful assistant. What is 2 + 2? It is 4.",
    '<tool_response>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_response>',
    "<think> </think> <|im_start|> <|im_end|> [INST] [/INST] <s> </s> User: Assistant:",
] * 4
CHATML_CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA_CONTROLS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL_CONTROLS = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
DEEPSEEK_CONTROLS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def byte_level_backend(*, ignore_merges: bool = False, words=None) -> Tokenizer:
    """A byte-level BPE like those of GPT-2, Qwen and Llama 3."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = words or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def metaspace_backend() -> Tokenizer:
    """A BPE over words with a leading mark and byte fallback, like those of Llama 2 and Mistral."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False),
    )
    # In the real ones these are in the model's vocabulary, and only some are added tokens.
    return Tokenizer.from_str(json.dumps({**json.loads(backend.to_str()), "added_tokens": []}))


def wrap(
    backend: Tokenizer,
    *,
    eos: str,
    pad: str | None = None,
    bos: str | None = None,
    special: tuple[str, ...] = (),
    not_special: tuple[str, ...] = (),
    chat_template: str | None = None,
    name: str = "",
) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with control tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, pad_token=pad or eos, bos_token=bos
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in not_special])
    tokenizer.chat_template = chat_template
    tokenizer.name_or_path = name
    return tokenizer


def chatml_tokenizer(**options) -> PreTrainedTokenizerFast:
    """Like Qwen's: ``<think>`` and ``<tool_call>`` are added, and not special."""
    backend = byte_level_backend()
    settings = {"eos": "<|im_end|>", "pad": "<|endoftext|>", "special": CHATML_CONTROLS}
    return wrap(backend, **{**settings, "not_special": NOT_SPECIAL, **options})


def pad_is_eos_tokenizer() -> PreTrainedTokenizerFast:
    """Padding and the end of turn are one token."""
    return chatml_tokenizer(pad="<|im_end|>")


LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 3's: merges are ignored for words in the vocabulary, line ends stay together."""
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return wrap(
        byte_level_backend(ignore_merges=True, words=words),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        special=LLAMA_CONTROLS,
    )


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Like Mistral's: word marks, the control tokens are in the model's own vocabulary too."""
    return wrap(metaspace_backend(), eos="</s>", bos="<s>", special=MISTRAL_CONTROLS)


def deepseek_tokenizer() -> PreTrainedTokenizerFast:
    """Like DeepSeek's."""
    return wrap(
        byte_level_backend(),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        special=DEEPSEEK_CONTROLS,
        not_special=NOT_SPECIAL,
    )


def plain_eos_tokenizer() -> PreTrainedTokenizerFast:
    """Like GPT-2's and Falcon's: one control token, which is everything."""
    return wrap(byte_level_backend(), eos="<|endoftext|>", bos="<|endoftext|>")


def stripping_tokenizer(*, rstrip: bool = False, lstrip: bool = False) -> PreTrainedTokenizerFast:
    """Control tokens that take in white space beside them, and white space that was added."""
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    tokenizer = wrap(backend, eos="<|endoftext|>")
    tokenizer.add_tokens(
        [
            AddedToken("<|im_end|>", special=True, rstrip=rstrip, normalized=False),
            AddedToken("<|im_start|>", special=True, lstrip=lstrip, normalized=False),
            AddedToken("    ", special=False, normalized=False),
        ]
    )
    return tokenizer


def marked_tokenizer(end: str, *marks: str) -> PreTrainedTokenizerFast:
    """A byte-level one with the control tokens of a family; ``end`` is its end of turn."""
    return wrap(byte_level_backend(), eos=end, bos="<s>", special=("<s>", end, *marks))


TEMPLATE_TOKENIZERS = {
    "chatml": chatml_tokenizer,
    "qwen": pad_is_eos_tokenizer,
    "qwen3": chatml_tokenizer,
    "smollm": pad_is_eos_tokenizer,
    "llama": llama_tokenizer,
    "mistral": mistral_tokenizer,
    "deepseek": plain_eos_tokenizer,
    "deepseek3": deepseek_tokenizer,
    "falcon": plain_eos_tokenizer,
    "dialogpt": plain_eos_tokenizer,
    "gemma": partial(marked_tokenizer, "<end_of_turn>", "<start_of_turn>"),
    "phi": partial(marked_tokenizer, "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
    "phi4": partial(marked_tokenizer, "<|im_end|>", "<|im_start|>", "<|im_sep|>"),
    "phi4mini": partial(
        marked_tokenizer,
        "<|end|>",
        *(f"<|{name}|>" for name in ("system", "user", "assistant", "tool_response")),
        *(f"<|{name}|>" for name in ("tool", "/tool", "tool_call", "/tool_call")),
    ),
    "granite": partial(marked_tokenizer, "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    "glm": partial(
        marked_tokenizer,
        "<|endoftext|>",
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "kimi": partial(
        marked_tokenizer,
        "<|im_end|>",
        *(f"<|im_{name}|>" for name in ("system", "user", "assistant", "middle")),
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
}
"""A tokenizer of the kind that each built-in template is used with."""


def bpe_of_ranks(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    """A byte-level BPE from the ranks of its tokens (the form of tiktoken and Tekken)."""
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            splits = [(token[:n], token[n:]) for n in range(1, len(token))]
            known = [(a, b) for a, b in splits if a in ranks and b in ranks]
            merges += [(rank, ranks[a], ranks[b], spell(a), spell(b)) for a, b in known]
    merges.sort()
    vocab = {spell(token): rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocab, [(a, b) for *_, a, b in merges], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_letters() -> dict[int, str]:
    """GPT-2's letters for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}

"""A language model small enough to train on a laptop, and a tokenizer for it, both made here.

They are ordinary: saved and loaded like any model directory, with the control tokens of ChatML.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTROL_TOKENS: Final = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
_PIECES: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What byte-level BPE merges within, as GPT-2 has it."""


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 704,
    isolated: str = r"\d",
    phrases: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML's control tokens.

    Args:
        texts: what it should encode in few tokens.
        vocab_size: at least 263: 256 bytes and the control tokens.
        isolated: what is always a token by itself, a regular expression; digits by default, so that
            a number is spelt the same wherever it stands.
        phrases: texts that are one token wherever they stand, but inside a word; they come on top
            of the vocabulary.

    Raises:
        ValueError: the vocabulary is too small, or a phrase is empty.
    """
    if not all(phrases):
        raise ValueError(f"train_tokenizer: a phrase is empty, got {list(phrases)}.")
    minimum = 256 + len(CONTROL_TOKENS)
    if vocab_size < minimum:
        raise ValueError(
            f"train_tokenizer: vocab_size must be at least {minimum}, got {vocab_size}."
        )
    backend = Tokenizer(models.BPE())
    # In regular expressions the first alternative wins: the longest phrase.
    whole = "|".join(map(re.escape, sorted(phrases, key=len, reverse=True))) or "(?!)"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"(?<!\w)(?:{whole})(?!\w)|{isolated}"), "isolated"),
            pre_tokenizers.Split(Regex(rf"\A(?:{whole})\z|{_PIECES}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # Phrases are added to the trained vocabulary, and nothing is merged into them.
    model = json.loads(backend.to_str())["model"]
    vocab, byte_level = model["vocab"], pre_tokenizers.ByteLevel(False, use_regex=False)
    for phrase in phrases:
        vocab.setdefault(byte_level.pre_tokenize_str(phrase)[0][0], len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    backend.model = models.BPE(vocab, merges, ignore_merges=bool(phrases))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([token for token in CONTROL_TOKENS if "tool" in token])
    return tokenizer


def tiny_qwen3(
    vocab_size: int,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 128,
    max_position_embeddings: int = 1024,
    initializer_range: float = 0.1,
    stop_token_ids: Sequence[int] = (),
) -> Qwen3ForCausalLM:
    """A Qwen3 model of about 0.1 million parameters, randomly initialised.

    Args:
        vocab_size: of the tokenizer.
        hidden_size: width of the residual stream.
        num_layers: transformer blocks.
        num_heads: query heads.
        num_key_value_heads: heads of keys and values.
        head_dim: size of a head; vLLM on a CPU needs at least 32.
        intermediate_size: of the feed-forward blocks.
        max_position_embeddings: most tokens of a conversation.
        initializer_range: standard deviation of the initial weights.
        stop_token_ids: kept in the generation settings.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(stop_token_ids) or None,
    )
    return Qwen3ForCausalLM(config)

"""One environment step of new messages: cost as a conversation grows, against the limit and peers.

    python benchmarks/step_new_tokens.py [--repeats 15] [--without-peers]

A step appends the policy's response and a user's message to each row and makes the next prompt's
tokens. The limit is the fast tokenizer on the text of the deltas alone, in one call. ``whole`` is
what a trainer does that renders and tokenises the conversation again each turn, and ``torchrl`` the
same with TorchRL's History. All run interleaved in one process, and the ids are compared first.
CPU seconds; the table gives medians and their ratios to the limit.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_data import ConversationEncoder, Conversations, builtin_template
from torchrl_data.conversation import Turn

BATCHES, TURNS = (1, 16, 64), (1, 8, 32, 64)
WORDS = (  # noqa: SIM905
    "the result of your last call shows that number is larger than we expected so please try "
    "again with another value and explain how you found it before giving the final answer"
).split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [" ".join(WORDS), "user assistant system\n"] * 50,
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = builtin_template("chatml")
    return tokenizer


def sentence(random_words: random.Random, count: int) -> str:
    return " ".join(random_words.choices(WORDS, k=count))


class Scenario:
    """Conversations of a number of turns, and the next turn of each row."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, batch: int, turns: int) -> None:
        words = random.Random(f"{batch} {turns}")
        self.tokenizer = tokenizer
        self.encoder = ConversationEncoder(tokenizer)
        end = [self.encoder.end_of_turn_id]
        self.chats: list[list[dict[str, Any]]] = [
            [{"role": "user", "content": sentence(words, 60)}] for _ in range(batch)
        ]
        conversations = self.encoder.encode_waiting(Conversations.from_messages(self.chats))
        for _ in range(turns):
            answers = [sentence(words, 40) for _ in range(batch)]
            ids = [row + end for row in tokenizer(answers, add_special_tokens=False)["input_ids"]]
            news = [sentence(words, 60) for _ in range(batch)]
            self.state = conversations
            self.responses = [
                Turn(row, [-0.5] * len(row), {"role": "assistant", "content": text})
                for row, text in zip(ids, answers, strict=True)
            ]
            self.news = [[{"role": "user", "content": text}] for text in news]
            self.history = [list(chat) for chat in self.chats]
            for chat, answer, new in zip(self.chats, self.responses, self.news, strict=True):
                chat += [answer[2], *new]
            conversations = self.step()
        self.deltas = [
            f"\n<|im_start|>user\n{new[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
            for new in self.news
        ]

    def step(self) -> Conversations:
        grown = self.state.append_turns(self.responses).append_messages(self.news)
        return self.encoder.encode_waiting(grown)

    def forget(self) -> None:
        """Make the state the end of its records again, as in a loop, so that nothing is copied."""
        for record, position in zip(self.state._records, self.state._positions, strict=True):
            n = position.num_tokens
            del record.ids[n:], record.sources[n:], record.log_probs[n:], record.versions[n:]
            del record.messages[position.num_messages :]

    def limit(self) -> Any:
        return self.tokenizer(self.deltas, add_special_tokens=False)

    def backend_limit(self) -> Any:
        backend = self.tokenizer.backend_tokenizer
        return backend.encode_batch_fast(self.deltas, add_special_tokens=False)

    def whole(self) -> Any:
        return [
            self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for chat in self.chats
        ]

    def torchrl(self) -> Callable[[], Any]:
        from tensordict import lazy_stack
        from torchrl.data.llm import History

        history = History.from_chats(self.history)
        news = History.from_chats(self.news)
        answers = [response[2]["content"] for response in self.responses]

        def run() -> Any:
            # What its wrapper and its environment do: the text of the whole conversation is parsed
            # into messages, the new ones are added, and all of it is rendered and tokenised.
            prompts = history.apply_chat_template(tokenizer=self.tokenizer, tokenize=False)
            full = History.from_text(
                [p + a + "<|im_end|>" for p, a in zip(prompts, answers, strict=True)],
                chat_template_name="chatml_format",
            )
            pairs = zip(full.unbind(0), news.unbind(0), strict=True)
            grown = lazy_stack([row.extend(new, inplace=False) for row, new in pairs])
            return grown.apply_chat_template(
                tokenizer=self.tokenizer, tokenize=True, return_dict=True
            )

        return run


def timed(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(scenario: Scenario, repeats: int, peers: bool) -> dict[str, float]:
    expected = scenario.whole()
    scenario.forget()
    ours = scenario.step()
    assert [ours.ids(i) for i in range(len(ours))] == [list(map(int, row)) for row in expected]
    runs: dict[str, Callable[[], Any]] = {
        "limit": scenario.limit,
        "backend": scenario.backend_limit,
        "ours": scenario.step,
        "whole": scenario.whole,
    }
    if peers:
        runs["torchrl"] = scenario.torchrl()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            if name in ("whole", "torchrl") and repeat >= max(3, repeats // 5):
                continue
            scenario.forget()
            # The short ones are repeated, as the clock is coarse.
            count = 20 if name in ("limit", "backend") else 1
            if name == "ours":
                samples[name].append(_ours(scenario, 20))
            else:
                samples[name].append(
                    timed(lambda run=run, count=count: [run() for _ in range(count)]) / count
                )
    return {name: statistics.median(values) for name, values in samples.items()}


def _ours(scenario: Scenario, count: int) -> float:
    total = 0.0
    for _ in range(count):
        scenario.forget()
        total += timed(scenario.step)
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--without-peers", action="store_true")
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    peers = not options.without_peers
    head = "batch x turns | limit ms | ours | bare backend | whole" + (
        " | torchrl" if peers else ""
    )
    print(head + "   (ratios to the limit)")
    for batch in BATCHES:
        flat = {}
        for turns in TURNS:
            result = measure(Scenario(tokenizer, batch, turns), options.repeats, peers)
            flat[turns] = result["ours"]
            limit = result.pop("limit")
            names = ["ours", "backend", "whole"] + (["torchrl"] if peers else [])
            ratios = " | ".join(f"{result[name] / limit:8.2f}" for name in names)
            print(f"{batch:3d} x {turns:2d} | {limit * 1e3:7.3f} | {ratios}", flush=True)
        print(f"      64 turns / 1 turn at batch {batch}: {flat[64] / flat[1]:.2f}")


if __name__ == "__main__":
    main()

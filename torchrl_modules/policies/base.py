"""What every policy does, whatever its engine: read prompts, generate, write the layout.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_data.conversation.batched_object import write_objects
from torchrl_data.conversation.conversations import Conversations, ids_and_images
from torchrl_data.conversation.record import Turn
from torchrl_data.keys import (
    ENTROPY,
    FINISH_REASON,
    FULL,
    HISTORY,
    MAX_NEW_TOKENS,
    PROMPT,
    UNTEMPERED_LOG_PROBS,
)
from torchrl_data.layout.conversation_io import active_rows
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_modules.engines.protocol import Engine, Generation
from torchrl_modules.sampling.num_samples import repeat_rows
from torchrl_modules.sampling.params import SamplingParameters, requested_sampling
from torchrl_modules.weights.adapters import AdapterWeights
from torchrl_modules.weights.lazy import LazyWeights

from .batches import PolicyInput, PolicyOutput


class LLMWrapperBase(TensorDictModuleBase):
    """A policy: reads ``prompt``, samples, and writes ``response``, ``full``, masks and log-probs.

    Args:
        engine: draws the tokens. Where it reads images (``engine.images``), messages may hold them,
            and the tokens that stand for them are never drawn; elsewhere a row with images is
            refused.
        tokenizer: a fast tokenizer.
        generate_kwargs: sampling parameters by name, or a
            :class:`~torchrl_modules.sampling.params.SamplingParameters`.
        chat_template: Jinja source with ``{% generation %}`` marks.
        chat_template_name: name of a built-in template.
        chat_template_kwargs: passed to the template.
        input_mode: what prompts are: ``"history"`` (messages, to which the chat template is
            applied), ``"text"`` or ``"tokens"`` (the whole prompt, taken as it is).
        write_tokens: also write ``tokens``, ``log_probs`` and ``masks`` as ragged rows. A collector
            switches it off, because it reads the same from the conversations once, at the end.
        pad_output: write them padded: the prompt on the left, the response on the right; the masks
            say what is real.
        num_samples: responses per row. The result is a new batch ``[*B, n]``; its rows share the
            work on their prompt. ``None`` draws one and adds no dimension.
        untempered_log_probs: also write ``("untempered_log_probs", "response" / "full")``, the
            log-probs under the model's own softmax.
        entropy: also write ``("entropy", "response" / "full")``, the entropy in nats of the
            distribution that each token was drawn from.

    Raises:
        ValueError: a sampling parameter is out of range, there is no such
            input mode, the template is not generation-marked, ``num_samples`` is below 1, or
            tokens are to be padded that are not written.
        TypeError: a sampling parameter is not known, or the tokenizer has no fast backend.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: PreTrainedTokenizerBase,
        generate_kwargs: Mapping[str, Any] | SamplingParameters | None = None,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        input_mode: str = HISTORY,
        write_tokens: bool = True,
        pad_output: bool = False,
        num_samples: int | None = None,
        untempered_log_probs: bool = False,
        entropy: bool = False,
    ) -> None:
        super().__init__()
        requested = requested_sampling(
            generate_kwargs,
            untempered_log_probs=untempered_log_probs,
            entropy=entropy,
        )
        if num_samples is not None and num_samples < 1:
            raise ValueError(
                f"{type(self).__name__}: num_samples must be at least 1, got {num_samples}."
            )
        self.engine = engine
        self.tokenizer = tokenizer
        self.encoder = ConversationEncoder(
            tokenizer,
            chat_template=chat_template,
            chat_template_name=chat_template_name,
            chat_template_kwargs=chat_template_kwargs,
            processor=getattr(engine, "images", None),
        )
        if self.encoder.images is not None:
            never = dict.fromkeys(self.encoder.images.never_drawn, -100.0)
            requested = replace(requested, logit_bias={**requested.logit_bias, **never})
        if requested.stop_token_ids is None:
            requested = replace(requested, stop_token_ids=self.encoder.stop_token_ids)
        for name in ("stop_token_ids", "logit_bias"):
            beyond = [i for i in getattr(requested, name) or () if i >= self.vocab_size]
            if beyond:
                raise ValueError(
                    f"{self._get_name()}: {name} {beyond} are not in the vocabulary of "
                    f"{self.vocab_size} tokens, so they would never be drawn."
                )
        self.sampling = requested.with_tokenizer(tokenizer)
        getattr(engine, "check_sampling", _any_sampling)(self.sampling)
        self.num_samples = num_samples
        self.reads = PolicyInput(
            input_mode, self.encoder, vocab_size=self.vocab_size, who=self._get_name()
        )
        self.writes = PolicyOutput(
            input_mode,
            self.encoder,
            write_tokens=write_tokens,
            pad_output=pad_output,
            who=self._get_name(),
        )
        self.in_keys: list[NestedKey] = [(input_mode, PROMPT)]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.out_keys: list[NestedKey] = [(input_mode, FULL), FINISH_REASON]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def policy_version(self) -> int:
        """Of the weights that serve; the next tokens are stamped with it."""
        return self.engine.version

    @property
    def vocab_size(self) -> int:
        """Token ids are below it: the model's, where the engine knows it, or the tokenizer's.

        A model's vocabulary is often padded beyond its tokenizer's, and such ids can be drawn.
        """
        known = getattr(self.engine, "vocab_size", None)
        return len(self.tokenizer) if known is None else known

    @property
    def input_mode(self) -> str:
        """What prompts are: ``"history"``, ``"text"`` or ``"tokens"``."""
        return self.reads.mode

    @property
    def temperature(self) -> float:
        """What the logits are divided by when a token is drawn; 0 for the most likely one."""
        return self.sampling.temperature

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample one turn for every row.

        Args:
            tensordict: ``(input_mode, "prompt")``, of any batch shape, from an environment or
                built by hand, and perhaps ``max_new_tokens``, int64, which bounds each row's turn
                beside the sampling parameters. Rows that are done, that get no token, or where
                ``_step``, bool, is False are left as they are.

        Returns:
            The same TensorDict with ``response``, ``full`` and ``finish_reason`` added; a new one
            ``[*B, num_samples]`` with ``num_samples``.

        Raises:
            MissingEntryError: there is no prompt.
        """
        prompt = self.reads.prompts(tensordict)
        if self.num_samples is not None:
            prompt = self.encoder.encode_rows(prompt).conversations
            tensordict, prompt = repeat_rows(tensordict, prompt, self.num_samples)
        active = active_rows(tensordict)
        budgets = tensordict.get(MAX_NEW_TOKENS, None)
        if budgets is not None:
            active = active & (budgets.view(-1) > 0)
            budgets = budgets.view(-1).clamp(max=self.sampling.max_new_tokens).tolist()
        if bool(active.all()):
            prompt, full, reasons = self.respond(prompt, max_new_tokens=budgets)
        else:
            prompt, full, reasons = self._respond_some(prompt, active, budgets)
        self.writes.write(tensordict, prompt, full)
        write_objects(tensordict, FINISH_REASON, reasons)
        return tensordict

    def _respond_some(
        self, prompt: Conversations, active: Tensor, budgets: Sequence[int] | None
    ) -> tuple[Conversations, Conversations, list[str]]:
        rows = active.nonzero().squeeze(-1).tolist()
        new_prompt, new_full, new_reasons = self.respond(
            prompt[rows], max_new_tokens=None if budgets is None else [budgets[i] for i in rows]
        )
        index = list(range(len(prompt)))
        reasons = [""] * len(prompt)
        for new, row in enumerate(rows):
            index[row] = len(prompt) + new
            reasons[row] = new_reasons[new]
        return (
            Conversations.cat([prompt, new_prompt])[index],
            Conversations.cat([prompt, new_full])[index],
            reasons,
        )

    def respond(
        self, prompt: Conversations, *, max_new_tokens: Sequence[int] | None = None
    ) -> tuple[Conversations, Conversations, list[str]]:
        """Encode what waits in the conversations and sample a turn for each.

        Args:
            prompt: B conversations.
            max_new_tokens: a budget per row that overrides the sampling parameters'. No turn is
                longer than the engine's ``max_model_len`` leaves room for.

        Returns:
            The encoded prompts, the conversations with the policy's turn (a row that could not be
            generated is left as it was), and why each turn ended.
        """
        prompt, refused = self.encoder.encode_rows(prompt)
        if refused:
            accepted = torch.tensor([i not in refused for i in range(len(prompt))])
            budgets = max_new_tokens or [self.sampling.max_new_tokens] * len(prompt)
            prompt, full, reasons = self._respond_some(prompt, accepted, budgets)
            for row, error in refused.items():
                reasons[row] = f"error: {error}"
            return prompt, full, reasons
        version = self.policy_version
        ids, images = ids_and_images(prompt)
        if not ids:
            return prompt, prompt, []
        budgets = max_new_tokens or [self.sampling.max_new_tokens] * len(ids)
        further: dict[str, Any] = {"images": images} if any(images) else {}
        generations = self.engine.generate(
            ids,
            self.sampling,
            max_new_tokens=[
                self.bounded_turn(budget, len(row))
                for budget, row in zip(budgets, ids, strict=True)
            ],
            **further,
        )
        if self.encoder.images is not None:
            generations = [self._without_media(generation) for generation in generations]
        full = self.append_generations(prompt, generations, version)
        return prompt, full, [finish_reason_of(g) for g in generations]

    def _without_media(self, generation: Generation) -> Generation:
        """A response, or an error where it holds a token that stands for an image."""
        assert self.encoder.images is not None
        drawn = set(generation.ids) & set(self.encoder.images.never_drawn)
        if not drawn:
            return generation
        return Generation(
            [], [], "error", f"the model drew {sorted(drawn)}, which stand for images"
        )

    def append_generations(
        self, prompt: Conversations, generations: Sequence[Generation], version: int
    ) -> Conversations:
        """Conversations with the turns that an engine has drawn.

        Args:
            prompt: B encoded conversations.
            generations: B; a row that could not be generated is left as it was.
            version: of the weights, where the engine did not say.
        """
        texts = self.encoder.decode_responses([g.ids for g in generations])
        return prompt.append_turns(
            [self._turn(g, text, version) for g, text in zip(generations, texts, strict=True)]
        )

    def bounded_turn(self, budget: int, num_prompt_tokens: int) -> int:
        """Most tokens of a turn, given the room that the engine's ``max_model_len`` leaves.

        Args:
            budget: most tokens of it.
            num_prompt_tokens: what it continues.
        """
        limit = getattr(self.engine, "max_model_len", None)
        room = budget if limit is None else limit - num_prompt_tokens
        # Without any room the engine refuses the row, and says why.
        return min(budget, room) if room > 0 else budget

    def _turn(self, generation: Generation, text: str, version: int) -> Turn | None:
        """What the engine sampled, as a turn; ``None`` where it could not."""
        if generation.finish_reason == "error":
            return None
        extra: dict[str, Sequence[float]] = {}
        if self.sampling.untempered_log_probs:
            same = self.sampling.is_own_softmax
            extra[UNTEMPERED_LOG_PROBS] = (
                generation.log_probs if same else generation.untempered_log_probs
            )
        if self.sampling.entropy:
            extra[ENTROPY] = generation.entropies
        message = {"role": "assistant", "content": text}
        versions = generation.token_versions(version)
        return Turn(generation.ids, generation.log_probs, message, versions, extra)

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> int:
        """Replace the engine's weights, all or none.

        Args:
            state_dict: parameter name to value.
            version: what the new weights are called; one more than the present when not given.

        Returns:
            The policy version that the next tokens are stamped with.

        Raises:
            ValueError: the engine refuses the update; the old weights and version stay.
        """
        weights = state_dict
        as_it_is = isinstance(weights, AdapterWeights) or (
            isinstance(weights, LazyWeights) and getattr(self.engine, "reads_in_order", False)
        )
        if not as_it_is:
            weights = {name: value.detach() for name, value in weights.items()}
        self.engine.update_weights(weights, version=version)
        return self.policy_version


def _any_sampling(sampling: SamplingParameters) -> None:
    """What an engine that says nothing refuses."""


def finish_reason_of(generation: Generation) -> str:
    """Why a turn ended: ``"stop"``, ``"length"``, or ``"error: ..."``."""
    if generation.error is not None:
        return f"error: {generation.error}"
    return generation.finish_reason

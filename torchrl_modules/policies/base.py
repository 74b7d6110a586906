"""Base of every policy, whatever its engine: read prompts, generate, write the layout.

A policy reads prompts to go on from, or full rows to score; it writes turns with their tokens,
masks and log-probs, or scores.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    lazy_stack,
)
from tensordict.nn import TensorDictModuleBase
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_data.batched_object import view_of, write_objects
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts, check_type, one_of
from torchrl_data.conversation import Conversations, Source, Turn, ids_and_images
from torchrl_data.conversation_io import (
    active_rows,
    row_tensordicts,
    stored_conversations,
    write_parts,
)
from torchrl_data.conversation_view import ConversationView
from torchrl_data.foreign_conversations import read_fulls, read_prompts
from torchrl_data.images import images_of
from torchrl_data.keys import (
    ASSISTANT_MASK,
    ATTENTION_MASK,
    FINISH_REASON,
    FULL,
    HISTORY,
    INPUT_MODES,
    MAX_NEW_TOKENS,
    PROMPT,
    RESPONSE,
    TEXT,
    TOKENS,
    TOKENS_FULL,
    TOKENS_PROMPT,
)
from torchrl_data.layout import TOKEN_GROUPS
from torchrl_data.ragged.packed import (
    completed_experts,
    entries_of,
    pack,
    pad,
    read_experts,
    read_images,
    read_rows,
    read_sampling_masks,
    unpack,
)
from torchrl_data.ragged.padded import padded_rows
from torchrl_data.ragged.token_entries import TokenEntries
from torchrl_data.releases import warn_untested
from torchrl_data.sampling_masks import SamplingMasks
from torchrl_data.stop_reason import FinishReason
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.rendering_identity import check_same_rendering
from torchrl_modules.engines.checked_generation import check_engine, checked, seeded
from torchrl_modules.engines.engine import Engine, Generation
from torchrl_modules.sampling.parameters import SamplingParameters, requested_sampling
from torchrl_modules.sampling.repeats import repeat_rows
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.agent_weights import AgentWeights
from torchrl_modules.weights.lazy_weights import LazyWeights, copied_weights


class RowsToScore(NamedTuple):
    """Rows whose log-probs are asked for."""

    ids: list[Tensor]
    """B tensors, int64 ``[T]``, without padding."""
    masks: list[Tensor]
    """B tensors, bool ``[T]``: the tokens to score."""
    keep: list[Tensor] | None = None
    """Where the tokens are in a padded layout, bool; ``None`` if the rows were ragged."""
    known: Sequence[bool] = ()
    """Per row: all of its tokens are in the vocabulary. Of the others nothing can be scored."""
    media: Sequence[Sequence[str]] = ()
    """Images of each row, in base 64; empty where no row has any."""
    sets: SamplingMasks | None = None
    """What every token of the rows was drawn from; ``None`` where nothing was recorded."""
    experts: list[Tensor] | None = None
    """B tensors ``[T, L, S]``: where each token was sent; ``None`` where nothing was recorded."""

    @property
    def images(self) -> list[Sequence[str]] | None:
        """The images of the rows of :meth:`packed`, or ``None`` where no row has any."""
        if not any(self.media):
            return None
        rows = zip(self.ids, self.known, self.media, strict=True)
        return [its if known else [] for ids, known, its in rows if len(ids)]

    @property
    def packed_experts(self) -> Tensor | None:
        """The experts of the tokens of :meth:`packed`, ``[N, L, S]``, or ``None``."""
        return None if self.experts is None else torch.cat(self.experts)

    @property
    def sampling_masks(self) -> SamplingMasks | None:
        """The sets of the tokens that can be scored, or ``None`` where none was recorded."""
        return None if self.sets is None else self.sets.take(pack(self.scored)[0])

    @property
    def scored(self) -> list[Tensor]:
        """B tensors, bool ``[T]``: the tokens that can be scored."""
        return [
            mask if known else torch.zeros_like(mask)
            for mask, known in zip(self.masks, self.known, strict=True)
        ]

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids ``[N]``, lengths of the rows that hold any, and what can be scored, bool ``[N]``."""
        ids, lengths = pack(
            [
                row if known else torch.zeros_like(row)
                for row, known in zip(self.ids, self.known, strict=True)
            ]
        )
        return ids, lengths[lengths > 0], pack(self.scored)[0]

    def spread(self, values: Tensor) -> list[Tensor]:
        """Scores to the places of their tokens."""
        # values: [K], of what can be scored.
        # Gives B tensors [T]: 0 where nothing is asked for, NaN where it can't be scored.
        mask, lengths = pack(self.scored)
        flat = torch.zeros(len(mask), dtype=values.dtype, device=values.device)
        rows = unpack(flat.masked_scatter(mask.to(flat.device), values), lengths)
        return [
            row if known else row.masked_fill(asked.to(row.device), torch.nan)
            for row, asked, known in zip(rows, self.masks, self.known, strict=True)
        ]

    def columns(self, rows: Sequence[Tensor], side: Literal["left", "right"] = "right") -> Tensor:
        """Scores as ``[B, T]``, in the columns of the tokens if they came padded."""
        if self.keep is None:
            return pad(rows, value=0, side=side)
        placed = [
            row.new_zeros(len(keep)).masked_scatter(keep.to(row.device), row)
            for row, keep in zip(rows, self.keep, strict=True)
        ]
        return torch.stack(placed)


def rows_to_score(batch: TensorDictBase, policy: "LLMWrapperBase") -> RowsToScore:
    """Full rows and which of their tokens to score."""
    # Those are the tokens of the assistant mask. Where there is none they are the response, or
    # what the assistant says in a history, or everything but the first token. A row with a
    # token outside the model's vocabulary is marked, see `known`.
    # batch: of B rows with `(mode, "full")`; ragged `("tokens", "full")` beside an assistant
    # mask is enough in every mode.
    mode, encoder, who = policy.input_mode, policy.encoder, policy._get_name()
    keep = None
    starts: Sequence[int] = ()
    media: Sequence[Sequence[str]] = ()
    sets: SamplingMasks | None = None
    experts: list[Tensor] | None = None
    is_record = stored_conversations(batch, TOKENS, FULL) is not None
    if not is_record and read_rows(batch, TOKENS_FULL) is not None:
        entries = TokenEntries(batch, FULL, who=who)
        ids = [torch.tensor(row, dtype=torch.int64) for row in entries.ids()]
        keep, media = entries.keep, read_images(batch) or ()
        sizes = [len(row) for row in keep or ids]
        sets = read_sampling_masks(batch, sizes, who=who)
        if sets is not None and keep is not None:
            sets = sets.take(torch.cat(keep))
        experts = read_experts(batch, sizes, who=who)
        if experts is not None and keep is not None:
            experts = [own[real] for own, real in zip(experts, keep, strict=True)]
        masks = entries.aligned(ASSISTANT_MASK)
        starts = [0] * len(ids)
        if masks is None and read_rows(batch, TOKENS_PROMPT) is not None:
            starts = [len(row) for row in TokenEntries(batch, PROMPT, who=who).ids()]
    else:
        fulls = read_fulls(batch, mode, encoder=encoder, who=who)
        rows = range(len(fulls))
        if mode == HISTORY and stored_conversations(batch, mode, FULL) is None:
            encoded = encoder.encode_chats([fulls.messages(i) for i in rows])
            ids = [torch.tensor(row.ids) for row in encoded]
            masks = [torch.tensor(row.sources) == Source.MODEL for row in encoded]
            media = [images_of(fulls.messages(i)) for i in rows]
        else:
            ids = [fulls.token_ids(i) for i in rows]
            masks = None
            if stored_conversations(batch, mode, FULL) is not None:
                masks = [fulls.assistant_mask(i) for i in rows]
                media = [fulls.images(i) for i in rows]
                sets, experts = _stored_sets(fulls), _stored_experts(fulls)
            starts = [fulls.position(i).response_start for i in rows]
    if masks is None:  # what follows the prompts; nothing predicts the first token of a row
        masks = [torch.arange(len(row)) >= max(n, 1) for row, n in zip(ids, starts, strict=True)]
    for i, mask in enumerate(masks):
        if bool(mask[:1].any()):
            raise ValueError(
                f"{who}: the mask of row {i} has its first token, which nothing predicts."
            )
    known = [bool(((row >= 0) & (row < policy.vocab_size)).all()) for row in ids]
    return RowsToScore(ids, [mask.bool() for mask in masks], keep, known, media, sets, experts)


def _stored_experts(fulls: Conversations) -> list[Tensor] | None:
    rows = [fulls.routed_experts(i) for i in range(len(fulls))]
    sizes = [fulls.num_tokens(i) for i in range(len(fulls))]
    return completed_experts(rows, sizes, who="a policy")


def _stored_sets(fulls: Conversations) -> SamplingMasks | None:
    rows = [fulls.sampling_masks(i) for i in range(len(fulls))]
    if not any(rows):
        return None
    pairs = zip(rows, range(len(fulls)), strict=True)
    return SamplingMasks.of(s for own, i in pairs for s in own or [b""] * fulls.num_tokens(i))


def set_groups(batch: TensorDictBase, groups: TensorDictBase, *, padded: bool = False) -> None:
    """Set groups of token rows; entries of other layouts give way to them."""
    for name in list(groups.keys()):
        stored = batch.get(name, None)
        stored = None if stored is None or is_non_tensor(stored) else entries_of(stored)
        if isinstance(stored, LazyStackedTensorDict):
            stored.update(entries_of(groups.get(name)))
            continue
        entries, kind = groups.get(name), TOKEN_GROUPS.get(name)
        if kind is not None and not isinstance(entries, kind):
            if padded:
                entries.set("padded", NonTensorData(True, batch_size=entries.batch_size))
            entries = kind._from_tensordict(entries, {})
        batch.set(name, entries)


def write_scores(
    batch: TensorDictBase, rows: RowsToScore, values: Mapping[Any, Sequence[Tensor]]
) -> None:
    """Write what was scored, aligned with the full tokens; those too, if the batch lacks them."""
    # values: by entry, B tensors [T] without padding.
    if rows.keep is not None:
        for key, scored in values.items():
            batch.set(key, rows.columns(scored).reshape(*batch.batch_size, -1))
        return
    columns: dict[Any, Sequence[Tensor]] = dict(values)
    if read_rows(batch, TOKENS_FULL) is None:
        columns[TOKENS_FULL] = rows.ids
        columns[ASSISTANT_MASK] = rows.masks
        columns[ATTENTION_MASK] = [torch.ones_like(mask) for mask in rows.masks]
    values_of_rows = zip(*columns.values(), strict=True)
    scored = [TensorDict(dict(zip(columns, row, strict=True))) for row in values_of_rows]
    set_groups(batch, lazy_stack(scored).reshape(batch.batch_size))


class LLMWrapperBase(ChecksAttributes, TensorDictModuleBase):
    """A policy: reads ``prompt``, samples, and writes ``response``, ``full``, masks and log-probs.

    Args:
        engine: draws the tokens. Where it reads images (``engine.images``), messages may hold them,
            and the tokens that stand for them are never drawn; elsewhere a row with images is
            refused.
        tokenizer: a fast tokenizer.
        generate_kwargs: sampling parameters by name, or a
            :class:`~torchrl_modules.sampling.parameters.SamplingParameters`.
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
        warn_untested("torch", "tensordict", "torchrl", "transformers")
        requested = requested_sampling(
            generate_kwargs, untempered_log_probs=untempered_log_probs, entropy=entropy
        )
        who = self._get_name()
        self.input_mode = one_of("input_mode", input_mode, INPUT_MODES, who=who)
        """What prompts are: ``"history"``, ``"text"`` or ``"tokens"``."""
        self.engine: Engine = self._checked_engine(engine)
        self.tokenizer = tokenizer
        self.write_tokens = write_tokens
        self.pad_output: bool = self._checked_change("pad_output", pad_output)
        self.num_samples: int | None = self._checked_change("num_samples", num_samples)
        self.encoder = self._make_encoder(
            chat_template=chat_template,
            chat_template_name=chat_template_name,
            chat_template_kwargs=chat_template_kwargs,
        )
        # Whose rendering of shown text and tokens was found to be that of this encoder.
        self._compared: object = self.encoder
        self.sampling = requested
        self.in_keys: list[NestedKey] = [(input_mode, PROMPT)]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.out_keys: list[NestedKey] = [(input_mode, FULL), FINISH_REASON]  # pyright: ignore[reportIncompatibleVariableOverride]

    changeable = frozenset({"engine", "num_samples", "pad_output", "write_tokens"})

    def _make_encoder(self, **template: Any) -> ConversationEncoder:
        """The encoder of its tokenizer and engine, with these arguments of the template."""
        own_ends: Sequence[int] = getattr(self.engine, "end_token_ids", ())
        return ConversationEncoder(
            self.tokenizer,
            processor=getattr(self.engine, "images", None),
            end_token_ids=[i for i in own_ends if 0 <= i < self.vocab_size],
            **template,
        )

    def _checked_change(self, name: str, value: Any) -> Any:
        pads = value if name == "pad_output" else getattr(self, "pad_output", False)
        writes = value if name == "write_tokens" else getattr(self, "write_tokens", True)
        if pads and not writes:
            raise ValueError(
                f"{self._get_name()}: pad_output pads what write_tokens writes; write_tokens is "
                "False."
            )
        if name == "engine":
            check = getattr(self._checked_engine(value), "check_sampling", None)
            if check is not None:
                check(self.sampling)
        if name == "num_samples":
            check_counts(self._get_name(), num_samples=value)
        return value

    def _checked_engine(self, engine: Any) -> Engine:
        check_engine(engine, who=self._get_name())
        return engine

    @property
    def sampling(self) -> SamplingParameters:
        """The distribution that turns are drawn from, and where they end; it may be set.

        What is drawn from then on is drawn from it: set it between two batches, because a loss
        scores all of its rows at one temperature.
        """
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: SamplingParameters) -> None:
        check_type("sampling", sampling, SamplingParameters, who=self._get_name())
        self._sampling = self._completed(sampling)
        self._greedy = replace(self._sampling, temperature=0.0)

    @property
    def drawn_by(self) -> SamplingParameters:
        """Parameters of the next turn: :attr:`sampling`, or those of TorchRL's exploration type.

        In ``set_exploration_type(ExplorationType.DETERMINISTIC)``, and with ``MODE``, it is the
        most likely token, as with ``temperature=0``. Log-probs are then those of the distribution
        at temperature 1, penalties, bias and truncation applied.

        Raises:
            ValueError: the type is ``MEAN`` or ``MEDIAN``, which tokens have not.
        """
        kind = interaction_type()
        if kind in (None, InteractionType.RANDOM):
            return self._sampling
        if kind not in (InteractionType.DETERMINISTIC, InteractionType.MODE):
            raise ValueError(
                f"{self._get_name()}: tokens have no {kind.value}: take ExplorationType.RANDOM or "
                "DETERMINISTIC."
            )
        return self._greedy

    def _completed(self, sampling: SamplingParameters) -> SamplingParameters:
        """Sampling parameters with what the model's template and engine add, checked."""
        if self.encoder.images is not None:
            never = dict.fromkeys(self.encoder.images.never_drawn, -100.0)
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **never})
        if sampling.stop_token_ids is None:
            sampling = replace(sampling, stop_token_ids=self.encoder.stop_token_ids)
        for name in ("stop_token_ids", "logit_bias"):
            beyond = [i for i in getattr(sampling, name) or () if i >= self.vocab_size]
            if beyond:
                raise ValueError(
                    f"{self._get_name()}: {name} {beyond} are not in the vocabulary of "
                    f"{self.vocab_size} tokens, so they would never be drawn."
                )
        if sampling.sampling_mask and not sampling.truncates:
            raise ValueError(
                f"{self._get_name()}: sampling_mask records what top_k, top_p and min_p leave, and "
                "none of them leaves anything out. Set one of them, or leave sampling_mask out."
            )
        sampling = sampling.with_tokenizer(self.tokenizer)
        if (check := getattr(self.engine, "check_sampling", None)) is not None:
            check(sampling)
        return sampling

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve; the next tokens are stamped with it."""
        return self.engine.version

    @property
    def vocab_size(self) -> int:
        """Token ids are below it: the model's, where the engine knows it, or the tokenizer's.

        A model's vocabulary is often padded beyond its tokenizer's, and such ids can be drawn.
        """
        known = getattr(self.engine, "vocab_size", None)
        return len(self.tokenizer) if known is None else known

    @property
    def temperature(self) -> float:
        """Divisor of the logits when a token is drawn; 0 for the most likely one."""
        return self.sampling.temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        self.sampling = replace(self.sampling, temperature=temperature)

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
            TypeError: it is no TensorDict.
        """
        if not isinstance(tensordict, TensorDictBase):
            raise TypeError(
                f"{self._get_name()} takes a TensorDict, as env.reset() gives it, got "
                f"{type(tensordict).__name__}: {tensordict!r:.60}. For messages of your own: "
                'TensorDict({"history": ChatHistory(prompt=History.from_chats([messages]))}, '
                "batch_size=[1])."
            )
        prompt = self._read_prompts(tensordict)
        if self.num_samples is not None:
            prompt = self.encoder.encode_rows(prompt).conversations
            tensordict, prompt = repeat_rows(tensordict, prompt, self.num_samples)
        active = active_rows(tensordict)
        budgets = tensordict.get(MAX_NEW_TOKENS, None)
        if budgets is not None:
            active = active & (budgets.view(-1) > 0)
            budgets = budgets.view(-1).clamp(max=self.sampling.max_new_tokens).tolist()
        own = self._row_arguments(tensordict)
        if bool(active.all()):
            prompt, full, reasons = self.respond(prompt, max_new_tokens=budgets, **own)
        else:
            rows = active.nonzero().squeeze(-1).tolist()
            budgets = None if budgets is None else [budgets[i] for i in rows]
            own = {name: [values[i] for i in rows] for name, values in own.items()}
            new_prompt, new_full, new_reasons = self.respond(
                prompt[rows], max_new_tokens=budgets, **own
            )
            index, reasons = list(range(len(prompt))), [""] * len(prompt)
            for new, row in enumerate(rows):
                index[row] = len(prompt) + new
                reasons[row] = new_reasons[new]
            prompt, full = (
                Conversations.cat([prompt, new])[index] for new in (new_prompt, new_full)
            )
        self._write_turns(tensordict, prompt, full)
        write_objects(tensordict, FINISH_REASON, reasons)
        return tensordict

    def _row_arguments(self, batch: TensorDictBase) -> dict[str, Sequence[Any]]:
        """Further arguments of :meth:`respond`, which have a value of each row."""
        del batch
        return {}

    def _read_prompts(self, batch: TensorDictBase) -> Conversations:
        """The conversations to go on with, from an environment or built by hand."""
        mode = self.input_mode
        stored = stored_conversations(batch, mode, PROMPT)
        if stored is None:
            return read_prompts(batch, mode, encoder=self.encoder, who=self._get_name())
        view = view_of(stored.leaf) if mode != HISTORY else None
        # What an environment shows as text or tokens is what the policy samples from.
        if isinstance(view, ConversationView) and view.encoder is not self._compared:
            if isinstance(view.encoder, ConversationEncoder):
                check_same_rendering(view.encoder, self.encoder)
            self._compared = view.encoder
        return stored.conversations

    def _write_turns(
        self, batch: TensorDictBase, prompt: Conversations, full: Conversations
    ) -> None:
        """Write a turn of each row; its history in every mode."""
        parts = {PROMPT: prompt, RESPONSE: full, FULL: full}
        # Where the tokens are written as ragged rows, the record is in the history alone.
        if self.input_mode == TEXT or (self.input_mode == TOKENS and not self.write_tokens):
            write_parts(batch, parts, mode=self.input_mode, encoder=self.encoder)
            del parts[PROMPT]
        write_parts(batch, parts)
        if self.write_tokens:
            rows = row_tensordicts(full)
            pad_id: Any = self.tokenizer.pad_token_id or 0
            groups = padded_rows(rows, pad_token_id=pad_id) if self.pad_output else lazy_stack(rows)
            set_groups(batch, groups.reshape(batch.batch_size), padded=self.pad_output)

    def respond(
        self,
        prompt: Conversations,
        *,
        max_new_tokens: Sequence[int] | None = None,
        agents: Sequence[str] | None = None,
    ) -> tuple[Conversations, Conversations, list[str]]:
        """Encode what waits in the conversations and sample a turn for each.

        Args:
            prompt: B conversations.
            max_new_tokens: a budget per row that overrides the sampling parameters'. No turn is
                longer than the engine's ``max_model_len`` leaves room for.
            agents: whose turns they are, for :class:`~torchrl_modules.AgentPolicies`.

        Returns:
            The encoded prompts, the conversations with the policy's turn (a row that could not be
            generated is left as it was), and why each turn ended.
        """
        encoded, refused = self.encoder.encode_rows(prompt)
        version = self.policy_version
        ids, images = ids_and_images(encoded)
        budgets = max_new_tokens or [self.sampling.max_new_tokens] * len(ids)
        good = [i for i in range(len(ids)) if i not in refused]
        media = [images[i] for i in good]
        further: dict[str, Any] = {"images": media} if any(media) else {}
        further["max_new_tokens"] = [self.bounded_turn(budgets[i], len(ids[i])) for i in good]
        if agents is not None:
            further["agents"] = [agents[i] for i in good]
        asked, sampling = [ids[i] for i in good], self.drawn_by
        all_seeds = sampling.turn_seeds(encoded)
        seeds = None if all_seeds is None else [all_seeds[i] for i in good]
        params, own = seeded(self.engine, sampling, seeds)
        drawn = self.engine.generate(asked, params, **further, **own) if asked else []
        drawn = checked(self.engine, drawn, sampling, len(asked))
        answers = {i: Generation([], [], "error", str(why)) for i, why in refused.items()}
        for i, generation in zip(good, drawn, strict=True):
            answers[i] = self.without_drawn_media(generation)
        given = [answers[i] for i in range(len(ids))]
        full = self.append_generations(encoded, given, version, sampling)
        return encoded, full, list(map(finish_reason_of, given, budgets))

    def without_drawn_media(self, generation: Generation) -> Generation:
        """The response, or an error where the model drew what stands for an image.

        Args:
            generation: of an engine.
        """
        never = () if self.encoder.images is None else self.encoder.images.never_drawn
        if wrong := set(never).intersection(generation.ids):
            error = f"the model drew {sorted(wrong)}, which stand for images"
            return Generation([], [], "error", error)
        return generation

    def append_generations(
        self,
        prompt: Conversations,
        generations: Sequence[Generation],
        version: int,
        params: SamplingParameters | None = None,
    ) -> Conversations:
        """Conversations with the turns that an engine has drawn.

        Args:
            prompt: B encoded conversations.
            generations: B; a row that could not be generated is left as it was.
            version: of the weights, where the engine did not say.
            params: by which they were drawn; :attr:`sampling` when not given.
        """
        params = params or self.sampling
        texts = self.encoder.decode_responses([g.ids for g in generations])
        turns: list[Turn | None] = []
        for generation, text in zip(generations, texts, strict=True):
            is_more = params.untempered_log_probs or params.entropy or params.kept_counts
            extra = generation.reported(params) if is_more else {}
            message = {"role": "assistant", "content": text}
            versions = generation.token_versions(version) if generation.versions else version
            sets = generation.sampling_masks if params.sampling_mask else ()
            own = (generation.ids, generation.log_probs, message, versions, extra, sets)
            turn = Turn(*own, generation.routed_experts if params.routed_experts else None)
            turns.append(None if generation.finish_reason == "error" else turn)
        return prompt.append_turns(turns)

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
            RuntimeError: the engine took the update, and its version is another one.
        """
        before = self.policy_version
        weights = _as_taken(state_dict, self.engine)
        self.engine.update_weights(weights, version=version)
        after, due = self.policy_version, before + 1 if version is None else version
        if after != due:
            raise RuntimeError(
                f"{type(self.engine).__name__}.update_weights: the engine has version {after} "
                f"after the update, and {due} is due. Set version to the one that was given, or "
                "to one more than before where that is None."
            )
        return after


def _as_taken(weights: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
    """Weights as an engine reads them: detached, and made whole where it needs them so."""
    if isinstance(weights, AgentWeights):
        return AgentWeights(
            {name: _as_taken(own, engine.by_agent.get(name)) for name, own in weights.items()}
        )
    if isinstance(weights, LazyWeights):
        if getattr(engine, "reads_in_order", False):
            return weights
        dtype = getattr(engine, "update_dtype", None)  # never whole on a GPU
        return copied_weights(weights, dtype=dtype, device="cpu")
    if isinstance(weights, AdapterWeights):
        return weights
    return {name: value.detach() for name, value in weights.items()}


def finish_reason_of(generation: Generation, budget: int) -> str:
    """Return why a turn ended, see :class:`~torchrl_data.FinishReason`.

    Args:
        generation: of an engine.
        budget: the tokens that it might have had: one that was cut before that was cut by the
            model's own length.
    """
    if generation.error is not None:
        return f"{FinishReason.ERROR.value}: {generation.error}"
    if generation.finish_reason == FinishReason.LENGTH and len(generation.ids) < budget:
        return FinishReason.CONTEXT_LENGTH.value
    return generation.finish_reason

"""Teachers: models in this process, or behind a URL, that score what a student sampled.

Shape legend: N packed tokens, B sequences, K target tokens.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from config import TeacherConfig
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_agents.models.loading import load_model, load_tokenizer
from torchrl_agents.models.sources import model_folder
from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_data import ConversationEncoder, SpanAligner
from torchrl_data.positions import num_positions
from torchrl_data.token_scorer import TokenScorer, TokenScores
from torchrl_modules import LLMWrapperBase, TransformersWrapper, local_model
from torchrl_modules.engines.json_client import JSONClient
from torchrl_modules.policies.loading import load_causal_lm
from torchrl_modules.vllm.access_control import TOKEN_VARIABLE

_LOG = logging.getLogger("torchrl_agents")
NUM_CONNECTIONS: Final = 32
"""Sequences that a server scores at the same time."""


def build_teacher(
    cfg: TeacherConfig,
    student: LLMWrapperBase,
    policy: PolicyConfig,
    *,
    max_model_len: int | None,
    load: Callable[..., PreTrainedModel] = load_causal_lm,
) -> Any:
    """The teacher, which scores the student's tokens.

    Args:
        cfg: who it is.
        student: its vocabulary must be the teacher's, unless ``cfg`` names a tokenizer.
        policy: device, dtype and attention, as the student's.
        max_model_len: most tokens of what the student says; ``None`` for no limit.
        load: gives the model; a dry run has it without weights, to be refused or thrown away.

    Raises:
        SettingsError: it can't be loaded or reached, or not score all that the student may say.
    """
    assert cfg.model is not None
    if cfg.url is not None:
        return _reach_teacher(cfg, student, policy, max_model_len)
    settings = replace(policy, gradient_checkpointing=False, quantization=None)
    if cfg.tokenizer is not None:  # what the student's template needs is not the teacher's
        settings = replace(settings, chat_template=None, add_control_tokens=False)
    source = model_folder(cfg.model)
    model, tokenizer = load_model(settings, source, who="teacher.model", load=load)
    encoder = None if cfg.tokenizer is None else teacher_encoder(cfg, student, policy)
    if encoder is None and tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise SettingsError(
            f"teacher.model={cfg.model!r} has another vocabulary than the student: its log-probs "
            "are of other tokens. Set teacher.tokenizer=own, and it judges spans of text; or take "
            "a teacher of the student's family (embedded models are one family where task and "
            "seed are the same)."
        )
    if encoder is None:
        _check_length(cfg, num_positions(model), max_model_len)
    if load is not load_causal_lm:
        return None
    scorer = TransformersWrapper(
        model.eval().requires_grad_(False),
        tokenizer=tokenizer if encoder is None else encoder.tokenizer,
        generate_kwargs=student.sampling,
        generate=False,
    )
    if encoder is None:
        return scorer
    return SpanTeacher(scorer, encoder, scorer.engine.max_model_len)  # type: ignore[attr-defined]


def _reach_teacher(
    cfg: TeacherConfig, student: LLMWrapperBase, policy: PolicyConfig, max_model_len: int | None
) -> "ServerTeacher | SpanTeacher":
    """The teacher at a URL, see :func:`build_teacher`."""
    try:
        teacher = ServerTeacher(str(cfg.url), str(cfg.model), timeout_s=cfg.timeout_s)
    except ConnectionError as error:
        raise SettingsError(f"teacher.url: {error}") from error
    if cfg.tokenizer is not None:
        encoder = teacher_encoder(cfg, student, policy)
        if encoder is not None:
            return SpanTeacher(teacher, encoder, teacher.max_model_len - 1)
    if max_model_len is None or max_model_len >= teacher.max_model_len:
        raise SettingsError(
            f"The teacher at {cfg.url} takes {teacher.max_model_len} tokens, one of which it "
            f"needs itself, and the student {_says(max_model_len)}: set "
            f"policy.max_model_len={teacher.max_model_len - 1}, or serve a longer model."
        )
    return teacher


def _check_length(cfg: TeacherConfig, longest: int | None, max_model_len: int | None) -> None:
    """Check that a model here has positions for all that the student may say.

    Args:
        cfg: names the teacher.
        longest: most tokens of it; ``None`` where it names no limit.
        max_model_len: the student's.

    Raises:
        SettingsError: it has not; its scores beyond them would mean nothing.
    """
    if longest is not None and (max_model_len is None or max_model_len > longest):
        raise SettingsError(
            f"teacher.model={cfg.model!r} takes {longest} tokens, and the student "
            f"{_says(max_model_len)}: set policy.max_model_len={longest}, or take a teacher of a "
            "longer model."
        )


def _says(max_model_len: int | None) -> str:
    return "has no limit" if max_model_len is None else f"says up to {max_model_len}"


class SpanTeacher(NamedTuple):
    """A teacher that has another tokenizer than the student, and judges spans of text."""

    scorer: TokenScorer
    encoder: ConversationEncoder
    """Of its tokenizer and chat template."""
    max_model_len: int | None
    """Most tokens of a row that it takes."""


def teacher_encoder(
    cfg: TeacherConfig, student: LLMWrapperBase, policy: PolicyConfig
) -> ConversationEncoder | None:
    """The tokenizer and chat template of a teacher; ``None`` where they are the student's tokens.

    Args:
        cfg: names the tokenizer.
        student: it is compared with.
        policy: where files are, and what is trusted.

    Raises:
        SettingsError: there is no such tokenizer or template, or its spans can't be found.
    """
    assert cfg.tokenizer is not None
    assert cfg.model is not None
    name = cfg.model if cfg.tokenizer == "own" else cfg.tokenizer
    with refusing(f"teacher.tokenizer={cfg.tokenizer}"):
        source = local_model(name)
        settings = replace(policy, chat_template=None, chat_template_name=cfg.chat_template_name)
        tokenizer = load_tokenizer(settings, source)
        if tokenizer.get_vocab() == student.tokenizer.get_vocab():
            _LOG.info("The teacher has the student's tokens: it judges them one by one.")
            return None
        encoder = ConversationEncoder(tokenizer, chat_template_name=cfg.chat_template_name)
        SpanAligner(student.encoder, encoder)
    return encoder


class ServerTeacher(TokenScorer):
    """Scores tokens at a vLLM server, by the log-probs of a prompt.

    The server must have the student's tokenizer: ids are sent as they are.

    Args:
        url: ``http://host:port/v1``, or ``unix:///path`` of a socket file
            (:func:`~torchrl_modules.start_server`).
        model: its name there.
        timeout_s: deadline of one sequence.

    Raises:
        ConnectionError: nobody answers there, or nobody who has this model.
        ValueError: it is no such URL.
    """

    temperature = 1.0

    def __init__(self, url: str, model: str, *, timeout_s: float = 600.0) -> None:
        self._model = model
        token = os.environ.get(TOKEN_VARIABLE) or os.environ.get("OPENAI_API_KEY")
        self._client = partial(
            JSONClient, url, timeout_s, token=token, num_connections=NUM_CONNECTIONS
        )
        with closing(self._client()) as client:
            models = _ask(client, "GET", "/v1/models").get("data", ())
        lengths = {each.get("id"): each.get("max_model_len") for each in models}
        if lengths.get(model) is None:
            raise ConnectionError(
                f"The server at {url} has no model {model!r}, or is not vLLM: it has {lengths}."
            )
        self.max_model_len: int = lengths[model]
        """Most tokens of a sequence and of what is drawn after it, which is one at least."""

    def score_packed(
        self, ids: Tensor, lengths: Tensor, target_mask: Tensor, **options: Any
    ) -> TokenScores:
        """Score the masked tokens of packed sequences, see :class:`TokenScorer`.

        Raises:
            ConnectionError: the server does not answer, or not with the log-probs of the prompt.
            ValueError: something is asked for that a server does not give.
        """
        if options.get("temperature", 1.0) != 1.0 or options.get("entropy"):
            asked = ", ".join(f"{name}={value}" for name, value in options.items())
            raise ValueError(
                f"A teacher behind a URL scores at temperature 1 and gives no entropy, got {asked}."
            )
        rows = [row.tolist() for row in ids.split(lengths.tolist())]
        with closing(self._client()) as client, ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            scores = torch.cat(list(pool.map(partial(self._score, client), rows)))
        return TokenScores(scores.to(ids.device)[target_mask])

    def _score(self, client: JSONClient, ids: list[int]) -> Tensor:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = _ask(client, "POST", "/v1/completions", body)
        try:
            found = answer["choices"][0]["prompt_logprobs"]
            # Nothing comes before the first token, so it has no log-prob.
            pairs = zip(ids[1:], found[1:], strict=True)
            of_rest = [float(each[str(i)]["logprob"]) for i, each in pairs]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConnectionError(
                f"The teacher at {client.url} gave no log-probs of a prompt of {len(ids)} tokens "
                f"({error!r}). It has to be vLLM, which knows prompt_logprobs."
            ) from error
        return torch.tensor([0.0, *of_rest])


def _ask(client: JSONClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    try:
        status, answer = client.request(method, path, body)
    except ConnectionError as error:
        raise ConnectionError(
            f"The teacher at {client.url} does not answer {path}: {error}"
        ) from error
    if status != 200 or not isinstance(answer, dict):
        raise ConnectionError(f"The teacher at {client.url} answers {path} with {status}: {answer}")
    return answer

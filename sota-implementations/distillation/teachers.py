"""Teachers: models in this process, or behind a URL, that score what a student sampled.

Shape legend: N packed tokens, B sequences, K target tokens.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore2
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_agents.dry_run.outline import outline
from torchrl_agents.engines.own_engines import model_folder
from torchrl_agents.recipe.policies import load_model
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_data.protocols import TokenScorer, TokenScores
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.policies.model_loading import load_causal_lm

NUM_CONNECTIONS: Final = 32
"""Sequences that a server scores at the same time."""


@dataclass
class TeacherConfig:
    """Who scores what the student sampled."""

    model: str | None = None
    """Hub id, local path or folder of a run; with url, its name at the server."""
    url: str | None = None
    """Of a vLLM server, http://host:port/v1 or unix:///path/of/the/socket; none loads the model in
    this process. TORCHRL_VLLM_TOKEN or OPENAI_API_KEY is sent where it is set."""
    timeout_s: float = 600.0
    """Deadline of the server's answer for one sequence."""


def check_teacher(cfg: TeacherConfig, policy: PolicyConfig) -> None:
    """What can be told before anything is loaded.

    Raises:
        ValueError: a server can't score what is sampled so.
    """
    if cfg.url is None:
        return
    if policy.temperature != 1.0:
        raise ValueError(
            "a server scores at temperature 1, and its log-probs compare with the student's only "
            f"there: set policy.temperature=1, not {policy.temperature}, or leave teacher.url out."
        )
    base_url(cfg.url)


def base_url(url: str) -> tuple[str, str | None]:
    """Where requests go to: the URL before ``/v1``, and the socket file if there is one.

    Raises:
        ValueError: it is no URL of a server.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return "http://localhost", parts.path
    if parts.scheme in ("http", "https") and parts.netloc:
        return url.rstrip("/").removesuffix("/v1"), None
    raise ValueError(f"url must be http://host:port/v1 or unix:///path, got {url!r}.")


def build_teacher(
    cfg: TeacherConfig, student: TransformersWrapper, policy: PolicyConfig, *, max_model_len: int
) -> Any:
    """The teacher, which scores the student's tokens.

    Args:
        cfg: who it is.
        student: its vocabulary must be the teacher's.
        policy: device, dtype and attention, as the student's.
        max_model_len: most tokens of what the student says.

    Raises:
        SettingsError: it can't be loaded or reached, or not score all that the student may say.
    """
    if cfg.url is not None:
        return _reach_teacher(cfg, cfg.url, max_model_len)
    model, tokenizer = _load_teacher(cfg, student, policy, load_causal_lm)
    return TransformersWrapper(
        model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        generate_kwargs=student.sampling,
        generate=False,
    )


def rehearse_teacher(
    cfg: TeacherConfig, student: LLMWrapperBase, policy: PolicyConfig, *, max_model_len: int
) -> None:
    """Raise what :func:`build_teacher` would, without loading its weights."""
    if cfg.url is not None:
        _reach_teacher(cfg, cfg.url, max_model_len)
    else:
        _load_teacher(cfg, student, replace(policy, device="meta"), outline)


def _reach_teacher(cfg: TeacherConfig, url: str, max_model_len: int) -> "ServerTeacher":
    assert cfg.model is not None
    try:
        teacher = ServerTeacher(url, cfg.model, timeout_s=cfg.timeout_s)
    except ConnectionError as error:
        raise SettingsError(f"teacher.url: {error}") from error
    if max_model_len >= teacher.max_model_len:
        raise SettingsError(
            f"The teacher at {url} takes {teacher.max_model_len} tokens, one of which it "
            f"needs itself, and the student says up to {max_model_len}: set "
            f"policy.max_model_len={teacher.max_model_len - 1}, or serve a longer model."
        )
    return teacher


def _load_teacher(
    cfg: TeacherConfig, student: LLMWrapperBase, policy: PolicyConfig, load: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    assert cfg.model is not None
    settings = replace(policy, gradient_checkpointing=False)
    source = model_folder(cfg.model)
    model, tokenizer = load_model(settings, source, who="teacher.model", load=load)
    if tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise SettingsError(
            f"teacher.model={cfg.model!r} has another vocabulary than the student: its log-probs "
            "are of other tokens. Take a teacher of the student's family; embedded models are one "
            "family where task and seed are the same."
        )
    return model, tokenizer


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
        self._url = url
        self._base, self._socket_file = base_url(url)
        self._model = model
        self._timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        token = os.environ.get("TORCHRL_VLLM_TOKEN") or os.environ.get("OPENAI_API_KEY")
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        with self._connections() as connections:
            models = self._ask(connections, "GET", "/v1/models").get("data", ())
        lengths = {each.get("id"): each.get("max_model_len") for each in models}
        if lengths.get(model) is None:
            raise ConnectionError(
                f"The server at {url} has no model {model!r}, or is not vLLM: it has {lengths}."
            )
        self.max_model_len: int = lengths[model]
        """Most tokens of a sequence and of what is drawn after it, which is one at least."""

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score the masked tokens of packed sequences, each given the tokens before it.

        Args:
            ids: int64 ``[N]``.
            lengths: int64 ``[B]``.
            target_mask: bool ``[N]``.
            temperature: only 1, which is what a server scores with.
            entropy: only False.

        Returns:
            Log-probs ``[K]`` in nats, float32.

        Raises:
            ConnectionError: the server does not answer, or not with the log-probs of the prompt.
            ValueError: something is asked for that a server does not give.
        """
        if temperature != 1.0 or entropy:
            raise ValueError(
                "A teacher behind a URL scores at temperature 1 and gives no entropy, got "
                f"temperature={temperature}, entropy={entropy}."
            )
        rows = [row.tolist() for row in ids.split(lengths.tolist())]
        with self._connections() as connections, ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            scores = torch.cat(list(pool.map(partial(self._score, connections), rows)))
        return TokenScores(scores.to(ids.device)[target_mask])

    def _connections(self) -> httpcore2.ConnectionPool:
        return httpcore2.ConnectionPool(max_connections=NUM_CONNECTIONS, uds=self._socket_file)

    def _score(self, connections: httpcore2.ConnectionPool, ids: list[int]) -> Tensor:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = self._ask(connections, "POST", "/v1/completions", body)
        try:
            found = answer["choices"][0]["prompt_logprobs"]
            # Nothing comes before the first token, so it has no log-prob.
            pairs = zip(ids[1:], found[1:], strict=True)
            of_rest = [float(each[str(i)]["logprob"]) for i, each in pairs]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConnectionError(
                f"The teacher at {self._url} gave no log-probs of a prompt of {len(ids)} tokens "
                f"({error!r}). It has to be vLLM, which knows prompt_logprobs."
            ) from error
        return torch.tensor([0.0, *of_rest])

    def _ask(
        self, connections: httpcore2.ConnectionPool, method: str, path: str, body: Any = None
    ) -> Any:
        content = b"" if body is None else json.dumps(body).encode()
        try:
            response = connections.request(
                method,
                self._base + path,
                headers=[*self._headers.items(), ("Content-Length", str(len(content)))],
                content=content,
                extensions={"timeout": self._timeouts},
            )
            answer = json.loads(response.content)
        except (
            *(httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError),
            ValueError,
        ) as error:
            raise ConnectionError(
                f"The teacher at {self._url} does not answer {path}: {error!r}."
            ) from error
        if response.status != 200:
            raise ConnectionError(
                f"The teacher at {self._url} answers {path} with {response.status}: {answer}"
            )
        return answer

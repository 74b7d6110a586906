"""Teachers: models in this process, or behind a URL, that score what a student sampled.

Shape legend: N packed tokens, B sequences, K target tokens.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from torchrl_agents.recipe.policies import load_model, model_folder
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_data.protocols import TokenScorer, TokenScores
from torchrl_modules import TransformersWrapper

NUM_CONNECTIONS: Final = 32
"""Sequences that a server scores at the same time."""


@dataclass
class TeacherConfig:
    """Who scores what the student sampled."""

    model: str | None = None
    """Hub id, local path or folder of a run; with url, its name at the server."""
    url: str | None = None
    """Of a vLLM server, http://host:port/v1; none loads the model in this process."""
    timeout_s: float = 600.0
    """Deadline of the server's answer for one sequence."""


def build_teacher(cfg: TeacherConfig, student: TransformersWrapper, policy: PolicyConfig) -> Any:
    """The teacher, which scores the student's tokens.

    Args:
        cfg: who it is.
        student: its vocabulary must be the teacher's.
        policy: device, dtype and attention, as the student's.

    Raises:
        SettingsError: it can't be loaded, or its vocabulary is another one.
    """
    assert cfg.model is not None
    if cfg.url is not None:
        return ServerTeacher(cfg.url, cfg.model, timeout_s=cfg.timeout_s)
    settings = replace(policy, gradient_checkpointing=False)
    model, tokenizer = load_model(settings, model_folder(cfg.model), who="teacher.model")
    if tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise SettingsError(
            f"teacher.model={cfg.model!r} has another vocabulary than the student: its log-probs "
            "are of other tokens. Take a teacher of the student's family."
        )
    return TransformersWrapper(
        model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        generate_kwargs=student.sampling,
        generate=False,
    )


class ServerTeacher(TokenScorer):
    """Scores tokens at a vLLM server, by the log-probs of a prompt.

    The server must have the student's tokenizer: ids are sent as they are.

    Args:
        url: ``http://host:port/v1``.
        model: its name there.
        timeout_s: deadline of one sequence.
    """

    temperature = 1.0

    def __init__(self, url: str, model: str, *, timeout_s: float = 600.0) -> None:
        self._url = f"{url.rstrip('/')}/completions"
        self._model = model
        self._timeout_s = timeout_s

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
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            scores = torch.cat(list(pool.map(self._score, rows)))
        return TokenScores(scores.to(ids.device)[target_mask])

    def _score(self, ids: list[int]) -> Tensor:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        request = Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urlopen(request, timeout=self._timeout_s) as reply:
                found = json.load(reply)["choices"][0]["prompt_logprobs"]
            # Nothing comes before the first token, so it has no log-prob.
            pairs = zip(ids[1:], found[1:], strict=True)
            of_rest = [float(each[str(i)]["logprob"]) for i, each in pairs]
        except (URLError, TimeoutError, KeyError, TypeError, ValueError) as error:
            raise ConnectionError(
                f"The teacher at {self._url} gave no log-probs of a prompt of {len(ids)} tokens: "
                f"{type(error).__name__}: {error}. It has to be vLLM, which knows prompt_logprobs."
            ) from error
        return torch.tensor([0.0, *of_rest])

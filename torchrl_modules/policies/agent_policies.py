"""Policies of several agents as one: each agent has weights of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data.batched_object import read_objects
from torchrl_data.keys import AGENT
from torchrl_data.sampling_masks import SamplingMasks
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.rendering_identity import check_same_rendering
from torchrl_data.token_scorer import TokenScores, check_scorer
from torchrl_modules.engines.agent_engines import AgentEngines
from torchrl_modules.sampling.parameters import SamplingParameters

from .base import LLMWrapperBase


class AgentPolicies(LLMWrapperBase):
    """Takes each agent's turns with that agent's policy.

    The agents are those of an :class:`~torchrl_envs.AgentProgram`: players of a game, a planner and
    who carries the plan out, a writer and a critic. A loss over all of them scores each row with
    its agent's policy; one that is never pushed stays as it is, such as an opponent. All policies
    render conversations alike and draw by the same parameters. They may be adapters over one model
    (:func:`models_over_one_base`), different models with one tokenizer, or clients of one server.

    Args:
        policies: for each agent its policy; several agents may have the same one.
        otherwise: the agent whose policy also takes the turns of agents that are not named here;
            without it such a turn fails, and its episode is not trained.

    Raises:
        ValueError: there are no policies, names can't be used, or policies differ in how they
            render, in their modes, or in what they draw from.
        TypeError: one is no policy.

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policies = AgentPolicies(
        ...     {
        ...         name: TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        ...         for name in ("first", "second")
        ...     }
        ... )
        >>> policies.by_agent["first"] is policies.by_agent["second"], policies.policy_version
        (False, 0)
    """

    def __init__(
        self, policies: Mapping[str, LLMWrapperBase], *, otherwise: str | None = None
    ) -> None:
        _check_policies(policies, otherwise)
        first = next(iter(policies.values()))
        self._encoder_of_all = first.encoder
        engines = {name: policy.engine for name, policy in policies.items()}
        super().__init__(
            AgentEngines(engines, otherwise),
            tokenizer=first.tokenizer,
            generate_kwargs=first.sampling,
            input_mode=first.input_mode,
            write_tokens=first.write_tokens,
            pad_output=first.pad_output,
        )
        self._modules_by_agent = torch.nn.ModuleList(policies.values())
        self._names = tuple(policies)

    changeable = LLMWrapperBase.changeable - {"engine", "num_samples"}

    def _make_encoder(self, **template: Any) -> ConversationEncoder:
        del template
        return self._encoder_of_all

    @property
    def by_agent(self) -> dict[str, LLMWrapperBase]:
        """The policy of each agent."""
        return dict(zip(self._names, self._modules_by_agent, strict=True))  # type: ignore[arg-type]

    @property
    def model(self) -> torch.nn.ModuleDict:
        """The model of each agent, by name; agents with one policy have one model.

        Raises:
            AttributeError: a policy has none in this process.
        """
        models: dict[str, Any] = {name: policy.model for name, policy in self.by_agent.items()}
        return torch.nn.ModuleDict(models)

    @property
    def trained(self) -> list[str]:
        """The agents whose policies have weights that are trained."""
        own = self.by_agent.items()
        return [name for name, p in own if any(value.requires_grad for value in p.parameters())]

    def trained_models(self) -> dict[str, torch.nn.Module]:
        """The models that are trained, each once, by the name of its first agent: what is pushed.

        Raises:
            AttributeError: a policy has no model in this process.
        """
        models, names = self.model, self.trained
        first = {id(models[name]): name for name in names[::-1]}
        return {name: models[name] for name in names if first[id(models[name])] == name}

    @property
    def otherwise(self) -> str | None:
        """The agent whose policy also takes the turns of agents without one."""
        return self._engines.otherwise

    @property
    def _engines(self) -> AgentEngines:
        return self.engine  # type: ignore[return-value]

    @property
    def drawn_by(self) -> SamplingParameters:
        """See the base class; what the agents' policies are trained for is the same.

        Raises:
            ValueError: one of them has been given another distribution.
        """
        for name, policy in self.by_agent.items():
            if policy.sampling != self.sampling:
                raise ValueError(
                    f"AgentPolicies: the policy of {name} scores {policy.sampling}, and turns are "
                    f"drawn by {self.sampling}. Set AgentPolicies.sampling, which sets all."
                )
        return super().drawn_by

    @LLMWrapperBase.sampling.setter
    def sampling(self, sampling: SamplingParameters) -> None:
        """Set the distribution of all agents."""
        LLMWrapperBase.sampling.__set__(self, sampling)
        for policy in self.__dict__["_modules"].get("_modules_by_agent", ()):
            policy.sampling = sampling

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in scoring passes; see `TransformersWrapper`."""
        return any(getattr(policy, "is_distributed", False) for policy in self.by_agent.values())

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        agents: Sequence[str] | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        images: Sequence[Sequence[str]] | None = None,
        sampling_masks: SamplingMasks | None = None,
        routed_experts: Tensor | None = None,
    ) -> TokenScores:
        """Score each sequence with the policy of its agent; see :class:`torchrl_data.TokenScorer`.

        Args:
            ids: as there.
            lengths: as there.
            target_mask: as there.
            agents: the author of each sequence.
            temperature: as there.
            entropy: as there.
            images: as there.
            sampling_masks: as there.
            routed_experts: as there.

        Raises:
            ValueError: an author has no policy, or nobody says who they are.
            TypeError: a policy does not score.
        """
        rows = self.rows_of(agents or [None] * len(lengths))
        sizes = lengths.cpu()
        row_of_token = torch.arange(len(sizes)).repeat_interleave(sizes)
        is_target = target_mask.cpu()
        row_of_target = row_of_token[is_target]
        scores, places = [], []
        for name, own in rows.items():
            policy: Any = self.by_agent[name]
            check_scorer(f"AgentPolicies: the agent {name!r}", policy)
            chosen = torch.zeros(len(sizes), dtype=torch.bool)
            chosen[own] = True
            tokens, targets = chosen[row_of_token], chosen[row_of_target]
            further: dict[str, Any] = {}
            if images is not None and any(images[i] for i in own):
                further["images"] = [images[i] for i in own]
            if sampling_masks is not None:
                further["sampling_masks"] = sampling_masks.take(targets)
            if routed_experts is not None:
                further["routed_experts"] = routed_experts[tokens]
            scores.append(
                policy.score_packed(
                    ids[tokens],
                    lengths[chosen],
                    target_mask[tokens],
                    temperature=temperature,
                    entropy=entropy,
                    **further,
                )
            )
            places.append(targets.nonzero().squeeze(1))
        order = torch.cat(places).argsort()

        def joined(column: Any) -> Any:
            if column[0] is None:
                return None
            values = torch.cat(column)
            return values[order.to(values.device)]

        return TokenScores._make(map(joined, zip(*scores, strict=True)))

    def rows_by_agent(self, batch: TensorDictBase) -> dict[str, TensorDictBase]:
        """The rows of a batch that each agent's policy has sampled, to be trained with it alone.

        Args:
            batch: ``[B]``, of a collector or a buffer.

        Returns:
            By the name of the agent, those that have any.

        Raises:
            ValueError: the batch does not say who wrote its rows, or nobody's policy did.
        """
        rows = self.rows_of(read_objects(batch, AGENT))
        return {name: batch[own] for name, own in rows.items()}

    def rows_of(self, authors: Sequence[str | None]) -> dict[str, list[int]]:
        """The numbers of the rows that each agent's policy has sampled.

        Args:
            authors: of each row; ``None`` where nobody says.

        Returns:
            By the name of the agent, those that have any.

        Raises:
            ValueError: an author has no policy, or nobody says who it is.
        """
        rows: dict[str, list[int]] = {name: [] for name in self._names}
        for row, author in enumerate(self._checked_authors(authors)):
            name = self._engines.name_of(author)
            if name is None:
                raise ValueError(
                    f"AgentPolicies: row {row} is of {author!r}, and there are policies for "
                    f"{list(self._names)}."
                )
            rows[name].append(row)
        return {name: own for name, own in rows.items() if own}

    def _row_arguments(self, batch: TensorDictBase) -> dict[str, Sequence[Any]]:
        return {"agents": self._checked_authors(read_objects(batch, AGENT))}

    def _checked_authors(self, authors: Sequence[str | None]) -> list[str]:
        if None in authors and self.otherwise is None:
            raise ValueError(
                "AgentPolicies: nobody says which agents wrote the rows: they have no entry "
                "'agent', which an AgentProgram writes. Append one to the environment, or say with "
                "otherwise= whose turns these are."
            )
        return [author or "" for author in authors]


def _check_policies(policies: Mapping[str, LLMWrapperBase], otherwise: str | None) -> None:
    """Check that policies can take turns in one environment."""
    if not isinstance(policies, Mapping) or not policies:
        raise ValueError(
            "AgentPolicies takes a policy for each agent, {'first': policy, ...}, got "
            f"{policies!r:.60}."
        )
    for name, policy in policies.items():
        is_own = getattr(type(policy), "respond", None) is LLMWrapperBase.respond
        if not is_own or isinstance(policy, AgentPolicies):  # turns are drawn by its engine
            raise TypeError(
                f"AgentPolicies: the policy of {name!r} is a {type(policy).__name__}. Take a "
                "TransformersWrapper, vLLMWrapper or SGLangWrapper."
            )
        if not isinstance(name, str) or not name or len(name) > 60:
            raise ValueError(
                f"AgentPolicies: an agent's name has 1 to 60 characters, got {name!r:.80}."
            )
    if otherwise is not None and otherwise not in policies:
        raise ValueError(
            f"AgentPolicies: otherwise={otherwise!r} has no policy; {list(policies)} have one."
        )
    names = iter(policies.items())
    first_name, first = next(names)
    for name, policy in names:
        for what in ("sampling", "input_mode", "write_tokens", "pad_output", "num_samples"):
            own, other = getattr(first, what), getattr(policy, what)
            if own != other or (what == "num_samples" and own is not None):
                raise ValueError(
                    f"AgentPolicies: {what} of {first_name} is {own!r:.200}, and of {name} "
                    f"{other!r:.200}: turns of all agents are drawn and written alike"
                    f"{', one for each row' if what == 'num_samples' else ''}."
                )
        if (first.encoder.images is None) != (policy.encoder.images is None):
            raise ValueError(f"AgentPolicies: one of {first_name} and {name} reads no images.")
        check_same_rendering(first.encoder, policy.encoder)

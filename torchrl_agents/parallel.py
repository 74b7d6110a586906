"""Several processes, which ``torchrun`` started, train one model.

Rank 0 runs the recipe: it alone has the task, environments, folder and trackers. The others get the
filled-in settings and the model, and make the steps of the recipe's loop when rank 0 says so::

    rank 0        main: task, model, collector ---> train(Training): draw, passes, push, tests
                          | settings, model              | RankJob: rows, a pass, weights, a save
    other ranks   follow: wait, load          ---> train(Follower): the same loop, on its share
"""

import copy
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from collectors import (
    RunState,
    ShardedModel,
    ShardedOptimizer,
    contribute_weights,
    update_metrics,
)
from collectors.resume.sharded import Sharded
from collectors.weight_update.plain_weights import unwrapped_module
from collectors.weight_update.sharded_weights import is_spread, pushed_weights
from objectives import MixedLossOutput, NonFiniteGate, PackedBatch, Ranks, StepOutcome
from torchrl_data.token_scorer import TokenScorer, image_arguments
from torchrl_modules import AgentPolicies, LLMWrapperBase, TransformersCritic, TransformersWrapper
from torchrl_modules.model_splits import layers_of, split_model
from torchrl_modules.scoring.packed_attention import can_share

from .checkpoints import Checkpoints
from .critic import Critic, critic_of_config
from .device_defaults import DEFAULT_TOKENS, settle_micro_batches
from .models.adapters import (
    WithoutAdapters,
    frozen_weights,
    is_adapted,
    is_over_given,
    with_adapters,
)
from .models.agents import (
    adapters_of,
    frozen_copies,
    models_alike,
    policies_of,
    scorer_of,
)
from .models.loading import load_model
from .models.outline import outline
from .models.policies import transformers_policy
from .models.reward_models import ChatRewardModel, network_options, reward_model_over
from .models.sources import folder_of, given_model, model_files
from .optimizers import set_learning_rate
from .rank_jobs import RankJob, tell
from .rank_scores import target_scores
from .rank_share import RankShare
from .run import Run
from .settings.errors import refusing
from .settings.recipe import Recipe
from .settings.schema import TrainingConfig, agents_settings, critic_settings
from .stop_signals import SIGNALS

Actor = TransformersWrapper | TransformersCritic
"""What is trained: a policy, or a reward model."""


def take_share(
    cfg: TrainingConfig,
    ranks: Ranks,
    actor: Actor | AgentPolicies,
    loss: Any,
    batch: PackedBatch | None = None,
) -> RankShare:
    """Take this rank's share of the rows of a step, as many micro-batches as the others; all do.

    Args:
        cfg: the settings.
        ranks: of the run.
        actor: is trained.
        loss: counts the tokens.
        batch: all rows, which rank 0 has.
    """
    parts: list[PackedBatch] = []
    agents: list[str] = []
    for agent, rows in _rows_by_model(ranks, actor, batch).items():
        shares = _shares_prefixes(actor, rows)
        own = ranks.scatter(rows, max_tokens=_most_tokens(cfg), count_shared_once=shares)
        parts += own
        agents += [] if agent is None else [agent] * len(own)
    # Reduced once, the gradients of shards would be whole on every rank until then.
    copies = parallel_kind(cfg, ranks) != "fsdp2"
    reduces_once = copies if cfg.train.reduce == "auto" else cfg.train.reduce == "step"
    window = loss.measure_window(parts, ranks=ranks)
    return RankShare(parts, window, actor.model, reduces_once, ranks, agents)


def score_share(
    cfg: TrainingConfig,
    ranks: Ranks,
    actor: TransformersWrapper,
    batch: PackedBatch | None = None,
) -> Tensor | None:
    """Compute log-probs by the model as it is, each rank those of its share of the rows; all do.

    They are of the model's own softmax, at temperature 1.

    Args:
        cfg: the settings.
        ranks: of the run.
        actor: with the model.
        batch: all rows, which rank 0 has.

    Returns:
        On rank 0 those of all trained tokens, float32 ``[K]``.
    """

    def compute(part: PackedBatch) -> Tensor:
        images = image_arguments(actor, part.images, "score_share")
        options: Any = {"temperature": 1.0, **images}
        return actor.score_packed(part.ids, part.lengths, part.target_mask, **options).log_prob

    most, shares = _most_tokens(cfg), _shares_prefixes(actor, batch)
    return target_scores(ranks, batch, compute, max_tokens=most, count_shared_once=shares)


def reward_share(
    cfg: TrainingConfig,
    ranks: Ranks,
    actor: TransformersCritic,
    batch: PackedBatch | None = None,
) -> Tensor | None:
    """Compute rewards by the model as it is, each rank those of its share of the rows; all do.

    Args:
        cfg: the settings.
        ranks: of the run.
        actor: with the reward model.
        batch: all rows, which rank 0 has, each with a trained token.

    Returns:
        On rank 0 those of all rows, float32 ``[B]``.
    """

    def compute(part: PackedBatch) -> Tensor:
        rewards = actor.reward_packed(part.ids, part.lengths)
        return rewards.repeat_interleave(part.target_lengths.to(rewards.device))

    most, shares = _most_tokens(cfg), _shares_prefixes(actor, batch)
    found = target_scores(ranks, batch, compute, max_tokens=most, count_shared_once=shares)
    if batch is None or found is None:
        return None
    return found[batch.target_lengths.cumsum(0) - 1]


def _most_tokens(cfg: TrainingConfig) -> int:
    """The most tokens of a pass, of all ranks that share it out."""
    most = cfg.train.micro_batch_tokens or DEFAULT_TOKENS  # rank 0 has settled it
    return most * cfg.train.context_parallel_size


def _rows_by_model(
    ranks: Ranks, actor: Actor | AgentPolicies, batch: PackedBatch | None
) -> Mapping[str | None, PackedBatch | None]:
    """The rows of each model that is trained: of agents with weights of their own several."""
    if not isinstance(actor, AgentPolicies):
        return {None: batch}
    rows: dict[str | None, PackedBatch] = {}
    if batch is not None:
        of_agents = actor.rows_of(batch.agents or [None] * batch.num_rows)
        rows = {name: batch.take_rows(torch.tensor(own)) for name, own in of_agents.items()}
    names: list[str | None] = ranks.broadcast([*rows])  # those that have any
    return {name: rows.get(name) for name in names}


def _shares_prefixes(actor: Actor | AgentPolicies, batch: PackedBatch | None) -> bool:
    """Whether the model reads once what the rows of a micro-batch begin with alike."""
    scorer = scorer_of(actor)
    if batch is None or not len(batch.lengths) or not (scorer.packed and scorer.share_prefixes):
        return False
    return can_share(scorer.model, int(batch.lengths.max()))


def combined(cfg: TrainingConfig, ranks: Ranks, outputs: Sequence[Any]) -> Any:
    """Combine what a loss gave of the micro-batches of all ranks; every rank takes part.

    Args:
        cfg: the settings.
        ranks: of the run.
        outputs: of this rank.

    Returns:
        One output; of several losses in one, that of the first, which is the policy's.
    """
    output = type(outputs[0]).combine(outputs, ranks=ranks)
    if isinstance(output, MixedLossOutput):
        output = next(iter(output.streams.values()))
    if cfg.engine.colocate:
        torch.cuda.empty_cache()  # the engine takes its memory back
    return output


def metrics_by_agent(
    cfg: TrainingConfig, share: RankShare, outputs: Sequence[Any]
) -> dict[str, float]:
    """Return what an update was like for each agent with weights of its own; nothing of others.

    Args:
        cfg: the settings.
        share: the rows.
        outputs: of the loss, one of each micro-batch.

    Returns:
        As :func:`~collectors.update_metrics` names them, under ``agents/<name>/``. Losses are
        shares of that of all agents, and add up to it.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(share.agents):
        pairs = zip(share.agents, outputs, strict=True)
        own = combined(cfg, share.ranks, [output for agent, output in pairs if agent == name])
        values = update_metrics([own], [])
        found |= {f"agents/{name}/{key}": x for key, x in values.items() if "steps" not in key}
    return found


def saved_parts(
    cfg: TrainingConfig,
    actor: Actor | AgentPolicies,
    optimizer: torch.optim.Optimizer,
    critic: Critic | None = None,
) -> dict[str, Sharded]:
    """Say what of the trained model and its optimizer is saved, of which each rank has a share.

    Args:
        cfg: the settings.
        actor: is trained.
        optimizer: of what is trained of it.
        critic: of the run, if it has one.
    """
    # Of adapters these alone are saved where the rest can be loaded again.
    return {
        "model": ShardedModel(actor.model, trained_only=is_over_given(cfg, actor.model)),
        "optimizer": ShardedOptimizer(actor.model, optimizer),
        **({} if critic is None else critic.parts()),
    }


def identity_of_given(
    cfg: TrainingConfig, ranks: Ranks, actor: Actor | AgentPolicies
) -> dict[str, str]:
    """Say what a checkpoint without the frozen weights has to have in common; rank 0 calls it.

    Args:
        cfg: the settings.
        ranks: of the run; the others wait for their jobs.
        actor: is trained.
    """
    if not is_over_given(cfg, actor.model):
        return {}
    tell(ranks, RankJob.DIGEST_FROZEN)
    return {"weights of policy.model": frozen_weights(actor.model)}


def parallel_kind(cfg: TrainingConfig, ranks: Ranks) -> str:
    """Return how the model is trained: ``none``, ``ddp`` or ``fsdp2``, in splits too."""
    if ranks.size == 1:
        return "none"
    automatic = "fsdp2" if ranks.device.type == "cuda" or cfg.train.splits_model else "ddp"
    if agents_settings(cfg) is not None:  # each rank has the models of all agents whole
        automatic = "ddp"
    return automatic if cfg.train.parallel == "auto" else cfg.train.parallel


def loading_device(cfg: TrainingConfig, ranks: Ranks) -> str | None:
    """Device on which a rank loads the model; one that is sharded is never whole on a GPU."""
    if ranks.size == 1:
        return cfg.policy.device
    return "cpu" if parallel_kind(cfg, ranks) == "fsdp2" else str(ranks.device)


def share_model(
    cfg: TrainingConfig,
    run: Run,
    actor: TransformersWrapper | AgentPolicies,
    policy: LLMWrapperBase,
) -> tuple[Any, LLMWrapperBase]:
    """Let all ranks train the model that rank 0 has, which calls it; or those of its agents.

    Args:
        cfg: the settings.
        run: has the ranks.
        actor: with the whole model.
        policy: samples with its weights.

    Returns:
        The actor over the wrapped model, and the policy: over a copy where the model is sharded.
        One process gets back what it gave, and so does one of agents, whose models get no wrappers.
    """
    ranks = run.ranks
    if ranks.size == 1:
        return actor, policy
    first = next(iter(policies_of(actor).values()))
    files = model_files(first, weights=False) if cfg.policy.model is None else None
    # Config and tokenizer, where they were made here; else `policy.model` has them. The settings of
    # a task are of a class made here, and nobody else's business.
    ranks.broadcast((replace(cfg, task=None), files))
    if isinstance(actor, AgentPolicies):
        ranks.broadcast(adapters_of(actor))
        ranks.copy_from_first(actor.model)
        return actor, policy
    model: Any = actor.model
    if policy is actor and parallel_kind(cfg, ranks) == "fsdp2":
        whole = copy.deepcopy(model)
        whole = whole.unload() if is_adapted(model) else whole  # it is given merged weights
        policy = transformers_policy(cfg, whole.to(ranks.device), actor.tokenizer)
    return _wrapped(cfg, ranks, model, actor.tokenizer), policy


def share_reward_model(cfg: TrainingConfig, run: Run, actor: ChatRewardModel) -> ChatRewardModel:
    """Let all ranks train the reward model that rank 0 has, which calls it; with its adapters.

    Args:
        cfg: the settings.
        run: has the ranks.
        actor: with the whole model.

    Returns:
        The actor over the model with adapters and wrappers, if it gets any.
    """
    settle_micro_batches(cfg, actor)
    ranks, model = run.ranks, cast("PreTrainedModel", actor.model)
    if ranks.size > 1:
        ranks.broadcast((replace(cfg, task=None), (model.config, model.dtype)))
    wrapped: Any = model if cfg.policy.lora_rank is None else with_adapters(cfg.policy, model)
    wrapped = wrapped if ranks.size == 1 else _shared(cfg, ranks, wrapped)
    return actor if wrapped is model else reward_model_over(cfg, wrapped, actor.tokenizer)


def _followed_reward_model(
    cfg: TrainingConfig, ranks: Ranks, about: tuple[Any, torch.dtype]
) -> TransformersCritic:
    """The reward model of a rank other than 0, which has its weights from rank 0."""
    model: Any = critic_of_config(cfg, *about)
    if cfg.policy.lora_rank is not None:
        model = with_adapters(cfg.policy, model)
    return TransformersCritic(_shared(cfg, ranks, model), **network_options(cfg))


def share_critic(cfg: TrainingConfig, run: Run, model: PreTrainedModel | None) -> Critic | None:
    """Let all ranks train the critic that rank 0 has, which calls it after :func:`share_model`.

    Args:
        cfg: the settings.
        run: has the ranks.
        model: of the critic, whole; ``None`` where the run has none.
    """
    if model is None:
        return None
    run.ranks.broadcast((model.config, model.dtype))
    wrapped: nn.Module = model if run.ranks.size == 1 else _shared(cfg, run.ranks, model)
    return _critic(cfg, run.ranks, wrapped, run.folder)


def _critic(cfg: TrainingConfig, ranks: Ranks, wrapped: nn.Module, folder: Path) -> Critic:
    with refusing("loss.advantage=gae"):
        network = TransformersCritic(wrapped, **network_options(cfg))
        return Critic(cfg, ranks, network, folder)


class Follower:
    """A rank other than 0: it makes the steps of a recipe's loop when rank 0 says so.

    The loop has it in the place of :class:`.Training` and of each :class:`.TrainingStep`: what
    rank 0 alone does in a step is nothing here.

    Args:
        recipe: of the run.
        cfg: the settings, as rank 0 has filled them in.
        ranks: of the run.
        actor: over this rank's part of the model, or over the models of agents.
        folder: of its own, for what is not finite.
        critic: over this rank's part of it, if the run has one.
    """

    def __init__(
        self,
        recipe: Recipe,
        cfg: TrainingConfig,
        ranks: Ranks,
        actor: Actor | AgentPolicies,
        folder: Path,
        critic: Critic | None = None,
    ) -> None:
        self.recipe = recipe
        self.cfg = cfg
        self.ranks = ranks
        self.actor = actor
        self.folder = folder
        self.critic = critic
        self.number = 0
        """Of the step that is made."""
        self.result: dict[str, Any] = {}
        """Nothing: rank 0 has it."""
        self._order: tuple[RankJob | None, tuple[Any, ...], dict[str, Any]] = (None, (), {})

    @contextmanager
    def steps(self, loss: Any, gate: NonFiniteGate) -> Iterator[Iterator[Self]]:
        """Take part in the steps of rank 0, until it ends; see :meth:`.Training.steps`."""
        self._loss, self._gate = loss, gate
        sharded = saved_parts(self.cfg, self.actor, gate.optimizer, self.critic)
        state = RunState(identity={}, **sharded)
        with closing(Checkpoints(self.cfg.checkpoint, self.ranks, state)) as keep:
            yield self._steps(
                {
                    RankJob.DIGEST_FROZEN: lambda: frozen_weights(self.actor.model),
                    RankJob.OPEN_CHECKPOINTS: keep.open,
                    RankJob.LOAD_CHECKPOINT: keep.load,
                    RankJob.GIVE_WEIGHTS: lambda: contribute_weights(self.actor.model),
                    RankJob.SCORE_ROWS: self._score_rows,
                    RankJob.SAVE_CHECKPOINT: keep.write,
                    RankJob.GIVE_ALL: lambda: _whole_state(self.actor.model),
                    **self._jobs_of_critic(),
                }
            )

    def _score_rows(self) -> None:
        if isinstance(self.actor, TransformersCritic):
            reward_share(self.cfg, self.ranks, self.actor)
        else:
            assert isinstance(self.actor, TransformersWrapper)
            score_share(self.cfg, self.ranks, self.actor)

    def _jobs_of_critic(self) -> dict[RankJob, Callable[..., Any]]:
        if (critic := self.critic) is None:
            return {}
        return {
            RankJob.JUDGE_ROWS: critic.judge_share,
            RankJob.GIVE_CRITIC: lambda: _whole_state(critic.network.model),
        }

    def _steps(self, jobs: Mapping[RankJob, Callable[..., Any]]) -> Iterator[Self]:
        self._order = self.ranks.broadcast()
        while (job := self._order[0]) is not None:
            if job is RankJob.TAKE_ROWS:
                yield self  # its passes end with the first order that is none
            else:
                jobs[job](*self._order[1], **self._order[2])
                self._order = self.ranks.broadcast()

    def draw(self) -> None:
        """Nothing: rank 0 collects."""

    def passes(self) -> Iterator[RankShare]:
        """Make the passes that rank 0 makes, over the share of this rank."""
        (self.number,) = self._order[1]
        self._share = share = take_share(self.cfg, self.ranks, self.actor, self._loss)
        optim, num_steps = self.cfg.optim, self.cfg.train.num_steps
        set_learning_rate(optim, self._gate.optimizer, self.number, num_steps)
        self._order = self.ranks.broadcast()
        while self._order[0] is RankJob.TRAIN_PASS:
            yield share
            self._order = self.ranks.broadcast()

    def note(self, outputs: Sequence[Any], outcome: StepOutcome) -> None:
        """Give what this rank's rows add to the metrics."""
        del outcome
        combined(self.cfg, self.ranks, outputs)
        metrics_by_agent(self.cfg, self._share, outputs)

    def note_critic(self, metrics: Mapping[str, float]) -> None:
        """Nothing: rank 0 has the metrics of all."""

    def push(self) -> None:
        """Nothing: rank 0 asks for the weights."""


def follow(ranks: Ranks, recipe: Recipe, train: Callable[[Follower], Any]) -> None:
    """Take part in a run from beginning to end, as a rank other than 0.

    Args:
        ranks: of the run.
        recipe: says what is trained.
        train: the loop.
    """
    received: list[int] = []

    def wait_for_rank_0(number: int, frame: FrameType | None) -> None:
        """Rank 0 says when to stop; a second signal ends this rank where it is."""
        del frame
        if received:
            raise SystemExit(128 + number)
        received.append(number)

    for number in SIGNALS:
        signal.signal(number, wait_for_rank_0)
    cfg, about = ranks.broadcast()
    shared = _followed_reward_model if recipe.gives_rewards else _followed_policy
    actor = shared(cfg, ranks, about)
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        critic = None
        if critic_settings(cfg) is not None:
            wrapped = _shared(cfg, ranks, critic_of_config(cfg, *ranks.broadcast()))
            critic = _critic(cfg, ranks, wrapped, Path(folder))
        train(Follower(recipe, cfg, ranks, actor, Path(folder), critic))


def _followed_policy(
    cfg: TrainingConfig, ranks: Ranks, files: Any
) -> TransformersWrapper | AgentPolicies:
    """The actor of a rank other than 0, which has its weights from rank 0."""
    given = given_model(cfg)
    with folder_of(files if given is None else given) as folder:
        # It has no weights before rank 0 gives them, part by part.
        settings = replace(cfg.policy, device="meta")
        model, tokenizer = load_model(settings, folder, load=partial(outline, check=False))
    if (agents := agents_settings(cfg)) is not None:
        models = models_alike(agents, model, ranks.broadcast())
        ranks.copy_from_first(models)
        own = {n: transformers_policy(cfg, x, tokenizer, generate=False) for n, x in models.items()}
        return AgentPolicies(own, otherwise=agents.otherwise)
    if cfg.policy.lora_rank is not None:
        model = with_adapters(cfg.policy, model)
    return _wrapped(cfg, ranks, model, tokenizer)


def whole_model(
    ranks: Ranks, cfg: TrainingConfig, actor: TransformersWrapper | ChatRewardModel
) -> tuple[TransformersWrapper | ChatRewardModel, Mapping[str, Tensor] | None]:
    """The model without its wrappers and shards, to be saved; rank 0 calls it.

    Args:
        ranks: of the run.
        cfg: the settings.
        actor: over the wrapped model.

    Returns:
        The actor itself where nothing has to be done; where adapters are in shards, one over a
        whole copy on the CPU. And the weights of other shards, on the CPU; ``None`` where the
        actor's model has them.
    """
    model: Any = unwrapped_module(actor.model)
    if not is_adapted(model):
        if not is_spread(actor.model):
            return actor, None
        tell(ranks, RankJob.GIVE_WEIGHTS)
        with pushed_weights(actor.model) as weights:
            return actor, {name: value.cpu() for name, value in weights.items()}
    if is_spread(model):
        tell(ranks, RankJob.GIVE_ALL)
        state = _whole_state(model)
        plain = actor.scorer.model
        skeleton: Any = type(plain)(plain.config)
        model = with_adapters(cfg.policy, skeleton.to(plain.dtype))
        model.load_state_dict(state)
    if isinstance(actor, ChatRewardModel):
        return reward_model_over(cfg, model, actor.tokenizer), None
    return transformers_policy(cfg, model, actor.tokenizer, generate=False), None


def whole_critic(ranks: Ranks, critic: Critic) -> dict[str, Any] | None:
    """The weights of a critic in shards, on the CPU, to be saved; rank 0 calls it.

    Args:
        ranks: of the run.
        critic: of rank 0.

    Returns:
        ``None`` where its model has them.
    """
    if not is_spread(critic.network.model):
        return None
    tell(ranks, RankJob.GIVE_CRITIC)
    return _whole_state(critic.network.model)


def _whole_state(model: nn.Module) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def _wrapped(
    cfg: TrainingConfig, ranks: Ranks, model: PreTrainedModel, tokenizer: Any
) -> TransformersWrapper:
    """The actor of a rank."""
    wrapped = _shared(cfg, ranks, model)
    group = ranks.context_group
    with nullcontext() if group is None else refusing("train.context_parallel_size"):
        return transformers_policy(cfg, wrapped, tokenizer, generate=False, context_group=group)


def _shared(cfg: TrainingConfig, ranks: Ranks, model: PreTrainedModel) -> nn.Module:
    """A model that is copied to all ranks, or spread over them layer by layer."""
    # Rank 0's weights reach the others here: of shards, a layer at a time.
    wrapped: nn.Module = model
    if parallel_kind(cfg, ranks) == "ddp":
        ranks.copy_from_first(model)
        wrapped = DistributedDataParallel(model, init_sync=False)
    else:
        copies = cfg.train.num_replicas
        sizes = {"replicate": copies} if copies > 1 else {}
        sizes["shard"] = ranks.size // copies
        kind, shape = ranks.device.type, tuple(sizes.values())
        mesh = init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))
        options: dict[str, Any] = {"mesh": mesh}
        if cfg.train.autocast:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if cfg.train.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if cfg.train.splits_model:
            del options["mesh"]
            with refusing("train"):
                split_model(
                    model,
                    tensor_parallel_size=cfg.train.tensor_parallel_size,
                    expert_parallel_size=cfg.train.expert_parallel_size,
                    prepare=ranks.copy_from_first,
                    device=kind,
                    **options,
                )
        else:
            for part in (*layers_of(model), model):
                ranks.copy_from_first(part)
                fully_shard(part, **options)
    return wrapped


def freeze_reference(
    cfg: TrainingConfig,
    run: Run,
    actor: TransformersWrapper | AgentPolicies,
    *,
    weight: float | None,
) -> tuple[TokenScorer | None, dict[str, nn.Module | WithoutAdapters]]:
    """Keep the model as it is now: a copy of it, or itself with its adapters off.

    Args:
        cfg: the settings.
        run: has the ranks; where they share shards one of them can score nothing with them.
        actor: with the whole model, before ranks share it.
        weight: of the KL term; nothing is kept without one.

    Returns:
        What scores rows by it, if anything does, and the parts that a checkpoint needs for that.
    """
    if not weight:
        return None, {}
    adapted = is_adapted(actor.model)
    is_given = is_over_given(cfg, actor.model)  # policy.model has it, and no checkpoint
    if isinstance(actor, AgentPolicies):
        own = frozen_copies(actor)
        return own, {} if is_given else {"reference": own.model}
    if adapted and parallel_kind(cfg, run.ranks) != "fsdp2":
        own = WithoutAdapters(actor)
        return own, {} if is_given else {"reference": own}
    model: Any = copy.deepcopy(actor.model)
    reference = TransformersWrapper(
        (model.unload() if adapted else model).eval().requires_grad_(False),
        tokenizer=actor.tokenizer,
        generate_kwargs=actor.sampling,
        generate=False,
    )
    return reference, {} if is_given else {"reference": reference.model}

"""Settings that recipes share, typed, with what they mean and may be; ``--help`` shows them.

``None`` stands for a default that depends on the model, see ``defaults.py``.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from omegaconf import MISSING

from .field_rules import (
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    FieldRule,
    among,
    interval,
    setting,
)


@dataclass
class PolicyConfig:
    """The model, and how it samples."""

    model: str | None = None
    """Hub id, folder (of a run too), .gguf file, or smollm2, which a package brings where the hub
    does not answer; none builds the embedded model of 0.1 million parameters."""
    device: str | None = None
    """Where it is trained: cpu, cuda, cuda:1, ...; none: a GPU where there is one."""
    dtype: str = setting("float32", among("float32", "bfloat16", "float16"))
    """Of the weights that are trained. A small step is lost in the rounding of bfloat16."""
    attn_implementation: str | None = None
    """Of Transformers: sdpa, eager, flash_attention_2, ...; none takes the model's own."""
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of from_pretrained: +policy.model_kwargs.revision=main."""
    gradient_checkpointing: bool | None = None
    """Compute activations twice instead of keeping them."""
    load_in_4bit: bool = False
    """Keep the model's matrices in 4 bits (NF4, of bitsandbytes) and train adapters over them:
    QLoRA, with lora_rank."""
    quantization: str | None = setting(None, among("fp8_per_channel"))
    """Products of 8 bits, over whole weights that are trained: a model that is to be drawn from and
    served so, by vLLM's name (docs/policies.md)."""
    lora_rank: int | None = setting(None, AT_LEAST_1)
    """Train adapters of this rank (LoRA), the model's own weights frozen; none: train all."""
    lora_alpha: float | None = setting(None, POSITIVE)
    """What the adapters add is multiplied by lora_alpha / lora_rank; none: twice the rank."""
    lora_target_modules: list[str] = field(default_factory=list)
    """Linear layers with adapters: [q_proj, v_proj]; none given: all but the head."""
    max_model_len: int | None = setting(None, AT_LEAST_1)
    """Most tokens of a conversation; none takes the model's own limit."""
    chat_template_name: str | None = None
    """A built-in chat template; none takes the tokenizer's own, or ChatML."""
    chat_template: str | None = None
    """A file with a chat template, Jinja, in place of the tokenizer's own."""
    add_control_tokens: bool = False
    """Add the template's control tokens to a vocabulary that lacks them, as a base model's does."""
    show_tool_schemas: bool | None = None
    """Show the tools in the prompt."""
    tool_call_format: str | None = None
    """How the model writes tool calls: hermes, llama3, ... (docs/tools.md), or mine:f, a parser of
    yours; none: as its chat template teaches."""
    max_new_tokens: int | None = setting(None, AT_LEAST_1)
    """Most tokens of a turn."""
    stop: list[str] | None = None
    """Texts that end a turn, beside the end-of-turn token: ['</tool_call>']."""
    temperature: float = setting(1.0, NOT_NEGATIVE)
    top_p: float = setting(1.0, interval("(0, 1]"))
    top_k: int = setting(0, AT_LEAST_0)
    min_p: float = setting(0.0, interval("[0, 1]"))
    sampling_mask: bool = False
    """Record the tokens that top_p, top_k and min_p left of each draw, and train each token in the
    distribution over them, whatever the weights would leave by then."""
    routed_experts: bool = False
    """Of a mixture: record the experts that each token went to, and train with the same ones, which
    the router's scores weigh; of engine=transformers and collector=sync."""


_GPU_SHARE: Final = 0.92
"""Of a GPU's memory, which vLLM takes for an engine where nothing else is said."""


@dataclass
class EngineConfig:
    """The engine that draws the tokens."""

    name: str = "transformers"  # which there are depends on the recipe, see Recipe.rules
    """transformers (the trained model itself), vllm, sglang (docs/sglang.md), mine:Engine, an
    engine of yours that is called with engine_kwargs (docs/policies.md), or, where nothing is
    trained, chat."""
    url: str | None = None
    """Of a server of vLLM or SGLang that runs already (docs/vllm.md), where none is started or
    built here; of chat, a server that speaks OpenAI's protocol, http://.../v1."""
    urls: list[str] = field(default_factory=list)
    """Of several such servers that run already: one fleet of them (docs/clusters.md)."""
    num_engines: int = setting(1, AT_LEAST_1)
    """Of vllm and sglang: more than one are servers that are started here, and again when they
    die."""
    devices: list[int] = setting([], AT_LEAST_0)
    """Of num_engines: the GPUs of all of them, in equal shares; none: those of this process. With
    devices one engine is a server, too."""
    nodes: int = setting(0, AT_LEAST_0)
    """Of vllm and sglang: so many nodes of a job of SLURM start servers for the run, and train
    nothing. torchrl-agents slurm --engine-nodes=2 sets it (docs/distributed.md)."""
    per_node: int | None = setting(None, AT_LEAST_1)
    """Of nodes: servers on each, which share out its GPUs; none: as many as their
    engine_kwargs.tensor_parallel_size allows, or one without GPUs."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of vLLM (+engine.engine_kwargs.gpu_memory_utilization=0.4), of SGLang
    (+engine.engine_kwargs.mem_fraction_static=0.4), or of your engine; of chat timeout_s, the
    deadline of a turn (600 s)."""
    batch_invariant: bool = False
    """A token's log-prob does not depend on the rows beside it. transformers, in float32 on a CPU:
    what is scored is what was drawn, to the bit; vllm: its own mode, on a GPU (docs/verify.md)."""
    colocate: bool = False
    """vLLM or SGLang shares the training GPUs and frees its memory during a training step. A server
    at engine.url has to be started with --enable-sleep-mode, or SGLang's --enable-memory-saver."""

    @property
    def is_own(self) -> bool:
        """Whether the user's own class or function makes the engine."""
        return ":" in self.name

    @property
    def is_library(self) -> bool:
        """True where a library for inference draws, with weights of its own."""
        return self.name in ("vllm", "sglang")

    @property
    def gpu_share(self) -> float:
        """The share of a GPU's memory that vLLM in this process takes; 0.0 of another engine."""
        if self.name != "vllm" or self.url or self.urls or self.starts_servers:
            return 0.0
        return float(self.engine_kwargs.get("gpu_memory_utilization", _GPU_SHARE))

    @property
    def starts_servers(self) -> bool:
        """Whether servers are started for the run, and ended with it."""
        is_one = self.name == "sglang" and not (self.url or self.urls)
        return self.num_engines > 1 or bool(self.devices) or is_one or self.nodes > 0


@dataclass
class EpisodeConfig:
    """Limits of an episode."""

    max_turns: int | None = setting(None, AT_LEAST_1)
    """Most turns of an episode; none takes the task's."""
    max_episode_tokens: int | None = setting(None, AT_LEAST_1)
    """Most tokens of an episode after its prompt; none for no bound but the model's length."""
    min_turn_tokens: int = setting(16, AT_LEAST_1)
    """No turn begins with fewer tokens left: the episode ends, truncated."""
    max_error_fraction: float = setting(0.05, interval("[0, 1]"))
    """The run stops when the rewards of more of the last 200 rollouts could not be computed; 1
    never stops it."""


@dataclass
class CollectorConfig(EpisodeConfig):
    """The rollouts of a step."""

    mode: str = setting("sync", among("sync", "streaming", "ray"))
    """sync: a batch before each step; streaming: beside training, episode by episode; ray: so, too,
    in several processes or machines."""
    num_collectors: int = setting(1, AT_LEAST_1)
    """Of ray: actors that collect."""
    remote_config: dict[str, Any] = field(default_factory=dict)
    """Of ray: options of each: +collector.remote_config.num_gpus=1."""
    num_prompts: int = setting(16, AT_LEAST_1)
    """Prompts of a step."""
    group_size: int = setting(16, AT_LEAST_1)
    """Rollouts of a prompt."""
    num_roots: int | None = setting(None, AT_LEAST_1)
    """Of them so many begin with the prompt; each other one leaves one of these at one of its later
    turns, and takes that anew (docs/branching.md); none: all begin with the prompt."""
    branch_at: str = "uniform"
    """Of num_roots: what draws that turn: uniform, surprise (the likelier, the less likely its
    tokens were), or mine:f, a function from the turns of a rollout to weights."""
    refill: bool = False
    """Groups without a signal are replaced by others until the batch is full (docs/losses.md)."""
    max_draws: int = setting(16, AT_LEAST_1)
    """Of refill: the most groups that are drawn for a batch, in batches; then sync trains what it
    has, and streaming and ray, where so many were refused in a row, stop."""
    max_staleness: int = setting(4, AT_LEAST_0)
    """Of streaming: the most steps by which any token may be older than the step that trains it; 0
    gives what sync gives."""
    staleness_policy: str = setting("wait", among("wait", "drop"))
    """Of streaming: wait (nothing is thrown away) or drop (what is too old is drawn again)."""
    pipeline_depth: int | None = setting(None, AT_LEAST_0)
    """Of streaming: how many steps generation runs ahead; none: as far as max_staleness lets it."""
    max_inflight_tasks: int = setting(
        -1, FieldRule("-1 or at least 1", lambda value: value == -1 or value >= 1)
    )
    """Of streaming: most episodes that run at once; -1: all that are admitted."""
    follow_load: bool = False
    """Of streaming over vLLM: fewer episodes run while the engine's cache is full; those of the
    youngest prompts are given back, and drawn again."""
    recompute: bool = True
    """Of streaming: new weights read again what is in flight, so that log-probs are exactly those
    of a version; false: it goes on with what the old ones have read, which is faster."""
    verify_every: int | None = setting(None, AT_LEAST_1)
    """Every so many steps some rows are computed again before they are trained, within 5 % of the
    time, and what differs is warned of with its cause; none: never (docs/verify.md)."""


SCHEDULES: Final[dict[str, Callable[[float], float]]] = {
    "trapezoid": lambda done: min(1.0, 2 * (1 - done)),
    "constant": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
"""What the learning rate is multiplied by, from the fraction of the run that is done."""


@dataclass
class OptimConfig:
    """The optimizer and its schedule."""

    name: str = setting("adamw", among("adamw", "adamw8bit", "muon", "sgd"))
    """adamw, adamw8bit (its moments take a byte each), muon (of the matrices; AdamW of the rest),
    or sgd."""
    learning_rate: float | None = setting(None, POSITIVE)
    schedule: str = setting("trapezoid", among(*SCHEDULES))
    """After the warm-up: trapezoid (falls over the second half), constant, linear or cosine."""
    num_warmup_steps: int = setting(5, AT_LEAST_0)
    """Steps over which the learning rate rises."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    beta1: float = setting(0.9, interval("[0, 1)"))
    """Of adamw; the momentum of sgd."""
    momentum: float = setting(0.95, interval("[0, 1)"))
    """Of muon's matrices."""
    beta2: float = setting(0.95, interval("[0, 1)"))
    eps: float = setting(1e-8, POSITIVE)
    max_grad_norm: float | None = setting(None, POSITIVE)
    """Larger gradients are scaled down to it."""


BACKENDS: Final = ("csv", "tensorboard", "wandb", "trackio", "mlflow")
"""Where metrics can go; each but the first needs the package of its name."""


@dataclass
class LoggerConfig:
    """Trackers that get the metrics, in addition to metrics.jsonl."""

    backends: list[str] = setting(["csv", "tensorboard"], among(*BACKENDS))
    """csv, tensorboard, wandb, trackio, mlflow."""
    project: str | None = None
    """Of wandb and trackio, the experiment of mlflow; none: the recipe's name."""


@dataclass
class CheckpointConfig:
    """Checkpoints, from which a run that was stopped goes on (resume=auto)."""

    every: int | None = setting(10, AT_LEAST_1)
    """Steps; none: only when the run is stopped."""
    keep_last: int = setting(
        2, FieldRule("at least 2: the newest may be damaged", lambda value: value >= 2)
    )
    """So many of the newest."""
    keep_best: int = setting(0, AT_LEAST_0)
    """Also keep this many checkpoints with the best step reward (sft: the lowest loss)."""
    on_error: str = setting("warn", among("warn", "stop"))
    """A checkpoint that can't be written: warn (the run goes on, and its status is not 0 where the
    last one is missing), or stop."""


GAMED_CODES: Final = (
    *("reward_jump", "wrong_is_rewarded", "one_answer", "copied_prompt", "repetition"),
    *("sources_part", "held_out_parts", "reward_by_length"),
)
"""Findings of a reward that is gamed, as ``torchrl_agents.explain`` names them."""


@dataclass
class RecordConfig:
    """The record of the rollouts, which torchrl-agents view shows."""

    every: int = setting(1, AT_LEAST_1)
    """Rollouts are recorded in every so many steps."""
    max_groups_per_step: int | None = setting(None, AT_LEAST_0)
    """Of so many prompts; none: of all."""
    kept_counts: bool = False
    """Also how many tokens top-k, top-p and min-p left, of which each was drawn; of
    engine=transformers."""
    replay: bool = True
    """Also the sets of policy.sampling_mask and the experts of policy.routed_experts, with which
    torchrl-agents verify computes each token again (docs/verify.md has what it costs)."""
    check_every: int | None = setting(10, AT_LEAST_1)
    """Every so many steps the rollouts are read, within 3 % of the time, for a reward that is
    gamed, and each finding is warned of once (docs/explain.md); none: never."""
    stop_on: list[str] = setting([], among(*GAMED_CODES))
    """The run ends with such a finding of check_every: [one_answer, repetition]."""


@dataclass
class WarmStartConfig:
    """Supervised training on the task's demonstrations, before anything else."""

    num_steps: int | None = setting(None, AT_LEAST_0)
    batch_size: int = setting(32, AT_LEAST_1)
    learning_rate: float | None = setting(None, POSITIVE)


@dataclass
class SamplesConfig:
    """Prompts that are never trained on, and how often each is answered."""

    num_prompts: int = setting(256, AT_LEAST_1)
    num_samples: int = setting(1, AT_LEAST_1)
    """Rollouts of each prompt; of several there are pass@k, pass^k, mean@n and maj@n, too."""
    ks: list[int] | None = setting(None, AT_LEAST_1)
    """Of pass@k and pass^k; none: 1, 2, 4, ... up to num_samples."""
    solved_at: float = setting(1.0, FINITE)
    """The reward from which on a rollout is correct."""
    solved_by: Any = None
    """The reward that is asked, where several are added: its name, without its weight; [a, b]: all
    of these; reward: their weighted sum. None: the only one, or that of the task which says so."""
    level: float = setting(0.95, interval("(0, 1)"))
    """Of the bootstrap intervals."""
    max_rollouts: int = setting(256, AT_LEAST_1)
    """Most rollouts at once, at least those of one prompt."""
    num_shown: int = setting(3, AT_LEAST_0)
    """Conversations that are shown."""


@dataclass
class EvaluateConfig(SamplesConfig):
    """The test before and after training."""

    every: int | None = setting(None, AT_LEAST_1)
    """Also every so many steps, beside training where collection is; all tests are in
    evaluations.jsonl, and as held_out/ where metrics go."""


@dataclass
class TrainConfig:
    """Training."""

    num_steps: int = setting(100, AT_LEAST_1)
    stop_at: float | None = setting(None, FINITE)
    """The run ends after a test (evaluate.every) whose held-out reward is at least this."""
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)
    """Most tokens of one forward and backward pass of a rank; the gradient does not depend on it.
    None: what the free memory of a GPU holds, measured when the model is there; 32768 without a
    GPU."""
    autocast: bool | None = None
    """Compute activations in bfloat16; none: on a GPU that has it, with weights of float32."""
    compile_layers: bool | None = None
    """torch.compile compiles the layers of the model; none: of at least 100 million weights on a
    GPU, where it is whole."""
    parallel: str = setting("auto", among("auto", "ddp", "fsdp2"))
    """Of several ranks (torchrun): ddp, fsdp2 or auto: fsdp2 on GPUs, ddp on CPUs and for
    agents.trained, of which each rank has all models whole."""
    reduce: str = setting("auto", among("auto", "step", "micro_batch"))
    """Of several ranks, when they add their gradients up: step: once, with the last micro-batch,
    until when each has whole gradients; micro_batch; or auto: step with ddp, micro_batch with
    fsdp2."""
    num_replicas: int = setting(1, AT_LEAST_1)
    """Of fsdp2: so many copies of the model, each in shards (HSDP): as many as there are nodes."""
    cpu_offload: bool = False
    """Of fsdp2: shards, gradients and the optimizer stay in host memory between two uses."""
    tensor_parallel_size: int = setting(1, AT_LEAST_1)
    """So many neighbouring ranks get the same rows and compute each matrix together, by the plan
    that Transformers has for the model; what is left is spread by fsdp2."""
    expert_parallel_size: int = setting(1, AT_LEAST_1)
    """Of a mixture: so many ranks have its experts together, each some of them, and tokens are sent
    to where their experts are; a multiple of tensor_parallel_size."""
    context_parallel_size: int = setting(1, AT_LEAST_1)
    """So many neighbouring ranks get the same rows, and each reads a part of the tokens of every
    row: for rows that are too long for one GPU."""
    timeout_s: float = setting(600.0, POSITIVE)
    """The longest that a rank waits for another one in training."""
    wait_s: float = setting(7200.0, POSITIVE)
    """The longest that ranks wait for rank 0, which collects and evaluates."""

    @property
    def splits_model(self) -> bool:
        """Whether ranks compute parts of one layer."""
        return self.tensor_parallel_size > 1 or self.expert_parallel_size > 1


@dataclass
class EpochsTrainConfig(TrainConfig):
    """Training on what the policy sampled in a step."""

    num_epochs: int | None = setting(None, AT_LEAST_1)
    """Passes over the rollouts of a step that are trained, an optimizer step each."""


@dataclass
class GivenDataConfig:
    """Conversations to learn from that somebody else wrote."""

    what: ClassVar[str] = "conversations"
    """They are called so in messages."""
    dataset: str | None = None
    """Hub id, file or folder with them; none takes the task's demonstrations."""
    split: str | None = None
    """Of it; the only one, or train, when not given."""
    skip_bad_rows: bool = False
    """Leave out rows that hold none (messages have a role and a content), that can't be shown in
    the chat template, or that are too long for the model, and log how many; else they are
    refused."""
    num_held_out: int = setting(64, AT_LEAST_1)
    """So many are not trained on; their loss is told."""


@dataclass
class PairsConfig(GivenDataConfig):
    """Pairs of answers to one prompt: columns chosen, rejected and prompt, as TRL reads them.

    Without a data set the better answer is the task's demonstration, and the other one that of
    another question.
    """

    what: ClassVar[str] = "pairs"

    shuffle_preferences: bool = False
    """A control: which answer is the better one is drawn at random, so nothing can be learnt."""


@dataclass
class RecipeConfig:
    """Settings of every recipe."""

    seed: int = setting(0, FieldRule("from 0 to 2**63 - 1", lambda value: 0 <= value < 1 << 63))
    name: str | None = None
    """Of the run; its folder is outputs/<recipe>/<task>/<name>-<number>. None: seed<seed>."""
    overwrite: bool = False
    """Replace the last run of that name instead of beginning a new folder."""
    resume: str | None = None
    """A run goes on that was stopped: its folder, or auto: the newest one with these settings, if
    there is one."""
    dry_run: bool = False
    """Check settings, data, environment, models, adapters, servers and trackers, and stop before
    any weights are loaded."""
    task: Any = MISSING
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def limits(self) -> EpisodeConfig:
        """Limits of an episode: ``collector``, or ``episodes`` where there are tests alone."""
        return next(each for each in vars(self).values() if isinstance(each, EpisodeConfig))


@dataclass
class CriticConfig:
    """The critic of loss.advantage=gae: what the rest of an episode is worth, token by token."""

    model: str | None = None
    """Hub id or folder: a reward model, the critic/ of an earlier run, or a language model, whose
    head begins as zeros; none: it begins as the policy does, with a head of zeros."""
    learning_rate: float | None = setting(None, POSITIVE)
    """None: ten times optim.learning_rate, whose schedule it has."""
    gamma: float = setting(1.0, interval("[0, 1]"))
    """Discount of a sampled token."""
    lmbda: float = setting(0.95, interval("[0, 1]"))
    """Of the advantages: 1 for the whole return less the value, 0 for one token."""
    value_lmbda: float = setting(1.0, interval("[0, 1]"))
    """The same of what the critic learns; 1: whole returns."""
    average_gae: bool = True
    """Advantages of a step have mean 0 and deviation 1."""
    loss_critic_type: str = setting("smooth_l1", among("smooth_l1", "l2", "l1"))
    clip_value: float | None = setting(None, POSITIVE)
    """How far a step moves a value."""
    num_warmup_steps: int = setting(0, AT_LEAST_0)
    """Steps in which the critic alone learns."""


_AGENT_NAME: Final = FieldRule(
    "1 to 60 letters, digits, - and _",
    lambda name: re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) is not None,
)


@dataclass
class AgentsConfig:
    """Agents of a program that have weights of their own (docs/users-and-agents.md)."""

    trained: list[str] = setting([], _AGENT_NAME)
    """Their names: [planner, worker]. Each has adapters of its own with policy.lora_rank, or else a
    model of its own; none: one policy for all agents."""
    frozen: list[str] = setting([], _AGENT_NAME)
    """Names of others, which stay as policy.model has them."""
    otherwise: str | None = None
    """One of all these, which also takes the turns of agents that are not named."""

    @property
    def names(self) -> list[str]:
        """All that have a policy."""
        return [*self.trained, *self.frozen]


@dataclass
class TrainingConfig(RecipeConfig):
    """Settings of every recipe that trains."""

    push_to_hub: str | None = None
    """Repository of the Hugging Face Hub, org/name, that gets the model, its card and its curve
    when the run ends; it is made, public, where it is not there."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


@dataclass
class RolloutsConfig(TrainingConfig):
    """Settings of every recipe that learns from what the policy samples."""

    collector: CollectorConfig = field(default_factory=CollectorConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    record: RecordConfig = field(default_factory=RecordConfig)


def collects_on_ray(cfg: RecipeConfig) -> bool:
    """Return whether collectors on Ray have policies of their own."""
    return isinstance(cfg, RolloutsConfig) and cfg.collector.mode == "ray"


def critic_settings(cfg: Any) -> CriticConfig | None:
    """Return the settings of the critic of a run; ``None`` where it has none."""
    has_one = getattr(getattr(cfg, "loss", None), "advantage", None) == "gae"
    return cfg.critic if has_one else None


def agents_settings(cfg: Any) -> AgentsConfig | None:
    """Return the settings of agents with weights of their own; ``None`` where there are none."""
    agents: AgentsConfig | None = getattr(cfg, "agents", None)
    return agents if agents is not None and agents.trained else None

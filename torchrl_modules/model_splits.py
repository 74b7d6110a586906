"""A model that ranks compute together, by the plans that Transformers has for its class.

With tensor parallelism the ranks of a group read the same rows, and each has some of the heads and
of the columns of every matrix. With expert parallelism each rank has some of the experts, whole,
and tokens are sent to where their experts are. What neither splits is spread by FSDP2 over the
ranks that read other rows::

    ranks 0 1 2 3, tensor_parallel_size=2, expert_parallel_size=4, a mixture of 8 experts

    rows           0 1 read the same ones, 2 3 others
    heads          half of them: 0 2, the other half: 1 3
    experts        0: 1st and 2nd, 1: 3rd and 4th, 2: 5th and 6th, 3: 7th and 8th
    all but experts, by FSDP2: over 0 2, and over 1 3
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from .scoring.split_head import sum_gradient
from .scoring.trial import ROUNDED, run_trial
from .scoring.wrapped_models import SPLIT_HERE, SPLIT_OVER, run_inside
from .transformers_releases import parallel_plans
from .weights.quantized_weights import quantization_of

_LOG = logging.getLogger("torchrl_agents")
dist: Any = torch.distributed  # it names little of what is used here as exported
_SUMMED: Final = "replicated_with_grad_allreduce"
"""A style of Transformers: a vector that every rank applies to its own heads."""
_OF_HEAD: Final = "colwise_gather_output"
_TRIED: Final = frozenset(
    {
        *("colwise", "rowwise", _SUMMED, _OF_HEAD),
        *("grouped_gemm", "ep_dispatch_experts"),
    }
)
"""Styles of plans whose gradients were compared with those of one process."""
_OF_EXPERTS: Final = frozenset({"packed_colwise", "packed_rowwise", "moe_tp_experts"})
"""Styles that cut every expert of a mixture. Two matrices that are one parameter are cut both, and
checkpoints of torch take no such pieces."""


class Plans(NamedTuple):
    """The style of each part of a model that is split, by its name with ``*`` for numbers."""

    matrices: dict[str, str]
    experts: dict[str, str]

    def below(self, prefix: str, leave_out: Sequence[str] = ()) -> "Plans":
        """The plans of the parts of a module, by their names in it."""

        def own(plan: Mapping[str, str]) -> dict[str, str]:
            here = {k: v for k, v in plan.items() if k.startswith(prefix)}
            return {
                name.removeprefix(prefix): style
                for name, style in here.items()
                if not any(name.startswith(other) for other in leave_out)
            }

        return Plans(own(self.matrices), own(self.experts))


class _Meshes(NamedTuple):
    rows: DeviceMesh
    """Ranks that read other rows."""
    matrices: DeviceMesh
    """Ranks that have parts of the same matrices."""
    copies: DeviceMesh
    """Ranks that have the same experts."""
    experts: DeviceMesh
    """Ranks that have different experts."""


def plans_of(
    model: PreTrainedModel,
    *,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    num_ranks: int,
    who: str,
) -> Plans:
    """Return how a model is split, after it was checked that it can be.

    Args:
        model: with weights or without.
        tensor_parallel_size: ranks that compute a matrix together.
        expert_parallel_size: ranks that have the experts of a layer together.
        num_ranks: of the run.
        who: begins the errors.

    Raises:
        ValueError: the class of the model has no plan, or one with a style that was not tried; or
            heads, columns or experts can't be shared out evenly.
        ImportError: this release of Transformers has no such plans.
    """
    shared = parallel_plans(who)
    name, config = type(model).__name__, model.config.get_text_config()
    kind = "adapters" if hasattr(model, "peft_config") else quantization_of(model)
    if kind is not None:
        raise ValueError(
            f"{who}: {name} has {kind}, whose weights no plan names. Give it without, or leave "
            "tensor_parallel_size and expert_parallel_size out."
        )
    try:
        sizes = shared.configuration.DistributedConfig(
            tp_size=tensor_parallel_size,
            ep_size=expert_parallel_size,
            fsdp_size=num_ranks // tensor_parallel_size,
        )
        matrices, experts = shared.tensor_parallel.resolve_parallel_plans(model, sizes)
        sizes._validate_resolved_ep_plan(experts)
    except ValueError as error:
        raise ValueError(f"{who}: {name} can't be split: {error}") from error
    matrices = _without_vocabulary(model, matrices, tensor_parallel_size)
    if tensor_parallel_size > 1 and not matrices:
        raise ValueError(f"{who}: {name} has no plan for tensor parallelism in Transformers.")
    if expert_parallel_size == 1 and (cut := sorted({*matrices.values()} & _OF_EXPERTS)):
        raise ValueError(
            f"{who}: the plan of {name} cuts each expert in pieces ({', '.join(cut)}), which can't "
            "be saved. Give expert_parallel_size, a multiple of tensor_parallel_size: then experts "
            "stay whole, and each rank has some of them."
        )
    odd = sorted({*matrices.values(), *experts.values()} - _TRIED)
    if odd:
        raise ValueError(
            f"{who}: the plan of {name} has {', '.join(odd)}, of which it was not tried whether "
            "gradients are right. Train it without tensor_parallel_size and expert_parallel_size."
        )
    counts = {
        "num_attention_heads": tensor_parallel_size,
        "num_key_value_heads": tensor_parallel_size,
        "intermediate_size": tensor_parallel_size,
        "moe_intermediate_size": tensor_parallel_size,
        "num_experts": expert_parallel_size,
        "num_local_experts": expert_parallel_size,
        "n_routed_experts": expert_parallel_size,
    }
    for what, size in counts.items():
        count = getattr(config, what, None)
        if isinstance(count, int) and count % size:
            raise ValueError(
                f"{who}: {name} has {what}={count}, which {size} ranks can't share out evenly."
            )
    return Plans(matrices, experts)


def _without_vocabulary(
    model: PreTrainedModel, plan: Mapping[str, str], size: int
) -> dict[str, str]:
    """The plan without embeddings, and without a head that is one or has no equal parts."""
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    rows = getattr(head, "weight", None)
    is_cut = (
        rows is not None and rows is not getattr(table, "weight", None) and not len(rows) % size
    )
    whole = (table,) if is_cut else (table, head)
    names = {name for name, part in model.named_modules() if any(part is x for x in whole)}
    return {name: style for name, style in plan.items() if name not in names}


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model, each of which is spread by itself.

    Args:
        model: says which of its blocks are not to be split.
    """
    blocks = (b for each in model.modules() if isinstance(each, nn.ModuleList) for b in each)
    return [b for b in blocks if type(b).__name__ in (model._no_split_modules or ())]


def split_model(
    model: PreTrainedModel,
    *,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    device: str = "cpu",
    **fsdp_options: Any,
) -> PreTrainedModel:
    """Split a model over the ranks of ``torchrun``, each of which calls it.

    Neighbouring ranks compute matrices together; give :meth:`.Ranks.join` the same
    ``tensor_parallel_size``, so that they get the same rows. Where there are more ranks the rest is
    spread over them by ``fully_shard``, layer by layer. The embeddings stay whole in a group, and
    a head that shares their weights does, too. On rank 0 the split model is compared with the whole
    one on a few tokens::

        with Ranks.join(tensor_parallel_size=2) as ranks:
            model = AutoModelForCausalLM.from_pretrained(folder)
            split_model(model, tensor_parallel_size=2, prepare=ranks.copy_from_first)
            actor = TransformersWrapper(model, tokenizer=tokenizer, generate=False)

    Args:
        model: changed in place; whole on each rank, or on the meta device where ``prepare`` gives
            its parts weights.
        tensor_parallel_size: ranks that compute a matrix together.
        expert_parallel_size: ranks that have the experts of a layer together: a multiple of
            ``tensor_parallel_size`` that divides the number of ranks.
        prepare: called with each layer before it is split, and at last with the model.
        device: ``cpu`` or ``cuda``, where ranks compute.
        **fsdp_options: of ``fully_shard``: ``mp_policy``.

    Returns:
        The model.

    Raises:
        ValueError: see :func:`plans_of`; or on rank 0, the split model computes something else.
        ImportError: this release of Transformers has no such plans.

    See Also:
        Shoeybi et al., 2019, arXiv:1909.08053, section 3, for matrices; Lepikhin et al., 2020,
        arXiv:2006.16668, section 2, for experts.
    """
    size, who = dist.get_world_size(), "split_model"
    plans = plans_of(
        model,
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        num_ranks=size,
        who=who,
    )
    expected = run_trial(model, who=who) if dist.get_rank() == 0 else None
    # Whole weights are made of pieces in two steps where FSDP2 cuts what a plan has cut.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    meshes = _meshes(size, tensor_parallel_size, expert_parallel_size, device)
    own = layers_of(model)
    names = {id(part): f"{name}." for name, part in model.named_modules()}
    prefixes = [_starred(names[id(part)]) for part in own]
    for part, prefix in zip(own, prefixes, strict=True):
        prepare(part)
        _split(part, plans.below(prefix), meshes, fsdp_options)
    prepare(model)
    _split(model, plans.below("", prefixes), meshes, fsdp_options)
    setattr(model, SPLIT_HERE, True)
    setattr(model, SPLIT_OVER, tensor_parallel_size)
    found = run_inside(model, lambda: run_trial(model, who=who))
    narrow = getattr(fsdp_options.get("mp_policy"), "param_dtype", None)
    # What is gathered in bfloat16 is computed in it, whatever the weights are.
    loose = narrow is not None and narrow.itemsize < model.dtype.itemsize
    allowed = found._replace(tolerance=ROUNDED) if loose else found
    if expected is not None and not allowed.allows(gap := expected.difference(found.log_probs)):
        raise ValueError(
            f"{who}: {type(model).__name__} computes other log-probs over {size} ranks than whole: "
            f"off by {gap}. Train it without tensor_parallel_size and expert_parallel_size."
        )
    if expected is not None:
        weights: list[Any] = list(model.parameters())
        whole = sum(x.numel() * x.element_size() for x in weights)
        parts = [x.to_local() if hasattr(x, "to_local") else x for x in weights]
        held = sum(x.numel() * x.element_size() for x in parts)
        told = "the model is split: this rank holds %.2f MB of its %.2f MB of weights"
        _LOG.info(told, held / 1e6, whole / 1e6)
    return model


def _meshes(size: int, matrices: int, experts: int, device: str) -> _Meshes:
    dense = init_device_mesh(device, (size // matrices, matrices), mesh_dim_names=("rows", "tp"))
    sparse = init_device_mesh(device, (size // experts, experts), mesh_dim_names=("copies", "ep"))
    return _Meshes(dense["rows"], dense["tp"], sparse["copies"], sparse["ep"])


def _split(part: nn.Module, plans: Plans, meshes: _Meshes, fsdp_options: Mapping[str, Any]) -> None:
    """Split a module by its plans, and spread what is left over the ranks with other rows."""
    shared = parallel_plans("split_model").tensor_parallel
    summed = [at for at, style in plans.matrices.items() if style == _SUMMED]
    matrices = {at: style for at, style in plans.matrices.items() if style != _SUMMED}
    if matrices:
        shared.apply_tensor_parallelism(part, meshes.matrices, matrices)
    for at, module in part.named_modules():
        if _starred(at) in summed:
            _sum_gradients(module, meshes.matrices)
    whole: set[Any] = set()
    if plans.experts:
        shared.apply_expert_parallelism(part, meshes.experts, meshes.matrices, plans.experts)
        dispatched = {at for at, x in plans.experts.items() if x == "ep_dispatch_experts"}
        for at, module in part.named_modules():
            if _starred(at) in dispatched:
                whole |= _spread_experts(module, meshes, fsdp_options)
    for value in part.parameters():
        _let_go(value)
    if meshes.rows.size() > 1:
        fully_shard(part, mesh=meshes.rows, ignored_params=whole, **fsdp_options)


def _starred(name: str) -> str:
    """The name of a module as plans have it, with ``*`` for numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _spread_experts(
    module: nn.Module, meshes: _Meshes, fsdp_options: Mapping[str, Any]
) -> set[Any]:
    """Let the gradients of experts be a mean over rows, as others are; give what is left whole."""
    # The experts of a rank get tokens of all rows of its group: gradients are their sum.
    num_rows = meshes.rows.size()
    if num_rows == 1:
        return set()
    if meshes.copies.size() > 1:
        experts: Any = fully_shard(module, mesh=meshes.copies, **fsdp_options)
        experts.set_gradient_divide_factor(float(num_rows))
        if dist.get_backend(meshes.copies.get_group()) != "nccl":
            experts.set_force_sum_reduction_for_comms(True)  # gloo has no division
        return set()
    for value in module.parameters(recurse=False):
        value.register_hook(lambda gradient: gradient / num_rows)
    return set(module.parameters(recurse=False))


def _let_go(value: Any) -> None:
    """Keep the piece of a parameter that this rank has, and not the whole that it is a view of."""
    piece = getattr(value, "_local_tensor", None)
    if piece is not None and piece.untyped_storage().nbytes() > piece.numel() * piece.itemsize:
        value._local_tensor = piece.clone()


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module of which every rank has a copy, and other heads, get the gradient of all."""
    # Transformers adds ``parameter.grad`` up behind each backward pass: of a second micro-batch
    # that counts the first one again, and of FSDP2 there is none yet.
    inside, group = module.forward, mesh.get_group()

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _parameters_of(module, lambda value: sum_gradient(value, group)):
            return inside(*args, **kwargs)

    module.forward = cast("Any", forward)


@contextmanager
def _parameters_of(module: nn.Module, change: Callable[[Tensor], Any]) -> Iterator[None]:
    """Inside, the parameters of a module itself are something made of them."""
    own: dict[str, Any] = dict(module._parameters)
    module._parameters.update({name: change(x) for name, x in own.items() if x is not None})
    try:
        yield
    finally:
        module._parameters.update(own)

"""The optimizer of the settings and its schedule; Muon and 8-bit AdamW beside those of torch."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_data import import_package

from .settings.schema import SCHEDULES, OptimConfig


def matrices_of(model: nn.Module) -> list[Tensor]:
    """The weights that Muon trains: of linear layers, without embeddings and heads.

    A head is what gives the logits, tied to the embeddings or not, or one number. Adapters are
    linear layers.

    Args:
        model: of Transformers, or any other; heads are known by ``get_output_embeddings``.

    Returns:
        Parameters of two dimensions, in the order of the model.
    """
    left_out = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for part in model.modules():
        head_of: Any = getattr(part, "get_output_embeddings", None)
        head = None if head_of is None else head_of()
        left_out |= set() if head is None else {id(value) for value in head.parameters()}
    weights = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
    found = {id(w): w for w in weights if w.ndim == 2 and len(w) > 1 and id(w) not in left_out}
    return [*found.values()]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices, AdamW for all other parameters, as one optimizer.

    Its groups are those of the two, and what they remember is one state, by parameter, so that it
    is saved and loaded like any other's. The updates of Muon are scaled to the size of AdamW's
    (``adjust_lr_fn="match_rms_adamw"``): both go by the same learning rate.

    Args:
        matrices: parameters of two dimensions, see :func:`matrices_of`.
        others: all further parameters; may be empty.
        lr: learning rate of both.
        weight_decay: of both.
        momentum: of Muon.
        betas: of AdamW.
        eps: of AdamW.
        fused: of AdamW.

    Raises:
        ValueError: there is no matrix, or one has not two dimensions.

    See Also:
        Jordan, 2024, https://kellerjordan.github.io/posts/muon; Liu et al., 2025, arXiv:2502.16982,
        section 2.2, for the scale.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        matrices, others = list(matrices), list(others)
        if not matrices:
            raise ValueError(
                "MuonWithAdamW: there is no matrix to train, so Muon has nothing to do. Take AdamW."
            )
        common: Any = {"lr": lr, "weight_decay": weight_decay}
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **common)
        ]
        if others:
            adamw = torch.optim.AdamW(others, betas=betas, eps=eps, fused=fused, **common)
            self._parts.append(adamw)
        self._counts = [len(part.param_groups) for part in self._parts]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the two work on the groups and the state of this one."""
        begin = 0
        for part, count in zip(self._parts, self._counts, strict=True):
            part.param_groups, part.state = self.param_groups[begin : begin + count], self.state
            begin += count

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Make a step of both.

        Args:
            closure: computes the loss anew, with gradients; called once.

        Returns:
            Its loss; ``None`` without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """See ``Optimizer.load_state_dict`` of torch."""
        super().load_state_dict(dict(state_dict))
        self._share()


def adamw_8bit(parameters: Iterable[Tensor], **settings: Any) -> torch.optim.Optimizer:
    """AdamW of bitsandbytes, whose moments take a byte each, on CPU and GPU.

    Parameters of fewer than 4,096 elements keep moments of float32.

    Args:
        parameters: that are trained.
        **settings: ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Raises:
        ImportError: the package bitsandbytes is not there.
    """
    install = "pip install 'torchrl-agents[adamw8bit]'"
    bitsandbytes: Any = import_package("bitsandbytes", who="optim.name=adamw8bit", install=install)
    return bitsandbytes.optim.AdamW8bit(list(parameters), **settings)


def build_optimizer(
    cfg: OptimConfig, parameters: Iterable[Tensor], model: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    """The optimizer, as its settings say.

    Args:
        cfg: the settings.
        parameters: that are trained.
        model: whose they are; Muon asks which of them are its matrices.

    Raises:
        ValueError: of Muon, no matrix is trained.
        ImportError: the package of the optimizer is not there.
    """
    common: Any = {"lr": cfg.learning_rate, "weight_decay": cfg.weight_decay}
    parameters = list(parameters)
    if len({getattr(value, "device_mesh", None) for value in parameters}) > 1:
        common["foreach"] = False  # one kernel for many tensors takes no two kinds of shards
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, momentum=cfg.beta1, **common)
    common |= {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    if cfg.name == "adamw8bit":
        return adamw_8bit(parameters, **common)
    if "foreach" not in common and all(value.is_cuda for value in parameters):
        common["fused"] = True
    if cfg.name == "muon":
        assert model is not None
        trained = {id(value) for value in parameters}
        matrices = [value for value in matrices_of(model) if id(value) in trained]
        taken = {id(value) for value in matrices}
        others = [value for value in parameters if id(value) not in taken]
        return MuonWithAdamW(matrices, others, momentum=cfg.momentum, **common)
    return torch.optim.AdamW(parameters, **common)


def set_learning_rate(
    cfg: OptimConfig, optimizer: torch.optim.Optimizer, step: int, num_steps: int
) -> float:
    """Set the learning rate of a step: a linear warm-up, then the schedule.

    Args:
        cfg: the settings.
        optimizer: of which it is set.
        step: from 1.
        num_steps: of the whole run.

    Returns:
        The learning rate.
    """
    shape = SCHEDULES[cfg.schedule]((step - 1) / num_steps)
    rate = (cfg.learning_rate or 0.0) * min(step / max(1, cfg.num_warmup_steps), shape)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate

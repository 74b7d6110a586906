"""New weights for a vLLM engine: checked as a whole, then loaded in one go."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_modules.weights.state import all_finite

from .runtime import VLLMNames


@dataclass(frozen=True)
class ExpectedWeights:
    """The state dict that a model must be given, by Transformers' names.

    Args:
        shapes: of every parameter that has to be there.
        aliases: other names of tied parameters, to the name in ``shapes``. A state dict may hold
            them, with equal values.
        dtype: what the engine computes in; given values are cast to it.
    """

    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    dtype: torch.dtype

    @classmethod
    def from_config(
        cls, config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False
    ) -> "ExpectedWeights":
        """Read them off the Transformers model of a configuration, built without memory.

        Args:
            config: a Transformers configuration of a causal language model.
            dtype: what the engine computes in.
            trust_remote_code: the model's code comes with its weights.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        names = {id(value): name for name, value in model.named_parameters()}
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        shared = model.named_parameters(remove_duplicate=False)
        aliases = {name: names[id(value)] for name, value in shared if name not in shapes}
        return cls(shapes=shapes, aliases=aliases, dtype=dtype)

    @classmethod
    def of_engine(cls, llm_engine: Any) -> "ExpectedWeights":
        """Those of an engine of this process.

        Args:
            llm_engine: vLLM's ``LLMEngine``.

        Raises:
            RuntimeError: it can't be updated: it has several workers, quantised weights or LoRA
                adapters.
        """
        config = llm_engine.vllm_config.model_config
        obstacles = {
            "the model runs in other processes": not hasattr(
                llm_engine.model_executor, "driver_worker"
            ),
            "the model is quantised": config.quantization is not None,
            "the engine holds LoRA adapters": llm_engine.vllm_config.lora_config is not None,
        }
        found = [obstacle for obstacle, there in obstacles.items() if there]
        if found:
            raise RuntimeError(
                f"VLLMEngine.update_weights: {found[0]}, which it cannot update. Build the "
                "engine from whole weights, in this process alone."
            )
        return cls.from_config(
            config.hf_config, config.dtype, trust_remote_code=config.trust_remote_code
        )

    def check(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Check a state dict as a whole; nothing is changed.

        Args:
            state_dict: parameter name to value, on any device.

        Returns:
            The values to load, aliases left out.

        Raises:
            TypeError: a value is no plain tensor of floating point.
            ValueError: a name is unknown or missing, a shape is wrong, a value is not finite in
                the engine's precision, or a tied parameter is given two values.
        """
        self._check_names(state_dict)
        for name, value in state_dict.items():
            _check_tensor(name, value, self.shapes[self.aliases.get(name, name)], self.dtype)
        for alias, name in self.aliases.items():
            if alias in state_dict and not _same(state_dict[alias], state_dict[name]):
                raise ValueError(
                    f"VLLMEngine.update_weights: {alias} and {name} are tied in this model, but "
                    "the state dict gives them different values. Leave one of them out, or untie "
                    "them in the model's configuration and build the engine anew."
                )
        return {name: state_dict[name].detach() for name in self.shapes}

    def _check_names(self, state_dict: Mapping[str, Tensor]) -> None:
        missing = self.shapes.keys() - state_dict.keys()
        unknown = state_dict.keys() - self.shapes.keys() - self.aliases.keys()
        if missing or unknown:
            raise ValueError(
                "VLLMEngine.update_weights: the state dict must hold every parameter of the model "
                f"under its Transformers name. It lacks {_some(missing)} and has no use for "
                f"{_some(unknown)}. Pass model.state_dict() of the unwrapped model."
            )


def load_weights(worker: Any, names: VLLMNames, weights: Mapping[str, Tensor]) -> None:
    """Load checked weights; runs in vLLM's worker, between two steps.

    Args:
        worker: vLLM's worker, in this process.
        names: of vLLM.
        weights: every parameter, by Transformers' names.

    Raises:
        RuntimeError: vLLM left parameters unloaded; the model is then a mixture.
    """
    model = worker.model_runner.get_model()
    load_into(model, worker.vllm_config, worker.model_config, names, weights)


def load_into(
    model: Any,
    vllm_config: Any,
    model_config: Any,
    names: VLLMNames,
    weights: Mapping[str, Tensor],
) -> None:
    """Load checked weights into a worker's model.

    Args:
        model: vLLM's.
        vllm_config: of the worker.
        model_config: of the model.
        names: of vLLM.
        weights: every parameter, by Transformers' names.

    Raises:
        RuntimeError: vLLM left parameters unloaded; the model is then a mixture.
    """
    with names.set_current_vllm_config(vllm_config), torch.no_grad():
        names.initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(weights.items()))
        finally:
            # Puts the parameters back from the meta device, loaded or not.
            names.finalize_layerwise_reload(model, model_config)
        if names.current_platform.is_cpu():
            _repack(model, names.VocabParallelEmbedding)
    unloaded = {name for name, _ in model.named_parameters()} - (loaded or set())
    if loaded is not None and unloaded:
        raise RuntimeError(f"vLLM did not load {_some(unloaded)} from the state dict.")


def _repack(model: torch.nn.Module, embedding_class: type) -> None:
    # On a CPU two kinds of layer compute with packed copies, which the reload leaves stale: a head
    # that is tied to the embedding, and the experts of a mixture.
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, embedding_class):
            method.process_weights_after_loading(module)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None:
            experts.process_weights_after_loading(module)


def _check_tensor(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    who = f"VLLMEngine.update_weights: {name}"
    if not isinstance(value, Tensor) or hasattr(value, "full_tensor"):
        raise TypeError(f"{who} is a {type(value).__name__}; it must be a whole torch.Tensor.")
    if value.is_meta or not value.is_floating_point():
        raise TypeError(f"{who} is {value.dtype} on {value.device}; it must hold floating point.")
    if tuple(value.shape) != shape:
        raise ValueError(f"{who} has shape {tuple(value.shape)}; the engine's has {shape}.")
    if not all_finite(value.detach().to(dtype)):
        raise ValueError(
            f"{who} holds values that are not finite in {dtype}. Did training diverge?"
        )


def _same(left: Tensor, right: Tensor) -> bool:
    if left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True
    return torch.equal(left, right.to(left))


def _some(names: Iterable[str], limit: int = 4) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return f"{ordered[:limit]}{rest}"

"""Sampled tokens computed by an inference engine, beside Transformers.

Shape legend: K sampled tokens of a row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from .recomputation import Recomputation
from .sampled_row import SampledRow

if TYPE_CHECKING:
    from torchrl_modules.vllm.engine import VLLMEngine

_WHO: Final = "EngineCheck"


class EngineCheck:
    """Computes rows by vLLM, with the weights of each version.

    vLLM gives log-probs of prompts under the model's own softmax, so that rows are computed which
    were drawn from it, and no others.

    Args:
        engine: in this process; its weights are replaced.
        recomputation: has the weights and the sampling parameters.

    Raises:
        ValueError: the rows were drawn in a way that vLLM can't compute a prompt in, which the
            message names.
    """

    name = "vllm"

    def __init__(self, engine: "VLLMEngine", recomputation: Recomputation) -> None:
        check_engine_can(recomputation)
        self._engine, self._computes = engine, recomputation

    def log_probs(self, rows: Sequence[SampledRow]) -> list[Tensor]:
        """Log-probs of the sampled tokens of each row.

        Args:
            rows: all versions of which have weights.

        Returns:
            Of each row float64 ``[K]`` in nats, on the host, in the order of its targets.

        Raises:
            ValueError: a row has experts or sets of its own, which vLLM can't be given.
        """
        for row in rows:
            for what, column in (
                ("sampling_mask", row.sampling_masks),
                ("routed_experts", row.experts),
            ):
                if column:
                    raise ValueError(
                        f"--engine vllm: {row.name} has {what} on record, and vLLM computes a "
                        "prompt over the whole vocabulary and by its own routers. Leave --engine "
                        "out: Transformers computes in them."
                    )
        found = [torch.full((len(row.targets),), torch.nan, dtype=torch.float64) for row in rows]
        own = [self._computes.versions_of(row) for row in rows]
        for version in sorted({v for each in own for v in each}, key=lambda v: (v is None, v or 0)):
            here = [i for i, each in enumerate(own) if version in each]
            self._computes.prepare(self._computes.numbers, version)
            model: Any = self._computes.policy.model
            self._engine.update_weights(model.state_dict())
            whole = self._engine.prompt_log_probs([rows[i].ids for i in here])
            for i, values in zip(here, whole, strict=True):
                mine = torch.tensor([v == version for v in own[i]], dtype=torch.bool)
                found[i] = torch.where(mine, values[rows[i].targets], found[i])
        return found


def check_engine_can(recomputation: Recomputation) -> None:
    """Check that vLLM can compute rows as they were drawn.

    Args:
        recomputation: has the settings.

    Raises:
        ValueError: it can't; the message names the setting.
    """
    sampling = recomputation.recorded.sampling
    faults = {
        f"temperature={sampling.temperature:g}": sampling.temperature != 1.0,
        f"top_k={sampling.top_k}, top_p={sampling.top_p:g}, min_p={sampling.min_p:g}": (
            sampling.truncates
        ),
        "penalties, a bias or min_tokens": sampling.changes_logits,
        "collector.recompute=false (keys and values of older weights)": recomputation.keeps_cache,
        "adapters": recomputation.has_adapters,
        f"{recomputation.numbers}": recomputation.numbers.autocast is not None,
    }
    if (why := next((name for name, here in faults.items() if here), None)) is not None:
        raise ValueError(
            f"--engine vllm: the run was drawn with {why}, and vLLM gives the log-probs of a "
            "prompt under the model's own softmax, with one set of weights, alone. Leave --engine "
            "out: Transformers computes it."
        )

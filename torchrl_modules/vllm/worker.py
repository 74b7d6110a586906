"""Extension of vLLM's workers, which can be asked for their limits and sent new weights.

vLLM takes it with ``worker_extension_cls="torchrl_modules.vllm.worker.vLLMWorker"``, which
``VLLMEngine`` and ``python -m torchrl_modules.vllm.server`` add. Nobody else imports it.
"""

import base64
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from torchrl_modules.engines.process_state import this_process
from torchrl_modules.weight_transfer.broadcast_group import (
    BroadcastGroup,
    stateless_init_process_group,
)
from torchrl_modules.weight_transfer.layout import WeightLayout

from .image_scheduler import rereads_images
from .releases import tells_versions
from .requests import own_ends
from .runtime import FOLDER_VARIABLE, import_vllm
from .weights import expected_weights, load_all_or_none, load_weights, takes_images

_ADAPTER_FILES: Final = {"adapter_config.json", "adapter_model.safetensors"}


def _folder_of(name: str) -> Path:
    if not re.fullmatch(r"version-\w+-\w+", name):
        raise ValueError(f"{name!r} is no name of adapters.")
    # The server's own folder goes with it, however it ends.
    return Path(os.environ.get(FOLDER_VARIABLE, tempfile.gettempdir()), name)


class vLLMWorker:
    """Methods that vLLM mixes into its worker, so that a trainer can update its weights.

    TorchRL's class of this name was a worker itself; today's vLLM has its own for each device and
    takes extensions. Called over HTTP, so the methods take and give JSON.
    """

    model_config: Any
    model_runner: Any
    vllm_config: Any
    device: torch.device
    _torchrl_group: BroadcastGroup | None = None
    _torchrl_label = "default"

    def torchrl_limits(self) -> dict[str, Any]:
        """Return what requests are checked against.

        Returns:
            ``vocab_size``, ``max_model_len``, the model's ``own_ends`` and ``dtype``, on which
            kind of ``device`` it computes, how many workers there are, ``num_workers``, whether
            responses say which weights drew them, ``tells_versions``, and of the weights that
            serve the ``label``, which vLLM itself knows where they do; how many sets of adapters
            may be drawn with at once, ``max_adapters``, and their ``max_lora_rank``, 0 where it
            takes none; whether prompts may hold images, ``takes_images``; and how its weights are
            quantised, ``quantization``.
        """
        lora = self.vllm_config.lora_config
        return {
            "label": self._torchrl_label,
            "tells_versions": tells_versions(),
            "num_workers": self.vllm_config.parallel_config.world_size_across_dp,
            "device": self.device.type,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "own_ends": own_ends(self.model_config),
            "takes_images": takes_images(self.model_config) and rereads_images(self.vllm_config),
            "max_adapters": lora.max_loras if lora else 0,
            "max_lora_rank": lora.max_lora_rank if lora else 0,
            "quantization": self.model_config.quantization,
        }

    def torchrl_process(self) -> dict[str, Any]:
        """Names of this process, see `this_process`, and of the engine's, if it is another one."""
        return this_process() | {"parent": os.getppid()}

    def torchrl_label_weights(self, label: str | None = None) -> dict[str, str]:
        """The name of the weights that serve, for a release of vLLM that keeps none itself.

        Args:
            label: what they are called from now on; ``None`` leaves it. Asked for every row, so
                nothing else is looked up.

        Returns:
            Their ``label``.
        """
        if label is not None:
            self._torchrl_label = label
        return {"label": self._torchrl_label}

    def torchrl_expected_weights(self) -> dict[str, Any]:
        """``ExpectedWeights.message`` of the model's own weights."""
        return expected_weights(self.model_config).message

    def torchrl_keep_adapters(self, name: str, file: str, start: int, piece: str) -> dict[str, str]:
        """Write a piece of a file of adapters, which vLLM loads when it is whole.

        Args:
            name: of the adapters.
            file: ``adapter_config.json`` or ``adapter_model.safetensors``.
            start: where in the file the piece begins.
            piece: in base 64.

        Returns:
            The ``path`` of their folder.
        """
        folder = _folder_of(name)
        folder.mkdir(mode=0o700, exist_ok=True)
        if file not in _ADAPTER_FILES:
            raise ValueError(f"adapters have the files {sorted(_ADAPTER_FILES)}, not {file!r}.")
        # Several workers of one machine write the same to the same place.
        descriptor = os.open(folder / file, os.O_CREAT | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.seek(start)
            opened.write(base64.b64decode(piece))
        return {"path": str(folder)}

    def torchrl_drop_adapters(self, name: str) -> dict[str, str]:
        """Remove the files of adapters.

        Args:
            name: of the adapters.
        """
        shutil.rmtree(_folder_of(name), ignore_errors=True)
        return {}

    def torchrl_load_weights(self, path: str) -> dict[str, str]:
        """Check the weights of a file as a whole, then load them, between two steps.

        Args:
            path: a safetensors file with every parameter, by Transformers' names.

        Returns:
            ``{}``; or what was wrong: ``refused``, and nothing was changed, or ``failed``, and the
            weights are a mixture.
        """
        return load_all_or_none(self, lambda: load_file(path))

    def torchrl_join(
        self, address: str, port: int, world_size: int, device: str, timeout_s: float
    ) -> dict[str, Any]:
        """Join a trainer, which waits there as rank 0; of an earlier one, leave it.

        Args:
            address: of the trainer.
            port: of the trainer.
            world_size: the trainer and all workers.
            device: ``"cuda"``: it sends from GPU to GPU.
            timeout_s: of the meeting, and of each bucket.

        Returns:
            ``ExpectedWeights.message`` of the weights: what every update has to hold.
        """
        self._leave()
        parallel = self.vllm_config.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._torchrl_device = self.device if device == "cuda" else torch.device("cpu")
        self._torchrl_group = stateless_init_process_group(
            address, port, rank, world_size, self._torchrl_device, timeout_s=timeout_s
        )
        return expected_weights(self.model_config).message

    def torchrl_receive_weights(self, layout: dict[str, Any]) -> dict[str, str]:
        """Load weights as they come, a bucket at a time; the trainer has checked them as a whole.

        Args:
            layout: the arguments of :class:`~torchrl_modules.weight_transfer.layout.WeightLayout`.

        Returns:
            ``{}``; or what ``failed``, and the weights are a mixture.
        """
        try:
            load_weights(
                self, import_vllm(in_process=False), self._arriving(WeightLayout(**layout))
            )
        except Exception as error:
            self._leave()  # the trainer, which may still be sending, gets an error
            return {"failed": f"{type(error).__name__}: {error}"}
        return {}

    def _arriving(self, layout: WeightLayout) -> Iterator[tuple[str, torch.Tensor]]:
        if self._torchrl_group is None:
            raise RuntimeError("no trainer has been joined")
        for bucket in layout.buckets():  # in memory of its own: vLLM keeps what is of one layer
            size = layout.size_of(bucket)
            flat = torch.empty(size, dtype=torch.uint8, device=self._torchrl_device)
            self._torchrl_group.broadcast(flat)
            yield from layout.views(flat, bucket)

    def _leave(self) -> None:
        group, self._torchrl_group = self._torchrl_group, None
        if group is not None:
            group.close()

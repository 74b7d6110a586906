"""The version of the policy, written into the data.

Shape legend: B rows.
"""

import uuid
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.data import Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import Transform

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.keys import POLICY_VERSION

VersionType = Literal["int", "uuid"] | type[int] | type[uuid.UUID] | type[str]


class PolicyVersion(ChecksAttributes, Transform):
    """Writes the version of the policy at every reset and step, as ``policy_version``.

    By hand, call :meth:`increment_version` after each update of the weights. A collector with
    ``track_policy_version=True`` has one and keeps it at the version that its policy acknowledged.

    Args:
        version_type: ``"int"`` (or ``int``) counts from 0 and writes int64 ``[B]``; ``"uuid"`` (or
            ``uuid.UUID``, ``str``) draws a name for each version and writes a string, which
            tells versions of several runs apart.

    Raises:
        ValueError: ``version_type`` is another one.

    Example:
        >>> tracker = PolicyVersion()
        >>> tracker.version
        0
        >>> tracker.increment_version()
        1
    """

    def __init__(self, version_type: VersionType = int) -> None:
        super().__init__()
        if version_type not in (int, str, uuid.UUID, "int", "uuid"):
            raise ValueError(
                f"PolicyVersion: version_type must be 'int' or 'uuid', got {version_type!r}."
            )
        self.named = version_type not in (int, "int")
        self._number = 0
        self._names: dict[int, str] = {}

    @property
    def version(self) -> int | str:
        """The present version, as it is written: a number or a name."""
        return self.label(self._number)

    def label(self, number: int) -> int | str:
        """Return how a version is written.

        Args:
            number: of the version.
        """
        if not self.named:
            return number
        return self._names.setdefault(number, str(uuid.uuid4()))

    def increment_version(self) -> int | str:
        """Count one version on, and give it."""
        return self.advance_to(self._number + 1)

    def advance_to(self, number: int) -> int | str:
        """Go to the version that the policy has, and give it.

        Args:
            number: at least the present one.

        Raises:
            ValueError: versions don't go back.
        """
        if number < self._number:
            raise ValueError(
                f"PolicyVersion is at version {self._number} and can't go back to {number}."
            )
        self._number = number
        return self.version

    def get_extra_state(self) -> dict[str, Any]:
        """The present version and the names of all, of plain values; part of ``state_dict()``."""
        return {"number": self._number, "names": dict(self._names)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go back to a state; what ``load_state_dict()`` calls.

        Args:
            state: what :meth:`get_extra_state` gave.
        """
        self._number, self._names = state["number"], dict(state["names"])

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._step(tensordict, tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        del tensordict
        shape = next_tensordict.batch_size
        if self.named:
            value = NonTensorData(self.version, batch_size=shape)
        else:
            value = torch.full(shape, self._number, device=next_tensordict.device)
        return next_tensordict.set(POLICY_VERSION, value)

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Add the entry to what the environment gives."""
        assert isinstance(observation_spec, Composite)
        shape = observation_spec.shape
        if self.named:
            entry = NonTensor(shape=shape, example_data="", device=observation_spec.device)
        else:
            entry = Unbounded(shape=shape, dtype=torch.int64, device=observation_spec.device)
        observation_spec[POLICY_VERSION] = entry
        return observation_spec

"""Weight updates of a policy that lives in the trainer's process."""

from .interface import WeightUpdater


class InProcessUpdater(WeightUpdater):
    """Hands weights to the policy's engine, whatever it is, by reference.

    An engine of this process copies them; a vLLM server of this machine gets them in a file.
    """

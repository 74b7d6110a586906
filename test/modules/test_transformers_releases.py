"""What differs between releases of Transformers, asked of models as each release has them."""

import warnings

from torch import nn

from torchrl_modules.transformers_releases import recomputes_activations


class RenamedModel(nn.Module):
    """A model of 5.24 and later, which warns of the older name."""

    def __init__(self, is_on):
        super().__init__()
        self.is_activation_checkpointing = is_on

    @property
    def is_gradient_checkpointing(self):
        warnings.warn("renamed", FutureWarning, stacklevel=1)
        return self.is_activation_checkpointing


def test_layers_that_are_computed_again_are_told_by_either_name(make_tiny_model):
    model = make_tiny_model()  # of the release that is here
    assert not recomputes_activations(model)
    model.gradient_checkpointing_enable()
    assert recomputes_activations(model)
    with warnings.catch_warnings(action="error"):
        assert [recomputes_activations(RenamedModel(is_on)) for is_on in (True, False)] == [1, 0]
    assert not recomputes_activations(nn.Linear(1, 1))

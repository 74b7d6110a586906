"""A training loop behind a wire: clients of Tinker train and sample adapters of one model."""

from .serving import serve_training as serve_training

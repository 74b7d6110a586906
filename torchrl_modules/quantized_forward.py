"""Linear layers that compute with numbers of 8 bits, over whole weights that are trained.

An engine draws faster with matrices of 8 bits, and needs half their memory. What it draws are then
tokens of another model than the one with whole weights. A layer here computes what such an engine
does: each row of the matrix, and what a token brings to it, are scaled by their largest number and
rounded. In the backward pass the rounding counts as the identity (the straight-through estimator,
Bengio et al. 2013, https://arxiv.org/abs/1308.3432), so that gradients reach the whole weights.

Shape legend: N tokens, D inputs, E outputs.
"""

import warnings
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_data.checks import one_of

from .scoring.wrapped_models import unwrapped
from .weights.quantized_weights import quantization_of


class _Numbers(NamedTuple):
    """Numbers of 8 bits."""

    dtype: torch.dtype
    largest: float


_FP8: Final = "fp8_per_channel"
QUANTIZATIONS: Final = {_FP8: _Numbers(torch.float8_e4m3fn, 448.0)}
"""What products are computed with, by vLLM's name."""
_FIRST_WITH_FP8: Final = (8, 9)
"""Compute capability of the first GPUs that multiply numbers of float8."""
_STEP: Final = 16
"""Their kernels take matrices with a multiple of so many rows and columns."""
_SMALLEST: Final = 1 / 512
"""A scale is never less than that of rows with this as their largest number."""


def quantized_rows(x: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """Round each row to 8 bits, by a scale of its own.

    As vLLM's ``fp8_per_channel`` does it with the rows of a matrix and with tokens: the scale is
    the row's largest magnitude over the largest number of the type, at least 1 / (512 * 448).

    Args:
        x: ``[..., D]``, floating point.
        quantization: one of `QUANTIZATIONS`.

    Returns:
        The rounded numbers, ``[..., D]`` in a type of 8 bits, and the scales, float32
        ``[..., 1]``: their product stands for ``x``.
    """
    numbers = QUANTIZATIONS[quantization]
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / numbers.largest
    scale = scale.clamp_min(_SMALLEST / numbers.largest)
    return (x / scale).clamp(-numbers.largest, numbers.largest).to(numbers.dtype), scale


class _QuantizedProduct(torch.autograd.Function):
    """Of tokens and a matrix, both rounded; what is kept for the backward pass has 8 bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, name: str
    ) -> Tensor:
        """Compute ``[N, E]`` of ``[N, D]`` and ``[E, D]`` in a type."""
        tokens, scales = quantized_rows(x.to(dtype), name)
        matrix, matrix_scales = quantized_rows(weight.to(dtype), name)
        out = _product(tokens, scales, matrix, matrix_scales, dtype)
        ctx.save_for_backward(tokens, scales, weight)
        ctx.dtype, ctx.name, ctx.x_dtype = dtype, name, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out if bias is None else out + bias.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients, as if the rounded numbers were what was given."""
        tokens, scales, weight = ctx.saved_tensors
        grad, of_x, of_weight, of_bias = grads[0], None, None, None
        if ctx.needs_input_grad[0]:
            matrix, matrix_scales = quantized_rows(weight.to(ctx.dtype), ctx.name)
            of_x = (grad @ _whole(matrix, matrix_scales, ctx.dtype)).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (grad.t() @ _whole(tokens, scales, ctx.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0).to(ctx.bias_dtype)
        return of_x, of_weight, of_bias, None, None


def _whole(rounded: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (rounded.float() * scale).to(dtype)


def _product(
    tokens: Tensor, scales: Tensor, matrix: Tensor, matrix_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute ``[N, E]``; the sums are of float32."""
    if dtype == torch.bfloat16 and has_kernel(tokens.device, *matrix.shape):
        return scaled_product(tokens, scales, matrix, matrix_scales, dtype)
    sums = nn.functional.linear(tokens.float(), matrix.float())
    return (sums * scales * matrix_scales.t()).to(dtype)


def scaled_product(
    tokens: Tensor, scales: Tensor, matrix: Tensor, matrix_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute ``[N, E]`` by a kernel that multiplies numbers of 8 bits.

    Args:
        tokens: ``[N, D]`` of 8 bits.
        scales: float32 ``[N, 1]``.
        matrix: ``[E, D]`` of 8 bits.
        matrix_scales: float32 ``[E, 1]``.
        dtype: of the result; the sums are of float32.
    """
    return torch._scaled_mm(  # type: ignore[attr-defined]
        tokens, matrix.t(), scale_a=scales, scale_b=matrix_scales.t(), out_dtype=dtype
    )


@torch.compiler.assume_constant_result
def has_kernel(device: torch.device, num_outputs: int, num_inputs: int) -> bool:
    """Return whether a device multiplies numbers of 8 bits, in matrices of such a shape.

    It is tried once for each GPU; where it fails, or gives another product, a warning says
    so, and products are computed in float32, as on a CPU, where a kernel would not be faster.
    """
    if device.type != "cuda" or num_outputs % _STEP or num_inputs % _STEP:
        return False
    return _is_right_on(device)


@cache
def _is_right_on(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        return False
    reason = kernel_fault(device)
    if reason:
        name = torch.cuda.get_device_name(device)
        warnings.warn(
            f"Products of 8 bits are computed in float32 on {name}, which is slow: {reason}.",
            stacklevel=2,
        )
    return not reason


def kernel_fault(device: torch.device) -> str:
    """Try the kernel on numbers of all sizes; return what is wrong, or nothing."""
    x = torch.linspace(-2, 5, 64 * 48, device=device).view(48, 64)
    rows, others = quantized_rows(x.sinh(), _FP8), quantized_rows(x.cos()[:32], _FP8)
    try:
        found = scaled_product(*rows, *others, torch.bfloat16).double()
    except (RuntimeError, ValueError) as error:
        return f"torch._scaled_mm: {' '.join(str(error).split())[:200]}"
    own = (rows[0].double() * rows[1]) @ (others[0].double() * others[1]).t()
    gap = float((found - own).norm() / own.norm())
    return "" if gap < 0.01 else f"torch._scaled_mm is off by {gap:.2g}"


class QuantizedLinear(nn.Linear):
    """A linear layer whose matrix and inputs are rounded to 8 bits; :func:`quantize_forward`."""

    quantization: str
    """One of `QUANTIZATIONS`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``[..., E]`` of ``[..., D]``, in the type of autocast where that is on."""
        kind = input.device.type
        is_cast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_cast else input.dtype
        with torch.autocast(kind, enabled=False):
            flat = input.reshape(-1, input.shape[-1])
            out = _QuantizedProduct.apply(flat, self.weight, self.bias, dtype, self.quantization)
        return out.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        return f"{super().extra_repr()}, quantization={self.quantization}"


def quantize_forward(model: nn.Module, quantization: str) -> list[str]:
    """Let the linear layers of a model compute with numbers of 8 bits, all but its head.

    What vLLM draws with under ``quantization="fp8_per_channel"``, this model computes when it is
    scored and trained. Its weights stay whole: state dict, optimizer and saved files are as before.

    Args:
        model: a causal language model of Transformers, in place. Adapters are put on afterwards.
        quantization: one of `QUANTIZATIONS`.

    Returns:
        The names of the layers.

    Raises:
        ValueError: ``quantization`` is unknown; or the model has adapters, weights that are
            quantised already, or matrices that belong to no linear layer, as mixtures of experts
            and convolutions do.

    Example:
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> quantize_forward(model, "fp8_per_channel")[:2]
        ['model.layers.0.self_attn.q_proj', 'model.layers.0.self_attn.k_proj']
    """
    who = "quantize_forward"
    one_of("quantization", quantization, tuple(QUANTIZATIONS), who=who)
    inside: Any = unwrapped(model, who=who)
    if (kind := quantization_of(inside)) is not None:
        raise ValueError(f"{who}: the weights are quantised already ({kind}). Give whole ones.")
    if inside is not model or hasattr(inside, "peft_config"):
        raise ValueError(f"{who}: give the model itself, before adapters or wrappers are put on.")
    head = inside.get_output_embeddings()
    layers: dict[str, Any] = {
        name: each
        for name, each in inside.named_modules()
        if type(each) in (nn.Linear, QuantizedLinear) and each is not head
    }
    known = {id(each.weight) for each in layers.values()}
    known |= {id(getattr(e, "weight", None)) for e in (head, inside.get_input_embeddings())}
    other = [n for n, w in inside.named_parameters() if w.dim() > 1 and id(w) not in known]
    if other or not layers:
        raise ValueError(
            f"{who}: {type(inside).__name__} has matrices that are not of linear layers, "
            f"{other[:4]}, which an engine rounds in ways of its own."
        )
    for layer in layers.values():
        layer.__class__ = QuantizedLinear
        layer.quantization = quantization
    return list(layers)


def forward_quantization(model: nn.Module) -> str | None:
    """Return what a model's products are computed with; ``None`` where its numbers are whole."""
    found = (each.quantization for each in model.modules() if isinstance(each, QuantizedLinear))
    return next(found, None)

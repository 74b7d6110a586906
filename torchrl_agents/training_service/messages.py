"""Requests of Tinker's clients as tensors, and answers as the bytes that they read."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_data import import_package

from .errors import RefusedRequest
from .token_losses import TOKEN_LOSSES

INSTALL: Final = "pip install 'torchrl-agents[tinker]'"
_WHO: Final = "serve-training"
_OPTIONAL: Final = {"weights": 1.0}
"""Inputs that a request may leave out, and what stands for them."""
_FIRST_FIELDS_BYTES: Final = 4096
"""Of a body, as far as its first two fields may reach."""


@cache
def _protocol() -> Any:
    """The messages of Tinker's own package."""
    import_package("tinker", who=_WHO, install=INSTALL)
    from tinker.proto import tinker_public_pb2

    return tinker_public_pb2


class Example(NamedTuple):
    """A sequence of a training request. N positions."""

    ids: Tensor
    """int64 ``[N]``: what the model reads."""
    targets: Tensor
    """int64 ``[N]``: the token to score after each of them."""
    inputs: Mapping[str, Tensor]
    """float32 ``[N]`` each: what the loss reads."""


class ForwardBackward(NamedTuple):
    """A training request."""

    model_id: str
    seq_id: int
    data: Sequence[Any]
    """The sequences as they came, see :func:`read_examples`."""
    loss_fn: str
    settings: Mapping[str, Any]
    """Of the loss."""
    is_forward_only: bool


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Read a training request.

    Args:
        body: a ``ForwardBackwardRequest`` of Tinker's protocol buffers.

    Returns:
        The request; a sequence that can't be read is told of when the request is done, in its
        turn.

    Raises:
        RefusedRequest: it is no such message.
    """
    messages = _protocol()
    request = messages.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except Exception as error:  # of whatever protocol buffers are installed
        raise RefusedRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    settings: dict[str, Any] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackward(
        request.model_id,
        request.seq_id,
        request.data,
        request.loss_fn,
        settings,
        request.forward_only,
    )


def read_first_fields(body: bytes | bytearray) -> tuple[str | None, int | None]:
    """Read whose request a body is and its number, of a body that is no whole message.

    Args:
        body: of a ``ForwardBackwardRequest``, which begins with both.

    Returns:
        ``model_id`` and ``seq_id``, ``None`` for what does not stand there.
    """
    bounded = bytes(body[:_FIRST_FIELDS_BYTES])
    run, at = None, 0
    if bounded[:1] == b"\x0a":  # field 1, a text
        length, begin = _varint(bounded, 1)
        at = begin + (length or 0)
        run = bounded[begin:at].decode(errors="replace")
    number = _varint(bounded, at + 1)[0] if bounded[at : at + 1] == b"\x10" else None  # field 2
    return run, number


def _varint(body: bytes, at: int) -> tuple[int | None, int]:
    """A number of protocol buffers, and where what follows it begins."""
    value = 0
    for place, byte in enumerate(body[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return None, at


def read_examples(request: ForwardBackward, vocab_size: int, max_len: int) -> list[Example]:
    """Read the sequences of a training request.

    Args:
        request: its loss is one of :data:`~.token_losses.TOKEN_LOSSES`.
        vocab_size: token ids are below it.
        max_len: most tokens of a sequence, its last target included.

    Raises:
        RefusedRequest: a sequence is empty or too long, holds images, has inputs of other length
            or not those of the loss, or a value that is not finite.
    """
    names = TOKEN_LOSSES[request.loss_fn].inputs
    if not len(request.data):
        raise RefusedRequest("forward_backward has no data.")
    return [
        _example(datum, number, names, vocab_size, max_len)
        for number, datum in enumerate(request.data)
    ]


def _example(
    datum: Any, number: int, names: Sequence[str], vocab_size: int, max_len: int
) -> Example:
    who = f"datum {number}"
    ids = read_chunks(datum.model_input, who)
    given = {
        name: _dense(tensor, f"{who}: {name}") for name, tensor in datum.loss_fn_inputs.items()
    }
    for name in ("target_tokens", *(name for name in names if name not in _OPTIONAL)):
        if name not in given:
            raise RefusedRequest(f"{who} lacks {name!r} in loss_fn_inputs; it has {sorted(given)}.")
    if unknown := sorted(set(given) - {"target_tokens", *names}):
        raise RefusedRequest(
            f"{who} has {unknown[0]!r} in loss_fn_inputs, which this loss does not read; it reads "
            f"target_tokens, {', '.join(names)}."
        )
    check_ids(who, ids, vocab_size, max_len - 1)
    for name, values in given.items():
        if values.shape != ids.shape:
            raise RefusedRequest(
                f"{who}: {name} has shape {list(values.shape)} for {len(ids)} positions of "
                "model_input. One value a position is served here."
            )
        if not values.isfinite().all():
            raise RefusedRequest(f"{who}: {name} holds NaN or infinity.")
    targets = given.pop("target_tokens")
    if targets.is_floating_point():
        raise RefusedRequest(f"{who}: target_tokens must be integers.")
    check_ids(f"{who}: target_tokens", targets, vocab_size, max_len)
    inputs = {name: given[name].float() for name in names if name in given}
    for name, value in _OPTIONAL.items():
        if name in names and name not in inputs:
            inputs[name] = torch.full(ids.shape, value)
    return Example(ids, targets.long(), inputs)


def check_ids(who: str, ids: Tensor, vocab_size: int, max_len: int) -> None:
    """Check that the model can read tokens.

    Raises:
        RefusedRequest: there is none, there are too many, or one is outside the vocabulary.
    """
    if len(ids) == 0:
        raise RefusedRequest(f"{who} has no token.")
    if len(ids) > max_len:
        raise RefusedRequest(f"{who} has {len(ids)} tokens; this model takes {max_len} here.")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise RefusedRequest(f"{who} has a token outside the vocabulary of {vocab_size}.")


def read_chunks(chunks: Iterable[Any], who: str) -> Tensor:
    """Token ids of a model input in protocol buffers, int64 ``[N]``.

    Raises:
        RefusedRequest: a chunk is an image or a sound.
    """
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RefusedRequest(f"{who} holds a chunk of kind {kind!r}; text is served here.")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return torch.from_numpy(ids.astype(np.int64))


def _dense(tensor: Any, who: str) -> Tensor:
    """The values of a tensor in protocol buffers."""
    messages = _protocol()
    if tensor.HasField("sparse_csr"):
        raise RefusedRequest(f"{who} is sparse; one value a position is served here.")
    types = {messages.DTYPE_FLOAT32: np.float32, messages.DTYPE_INT64: np.int64}
    if tensor.dtype not in types:
        raise RefusedRequest(f"{who} is neither float32 nor int64.")
    values = torch.from_numpy(np.frombuffer(tensor.dense, types[tensor.dtype]).copy())
    shape = list(tensor.shape) or [len(values)]
    if int(np.prod(shape)) != len(values):
        raise RefusedRequest(f"{who} has {len(values)} values for the shape {shape}.")
    return values.reshape(shape)


def write_forward_backward(log_probs: Sequence[Tensor], loss: float) -> bytes:
    """Answer a training request.

    Args:
        log_probs: of each sequence, float32 ``[N]``, in nats.
        loss: the sum over all tokens.
    """
    messages = _protocol()
    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    answer.metrics["loss:sum"] = loss
    record = answer.loss_fn_outputs.add()
    record.type_tag, record.num_datums = "ArrayRecord", len(log_probs)
    values = [each.numpy().astype(np.float32) for each in log_probs]
    field = record.fields["logprobs"]
    field.dtype = messages.DTYPE_FLOAT32
    field.data = b"".join(each.tobytes() for each in values)
    field.offsets = np.cumsum([0, *(each.nbytes for each in values)], dtype=np.int64).tobytes()
    return answer.SerializeToString()


class TopTokens(NamedTuple):
    """The most likely tokens of each position, ``[N, k]``; a position without any has -inf."""

    ids: Tensor
    log_probs: Tensor


class Sampled(NamedTuple):
    """A sampled sequence."""

    ids: Sequence[int]
    log_probs: Sequence[float]
    """Of the distribution that each was drawn from, in nats."""
    is_stopped: bool
    """A stop ended it, not its budget."""
    top: TopTokens | None = None


def write_sample(
    sequences: Sequence[Sampled],
    prompt_log_probs: Tensor | None = None,
    top_of_prompt: TopTokens | None = None,
) -> bytes:
    """Answer a sampling request.

    Args:
        sequences: all of them.
        prompt_log_probs: float32, one for each token of the prompt, NaN where there is none.
        top_of_prompt: of each token of the prompt.
    """
    messages = _protocol()
    answer = messages.SampleResponse()
    for each in sequences:
        one = answer.sequences.add()
        stops = (messages.STOP_REASON_LENGTH, messages.STOP_REASON_STOP)
        one.stop_reason = stops[each.is_stopped]
        one.tokens = np.asarray(each.ids, np.int32).tobytes()
        one.logprobs = np.asarray(each.log_probs, np.float32).tobytes()
        if each.top is not None:
            _write_top(one.topk_sampled_logprobs, each.top)
    if prompt_log_probs is not None:
        answer.prompt_logprobs = prompt_log_probs.numpy().astype(np.float32).tobytes()
    if top_of_prompt is not None:
        _write_top(answer.topk_prompt_logprobs, top_of_prompt)
    return answer.SerializeToString()


_NO_LOG_PROB: Final = -99999.0
"""Stands for a token that there is not."""


def _write_top(message: Any, top: TopTokens) -> None:
    is_none = top.log_probs.isneginf()
    message.length, message.k = top.ids.shape
    message.token_ids = top.ids.masked_fill(is_none, 0).numpy().astype(np.int32).tobytes()
    told = top.log_probs.masked_fill(is_none, _NO_LOG_PROB)
    message.logprobs = told.numpy().astype(np.float32).tobytes()

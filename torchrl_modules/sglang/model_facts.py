"""Facts of a server of SGLang and of its model, some of which it does not tell itself."""

from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
)

from torchrl_data.pretrained import load_pretrained
from torchrl_modules.engines.json_client import JSONClient
from torchrl_modules.weights.expected_weights import ExpectedWeights, refuse

_SPARE_TOKENS: Final = 4
"""By so many tokens the longest prompt that is taken is shorter than the longest row."""


class ModelFacts(NamedTuple):
    """Facts of a server of SGLang, and of the model that it serves."""

    model: str
    """Its folder or hub id."""
    config: Any
    """Its configuration, as Transformers reads it."""
    end_token_ids: tuple[int, ...]
    """Tokens at which the server ends each response."""
    max_model_len: int
    """Most tokens of a prompt and its response together."""
    weight_version: str
    """The label of its weights."""
    dtype: torch.dtype | None
    """In which it computes; ``None``: it was left to SGLang."""
    device: str
    num_workers: int
    """Its processes that hold parts of the weights."""
    is_deterministic: bool
    """Whether seeds decide what is drawn."""
    overlaps: bool
    """Whether a step is made while the last one's tokens are read."""
    most_kept: int
    """So many tokens that a truncation left can be told."""
    has_metrics: bool
    saves_memory: bool
    """Whether it can lend its memory."""
    obstacle: str
    """Why its weights can't be updated; empty: they can."""
    trust_remote_code: bool

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.config.get_text_config().vocab_size)

    def expected_weights(self, *, who: str) -> ExpectedWeights:
        """Return what the model must be given, read off the Transformers model of its config.

        Raises:
            UpdateRefused: its weights can't be updated.
        """
        refuse([self.obstacle] if self.obstacle else [], who=who)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                self.config, trust_remote_code=self.trust_remote_code
            )
        return ExpectedWeights.of(dict(model.named_parameters(remove_duplicate=False)), self.dtype)


def read_facts(client: JSONClient, model: str | None, *, who: str) -> ModelFacts:
    """Ask a server what it is.

    Args:
        client: of the server.
        model: its folder or hub id; what the server says when not given.
        who: asks; named in the errors.

    Raises:
        ConnectionError: nobody answers.
        PermissionError: it asks for another token.
        RuntimeError: it is no server of SGLang, or one that can't be drawn from exactly.
        ValueError: the model can't be found from here.
    """
    status, info = client.request("GET", "/server_info")
    if status in (401, 403):
        raise PermissionError(f"{who}: {client.url} answers {info}. Give it its --api-key.")
    if status != 200 or not isinstance(info, dict) or "max_req_input_len" not in info:
        raise RuntimeError(
            f"{who}: {client.url} is no server of SGLang that draws tokens: /server_info answers "
            f"{status}."
        )
    _check_server(info, client, who)
    model = model or str(info["model_path"])
    remote = bool(info.get("trust_remote_code"))
    try:
        config = load_pretrained(AutoConfig, model, trust_remote_code=remote)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{who}: the server at {client.url} has the model {model}, whose configuration can't "
            f"be read here: {error}. Say where it is: model=."
        ) from error
    return ModelFacts(
        model=model,
        config=config,
        end_token_ids=_end_tokens(model, config),
        max_model_len=int(info["max_req_input_len"]) + _SPARE_TOKENS,
        weight_version=str(client.request("GET", "/model_info")[1]["weight_version"]),
        dtype=_named_dtype(str(info.get("dtype"))),
        device=str(info.get("device")),
        num_workers=int(info.get("tp_size") or 1),
        is_deterministic=bool(info.get("enable_deterministic_inference")),
        overlaps=not info.get("disable_overlap_schedule"),
        most_kept=int(info.get("sampling_mask_max_tokens") or 0),
        has_metrics=bool(info.get("enable_metrics")),
        saves_memory=bool(info.get("enable_memory_saver")),
        obstacle=_obstacle(info, config),
        trust_remote_code=remote,
    )


def _check_server(info: dict[str, Any], client: JSONClient, who: str) -> None:
    """Check that a server's tokens and log-probs are what an engine promises."""
    faults = {
        "it has a tokenizer, whose end tokens would end responses too: start it with "
        "--skip-tokenizer-init": not info.get("skip_tokenizer_init"),
        "it guesses tokens ahead (--speculative-algorithm), whose log-probs are not compared here: "
        "leave that out": bool(info.get("speculative_algorithm")),
        "it has several replicas (--dp-size), of which an update would wait for each: start one "
        "server for each": int(info.get("dp_size") or 1) > 1,
        "its model is in stages (--pp-size): use --tp-size": int(info.get("pp_size") or 1) > 1,
    }
    found = [fault for fault, is_there in faults.items() if is_there]
    if found:
        raise RuntimeError(f"{who}: the server at {client.url} can't be used: {'; '.join(found)}.")
    first = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": [0], "sampling_params": first, "return_logprob": True}
    status, answer = client.request("POST", "/generate", body)
    if status != 200 or "weight_versions" not in answer.get("meta_info", {}):
        raise RuntimeError(
            f"{who}: SGLang {info.get('version')} at {client.url} does not say which weights drew "
            "a token, as 0.5.23 does. Install that, or a later one."
        )


def _end_tokens(model: str, config: Any) -> tuple[int, ...]:
    """Tokens that SGLang takes for ends: of the configuration, and of generation's."""
    sources = [config.get_text_config(), config]
    with suppress(OSError):  # the model has none
        sources.append(load_pretrained(GenerationConfig, model))
    ends: set[int] = set()
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ends |= {named} if isinstance(named, int) else set(named or ())
    return tuple(sorted(ends))


def _named_dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, {"half": "float16", "float": "float32"}.get(name, name), None)
    return found if isinstance(found, torch.dtype) else None


def _obstacle(info: dict[str, Any], config: Any) -> str:
    """Return why weights by Transformers' names can't be sent there; empty: they can."""
    if info.get("quantization"):
        return f"the server's weights are quantised ({info['quantization']})"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"{type(config).__name__} is of no text model that Transformers knows"
    if getattr(config.get_text_config(), "num_local_experts", None) or getattr(
        config.get_text_config(), "num_experts", None
    ):
        return (
            "the model is a mixture of experts, whose weights Transformers keeps in one tensor a "
            "layer, which SGLang does not load"
        )
    return ""

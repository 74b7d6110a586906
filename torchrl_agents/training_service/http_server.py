"""The paths of Tinker's protocol over HTTP, in front of a training service."""

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from torchrl_data import import_package
from torchrl_modules import SamplingParameters

from .adapted_model import AdapterShape
from .checkpoint_folder import Saved
from .errors import RefusedRequest
from .messages import INSTALL, read_first_fields, read_forward_backward
from .service import AdamSettings, SampleSettings, TrainingService

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

_LOG = logging.getLogger("torchrl_agents")
_WAIT_S: Final = 20.0
"""How long a client's question for a result is held open."""
_MAX_BODY_BYTES: Final = 1 << 28
_PROTOBUF: Final = "application/x-protobuf"


def application(service: TrainingService, api_key: str | None = None) -> "Starlette":
    """Return the paths of Tinker's protocol as an ASGI application.

    Args:
        service: does what is asked for.
        api_key: which clients have to send as ``X-API-Key``; ``None`` lets in whoever comes.

    Raises:
        ImportError: ``tinker`` or ``starlette`` is missing.
    """
    for package in ("starlette.applications", "tinker"):
        import_package(package, who="serve-training", install=INSTALL)
    from starlette.applications import Starlette
    from starlette.routing import Route

    paths = _Paths(service, api_key)
    routes = [
        Route(f"/api/v1/{path}", paths.endpoint(answer), methods=[method])
        for method, path, answer in paths.table()
    ]
    routes.append(Route("/{path:path}", paths.endpoint(_not_served), methods=["GET", "POST"]))
    return Starlette(routes=routes)


async def _not_served(request: "Request") -> Any:
    raise RefusedRequest(f"{request.url.path:.80} is not served here.", 404)


class _Paths:
    """The answers at each path."""

    def __init__(self, service: TrainingService, api_key: str | None) -> None:
        self._service = service
        self._api_key = api_key

    def table(self) -> list[tuple[str, str, Callable[["Request"], Awaitable[Any]]]]:
        """Methods, paths and what answers them."""
        post, get = "POST", "GET"
        run = "training_runs/{run}"
        return [
            (get, "healthz", self._health),
            (post, "client/config", self._client_config),
            (post, "client/dynamic_config", self._dynamic_config),
            (post, "telemetry", self._telemetry),
            (get, "get_server_capabilities", self._capabilities),
            (post, "create_session", self._create_session),
            (post, "session_heartbeat", self._heartbeat),
            (post, "sessions/{session}/finish", self._finish),
            (post, "create_model", self._create_model),
            (post, "get_info", self._info),
            (post, "forward_backward", self._forward_backward),
            (post, "optim_step", self._optim_step),
            (post, "save_weights", self._save_weights),
            (post, "save_weights_for_sampler", self._save_for_sampler),
            (post, "load_weights", self._load_weights),
            (post, "create_sampling_session", self._create_sampler),
            (get, "samplers/{sampler}", self._sampler),
            (post, "asample", self._sample),
            (post, "retrieve_future", self._retrieve),
            (post, "cancel_future", self._cancel),
            (post, "weights_info", self._weights_info),
            (get, "training_runs", self._runs),
            (get, run, self._run),
            (get, f"{run}/checkpoints", self._checkpoints),
            ("DELETE", f"{run}/checkpoints/{{kind}}/{{name}}", self._delete),
            (get, "checkpoints", self._all_checkpoints),
        ]

    def endpoint(self, answer: Callable[["Request"], Awaitable[Any]]) -> Callable[..., Any]:
        """Ask for the key, answer, and tell what is wrong in words."""
        from pydantic import ValidationError
        from starlette.responses import JSONResponse, Response

        async def respond(request: "Request") -> Response:
            key = request.headers.get("x-api-key", "")
            if self._api_key is not None and not hmac.compare_digest(
                key.encode(), self._api_key.encode()
            ):
                return JSONResponse({"detail": "The key is not the server's."}, 401)
            try:
                told = await answer(request)
            except RefusedRequest as error:
                refused, status = str(error), error.status
            except ValidationError as error:
                wrong = "; ".join(
                    f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
                )
                refused, status = f"The request is not as it must be: {wrong}.", 422
            else:
                return told if isinstance(told, Response) else JSONResponse(told)
            self._let_go_on(request, refused)
            return JSONResponse({"detail": refused}, status)

        return respond

    def _let_go_on(self, request: "Request", refused: str) -> None:
        """Let the run that a refused request has a number of not wait for it."""
        asked = getattr(request.state, "asked", {})
        run, number = asked.get("model_id"), asked.get("seq_id")
        path = request.url.path.rpartition("/")[2]
        if path == "forward_backward":
            run, number = read_first_fields(getattr(request.state, "came", b""))
        if isinstance(run, str) and type(number) is int:
            self._service.pass_turn(
                *(run, number, refused),
                is_gradient=path == "forward_backward",
                is_step=path == "optim_step",
            )

    # The server and its sessions -----------------------------------------------------------------

    async def _health(self, _: "Request") -> Any:
        return {"status": "ok"}

    async def _client_config(self, _: "Request") -> Any:
        return _last({"pjwt_auth_enabled": False, "use_pyqwest_transport": False})

    async def _dynamic_config(self, _: "Request") -> Any:
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, _: "Request") -> Any:
        return _last({"status": "accepted"})  # and dropped

    async def _capabilities(self, _: "Request") -> Any:
        models = [
            {
                "model_name": name,
                "max_context_length": model.max_model_len,
                "trainable": True,
                "sampleable": True,
            }
            for name, model in self._service.models.items()
        ]
        return {"supported_models": models}

    async def _create_session(self, request: "Request") -> Any:
        from tinker.types import CreateSessionRequest

        CreateSessionRequest.model_validate(await _json(request))
        return {"type": "create_session", "session_id": self._service.create_session()}

    async def _heartbeat(self, request: "Request") -> Any:
        from tinker.types import SessionHeartbeatRequest

        asked = SessionHeartbeatRequest.model_validate(await _json(request))
        self._service.hear(asked.session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, request: "Request") -> Any:
        self._service.end_session(request.path_params["session"])
        return {}

    # Training ------------------------------------------------------------------------------------

    async def _create_model(self, request: "Request") -> Any:
        from tinker.types import CreateModelRequest

        asked = CreateModelRequest.model_validate(await _json(request))
        _check_adamw(asked.optimizer_config)
        if asked.lora_config is None:
            raise RefusedRequest("create_model trains adapters: give lora_config.")
        lora = asked.lora_config
        return _future(
            self._service.create_run(
                asked.session_id,
                asked.model_seq_id,
                asked.base_model,
                AdapterShape(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed),
                seed=lora.seed,
                user_metadata=asked.user_metadata,
            )
        )

    async def _info(self, request: "Request") -> Any:
        from tinker.types import GetInfoRequest

        asked = GetInfoRequest.model_validate(await _json(request))
        info = self._service.info(asked.model_id)
        return {
            "type": "get_info",
            "model_id": info["training_run_id"],
            "model_name": info["base_model"],
            "is_lora": True,
            "lora_rank": info["rank"],
            "model_data": {"model_name": info["base_model"], "tokenizer_id": info["folder"]},
        }

    async def _forward_backward(self, request: "Request") -> Any:
        if request.headers.get("content-encoding"):
            raise RefusedRequest("forward_backward: the body must not be compressed.", 415)
        return _future(self._service.forward_backward(read_forward_backward(await _body(request))))

    async def _optim_step(self, request: "Request") -> Any:
        from tinker.types import AdamParams, OptimStepRequest

        asked = OptimStepRequest.model_validate(await _json(request))
        if not isinstance(asked.optim_params, AdamParams):
            raise RefusedRequest("optim_step: AdamParams are served here, no other optimizer.")
        settings = AdamSettings(**asked.optim_params.model_dump())
        return _future(self._service.optim_step(asked.model_id, _number(asked), settings))

    async def _save_weights(self, request: "Request") -> Any:
        from tinker.types import SaveWeightsRequest

        asked = SaveWeightsRequest.model_validate(await _json(request))
        return _future(
            self._service.save(
                *(asked.model_id, _number(asked), "weights", asked.path or f"{_number(asked):06d}"),
                overwrite=asked.overwrite,
                user_metadata=asked.user_metadata,
            )
        )

    async def _save_for_sampler(self, request: "Request") -> Any:
        from tinker.types import SaveWeightsForSamplerRequest

        asked = SaveWeightsForSamplerRequest.model_validate(await _json(request))
        if asked.path is not None:
            return _future(
                self._service.save(
                    *(asked.model_id, _number(asked), "sampler_weights", asked.path),
                    user_metadata=asked.user_metadata,
                )
            )
        if asked.sampling_session_seq_id is None:
            raise RefusedRequest("save_weights_for_sampler: give path or sampling_session_seq_id.")
        return _future(
            self._service.sample_from_run(
                *(asked.model_id, _number(asked), asked.sampling_session_seq_id),
                is_inflight=asked.kind == "inflight",
            )
        )

    async def _load_weights(self, request: "Request") -> Any:
        from tinker.types import LoadWeightsRequest

        asked = LoadWeightsRequest.model_validate(await _json(request))
        if asked.optimizer_config is not None:
            _check_adamw(asked.optimizer_config)
        saved = self._service.checkpoints.find(asked.path)
        if asked.model_id is not None:
            return _future(
                self._service.load(
                    asked.model_id, _number(asked), saved, with_optimizer=asked.optimizer
                )
            )
        if asked.session_id is None or asked.model_seq_id is None:
            raise RefusedRequest("load_weights: give model_id, or session_id and model_seq_id.")
        return _future(
            self._service.create_run(
                asked.session_id,
                asked.model_seq_id,
                asked.base_model or saved.about["base_model"],
                saved.shape,
                user_metadata=asked.user_metadata,
                load=saved,
                with_optimizer=asked.optimizer,
            )
        )

    # Sampling ------------------------------------------------------------------------------------

    async def _create_sampler(self, request: "Request") -> Any:
        from tinker.types import CreateSamplingSessionRequest

        asked = CreateSamplingSessionRequest.model_validate(await _json(request))
        sampler = self._service.create_sampler(
            *(asked.session_id, asked.sampling_session_seq_id),
            base_model=asked.base_model,
            path=asked.model_path,
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def _sampler(self, request: "Request") -> Any:
        name = request.path_params["sampler"]
        found = self._service.sampler(name)
        return {"sampler_id": name, "base_model": found.model.name, "model_path": found.path}

    async def _sample(self, request: "Request") -> Any:
        from tinker.types import SampleRequest

        asked = SampleRequest.model_validate(await _json(request))
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise RefusedRequest("asample: give sampling_session_id and seq_id.")
        future, sequences = self._service.sample(
            asked.sampling_session_id, asked.seq_id, sample_settings(asked)
        )
        return {**_future(future), "sample_sequence_ids": sequences}

    # Results -------------------------------------------------------------------------------------

    async def _retrieve(self, request: "Request") -> Any:
        from starlette.responses import JSONResponse, Response
        from tinker.types import FutureRetrieveRequest, RequestErrorCategory

        asked = FutureRetrieveRequest.model_validate(await _json(request))
        result = self._service.result(asked.request_id)
        waiting = asyncio.wrap_future(result)
        try:
            answer = await asyncio.wait_for(asyncio.shield(waiting), _WAIT_S)
        except TimeoutError:
            later = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return JSONResponse(later, 408)
        except RefusedRequest as error:
            self._service.give(asked.request_id)
            return {"error": str(error), "category": RequestErrorCategory.User.value}
        except (CancelledError, asyncio.CancelledError):
            if not result.cancelled():
                raise  # the client hung up
            return {"error": "It was cancelled.", "category": RequestErrorCategory.User.value}
        except Exception as error:  # whatever the model raises, its client is told
            _LOG.exception("Request %s failed.", asked.request_id)
            self._service.give(asked.request_id)
            told = f"{type(error).__name__}: {error}"
            return {"error": told, "category": RequestErrorCategory.Server.value}
        self._service.give(asked.request_id)
        if isinstance(answer, bytes):
            return Response(answer, media_type=_PROTOBUF)
        return answer

    async def _cancel(self, request: "Request") -> Any:
        self._service.cancel(str((await _json(request)).get("request_id", "")))
        return {}

    # What is saved -------------------------------------------------------------------------------

    async def _weights_info(self, request: "Request") -> Any:
        saved = self._service.checkpoints.find(str((await _json(request)).get("tinker_path", "")))
        shape = saved.shape
        return {
            "base_model": saved.about["base_model"],
            "is_lora": True,
            "lora_rank": shape.rank,
            "train_unembed": shape.train_unembed,
            "train_mlp": shape.train_mlp,
            "train_attn": shape.train_attn,
        }

    async def _runs(self, request: "Request") -> Any:
        saved = {one.run for one in self._service.checkpoints}
        runs = sorted({*saved, *self._service.runs()})
        told = [self._told(run) for run in _page(request, runs)]
        return {"training_runs": told, "cursor": _cursor(request, len(runs))}

    async def _run(self, request: "Request") -> Any:
        return self._told(request.path_params["run"])

    def _told(self, run: str) -> dict[str, Any]:
        """What there is to tell of a run, which may have ended."""
        saved = self._service.checkpoints.of_run(run)
        if run in self._service.runs():
            info = self._service.info(run)
        elif saved:
            info = {
                "base_model": saved[-1].about["base_model"],
                "rank": saved[-1].shape.rank,
                "last_request": saved[-1].about["time"],
                "user_metadata": saved[-1].about["user_metadata"],
            }
        else:
            raise RefusedRequest(f"There is no training run {run} here.", 404)
        last = {one.kind: _checkpoint(one) for one in saved}
        return {
            "training_run_id": run,
            "base_model": info["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": info["rank"],
            "last_request_time": _time(info["last_request"]),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": info["user_metadata"],
        }

    async def _checkpoints(self, request: "Request") -> Any:
        saved = self._service.checkpoints.of_run(request.path_params["run"])
        return {"checkpoints": [_checkpoint(one) for one in saved]}

    async def _all_checkpoints(self, request: "Request") -> Any:
        saved = sorted(self._service.checkpoints, key=lambda one: -one.about["time"])
        told = [_checkpoint(one) for one in _page(request, saved)]
        return {"checkpoints": told, "cursor": _cursor(request, len(saved))}

    async def _delete(self, request: "Request") -> Any:
        from starlette.responses import Response

        path = "tinker://{run}/{kind}/{name}".format_map(request.path_params)
        self._service.checkpoints.delete(self._service.checkpoints.find(path))
        return Response(status_code=204)


def _last(told: dict[str, Any]) -> Any:
    """An answer after which the connection ends: clients leave it open, and ask no more by it."""
    from starlette.responses import JSONResponse

    return JSONResponse(told, headers={"connection": "close"})


def sample_settings(asked: Any) -> SampleSettings:
    """Read a sampling request of Tinker's.

    Args:
        asked: a ``SampleRequest``.

    Raises:
        RefusedRequest: the prompt holds more than text, or something is asked that is not served.
    """
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(asked, name, None):
            raise RefusedRequest(f"asample: {name} is not served here.")
    if asked.num_samples < 1:
        raise RefusedRequest(f"asample: num_samples must be at least 1, got {asked.num_samples}.")
    for chunk in asked.prompt.chunks:
        if chunk.type != "encoded_text":
            raise RefusedRequest(f"asample: the prompt holds a chunk of kind {chunk.type!r}.")
    prompt = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
    own = asked.sampling_params
    first = None
    if asked.prompt_logprobs:
        last = asked.prompt_logprobs_last_n
        if last is not None and not 1 <= last <= len(prompt) - 1:
            raise RefusedRequest(
                f"asample: prompt_logprobs_last_n must lie in 1..{len(prompt) - 1}."
            )
        first = 1 if last is None else len(prompt) - last
    try:
        params = SamplingParameters(
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=max(own.top_k, 0),
            **_stops(own.stop),
        )
    except (ValueError, TypeError) as error:
        raise RefusedRequest(f"asample: {error}") from error
    if own.max_tokens is not None and own.max_tokens < 1:
        raise RefusedRequest(f"asample: max_tokens must be at least 1, got {own.max_tokens}.")
    return SampleSettings(
        prompt=prompt,
        num_samples=asked.num_samples,
        params=params,
        budget=own.max_tokens,
        seed=own.seed,
        prompt_log_probs_from=first,
        top_of_prompt=asked.topk_prompt_logprobs,
        top_of_samples=asked.topk_sample_logprobs,
    )


def _stops(stop: Any) -> dict[str, Any]:
    """What ends a sequence: texts beside the model's own end, or tokens in place of it."""
    if stop is None:
        return {}
    texts = [stop] if isinstance(stop, str) else list(stop)
    if texts and all(isinstance(one, str) for one in texts):
        return {"stop": tuple(texts)}
    return {"stop_token_ids": tuple(texts)}


def _check_adamw(config: Any) -> None:
    if config.type != "adamw":
        raise RefusedRequest(f"The optimizer {config.type!r} is not served here; adamw is.")


def _number(asked: Any) -> int:
    if asked.seq_id is None:
        raise RefusedRequest("seq_id is missing: requests of a run are done in its order.")
    return asked.seq_id


def _future(request: str) -> dict[str, Any]:
    return {"request_id": request}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(saved: Saved) -> dict[str, Any]:
    kinds = {"weights": "training", "sampler_weights": "sampler"}
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": kinds[saved.kind],
        "time": _time(saved.about["time"]),
        "tinker_path": saved.path,
        "size_bytes": saved.num_bytes,
        "user_metadata": saved.about["user_metadata"],
    }


def _page(request: "Request", items: list[Any]) -> list[Any]:
    offset, limit = _bounds(request)
    return items[offset : offset + limit]


def _cursor(request: "Request", total: int) -> dict[str, int]:
    offset, limit = _bounds(request)
    return {"offset": offset, "limit": limit, "total_count": total}


def _bounds(request: "Request") -> tuple[int, int]:
    try:
        return int(request.query_params.get("offset", 0)), int(
            request.query_params.get("limit", 100)
        )
    except ValueError as error:
        raise RefusedRequest(f"offset and limit are whole numbers: {error}.") from error


async def _body(request: "Request") -> bytes:
    request.state.came = body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise RefusedRequest(
                f"The body is longer than {_MAX_BODY_BYTES} bytes; send fewer sequences at once.",
                413,
            )
    return bytes(body)


async def _json(request: "Request") -> Mapping[str, Any]:
    try:
        read = json.loads(await _body(request) or b"{}")
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"The body is no JSON: {error}.") from error
    if not isinstance(read, Mapping):
        raise RefusedRequest(f"The body must be a JSON object, got {type(read).__name__}.")
    request.state.asked = read
    return read

"""Sessions, training runs and samplers: what a client asks for, whatever carries it."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_modules import SamplingParameters
from torchrl_modules.engines.engine import Generation
from torchrl_modules.weights.expected_weights import UpdateRefused

from .adapted_model import AdaptedModel, AdapterShape, AdapterState
from .checkpoint_folder import CheckpointFolder, Kind, Saved, optimizer_tensors, restore_optimizer
from .device_thread import DeviceJob, DeviceThread
from .errors import RefusedRequest
from .in_order import InOrder
from .messages import (
    ForwardBackward,
    Sampled,
    TopTokens,
    check_ids,
    read_examples,
    write_forward_backward,
    write_sample,
)
from .token_losses import token_loss

Answer = bytes | dict[str, Any]
"""A message of protocol buffers, or what becomes JSON."""

_KEPT_SAMPLERS: Final = 16
"""Unnamed samplers of a training run whose weights are kept, the newest ones."""
_LOADED_SAMPLERS: Final = 4
"""Samplers whose weights are in the model at a time."""
_ENGINE_REQUESTS: Final = 256
"""Sampling requests that are given to engines of vLLM at a time."""
_GONE: Final = (
    "it has ended, or the server began anew. Make a new ServiceClient, and load a checkpoint."
)
_KEPT_RESULTS_S: Final = 600.0
"""A result stays for so long after it was first given, for a client that did not hear it."""


class AdamSettings(NamedTuple):
    """Settings of one step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """The norm that the gradient is clipped to; 0 for none."""


class SampleSettings(NamedTuple):
    """A sampling request."""

    prompt: Sequence[int]
    num_samples: int
    params: SamplingParameters
    """Without a seed: see ``seed``."""
    budget: int | None
    """Most new tokens; ``None`` for as many as the model takes."""
    seed: int | None = None
    prompt_log_probs_from: int | None = None
    """From which token of the prompt on its log-probs are asked for; ``None`` for none."""
    top_of_prompt: int = 0
    top_of_samples: int = 0

    @property
    def reads_scores(self) -> bool:
        """Whether more is asked for than the sequences and their log-probs."""
        scores = (self.top_of_prompt, self.top_of_samples)
        return self.prompt_log_probs_from is not None or any(scores)


@dataclass(eq=False)
class _Run:
    """A training run: an adapter, its optimizer and what is asked of it."""

    id: str
    session: str
    model: AdaptedModel
    shape: AdapterShape
    parameters: list[nn.Parameter]
    optimizer: torch.optim.AdamW
    in_order: InOrder
    user_metadata: Mapping[str, str] | None
    last_request: float
    fault: str | None = None
    """Why a part of the gradient of this step is missing."""
    samplers: list[str] = field(default_factory=list)
    """Those without a name, oldest first."""
    inflight: "_Weights | None" = None


@dataclass(eq=False)
class _Weights:
    """Weights to sample with, in the model where they were used lately."""

    adapter: str
    """Its name, which other weights never have."""
    values: AdapterState
    is_loaded: bool = False


class _Sampler(NamedTuple):
    session: str
    model: AdaptedModel
    weights: _Weights | None
    path: str | None


class TrainingService:
    """Trains and samples adapters of models for clients that ask by messages.

    All of it may be called from any thread; models are used by one thread. A training run does
    what is asked of it in the order of its numbers, whichever comes first.

    Args:
        models: each with a name of its own.
        checkpoints: where adapters are saved.
        max_rows: most sequences that are drawn at once.
        session_timeout_s: a session from which nothing was heard for so long has ended: its
            training runs and samplers are let go of, what was saved stays.
        missing_timeout_s: a request that others of its run have waited for so long will not come:
            it counts as a ``forward_backward`` that was refused, and they are done.
    """

    def __init__(
        self,
        models: Sequence[AdaptedModel],
        checkpoints: CheckpointFolder,
        *,
        max_rows: int = 256,
        session_timeout_s: float = 600.0,
        missing_timeout_s: float = 600.0,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.checkpoints = checkpoints
        self._device = DeviceThread(max_rows)
        self._session_timeout_s = session_timeout_s
        self._missing_timeout_s = missing_timeout_s
        self._lock = threading.RLock()
        self._sessions: dict[str, float] = {}
        self._runs: dict[str, _Run] = {}
        self._samplers: dict[str, _Sampler] = {}
        self._loaded: OrderedDict[str, tuple[AdaptedModel, _Weights]] = OrderedDict()
        self._results: dict[str, Future[Answer]] = {}
        self._jobs: dict[str, DeviceJob | Future[Answer]] = {}
        self._given: OrderedDict[str, float] = OrderedDict()
        self._num_adapters = 0
        self._engine_pool = ThreadPoolExecutor(_ENGINE_REQUESTS, "sampling-request")

    def close(self) -> None:
        """Finish what is at hand, and end, engines included."""
        self._device.close()
        self._engine_pool.shutdown(cancel_futures=True)
        for model in self.models.values():
            if model.sampling_engine is not None:
                model.sampling_engine.close()

    # Sessions ------------------------------------------------------------------------------------

    def create_session(self) -> str:
        """Begin a session, and give its id."""
        self._end_old_sessions()
        session = secrets.token_hex(8)
        with self._lock:
            self._sessions[session] = time.monotonic()
        return session

    def hear(self, session: str) -> None:
        """Note that a session goes on.

        Raises:
            RefusedRequest: it has ended, or is unknown.
        """
        self._end_old_sessions()
        with self._lock:
            if session not in self._sessions:
                raise RefusedRequest(f"There is no session {session}: {_GONE}", 410)
            self._sessions[session] = time.monotonic()

    def end_session(self, session: str) -> None:
        """End a session: its training runs and samplers are let go of."""
        with self._lock:
            self._sessions.pop(session, None)
            runs = [run for run in self._runs.values() if run.session == session]
            for run in runs:
                del self._runs[run.id]
            gone = [name for name, one in self._samplers.items() if one.session == session]
            weights = [self._samplers.pop(name).weights for name in gone]
            for name in [name for name in self._results if name.startswith(session)]:
                if self._results[name].done():
                    self._forget(name)

        def let_go(_: Sequence[DeviceJob]) -> list[None]:
            for run in runs:
                run.model.remove(_adapter_of(run.id))
            for each in weights:
                if each is not None:
                    self._unload(each)
            return [None]

        self._device.submit(DeviceJob(let_go))

    def _end_old_sessions(self) -> None:
        oldest = time.monotonic() - self._session_timeout_s
        with self._lock:
            old = [name for name, heard in self._sessions.items() if heard < oldest]
        for session in old:
            self.end_session(session)

    # Results -------------------------------------------------------------------------------------

    def result(self, request: str) -> Future[Answer]:
        """Return what comes of a request.

        Args:
            request: its id.

        Raises:
            RefusedRequest: there is none of this id.
        """
        with self._lock:
            self._forget_given()
            if request not in self._results:
                raise RefusedRequest(f"There is no request {request} here: {_GONE}", 404)
            found, run = self._results[request], self._runs.get(request.rpartition(":")[0])
        if run is not None and not found.done():
            self._pass_missing(run)
        return found

    def _pass_missing(self, run: _Run) -> None:
        """Let a run go on whose next request has not come for too long."""
        with self._lock:
            missing = run.in_order.missing(self._missing_timeout_s)
        told = f"it did not come within {self._missing_timeout_s:g} s, while later ones waited"
        for number in missing:
            self.pass_turn(run.id, number, told, is_gradient=True, is_step=False)

    def give(self, request: str) -> None:
        """Note that a result was given to its client."""
        with self._lock:
            self._given.setdefault(request, time.monotonic())

    def cancel(self, request: str) -> None:
        """Drop a request that has not begun."""
        with self._lock:
            job = self._jobs.get(request)
        if job is not None:
            job.cancel()

    def _forget_given(self) -> None:
        oldest = time.monotonic() - _KEPT_RESULTS_S
        while self._given and next(iter(self._given.values())) < oldest:
            self._forget(next(iter(self._given)))

    def _forget(self, request: str) -> None:
        self._results.pop(request, None)
        self._jobs.pop(request, None)
        self._given.pop(request, None)

    def _submit(self, request: str, job: DeviceJob) -> None:
        with self._lock:
            self._jobs[request] = job
        self._device.submit(job)

    def _is_known(self, request: str) -> bool:
        """Whether a client asks for the same a second time, having not heard the answer."""
        with self._lock:
            return request in self._results

    # Training ------------------------------------------------------------------------------------

    def model(self, name: str) -> AdaptedModel:
        """Return the model of a name.

        Raises:
            RefusedRequest: it is not served.
        """
        if name not in self.models:
            served = ", ".join(self.models)
            raise RefusedRequest(f"base_model={name!r} is not served here; there is {served}.", 404)
        return self.models[name]

    def create_run(
        self,
        session: str,
        number: int,
        base_model: str,
        shape: AdapterShape,
        *,
        seed: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        load: Saved | None = None,
        with_optimizer: bool = False,
    ) -> str:
        """Begin a training run.

        Args:
            session: whose.
            number: of the run in its session.
            base_model: the name of the model.
            shape: of the adapter.
            seed: of the adapter's first weights.
            user_metadata: kept with what is saved.
            load: begins with these weights.
            with_optimizer: and with the optimizer's state that is saved with them.

        Returns:
            The id of the request; the run's is ``SESSION:train:NUMBER``.

        Raises:
            RefusedRequest: the session or the model is unknown.
        """
        self.hear(session)
        model = self.model(base_model)
        run_id = f"{session}:train:{number}"
        request = f"{run_id}:0"
        if self._is_known(request):
            return request

        def begin(_: Sequence[DeviceJob]) -> list[Answer]:
            adapter = _adapter_of(run_id)
            parameters = model.add(adapter, shape, seed)
            try:
                optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=parameters[0].is_cuda)
                if load is not None:
                    model.set_weights(adapter, self._saved_weights(model, load))
                    if with_optimizer:
                        restore_optimizer(optimizer, self.checkpoints.load_optimizer(load))
                if model.sampling_engine is not None:
                    _check_can_draw(model, model.weights_of(adapter, shape))
            except BaseException:
                model.remove(adapter)
                raise
            run = _Run(
                *(run_id, session, model, shape, parameters, optimizer),
                in_order=InOrder(),
                user_metadata=user_metadata,
                last_request=time.time(),
            )
            with self._lock:
                self._runs[run_id] = run
            if load is not None:
                return [{"type": "load_weights", "path": load.path}]
            return [{"type": "create_model", "model_id": run_id}]

        job = DeviceJob(begin)
        with self._lock:
            self._results[request] = job.result
        self._submit(request, job)
        return request

    def run(self, run_id: str) -> _Run:
        """Return a training run.

        Raises:
            RefusedRequest: there is none of this id.
        """
        with self._lock:
            run = self._runs.get(run_id)
        if run is None:
            raise RefusedRequest(f"There is no training run {run_id} here: {_GONE}", 404)
        self.hear(run.session)
        run.last_request = time.time()
        return run

    def _in_turn(self, run: _Run, number: int, do: Callable[[], Answer]) -> str:
        """Do something of a training run when its number has come."""
        request = f"{run.id}:{number}"
        if self._is_known(request):
            return request
        job = DeviceJob(lambda _: [do()])
        with self._lock:
            self._results[request] = job.result
            try:
                run.in_order(number, lambda: self._submit(request, job))
            except RefusedRequest:
                del self._results[request]
                raise
        return request

    def pass_turn(
        self, run_id: str, number: int, told: str, *, is_gradient: bool, is_step: bool
    ) -> None:
        """Let a run go on after a request that was refused before its turn came.

        Its number would otherwise be waited for, and with it all that the client asks later.

        Args:
            run_id: whose; one that is not there has nothing to wait for.
            number: of the request.
            told: why it was refused.
            is_gradient: whether it was a ``forward_backward``, without which no step is made.
            is_step: whether it was an ``optim_step``, which lets go of the gradient when it fails.
        """
        with self._lock:
            run = self._runs.get(run_id)
        if run is None or self._is_known(f"{run_id}:{number}"):
            return

        def do() -> Answer:
            if is_gradient:
                run.fault = f"forward_backward of seq_id {number} was refused ({told.rstrip('.')})"
            if is_step:
                run.fault = None
                run.optimizer.zero_grad(set_to_none=True)
            raise RefusedRequest(told)

        with suppress(RefusedRequest):  # it had its turn long ago
            self.give(self._in_turn(run, number, do))

    def forward_backward(self, asked: ForwardBackward) -> str:
        """Add a gradient, or score alone; the id of the request."""
        run = self.run(asked.model_id)

        def do() -> Answer:
            try:
                loss = token_loss(asked.loss_fn, asked.settings)
                examples = read_examples(asked, run.model.vocab_size, run.model.max_model_len)
                gradient = run.model.forward_backward(
                    *(_adapter_of(run.id), examples, loss), is_forward_only=asked.is_forward_only
                )
            except BaseException as error:
                if not asked.is_forward_only:
                    run.fault = f"forward_backward of seq_id {asked.seq_id} failed ({error})"
                raise
            return write_forward_backward(gradient.log_probs, gradient.loss)

        return self._in_turn(run, asked.seq_id, do)

    def optim_step(self, run_id: str, number: int, settings: AdamSettings) -> str:
        """Make a step of AdamW with the gradient since the last one; the id of the request."""
        run = self.run(run_id)

        def do() -> Answer:
            fault, run.fault = run.fault, None
            try:
                if fault is not None:
                    raise RefusedRequest(
                        f"optim_step made no step, and let go of the gradient: {fault}."
                    )
                return {"metrics": {"grad_norm": _adam_step(run, settings)}}
            finally:
                run.optimizer.zero_grad(set_to_none=True)

        return self._in_turn(run, number, do)

    def save(
        self,
        run_id: str,
        number: int,
        kind: Kind,
        name: str,
        *,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Save the adapter of a run; the id of the request."""
        run = self.run(run_id)

        def do() -> Answer:
            saved = self.checkpoints.save(
                *(run.id, kind, name, run.model.weights_of(_adapter_of(run.id), run.shape)),
                run.model.save,
                base_model=run.model.name,
                base_digest=run.model.digest,
                optimizer=optimizer_tensors(run.optimizer) if kind == "weights" else None,
                user_metadata=user_metadata or run.user_metadata,
                overwrite=overwrite,
            )
            of = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
            return {"type": of[kind], "path": saved.path}

        return self._in_turn(run, number, do)

    def _saved_weights(self, model: AdaptedModel, saved: Saved) -> AdapterState:
        self.checkpoints.check_base(saved, model.name, model.digest)
        return self.checkpoints.load(saved)

    def load(self, run_id: str, number: int, saved: Saved, *, with_optimizer: bool) -> str:
        """Overwrite the adapter of a run; the id of the request."""
        run = self.run(run_id)

        def do() -> Answer:
            if saved.shape != run.shape:
                raise RefusedRequest(
                    f"{saved.path} is an adapter of another shape, {saved.shape}; this run has "
                    f"{run.shape}. Begin a run from it: create_training_client_from_state."
                )
            run.model.set_weights(_adapter_of(run.id), self._saved_weights(run.model, saved))
            run.optimizer.state.clear()
            if with_optimizer:
                restore_optimizer(run.optimizer, self.checkpoints.load_optimizer(saved))
            return {"type": "load_weights", "path": saved.path}

        return self._in_turn(run, number, do)

    # Sampling ------------------------------------------------------------------------------------

    def create_sampler(
        self, session: str, number: int, *, base_model: str | None, path: str | None
    ) -> str:
        """Begin to sample with what is saved, or with a model as it is; the sampler's id.

        Raises:
            RefusedRequest: the session, the model or the checkpoint is unknown.
        """
        self.hear(session)
        sampler = f"{session}:sample:{number}"
        if path is None:
            made = _Sampler(session, self.model(base_model or ""), None, None)
        else:
            saved = self.checkpoints.find(path)
            model = self.model(saved.about["base_model"])
            weights = _Weights(self._adapter_name(), self._saved_weights(model, saved))
            made = _Sampler(session, model, weights, path)
        with self._lock:
            self._samplers[sampler] = made
        return sampler

    def sample_from_run(self, run_id: str, number: int, sampler: int, *, is_inflight: bool) -> str:
        """Begin to sample with the adapter of a run as it is now; the id of the request.

        Args:
            run_id: whose.
            number: of the request.
            sampler: number of the sampler in its session.
            is_inflight: the sampler and all others of this kind follow the run's later ones.
        """
        run = self.run(run_id)

        def do() -> Answer:
            values = run.model.weights_of(_adapter_of(run.id), run.shape)
            name = f"{run.session}:sample:{sampler}"
            if is_inflight and run.inflight is not None:
                weights = run.inflight
                self._unload(weights)
                with self._lock:
                    weights.adapter, weights.values = self._adapter_name(), values
            else:
                weights = _Weights(self._adapter_name(), values)
                run.inflight = weights if is_inflight else run.inflight
            with self._lock:
                self._samplers[name] = _Sampler(run.session, run.model, weights, None)
                run.samplers.append(name)
                is_full = len(run.samplers) > _KEPT_SAMPLERS
                old = self._samplers.pop(run.samplers.pop(0)) if is_full else None
            if old is not None and old.weights is not None and old.weights is not run.inflight:
                self._unload(old.weights)
            return {"type": "save_weights_for_sampler", "sampling_session_id": name}

        return self._in_turn(run, number, do)

    def sampler(self, name: str) -> _Sampler:
        """Return a sampler.

        Raises:
            RefusedRequest: there is none of this id.
        """
        with self._lock:
            found = self._samplers.get(name)
        if found is None:
            raise RefusedRequest(
                f"There is no sampler {name} here. Of a training run the newest {_KEPT_SAMPLERS} "
                "without a name are kept; save_weights_for_sampler(name=...) keeps one for good.",
                404,
            )
        self.hear(found.session)
        return found

    def sample(self, name: str, number: int, asked: SampleSettings) -> tuple[str, list[str]]:
        """Draw sequences.

        Args:
            name: of the sampler.
            number: of the request.
            asked: the request.

        Returns:
            The ids of the request and of the sequences that it will give.

        Raises:
            RefusedRequest: the sampler is unknown, or it can't be done.
        """
        sampler = self.sampler(name)
        request = f"{name}:{number}"
        sequences = [f"{request}:{i}" for i in range(asked.num_samples)]
        if self._is_known(request):
            return request, sequences
        prompt = torch.tensor(asked.prompt, dtype=torch.int64)
        check_ids("The prompt", prompt, sampler.model.vocab_size, sampler.model.max_model_len - 1)
        if sampler.model.sampling_engine is not None:
            with self._lock:
                given = self._engine_pool.submit(self._draw_by_engine, sampler, asked)
                self._results[request] = self._jobs[request] = given
            return request, sequences
        job = DeviceJob(
            lambda jobs: self._draw([each.payload for each in jobs]),
            payload=(sampler, asked),
            together=(sampler.model.name, asked.params, asked.seed is None),
            size=asked.num_samples,
        )
        with self._lock:
            self._results[request] = job.result
        self._submit(request, job)
        return request, sequences

    def _draw(
        self, asked: Sequence[tuple[_Sampler, SampleSettings]]
    ) -> list[Answer | RefusedRequest]:
        """Draw the sequences of requests that go together, whatever weights they are of."""
        by_weights: dict[int, list[int]] = {}
        for place, (sampler, _) in enumerate(asked):
            by_weights.setdefault(id(sampler.weights), []).append(place)
        groups = list(by_weights.values())
        answers: dict[int, Answer | RefusedRequest] = {}
        for begin in range(0, len(groups), _LOADED_SAMPLERS):  # as many as are loaded at a time
            answers |= self._draw_groups(asked, groups[begin : begin + _LOADED_SAMPLERS])
        return [answers[place] for place in range(len(asked))]

    def _draw_groups(
        self,
        asked: Sequence[tuple[_Sampler, SampleSettings]],
        groups: Sequence[Sequence[int]],
    ) -> dict[int, Answer | RefusedRequest]:
        """Draw the sequences of some requests at once, which groups of one sampler's have."""
        model = asked[0][0].model
        loaded = [self._load(model, asked[group[0]][0].weights) for group in groups]
        adapters = [
            adapter
            for adapter, group in zip(loaded, groups, strict=True)
            for place in group
            for _ in range(asked[place][1].num_samples)
        ]
        params = model.with_ends(asked[0][1].params)
        rows = _rows(model, [asked[place][1] for group in groups for place in group], params)
        drawn = iter(model.sample(adapters, *rows))
        answers: dict[int, Answer | RefusedRequest] = {}
        for adapter, group in zip(loaded, groups, strict=True):
            own = [asked[place][1] for place in group]
            given = [next(drawn) for each in own for _ in range(each.num_samples)]
            told = self._answers(asked[group[0]][0], adapter, own, given)
            answers |= zip(group, told, strict=True)
        return answers

    def _draw_by_engine(self, sampler: _Sampler, asked: SampleSettings) -> Answer:
        """Draw the sequences of a request by vLLM, beside whatever else is done."""
        model, engine, weights = sampler.model, sampler.model.sampling_engine, sampler.weights
        assert engine is not None
        named = None
        if weights is not None:
            with self._lock:
                adapter, values = weights.adapter, weights.values
            named = adapter, lambda: model.for_engine(values)
        try:
            drawn = engine.draw(named, *_rows(model, [asked], model.with_ends(asked.params)))
        except ValueError as error:  # of the distribution, or of adapters
            raise RefusedRequest(str(error)) from error

        def answer(_: Sequence[DeviceJob]) -> list[Answer | RefusedRequest]:
            adapter = self._load(model, weights) if asked.reads_scores else None
            return self._answers(sampler, adapter, [asked], drawn)

        if not asked.reads_scores:
            (told,) = answer(())
            if isinstance(told, RefusedRequest):
                raise told
            return told
        job = DeviceJob(answer)  # the model scores, on its own thread
        self._device.submit(job)
        try:
            return job.result.result()
        except CancelledError:
            raise RuntimeError("the server is about to end") from None

    def _answers(
        self,
        sampler: _Sampler,
        adapter: str | None,
        asked: Sequence[SampleSettings],
        drawn: Sequence[Generation],
    ) -> list[Answer | RefusedRequest]:
        """Answer requests with the sequences that were drawn for them, in their order."""
        model, following = sampler.model, iter(drawn)
        scored = iter(self._prompt_log_probs(model, adapter, asked))
        answers: list[Answer | RefusedRequest] = []
        for each in asked:
            own = [next(following) for _ in range(each.num_samples)]
            log_probs = None if each.prompt_log_probs_from is None else next(scored)
            if (error := next((one.error for one in own if one.error), None)) is not None:
                answers.append(RefusedRequest(f"The prompt can't be continued: {error}."))
                continue
            prompt = torch.tensor(each.prompt, dtype=torch.int64)
            top_of_prompt = None
            if each.top_of_prompt:
                top_of_prompt = model.top(
                    adapter, prompt, each.prompt_log_probs_from or 1, each.top_of_prompt
                )
            samples = []
            for one in own:
                top = None
                if each.top_of_samples and one.ids:
                    row = torch.cat([prompt, torch.tensor(one.ids, dtype=torch.int64)])
                    whole = model.top(adapter, row, len(prompt), each.top_of_samples)
                    top = TopTokens(whole.ids[len(prompt) :], whole.log_probs[len(prompt) :])
                samples.append(Sampled(one.ids, one.log_probs, one.finish_reason == "stop", top))
            answers.append(write_sample(samples, log_probs, top_of_prompt))
        return answers

    def _prompt_log_probs(
        self, model: AdaptedModel, adapter: str | None, asked: Sequence[SampleSettings]
    ) -> list[Tensor]:
        wanted = [each for each in asked if each.prompt_log_probs_from is not None]
        if not wanted:
            return []
        rows = [torch.tensor(each.prompt, dtype=torch.int64) for each in wanted]
        return model.score(adapter, rows, [each.prompt_log_probs_from or 1 for each in wanted])

    # Weights to sample with, in the model as long as they are used -------------------------------

    def _adapter_name(self) -> str:
        with self._lock:
            self._num_adapters += 1
            return f"sampler-{self._num_adapters}"

    def _load(self, model: AdaptedModel, weights: _Weights | None) -> str | None:
        if weights is None:
            return None
        if not weights.is_loaded:
            if len(self._loaded) >= _LOADED_SAMPLERS:
                self._unload(next(iter(self._loaded.values()))[1])
            model.add(weights.adapter, weights.values.shape)
            model.set_weights(weights.adapter, weights.values)
            weights.is_loaded = True
            self._loaded[weights.adapter] = (model, weights)
        self._loaded.move_to_end(weights.adapter)
        return weights.adapter

    def _unload(self, weights: _Weights) -> None:
        if weights.is_loaded:
            model, _ = self._loaded.pop(weights.adapter)
            model.remove(weights.adapter)
            weights.is_loaded = False

    def info(self, run_id: str) -> dict[str, Any]:
        """Return what a training run is."""
        run = self.run(run_id)
        return {
            "training_run_id": run.id,
            "base_model": run.model.name,
            "rank": run.shape.rank,
            "folder": run.model.folder,
            "last_request": run.last_request,
            "user_metadata": run.user_metadata,
        }

    def runs(self) -> list[str]:
        """Return the ids of the training runs that go on."""
        with self._lock:
            return list(self._runs)


def _adapter_of(run_id: str) -> str:
    """The name of a run's adapter: names of modules hold no colon."""
    return run_id.replace(":", "-")


def _check_can_draw(model: AdaptedModel, weights: AdapterState) -> None:
    """Refuse adapters that the model's engine can't draw with, before they are trained."""
    assert model.sampling_engine is not None
    try:
        model.sampling_engine.check(model.for_engine(weights))
    except UpdateRefused as error:
        raise RefusedRequest(
            f"lora_config: {model.sampling_engine.name} can't draw with such an adapter of "
            f"{model.name}: {error}"
        ) from error


def _rows(
    model: AdaptedModel, asked: Sequence[SampleSettings], params: SamplingParameters
) -> tuple[list[Sequence[int]], SamplingParameters, list[int], list[int | None]]:
    """Prompts, distribution, budgets and seeds of all sequences of requests, in their order."""
    prompts: list[Sequence[int]] = []
    budgets: list[int] = []
    seeds: list[int | None] = []
    for each in asked:
        most = model.max_model_len - len(each.prompt)
        prompts += [each.prompt] * each.num_samples
        budgets += [min(each.budget or most, most)] * each.num_samples
        seeds += [None] * each.num_samples if each.seed is None else _seeds(each)
    return prompts, params, budgets, seeds


def _seeds(asked: SampleSettings) -> list[int]:
    """A seed for each sequence of a request, by its place."""
    assert asked.seed is not None
    generator = torch.Generator().manual_seed(asked.seed % (1 << 63))
    return torch.randint(1 << 62, (asked.num_samples,), generator=generator).tolist()


def _adam_step(run: _Run, settings: AdamSettings) -> float:
    """Make a step, and give the norm of its gradient before it was clipped."""
    if all(parameter.grad is None for parameter in run.parameters):
        raise RefusedRequest("optim_step: there is no gradient; call forward_backward before it.")
    most = settings.grad_clip_norm or torch.inf
    norm = float(nn.utils.clip_grad_norm_(run.parameters, most))
    if not norm < torch.inf:
        raise RefusedRequest(
            f"optim_step made no step, and let go of the gradient: its norm is {norm}."
        )
    for group in run.optimizer.param_groups:
        group["lr"] = settings.learning_rate
        group["betas"] = (settings.beta1, settings.beta2)
        group["eps"] = settings.eps
        group["weight_decay"] = settings.weight_decay
    run.optimizer.step()
    return norm

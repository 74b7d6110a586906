"""Engine of SGLang in a process of its own, reached by URL: `SGLangServerEngine`."""

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, Literal, NoReturn
from urllib.parse import urlsplit

import torch
from torch import Tensor

from torchrl_data.checks import one_of
from torchrl_modules.engines.checked_generation import check_prompt
from torchrl_modules.engines.engine import EngineDied, EngineLoad, Generation
from torchrl_modules.engines.engine_load import read_load
from torchrl_modules.engines.json_client import AnswerTimeout, without_token
from torchrl_modules.engines.rows_of_server import RowsOfServer
from torchrl_modules.engines.whole_batch_engine import KeptAdapters, Row
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import ExpectedWeights, UpdateRefused, next_version

from .broadcast import WeightBroadcast
from .launch import TOKEN_VARIABLE
from .model_facts import ModelFacts, read_facts
from .requests import asks_for_masks, check_drawn, check_told, read_drawn, sampling_settings
from .weights_folder import weights_folder

_COUNTED: Final = ("sglang:realtime_tokens_total", "sglang:generation_tokens_total")
_LOAD: Final = ("sglang:token_usage", "sglang:num_retracted_requests_total")
_WHO: Final = "SGLangServerEngine"


class SGLangServerEngine(RowsOfServer):
    """Draws tokens with a server of SGLang, on this machine or another one.

    `start_sglang_server` starts one; one that runs already has to be started with
    ``--skip-tokenizer-init``, and better with ``--enable-metrics``. Any number of threads may call
    it. The server may be shared for generation; only one client may update its weights.

    Args:
        url: ``http://host:port``, or ``http://:token@host:port``.
        model: the folder or hub id of the model, for its vocabulary, its end tokens and the names
            and shapes of its weights; what the server was started with when not given.
        token: what the server asks for (``--api-key``); the environment's ``TORCHRL_SGLANG_TOKEN``
            when neither this nor the URL has one.
        wait_s: how long to wait for a server that is starting.
        timeout_s: a single request without an answer for so long means that the server is stuck.
        stall_timeout_s: a server that has requests and draws no token for so long is stuck, be its
            connections open or not. Before its very first token it warms up, and ``timeout_s``
            counts; as it does where the server has no metrics.
        num_connections: most rows that are drawn at a time.
        weight_transfer: how new weights go there: in a ``"file"``, which the server reads,
            broadcast (``"c10d"``, by NCCL between GPUs and by gloo between CPUs), or ``"auto"``: in
            a file where the URL is of this machine.
        weights_directory: where such a file takes room; memory when not given.

    Raises:
        ConnectionError: nobody answers at the URL.
        PermissionError: the server asks for another token.
        RuntimeError: it is no server of SGLang, has a tokenizer, or does not tell which weights
            drew a token.
        ValueError: the model of the server can't be found from here.

    Example:
        >>> engine = SGLangServerEngine("http://127.0.0.1:30000", wait_s=300)  # doctest: +SKIP
        >>> policy = SGLangWrapper(engine, tokenizer=tokenizer)  # doctest: +SKIP
    """

    reads_in_order = True
    """An update reads each weight once, in this thread: they may be lazy."""
    has_masks = True
    max_adapters = 0
    """It takes whole weights."""
    _check_reported = staticmethod(check_told)

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        token: str | None = None,
        wait_s: float = 0.0,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 30.0,
        num_connections: int = 128,
        weight_transfer: Literal["auto", "file", "c10d"] = "auto",
        weights_directory: str | None = None,
    ) -> None:
        one_of("weight_transfer", weight_transfer, ("auto", "file", "c10d"), who=_WHO)
        url, said = without_token(url)
        token = token or said or os.environ.get(TOKEN_VARIABLE)
        super().__init__(
            url,
            token=token,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            num_connections=num_connections,
        )
        self._weights_directory = weights_directory
        self._lock = threading.Lock()
        self._busy = self._paused = self._sleeps = False
        self._num_probes = 0
        self._ending: set[asyncio.Task[Any]] = set()
        self._expected: ExpectedWeights | None = None
        self._broadcast: WeightBroadcast | None = None
        try:
            self._prober.await_answer("/model_info", wait_s, goes_on=lambda: not self._failure)
            self._facts: ModelFacts = read_facts(self._client, model, who=_WHO)
        except BaseException:
            self.close()
            raise
        facts = self._facts
        self._labels = [facts.weight_version]
        self._own_ends = frozenset(facts.end_token_ids)
        is_near = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        self._broadcasts = {"file": False, "c10d": True}.get(weight_transfer, not is_near)
        self._is_near = is_near
        self._most_kept = min(facts.most_kept, facts.vocab_size)
        self.vocab_size: int = facts.vocab_size
        """Token ids are below it."""
        self.max_model_len: int = facts.max_model_len
        """Most tokens of a prompt and its response together."""
        self.update_dtype: torch.dtype | None = facts.dtype
        """In which it takes weights that are sent; ``None`` where it does not say."""
        self.takes_seeds: bool = facts.is_deterministic
        """Whether a seed makes a row repeat: with ``--enable-deterministic-inference``."""
        self.can_keep_caches: bool = not facts.overlaps
        """Whether `update_weights` takes ``recompute=False``: it does where no step is made ahead
        (``--disable-overlap-schedule``), so that it is known which weights drew which token."""

    def check_sampling(self, params: SamplingParameters) -> None:
        """See `WholeBatchEngine.check_sampling`."""
        super().check_sampling(params)
        check_drawn(params, self._most_kept, who=_WHO)
        ends = self._own_ends - set(params.stop_token_ids or self._own_ends)
        if ends:
            raise ValueError(
                f"{_WHO}: SGLang ends a response at the model's own end tokens, {sorted(ends)} "
                "too, which stop_token_ids leave out. Add them, or pass stop_token_ids=() to end "
                "at none."
            )
        if params.seed is not None and not self.takes_seeds:
            raise ValueError(
                f"{_WHO}: the server at {self._client.url} takes no seeds. Start it with "
                "--enable-deterministic-inference, or leave the seed out."
            )
        if self.takes_seeds and params.min_p:
            raise ValueError(
                f"{_WHO}: with --enable-deterministic-inference SGLang draws wrongly with min_p. "
                "Leave one of the two out."
            )

    async def _ask_for(self, row: Row, params: SamplingParameters) -> Generation:
        if self._failure:
            raise ConnectionError(self._failure)
        try:
            ids = check_prompt(
                row.prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len
            )
            self._reader_of(ids, row.images)
            seed = row.seed
            if self.takes_seeds and seed is None:  # or all rows would have the server's
                seed = int(torch.randint(1 << 31, ()))
            budget = min(row.budget, self.max_model_len - len(ids))
            body: dict[str, Any] = {
                "input_ids": ids,
                "sampling_params": sampling_settings(params, budget, seed, self._most_kept),
                "return_logprob": True,
            }
        except ValueError as error:
            return Generation([], [], "error", str(error))
        if asks_for_masks(params):
            body["return_sampling_mask"] = True
        first = self._labels[-1]
        body["cache_salt"] = first  # Cached prefixes of other weights are never met.
        async with self._aborted_on_leaving() as name:
            status, answer = await self._rows.ask("POST", "/generate", {**body, "rid": name})
        if status == 200:
            known = self._labels_since(first)
            return read_drawn(answer, known, params, self.vocab_size, self._most_kept)
        if status >= 500:
            await asyncio.to_thread(self.check_health)
        return Generation([], [], "error", f"the server answers {status}: {_message(answer)}")

    @asynccontextmanager
    async def _aborted_on_leaving(self) -> AsyncIterator[str]:
        """Gives the name of a request, which ends on the server when the caller is cancelled."""
        name = uuid.uuid4().hex
        try:
            yield name
        except asyncio.CancelledError:

            async def abort() -> None:
                with suppress(ConnectionError):  # nobody draws any more
                    await self._rows.ask("POST", "/abort_request", {"rid": name})

            task = asyncio.ensure_future(abort())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            raise

    def _probe(self) -> object:
        try:
            self._prober.request("GET", "/model_info")
            if self._facts.has_metrics and not (self._busy or self._paused):
                text = str(self._prober.request("GET", "/metrics")[1])
                counts = tuple(line for line in text.splitlines() if line.startswith(_COUNTED))
                if any(float(line.rpartition(" ")[2]) for line in counts):
                    return counts
        except AnswerTimeout:
            return None
        # It takes weights, warms up or does not count: it is there.
        self._num_probes += 1
        return self._num_probes

    def check_health(self) -> None:
        """Ask the server whether it is there; ``EngineDied``, ``AnswerTimeout``: it is not."""
        try:
            status, _ = self._prober.request("GET", "/model_info")
        except AnswerTimeout:
            raise
        except ConnectionError as error:
            raise EngineDied(f"{_WHO}: {error}") from error
        if status != 200:
            raise EngineDied(f"{_WHO}: the server at {self._client.url} answers {status}.")

    @property
    def tells_load(self) -> bool:
        """True where the server reports how full its cache is (``--enable-metrics``)."""
        return self._facts.has_metrics

    def measure_load(self) -> EngineLoad:
        """Load of the fullest of its caches.

        Raises:
            ConnectionError: it did not answer.
            RuntimeError: it does not report that.
        """
        text = str(self._prober.request("GET", "/metrics")[1])
        load = read_load(text, _LOAD, counts_late=True)
        if load is None:
            raise RuntimeError(f"{_WHO}: {self._client.url}/metrics tells no load.")
        return load

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """Replace the weights, all or none.

        They are checked as a whole before the server is told anything; requests in flight wait.

        Args:
            state_dict: parameter name (Transformers' names) to value.
            version: the number of these weights, above the present one; ``None`` counts on.
            recompute: responses in flight go on as if the new weights had read their tokens so
                far. ``False`` keeps what the old weights have read, which is faster, and the
                log-probs are of neither version alone; new requests never meet it. It takes a
                server that was started with ``--disable-overlap-schedule``.

        Raises:
            EngineDied: the server is gone, or stuck for ``timeout_s``.
            UpdateRefused: a name, type, shape or value is wrong; the old weights keep serving.
            RuntimeError: SGLang failed in the middle of loading: the server stays paused and this
                refuses to generate until an update succeeds.
        """
        who = f"{_WHO}.update_weights"
        if isinstance(state_dict, AdapterWeights):
            self._refuse_adapters("update_weights")
        if not (recompute or self.can_keep_caches):
            raise UpdateRefused(
                f"{who}: recompute=False takes a server that makes no step ahead: start it with "
                "--disable-overlap-schedule. With a step on its way, a token would be told to be "
                "of weights that did not draw it."
            )
        with self._lock:
            version = next_version(version, self.version, who=who)
            if self._failure:
                raise EngineDied(f"{who}: {self._failure}")
            checked = self._expectation().check(state_dict, who=who)
            self._busy = True
            try:
                with self._watch.waiting(), self._stopped(recompute=recompute):
                    self._load(checked, str(version), recompute)
            except ConnectionError as error:
                raise EngineDied(f"{who}: {self._failure or error}") from error
            finally:
                self._busy = False

    def _expectation(self) -> ExpectedWeights:
        if self._expected is None:
            self._expected = self._facts.expected_weights(who=f"{_WHO}.update_weights")
        return self._expected

    def _load(self, weights: Mapping[str, Tensor], label: str, recompute: bool) -> None:
        if self._sleeps:
            self._post("/resume_memory_occupation", {})
        options = {"weight_version": label, "flush_cache": recompute}
        if self._broadcasts:
            if self._broadcast is None or self._broadcast.is_closed:
                self.join()
            assert self._broadcast is not None
            self.mixed = True  # until all of them are there
            self._broadcast.send(weights, options)
        else:
            with weights_folder(
                weights,
                dtype=self.update_dtype,
                directory=self._weights_directory,
                is_near=self._is_near,
                who=f"{_WHO}.update_weights",
            ) as folder:
                self.mixed = True  # until all of them are there
                self._post("/update_weights_from_disk", {"model_path": folder, **options})
        self._add_label(label)
        self.mixed = self._sleeps = False

    @contextmanager
    def _stopped(self, *, recompute: bool) -> Iterator[None]:
        """Nothing is drawn; it goes on after that, unless the weights are a mixture."""
        self._post("/pause_generation", {"mode": "retract" if recompute else "in_place"})
        try:
            yield
        finally:
            if not (self.mixed or self._paused):
                self._post("/continue_generation", {})

    def pause(self, *, paused: bool = True) -> None:
        """Draw no more tokens, or go on; requests wait meanwhile."""
        with self._lock:
            self._paused = paused
            if paused:
                self._post("/pause_generation", {"mode": "in_place"})
            elif not self.mixed:
                self._post("/continue_generation", {})

    def join(
        self,
        *,
        master_address: str | None = None,
        master_port: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Meet the server's workers, to which all later updates are broadcast, a bucket at a time.

        An update that breaks off leaves the server paused; the next one meets anew. Without this
        call, the first update that is broadcast does it (``weight_transfer``).

        Args:
            master_address: of this process, as the workers reach it; the address of this machine on
                the way to the server when not given.
            master_port: where they meet; a free one when not given.
            device: what sends; this process's GPU where it has one and the workers compute on GPUs.

        Raises:
            RuntimeError: the workers did not come.
        """
        self.leave()
        self._broadcasts = True
        self._broadcast = WeightBroadcast(
            self._post,
            url=self._client.url,
            num_workers=self._facts.num_workers,
            is_cuda=self._facts.device == "cuda",
            dtype=self.update_dtype,
            master_address=master_address,
            master_port=master_port,
            device=device,
        )

    def leave(self) -> None:
        """Close the group that :meth:`join` opened. May be called twice."""
        if self._broadcast is not None:
            self._broadcast.close()

    def sleep(self) -> None:
        """Lend the memory of the weights and the cache, until the next update wakes it.

        Raises:
            RuntimeError: the server was started without ``--enable-memory-saver``.
        """
        if not self._facts.saves_memory:
            raise RuntimeError(
                f"{_WHO}: the server at {self._client.url} can't lend its memory. Start it with "
                "--enable-memory-saver."
            )
        with self._lock:
            self._post("/release_memory_occupation", {})
            self.mixed = self._sleeps = True

    def keep_adapters(self, weights: AdapterWeights) -> KeptAdapters:
        """Refuse: see `update_weights`, which takes whole weights."""
        del weights
        self._refuse_adapters("keep_adapters")

    def drop_adapters(self, kept: KeptAdapters) -> None:
        """Refuse: there are none."""
        del kept
        self._refuse_adapters("drop_adapters")

    def _refuse_adapters(self, user: str) -> NoReturn:
        raise UpdateRefused(
            f"{_WHO}.{user}: it takes whole weights. A model with adapters is pushed merged "
            "(merge_adapters), or drawn from by vLLM, which applies adapters alone."
        )

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        status, answer = self._client.request("POST", path, body)
        if status != 200:
            raise RuntimeError(
                f"{_WHO}: {path} at {self._client.url} answers {status}: {_message(answer)}"
            )
        return answer

    def close(self) -> None:
        """End the connections; the server goes on."""
        self.leave()
        for client in (self._rows, self._client, self._prober):
            client.close()


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer)

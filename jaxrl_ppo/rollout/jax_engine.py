"""The embedded rollout engine: the trainer's own model code, continuous batching in a thread of this process."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.rollout.engine import Completion, Request
from jaxrl_ppo.rollout.errors import EngineDead, RequestError
from jaxrl_ppo.rollout.jax_batch import Programs
from jaxrl_ppo.rollout.jax_scheduler import Generation, Scheduler
from jaxrl_ppo.rollout.jax_shapes import rung
from jaxrl_ppo.rollout.jax_weights import read_folder, read_version
from jaxrl_ppo.schema.config import RolloutConfig
from jaxrl_ppo.weights.manifest import WeightManifest

logger = logging.getLogger(__name__)

STEPS = 4  # tokens a request gets before finished ones are let go, waiting ones let in, and weights exchanged
ASLEEP = "it sleeps until weights are loaded"


class JaxEngine:
    """A RolloutEngine on this process's first device. Make it with `create`; one event loop uses it.

    With `load_format=dummy` it has no weights at first and serves only after `load_weights`; otherwise it serves the
    folder's weights as version 0. On CPU it computes in float32 whatever `dtype` says (bfloat16 is slower there);
    elsewhere in `dtype`. A request's tokens depend on its prompt, seed and settings; what runs beside it changes no
    more than the last bits of its log-probs.
    """

    def __init__(self, model_folder: Path, config: RolloutConfig):
        """See `create`."""
        self._model = load_decoder_config(model_folder)
        self._max_length = config.max_model_len or config.prompt_length + config.response_length
        if self._max_length > self._model.max_positions:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_model_len is {self._max_length} (prompt_length + response_length "
                f"unless set), but {model_folder} has positions for {self._model.max_positions} tokens"
            )
        if (config.tensor_model_parallel_size or 1) > 1:
            raise ValueError(
                "actor_rollout_ref.rollout.tensor_model_parallel_size: the JAX engine runs on one device a replica; "
                "use 1 and more replicas, or actor_rollout_ref.rollout.name=vllm"
            )
        self._dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.dtype(config.dtype)
        self._programs = Programs(self._model, self._dtype, STEPS)
        self._scheduler = Scheduler(
            self._programs, self._model.eos_token_ids, config.max_num_seqs, config.max_num_batched_tokens
        )
        self._params: Any = None
        self._unusable: str | None = "it has no weights yet"
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: set[_Call] = set()
        self._thread = threading.Thread(target=self._work, name="jax-engine", daemon=True)
        self._thread.start()

    @classmethod
    async def create(cls, model_folder: str | Path, config: RolloutConfig) -> JaxEngine:
        """An engine for a Hugging Face folder.

        Raises ModelFolderError for a folder that cannot be used and ValueError for settings that cannot be had.
        """
        engine = cls(Path(model_folder), config)
        if config.load_format != "dummy":
            params = await asyncio.to_thread(read_folder, model_folder, engine._model, engine._dtype)
            await engine._run(lambda: engine._set_weights(params, 0))
        return engine

    @property
    def compilations(self) -> int:
        """Programs compiled so far for different shapes."""
        return len(self._programs.compiled)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """See RolloutEngine. Raises RequestError before anything runs, EngineDead when the engine has failed.

        Requests of one call start together, so that the same call gives the same tokens.
        """
        self._check_usable()
        for request in requests:
            self._check(request)
        call = _Call(asyncio.get_running_loop())
        generations = [Generation(request, call.put) for request in requests]
        self._pending.add(call)
        self._commands.put(lambda: self._scheduler.submit(generations))
        try:
            for _ in requests:
                result = await call.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self._pending.discard(call)
            self._commands.put(lambda: self._scheduler.drop(generations))

    async def load_weights(self, manifest: WeightManifest) -> None:
        """See RolloutEngine. Requests under way go on with the new weights, on caches computed anew.

        Raises WeightError, after which the engine goes on with the weights it has.
        """
        params = await asyncio.to_thread(read_version, manifest, self._model, self._dtype)
        await self._run(lambda: self._set_weights(params, manifest.version))

    async def sleep(self) -> None:
        """See RolloutEngine. Raises EngineDead."""
        if self._unusable != ASLEEP:
            self._check_usable()
            await self._run(self._let_go)

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """See RolloutEngine. Raises RequestError, EngineDead."""
        self._check_usable()
        if not 2 <= len(token_ids) <= self._max_length:
            raise RequestError(f"scoring takes 2 to {self._max_length} tokens (max_model_len), not {len(token_ids)}")
        self._check_tokens("the tokens to score", token_ids)
        padded = np.zeros(rung(len(token_ids)), np.int32)
        padded[: len(token_ids)] = token_ids
        scores = await self._run(lambda: self._programs.score(self._params, padded))
        return scores[: len(token_ids) - 1]

    async def check_health(self) -> None:
        """Raise EngineDead when the engine's thread has failed, or there are no weights."""
        self._check_usable()

    async def close(self) -> None:
        """End the thread and let go of the device's memory."""
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)
        self._fail("it is closed")
        self._params = None
        del self._scheduler

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise EngineDead(f"this engine cannot serve: {self._unusable}")

    def _check(self, request: Request) -> None:
        length, sampling = len(request.prompt_ids), request.sampling
        if not length:
            raise RequestError(f"request {request.id}: the prompt is empty")
        if sampling.max_new_tokens < 1:
            raise RequestError(f"request {request.id}: max_new_tokens is {sampling.max_new_tokens}, must be at least 1")
        if length + sampling.max_new_tokens > self._max_length:
            raise RequestError(
                f"request {request.id}: {length} prompt tokens and up to {sampling.max_new_tokens} new ones exceed "
                f"max_model_len {self._max_length}"
            )
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise RequestError(
                f"request {request.id}: temperature {sampling.temperature} must be at least 0 and top_p "
                f"{sampling.top_p} in (0, 1]"
            )
        self._check_tokens(f"request {request.id}", request.prompt_ids)

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        vocabulary = self._model.vocab_size
        if not all(0 <= token < vocabulary for token in token_ids):
            wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
            raise RequestError(f"{what}: token {wrong} is outside the vocabulary of {vocabulary}")

    def _set_weights(self, params: Any, version: int) -> None:
        self._params = params
        self._scheduler.set_weights(params, version)
        self._unusable = None

    def _let_go(self) -> None:
        self._params = None
        self._scheduler.clear()
        self._unusable = ASLEEP
        for call in list(self._pending):
            call.abort(EngineDead(f"this engine cannot serve: {self._unusable}"))

    async def _run(self, function: Callable[[], Any]) -> Any:
        """The result of `function`, run in the engine's thread between two steps."""
        future: Future[Any] = Future()
        call = _Call(asyncio.get_running_loop(), future)

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._pending.add(call)
        try:
            if not self._thread.is_alive():
                self._check_usable()
            self._commands.put(command)
            return await asyncio.wrap_future(future)
        finally:
            self._pending.discard(call)

    def _work(self) -> None:
        """The thread: commands as they come, and steps while there is work."""
        try:
            while True:
                block = not self._scheduler.has_work
                try:
                    while True:
                        command = self._commands.get(block=block)
                        if command is None:
                            return
                        command()
                        block = False
                except queue.Empty:
                    self._scheduler.step()
        except BaseException as error:
            logger.exception("the JAX engine has failed")
            self._fail(f"its thread ended with {type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._unusable = why
        for call in list(self._pending):
            call.fail(EngineDead(f"this engine cannot serve: {why}"))


class _Call:
    """Somebody on the event loop who waits for the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, future: Future[Any] | None = None):
        self.results: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        self._loop, self._future = loop, future

    def put(self, result: Completion | Exception) -> None:
        """Hand over a result, from the engine's thread."""
        self._loop.call_soon_threadsafe(self.results.put_nowait, result)

    def abort(self, error: Exception) -> None:
        """End a wait for completions with an error."""
        if self._future is None:
            self.put(error)

    def fail(self, error: Exception) -> None:
        """End the wait with an error."""
        if self._future is None:
            self.put(error)
        elif not self._future.done():
            self._future.set_exception(error)

"""The rollout engine for real runs: vLLM's AsyncLLM, its engine core and workers in child processes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxrl_ppo.rollout import vllm_setup
from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.rollout.engine import Completion, Request
from jaxrl_ppo.rollout.errors import EngineDead, RequestError
from jaxrl_ppo.rollout.select import NOT_INSTALLED
from jaxrl_ppo.schema.config import RolloutConfig
from jaxrl_ppo.weights import checks
from jaxrl_ppo.weights.manifest import WeightError, WeightManifest

if TYPE_CHECKING:
    import psutil
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


class VllmEngine:
    """A RolloutEngine. Make it with `create`, in the process that will use it; one event loop uses it.

    With `load_format=dummy` it has random weights at first and serves only after `load_weights`; otherwise it serves
    the folder's weights as version 0.
    """

    def __init__(self, llm: AsyncLLM, processes: list[psutil.Process], model_folder: Path, deadline_s: float) -> None:
        self._llm = llm
        self._processes = processes
        self._deadline_s = deadline_s
        self._max_length = llm.model_config.max_model_len
        self._vocabulary = llm.model_config.get_vocab_size()
        self._stop_token_ids = vllm_setup.stop_token_ids(model_folder)
        self._shapes = checks.model_shapes(model_folder)
        self._unusable: str | None = "it has no weights yet"
        self._closed = self._asleep = False
        self._loading = asyncio.Lock()
        self._counter = 0

    @classmethod
    async def create(
        cls,
        model_folder: str | Path,
        config: RolloutConfig,
        *,
        index: int = 0,
        sleeps: bool = False,
        start_deadline_s: float = 1200.0,
        deadline_s: float = 600.0,
    ) -> VllmEngine:
        """Start vLLM's processes and wait until they have generated a token.

        Sets environment variables of this process (those that are not set) and, with `config.cpu_affinity`, pins it:
        the engine's processes inherit both. So it is meant for a process of its own, where vLLM is not yet imported.

        Args:
            model_folder: a Hugging Face folder.
            index: of this replica; chooses its cores.
            sleeps: whether `sleep` will be called. vLLM's builds for CPU only pause then: their memory stays theirs.
            start_deadline_s: for the start.
            deadline_s: for each later wait for vLLM that does not depend on requests (pause, load, resume).

        Raises ImportError when vLLM is not installed, FileNotFoundError, ValueError for settings that cannot be had,
        EngineDead when it does not come up, DeadlineExceeded.
        """
        if find_spec("vllm") is None:
            raise ImportError(NOT_INSTALLED)
        if not Path(model_folder, "config.json").is_file():
            raise FileNotFoundError(f"{model_folder} is not a Hugging Face model folder: it has no config.json")
        import psutil

        from jaxrl_ppo.weights import vllm_owner

        cpu = vllm_setup.is_cpu_build()
        arguments = vllm_setup.engine_arguments(config, model_folder, cpu)
        if sleeps and not cpu:
            arguments["enable_sleep_mode"] = True
        if config.cpu_affinity is not None:
            os.sched_setaffinity(0, config.cpu_affinity[index])
        cores = sorted(os.sched_getaffinity(0))
        os.environ.update(vllm_setup.environment(config, index, cpu, cores))
        vllm_owner.claim()
        me = psutil.Process()
        before = set(me.children(recursive=True))

        def started() -> list[psutil.Process]:
            children = (child for child in me.children(recursive=True) if child not in before)
            return [child for child in children if not _is_resource_tracker(child)]

        try:
            start = asyncio.to_thread(_start, arguments)
            llm = await within(start, start_deadline_s, f"vLLM to start {model_folder}")
            engine = cls(llm, started(), Path(model_folder), deadline_s)
            # What is compiled or allocated at first use is paid for here.
            first = engine._ask([0], max_tokens=2, logprobs=0, flat_logprobs=True)
            await within(first, start_deadline_s, f"vLLM's first tokens of {model_folder}")
            if config.load_format != "dummy":
                await llm.update_weight_version("0")
                engine._unusable = None
        except BaseException:
            for process in started():
                process.kill()
            raise
        return engine

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """See RolloutEngine. Raises RequestError before anything runs, EngineDead when the engine is gone."""
        self._check_usable()
        for request in requests:
            self._check(request)
        tasks = [asyncio.create_task(self._complete(request)) for request in requests]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for unfinished in tasks:
                unfinished.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def load_weights(self, manifest: WeightManifest) -> None:
        """See RolloutEngine. Running requests are frozen meanwhile, and go on with the new weights.

        Their cached keys and values are computed again: each token's log-prob is that of one version, the one it is
        labelled with, given all tokens before it.

        Raises WeightError. Before anything was overwritten, the engine goes on with the weights it has; after, it
        refuses to serve (EngineDead) until a load succeeds.
        """
        async with self._loading:
            if self._closed:
                self._check_usable()
            await asyncio.to_thread(checks.verify, manifest, self._shapes)
            try:
                if self._asleep:
                    await within(self._llm.wake_up(["weights"]), self._deadline_s, "vLLM to make room for weights")
                else:
                    await within(
                        self._llm.pause_generation(mode="keep", clear_cache=True), self._deadline_s, "vLLM's pause"
                    )
                await self._load(manifest)
                if self._asleep:  # after the weights, whose loading takes memory too
                    await within(self._llm.wake_up(["kv_cache"]), self._deadline_s, "vLLM to make room for its cache")
                    self._asleep = False
            except _engine_dead_error() as error:
                raise self._died() from error
            finally:
                if not self._llm.errored:
                    await within(self._llm.resume_generation(), self._deadline_s, "vLLM to resume")

    async def _load(self, manifest: WeightManifest) -> None:
        """The part of a load that cannot be taken back; the engine is paused."""
        what = f"vLLM to load weight version {manifest.version}"
        try:
            load = self._llm.collective_rpc("jaxrl_load_weights", args=(manifest.folder,))
            errors = [error for error in await within(load, self._deadline_s, what) if error is not None]
            if errors:
                raise WeightError(f"weight version {manifest.version}: vLLM could not load it: {errors[0]}")
            await self._llm.update_weight_version(str(manifest.version))
        except BaseException:
            self._unusable = f"loading weight version {manifest.version} into it failed"
            if not self._llm.errored:
                # The frozen requests must not run on a mixture of two versions.
                await within(self._llm.pause_generation(mode="abort"), self._deadline_s, "vLLM to abort requests")
            raise
        self._unusable = None

    async def sleep(self) -> None:
        """See RolloutEngine. At vLLM's level 2: weights are not kept in host memory, since newer ones come.

        Raises EngineDead.
        """
        async with self._loading:
            if self._asleep:
                return
            self._check_usable()
            self._unusable, self._asleep = "it sleeps until weights are loaded", True
            try:
                await within(self._llm.sleep(level=2, mode="abort"), self._deadline_s, "vLLM to fall asleep")
            except _engine_dead_error() as error:
                raise self._died() from error

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """See RolloutEngine. Nothing is taken from the prefix cache. Raises RequestError, EngineDead."""
        self._check_usable()
        if not 2 <= len(token_ids) < self._max_length:
            raise RequestError(
                f"scoring takes 2 to {self._max_length - 1} tokens (max_model_len - 1), not {len(token_ids)}"
            )
        output = await self._ask(token_ids, max_tokens=1, prompt_logprobs=0, flat_logprobs=True)
        return np.asarray(cast(Any, output.prompt_logprobs).logprobs, np.float32)

    async def check_health(self) -> None:
        """Raise EngineDead when the engine core is gone or a load has failed."""
        self._check_usable()
        try:
            await self._llm.check_health()
        except _engine_dead_error() as error:
            raise self._died() from error

    async def close(self) -> None:
        """Stop the engine's processes; those that do not stop are killed."""
        import psutil

        if self._closed:
            return
        self._closed, self._unusable = True, "it is closed"
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would log the end of the core as a failure
        await asyncio.to_thread(self._llm.shutdown)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, timeout=5)
        for process in alive:
            logger.warning("killing vLLM's process %d, which did not stop", process.pid)
            process.kill()
        # Its finaliser calls this once more, and would fail where the interpreter is half gone.
        cast(Any, self._llm).shutdown = lambda timeout=None: None

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise EngineDead(f"this engine cannot serve: {self._unusable}")

    def _died(self) -> EngineDead:
        self._unusable = "vLLM's engine core is gone (its log says why)"
        return EngineDead(self._unusable)

    def _check(self, request: Request) -> None:
        length, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if not length:
            raise RequestError(f"request {request.id}: the prompt is empty")
        if length + new > self._max_length:
            raise RequestError(
                f"request {request.id}: a prompt of {length} tokens and {new} new ones exceed the engine's "
                f"{self._max_length} (actor_rollout_ref.rollout.max_model_len, or prompt_length + response_length)"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
            raise RequestError(f"request {request.id}: a token id is outside the vocabulary of {self._vocabulary}")

    async def _complete(self, request: Request) -> Completion:
        sampling = request.sampling
        output = await self._ask(
            request.prompt_ids,
            request_id=request.id,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=None if sampling.ignore_eos else self._stop_token_ids,
            seed=request.seed % 2**63,  # vLLM takes -1 for "no seed"
            logprobs=0,  # none but the sampled token's
            flat_logprobs=True,
        )
        result = output.outputs[0]
        if result.finish_reason not in ("stop", "length"):
            self._check_usable()
            raise RuntimeError(f"request {request.id}: vLLM ended it with {result.finish_reason!r}")
        spans = result.weight_versions or []
        versions = np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans])
        return Completion(
            request.id,
            np.asarray(result.token_ids, np.int32),
            np.asarray(cast(Any, result.logprobs).logprobs, np.float32),  # flat
            versions.astype(np.int32),
            result.finish_reason,
        )

    async def _ask(self, token_ids: Sequence[int], request_id: str = "", **sampling: Any) -> RequestOutput:
        """One request through vLLM, to its end."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._counter += 1
        params = SamplingParams(
            **{"temperature": 0.0, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY, **sampling}
        )
        prompt = tokens_input(list(token_ids))
        try:
            outputs = [o async for o in self._llm.generate(prompt, params, f"{request_id or 'own'}-{self._counter}")]
        except _engine_dead_error() as error:
            raise self._died() from error
        except (VLLMClientError, ValueError) as error:
            raise RequestError(f"request {request_id}: {error}") from error
        return outputs[-1]


def _start(arguments: dict[str, Any]) -> AsyncLLM:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"vLLM refuses {vllm_setup.KEY}.* or its engine_kwargs: {error}") from error
    try:
        return AsyncLLM(config, Executor.get_class(config), log_stats=False, log_requests=False)
    except RuntimeError as error:
        raise EngineDead(f"vLLM did not start; its own log lines above say why ({error})") from error


def _engine_dead_error() -> type[Exception]:
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether a child is Python's own helper, which serves this process, not the engine."""
    return any("resource_tracker" in part for part in process.cmdline())

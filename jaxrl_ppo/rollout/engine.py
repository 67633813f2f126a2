"""What a rollout engine is: requests in, completions out, new weights between. Implemented by vLLM and by JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_ppo.schema.records import Turn
    from jaxrl_ppo.weights.manifest import WeightManifest


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 do not truncate."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One response to generate. `seed` alone decides its randomness, whichever replica runs it."""

    id: str
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams


@dataclasses.dataclass(slots=True)
class Completion:
    """A finished response; arrays have one entry per generated token, the end token included.

    `log_probs` are of the sampled tokens, float32, after temperature and truncation (greedy: at temperature 1).
    `finish_reason` is "stop" (an end token was sampled) or "length". An agent loop's response of several turns also has
    a `mask`, 0 where the environment wrote, and its `turns`; engines leave both out. `replica` is the router's to fill
    in.
    """

    request_id: str
    token_ids: np.ndarray  # int32
    log_probs: np.ndarray  # float32
    versions: np.ndarray  # int32
    finish_reason: str
    mask: np.ndarray | None = None  # float32
    turns: tuple[Turn, ...] = ()
    replica: int = 0


class RolloutEngine(Protocol):
    """One replica's engine. Methods may be called concurrently from one event loop."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yield each completion as it finishes, in any order."""
        ...

    async def load_weights(self, manifest: WeightManifest) -> None:
        """Run `manifest`'s weights from now on; returns when they are live. Caches of older weights are dropped.

        Raises WeightError when a tensor is missing, unknown, mis-shaped or does not match its checksum; the engine
        must then be replaced or the load repeated.
        """
        ...

    async def sleep(self) -> None:
        """Free the devices' memory, weights and caches, as far as the engine can; `load_weights` wakes it.

        Requests under way are aborted. An engine that sleeps already sleeps on.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-prob of each token after the first given those before it, temperature 1: float32 [len - 1]."""
        ...

    async def check_health(self) -> None:
        """Raise when the engine cannot serve requests any more."""
        ...

    async def close(self) -> None:
        """Free the engine's processes and memory."""
        ...

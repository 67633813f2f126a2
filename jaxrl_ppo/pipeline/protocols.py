"""What the pipeline needs of the other parts. It knows these protocols, never Ray, vLLM or a Flax class."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_ppo.rollout.engine import Completion, Request
    from jaxrl_ppo.schema.records import Batch, Prompt, Sample
    from jaxrl_ppo.weights.manifest import WeightManifest


class Trainer(Protocol):
    """The trained policy, and the reference policy where one is needed, on the trainer pool."""

    async def log_probs(self, batch: Batch, temperature: float | None = None) -> np.ndarray:
        """Log-probs [B, T] of the responses under the current weights, float32; at the sampling temperature if None."""
        ...

    async def ref_log_probs(self, batch: Batch) -> np.ndarray:
        """Log-probs [B, T] of the responses under the reference weights, float32."""
        ...

    async def sum_pi_squared(self, batch: Batch, log_probs: np.ndarray | None) -> np.ndarray:
        """Sum [B, T] of the squared probabilities of each token's distribution under the current weights.

        `log_probs` are `log_probs(batch)`, where those are known already.
        """
        ...

    async def update_actor(self, batch: Batch) -> dict[str, float]:
        """All optimizer steps of one batch; returns `actor/*` metrics."""
        ...

    async def stage_weights(self) -> WeightManifest:
        """Export the current weights into every rollout node's store; returns the committed version."""
        ...

    async def save(self, folder: Path) -> None:
        """Start saving; returns once the state is safe from the next update. Raises OSError where it cannot write."""
        ...

    async def save_pretrained(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder. Raises OSError when it cannot be written."""
        ...

    async def wait_until_saved(self) -> None:
        """Return when the save that was started last is on disk. Raises OSError when it could not be written."""
        ...


class Critic(Protocol):
    """The critic, on the trainer pool or on its own."""

    async def values(self, batch: Batch) -> np.ndarray:
        """The value [B, T] before each response token, float32."""
        ...

    async def update(self, batch: Batch) -> dict[str, float]:
        """All of the critic's optimizer steps on one batch; returns `critic/*` metrics."""
        ...

    async def save(self, folder: Path) -> None:
        """Start saving; returns once the state is safe from the next update."""
        ...

    async def save_pretrained(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder, a token classifier of one label."""
        ...

    async def wait_until_saved(self) -> None:
        """Return when the save that was started last is on disk."""
        ...


class Rollouts(Protocol):
    """Every replica of the rollout engine, behind the router."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yield completions as they finish, in any order."""
        ...

    async def load_weights(self, manifest: WeightManifest) -> None:
        """Return when every replica runs `manifest`'s weights."""
        ...

    async def sleep(self) -> None:
        """Return when every replica has given up its devices' memory, until `load_weights`."""
        ...


class Rewards(Protocol):
    """The reward function behind its worker processes."""

    async def score(self, prompt: Prompt, sample: Sample) -> None:
        """Fill the sample's `text`, `reward`, `reward_parts` and `reward_labels`."""
        ...

    def batch_report(self, when: str) -> dict[str, float]:
        """Metrics of the calls since the last report; `when` names the batch. Raises when too many of them failed."""
        ...


class Prompts(Protocol):
    """The stream of training prompts, endless over epochs."""

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        ...

    def update(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
        """Tell a curriculum sampler what a trained batch scored."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able data."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        ...


class Observer(Protocol):
    """Everything a person sees of the run."""

    def span(self, name: str, *, track: str, step: int, **args: Any) -> AbstractContextManager[None]:
        """Time a phase on the timeline."""
        ...

    def event(self, name: str, start: float, end: float, *, track: str, step: int) -> None:
        """A phase on the timeline, from `start` to `end` in seconds since the epoch."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished step."""
        ...

    def validation(
        self, step: int, prompts: Sequence[Prompt], samples: Sequence[Sample], metrics: Mapping[str, float]
    ) -> None:
        """One finished validation; `prompts[i]` is the question of `samples[i]`."""
        ...

    def rollout(self, step: int, batch: Batch, samples: Sequence[Sample]) -> None:
        """The samples that a step trained on, in the order of the batch's rows."""
        ...

    def fault(self, name: str, message: str) -> None:
        """Something went wrong and was dealt with; counted in the step's `fault/<name>`."""
        ...

    def warn(self, message: str) -> None:
        """Something a person should know that does not end the run."""
        ...

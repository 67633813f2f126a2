"""From prompts to scored samples: the rollouts and the reward function, side by side."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from jaxrl_ppo.pipeline.batching import (
    CONTRACT,
    VALIDATION,
    make_batch,
    make_requests,
    make_sample,
    ordered,
    split_greedy,
)
from jaxrl_ppo.pipeline.dynamic_sampling import DynamicSampling, Scored
from jaxrl_ppo.pipeline.measures import turn_metrics
from jaxrl_ppo.pipeline.protocols import Observer, Prompts, Rewards, Rollouts
from jaxrl_ppo.rollout.agent_loop import AgentLoops
from jaxrl_ppo.rollout.contract import NEW_TOKENS
from jaxrl_ppo.rollout.engine import Completion, Request, SamplingParams
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Batch, Prompt, Sample

VALIDATION_STEP = -1  # where the timeline has a validation's generation, which is not a training step's


def _ignore(sample: Sample) -> None:
    """For those who need no word of each sample."""


@dataclasses.dataclass(slots=True)
class Generated:
    """A batch as it comes from generation and reward; `samples` are its rows, in the same order."""

    batch: Batch
    samples: list[Sample]
    metrics: dict[str, float]
    frontier: dict[str, Any] | None = None  # where the prompt stream stood at the end, if more prompts were drawn


class Generation:
    """Asks the rollouts and scores what they answer, each sample as soon as it is there."""

    def __init__(
        self,
        config: Config,
        rollouts: Rollouts,
        rewards: Rewards,
        agents: AgentLoops,
        observer: Observer,
        *,
        greedy: bool,
    ):
        """`greedy` adds a greedy response to each prompt's samples, number `rollout.n`."""
        self.config, self.greedy = config, greedy
        self.rollout = config.actor_rollout_ref.rollout
        self.rollouts, self.rewards, self.agents, self.observer = rollouts, rewards, agents, observer

    @property
    def samples_per_prompt(self) -> int:
        """How many samples complete a prompt."""
        return self.rollout.n + self.greedy

    async def fill(self, step: int, prompts: list[Prompt], stream: Prompts, seconds: dict[str, float]) -> Generated:
        """The batch of `step` from `prompts`; under dynamic sampling, others of `stream` replace what has no signal."""
        if not self.config.algorithm.filter_groups.enable:
            return self.assemble(step, prompts, await self.sample(step, prompts, seconds=seconds))

        async def respond(prompts: Sequence[Prompt], scored: Scored) -> list[Sample]:
            return await self.sample(step, prompts, scored=scored)

        begin = time.time()
        filled = await DynamicSampling(self.config, self.samples_per_prompt).fill(prompts, stream.take, respond)
        seconds |= {"gen": time.time() - begin, "reward": 0.0}  # the calls' own times overlap
        generated = self.assemble(step, filled.prompts, filled.samples)
        generated.metrics |= filled.metrics
        generated.frontier = stream.state()
        return generated

    def assemble(self, step: int, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Generated:
        """Scored samples of `prompts` as the batch of `step`, with a report on what became of them."""
        chosen, greedy_scores = split_greedy(ordered(prompts, samples), self.rollout.n)
        batch = make_batch(prompts, chosen, self.rollout.response_length, greedy_scores)
        return Generated(batch, chosen, self.rewards.batch_report(f"step {step}") | turn_metrics(chosen))

    async def sample(
        self,
        step: int,
        prompts: Sequence[Prompt],
        *,
        scored: Scored = _ignore,
        seconds: dict[str, float] | None = None,
    ) -> list[Sample]:
        """All scored samples of each prompt, in the order in which they finish; each is also told `scored`.

        `step` is where the timeline has it; `seconds` gets the times of "gen" and, beyond the last token, "reward".
        """
        rollout = self.rollout
        sampling = SamplingParams(
            max_new_tokens=rollout.response_length,
            temperature=rollout.temperature if rollout.do_sample else 0.0,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            ignore_eos=rollout.ignore_eos,
        )
        requests = make_requests(prompts, rollout.n, sampling, seed=rollout.seed, greedy=self.greedy)
        return await self._respond(step, prompts, requests, scored, {} if seconds is None else seconds)

    async def answer(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Scored answers to validation prompts, as `val_kwargs` samples them, in the order in which they finish."""
        rollout, kwargs = self.rollout, self.rollout.val_kwargs
        sampling = SamplingParams(
            max_new_tokens=rollout.response_length,
            temperature=kwargs.temperature if kwargs.do_sample else 0.0,
            top_k=kwargs.top_k,
            top_p=kwargs.top_p,
            ignore_eos=rollout.ignore_eos,
        )
        requests = make_requests(prompts, kwargs.n, sampling, seed=rollout.seed, purpose=VALIDATION)
        return await self._respond(VALIDATION_STEP, prompts, requests, _ignore, {})

    async def probe(self, prompts: Sequence[Prompt]) -> tuple[SamplingParams, list[Completion]]:
        """A short response to each prompt, unscored, and how it was sampled.

        Truncation is left out: it changes what is drawn, not how the model's own log-probs come about.
        """
        rollout = self.rollout
        sampling = SamplingParams(
            max_new_tokens=min(NEW_TOKENS, rollout.response_length),
            temperature=rollout.temperature if rollout.do_sample else 0.0,
        )
        requests = make_requests(prompts, 1, sampling, seed=rollout.seed, purpose=CONTRACT)
        return sampling, [completion async for completion in self.rollouts.generate(requests)]

    async def _respond(
        self,
        step: int,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        scored: Scored,
        seconds: dict[str, float],
    ) -> list[Sample]:
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        samples: list[Sample] = []

        async def score(sample: Sample) -> None:
            await self.rewards.score(by_ordinal[sample.ordinal], sample)
            scored(sample)

        begin, ends = time.time(), dict[int, float]()
        async with asyncio.TaskGroup() as scoring:
            try:
                asked = [by_ordinal[int(request.id.partition(".")[0])] for request in requests]
                outside = functools.partial(self.observer.span, "tools", track="tools", step=step)
                async for completion in self.agents.generate(self.rollouts, requests, asked, outside):
                    ends[completion.replica] = time.time()
                    samples.append(sample := make_sample(completion))
                    scoring.create_task(score(sample))
            finally:
                for replica, end in ends.items():
                    self.observer.event("gen", begin, end, track=f"generation/{replica}", step=step)
            generated = time.time()
        self.observer.event("reward", generated, scored_all := time.time(), track="reward", step=step)
        seconds |= {"gen": generated - begin, "reward": scored_all - generated}
        return samples

"""The run's side of rewards: decodes a sample, has it scored in the pool, and reports on each batch."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxrl_ppo.rewards.methods import Call, MethodSpec
from jaxrl_ppo.rewards.pool import RewardPool
from jaxrl_ppo.rewards.results import Failure, Result, RewardError
from jaxrl_ppo.rewards.scorers import find_scorer, unknown_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxrl_ppo.schema.config import Config, RewardConfig
    from jaxrl_ppo.schema.records import Prompt, Sample

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class FailedSample:
    """A sample without a reward, and why."""

    ordinal: int
    index: int
    data_source: str
    text: str
    failure: Failure


class RewardManager:
    """Scores samples with the configured reward function and manager, in processes of their own."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase):
        """Reads `config.reward`; processes are started by `start`."""
        reward = config.reward
        self._tokenizer = tokenizer
        self._max_failure_rate = reward.max_failure_rate
        self._method = method_of(reward, config.data.max_response_length)
        self._pool = RewardPool(
            self._method, num_workers=reward.num_workers, timeout_s=reward.timeout_s, memory_mb=reward.worker_memory_mb
        )
        self._results: list[Result] = []
        self._failed: list[FailedSample] = []
        self.last_failures: list[FailedSample] = []  # of the last reported batch

    async def start(self, data_sources: Iterable[str] = ()) -> None:
        """Load the reward function in a process. Raises RewardError when it cannot be loaded, with file and line,
        or when there is none for one of `data_sources`."""
        if self._method.function_path is None and self._method.manager_path is None:
            for source in sorted(data_sources):
                if find_scorer(source) is None:
                    raise RewardError(unknown_source(source))
        await self._pool.start()

    async def score(self, prompt: Prompt, sample: Sample) -> None:
        """Fill the sample's `text`, `reward` (float32) and `reward_parts`. A call that fails gives reward 0.

        Raises RewardError when no reward process can be had.
        """
        sample.text = self._tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        call = Call(prompt.data_source, sample.text, prompt.ground_truth, prompt.extra_info, len(sample.response_ids))
        result = await self._pool.score(call)
        sample.reward, sample.reward_parts = result.reward, dict(result.parts)
        self._results.append(result)
        if result.failure:
            self._failed.append(
                FailedSample(sample.ordinal, sample.index, prompt.data_source, sample.text, result.failure)
            )

    def batch_report(self) -> dict[str, float]:
        """Metrics of the calls since the last report: failures in all and by kind, the mean of every further number.

        Raises RewardError, with the commonest failure and one example, when more than reward.max_failure_rate of the
        calls failed.
        """
        results, failures = self._results, self._failed
        self._results, self._failed, self.last_failures = [], [], failures
        kinds = collections.Counter(sample.failure.kind for sample in failures)
        metrics = {"reward/failures": float(len(failures))}
        metrics |= {f"reward/failures/{kind}": float(count) for kind, count in kinds.items()}
        for name in sorted({name for result in results for name in result.parts}):
            values = [result.parts[name] for result in results if name in result.parts]
            metrics[f"reward/{name}/mean"] = sum(values) / len(values)
        if failures:
            summary = _summary(failures, len(results))
            if len(failures) > self._max_failure_rate * len(results):
                raise RewardError(
                    f"{summary}\nThat is more than reward.max_failure_rate={self._max_failure_rate:g} of the batch"
                )
            log.warning(summary)
        return metrics

    async def close(self) -> None:
        """End the reward processes."""
        await self._pool.close()


def method_of(config: RewardConfig, max_response_length: int) -> MethodSpec:
    """What a reward process needs of the configuration."""
    function, manager, arguments = config.custom_reward_function, config.reward_manager, config.reward_kwargs
    overlong = arguments.overlong_buffer_cfg
    user_manager = manager.source == "importlib"
    if user_manager and not (manager.module.path and manager.module.name):
        raise RewardError("reward.reward_manager.source=importlib needs reward.reward_manager.module.path and .name")
    return MethodSpec(
        function_path=function.path,
        function_name=function.name,
        function_arguments=dict(function.reward_kwargs),
        manager="user" if user_manager else manager.name,
        manager_path=manager.module.path if user_manager else None,
        manager_name=manager.module.name if user_manager else None,
        overlong_buffer=overlong.len if overlong.enable else 0,
        overlong_factor=overlong.penalty_factor,
        log_overlong=overlong.log,
        max_response_length=arguments.max_resp_len or max_response_length,
    )


def _summary(failures: list[FailedSample], calls: int) -> str:
    """The commonest failure in words, with the sample it happened to."""
    by_message = collections.Counter((sample.failure.kind, sample.failure.message) for sample in failures)
    (kind, message), count = by_message.most_common(1)[0]
    example = next(s for s in failures if (s.failure.kind, s.failure.message) == (kind, message))
    text = example.text if len(example.text) <= 500 else example.text[:500] + "…"
    lines = [
        f"{len(failures)} of {calls} rewards failed; the commonest failure ({count}), {kind}: {message}",
        f"for example prompt {example.ordinal}, sample {example.index}, data_source {example.data_source!r}: {text!r}",
        example.failure.traceback.rstrip(),
    ]
    return "\n".join(line for line in lines if line)

"""The run's side of rewards: decodes a sample, has it scored in the pool, and reports on each batch."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.rewards.code import CodeRunner
from jaxrl_ppo.rewards.functions import FUNCTIONS_KEY, FunctionSpec
from jaxrl_ppo.rewards.methods import Call, MethodSpec
from jaxrl_ppo.rewards.model import RewardModel, add_score
from jaxrl_ppo.rewards.pool import RewardPool
from jaxrl_ppo.rewards.results import Failure, Result, RewardError
from jaxrl_ppo.rewards.scorers import find_scorer, unknown_source
from jaxrl_ppo.schema.rules_reward_model import rewards_by_rule

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from jaxrl_ppo.rewards.judge import JudgeServers
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.schema.records import Prompt, Sample

log = logging.getLogger(__name__)

# How much of a batch's failures a warning shows.
MESSAGES_SHOWN, TEXT_SHOWN, LINES_SHOWN = 5, 300, 12


@dataclasses.dataclass(frozen=True, slots=True)
class FailedSample:
    """A sample without a reward, and why."""

    ordinal: int
    index: int
    data_source: str
    text: str
    failure: Failure


class RewardManager:
    """Scores samples with the configured reward function and manager, in processes of their own, and a reward model.

    `model` is that one, once it is started; `judges` are the servers of a judge that functions ask. `on_fault`
    hears of reward processes that are lost, by the fault's name.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, judge_folder: str | None = None):
        """Reads `config.reward`; processes are started by `start`. `judge_folder` is the model of a served judge."""
        reward = config.reward
        self._tokenizer = tokenizer
        self._max_failure_rate = reward.max_failure_rate
        self._method = method_of(config, judge_folder)
        self._pool = RewardPool(
            self._method,
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            memory_mb=reward.worker_memory_mb,
            stop_when_all_hang=reward.max_failure_rate < 1,
        )
        self.model: RewardModel | None = None
        self.judges: JudgeServers | None = None
        self._model_weight = reward.reward_model.weight
        named = self._method.by_rule and not self._method.functions
        self._rule_part = reward.custom_reward_function.name if named else None
        self._results: list[Result] = []
        self._failed: list[FailedSample] = []
        self.last_failures: list[FailedSample] = []  # of the last reported batch

    async def start(self, data_sources: Iterable[str] = ()) -> None:
        """Load the reward function in a process. Raises RewardError when it cannot be loaded, with file and line,
        or when there is none for one of `data_sources`."""
        functions = list(self._method.functions.values()) or [self._method.function] * self._method.by_rule
        if self._method.manager_path is None and any(function.path is None for function in functions):
            for source in sorted(data_sources):
                if find_scorer(source) is None:
                    raise RewardError(unknown_source(source))
        await self._pool.start()

    def report_faults(self, on_fault: Callable[[str, str], None]) -> None:
        """Have `on_fault` told of each reward process that is lost: a fault's name, and what happened."""
        self._pool.on_fault = on_fault

    async def score(self, prompt: Prompt, sample: Sample) -> None:
        """Fill the sample's `text`, `reward` (float32), `reward_parts` and `reward_labels`.

        Of an agent loop's response the function's `extra_info` also tells `num_turns` and `turns`, a list of {role,
        text}. A call that fails gives reward 0, and a label `failure`. Raises RewardError when no reward process can
        be had, or when every call so far, and there were many, has hung.
        """
        sample.text = self._decode(sample.response_ids)
        extra_info = prompt.extra_info
        turns = [{"role": t.role, "text": self._decode(sample.response_ids[t.start : t.end])} for t in sample.turns]
        if turns:
            extra_info = extra_info | {"num_turns": len(turns), "turns": turns}
        length = len(sample.response_ids)
        sampled = (sample.ordinal, sample.index)
        call = Call(prompt.data_source, sample.text, prompt.ground_truth, extra_info, length, *sampled)
        if self.model is None:
            result = await self._score_by_rule(call)
        else:
            by_rule, by_model = await asyncio.gather(self._score_by_rule(call), self.model.score(prompt, sample, turns))
            result = add_score(by_rule, by_model, self._model_weight, self._rule_part)
        sample.reward = result.reward
        sample.reward_parts, sample.reward_labels = dict(result.parts), dict(result.labels)
        self._results.append(result)
        if result.failure:
            sample.reward_labels["failure"] = f"{result.failure.kind}: {result.failure.message}"
            self._failed.append(
                FailedSample(sample.ordinal, sample.index, prompt.data_source, sample.text, result.failure)
            )

    async def _score_by_rule(self, call: Call) -> Result:
        if self.judges is None:
            return await self._pool.score(call)
        return await self.judges.ask(lambda address: self._pool.score(dataclasses.replace(call, judge=address)))

    def _decode(self, token_ids: np.ndarray) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def batch_report(self, when: str) -> dict[str, float]:
        """Metrics of the calls since the last report: failures in all and by kind, the mean of every further number.

        `when` names the batch in messages. Raises RewardError, with every kind of failure and an example of each, when
        more than reward.max_failure_rate of the calls failed.
        """
        results = self._results
        # In the order of the batch, not of the calls' ends: the same batch gives the same report.
        failures = sorted(self._failed, key=lambda sample: (sample.ordinal, sample.index))
        self._results, self._failed, self.last_failures = [], [], failures
        kinds = collections.Counter(sample.failure.kind for sample in failures)
        metrics = {"reward/failures": float(len(failures))}
        metrics |= {f"reward/failures/{kind}": float(count) for kind, count in kinds.items()}
        for name in sorted({name for result in results for name in result.parts}):
            values = [result.parts[name] for result in results if name in result.parts]
            metrics[f"reward/{name}/mean"] = math.fsum(values) / len(values)  # exact, so in any order
        if failures:
            summary = _summary(failures, len(results), when)
            if len(failures) > self._max_failure_rate * len(results):
                raise RewardError(
                    f"{summary}\nThat is more than reward.max_failure_rate={self._max_failure_rate:g} of the batch"
                )
            log.warning(summary)
        return metrics

    async def close(self) -> None:
        """End the reward processes."""
        await self._pool.close()
        if self.model is not None:
            await self.model.close()


def method_of(whole: Config, judge_folder: str | None) -> MethodSpec:
    """What a reward process needs of the configuration."""
    config = whole.reward
    function, manager, arguments = config.custom_reward_function, config.reward_manager, config.reward_kwargs
    overlong = arguments.overlong_buffer_cfg
    user_manager = manager.source == "importlib"
    if user_manager and not (manager.module.path and manager.module.name):
        raise RewardError("reward.reward_manager.source=importlib needs reward.reward_manager.module.path and .name")
    return MethodSpec(
        function=FunctionSpec(function.path, function.name, dict(function.reward_kwargs)),
        functions={part: _function_spec(part, entry) for part, entry in config.functions.items()},
        by_rule=rewards_by_rule(whole),
        runner=CodeRunner(
            config.sandbox_fusion.url,
            config.run_code_locally,
            max(1, config.sandbox_fusion.max_concurrent // config.num_workers),
            config.sandbox_fusion.memory_limit_mb,
        ),
        judge_folder=judge_folder,
        manager="user" if user_manager else manager.name,
        manager_path=manager.module.path if user_manager else None,
        manager_name=manager.module.name if user_manager else None,
        overlong_buffer=overlong.len if overlong.enable else 0,
        overlong_factor=overlong.penalty_factor,
        log_overlong=overlong.log,
        max_response_length=arguments.max_resp_len or whole.data.max_response_length,
    )


def _function_spec(part: str, entry: Mapping[str, Any]) -> FunctionSpec:
    """One entry of reward.functions."""
    name, arguments = entry.get("name") or "compute_score", dict(entry.get("reward_kwargs") or {})
    return FunctionSpec(entry.get("path"), name, arguments, float(entry.get("weight", 1)), f"{FUNCTIONS_KEY}.{part}")


def _summary(failures: list[FailedSample], calls: int, when: str) -> str:
    """Every kind of failure in words, and the commonest messages, each with a sample it happened to."""
    kinds = collections.Counter(sample.failure.kind for sample in failures)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    lines = [f"{when}: {len(failures)} of {calls} rewards failed: {counted}"]
    messages = collections.Counter((sample.failure.kind, sample.failure.message) for sample in failures)
    for (kind, message), count in messages.most_common(MESSAGES_SHOWN):
        example = next(s for s in failures if (s.failure.kind, s.failure.message) == (kind, message))
        text = example.text if len(example.text) <= TEXT_SHOWN else example.text[:TEXT_SHOWN] + "…"
        lines.append(f"  {count} x {kind}: {message}")
        lines.append(
            f"    for example prompt {example.ordinal}, sample {example.index}, data_source {example.data_source!r}: "
            f"{text!r}"
        )
        lines += [f"    {line}" for line in example.failure.traceback.rstrip().splitlines()[-LINES_SHOWN:]]
    if len(messages) > MESSAGES_SHOWN:
        lines.append(f"  and {len(messages) - MESSAGES_SHOWN} other messages")
    return "\n".join(lines)

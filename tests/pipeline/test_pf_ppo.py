"""PF-PPO: samples are drawn by their scores, rows stay whole, and a step's draw is always the same."""

from __future__ import annotations

import numpy as np
import pytest
from test_critic_steps import make_critic_run
from test_pipeline_modes import finish

from jaxrl_ppo.algorithms.resampling import resample

SCORES = np.array([0.0, 1.0, -2.0, 0.5, 1.0])
SHARES = {
    "pow": SCORES**2 / np.sum(SCORES**2),
    "max_min": np.array([0, 1, 1, 0, 1]) / 3,
    "max_random": np.array([1, 4, 1, 1, 4]) / 11,
}


@pytest.mark.parametrize("method", SHARES)
def test_samples_are_drawn_by_their_weights(method):
    rng = np.random.default_rng(0)
    drawn = np.concatenate([resample(SCORES, method, 2.0, rng) for _ in range(2000)])
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / len(drawn), SHARES[method], atol=0.02)
    assert (np.diff(resample(SCORES, method, 2.0, rng)) >= 0).all()


def test_scores_of_nothing_but_zero_are_drawn_alike_and_an_unknown_method_is_named():
    assert len(set(resample(np.zeros(50), "pow", 2.0, np.random.default_rng(0)).tolist())) > 20
    with pytest.raises(ValueError, match=r"reweight_method is 'best', not one of pow"):
        resample(SCORES, "best", 2.0, np.random.default_rng(0))


async def test_models_learn_from_the_samples_drawn_and_the_record_keeps_those_generated(tmp_path):
    run, _, observer = make_critic_run(tmp_path, 2)
    run.config.algorithm.use_pf_ppo = True
    seen = {"actor": [], "critic": []}
    for name, model, method in (("actor", run.trainer, "update_actor"), ("critic", run.critic, "update")):
        inner = getattr(model, method)

        async def keep(batch, name=name, inner=inner):
            seen[name].append(batch)
            return await inner(batch)

        setattr(model, method, keep)
    await finish("sync", run)
    for actor, critic, ordinals in zip(seen["actor"], seen["critic"], observer.ordinals.values()):
        assert actor is critic
        assert len(actor.group) == len(ordinals)
        np.testing.assert_array_equal(actor.response_mask * actor.token_rewards, actor.token_rewards)
        np.testing.assert_allclose(actor.token_rewards.sum(axis=1), actor.scores)
        again = run.estimation.to_learn_from(actor, 1)
        np.testing.assert_array_equal(again.scores, run.estimation.to_learn_from(actor, 1).scores)

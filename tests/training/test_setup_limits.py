"""What a model's own limits make of a configuration, before any weight is read."""

from __future__ import annotations

import dataclasses

import pytest
from training_cases import make_config

from jaxrl_ppo.models.architecture import DecoderConfig, RopeConfig
from jaxrl_ppo.models.parameters import multiplied_parameters
from jaxrl_ppo.schema.config import AlgorithmConfig
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.setup import policy_programs

MODEL = DecoderConfig("llama", 64, 16, 24, 1, 2, 2, 8, max_positions=100, rope=RopeConfig(kind="dynamic", factor=2.0))


def test_dynamic_rope_stops_at_the_models_positions():
    config = make_config()
    mesh = make_mesh(config.actor.mesh)
    config.rollout.prompt_length = 100 - config.rollout.response_length
    policy_programs(config, AlgorithmConfig(), MODEL, mesh, 1)
    config.rollout.prompt_length += 1
    with pytest.raises(ValueError, match=r"prompt_length 89 \+ response_length 12 exceed the model's 100 positions"):
        policy_programs(config, AlgorithmConfig(), MODEL, mesh, 1)


def test_of_a_mixture_a_token_is_multiplied_with_its_own_experts():
    attention, head = 4 * 16 * 2 * 8, 64 * 16
    norms = 3 * 16
    assert multiplied_parameters(MODEL) == attention + 3 * 16 * 24 + head + norms
    mixture = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2, tie_embeddings=True)
    assert multiplied_parameters(mixture) == attention + 2 * 3 * 16 * 24 + 16 * 8 + head + norms

"""Greedy generation of every family by the JAX engine equals transformers', windows and shared prompts included."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import WINDOW

from jaxrl_ppo.rollout.engine import Request, SamplingParams
from jaxrl_ppo.rollout.jax_engine import JaxEngine
from jaxrl_ppo.schema.config import RolloutConfig

NEW_TOKENS = 40
PROMPTS = [tuple(range(6, 36)), (40, 41, 42)]  # longer and shorter than the window, which the answers leave behind
# Llama and Qwen2 without a window are generated from in the engine's own tests and with the real model.
NAMES = ["llama_yarn", "mistral", "mixtral", "qwen2_window", "qwen3", "qwen3_moe", "gemma2", "gemma3"]


@pytest.mark.parametrize("name", NAMES)
async def test_greedy_tokens_equal_transformers(model_folders, name):
    assert NEW_TOKENS > WINDOW
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model_folders[name], attn_implementation="eager")
    engine = await JaxEngine.create(
        model_folders[name], RolloutConfig(prompt_length=40, response_length=NEW_TOKENS, load_format="auto")
    )
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    # The first prompt three times: its requests share its keys and values.
    requests = [Request(f"r{i}", PROMPTS[i // 3], i, sampling) for i in range(4)]
    done = {c.request_id: c async for c in engine.generate(requests)}
    await engine.close()
    for request in requests:
        expected = oracle.generate(
            torch.tensor([request.prompt_ids]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=10**6
        )
        assert done[request.id].token_ids.tolist() == expected[0, len(request.prompt_ids) :].tolist()

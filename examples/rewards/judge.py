"""A generative judge: any model behind an OpenAI-compatible endpoint (vLLM's server, a provider's) grades the answer.

The run serves it itself, on devices of its own:

    python -m jaxrl_ppo.main … reward.custom_reward_function.path=examples/rewards/judge.py \
        reward.reward_model.enable=true reward.reward_model.model_path=Qwen/Qwen2.5-7B-Instruct \
        reward.reward_model.rollout.name=vllm reward.reward_model.enable_resource_pool=true \
        reward.reward_model.nnodes=1 reward.reward_model.n_gpus_per_node=1

Or it is at an address of yours:

    vllm serve Qwen/Qwen2.5-7B-Instruct --port 8001
    python -m jaxrl_ppo.main … reward.custom_reward_function.path=examples/rewards/judge.py \
        reward.custom_reward_function.reward_kwargs.base_url=http://localhost:8001/v1 \
        reward.custom_reward_function.reward_kwargs.model=Qwen/Qwen2.5-7B-Instruct

A coroutine function: many samples wait for the judge at the same time, while the batch still generates. `api_key_env`
names the environment variable that holds the key, if the endpoint wants one. What the judge says is kept with the
sample. A call that fails costs its sample, as with every reward function.
"""

import asyncio
import json
import os
import re
import urllib.request

PROMPT = """You grade an answer. Question and answer follow.

[reference answer]
{ground_truth}

[answer to grade]
{solution_str}

Say in one sentence what is right or wrong in it. Then write a line "Grade: N", N from 0 (useless) to 10 (perfect)."""


async def compute_score(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    reward_router_address=None,
    base_url="http://localhost:8001/v1",
    model=None,
    api_key_env="OPENAI_API_KEY",
    max_tokens=200,
    timeout=50,
):
    """The judge's grade as 0 to 1. Raises ValueError when it gives none.

    `reward_router_address` is the server of a judge that the run serves; `base_url` and `model` are another's.
    """
    if reward_router_address:
        base_url = f"http://{reward_router_address}/v1"
    content = PROMPT.format(ground_truth=ground_truth, solution_str=solution_str)
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
    }
    if model:  # vLLM's server has one, and need not be told
        body["model"] = model
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(api_key_env):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    said = await asyncio.to_thread(ask, request, timeout)
    grades = re.findall(r"Grade:\s*(\d+(?:\.\d+)?)", said)
    if not grades:
        raise ValueError(f"the judge gave no grade: {said[:200]!r}")
    return {"score": min(float(grades[-1]), 10.0) / 10, "judgement": said}


def ask(request, timeout):
    """The text of the judge's answer."""
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)["choices"][0]["message"]["content"]

"""Greedy answers of one engine to token prompts, as a program: answers.py vllm|jax FOLDER PROMPTS.json OUT.json NEW."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from jaxrl_ppo.rollout.engine import Request, SamplingParams
from jaxrl_ppo.schema.config import RolloutConfig


async def answer(engine_name: str, folder: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    config = RolloutConfig(
        name=engine_name, dtype="float32", load_format="auto", enforce_eager=True, max_model_len=128, max_num_seqs=8
    )
    if engine_name == "vllm":
        from jaxrl_ppo.rollout.vllm_engine import VllmEngine as Engine
    else:
        from jaxrl_ppo.rollout.jax_engine import JaxEngine as Engine
    engine = await Engine.create(folder, config)
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)
    requests = [Request(str(i), tuple(ids), 0, sampling) for i, ids in enumerate(prompts)]
    found = {completion.request_id: completion.token_ids.tolist() async for completion in engine.generate(requests)}
    await engine.close()
    return [found[str(i)] for i in range(len(prompts))]


if __name__ == "__main__":
    name, model, questions, out, new = sys.argv[1:]
    result = asyncio.run(answer(name, model, json.loads(Path(questions).read_text()), int(new)))
    Path(out).write_text(json.dumps(result))

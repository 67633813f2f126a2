"""Two tiny Llama checkpoints, a weight store, and one vLLM engine for all tests."""

import os

import pytest
import pytest_asyncio
from tiny_llama import make_checkpoint


@pytest.fixture(scope="session")
def first(tmp_path_factory):
    """The checkpoint that the engine starts with."""
    return make_checkpoint(tmp_path_factory.mktemp("first"), 0)


@pytest.fixture(scope="session")
def second(tmp_path_factory):
    """Other weights for the same model; representable in bfloat16."""
    import torch

    checkpoint = make_checkpoint(tmp_path_factory.mktemp("second"), 1)
    with torch.no_grad():
        for parameter in checkpoint.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return checkpoint


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    from jaxrl_ppo.weights.store import WeightStore

    store = WeightStore(tmp_path_factory.mktemp("store"))
    yield store
    store.close()


@pytest.fixture(scope="session")
def commit(store):
    """Commit tensors as a version, in two buckets."""

    def commit(version, tensors):
        store.begin(version)
        names = sorted(tensors)
        for part in (names[::2], names[1::2]):
            store.put(version, {name: tensors[name] for name in part})
        return store.commit(version)

    return commit


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(first):
    """vLLM in float32, started with dummy weights."""
    from jaxrl_ppo.rollout.vllm_engine import VllmEngine
    from jaxrl_ppo.schema.config import EngineKwargsConfig, RolloutConfig

    config = RolloutConfig(
        prompt_length=200,
        response_length=200,
        dtype="float32",
        max_num_seqs=32,
        max_num_batched_tokens=512,
        enforce_eager=True,
        engine_kwargs=EngineKwargsConfig(vllm={"block_size": 32}),
    )
    variables = dict(os.environ)
    engine = await VllmEngine.create(first.folder, config)
    yield engine
    await engine.close()
    os.environ.clear()
    os.environ.update(variables)

"""The guards with the real JAX engine and the real trainer: each fault is caught, by a message of its own."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import transformers

from jaxrl_ppo.algorithms.token_rewards import place_scores
from jaxrl_ppo.pipeline.batching import make_batch, make_requests, make_sample, ordered
from jaxrl_ppo.rollout.contract import Contract, ContractMismatch, check_completions, check_log_probs
from jaxrl_ppo.rollout.engine import Completion, SamplingParams
from jaxrl_ppo.rollout.jax_engine import JaxEngine
from jaxrl_ppo.rollout.probe import ProbeMismatch, WeightProbe
from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig, RolloutConfig
from jaxrl_ppo.schema.records import Prompt
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.policy import PolicyTrainer
from jaxrl_ppo.weights.export import export_buckets
from jaxrl_ppo.weights.store import WeightStore

TEMPERATURE = 0.5
END = (3,)
PROBE = list(range(5, 37))
PROMPTS = [Prompt(i, tuple(range(5 + i, 12 + i)), [], "", None, {}) for i in range(4)]
SAMPLING = SamplingParams(max_new_tokens=12, temperature=TEMPERATURE)


def make_trainer(folder, dtype="float32") -> PolicyTrainer:
    config = ActorRolloutRefConfig()
    config.model.enable_gradient_checkpointing = False
    config.rollout.temperature = TEMPERATURE
    config.actor.fsdp_config.dtype = dtype
    config.actor.ppo_max_token_len_per_gpu = 128
    config.ref.log_prob_max_token_len_per_gpu = 128
    return PolicyTrainer(
        config,
        AlgorithmConfig(),
        model_folder=folder,
        mesh=make_mesh(config.actor.mesh),
        total_steps=4,
        needs_reference=False,
        seed=0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("guarded")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,  # so that every projection is square, and a transposed one has the right shape
        max_position_embeddings=128,
        eos_token_id=list(END),
        tie_word_embeddings=True,
        initializer_range=0.25,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trainer(folder):
    return make_trainer(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = WeightStore(tmp_path_factory.mktemp("guards") / "store")
    yield store
    store.close()


def export(store, trainer, version, spoil=lambda tensors: tensors):
    store.begin(version)
    for bucket in export_buckets(trainer.model, trainer.params, np.dtype("float32"), 1 << 30):
        store.put(version, spoil(bucket))
    return store.commit(version)


@pytest.fixture(scope="module")
async def engine(folder, store, trainer):
    engine = await JaxEngine.create(folder, RolloutConfig(prompt_length=64, response_length=16, max_num_seqs=8))
    await engine.load_weights(export(store, trainer, 0))
    yield engine
    await engine.close()


async def compare(engine, trainer, *, sampling=SAMPLING, dtype="float32", tolerance=None):
    """What the pipeline does before its first step; `sampling` is what the engine is really told."""
    completions = [c async for c in engine.generate(make_requests(PROMPTS, 1, sampling, seed=1))]
    check_completions(completions, SAMPLING, END)
    samples = ordered(PROMPTS, [make_sample(completion) for completion in completions])
    for sample in samples:
        sample.reward = 0.0
    batch = make_batch(PROMPTS, samples, 16)
    there = batch.response_mask > 0
    return check_log_probs(
        batch.rollout_log_probs[there],
        trainer.log_probs(batch)[there],
        at_one=trainer.log_probs(batch, 1.0)[there],
        temperature=TEMPERATURE,
        contract=Contract(PROMPTS, END, dtype, tolerance),
    )


async def test_an_engine_that_keeps_the_contract_passes(engine, trainer):
    assert await compare(engine, trainer) < 1e-5


async def test_a_temperature_that_is_not_applied(engine, trainer):
    with pytest.raises(ContractMismatch, match=r"TEMPERATURE is off: they are those of temperature 1 "):
        await compare(engine, trainer, sampling=dataclasses.replace(SAMPLING, temperature=1.0))


async def test_another_temperature_is_not_taken_for_one(engine, trainer):
    with pytest.raises(ContractMismatch, match=r"Neither temperature nor data type.*GENERATES"):
        await compare(engine, trainer, sampling=dataclasses.replace(SAMPLING, temperature=0.25))


async def test_bfloat16_drift_above_the_threshold(engine, folder):
    coarse = make_trainer(folder, "bfloat16")
    assert await compare(engine, coarse, dtype="bfloat16") > 1e-3  # as configured, this is what is to be expected
    with pytest.raises(ContractMismatch, match=r"DATA TYPE is off.*log_prob_tolerance|log_prob_tolerance.*DATA TYPE"):
        await compare(engine, coarse, tolerance=1e-3)


async def test_a_replica_left_on_old_weights_and_a_transposed_projection(engine, folder, store, trainer):
    probe = WeightProbe(PROBE, ["float32"])
    probe.expect(0, trainer.score_tokens(PROBE))
    first = export(store, trainer, 0)
    await engine.load_weights(first)
    await probe.verify(0, engine, first)

    moved = copy.copy(trainer)
    moved.params = dict(trainer.params)
    moved.params["final_norm"] = {"scale": trainer.params["final_norm"]["scale"] * 1.5}
    second = export(store, moved, 1)
    probe.expect(1, moved.score_tokens(PROBE))
    with pytest.raises(ProbeMismatch, match="still on the old weights"):
        await probe.verify(0, engine, second)  # it was told to load them, and did not

    name = "model.layers.1.self_attn.q_proj.weight"
    transposed = export(store, moved, 2, lambda tensors: tensors | {name: np.ascontiguousarray(tensors[name].T)})
    probe.expect(2, moved.score_tokens(PROBE))
    await engine.load_weights(transposed)  # shapes and checksums are right
    with pytest.raises(ProbeMismatch, match=r"not on the old weights.*exported in a wrong layout"):
        await probe.verify(0, engine, transposed)
    await engine.load_weights(export(store, moved, 3))
    probe.expect(3, moved.score_tokens(PROBE))
    await probe.verify(0, engine, export(store, moved, 3))
    await engine.load_weights(export(store, trainer, 0))


def completion(tokens, reason, log_probs=None):
    size = len(tokens) if log_probs is None else log_probs
    return Completion(
        "0.0", np.array(tokens, np.int32), np.zeros(size, np.float32), np.zeros(len(tokens), np.int32), reason
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (completion([7, 8], "stop"), "last token is 8, none of the model's end tokens"),
        (completion([7, 8], "length"), "'length' after 2 tokens of 12"),
        (completion([7, 3], "stop", log_probs=1), "2 tokens, 1 log-probs"),
    ],
)
def test_responses_that_do_not_end_as_they_say(wrong, told):
    with pytest.raises(ContractMismatch, match=told):
        check_completions([wrong], SAMPLING, END)


async def test_where_padding_is_the_end_token_the_end_token_still_counts(engine):
    """And a response that is cut by its length gets none."""
    cut = dataclasses.replace(SAMPLING, max_new_tokens=3, temperature=4.0)
    requests = make_requests(PROMPTS, 16, cut, seed=5)
    samples = [make_sample(c) async for c in engine.generate(requests)]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        sample.reward = 1.0
        ended = [token in END for token in sample.response_ids]
        assert sum(ended) == ended[-1] == (sample.finish_reason == "stop")
        assert len(sample.response_ids) == 3 or sample.finish_reason == "stop"
    samples = ordered(PROMPTS, samples)
    batch = make_batch(PROMPTS, samples, 16)
    padded = np.where(batch.response_mask > 0, batch.response_ids, END[0])  # what padding with the end token would be
    lengths = [len(sample.response_ids) for sample in samples]
    assert batch.response_mask.sum(axis=1).tolist() == lengths  # the mask knows lengths, not token ids
    rewards = np.asarray(place_scores(batch.scores, batch.response_mask))
    for row, length in enumerate(lengths):
        assert rewards[row, length - 1] == 1
        assert (padded[row, length:] == END[0]).all()

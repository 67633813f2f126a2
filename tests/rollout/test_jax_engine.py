"""The JAX engine against transformers, the trainer's decoder and itself, on a tiny random model."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.rollout.engine import Request, SamplingParams
from jaxrl_ppo.rollout.errors import EngineDead, RequestError
from jaxrl_ppo.rollout.jax_engine import JaxEngine
from jaxrl_ppo.schema.config import RolloutConfig
from jaxrl_ppo.weights.manifest import WeightError
from jaxrl_ppo.weights.store import WeightStore

VOCABULARY = 61
END = (3, 4)
PROMPTS = [(7, 8, 9, 10, 11), (12, 13, 14), (15,), tuple(range(5, 40))]


def make_model(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=list(END),
        bos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # so that values survive the way through bfloat16
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.fixture(scope="module")
def models() -> list[transformers.PreTrainedModel]:
    return [make_model(0), make_model(1)]


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    models[0].save_pretrained(folder)
    return folder


@pytest.fixture
def weight_store(tmp_path):
    store = WeightStore(tmp_path / "store")
    yield store
    store.close()


def tensors_of(model) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}


def commit(store, version, tensors):
    store.begin(version)
    store.put(version, tensors)
    return store.commit(version)


def config(**changes) -> RolloutConfig:
    return RolloutConfig(
        **{"prompt_length": 100, "response_length": 200, "max_num_seqs": 16, "load_format": "auto", **changes}
    )


@pytest.fixture(scope="module")
async def engine(folder):
    engine = await JaxEngine.create(folder, config())
    yield engine
    await engine.close()


def requests(count, *, prompts=PROMPTS, seed=0, **sampling):
    params = SamplingParams(**{"max_new_tokens": 20, **sampling})
    return [Request(f"r{i}", prompts[i % len(prompts)], seed + i, params) for i in range(count)]


async def run(engine, requests):
    return {c.request_id: c async for c in engine.generate(requests)}


@pytest.fixture(scope="module")
def trainer_log_probs(folder):
    """The trainer-side computation: a sequence's response log-probs in one pass, at a temperature."""
    model = load_decoder_config(folder)
    decoder = Decoder(model, rngs=nnx.Rngs(0))
    nnx.update(decoder, load_params(folder, model))

    @nnx.jit
    def compute(decoder, row, length, temperature):
        positions = jnp.arange(row.shape[1])[None]
        hidden = decoder.hidden(row, positions, (positions < length).astype(jnp.int32))[0]
        log_probs = jax.nn.log_softmax(hidden[:-1] @ decoder.head() / temperature)
        return jnp.take_along_axis(log_probs, row[0, 1:, None], 1)[:, 0]

    def log_probs(prompt, tokens, temperature):
        row = np.zeros((1, 128), np.int32)
        length = len(prompt) + len(tokens)
        row[0, :length] = [*prompt, *tokens]
        return np.asarray(compute(decoder, row, length, temperature))[len(prompt) - 1 : length - 1]

    return log_probs


async def test_greedy_tokens_equal_transformers(engine, models):
    done = await run(engine, requests(len(PROMPTS), temperature=0.0, max_new_tokens=40, ignore_eos=True))
    for i, prompt in enumerate(PROMPTS):
        expected = models[0].generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=40, min_new_tokens=40, eos_token_id=None
        )
        assert done[f"r{i}"].token_ids.tolist() == expected[0, len(prompt) :].tolist()
        assert done[f"r{i}"].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_log_probs_equal_the_trainers(engine, trainer_log_probs, temperature):
    # More requests than slots, so that some start in a ring that others have filled.
    sent = requests(40, temperature=temperature, max_new_tokens=70, ignore_eos=True)
    sent = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_new_tokens=10 + 7 * (i % 9)))
        for i, r in enumerate(sent)
    ]
    done = await run(engine, sent)
    for request in sent:
        completion = done[request.id]
        expected = trainer_log_probs(request.prompt_ids, completion.token_ids, temperature or 1.0)
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-5)
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        assert (completion.versions == 0).all()


async def test_tokens_do_not_depend_on_what_runs_beside(engine, folder):
    sent = requests(30, seed=100)
    together = await run(engine, sent)
    reversed_order = await run(engine, sent[::-1])
    alone = await run(engine, sent[7:8])
    few_slots = await JaxEngine.create(folder, config(max_num_seqs=3))
    cramped = await run(few_slots, sent)
    await few_slots.close()
    for request in sent:
        expected = together[request.id].token_ids.tolist()
        assert reversed_order[request.id].token_ids.tolist() == expected
        assert cramped[request.id].token_ids.tolist() == expected
    assert alone["r7"].token_ids.tolist() == together["r7"].token_ids.tolist()
    assert len({tuple(c.token_ids) for c in together.values()}) > 20


async def test_same_call_gives_the_same_bits(engine):
    first, second = [await run(engine, requests(25, seed=5)) for _ in range(2)]
    for name in first:
        np.testing.assert_array_equal(first[name].token_ids, second[name].token_ids)
        np.testing.assert_array_equal(first[name].log_probs, second[name].log_probs)


async def test_end_tokens_stop_and_are_kept(engine):
    done = await run(engine, requests(40, seed=300, max_new_tokens=60))
    reasons = {"stop": 0, "length": 0}
    for completion in done.values():
        reasons[completion.finish_reason] += 1
        ends = np.isin(completion.token_ids, END)
        if completion.finish_reason == "stop":
            assert ends.sum() == 1
            assert ends[-1]
        else:
            assert not ends.any()
            assert len(completion.token_ids) == 60
    assert reasons["stop"] > 5


async def test_shrinking_and_growing_batches_compile_few_programs(folder):
    engine = await JaxEngine.create(folder, config(max_num_seqs=64))
    lengths = [2, 3, 5, 9, 20, 40, 60, 150]
    sent = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_new_tokens=lengths[i % 8]))
        for i, r in enumerate(requests(64, max_new_tokens=1, ignore_eos=True))
    ]
    done = await run(engine, sent)
    assert all(len(done[r.id].token_ids) == r.sampling.max_new_tokens for r in sent)
    compiled = engine.compilations
    assert engine._programs.decode_program._cache_size() == sum(key[0] == "decode" for key in engine._programs.compiled)
    # One prefill, one draw of first tokens; 64, 32, 16 and 8 slots with a ring of 64, 8 with 128 and 256.
    assert compiled <= 8
    again = await run(engine, sent)
    assert engine.compilations == compiled
    assert all(again[name].token_ids.tolist() == done[name].token_ids.tolist() for name in done)
    await engine.close()


async def draw_first_tokens(engine, count, **sampling):
    done = await run(engine, requests(count, prompts=PROMPTS[:1], seed=1000, max_new_tokens=1, **sampling))
    return np.array([c.token_ids[0] for c in done.values()]), np.array([c.log_probs[0] for c in done.values()])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.7},
    ],
)
async def test_tokens_follow_the_truncated_distribution(engine, models, sampling):
    count = 2000
    tokens, log_probs = await draw_first_tokens(engine, count, **sampling)
    with torch.no_grad():
        logits = models[0](torch.tensor([PROMPTS[0]])).logits[0, -1].double().numpy()
    probabilities = np.exp((logits - logits.max()) / sampling["temperature"])
    order = np.argsort(-probabilities)
    if "top_k" in sampling:
        probabilities[order[sampling["top_k"] :]] = 0
    probabilities /= probabilities.sum()
    if "top_p" in sampling:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= sampling["top_p"]]] = 0
        probabilities /= probabilities.sum()
    assert (probabilities[tokens] > 0).all()
    np.testing.assert_allclose(log_probs, np.log(probabilities[tokens]), atol=1e-4)
    observed = np.bincount(tokens, minlength=VOCABULARY)
    likely = probabilities * count >= 5
    chi_square = (((observed - count * probabilities) ** 2)[likely] / (count * probabilities)[likely]).sum()
    degrees = max(likely.sum() - 1, 1)
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


async def test_score_equals_transformers(engine, models):
    tokens = list(range(5, 55))
    with torch.no_grad():
        log_probs = torch.log_softmax(models[0](torch.tensor([tokens])).logits[0], -1)
    expected = log_probs[torch.arange(49), torch.tensor(tokens[1:])]
    np.testing.assert_allclose(await engine.score(tokens), expected, atol=1e-4)


async def test_new_weights_take_over_in_the_middle_of_a_request(folder, models, weight_store):
    engine = await JaxEngine.create(folder, config(load_format="dummy"))
    with pytest.raises(EngineDead, match="no weights"):
        await engine.check_health()
    await engine.load_weights(commit(weight_store, 3, tensors_of(models[0])))
    long = requests(1, temperature=0.0, max_new_tokens=190, ignore_eos=True)
    stream = engine.generate([*long, *requests(8, max_new_tokens=1)[1:]])
    await anext(stream)
    await engine.load_weights(commit(weight_store, 4, tensors_of(models[1])))
    completion = {c.request_id: c async for c in stream}["r0"]
    assert set(completion.versions) == {3, 4}
    assert (np.diff(completion.versions) >= 0).all()
    sequence = torch.tensor([[*PROMPTS[0], *completion.token_ids]])
    with torch.no_grad():
        by_version = {v: torch.log_softmax(m(sequence).logits[0], -1).numpy() for v, m in zip((3, 4), models)}
    for i, (token, version) in enumerate(zip(completion.token_ids, completion.versions)):
        expected = by_version[version][len(PROMPTS[0]) + i - 1]
        assert token == expected.argmax()
        assert abs(completion.log_probs[i] - expected[token]) < 1e-4
    await engine.close()


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


async def test_asleep_it_holds_no_memory_and_awake_it_goes_on_with_the_weights_it_is_given(
    folder, models, weight_store
):
    before = live_bytes()
    engine = await JaxEngine.create(folder, config())
    first = await run(engine, requests(8, temperature=0.0))
    running = asyncio.create_task(run(engine, requests(4, max_new_tokens=190, ignore_eos=True)))
    await run(engine, requests(1, max_new_tokens=1))
    assert live_bytes() - before > 4 * sum(parameter.numel() for parameter in models[0].parameters())
    await engine.sleep()
    with pytest.raises(EngineDead, match="sleeps until weights are loaded"):
        await running
    assert live_bytes() == before
    await engine.sleep()
    for refused in (run(engine, requests(1)), engine.score([5, 6]), engine.check_health()):
        with pytest.raises(EngineDead, match="sleeps"):
            await refused
    await engine.load_weights(commit(weight_store, 3, tensors_of(models[0])))
    again = await run(engine, requests(8, temperature=0.0))
    for name in first:
        np.testing.assert_array_equal(again[name].token_ids, first[name].token_ids)
    assert set(again["r0"].versions) == {3}
    await engine.close()


async def test_bad_weights_are_refused_and_the_old_ones_kept(folder, models, weight_store):
    engine = await JaxEngine.create(folder, config())
    before = await engine.score(range(5, 15))
    tensors = tensors_of(models[1])
    name = "model.layers.1.mlp.up_proj.weight"
    faults = {
        "missing tensor model.norm.weight": {k: v for k, v in tensors.items() if k != "model.norm.weight"},
        "unknown tensor extra": {**tensors, "extra": np.zeros(3, np.float32)},
        f"{name} has shape": {**tensors, name: np.ascontiguousarray(tensors[name].T)},
    }
    for version, (message, faulty) in enumerate(faults.items(), 1):
        with pytest.raises(WeightError, match=message):
            await engine.load_weights(commit(weight_store, version, faulty))
    manifest = commit(weight_store, 9, tensors)
    record = manifest.tensors[name]
    manifest.tensors[name] = dataclasses.replace(record, checksum=record.checksum ^ 1)
    with pytest.raises(WeightError, match=f"{name}.*checksum"):
        await engine.load_weights(manifest)
    np.testing.assert_array_equal(await engine.score(range(5, 15)), before)
    await engine.close()


async def test_requests_that_cannot_be_served_are_refused_by_name(engine):
    sampling = SamplingParams(max_new_tokens=200)
    for prompt, message in [((), "r: the prompt is empty"), ((5,) * 101, "r: 101 prompt"), ((5, 61), "r: token 61")]:
        with pytest.raises(RequestError, match=message):
            await run(engine, [Request("r", prompt, 0, sampling)])
    with pytest.raises(RequestError, match="2 to 300 tokens"):
        await engine.score([5])


async def test_leaving_the_stream_frees_the_slots(engine):
    stream = engine.generate(requests(16, max_new_tokens=190, ignore_eos=True))
    first = requests(1, max_new_tokens=1)
    await run(engine, first)
    await stream.aclose()
    assert len(await run(engine, requests(16))) == 16


async def test_a_failure_in_the_thread_reaches_everyone(folder, monkeypatch):
    engine = await JaxEngine.create(folder, config())

    def step() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._scheduler, "step", step)
    with pytest.raises(EngineDead, match="out of memory"):
        await run(engine, requests(2))
    with pytest.raises(EngineDead, match="out of memory"):
        await engine.check_health()
    with pytest.raises(EngineDead, match="out of memory"):
        await engine.score([5, 6])
    await engine.close()


async def test_settings_that_cannot_be_had(folder):
    with pytest.raises(ValueError, match=r"max_model_len is 600.*512 tokens"):
        await JaxEngine.create(folder, config(prompt_length=400))
    with pytest.raises(ValueError, match="tensor_model_parallel_size"):
        await JaxEngine.create(folder, config(tensor_model_parallel_size=2))

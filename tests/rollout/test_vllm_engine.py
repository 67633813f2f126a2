"""The real vLLM engine against transformers: tokens, log-probs, weight loads, faults."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest
from tiny_llama import PROMPT, processed_log_prob

from jaxrl_ppo.rollout.engine import Request, SamplingParams
from jaxrl_ppo.rollout.errors import EngineDead, RequestError
from jaxrl_ppo.weights import checks
from jaxrl_ppo.weights.manifest import WeightError

pytestmark = pytest.mark.asyncio(loop_scope="session")

OTHER = (5, 6, 7, 8, 9)
LONG = tuple(np.random.default_rng(0).integers(3, 500, 150).tolist())  # longer than a block of the prefix cache


def request(id, prompt=PROMPT, new=12, seed=0, **sampling):
    return Request(id, tuple(prompt), seed, SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **sampling}))


async def generate(engine, *requests):
    return {completion.request_id: completion async for completion in engine.generate(requests)}


def assert_log_probs(checkpoint, request, completion, tolerance=1e-4):
    """The completion's log-probs are those of the checkpoint, processed as asked; greedy at temperature 1."""
    ids = [*request.prompt_ids, *completion.token_ids.tolist()]
    rows = checkpoint.log_softmax(ids)[len(request.prompt_ids) - 1 : -1]
    sampling = request.sampling
    settings = (sampling.temperature or 1.0, sampling.top_k, sampling.top_p)
    expected = [processed_log_prob(row, token, *settings) for row, token in zip(rows, completion.token_ids)]
    np.testing.assert_allclose(completion.log_probs, expected, atol=tolerance)


async def test_dummy_weights_serve_nobody(engine):
    with pytest.raises(EngineDead, match="no weights yet"):
        await generate(engine, request("a"))
    with pytest.raises(EngineDead, match="no weights yet"):
        await engine.check_health()


async def test_greedy_tokens_are_those_of_transformers(engine, first, commit):
    await engine.load_weights(commit(0, first.tensors()))
    await engine.check_health()
    asked = [request(str(n), prompt, new=16, temperature=0.0) for n, prompt in enumerate((PROMPT, OTHER, LONG))]
    done = await generate(engine, *asked)
    for one in asked:
        np.testing.assert_array_equal(done[one.id].token_ids, first.greedy(one.prompt_ids, 16))
        assert_log_probs(first, one, done[one.id])
        assert (done[one.id].token_ids.dtype, done[one.id].log_probs.dtype) == (np.int32, np.float32)
        assert done[one.id].versions.tolist() == [0] * 16
        assert done[one.id].finish_reason == "length"


async def test_generation_ends_at_any_end_token_unless_told_otherwise(engine, first):
    stopping = request("s", new=40, temperature=0.0, ignore_eos=False)
    done = (await generate(engine, stopping))["s"]
    ends = first.model.generation_config.eos_token_id
    expected = first.greedy(PROMPT, 40)
    first_end = int(np.flatnonzero(np.isin(expected, ends))[0])
    np.testing.assert_array_equal(done.token_ids, expected[: first_end + 1])
    assert (done.finish_reason, len(done.log_probs)) == ("stop", first_end + 1)
    ignoring = (await generate(engine, request("i", new=40, temperature=0.0)))["i"]
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 40)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    ],
)
async def test_log_probs_are_of_the_sampled_token_as_sampled_also_beside_greedy_requests(engine, first, sampling):
    asked = [request(str(seed), new=20, seed=seed, **sampling) for seed in range(4)]
    greedy = request("greedy", OTHER, new=20, temperature=0.0)
    done = await generate(engine, *asked, greedy)
    for one in (*asked, greedy):
        assert_log_probs(first, one, done[one.id])
    assert len({done[one.id].token_ids.tobytes() for one in asked}) > 1


async def test_a_seed_decides_a_response_whatever_runs_beside_it(engine):
    alone = (await generate(engine, request("x", seed=7)))["x"]
    crowd = [request(str(seed), OTHER, new=seed + 1, seed=seed) for seed in range(8)]
    again = (await generate(engine, *crowd, request("y", seed=7)))["y"]
    np.testing.assert_array_equal(alone.token_ids, again.token_ids)
    np.testing.assert_allclose(alone.log_probs, again.log_probs, atol=1e-5)
    other = (await generate(engine, request("z", seed=8)))["z"]
    assert alone.token_ids.tolist() != other.token_ids.tolist()
    minus_one = [(await generate(engine, request("m", seed=-1)))["m"].token_ids.tolist() for _ in range(2)]
    assert minus_one[0] == minus_one[1]


async def test_scores_are_the_log_probs_of_given_tokens(engine, first):
    await generate(engine, request("cached", LONG, temperature=0.0))
    for ids in (PROMPT, LONG):
        scores = await engine.score(ids)
        expected = first.log_softmax(ids)[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
        assert scores.dtype == np.float32


async def test_bad_requests_are_named_before_anything_runs(engine):
    good = request("good")
    for bad, match in [
        (request("long", (3,) * 400, new=1), r"request long: a prompt of 400 tokens and 1 new .* 400 .*max_model_len"),
        (request("much", new=394), "request much: a prompt of 7 tokens and 394 new"),
        (request("empty", ()), "request empty: the prompt is empty"),
        (request("foreign", (3, 512)), "request foreign: .* vocabulary of 512"),
    ]:
        with pytest.raises(RequestError, match=match):
            await generate(engine, good, bad)
    with pytest.raises(RequestError, match="scoring takes 2 to 399 tokens"):
        await engine.score((3,) * 400)
    assert len((await generate(engine, request("full", (3,) * 390, new=10)))["full"].token_ids) == 10


async def test_leaving_the_iteration_aborts_the_rest(engine):
    stream = engine.generate([request("short", new=1), *(request(str(n), new=300) for n in range(8))])
    assert (await anext(stream)).request_id == "short"
    await stream.aclose()
    assert engine._llm.get_num_unfinished_requests() == 0


async def test_corrupt_or_unfitting_weights_are_refused_and_the_old_ones_stay(engine, first, second, commit):
    tensors = second.tensors()
    name = "model.layers.1.mlp.down_proj.weight"

    corrupt = commit(1, tensors)
    path = Path(corrupt.folder, corrupt.tensors[name].file)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightError, match=r"weight version 1, tensor .* checksum"):
        await engine.load_weights(corrupt)
    missing = commit(2, {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(WeightError, match=f"weight version 2: tensor {name} missing"):
        await engine.load_weights(missing)
    with pytest.raises(WeightError, match=r"weight version 3: tensor x\.y unknown to the model"):
        await engine.load_weights(commit(3, {**tensors, "x.y": tensors[name]}))
    with pytest.raises(
        WeightError, match=rf"version 4: tensor {name} has shape \[256, 128\], the model's has \[128, 25"
    ):
        await engine.load_weights(commit(4, {**tensors, name: tensors[name].T}))

    one = request("after", LONG, temperature=0.0)
    done = (await generate(engine, one))["after"]
    np.testing.assert_array_equal(done.token_ids, first.greedy(LONG, 12))
    assert set(done.versions) == {0}


async def test_new_weights_are_what_runs_from_then_on(engine, second, commit):
    """As bfloat16, into the float32 engine; prompts whose prefix is cached under the old weights included."""
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in second.tensors().items()}
    await engine.load_weights(commit(5, tensors))
    asked = [request(str(n), prompt, new=16, temperature=0.0) for n, prompt in enumerate((PROMPT, OTHER, LONG))]
    sampled = request("sampled", LONG, temperature=0.7, seed=3)
    done = await generate(engine, *asked, sampled)
    for one in asked:
        np.testing.assert_array_equal(done[one.id].token_ids, second.greedy(one.prompt_ids, 16))
    for one in (*asked, sampled):
        assert_log_probs(second, one, done[one.id])
        assert set(done[one.id].versions) == {5}
    expected = second.log_softmax(LONG)[np.arange(len(LONG) - 1), LONG[1:]]
    np.testing.assert_allclose(await engine.score(LONG), expected, atol=1e-4)


async def test_running_requests_go_on_with_new_weights_and_say_which_token_is_whose(engine, first, second, commit):
    manifest = commit(6, first.tensors())
    long = [request(f"long{n}", LONG, new=120, seed=n, temperature=0.7) for n in range(3)]
    stream = engine.generate([request("short", new=8), *long])
    assert (await anext(stream)).request_id == "short"
    await engine.load_weights(manifest)
    done = {completion.request_id: completion async for completion in stream}
    for one in long:
        versions = done[one.id].versions
        assert versions.tolist() == sorted(versions)
        assert set(versions) == {5, 6}
        for checkpoint, version in ((second, 5), (first, 6)):
            mine = versions == version
            ids = [*LONG, *done[one.id].token_ids.tolist()]
            rows = checkpoint.log_softmax(ids)[len(LONG) - 1 : -1]
            expected = [processed_log_prob(row, token, 0.7) for row, token in zip(rows, done[one.id].token_ids)]
            np.testing.assert_allclose(done[one.id].log_probs[mine], np.array(expected)[mine], atol=1e-4)


async def test_requests_that_come_during_a_load_wait_for_the_new_weights(engine, second, commit):
    load = asyncio.create_task(engine.load_weights(commit(7, second.tensors())))
    while not await engine._llm.is_paused():
        await asyncio.sleep(0)
    one = request("during", LONG, temperature=0.0)
    done = (await generate(engine, one))["during"]
    await load
    np.testing.assert_array_equal(done.token_ids, second.greedy(LONG, 12))
    assert set(done.versions) == {7}


async def test_a_load_that_fails_halfway_leaves_an_engine_that_refuses_to_serve_until_it_is_repeated(
    engine, second, commit, monkeypatch
):
    manifest = commit(8, second.tensors())
    name = "model.layers.1.mlp.down_proj.weight"
    bad = commit(9, {**second.tensors(), name: second.tensors()[name][:, :100]})
    monkeypatch.setattr(checks, "verify", lambda manifest, expected: None)
    running = asyncio.create_task(generate(engine, request("running", new=300)))
    await asyncio.sleep(0)
    with pytest.raises(WeightError, match="weight version 9: vLLM could not load it: "):
        await engine.load_weights(bad)
    for refused in (running, generate(engine, request("r")), engine.score(PROMPT), engine.check_health()):
        with pytest.raises(EngineDead, match="loading weight version 9 into it failed"):
            await refused
    shutil.rmtree(bad.folder)
    with pytest.raises(WeightError, match=r"weight version 9: .*manifest\.json"):
        await engine.load_weights(bad)
    await engine.load_weights(manifest)
    one = request("again", LONG, temperature=0.0)
    done = (await generate(engine, one))["again"]
    np.testing.assert_array_equal(done.token_ids, second.greedy(LONG, 12))
    assert set(done.versions) == {8}


async def test_asleep_it_serves_nobody_and_awake_it_runs_the_weights_it_was_given(engine, first, second, commit):
    await engine.load_weights(commit(10, second.tensors()))
    running = asyncio.create_task(generate(engine, request("running", new=300)))
    await generate(engine, request("before", LONG, new=1))
    await engine.sleep()
    await engine.sleep()
    assert await engine._llm.is_sleeping()
    for refused in (running, generate(engine, request("r")), engine.score(PROMPT), engine.check_health()):
        with pytest.raises(EngineDead, match="sleeps until weights are loaded"):
            await refused
    bad = commit(11, {**second.tensors(), "extra": np.zeros(3, np.float32)})
    with pytest.raises(WeightError, match="extra"):
        await engine.load_weights(bad)
    await engine.load_weights(commit(12, first.tensors()))
    assert not await engine._llm.is_sleeping()
    one = request("awake", LONG, temperature=0.0)
    done = (await generate(engine, one))["awake"]
    np.testing.assert_array_equal(done.token_ids, first.greedy(LONG, 12))
    assert_log_probs(first, one, done)
    assert set(done.versions) == {12}


async def test_a_killed_engine_core_is_noticed_and_closing_leaves_no_process(engine, second, commit):
    """Last: it ends the engine."""
    processes = engine._processes
    assert len(processes) == 2  # the engine core and its worker
    core = next(process for process in processes if process.ppid() == os.getpid())
    running = asyncio.create_task(generate(engine, request("running", new=390)))
    await generate(engine, request("first", new=1))
    core.send_signal(signal.SIGKILL)
    with pytest.raises(EngineDead):
        await running
    for refused in (generate(engine, request("late")), engine.check_health(), engine.score(PROMPT)):
        with pytest.raises(EngineDead, match="engine core is gone"):
            await refused
    with pytest.raises(EngineDead):
        await engine.load_weights(commit(10, second.tensors()))
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        await engine.load_weights(commit(10, second.tensors()))
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []

"""LoRA against a hand-written W + (alpha / rank) B A in torch; PEFT's folders in and out; merged weights."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxrl_ppo.models.config import ModelFolderError, load_decoder_config
from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.models.lora import adapter_off, gather_adapter, make_lora, read_lora, save_adapter
from jaxrl_ppo.models.parameters import flatten, is_adapter, nest, to_state
from jaxrl_ppo.models.tensor_plan import adapter_plan, tensor_plan
from jaxrl_ppo.weights.export import export_buckets

RANK, ALPHA = 4, 10.0
TARGETS = {"qwen2": ["q_proj", "o_proj", "down_proj"], "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"]}
TOKENS = np.random.default_rng(0).integers(6, 97, (2, 20)).astype(np.int32)


def write_adapter(folder, model_folder, name, **changes):
    """An adapter as PEFT writes one, both factors random; returns its tensors."""
    rng = np.random.default_rng(1)
    tensors = {}
    for layer in range(3):
        for target in TARGETS[name]:
            block = "mlp" if target == "down_proj" else "self_attn"
            stem = f"model.layers.{layer}.{block}.{target}"
            outputs, inputs = load_file(model_folder / "model.safetensors")[f"{stem}.weight"].shape
            for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                tensors[f"base_model.model.{stem}.lora_{factor}.weight"] = rng.normal(0, 0.3, shape).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    body = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS[name], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(body | changes))
    return tensors


def merged(weights, tensors):
    """Checkpoint weights (torch) with the adapter's product added: what PEFT's merge_and_unload gives."""
    out = dict(weights)
    for name, first in tensors.items():
        if "lora_A" in name:
            weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
            out[weight] = out[weight] + ALPHA / RANK * tensors[name.replace("lora_A", "lora_B")] @ first
    return out


@pytest.fixture(params=TARGETS)
def adapted(request, model_folders, tmp_path):
    """Folder of the model, folder of an adapter, its tensors."""
    folder = model_folders[request.param]
    return folder, tmp_path / "adapter", write_adapter(tmp_path / "adapter", folder, request.param)


def load(folder, adapter):
    config = load_decoder_config(folder)
    config = dataclasses.replace(config, lora=read_lora(adapter, config))
    state = load_params(folder, config, adapter=adapter)
    return config, nest({path: leaf.get_value() for path, leaf in flatten(state)})


def test_log_probs_and_gradients_equal_torch(adapted):
    folder, adapter, tensors = adapted
    config, params = load(folder, adapter)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    factors = {name: torch.tensor(value, requires_grad=True) for name, value in tensors.items()}
    names = {name for name, _ in oracle.named_parameters()}
    weights = {k: v for k, v in merged(dict(oracle.named_parameters()), factors).items() if k in names}
    logits = torch.func.functional_call(oracle, weights, torch.tensor(TOKENS, dtype=torch.long)).logits
    weight = torch.linspace(-1, 2, logits.numel()).reshape(logits.shape)
    (torch.log_softmax(logits, -1) * weight).sum().backward()

    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    @jax.jit
    def compute(params):
        decoder = nnx.merge(graph, to_state(dict(flatten(params)), config))
        return decoder.hidden(TOKENS, positions, jnp.ones_like(TOKENS)) @ decoder.head()

    def loss(params):
        logits = compute(params)
        return (jax.nn.log_softmax(logits) * weight.numpy()).sum(), logits

    (_, ours), grads = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(ours, logits.detach(), rtol=1e-4, atol=1e-4)
    flat, plan = dict(flatten(grads)), adapter_plan(config)
    assert plan.keys() == factors.keys()
    for name, entry in plan.items():
        theirs = factors[name].grad.numpy()
        grad = np.asarray(entry.to_tensor(flat[entry.parameter][entry.index]))
        np.testing.assert_allclose(grad, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max(), err_msg=name)


def test_exported_weights_are_merged_and_the_adapter_alone_travels_back(adapted, tmp_path):
    folder, adapter, tensors = adapted
    config, params = load(folder, adapter)
    base = {name: torch.tensor(value) for name, value in load_file(folder / "model.safetensors").items()}
    expected = merged(base, {name: torch.tensor(value) for name, value in tensors.items()})
    exported = {k: v for bucket in export_buckets(config, params, np.float32, 1 << 30) for k, v in bucket.items()}
    assert exported.keys() == tensor_plan(config).keys()
    for name, value in exported.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    off = {k: v for b in export_buckets(config, adapter_off(params), np.float32, 1 << 30) for k, v in b.items()}
    for name, value in off.items():
        np.testing.assert_array_equal(value, base[name], err_msg=name)

    save_adapter(tmp_path / "again", config, gather_adapter(config, params), folder)
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    for name, value in again.items():
        np.testing.assert_array_equal(value, tensors[name])
    assert read_lora(tmp_path / "again", load_decoder_config(folder)) == config.lora


def test_a_new_adapter_adds_nothing_and_its_factors_differ(model_folders):
    config = load_decoder_config(model_folders["llama"])
    config = dataclasses.replace(config, lora=make_lora(config, RANK, ALPHA, "all-linear", ["k_proj"]))
    params = {k: v.get_value() for k, v in flatten(load_params(model_folders["llama"], config, seed=3))}
    adapter = {path: value for path, value in params.items() if is_adapter(path)}
    assert {path.split(".")[2] for path in adapter} == {"q", "v", "o", "gate", "up", "down"}
    assert not any(value.any() for path, value in adapter.items() if path.endswith("lora_b"))
    first, second = adapter["layers.mlp.gate.lora_a"], adapter["layers.mlp.up.lora_a"]
    assert np.abs(first - second).max() > 0.01
    assert 0.9 * 32**-0.5 < np.abs(first).max() <= 32**-0.5


def test_adapters_that_do_not_fit(model_folders, tmp_path):
    model = load_decoder_config(model_folders["mixtral"])
    with pytest.raises(ValueError, match="target_modules: mixtral has no projection 'up_proj' that takes an adapter"):
        make_lora(model, 4, 8, ["q_proj", "up_proj"], None)
    with pytest.raises(ValueError, match="no projection is left to adapt"):
        make_lora(model, 4, 8, "q_proj", "q_proj")
    folder = model_folders["qwen2"]
    for changes, message in (({"use_dora": True}, "use_dora True is not supported"), ({"r": None}, "rank")):
        adapter = tmp_path / message.split()[0]
        write_adapter(adapter, folder, "qwen2", **changes)
        with pytest.raises(ModelFolderError, match=rf"adapter_config\.json: .*{message}"):
            load(folder, adapter)
    adapter = tmp_path / "fewer"
    write_adapter(adapter, folder, "qwen2", target_modules=["q_proj", "v_proj"])
    with pytest.raises(
        ModelFolderError, match=r"missing tensor base_model.*v_proj.*unknown tensor base_model.*down_proj"
    ):
        load(folder, adapter)
    with pytest.raises(ModelFolderError, match=r"adapter_config\.json is missing"):
        load(folder, tmp_path)

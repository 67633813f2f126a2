"""Hugging Face folders in and out: byte-identical round trips, slices, and the errors of unusable folders."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, make_model

from jaxrl_ppo.models.config import ModelFolderError, load_decoder_config
from jaxrl_ppo.models.huggingface import Checkpoint, _read_block, load_params
from jaxrl_ppo.models.parameters import abstract_params, flatten, logical_axes, parameter_specs
from jaxrl_ppo.models.pretrained import save_pretrained
from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.weights.export import export_buckets


def tensor_bytes(folder):
    """Name -> (dtype, shape, bytes) of every tensor in a folder's safetensors files."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it has no __iter__
                value = file.get_tensor(name)
                tensors[name] = (
                    value.dtype,
                    tuple(value.shape),
                    value.contiguous().view(torch.uint8).numpy().tobytes(),
                )
    return tensors


def params_of(folder, **kwargs):
    config = load_decoder_config(folder)
    return config, {path: leaf.get_value() for path, leaf in flatten(load_params(folder, config, **kwargs))}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_byte_identical(name, tmp_path):
    dtype = torch.float16 if name == "llama_bias" else torch.bfloat16
    source, target = tmp_path / "source", tmp_path / "target"
    make_model(name, dtype).save_pretrained(source)
    (source / "tokenizer.json").write_text('{"some": "tokenizer"}')
    config = load_decoder_config(source)
    params = load_params(source, config)
    assert all(leaf.get_value().dtype == jnp.float32 for _, leaf in flatten(params))
    numpy_dtype = np.float16 if dtype == torch.float16 else jnp.bfloat16
    buckets = list(export_buckets(config, {k: v.get_value() for k, v in flatten(params)}, numpy_dtype, 10_000))
    assert len(buckets) > 2
    save_pretrained(target, buckets, source)

    assert tensor_bytes(target) == tensor_bytes(source)
    assert (target / "tokenizer.json").read_text() == '{"some": "tokenizer"}'
    reloaded, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert reloaded.dtype == dtype
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert load_decoder_config(target) == config


def test_sharded_checkpoint_reads_like_a_single_file(model_folders, tmp_path):
    model = make_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (_, single), (_, sharded) = params_of(model_folders["qwen3"]), params_of(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, single, sharded)


def test_a_tied_model_may_carry_its_head_twice(model_folders, tmp_path):
    shutil.copytree(model_folders["llama_tied"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    assert "lm_head.kernel" not in params_of(tmp_path)[1]


def test_declarations_agree(model_folders):
    config = load_decoder_config(model_folders["qwen3"])
    shapes = {path: leaf.get_value().shape for path, leaf in flatten(abstract_params(config))}
    axes = dict(flatten(logical_axes(config)))
    assert shapes == {path: spec.shape for path, spec in parameter_specs(config).items()}
    assert axes.keys() == shapes.keys()
    assert axes["layers.attention.o.kernel"] == ("layers", "heads", "head_dim", "embed")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_shard_reads_its_slices_only(model_folders, data):
    folder = model_folders["llama_bias"]
    config = load_decoder_config(folder)
    specs = parameter_specs(config)
    path = data.draw(st.sampled_from(sorted(specs)))
    entries = {e.index: e for e in tensor_plan(config).values() if e.parameter == path}
    where = []
    for axis, size in zip(specs[path].axes, specs[path].shape):
        if axis == "head_dim":
            where.append(slice(None))
        else:
            start = data.draw(st.integers(0, size - 1))
            where.append(slice(start, data.draw(st.integers(start + 1, size))))
    checkpoint = Checkpoint(folder)
    part = _read_block(checkpoint, entries, specs[path].shape, np.float32, tuple(where))
    whole = params_of(folder)[1][path]
    np.testing.assert_array_equal(part, whole[tuple(where)])
    assert checkpoint.bytes_read == part.nbytes


def test_a_shard_may_split_heads(model_folders):
    folder = model_folders["qwen3"]
    config = load_decoder_config(folder)
    path = "layers.attention.q.kernel"
    entries = {e.index: e for e in tensor_plan(config).values() if e.parameter == path}
    where = (slice(1, 2), slice(None), slice(0, 2), slice(3, 7))
    part = _read_block(Checkpoint(folder), entries, parameter_specs(config)[path].shape, np.float32, where)
    np.testing.assert_array_equal(part, params_of(folder)[1][path][where])


def broken_folder(model_folders, tmp_path, **config_changes):
    folder = tmp_path / "broken"
    shutil.copytree(model_folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text()) | config_changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "removed"}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; known: .*llama.*qwen3"),
        ({"hidden_size": "removed"}, "key 'hidden_size' is missing"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "key 'factor' is missing"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"model_type": "gemma3_text", "layer_types": ["linear_attention"]}, "layer type 'linear_attention' is not"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer types of 1 layers for 3 layers"),
        ({"model_type": "mixtral"}, "key 'num_local_experts' is missing"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "layers without experts are not supported"),
    ],
)
def test_unusable_configurations(model_folders, tmp_path, changes, message):
    folder = broken_folder(model_folders, tmp_path, **changes)
    with pytest.raises(ModelFolderError, match=rf"config\.json: {message}"):
        load_decoder_config(folder)


def test_malformed_folders(model_folders, tmp_path):
    with pytest.raises(ModelFolderError, match="nowhere does not exist"):
        load_decoder_config(tmp_path / "nowhere")
    with pytest.raises(ModelFolderError, match=r"config\.json is missing"):
        load_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not readable as JSON"):
        load_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="JSON object, not list"):
        load_decoder_config(tmp_path)

    folder = broken_folder(model_folders, tmp_path)
    config = load_decoder_config(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is not a readable safetensors file"):
        load_params(folder, config)
    weights.unlink()
    with pytest.raises(ModelFolderError, match=r"neither model\.safetensors nor"):
        load_params(folder, config)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ModelFolderError, match=r"model-00001-of-00001\.safetensors is not a readable"):
        load_params(folder, config)
    index.write_text("{}")
    with pytest.raises(ModelFolderError, match="not a readable safetensors index"):
        load_params(folder, config)


def test_every_wrong_tensor_is_named(model_folders, tmp_path):
    folder = broken_folder(model_folders, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"][:, :-1].copy()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError) as error:
        load_params(folder, load_decoder_config(folder))
    for message in (
        "missing tensor model.norm.weight",
        "unknown tensor model.layers.3.mlp.up_proj.weight",
        "tensor model.layers.2.mlp.up_proj.weight has shape [48, 31], expected [48, 32]",
        "tensor lm_head.weight has dtype I8",
    ):
        assert message in str(error.value)


def test_end_tokens_of_both_configurations(model_folders, tmp_path):
    folder = broken_folder(model_folders, tmp_path, eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_decoder_config(folder).eos_token_ids == (2, 7)

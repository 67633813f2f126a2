"""Value and sequence-score heads: against transformers' classifiers, from and to their folders, on packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from tiny_models import CONFIGS

from jaxrl_ppo.models.config import ModelFolderError, load_decoder_config
from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.models.parameters import flatten
from jaxrl_ppo.models.pretrained import save_pretrained
from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.weights.export import export_buckets

TOKENS = np.random.default_rng(0).integers(6, 97, (1, 12)).astype(np.int32)
CLASSES = {"value": transformers.AutoModelForTokenClassification}
CLASSES["sequence"] = transformers.AutoModelForSequenceClassification


def arrays_of(folder, head, **kwargs):
    config = load_decoder_config(folder, head)
    return config, {path: leaf.get_value() for path, leaf in flatten(load_params(folder, config, **kwargs))}


def decoder_of(folder, head):
    config = load_decoder_config(folder, head)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    nnx.update(decoder, load_params(folder, config))
    return decoder


def write(target, source, head):
    config, params = arrays_of(source, head)
    save_pretrained(target, export_buckets(config, params, np.float32, 1 << 30), source, head)


def classifier(folder, head, labels=1):
    """A random classifier of the language model's sizes, its folder written."""
    torch.manual_seed(1)
    config = CONFIGS["llama_tied"]()
    config.num_labels = labels
    model = CLASSES[head].from_config(config).eval()
    if head == "value":
        torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder)
    return model


def torch_values(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits[..., 0].numpy()


@nnx.jit
def values_of(decoder, tokens, *segments):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.values(tokens, positions, *(segments or (jnp.ones_like(tokens),)))


def test_values_and_gradients_equal_a_token_classifier(tmp_path):
    model = classifier(tmp_path, "value")
    decoder = decoder_of(tmp_path, "value")
    values = values_of(decoder, TOKENS)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, torch_values(model, TOKENS), rtol=1e-4, atol=1e-5)

    (model(torch.tensor(TOKENS, dtype=torch.long)).logits[..., 0] * torch.linspace(-1, 2, 12)).sum().backward()
    grads = nnx.jit(nnx.grad(lambda d: (values_of(d, TOKENS) * jnp.linspace(-1, 2, 12)).sum()))(decoder)
    flat, named = dict(flatten(nnx.to_pure_dict(grads))), dict(model.named_parameters())
    plan = tensor_plan(decoder.config)
    assert plan.keys() == named.keys()
    for name, entry in plan.items():
        theirs = named[name].grad.numpy()
        ours = np.asarray(entry.to_tensor(flat[entry.parameter][entry.index]))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max(), err_msg=name)


def test_a_sequences_score_is_the_value_at_its_last_token(tmp_path):
    model = classifier(tmp_path, "sequence")
    decoder = decoder_of(tmp_path, "sequence")
    positions = np.concatenate([np.arange(5), np.arange(7)])[None]
    scores = jax.jit(decoder.values)(TOKENS, positions, np.repeat([1, 2], [5, 7])[None])
    expected = [torch_values(model, TOKENS[:, :5])[0], torch_values(model, TOKENS[:, 5:])[0]]
    np.testing.assert_allclose(scores[0, [4, 11]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["value", "sequence"])
def test_classifier_folders_round_trip(head, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    model = classifier(source, head)
    write(target, source, head)
    reloaded, info = CLASSES[head].from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for (name, ours), theirs in zip(reloaded.state_dict().items(), model.state_dict().values()):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_value_head_begins_on_a_language_model(model_folders, tmp_path, name):
    _, language_model = arrays_of(model_folders[name], "lm")
    config, params = arrays_of(model_folders[name], "value", seed=3)
    new = {"score.kernel", "score.bias"}
    assert params.keys() - language_model.keys() == new
    for path in params.keys() - new:
        np.testing.assert_array_equal(params[path], language_model[path])
    assert not params["score.bias"].any()
    width = len(params["score.kernel"])
    assert 0.5 < params["score.kernel"].std() * (width + 1) < 1.5
    np.testing.assert_array_equal(
        arrays_of(model_folders[name], "value", seed=3)[1]["score.kernel"], params["score.kernel"]
    )
    assert (arrays_of(model_folders[name], "value", seed=4)[1]["score.kernel"] != params["score.kernel"]).any()

    write(tmp_path / "value", model_folders[name], "value")
    model, info = CLASSES["value"].from_pretrained(tmp_path / "value", output_loading_info=True)
    assert type(model).__name__ == "LlamaForTokenClassification"
    assert (model.num_labels, info["missing_keys"], info["unexpected_keys"]) == (1, set(), set())
    decoder = decoder_of(model_folders[name], "value")
    np.testing.assert_allclose(values_of(decoder, TOKENS), torch_values(model.eval(), TOKENS), rtol=1e-4, atol=1e-5)
    assert load_decoder_config(tmp_path / "value", "value") == config


def test_a_reward_model_makes_a_value_head_with_a_bias_of_zero(tmp_path):
    model = classifier(tmp_path, "sequence")
    _, params = arrays_of(tmp_path, "value")
    np.testing.assert_array_equal(params["score.kernel"][:, 0], model.score.weight.detach()[0])
    assert not params["score.bias"].any()


def test_heads_that_do_not_fit(model_folders, tmp_path):
    with pytest.raises(ModelFolderError, match=r"missing tensor score\.weight"):
        arrays_of(model_folders["llama"], "sequence")
    classifier(tmp_path, "value", labels=2)
    with pytest.raises(ModelFolderError, match=r"score\.weight has shape \[2, 32\], expected \[1, 32\]"):
        arrays_of(tmp_path, "value")
    with pytest.raises(ModelFolderError, match=r"unknown tensor score\.bias"):
        arrays_of(tmp_path, "lm")
    with pytest.raises(ValueError, match="head 'scalar' is not known; use one of lm, value, sequence"):
        load_decoder_config(tmp_path, "scalar")

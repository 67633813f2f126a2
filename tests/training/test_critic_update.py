"""The critic's values and updates against transformers and torch, and its state saved and taken up again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch_oracle import save_tiny_model
from training_cases import CLIPRANGE_VALUE, arrays, assert_close, copy, make_batch, make_critic, with_returns

from jaxrl_ppo.models.pretrained import save_pretrained
from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.training.minibatches import make_value_mini_batch
from jaxrl_ppo.weights.export import export_buckets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random token classifier of one label: a value model with a head of its own."""
    folder = tmp_path_factory.mktemp("critic") / "model"
    save_tiny_model(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    torch.manual_seed(1)
    model = transformers.AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder)
    return folder


def torch_values(model, batch, sample):
    """The value before each token of one response, [T], computed alone and unpadded by transformers."""
    prompt = list(batch.prompts[batch.group[sample]].token_ids)
    response = batch.response_ids[sample].tolist()
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, 0]


@pytest.mark.parametrize(("tokens", "mode"), [(512, "token-mean"), (24, "seq-mean-token-mean")])
def test_values_loss_and_gradient_equal_torch(folder, tokens, mode):
    critic = make_critic(folder, tokens, loss_agg_mode=mode, optim__optimizer="SGD", optim__weight_decay=0.0)
    critic.config.optim.lr = 1.0
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    batch = make_batch()
    theirs = [torch_values(model, batch, sample) for sample in range(len(batch.group))]
    ours = critic.values(batch)
    counted = batch.response_mask > 0
    np.testing.assert_allclose(ours, np.where(counted, torch.stack(theirs).detach().numpy(), 0), atol=1e-5)

    batch = with_returns(batch, ours)
    loss, clipped = torch.zeros(()), 0
    for sample, values in enumerate(theirs):
        chosen = np.flatnonzero(counted[sample])
        value, old, returns = (
            values[chosen], torch.tensor(batch.values[sample, chosen]), torch.tensor(batch.returns[sample, chosen])
        )  # fmt: skip
        plain = (value - returns) ** 2
        bounded = (torch.minimum(torch.maximum(value, old - CLIPRANGE_VALUE), old + CLIPRANGE_VALUE) - returns) ** 2
        clipped += int((bounded > plain).sum())
        divisor = counted.sum() if mode == "token-mean" else max(len(chosen), 1) * len(batch.group)
        loss = loss + 0.5 * torch.maximum(plain, bounded).sum() / divisor
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), critic.config.optim.clip_grad)

    before = copy(critic.params)
    metrics = critic.update(batch)
    assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped / counted.sum())
    assert metrics["critic/vpred_mean"] == pytest.approx(float(ours[counted].mean()), rel=1e-4)
    assert metrics["critic/lr"] == 1.0
    plan, named = tensor_plan(critic.model), dict(model.named_parameters())
    moved = {path: old - new for (path, old), new in zip(arrays(before).items(), arrays(critic.params).values())}
    for name, entry in plan.items():
        expected = entry.to_block(named[name].grad.numpy())
        np.testing.assert_allclose(
            moved[entry.parameter][entry.index], expected, atol=2e-4 * np.abs(expected).max(), err_msg=name
        )


def test_rejected_tokens_do_not_teach_the_critic():
    batch = with_returns(make_batch(), np.zeros((12, 12)))
    kept = batch.kept_mask = batch.response_mask.copy()
    kept[3] = 0
    mini_batch = make_value_mini_batch(batch, np.arange(6), "token-mean", 1.0)
    weights = mini_batch.columns["weights"]
    np.testing.assert_allclose(weights[:6], kept[:6] / kept[:6].sum())
    assert not weights[6:].any()
    np.testing.assert_array_equal(mini_batch.columns["mask"], kept)


def test_it_counts_its_own_steps_and_goes_on_to_the_bit(folder, tmp_path):
    settings = {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "optim__lr_warmup_steps": 8}
    critic = make_critic(folder, **settings)
    batch = with_returns(make_batch(), np.zeros((12, 12)))
    metrics = critic.update(batch)
    assert critic.version == 4
    assert metrics["critic/lr"] == pytest.approx(1e-2 * 3 / 8)
    critic.save(tmp_path / "state")
    metrics = critic.update(batch)
    critic.wait_until_saved()
    other = make_critic(folder, **settings)
    other.restore(tmp_path / "state")
    assert other.update(batch) == metrics
    assert_close(arrays(other.params), arrays(critic.params), 0)
    spoilt = batch.returns.copy()
    spoilt[tuple(np.argwhere(batch.response_mask > 0)[0])] = np.inf
    batch.returns = spoilt
    assert critic.update(batch)["critic/skipped_updates"] == 2


def test_it_learns_what_states_are_worth_and_is_exported_for_transformers(tiny_model, tmp_path):
    critic = make_critic(tiny_model, cliprange_value=10.0)
    batch = make_batch(holes=False)
    target = np.cos(batch.response_ids).astype(np.float32)  # of the token that is yet to come: hard but finite
    batch.returns = np.where(batch.response_mask > 0, target[:, :1], np.nan)
    losses = []
    for _ in range(30):
        batch.values = critic.values(batch)
        losses.append(critic.update(batch)["critic/vf_loss"])
    assert losses[-1] < 0.3 * losses[0]
    buckets = export_buckets(critic.model, critic.params, np.float32, 1 << 30)
    save_pretrained(tmp_path / "exported", buckets, tiny_model, "value")
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        theirs = np.stack([torch_values(model, batch, sample).numpy() for sample in range(len(batch.group))])
    np.testing.assert_allclose(critic.values(batch), np.where(batch.response_mask > 0, theirs, 0), atol=1e-5)

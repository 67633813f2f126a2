"""Training and log-prob tokens a second, ours against transformers + torch in float32, on the same samples, in one run.

    python benchmarks/training_speed.py [--prompts 8] [--samples 8] [--longest 256] [--repeats 3]

SmolLM2-135M, one GRPO update (clipped ratio, token-mean, AdamW, gradient clipping) a repeat. Torch pads as TRL's GRPO
trainer does: prompts on the left and responses on the right to the longest of the step, micro-batches of eight
sequences, logits of the response only. Ours packs rows, and computes a prompt once for its responses. Tokens counted
are the same on both sides: prompts and responses of every sample, no padding. Every sample has an advantage, so that
ours has none to leave out. Sides take turns; the first turn of each, with ours compiling, does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig
from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.policy import PolicyTrainer

LR, CLIP, MICRO_BATCH = 1e-5, 0.2, 8


def make_batch(vocabulary: int, prompts: int, samples: int, longest: int) -> Batch:
    """Random tokens; prompts of 24 to 72, responses log-normal around 80 tokens (cut at `longest`), as RL has them."""
    rng = np.random.default_rng(0)
    size = prompts * samples
    lengths = np.clip(rng.lognormal(np.log(80), 0.7, size), 4, longest).astype(int)
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.float32)
    records = [
        Prompt(i, tuple(int(t) for t in rng.integers(100, vocabulary, rng.integers(24, 73))), [], "", None, {})
        for i in range(prompts)
    ]
    zeros = np.zeros(mask.shape, np.float32)
    return Batch(
        prompts=records,
        group=np.repeat(np.arange(prompts, dtype=np.int32), samples),
        response_ids=rng.integers(100, vocabulary, mask.shape).astype(np.int32),
        response_mask=mask,
        rollout_log_probs=zeros,
        versions=np.zeros(mask.shape, np.int32),
        scores=np.zeros(size, np.float32),
        advantages=np.repeat(rng.normal(size=(size, 1)).astype(np.float32), mask.shape[1], 1) * mask,
    )


class Torch:
    """What one would write with torch and transformers."""

    def __init__(self, folder: str, batch: Batch):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)
        prompts = [batch.prompts[group].token_ids for group in batch.group]
        width = max(map(len, prompts))
        tokens = [[0] * (width - len(p)) + list(p) + r.tolist() for p, r in zip(prompts, batch.response_ids)]
        seen = [
            [0] * (width - len(p)) + [1] * len(p) + m.astype(int).tolist() for p, m in zip(prompts, batch.response_mask)
        ]
        self.tokens, self.seen = torch.tensor(tokens), torch.tensor(seen)
        self.mask = torch.tensor(batch.response_mask)
        self.advantages = torch.tensor(batch.advantages)

    def _log_probs(self, rows: slice) -> torch.Tensor:
        kept = self.mask.shape[1]
        logits = self.model(
            input_ids=self.tokens[rows], attention_mask=self.seen[rows], logits_to_keep=kept + 1
        ).logits[:, :-1]
        chosen = logits.gather(-1, self.tokens[rows, -kept:, None])[..., 0]
        return chosen - torch.logsumexp(logits, -1)

    def _rows(self) -> list[slice]:
        return [slice(i, i + MICRO_BATCH) for i in range(0, len(self.tokens), MICRO_BATCH)]

    @torch.no_grad()
    def log_probs(self) -> np.ndarray:
        return (torch.cat([self._log_probs(rows) for rows in self._rows()]) * self.mask).numpy()

    def update(self, old: np.ndarray) -> float:
        total = self.mask.sum()
        old_log_probs = torch.tensor(old)
        for rows in self._rows():
            ratio = torch.exp(self._log_probs(rows) - old_log_probs[rows])
            advantages = self.advantages[rows]
            loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
            ((loss * self.mask[rows]).sum() / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class Ours:
    """The trainer as a run makes it on CPU."""

    def __init__(self, folder: str, batch: Batch, tokens: int):
        config = ActorRolloutRefConfig()
        config.actor.fsdp_config.dtype = "float32"
        config.actor.ppo_max_token_len_per_gpu = config.ref.log_prob_max_token_len_per_gpu = tokens
        config.actor.clip_ratio_low = config.actor.clip_ratio_high = CLIP
        config.actor.optim.lr = LR
        self.batch = batch
        mesh = make_mesh(config.actor.mesh)
        self.trainer = PolicyTrainer(
            config, AlgorithmConfig(), model_folder=folder, mesh=mesh, total_steps=100, needs_reference=False, seed=0
        )

    def log_probs(self) -> np.ndarray:
        return self.trainer.log_probs(self.batch)

    def update(self, old: np.ndarray) -> float:
        self.batch.old_log_probs = old
        metrics = self.trainer.update(self.batch)
        self.waste = metrics["actor/padding_waste"]
        return metrics["actor/grad_norm"]


def timed(call, *arguments):
    begin = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".quickstart/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="ours: ppo_max_token_len_per_gpu")
    args = parser.parse_args()
    batch = make_batch(49_000, args.prompts, args.samples, args.longest)
    sides = {"torch": Torch(args.model, batch), "ours": Ours(args.model, batch, args.tokens)}
    seconds: dict[tuple[str, str], list[float]] = {}
    for repeat in range(args.repeats + 1):
        found = {}
        for name, side in sides.items():
            log_prob_seconds, old = timed(side.log_probs)
            update_seconds, norm = timed(side.update, old)
            found[name] = old, norm
            if repeat:
                seconds.setdefault((name, "log-probs"), []).append(log_prob_seconds)
                seconds.setdefault((name, "training"), []).append(update_seconds)
        difference = np.abs(found["torch"][0] - found["ours"][0]).max()
        norms = ", ".join(f"{name} {norm:.4f}" for name, (_, norm) in found.items())
        print(f"repeat {repeat}: log-probs differ by {difference:.1e} at most; gradient norms {norms}", flush=True)

    prompts = sum(len(batch.prompts[group].token_ids) for group in batch.group)
    tokens = prompts + int(batch.response_mask.sum())
    padded = sides["torch"].tokens.numel()
    shared = sum(len(prompt.token_ids) for prompt in batch.prompts) + int(batch.response_mask.sum())
    print(f"{len(batch.group)} sequences, {tokens} tokens; torch computes {padded} with padding; ours {shared}, as a")
    print(f"prompt is computed once for its responses, and {sides['ours'].waste:.0%} padding beside them")
    for kind in ("training", "log-probs"):
        rates = {name: tokens / statistics.median(seconds[name, kind]) for name in sides}
        ratio = rates["ours"] / rates["torch"]
        print(
            f"{kind:>10}: torch {rates['torch']:7.0f} tokens/s, ours {rates['ours']:7.0f} tokens/s, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()

"""The yardstick: a plain synchronous GRPO loop with torch and transformers, what one would write instead of using us.

The quickstart's task: "What is a + b? Answer with the number only.", a and b in 1..20, 64 pairs held out; 8 prompts x 8
samples a step, temperature 1, one optimizer step, no KL. `--dtype bfloat16` computes under autocast, over float32
weights, as one does where the processor has bf16 instructions; float32 is faster where it has none. Prints one JSON
object a line: {"step", "seconds", "questions", ...} and {"accuracy", "step", "elapsed"}.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SAMPLES, ROWS = 8, 8, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the batches and the samples; the held-out pairs stay")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    eos = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(1).shuffle(pairs)
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    held_out, train = pairs[:64], pairs[64:]

    def computing():
        return torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16")

    def generate(questions, sample):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for a, b in questions
        ]
        prompt = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
        with torch.no_grad(), computing():
            tokens = model.generate(**prompt, max_new_tokens=args.new_tokens, pad_token_id=eos, **how)
        response = tokens[:, prompt.input_ids.shape[1] :]
        scores = []
        for ids, (a, b) in zip(response, questions):
            numbers = re.findall(r"-?\d+", tokenizer.decode(ids, skip_special_tokens=True))
            scores.append(float(bool(numbers) and int(numbers[-1]) == a + b))
        return prompt, tokens, response, scores

    start = time.time()

    def report_accuracy(step):
        accuracy = sum(generate(held_out, False)[3]) / len(held_out)
        print(json.dumps({"accuracy": accuracy, "step": step, "elapsed": time.time() - start}), flush=True)

    report_accuracy(0)
    for step in range(1, args.steps + 1):
        begin = time.time()
        questions = rng.sample(train, PROMPTS)
        batch = [pair for pair in questions for _ in range(SAMPLES)]
        prompt, tokens, response, scores = generate(batch, True)
        generated = time.time() - begin
        reward = torch.tensor(scores).view(PROMPTS, SAMPLES)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1)
        ended = (response == eos).long()
        mask = (ended.cumsum(1) - ended == 0).float()
        attention = torch.cat([prompt.attention_mask, mask.long()], 1)
        total = mask.sum()
        for i in range(0, len(batch), ROWS):
            rows = slice(i, i + ROWS)
            if not advantage[rows].any():
                continue
            with computing():
                logits = model(
                    input_ids=tokens[rows], attention_mask=attention[rows], logits_to_keep=response.shape[1] + 1
                ).logits[:, :-1]
            logp = torch.log_softmax(logits.float(), -1).gather(-1, response[rows][..., None])[..., 0]
            (-(advantage[rows, None] * logp * mask[rows]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.time() - begin
        numbers = {"step": step, "seconds": seconds, "generation": generated, "reward": float(reward.mean())}
        print(json.dumps({**numbers, "length": float(mask.sum(1).mean()), "questions": questions}), flush=True)
        if step % args.evaluate_every == 0:
            report_accuracy(step)


if __name__ == "__main__":
    main()

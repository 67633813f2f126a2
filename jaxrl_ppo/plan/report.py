"""A plan as text: each program's memory against the chip's, its work, its roofline, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxrl_ppo.models.parameters import multiplied_parameters
from jaxrl_ppo.observability.metrics import training_flops

if TYPE_CHECKING:
    from device.chips import Chip
    from jaxrl_ppo.plan.compile import Measured
    from jaxrl_ppo.plan.topology import Topology
    from jaxrl_ppo.plan.workload import Workload
    from jaxrl_ppo.schema.config import Config

GIB, GB, TERA = 2**30, 1e9, 1e12
MOSTLY = 0.5  # share of a chip's memory from which on one part of it is worth changing


def heading(config: Config, workload: Workload, topology: Topology, chip: Chip) -> str:
    """What is planned: model, devices, mesh, how the trainer computes."""
    programs, actor = workload.programs, config.actor_rollout_ref.actor
    mesh = " x ".join(f"{axis} {size}" for axis, size in programs.layout.mesh.shape.items() if size > 1) or "1"
    fsdp = actor.fsdp_config
    resting = {"weights": fsdp.param_offload, "optimizer state": fsdp.optimizer_offload}
    resting["reference policy"] = config.actor_rollout_ref.ref.fsdp_config.param_offload
    on_hosts = " and ".join(name for name, offload in resting.items() if offload)
    lengths = f"{config.data.max_prompt_length} + {config.actor_rollout_ref.rollout.response_length}"
    return "\n".join(
        (
            f"{config.actor_rollout_ref.model.path}: {programs.model.model_type}, {_size(workload):.2f} billion "
            f"parameters, {programs.model.num_layers} layers",
            f"{topology.name}: {topology.devices} x {chip.name}, {chip.memory_bytes / GIB:.1f} GiB each; mesh {mesh}",
            f"attention {programs.attention}, rematerialisation {programs.remat}, computing in "
            f"{fsdp.dtype}, master weights {fsdp.model_dtype}" + (f"; in host memory: {on_hosts}" if on_hosts else ""),
            f"a step: {len(workload.lengths)} sequences of {lengths} tokens, "
            f"{workload.optimizer_steps} optimizer steps",
        )
    )


def program(measured: Measured, chip: Chip, interconnect: float | None) -> str:
    """One program's memory, work and time."""
    work, memory = measured.work, measured.memory
    lines = [f"\n{work.name}: {work.shape}; {work.runs} times a step (compiled in {measured.compile_seconds:.0f} s)"]
    parts = [
        ("arguments", memory.arguments),
        *work.resident.items(),
        ("outputs", memory.outputs),
        ("temporaries", memory.temporaries),
        ("program", memory.code),
    ]
    shown = [f"{name} {size / GIB:.2f}" for name, size in parts if size >= 0.005 * GIB]
    lines.append(
        f"  memory   {' + '.join(shown)} = {memory.peak / GIB:.2f} of {chip.memory_bytes / GIB:.2f} GiB a chip"
    )
    cost = measured.cost
    if cost is None:
        return "\n".join([*lines, "  the compiler gave up: it does not fit, whatever else lies in memory"])
    compiled = f" ({cost.flops / TERA:.4g} as compiled)" if math.isfinite(chip.bf16_flops) else ""
    lines.append(
        f"  work     {measured.flops / TERA:.4g} TFLOP{compiled}, {cost.bytes / GB:.1f} GB of memory traffic a chip"
    )
    for kind, collective in sorted(cost.collectives.items()):
        lines.append(
            f"  network  {kind}: {collective.count} x, {collective.bytes / GB:.2f} GB, of which "
            f"{collective.sent / GB:.2f} GB sent by a chip"
        )
    seconds = times(measured, chip, interconnect)
    if math.isfinite(chip.bf16_flops):
        arithmetic, network = measured.flops / chip.bf16_flops, seconds[1]
        lines.append(
            f"  time     at least {max(seconds):.3f} s: compute and memory {seconds[0]:.3f} s (arithmetic alone "
            f"{arithmetic:.3f} s), network {network:.3f} s"
        )
    return "\n".join(lines)


def times(measured: Measured, chip: Chip, interconnect: float | None) -> tuple[float, float]:
    """Roofline seconds of one run: of computing and memory, and of the network, which may overlap."""
    cost = measured.cost
    if cost is None:
        return math.inf, math.inf
    return max(cost.seconds, measured.flops / chip.bf16_flops), cost.sent / interconnect if interconnect else 0.0


def verdict(
    config: Config,
    workload: Workload,
    measured: Sequence[Measured],
    chip: Chip,
    interconnect: float | None,
    devices: int,
) -> str:
    """Whether all of it fits; if so how fast a step can be at most, if not what to change."""
    worst = max(measured, key=lambda each: each.memory.peak)
    if worst.memory.peak > chip.memory_bytes:
        excess = (worst.memory.peak - chip.memory_bytes) / GIB
        lines = [f"\ndoes not fit: {worst.work.name} needs {excess:.2f} GiB more than a chip has. What would help:"]
        return "\n".join([*lines, *(f"  - {text}" for text in advice(config, workload, worst, chip))])
    lines = [
        f"\nfits: {worst.memory.peak / GIB:.2f} of {chip.memory_bytes / GIB:.2f} GiB at the most ({worst.work.name})"
    ]
    if math.isfinite(chip.bf16_flops):
        seconds = {each.work.name: each.work.runs * max(times(each, chip, interconnect)) for each in measured}
        training = sum(time for name, time in seconds.items() if name.startswith("actor"))
        model = workload.programs.model
        flops = config.actor_rollout_ref.actor.ppo_epochs * training_flops(
            workload.lengths,
            parameters=multiplied_parameters(model),
            layers=model.num_layers,
            attention_width=model.num_heads * model.head_dim,
        )
        parts = ", ".join(f"{name} {time:.1f} s" for name, time in seconds.items())
        lines.append(f"a step's training takes at least {sum(seconds.values()):.1f} s ({parts})")
        lines.append(
            f"MFU of the actor's update is at most {flops / (training * devices * chip.bf16_flops):.0%}: model FLOPs "
            f"over {devices} chips' peak; recomputation counts as time, not as work"
        )
    return "\n".join(lines)


def advice(config: Config, workload: Workload, worst: Measured, chip: Chip) -> Iterator[str]:
    """Settings that lower what takes most, those that cost least first."""
    roles = config.actor_rollout_ref
    actor, memory = roles.actor, worst.memory
    longest = config.data.max_prompt_length + roles.rollout.response_length
    tokens, key = actor.ppo_max_token_len_per_gpu, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    if worst.work.name == "log-probs":
        tokens, key = roles.ref.log_prob_max_token_len_per_gpu, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
    state = memory.arguments + memory.resident
    if memory.temporaries > 0.2 * chip.memory_bytes:
        shares = workload.programs.layout.pieces("length")
        if tokens * shares > longest:
            yield f"{key}={math.ceil(longest / shares)} (now {tokens}): fewer tokens on a chip at a time"
        yield (
            f"actor_rollout_ref.actor.mesh.sequence={2 * shares} with {key}={math.ceil(longest / shares / 2)}: a row's "
            "tokens over more chips"
        )
        if workload.programs.remat == "none":
            yield "actor_rollout_ref.model.enable_gradient_checkpointing=true: activations are computed again"
        if actor.log_prob_chunk_size > 256:
            yield "actor_rollout_ref.actor.log_prob_chunk_size=256: fewer logits at a time"
    if state > MOSTLY * chip.memory_bytes:
        if not actor.fsdp_config.optimizer_offload:
            yield (
                "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true: the optimizer's state in host memory "
                "between its steps"
            )
        yield "more chips: weights, gradients and optimizer state are spread over all of them (mesh.fsdp)"
        if actor.fsdp_config.model_dtype in ("fp32", "float32"):
            yield "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16: half the weights and moments, less exact"
    yield f"a chip with more memory than the {chip.name}, or a smaller model"


def _size(workload: Workload) -> float:
    """Billions of parameters."""
    return sum(math.prod(leaf.shape) for leaf in _leaves(workload)) / 1e9


def _leaves(workload: Workload) -> list:
    import jax

    return jax.tree.leaves(workload.programs.abstract_params("float32"))

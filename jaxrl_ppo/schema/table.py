"""The resolved configuration in plain words, printed before a run starts."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import show
from jaxrl_ppo.schema.rules_reward_model import judge_served, rewards_by_rule


def render(config: Config, notes: Sequence[str] = (), steps: int | None = None) -> str:
    """A text table of what the run will do, and `notes` below it. `steps` are the run's, at most, where known."""
    sections = {
        "What": _what(config),
        "One step": _step(config),
        "Devices": _devices(config),
        "Run": _run(config, steps),
    }
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _what(config: Config) -> list[tuple[str, str]]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    kl = []
    if actor.use_kl_loss:
        kl.append(f"{actor.kl_loss_coef:g} x {actor.kl_loss_type} in the loss")
    if algorithm.use_kl_in_reward:
        kl.append(f"{algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty} in the reward ({algorithm.kl_ctrl.type})")
    reward = config.reward.custom_reward_function
    scorer = f"{reward.name} of {reward.path}" if reward.path else "the scorer that belongs to the row's data_source"
    if config.reward.functions:
        scorer = " + ".join(f"{e.get('weight', 1)} x {part}" for part, e in config.reward.functions.items())
    model = config.reward.reward_model
    if judge_served(config):
        scorer += f", which asks the judge {model.model_path}"
    elif model.enable:
        rule = f"{scorer} + " if rewards_by_rule(config) else ""
        scorer = f"{rule}{model.weight:g} x the reward model {model.model_path}"
    old = "the engine's" if algorithm.rollout_correction.bypass_mode else "computed by the trainer"
    return [
        ("model", str(config.actor_rollout_ref.model.path)),
        ("training prompts", show(config.data.train_files)),
        ("validation prompts", show(config.data.val_files) if config.data.val_files else "none"),
        ("reward", scorer),
        ("advantage", algorithm.adv_estimator),
        ("policy loss", f"{actor.policy_loss.loss_mode}, {actor.loss_agg_mode}"),
        ("old log-probs", old),
        ("KL to the reference policy", " and ".join(kl) or "none"),
        ("critic", _critic(config)),
        ("learning rate", f"{actor.optim.lr:g}, {actor.optim.lr_scheduler_type}, {actor.optim.optimizer}"),
    ]


def _critic(config: Config) -> str:
    critic = config.critic
    if not critic.enable:
        return "none"
    warmup = f", alone in the first {config.trainer.critic_warmup} steps" if config.trainer.critic_warmup else ""
    optim = critic.optim
    return f"{critic.model.path}; {optim.lr:g}, {optim.lr_scheduler_type}, {optim.optimizer}{warmup}"


def _step(config: Config) -> list[tuple[str, str]]:
    rollout = config.actor_rollout_ref.rollout
    return [
        ("prompts per step", f"{config.data.train_batch_size:,}"),
        ("samples per prompt", f"{rollout.n:,}, {_sampling(config)}"),
        ("sequences per step", f"{sizes.sequences_per_step(config):,}"),
        ("sequences per optimizer step", f"{sizes.sequences_per_optimizer_step(config):,}"),
        ("optimizer steps per step", f"{sizes.optimizer_steps_per_step(config):,}"),
        ("tokens per sample at most", f"{rollout.prompt_length:,} prompt + {rollout.response_length:,} response"),
        ("tokens per device at most", _tokens_per_device(config)),
        ("staleness", _staleness(config)),
    ]


def _tokens_per_device(config: Config) -> str:
    tokens, sequences = sizes.update_tokens(config), config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    if tokens is not None or sequences is None:
        return f"{tokens:,} at a time"
    longest = config.data.max_prompt_length + config.data.max_response_length
    return f"{sequences * longest:,} at a time: {sequences:,} sequences"


def _sampling(config: Config) -> str:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.do_sample:
        return "greedy"
    cut = [f"top-k {rollout.top_k}"] * (rollout.top_k > 0) + [f"top-p {rollout.top_p:g}"] * (rollout.top_p < 1)
    return ", ".join([f"temperature {rollout.temperature:g}", *cut])


def _staleness(config: Config) -> str:
    steps = sizes.staleness(config)
    if steps == 0:
        return "0: each batch is generated with the weights that it trains"
    return f"{steps}: a batch is generated while the one before it trains"


def _devices(config: Config) -> list[tuple[str, str]]:
    trainer, rollout, actor = config.trainer, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    shape = sizes.mesh_shape(config) or {}
    mesh = " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "one device"
    per_replica = sizes.replica_devices(config)
    split = f"{per_replica} device{'s' * (per_replica > 1)} each"
    shared = ", the trainer's, in turns" if sizes.takes_turns(config) else ""
    return [
        ("trainer", f"{_pool(trainer.device, trainer.nnodes, trainer.n_gpus_per_node)}; mesh: {mesh}"),
        ("trainer data types", f"{actor.fsdp_config.model_dtype} weights, {actor.fsdp_config.dtype} computation"),
        ("critic", _critic_pool(config)),
        ("reward model", _reward_model_pool(config)),
        ("rollout", _pool(str(rollout.device), rollout.nnodes, rollout.n_gpus_per_node) + shared),
        ("rollout replicas", f"{sizes.rollout_replicas(config)} of {split}; engine: {rollout.name}, {rollout.dtype}"),
    ]


def _critic_pool(config: Config) -> str:
    if not config.critic.enable:
        return "none"
    if not config.critic.enable_resource_pool:
        return "the trainer's devices"
    return _pool(config.trainer.device, config.critic.nnodes, config.critic.n_gpus_per_node)


def _reward_model_pool(config: Config) -> str:
    model = config.reward.reward_model
    if not model.enable:
        return "none"
    if not model.enable_resource_pool:
        return "the trainer's devices"
    if judge_served(config):
        each, servers = sizes.judge_devices(config), sizes.judge_servers(config)
        size = f"{servers} server{'s' * (servers > 1)} of {each} device{'s' * (each > 1)} each"
        pool = _pool(str(config.actor_rollout_ref.rollout.device), model.nnodes, model.n_gpus_per_node)
        return f"{pool}; a judge, {size}; engine: {model.rollout.name}, {model.rollout.dtype}"
    return _pool(config.trainer.device, model.nnodes, model.n_gpus_per_node)


def _pool(kind: str, nodes: int, per_node: int) -> str:
    total = nodes * per_node
    what = {"cpu": "virtual CPU", "auto": "still to be found"}.get(kind, kind.upper())
    return f"{total} ({what}): {nodes} node{'s' * (nodes != 1)} x {per_node}"


def _run(config: Config, steps: int | None) -> list[tuple[str, str]]:
    trainer = config.trainer
    length = f"{trainer.total_epochs} epoch{'s' * (trainer.total_epochs != 1)}"
    if steps is not None:
        length += f" = {'at most ' * config.data.filter_overlong_prompts}{steps:,} step{'s' * (steps != 1)}"
    if trainer.total_training_steps is not None:
        length = f"{trainer.total_training_steps} steps"
    if trainer.val_only:
        length = "no step: validation alone"
    validations = ["before the first step"] if trainer.val_before_train else []
    if trainer.test_freq > 0:
        validations += [f"every {trainer.test_freq} steps", "after the last"]
    validation = "once" if trainer.val_only else ", ".join(validations) or "none"
    save = f"every {trainer.save_freq} steps" if trainer.save_freq > 0 else "none"
    return [
        ("pipeline", trainer.mode),
        ("length", length),
        ("validation", validation if config.data.val_files else "none"),
        ("checkpoints", save),
        ("resume", trainer.resume_mode + (f": {trainer.resume_from_path}" if trainer.resume_from_path else "")),
        ("folder", trainer.default_local_dir),
        ("metrics to", ", ".join(trainer.logger)),
    ]

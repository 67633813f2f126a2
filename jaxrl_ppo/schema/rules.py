"""What keys must be to one another: batch sizes that divide, devices that suffice, lengths that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.actor import OPTIMIZERS_WITH_DECAY, OPTIMIZERS_WITHOUT_DECAY
from jaxrl_ppo.schema.algorithm import ADVANTAGE_ESTIMATORS
from jaxrl_ppo.schema.coerce import value_at
from jaxrl_ppo.schema.config import Config, OptimConfig
from jaxrl_ppo.schema.faults import Fault
from jaxrl_ppo.schema.rules_correction import rollout_correction
from jaxrl_ppo.schema.rules_critic import critic
from jaxrl_ppo.schema.rules_reward_model import reward_model

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TRAINER_POOL = ("trainer.nnodes", "trainer.n_gpus_per_node")


def check(config: Config) -> list[Fault]:
    """Every fault of `config` that concerns more than one key's own type and range."""
    return [fault for rule in RULES for fault in rule(config)]


def required(config: Config) -> Iterator[Fault]:
    """Keys without a default."""
    if not config.actor_rollout_ref.model.path:
        key = "actor_rollout_ref.model.path"
        yield Fault((key,), f"{key} must be given: a Hugging Face model folder or hub id.")
    if not config.data.train_files:
        key = "data.train_files"
        yield Fault((key,), f"{key} must be given: a parquet, json or jsonl file, or a list of them.")


def batch_sizes(config: Config) -> Iterator[Fault]:
    """A step's prompts split into whole mini-batches, and those over whole devices."""
    step, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    n = config.actor_rollout_ref.rollout.n
    keys: tuple[str, ...] = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    if mini > step:
        text = f"is larger than data.train_batch_size={step}: an optimizer step cannot see more prompts than a step has"
        yield Fault(keys, f"{ACTOR}.ppo_mini_batch_size={mini} {text}.")
    elif step % mini:
        below = step - step % mini
        text = f"does not divide by {ACTOR}.ppo_mini_batch_size={mini}; e.g. {below} or {below + mini} does"
        yield Fault(keys, f"data.train_batch_size={step} {text}.")
    if sizes.mesh_shape(config) is not None:
        devices = sizes.batch_devices(config)
        if mini * n % devices:
            keys = (f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", *TRAINER_POOL)
            text = (
                f"= {mini * n} sequences do not divide over {devices} data-parallel devices ({_trainer_pool(config)})"
            )
            yield Fault(keys, f"{keys[0]}={mini} x {keys[1]}={n} {text}.")


def mesh(config: Config) -> Iterator[Fault]:
    """The mesh's axes multiply to the trainer's devices."""
    axes = config.actor_rollout_ref.actor.mesh
    named = ", ".join(f"{axis}={getattr(axes, axis)}" for axis in sizes.MESH_AXES)
    keys = (*(f"{ACTOR}.mesh.{axis}" for axis in sizes.MESH_AXES), *TRAINER_POOL)
    if [getattr(axes, axis) for axis in sizes.MESH_AXES].count(-1) > 1:
        yield Fault(keys, f"{ACTOR}.mesh ({named}): only one axis may be -1.")
    elif sizes.mesh_shape(config) is None:
        devices = sizes.trainer_devices(config)
        yield Fault(keys, f"{ACTOR}.mesh ({named}) does not multiply to {_trainer_pool(config)} = {devices} devices.")


def _trainer_pool(config: Config) -> str:
    return f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"


def rollout_pool(config: Config) -> Iterator[Fault]:
    """The rollout pool holds whole replicas, and is said in one place."""
    rollout = config.actor_rollout_ref.rollout
    devices, each = sizes.rollout_devices(config), sizes.replica_devices(config)
    named = f"{ROLLOUT}.nnodes={rollout.nnodes} x {ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node}"
    pool = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", "rollout.nnodes", "rollout.n_gpus_per_node")
    parallel = tuple(f"{ROLLOUT}.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "data"))
    if not devices:
        yield Fault(pool, f"{named}: the rollout pool has no devices.")
    elif devices % each:
        why = " x ".join(f"{key}={size}" for key in parallel if (size := value_at(config, key)) > 1)
        text = f"= {devices} devices do not hold whole replicas of {each} ({why})"
        yield Fault((*pool, *parallel), f"{named} {text}.")
    elif rollout.cpu_affinity is not None and len(rollout.cpu_affinity) != devices // each:
        text = f"has {len(rollout.cpu_affinity)} entries for {devices // each} replicas"
        yield Fault((f"{ROLLOUT}.cpu_affinity", *pool, *parallel), f"{ROLLOUT}.cpu_affinity {text}.")
    if rollout.expert_parallel_size > each:
        text = f"is more than the {each} devices of a replica"
        yield Fault(
            (f"{ROLLOUT}.expert_parallel_size", *parallel),
            f"{ROLLOUT}.expert_parallel_size={rollout.expert_parallel_size} {text}.",
        )


def lengths(config: Config) -> Iterator[Fault]:
    """Prompts and responses fit where they must go."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    for part in ("prompt", "response"):
        ours, theirs = getattr(rollout, f"{part}_length"), getattr(data, f"max_{part}_length")
        if ours != theirs:
            keys = (f"{ROLLOUT}.{part}_length", f"data.max_{part}_length")
            yield Fault(keys, f"{keys[0]}={ours} and {keys[1]}={theirs} are one length in two places: give {keys[1]}.")
    longest = data.max_prompt_length + data.max_response_length
    lengths_said = f"data.max_prompt_length={data.max_prompt_length} + max_response_length={data.max_response_length}"
    both = ("data.max_prompt_length", "data.max_response_length")
    for key, tokens in (
        (f"{ACTOR}.ppo_max_token_len_per_gpu", sizes.update_tokens(config)),
        ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", sizes.log_prob_tokens(config)),
    ):
        shares = max(1, config.actor_rollout_ref.actor.mesh.sequence)  # a row lies on so many devices
        if tokens is not None and longest > tokens * shares:
            text = f"holds less than one longest sample: {lengths_said} = {longest}"
            yield Fault((key, *both), f"{key}={tokens} {text}.")
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        key = f"{ROLLOUT}.max_model_len"
        yield Fault((key, *both), f"{key}={rollout.max_model_len} is less than {lengths_said} = {longest}.")
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < (rollout.max_model_len or longest):
        key = f"{ROLLOUT}.max_num_batched_tokens"
        text = f"is less than {ROLLOUT}.max_model_len={rollout.max_model_len}, and enable_chunked_prefill=false"
        yield Fault((key, f"{ROLLOUT}.max_model_len"), f"{key}={rollout.max_num_batched_tokens} {text}.")
    buffer = config.reward.reward_kwargs
    if buffer.overlong_buffer_cfg.enable:
        prefix = "reward.reward_kwargs"
        keys = (f"{prefix}.overlong_buffer_cfg.len", f"{prefix}.max_resp_len")
        if not 0 < buffer.overlong_buffer_cfg.len < (buffer.max_resp_len or 0):
            text = f"must be more than 0 and less than {keys[1]}={buffer.max_resp_len}"
            yield Fault(keys, f"{keys[0]}={buffer.overlong_buffer_cfg.len} {text}.")
        if config.reward.reward_manager.name != "dapo":
            key = "reward.reward_manager.name"
            yield Fault((key,), f"{prefix}.overlong_buffer_cfg.enable=true needs {key}=dapo.")


def algorithm(config: Config) -> Iterator[Fault]:
    """Estimator and loss have what they need."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    if config.algorithm.adv_estimator in ("grpo_passk", "rloo") and n < 2:
        keys = ("algorithm.adv_estimator", f"{ROLLOUT}.n")
        yield Fault(keys, f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs {ROLLOUT}.n of at least 2.")
    yield from _gdpo(config)
    if config.algorithm.use_pf_ppo and config.algorithm.adv_estimator != "gae":
        keys = ("algorithm.use_pf_ppo", "algorithm.adv_estimator")
        yield Fault(keys, "algorithm.use_pf_ppo=true needs algorithm.adv_estimator=gae.")
    if actor.policy_loss.loss_mode == "dro" and actor.policy_loss.dro_beta is None:
        key = f"{ACTOR}.policy_loss.dro_beta"
        yield Fault((key,), f"{ACTOR}.policy_loss.loss_mode=dro needs {key}.")
    if actor.policy_loss.clip_cov_lb > actor.policy_loss.clip_cov_ub:
        keys = (f"{ACTOR}.policy_loss.clip_cov_lb", f"{ACTOR}.policy_loss.clip_cov_ub")
        yield Fault(keys, f"{keys[0]} is more than {keys[1]}.")


# What an estimator that compares a prompt's samples makes of one that is alone: its score, or nothing.
SCORE_ALONE = ("grpo", "gdpo")
NOTHING_ALONE = ("opo", "gpg", "reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline")


def nothing_to_compare(config: Config) -> str | None:
    """What to note of an estimator that compares a prompt's samples where each prompt has one; None where all is well.

    Those that cannot do it at all are a fault.
    """
    estimator, key = config.algorithm.adv_estimator, f"{ROLLOUT}.n"
    if config.actor_rollout_ref.rollout.n > 1 or estimator not in SCORE_ALONE + NOTHING_ALONE:
        return None
    if estimator in SCORE_ALONE:
        left = "each sample's advantage is its score itself, and where no score is negative everything is reinforced"
    else:
        left = "every advantage is 0, and the rewards teach nothing"
    return f"algorithm.adv_estimator={estimator} compares a prompt's samples, and {key}=1: {left}. Set {key}, e.g. to 8"


def filter_groups(config: Config) -> Iterator[Fault]:
    """Dynamic sampling has groups to compare, and room to fill a batch."""
    settings, data, n = config.algorithm.filter_groups, config.data, config.actor_rollout_ref.rollout.n
    prefix = "algorithm.filter_groups"
    if not settings.enable:
        return
    if n < 2:
        yield Fault((f"{prefix}.enable", f"{ROLLOUT}.n"), f"{prefix}.enable=true needs {ROLLOUT}.n of at least 2.")
    most = settings.max_num_gen_batches * (data.gen_batch_size or data.train_batch_size)
    if 0 < most < data.train_batch_size:
        keys = (f"{prefix}.max_num_gen_batches", "data.gen_batch_size", "data.train_batch_size")
        text = f"= {most} prompts are less than one step's data.train_batch_size={data.train_batch_size}"
        yield Fault(keys, f"{keys[0]}={settings.max_num_gen_batches} x {keys[1]}={data.gen_batch_size} {text}.")


def _gdpo(config: Config) -> Iterator[Fault]:
    algorithm = config.algorithm
    names, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    keys, weight_keys = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    if algorithm.adv_estimator != "gdpo" and algorithm.adv_estimator not in ADVANTAGE_ESTIMATORS:
        return  # a user's, which may need them
    if algorithm.adv_estimator != "gdpo":
        for key, value in ((keys, names), (weight_keys, weights)):
            if value:
                yield Fault((key, "algorithm.adv_estimator"), f"{key} needs algorithm.adv_estimator=gdpo.")
        return
    if not names:
        text = "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys: which numbers of the reward function"
        yield Fault((keys,), f"{text} are rewards of their own.")
    if weights is not None and len(weights) != len(names):
        yield Fault((weight_keys, keys), f"{weight_keys} has {len(weights)} numbers for {len(names)} {keys}.")
    if algorithm.use_kl_in_reward:
        text = "gdpo takes its rewards from the reward function alone; use actor_rollout_ref.actor.use_kl_loss"
        yield Fault(("algorithm.use_kl_in_reward",), f"algorithm.use_kl_in_reward=true: {text}.")


def sampling(config: Config) -> Iterator[Fault]:
    """Sampling needs a temperature; training needs sampling."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        key = f"{ROLLOUT}.val_kwargs.temperature"
        yield Fault((key,), f"{ROLLOUT}.val_kwargs.do_sample=true needs {key} of more than 0.")
    if not rollout.do_sample and rollout.n > 1:
        keys = (f"{ROLLOUT}.do_sample", f"{ROLLOUT}.n")
        yield Fault(keys, f"{ROLLOUT}.do_sample=false makes {ROLLOUT}.n={rollout.n} equal responses to each prompt.")


def optimizers(config: Config) -> Iterator[Fault]:
    """The optimizer exists and has what is asked of it; a warm-up ends before the schedule does."""
    actor, critic = config.actor_rollout_ref.actor.optim, config.critic.optim
    for optim, path in ((actor, f"{ACTOR}.optim"), (critic, "critic.optim")):
        yield from _optimizer(optim, path)


def _optimizer(optim: OptimConfig, path: str) -> Iterator[Fault]:
    name = optim.optimizer.lower()
    if name not in OPTIMIZERS_WITH_DECAY + OPTIMIZERS_WITHOUT_DECAY:
        known = ", ".join(sorted(OPTIMIZERS_WITH_DECAY + OPTIMIZERS_WITHOUT_DECAY))
        yield Fault((f"{path}.optimizer",), f"{path}.optimizer={optim.optimizer}: must be one of {known}.")
    elif name in OPTIMIZERS_WITHOUT_DECAY and optim.weight_decay:
        keys = (f"{path}.optimizer", f"{path}.weight_decay")
        yield Fault(keys, f"{keys[0]}={optim.optimizer} has no weight decay, so {keys[1]} must be 0.")
    if len(optim.betas) != 2:
        yield Fault((f"{path}.betas",), f"{path}.betas={optim.betas}: must be two numbers.")
    if 0 < optim.total_training_steps < optim.lr_warmup_steps:
        keys = (f"{path}.lr_warmup_steps", f"{path}.total_training_steps")
        text = f"is more than {keys[1]}={optim.total_training_steps}"
        yield Fault(keys, f"{keys[0]}={optim.lr_warmup_steps} {text}.")


def modes(config: Config) -> Iterator[Fault]:
    """Settings that contradict the pipeline, validation or resume mode."""
    trainer = config.trainer
    key = "actor_rollout_ref.hybrid_engine"
    if trainer.mode != "sync" and config.actor_rollout_ref.hybrid_engine:
        text = f"trainer.mode={trainer.mode} generates while it trains, so the two need devices of their own"
        yield Fault((key, "trainer.mode"), f"{key}=true: {text}.")
    if sizes.takes_turns(config):
        yield from _turns(config)
    if not config.data.val_files and (trainer.val_only or trainer.test_freq > 0):
        asks = "trainer.val_only=true" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
        yield Fault(("data.val_files",), f"{asks} needs data.val_files.")
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Fault(("trainer.resume_from_path",), "trainer.resume_mode=resume_path needs trainer.resume_from_path.")
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path:
        keys = ("trainer.resume_from_path", "trainer.resume_mode")
        text = f"is not used with trainer.resume_mode={trainer.resume_mode}; set trainer.resume_mode=resume_path"
        yield Fault(keys, f"trainer.resume_from_path {text}.")
    load = config.actor_rollout_ref.actor.checkpoint
    unsaved = [part for part in load.load_contents if part not in load.save_contents]
    if unsaved:
        keys = (f"{ACTOR}.checkpoint.load_contents", f"{ACTOR}.checkpoint.save_contents")
        yield Fault(keys, f"{keys[0]} asks for {', '.join(unsaved)}, which {keys[1]} does not save.")


def _turns(config: Config) -> Iterator[Fault]:
    """The rollout is on all of the trainer's devices, and each replica on those of one trainer process."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    key = "actor_rollout_ref.hybrid_engine"
    for size in ("nnodes", "n_gpus_per_node"):
        ours, theirs = getattr(trainer, size), getattr(rollout, size)
        if ours != theirs:
            keys = (f"{ROLLOUT}.{size}", f"rollout.{size}", f"trainer.{size}", key)
            text = f"is not trainer.{size}={ours}, but with {key}=true the two take turns on the same devices"
            yield Fault(keys, f"{ROLLOUT}.{size}={theirs} {text}; set {key}=false to give the rollout its own.")
    each = sizes.replica_devices(config)
    if trainer.n_gpus_per_node % each:
        text = f"the trainer's processes have {trainer.n_gpus_per_node} devices, and a replica needs {each}"
        yield Fault((f"{ROLLOUT}.tensor_model_parallel_size", key), f"{key}=true: {text}: replicas must fit in.")


def data_files(config: Config) -> Iterator[Fault]:
    """Each training file has a weight, and nothing else decides the order."""
    key, data = "data.train_files_weights", config.data
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files or []
    if data.train_files_weights is None:
        return
    if len(data.train_files_weights) != len(files):
        text = f"has {len(data.train_files_weights)} numbers for {len(files)} files"
        yield Fault((key, "data.train_files"), f"{key} {text}.")
    others = {"data.sampler.class_path": data.sampler.class_path, "data.custom_cls.path": data.custom_cls.path}
    for other, given in others.items():
        if given:
            yield Fault((key, other), f"{key} and {other} are both given; the class decides the order, so drop {key}.")


def rewards(config: Config) -> Iterator[Fault]:
    """Entries of reward.functions are what they should be, and take the single function's place."""
    key, reward = "reward.functions", config.reward
    known = ("path", "name", "weight", "reward_kwargs")
    for part, entry in reward.functions.items():
        if not isinstance(entry, dict) or (unknown := [name for name in entry if name not in known]):
            text = f"unknown {', '.join(unknown)}" if isinstance(entry, dict) else f"{entry!r} is no mapping"
            yield Fault((key,), f"{key}.{part}: {text}; it takes {', '.join(known)}.")
        elif isinstance(weight := entry.get("weight", 1), bool) or not isinstance(weight, int | float):
            yield Fault((key,), f"{key}.{part}.weight={weight}: must be a number.")
        if part in ("score", "acc", "pred"):
            yield Fault((key,), f"{key}.{part}: this name is taken; choose another.")
    if reward.functions and reward.custom_reward_function.path:
        keys = (key, "reward.custom_reward_function.path")
        yield Fault(keys, f"{keys[0]} and {keys[1]} are both given; make the function one of {key}.")


def asynchronous(config: Config) -> Iterator[Fault]:
    """The staleness limit leaves room for what is asked to run ahead."""
    settings, rate = config.async_training, config.actor_rollout_ref.rollout.over_sample_rate
    keys = (f"{ROLLOUT}.over_sample_rate", "async_training.max_staleness")
    if config.trainer.mode != "async":
        if rate:
            text = "starts prompts of later batches, which only trainer.mode=async does"
            yield Fault((keys[0], "trainer.mode"), f"{keys[0]}={rate:g} {text}.")
        return
    if config.algorithm.filter_groups.enable:
        key = "algorithm.filter_groups.enable"
        yield Fault((key, "trainer.mode"), f"{key}=true: not available with trainer.mode=async; use one_step_off.")
    if rate > settings.max_staleness:
        text = (
            f"starts prompts that {keys[1]}={settings.max_staleness} forbids to train so late; the limit itself is the"
        )
        yield Fault(keys, f"{keys[0]}={rate:g} {text} largest rate.")
    if settings.trigger_parameter_sync_step > settings.max_staleness + 1:
        trigger = "async_training.trigger_parameter_sync_step"
        text = f"leaves the rollouts on weights older than {keys[1]}={settings.max_staleness} allows; at most"
        yield Fault(
            (trigger, keys[1]), f"{trigger}={settings.trigger_parameter_sync_step} {text} {settings.max_staleness + 1}."
        )


def users_code(config: Config) -> Iterator[Fault]:
    """A file and a name in it are given together."""
    pairs = (
        ("data.custom_cls.path", config.data.custom_cls.path, "data.custom_cls.name", config.data.custom_cls.name),
        (
            "data.sampler.class_path",
            config.data.sampler.class_path,
            "data.sampler.class_name",
            config.data.sampler.class_name,
        ),
    )
    for path_key, path, name_key, name in pairs:
        if bool(path) != bool(name):
            given, missing = (path_key, name_key) if path else (name_key, path_key)
            yield Fault((path_key, name_key), f"{given} is given without {missing}.")
    rollout = config.actor_rollout_ref.rollout
    tools, loops = f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.agent.agent_loop_config_path"
    if rollout.multi_turn.enable and not (rollout.multi_turn.tool_config_path or rollout.agent.agent_loop_config_path):
        keys = (f"{ROLLOUT}.multi_turn.enable", tools, loops)
        yield Fault(keys, f"{keys[0]}=true needs {tools}, a Python file of functions, or {loops}.")
    manager = config.reward.reward_manager
    module = ("reward.reward_manager.module.path", "reward.reward_manager.module.name")
    if manager.source == "importlib" and not (manager.module.path and manager.module.name):
        yield Fault(module, f"reward.reward_manager.source=importlib needs {module[0]} and {module[1]}.")
    if manager.source == "register" and (manager.module.path or manager.module.name):
        yield Fault(module, "reward.reward_manager.module needs reward.reward_manager.source=importlib.")


RULES: tuple[Callable[[Config], Iterator[Fault]], ...] = (
    required,
    batch_sizes,
    mesh,
    rollout_pool,
    lengths,
    algorithm,
    filter_groups,
    critic,
    rollout_correction,
    sampling,
    optimizers,
    modes,
    data_files,
    rewards,
    reward_model,
    asynchronous,
    users_code,
)

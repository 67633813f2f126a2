"""Checks of the files a configuration names, before any process starts: model, data, users' Python files."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault
from jaxrl_ppo.schema.places import is_address, is_here, is_hub_id
from jaxrl_ppo.schema.rules_reward_model import judge_served

DATA_SUFFIXES = (".parquet", ".json", ".jsonl")
HEAD_CHARACTERS = 1 << 20


def check(config: Config, model_types: Collection[str] | None) -> list[Fault]:
    """Every fault of the files that `config` names. Remote addresses are left to whoever fetches them."""
    return [*_models(config, model_types), *_data(config), *_users_files(config), *_resume(config)]


def notes(config: Config) -> list[str]:
    """What the files that `config` names let one expect, without being a fault."""
    hub = [
        f"{key}={place}: no such folder here, so it is looked for on the Hugging Face Hub"
        for key, place in models(config).items()
        if is_hub_id(place)
    ]
    trained = {_whole(name) for name in files_of(config.data.train_files)}
    return hub + [
        f"data.val_files: {name} is a training file too, so the accuracy told is that of rows that were trained on"
        for name in files_of(config.data.val_files)
        if _whole(name) in trained
    ]


def models(config: Config) -> dict[str, str]:
    """The folder, address or hub id of each model and tokenizer that the run reads, by key; each place once."""
    model, critic, reward_model = config.actor_rollout_ref.model, config.critic, config.reward.reward_model
    named = {
        "actor_rollout_ref.model.path": model.path,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
        "critic.model.path": critic.model.path if critic.enable else None,
        "reward.reward_model.model_path": reward_model.model_path if reward_model.enable else None,
    }
    found: dict[str, str] = {}
    for key, place in named.items():
        if place and place not in found.values():
            found[key] = place
    return found


def files_of(files: str | list[str] | None) -> list[str]:
    """The data files that a key names."""
    return [files] if isinstance(files, str) else files or []


def _whole(name: str) -> str:
    return name if is_address(name) else str(Path(name).expanduser().resolve())


def _hint(path: str) -> str:
    """How to make a missing file of the quickstart."""
    return "; run examples/quickstart/prepare.py first, or make run" if Path(path).parts[0] == ".quickstart" else ""


def _models(config: Config, model_types: Collection[str] | None) -> Iterator[Fault]:
    for key, place in models(config).items():
        folder = Path(place).expanduser()
        if is_address(place) or is_hub_id(place):
            continue
        if not is_here(place):
            yield Fault((key,), f"{key}={place}: there is no such folder{_hint(place)}.")
        elif not folder.is_dir():
            yield Fault((key,), f"{key}={folder}: is a file; it must be the folder that holds config.json.")
        elif not key.endswith("tokenizer_path"):
            judge = key.startswith("reward") and judge_served(config)
            faults = list(_model_folder(key, folder, None if judge else model_types))  # vLLM knows more of them
            yield from faults
            if not [*folder.glob("*.safetensors")]:
                text = "holds no *.safetensors file; save the model again with a recent transformers"
                yield Fault((key,), f"{key}={folder}: {text}.")
            if key.startswith("reward") and not faults:
                yield from (_judge if judge else _one_label)(key, folder, config)


def _model_folder(key: str, folder: Path, model_types: Collection[str] | None) -> Iterator[Fault]:
    file = folder / "config.json"
    if not file.is_file():
        yield Fault((key,), f"{key}={folder}: holds no config.json, so it is no Hugging Face model folder.")
        return
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        yield Fault((key,), f"{key}: {file} is not readable as JSON: {error}.")
        return
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind is None:
        yield Fault((key,), f"{key}: {file} has no model_type.")
    elif model_types is not None and kind not in model_types:
        text = f"the architecture {kind!r} is not supported; supported: {', '.join(sorted(model_types))}"
        yield Fault((key,), f"{key}={folder}: {text}.")


def _one_label(key: str, folder: Path, config: Config) -> Iterator[Fault]:
    content = json.loads((folder / "config.json").read_text())
    labels = len(content.get("id2label") or range(content.get("num_labels", 2)))  # transformers' default is two
    if labels != 1:
        text = f"config.json has {labels} labels (id2label), and a reward model gives one number"
        if config.reward.reward_model.rollout.name:
            text += "; for a judge, name the reward function that asks it, reward.custom_reward_function.path"
        yield Fault((key,), f"{key}={folder}: {text}.")


def _judge(key: str, folder: Path, config: Config) -> Iterator[Fault]:
    content, judge = json.loads((folder / "config.json").read_text()), config.reward.reward_model.rollout
    positions, length_key = content.get("max_position_embeddings"), "reward.reward_model.rollout.max_model_len"
    if any("SequenceClassification" in name for name in content.get("architectures") or ()):
        text = f"is a sequence classifier, and reward.reward_model.rollout.name={judge.name} serves a model that writes"
        yield Fault((key,), f"{key}={folder}: {text}; leave the name out to have it score.")
    elif positions and (judge.max_model_len or 0) > positions and not content.get("rope_scaling"):
        text = f"is more than the {positions} positions of {folder}; null means prompt_length + response_length"
        yield Fault((length_key, key), f"{length_key}={judge.max_model_len} {text}.")


def _data(config: Config) -> Iterator[Fault]:
    column = config.data.prompt_key
    for key in ("train_files", "val_files"):
        files = files_of(getattr(config.data, key))
        total: int | None = 0
        for name in files:
            problem, columns, rows = _data_file(name)
            if problem:
                yield Fault((f"data.{key}",), f"data.{key}: {name}: {problem}.")
            elif columns is not None and column not in columns:
                text = f"has no column {column!r} (data.prompt_key); it has {', '.join(sorted(columns))}"
                yield Fault((f"data.{key}", "data.prompt_key"), f"data.{key}: {name}: {text}.")
            total = None if not rows or total is None else total + rows
        if key == "train_files" and files and total is not None and total < config.data.train_batch_size:
            keys = ("data.train_files", "data.train_batch_size")
            text = f"have {total} rows, less than one step's data.train_batch_size={config.data.train_batch_size}"
            yield Fault(keys, f"data.train_files {text}.")


def _data_file(name: str) -> tuple[str | None, list[str] | None, int | None]:
    """What is wrong with one data file; its columns, and how many rows it has where that is cheap to know."""
    suffix = Path(name).suffix
    if suffix not in DATA_SUFFIXES:
        return f"must end in one of {', '.join(DATA_SUFFIXES)}", None, None
    if is_address(name):
        return None, None, None
    path = Path(name).expanduser()
    if not path.is_file():
        return f"there is no such file{_hint(name)}", None, None
    if path.stat().st_size == 0:
        return "is empty", None, None
    try:
        columns, rows = _parquet_columns(path) if suffix == ".parquet" else _json_columns(path)
    except (OSError, ValueError) as error:
        return f"is not readable as {suffix[1:]}: {error}", None, None
    return ("has no rows" if rows == 0 else None), columns, rows


def _parquet_columns(path: Path) -> tuple[list[str], int]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)  # reads the footer only
    return list(file.schema_arrow.names), file.metadata.num_rows


def _json_columns(path: Path) -> tuple[list[str], int | None]:
    """Keys of the first row of a json array, of a json object per line, or of jsonl; 0 where there is no row."""
    size = HEAD_CHARACTERS
    while True:
        with path.open(encoding="utf-8") as file:
            head = file.read(size)
        if len(head) < size and "".join(head.split()) in ("", "[]"):
            return [], 0
        try:
            row, _ = json.JSONDecoder().raw_decode(head.lstrip().removeprefix("[").lstrip())
            break
        except ValueError:
            if len(head) < size:  # that was the whole file
                raise
            size *= 8
    if not isinstance(row, dict):
        raise ValueError(f"the first row is a {type(row).__name__}, not an object")
    return list(row), None


def _users_files(config: Config) -> Iterator[Fault]:
    data, reward = config.data, config.reward
    named: dict[str, tuple[str | None, str | None]] = {
        "reward.custom_reward_function": (reward.custom_reward_function.path, reward.custom_reward_function.name),
        "reward.reward_manager.module": (reward.reward_manager.module.path, reward.reward_manager.module.name),
        "data.custom_cls": (data.custom_cls.path, data.custom_cls.name),
        "data.sampler": (data.sampler.class_path, data.sampler.class_name),
    }
    default_loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    for key, spec in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", default_loop),
    ):
        if ".py:" in spec:
            named[key] = (spec.rpartition(":")[0], spec.rpartition(":")[2])
    for part, entry in reward.functions.items():
        if isinstance(entry, dict):
            named[f"reward.functions.{part}"] = (entry.get("path"), entry.get("name") or "compute_score")
    for key, (file, name) in named.items():
        if file and name:
            problem = _python_file(Path(file).expanduser(), name)
            if problem:
                yield Fault((key,), f"{key}: {file}: {problem}.")
    rollout = config.actor_rollout_ref.rollout
    for key, path in (
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", rollout.multi_turn.tool_config_path),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", rollout.agent.agent_loop_config_path),
    ):
        if path and not Path(path).expanduser().is_file():
            yield Fault((key,), f"{key}: {path}: there is no such file.")


def _python_file(path: Path, name: str) -> str | None:
    """What is wrong with a user's file that must define `name`; it is parsed, not run."""
    if not path.is_file():
        return "there is no such file"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"is not valid Python{line}: {error.msg if isinstance(error, SyntaxError) else error}"
    defined, open_ended = _top_level_names(tree)
    if name not in defined and not open_ended:
        return f"defines no {name!r}; it defines {', '.join(sorted(defined)) or 'nothing'}"
    return None


def _top_level_names(tree: ast.Module) -> tuple[set[str], bool]:
    """Names that a module binds at its top level, and whether it may bind others that parsing cannot see."""
    names: set[str] = set()
    open_ended = False
    pending: list[Any] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            open_ended |= any(alias.name == "*" for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            pending += [stmt for handler in getattr(node, "handlers", []) for stmt in handler.body]
    return names, open_ended


def _resume(config: Config) -> Iterator[Fault]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        path = trainer.resume_from_path
        if not is_address(path) and not Path(path).expanduser().is_dir():
            key = "trainer.resume_from_path"
            yield Fault((key,), f"{key}={path}: there is no such folder.")

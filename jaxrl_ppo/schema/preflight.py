"""Checks of the files a configuration names, before any process starts: model, data, users' Python files."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault

DATA_SUFFIXES = (".parquet", ".json", ".jsonl")
# What a hub id looks like; "./x", "/x/y" and "a/b/c" can only be folders.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HEAD_CHARACTERS = 1 << 20


def check(config: Config, model_types: Collection[str] | None) -> list[Fault]:
    """Every fault of the files that `config` names. Remote addresses are left to whoever fetches them."""
    reward_model = _reward_model(config, model_types)
    return [*_model(config, model_types), *reward_model, *_data(config), *_users_files(config), *_resume(config)]


def _is_remote(path: str) -> bool:
    return "://" in path


def _hint(path: str) -> str:
    """How to make a missing file of the quickstart."""
    return "; run examples/quickstart/prepare.py first, or make run" if Path(path).parts[0] == ".quickstart" else ""


def _model(config: Config, model_types: Collection[str] | None) -> Iterator[Fault]:
    model = config.actor_rollout_ref.model
    paths = {
        "actor_rollout_ref.model.path": model.path,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path,
        "actor_rollout_ref.model.hf_config_path": model.hf_config_path,
    }
    for key, path in paths.items():
        if path and not _is_remote(path) and not Path(path).expanduser().exists() and not HUB_ID.fullmatch(path):
            yield Fault((key,), f"{key}={path}: there is no such folder{_hint(path)}.")
    key = "actor_rollout_ref.model.hf_config_path" if model.hf_config_path else "actor_rollout_ref.model.path"
    folder = Path(paths[key] or "").expanduser()
    if not paths[key] or not folder.exists():
        return
    if not folder.is_dir():
        yield Fault((key,), f"{key}={folder}: is a file; it must be the folder that holds config.json.")
        return
    yield from _model_folder(key, folder, model_types)
    if key.endswith(".path") and not [*folder.glob("*.safetensors")]:
        yield Fault(
            (key,), f"{key}={folder}: holds no *.safetensors file; save the model again with a recent transformers."
        )


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


def _reward_model(config: Config, model_types: Collection[str] | None) -> Iterator[Fault]:
    settings, key = config.reward.reward_model, "reward.reward_model.model_path"
    if not (settings.enable and settings.model_path) or _is_remote(settings.model_path):
        return
    folder = Path(settings.model_path).expanduser()
    if not folder.is_dir():
        if folder.exists() or not HUB_ID.fullmatch(settings.model_path):
            yield Fault((key,), f"{key}={settings.model_path}: there is no such folder.")
        return
    faults = list(_model_folder(key, folder, model_types))
    yield from faults
    if not faults:
        content = json.loads((folder / "config.json").read_text())
        labels = len(content.get("id2label") or range(content.get("num_labels", 2)))  # transformers' default is two
        if labels != 1:
            text = f"config.json has {labels} labels (id2label), and a reward model gives one number"
            yield Fault((key,), f"{key}={folder}: {text}.")


def _data(config: Config) -> Iterator[Fault]:
    column = config.data.prompt_key
    for key in ("train_files", "val_files"):
        files = getattr(config.data, key) or []
        total: int | None = 0
        for name in [files] if isinstance(files, str) else files:
            problem, rows = _data_file(name, column)
            if problem:
                yield Fault((f"data.{key}", "data.prompt_key"), f"data.{key}: {name}: {problem}.")
            total = None if rows is None or total is None else total + rows
        if key == "train_files" and files and total is not None and total < config.data.train_batch_size:
            keys = ("data.train_files", "data.train_batch_size")
            text = f"have {total} rows, less than one step's data.train_batch_size={config.data.train_batch_size}"
            yield Fault(keys, f"data.train_files {text}.")


def _data_file(name: str, column: str) -> tuple[str | None, int | None]:
    """What is wrong with one data file, and how many rows it has where that is cheap to know."""
    suffix = Path(name).suffix
    if suffix not in DATA_SUFFIXES:
        return f"must end in one of {', '.join(DATA_SUFFIXES)}", None
    if _is_remote(name):
        return None, None
    path = Path(name).expanduser()
    if not path.is_file():
        return f"there is no such file{_hint(name)}", None
    if path.stat().st_size == 0:
        return "is empty", None
    try:
        columns, rows = _parquet_columns(path) if suffix == ".parquet" else (_json_columns(path), None)
    except (OSError, ValueError) as error:
        return f"is not readable as {suffix[1:]}: {error}", None
    if column not in columns:
        return f"has no column {column!r} (data.prompt_key); it has {', '.join(sorted(columns))}", None
    return None, rows


def _parquet_columns(path: Path) -> tuple[list[str], int]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)  # reads the footer only
    return list(file.schema_arrow.names), file.metadata.num_rows


def _json_columns(path: Path) -> list[str]:
    """Keys of the first row of a json array, of a json object per line, or of jsonl."""
    size = HEAD_CHARACTERS
    while True:
        with path.open(encoding="utf-8") as file:
            head = file.read(size)
        try:
            row, _ = json.JSONDecoder().raw_decode(head.lstrip().removeprefix("[").lstrip())
            break
        except ValueError:
            if len(head) < size:  # that was the whole file
                raise
            size *= 8
    if not isinstance(row, dict):
        raise ValueError(f"the first row is a {type(row).__name__}, not an object")
    return list(row)


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
        if not _is_remote(path) and not Path(path).expanduser().is_dir():
            key = "trainer.resume_from_path"
            yield Fault((key,), f"{key}={path}: there is no such folder.")

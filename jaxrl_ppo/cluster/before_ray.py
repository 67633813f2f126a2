"""What the driver looks at in the run folder before Ray starts: whether another run has it, whether the run is over.

And what it can say afterwards of how to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_ppo.cluster.identity import check_identity, identity
from jaxrl_ppo.cluster.run_lock import LOCK, WAIT_S, run_lock
from jaxrl_ppo.data.columns import OPTIONAL_COLUMNS, RowReader
from jaxrl_ppo.data.fingerprint import check_same_data
from jaxrl_ppo.data.local import LocalCopyError, copy_to_local
from jaxrl_ppo.data.rows import FileRows
from jaxrl_ppo.data.tokenizer import hf_tokenizer
from jaxrl_ppo.pipeline.checkpoints import CheckpointError, Checkpoints, nothing_to_do
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.places import is_address
from jaxrl_ppo.schema.preflight import files_of


async def look_at_run_folder(config: Config, wait_s: float = WAIT_S) -> str | None:
    """What to tell where there is nothing to do, else None. Nothing is kept: the run itself looks at both again.

    Raises CheckpointError when another run has the folder after `wait_s`, or when what is to be resumed is not there.
    """
    root = Path(config.trainer.default_local_dir).absolute()
    if (root / LOCK).exists():  # else no run has been here
        async with run_lock(root, wait_s):
            pass
    resumed = Checkpoints(root, keep=None).to_resume(config.trainer.resume_mode, config.trainer.resume_from_path)
    steps = most_steps(config) if resumed else None
    if resumed is None or steps is None:
        return None
    return nothing_to_do(config.trainer, resumed, Checkpoints.step_of(resumed), steps)


def what_resumes(config: Config) -> str | None:
    """The checkpoint that a run would go on from, in a line, None where it would start at step 1.

    Raises CheckpointError or DataError where the run would refuse it: for another model, vocabulary, mode or files.
    What is not on this machine is not compared. Starts nothing.
    """
    trainer, model = config.trainer, config.actor_rollout_ref.model
    root = Path(trainer.default_local_dir).absolute()
    resumed = Checkpoints(root, keep=None).to_resume(trainer.resume_mode, trainer.resume_from_path)
    if resumed is None:
        return None
    step, steps = Checkpoints.step_of(resumed), most_steps(config)
    if steps is not None and (told := nothing_to_do(trainer, resumed, step, steps)):
        return told
    controller = Checkpoints.load(resumed)
    check_mode(controller, config, str(resumed))
    files, unseen = files_of(config.data.train_files), []
    if config.data.custom_cls.path or any(map(is_address, files)):
        unseen.append("the data")
    else:
        rows = FileRows(files, RowReader(config.data).columns, OPTIONAL_COLUMNS, "data.train_files")
        current = {"sources": rows.fingerprint(), "data.train_batch_size": config.data.train_batch_size}
        check_same_data({key: controller["prompts"]["data"].get(key) for key in current}, current)
    try:
        folder = copy_to_local(str(model.path), fetch=False)
        tokenizer = hf_tokenizer(
            model.tokenizer_path or folder,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
        )
    except LocalCopyError:
        unseen.append("the model")
    else:
        check_identity(controller["identity"], identity(folder, tokenizer))
    left = f" ({' and '.join(unseen)}: not here to be compared with the checkpoint's)" if unseen else ""
    return f"a run would go on after step {step}: {resumed}{left}"


def check_mode(controller: Mapping[str, Any], config: Config, resumed: str) -> None:
    """Raise CheckpointError when another mode would lose the samples that are in a checkpoint's part `controller`."""
    if controller["pending"] is not None and controller["mode"] != config.trainer.mode:
        raise CheckpointError(
            f"{resumed} holds samples that trainer.mode={controller['mode']} had generated ahead, and "
            f"trainer.mode={config.trainer.mode} would lose them: resume in the mode it was made in"
        )


def most_steps(config: Config) -> int | None:
    """The steps of the whole run, fewer only where prompts will be left out; None where the run itself has to find out.

    Raises DataError for a data file that cannot be read.
    """
    trainer, data, files = config.trainer, config.data, files_of(config.data.train_files)
    if trainer.total_training_steps:
        return trainer.total_training_steps
    if data.custom_cls.path or data.sampler.class_path or any(map(is_address, files)):
        return None
    rows = len(FileRows(files, RowReader(data).columns, OPTIONAL_COLUMNS, "data.train_files"))
    if 0 < data.train_max_samples < rows:
        rows = data.train_max_samples
    return rows // data.train_batch_size * trainer.total_epochs


def going_on(config: Config) -> str:
    """What the same command will do, in words, by what the run folder holds."""
    folder = Path(config.trainer.default_local_dir)
    step = Checkpoints(folder, keep=None).newest() if folder.is_dir() else None
    if step is None or config.trainer.resume_mode == "disable":
        return f"the same command starts again at step 1: there is no checkpoint to go on from in {folder}"
    return f"the same command goes on after step {step} ({folder})"


def then_what(failure: str, config: Config) -> str:
    """What the driver says of a run that failed: why, and what the same command will do."""
    return f"{failure}\nonce that is mended, {going_on(config)}"

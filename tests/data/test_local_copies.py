"""Copies of remote files and folders, the hub's refusal, and tokenizers of good and bad folders."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import fsspec
import pytest
from PIL import Image
from row_files import row, write_rows

from jaxrl_ppo.data.local import LocalCopyError, cache_folder, copy_to_local
from jaxrl_ppo.data.tokenizer import TokenizerError, hf_processor, hf_tokenizer


def test_local_paths_stay(tmp_path):
    assert copy_to_local(tmp_path) == tmp_path
    assert copy_to_local(f"file://{tmp_path}") == tmp_path
    for path in (f"{tmp_path}/none", f"file://{tmp_path}/none", "./none/at/all"):
        with pytest.raises(LocalCopyError, match="no such file or folder"):
            copy_to_local(path)


def test_a_url_is_copied_once_and_again_when_it_changes(tmp_path, monkeypatch):
    from jaxrl_ppo.data import local

    fetched = []
    real = local._fetch
    monkeypatch.setattr(local, "_fetch", lambda *args: fetched.append(1) or real(*args))
    remote = fsspec.filesystem("memory")
    remote.pipe_file("/models/a/config.json", b"{}")
    remote.pipe_file("/models/a/deep/b.bin", b"123")
    folder = copy_to_local("memory://models/a")
    assert (folder.name, (folder / "config.json").read_text(), (folder / "deep/b.bin").read_bytes()) == (
        "a",
        "{}",
        b"123",
    )
    assert copy_to_local("memory://models/a") == folder
    assert len(fetched) == 1
    file = copy_to_local("memory://models/a/deep/b.bin")
    assert file.is_file()
    assert file.read_bytes() == b"123"
    remote.pipe_file("/models/a/config.json", b'{"new": 1}')
    assert json.loads((copy_to_local("memory://models/a/") / "config.json").read_text()) == {"new": 1}
    assert len(fetched) == 3
    with pytest.raises(LocalCopyError, match="memory://models/none: no such file or folder"):
        copy_to_local("memory://models/none")
    with pytest.raises(LocalCopyError, match="nosuchprotocol://x"):
        copy_to_local("nosuchprotocol://x")


def test_an_interrupted_copy_is_made_anew(tmp_path, monkeypatch):
    from jaxrl_ppo.data import local

    fsspec.filesystem("memory").pipe_file("/half/a.json", b"whole")
    real = local._fetch

    def interrupted(fs, remote, target, listing):
        target.write_bytes(b"wh")
        raise OSError("connection lost")

    monkeypatch.setattr(local, "_fetch", interrupted)
    with pytest.raises(LocalCopyError, match="connection lost"):
        copy_to_local("memory://half/a.json")
    assert list(cache_folder().rglob(".partial-*"))
    monkeypatch.setattr(local, "_fetch", real)
    assert copy_to_local("memory://half/a.json").read_bytes() == b"whole"
    assert not list(cache_folder().rglob(".partial-*"))


def _copy_at_the_same_time(barrier, url, results):
    barrier.wait()
    path = copy_to_local(url)
    results.put((str(path), path.read_bytes() == b"x" * 3_000_000))


def test_concurrent_starts_copy_once(tmp_path, monkeypatch):
    source = tmp_path / "served" / "big.bin"
    source.parent.mkdir()
    source.write_bytes(b"x" * 3_000_000)
    # zip:: is a file system that every process can reach, unlike the memory one
    shutil.make_archive(str(tmp_path / "served"), "zip", source.parent)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    url = f"zip://big.bin::file://{tmp_path}/served.zip"
    processes = [context.Process(target=_copy_at_the_same_time, args=(barrier, url, results)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(answers) == 1
    assert answers.pop()[1]
    assert len(list(cache_folder().rglob("*big.bin*"))) == 1


def test_a_hub_id_that_cannot_be_had(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        LocalCopyError,
        match=r"^a\.b=nobody/no-such-model: no such folder here, and not found on the Hugging Face Hub: ",
    ):
        copy_to_local("nobody/no-such-model", key="a.b")


def test_tokenizer_from_a_url(model_folder, tokenizer):
    fsspec.filesystem("memory").put(str(model_folder), "/hub/tiny", recursive=True)
    remote = hf_tokenizer("memory://hub/tiny")
    assert remote("What is 3?")["input_ids"] == tokenizer("What is 3?")["input_ids"]
    assert remote.pad_token_id == remote.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_bad_tokenizer_folders(tmp_path, model_folder):
    with pytest.raises(TokenizerError, match="no tokenizer there"):
        hf_tokenizer(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="broken: its tokenizer cannot be loaded"):
        hf_tokenizer(broken)
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare)
    (bare / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(TokenizerError, match=r"no chat template; give one with actor_rollout_ref\.model\.custom_chat"):
        hf_tokenizer(bare)
    assert hf_tokenizer(bare, custom_chat_template="{{ messages[0].content }}").chat_template
    with pytest.raises(TokenizerError, match=r"'nowhere\.jinja' is neither a Jinja template nor a file"):
        hf_tokenizer(model_folder, custom_chat_template="nowhere.jinja")


def test_processor_of_a_text_model_is_none_and_of_a_multimodal_one_is_not(tmp_path, model_folder):
    assert hf_processor(model_folder) is None
    folder = tmp_path / "vision"
    folder.mkdir()
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessorPil", "size": {"shortest_edge": 4}, "crop_size": 4})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "clip_vision_model"}))
    processor = hf_processor(folder)
    assert processor(Image.new("RGB", (8, 8)), return_tensors="np")["pixel_values"].shape == (1, 3, 4, 4)


def test_importing_the_data_part_starts_no_device():
    code = (
        "import sys, jaxrl_ppo.data; assert 'jax' not in sys.modules; from jaxrl_ppo.data import PromptStream;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_rows_with_a_missing_local_file_name_the_key(tmp_path, tokenizer, data_config):
    from jaxrl_ppo.data.dataset import create_rl_dataset
    from jaxrl_ppo.data.rows import DataError

    write_rows(tmp_path / "a.jsonl", [row(0)])
    with pytest.raises(DataError, match=r"data\.val_files: there is no file .*b\.jsonl"):
        create_rl_dataset([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"], data_config(), tokenizer, is_train=False)


def test_two_chat_templates_that_differ_are_refused(tmp_path, model_folder):
    folder = tmp_path / "two"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    own = folder / "chat_template.jinja"
    own.write_text(config["chat_template"] + "\n")  # an end of line is no difference
    assert hf_tokenizer(folder).chat_template
    own.write_text("{{ messages[0].content }}!")
    with pytest.raises(
        TokenizerError, match=r"chat_template\.jinja and the chat_template in tokenizer_config\.json are"
    ):
        hf_tokenizer(folder)
    assert hf_tokenizer(folder, custom_chat_template=str(own)).chat_template == "{{ messages[0].content }}!"
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert hf_tokenizer(folder).chat_template

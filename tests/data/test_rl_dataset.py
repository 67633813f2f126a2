"""The data set: files and rows into prompts, length handling, the survey's cache, and every way input can be bad."""

import json
import re
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_files import row, write_rows

from jaxrl_ppo.data import dataset as dataset_module
from jaxrl_ppo.data import survey as survey_module
from jaxrl_ppo.data.dataset import create_rl_dataset
from jaxrl_ppo.data.rows import DataError
from jaxrl_ppo.data.tokenizer import hf_tokenizer
from jaxrl_ppo.schema.config import CustomClassConfig
from jaxrl_ppo.user_code import UserCodeError


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl"])
def test_prompts_equal_the_tokenizers_own_rendering(tmp_path, tokenizer, data_config, suffix):
    rows = [row(i) for i in range(5)] + [row(5, "naïve “quotes” 数学 \U0001f642\nsecond line")]
    rows[2]["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    data = create_rl_dataset(write_rows(tmp_path / f"a.{suffix}", rows), data_config(), tokenizer)
    assert len(data) == 6
    assert data.data_sources == {"arithmetic"}
    for index, source in enumerate(rows):
        prompt = data[index]
        expected = tokenizer.apply_chat_template(source["prompt"], add_generation_prompt=True, return_dict=False)
        assert list(prompt.token_ids) == expected
        assert prompt.messages == source["prompt"]
        assert (prompt.ordinal, prompt.data_source) == (index, "arithmetic")
        assert prompt.ground_truth == str(2 * index)
        assert prompt.extra_info == {"index": index}


def test_template_arguments_reach_the_template(tmp_path, model_folder, data_config):
    from jaxrl_ppo.data.tokenizer import hf_tokenizer

    template = tmp_path / "own.jinja"
    template.write_text(
        "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}{% if x %}{{ x }}{% endif %}"
    )
    path = write_rows(tmp_path / "a.jsonl", [row(0, "hello")])
    own = hf_tokenizer(model_folder, custom_chat_template=str(template))
    config = data_config(apply_chat_template_kwargs={"enable_thinking": True, "x": "!"})
    assert own.decode(create_rl_dataset(path, config, own)[0].token_ids) == "hello think!"
    inline = hf_tokenizer(model_folder, custom_chat_template="{{ messages[0].content }}?")
    assert inline.decode(create_rl_dataset(path, data_config(), inline)[0].token_ids) == "hello?"


@pytest.mark.parametrize(("truncation", "kept"), [("left", "last"), ("right", "first"), ("middle", "both")])
def test_truncation(tmp_path, tokenizer, data_config, truncation, kept):
    path = write_rows(tmp_path / "a.jsonl", [row(0, "the quick brown fox jumps " * 9)])
    whole = create_rl_dataset(path, data_config(max_prompt_length=500), tokenizer)[0].token_ids
    ids = create_rl_dataset(path, data_config(max_prompt_length=21, truncation=truncation), tokenizer)[0].token_ids
    assert len(whole) > 21
    expected = {"last": whole[-21:], "first": whole[:21], "both": whole[:10] + whole[-11:]}[kept]
    assert ids == expected


def test_overlong_prompts_are_dropped_in_one_process_or_two(tmp_path, tokenizer, data_config, monkeypatch):
    monkeypatch.setattr(survey_module, "BATCH", 16)
    rows = [row(i, "fox " * (i % 7) * 5) if i % 7 else row(i) for i in range(64)]
    files = [
        write_rows(tmp_path / "a.parquet", rows[:40], row_group_size=9),
        write_rows(tmp_path / "b.jsonl", rows[40:]),
    ]
    lengths = [
        len(tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False)) for r in rows
    ]
    limit = int(np.median(lengths))
    expected = [i for i, length in enumerate(lengths) if length <= limit]
    assert 0 < len(expected) < 64
    for workers in (2, 1):
        monkeypatch.setenv("JAXRL_PPO_CACHE", str(tmp_path / f"cache{workers}"))
        config = data_config(
            max_prompt_length=limit, filter_overlong_prompts=True, filter_overlong_prompts_workers=workers
        )
        data = create_rl_dataset(files, config, tokenizer)
        assert [data[i].extra_info["index"] for i in range(len(data))] == expected
        assert data.block_sizes.sum() == len(expected)


def test_the_survey_is_cached_until_something_changes(tmp_path, tokenizer, data_config, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(6)])
    calls = []
    real = survey_module._survey
    monkeypatch.setattr(survey_module, "_survey", lambda *args: calls.append(1) or real(*args))

    def made(**keys):
        calls.clear()
        create_rl_dataset(path, data_config(**keys), tokenizer)
        return bool(calls)

    assert made()
    assert not made()
    assert not made(max_prompt_length=100)  # lengths are before truncation
    assert made(apply_chat_template_kwargs={"enable_thinking": False})
    assert made(train_max_samples=3)
    assert not made()
    time.sleep(0.01)
    write_rows(tmp_path / "a.jsonl", [row(i, "other") for i in range(6)])
    assert made()


def test_max_samples(tmp_path, tokenizer, data_config):
    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(30)])

    def taken(**keys):
        data = create_rl_dataset(path, data_config(**keys), tokenizer, is_train="train_max_samples" in keys)
        return [data[i].extra_info["index"] for i in range(len(data))]

    assert taken(train_max_samples=5, shuffle=False) == [0, 1, 2, 3, 4]
    assert taken(val_max_samples=4) == [0, 1, 2, 3]
    some = taken(train_max_samples=5)
    assert len(set(some)) == 5
    assert some != [0, 1, 2, 3, 4]
    assert some == taken(train_max_samples=5) != taken(train_max_samples=5, seed=9)
    assert taken(train_max_samples=-1) == taken(train_max_samples=99) == list(range(30))


def test_optional_columns_may_be_missing_and_others_are_not_read(tmp_path, tokenizer, data_config):
    bare = {"data_source": "x", "question": [{"role": "user", "content": "hello"}], "image": b"\x00" * 1000}
    pq.write_table(pa.Table.from_pylist([bare]), tmp_path / "a.parquet")
    data = create_rl_dataset(str(tmp_path / "a.parquet"), data_config(prompt_key="question"), tokenizer)
    assert (data[0].ground_truth, data[0].extra_info) == (None, {})
    assert set(data._rows.row(0)) == {"question", "data_source"}


def test_messages_lose_the_keys_that_parquet_fills_in(tmp_path, tokenizer, data_config):
    rows = [row(0), row(1)]
    rows[1]["prompt"][0]["name"] = "Ann"
    data = create_rl_dataset(write_rows(tmp_path / "a.parquet", rows), data_config(), tokenizer)
    assert data[0].messages == [{"role": "user", "content": "What is 0 + 0?"}]
    assert data[1].messages[0]["name"] == "Ann"


def test_remote_files(tmp_path, tokenizer, data_config):
    import fsspec

    local = write_rows(tmp_path / "a.parquet", [row(i) for i in range(4)])
    fsspec.filesystem("memory").put_file(local, "/bucket/train.parquet")
    data = create_rl_dataset(["memory://bucket/train.parquet"], data_config(), tokenizer)
    assert data[3].extra_info == {"index": 3}
    with pytest.raises(DataError, match=r"data\.train_files: memory://bucket/other\.parquet: no such file"):
        create_rl_dataset("memory://bucket/other.parquet", data_config(), tokenizer)


def test_own_dataset_class(tmp_path, tokenizer, data_config):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, data_files, tokenizer, processor, config): self.files = data_files\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, i):\n"
        "        return {'data_source': self.files, 'prompt': [{'role': 'user', 'content': f'row {i}'}]}\n"
        "class Texts(Mine):\n"
        "    def __getitem__(self, i): return 'text'\n"
        "Nothing = lambda **kwargs: 3\n"
    )

    def made(name, **keys):
        return create_rl_dataset(
            "some.db", data_config(custom_cls=CustomClassConfig(path=str(file), name=name), **keys), tokenizer
        )

    assert [made("Mine")[i].messages[0]["content"] for i in range(3)] == ["row 0", "row 1", "row 2"]
    assert made("Mine")[0].data_source == "some.db"
    with pytest.raises(DataError, match=r"Texts, row 0 \(counted from 0\): the class returned str, not a dict"):
        made("Texts")
    with pytest.raises(UserCodeError, match="needs __len__ and __getitem__"):
        made("Nothing")
    with pytest.raises(UserCodeError, match=r"data\.custom_cls needs both path and name"):
        made(None)


BAD_ROWS = [
    (row(1, ""), "line 2: the prompt is empty: none of its messages"),
    (row(1, "  \n"), "line 2: the prompt is empty: none of its messages"),
    ({**row(1), "prompt": []}, "line 2: the prompt is empty"),
    ({**row(1), "prompt": None}, "line 2: the prompt is empty"),
    ({**row(1), "prompt": "What is 1 + 1?"}, "must be a list of {role, content} messages.* not str 'What is 1"),
    ({**row(1), "prompt": ["What?"]}, "must be a list of {role, content} messages"),
    ({**row(1), "prompt": [{"content": "What?"}]}, "line 2.*: a message of the prompt has no role"),
    ({**row(1), "data_source": None}, r"column 'data_source' \(data.reward_fn_key\) must be text, not NoneType"),
    ({**row(1), "reward_model": "4"}, "column 'reward_model' must be a mapping, not str '4'"),
    ({**row(1), "extra_info": [1]}, "column 'extra_info' must be a mapping, not list"),
    ({k: v for k, v in row(1).items() if k != "prompt"}, r"line 2.*: no column 'prompt' \(data.prompt_key\); it has"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS)
def test_bad_rows_are_named(tmp_path, tokenizer, data_config, bad, message):
    path = write_rows(tmp_path / "a.jsonl", [row(0), bad])
    with pytest.raises(DataError, match=rf"a\.jsonl, {message}" if message.startswith("line") else message) as caught:
        create_rl_dataset(path, data_config(), tokenizer)
    assert "a.jsonl, line 2" in str(caught.value)


def test_bad_row_of_the_second_file_is_named(tmp_path, tokenizer, data_config):
    files = [write_rows(tmp_path / f"{n}.parquet", [row(0), row(1, t), row(2)]) for n, t in (("a", "x"), ("b", ""))]
    with pytest.raises(DataError, match=r"b\.parquet, row 1 \(counted from 0\): the prompt is empty"):
        create_rl_dataset(files, data_config(), tokenizer)


def test_overlong_prompt_is_an_error_by_default(tmp_path, tokenizer, data_config):
    path = write_rows(tmp_path / "a.parquet", [row(0), row(1, "fox " * 40), row(2, "fox " * 50)])
    with pytest.raises(DataError) as caught:
        create_rl_dataset(path, data_config(max_prompt_length=30), tokenizer)
    lengths = create_rl_dataset(path, data_config(max_prompt_length=999), tokenizer)
    message = str(caught.value)
    assert "2 of 3 prompts are longer than data.max_prompt_length=30" in message
    assert f"a.parquet, row 1 (counted from 0), {len(lengths[1].token_ids)} tokens; the longest: " in message
    assert f"the longest: {len(lengths[2].token_ids)}." in message


def test_overlong_prompt_of_a_large_set_is_named_when_met(tmp_path, tokenizer, data_config, monkeypatch):
    monkeypatch.setattr(dataset_module, "SURVEY_ROWS", 2)
    path = write_rows(tmp_path / "a.parquet", [row(0), row(1, "fox " * 40), row(2)])
    data = create_rl_dataset(path, data_config(max_prompt_length=30), tokenizer)
    assert data[0].token_ids
    with pytest.raises(
        DataError,
        match=r"a\.parquet, row 1 \(counted from 0\): the prompt has \d+ tokens, data\.max_prompt_length is 30",
    ):
        data[1]


def test_nothing_left_after_the_filter(tmp_path, tokenizer, data_config):
    path = write_rows(tmp_path / "a.parquet", [row(0, "fox " * 30), row(1, "fox " * 40)])
    with pytest.raises(
        DataError, match=r"data\.train_files: no rows left: all 2 prompts .*/a\.parquet are longer .*shortest has \d+"
    ):
        create_rl_dataset(path, data_config(max_prompt_length=8, filter_overlong_prompts=True), tokenizer)


def test_template_that_refuses_a_prompt(tmp_path, model_folder, data_config):
    from jaxrl_ppo.data.tokenizer import hf_tokenizer

    strict = hf_tokenizer(
        model_folder,
        custom_chat_template="{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x",
    )
    rows = [row(0), row(1)]
    rows[1]["prompt"][0]["role"] = "system"
    with pytest.raises(DataError, match=r"line 2: the chat template refuses the prompt: TemplateError: user first"):
        create_rl_dataset(write_rows(tmp_path / "a.jsonl", rows), data_config(), strict)


def test_bad_files(tmp_path, tokenizer, data_config):
    def message(files, **keys):
        with pytest.raises(DataError) as caught:
            create_rl_dataset(files, data_config(**keys), tokenizer)
        return str(caught.value)

    good = write_rows(tmp_path / "good.parquet", [row(0)])
    assert f"data.train_files: there is no file {tmp_path}/none.parquet" == message([good, f"{tmp_path}/none.parquet"])
    assert "(it is a folder)" in message(str(tmp_path))
    assert "data.train_files is empty" in message([])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really PAR1")
    assert "bad.parquet: not a readable parquet file" in message(str(tmp_path / "bad.parquet"))
    (tmp_path / "data.csv").write_text("a,b\n")
    assert "the suffix .csv is none of .parquet, .json, .jsonl" in message(str(tmp_path / "data.csv"))
    (tmp_path / "bad.json").write_text('[{"prompt": ]')
    assert "bad.json: not valid JSON: Expecting value: line 1 column 13" in message(str(tmp_path / "bad.json"))
    (tmp_path / "list.json").write_text("[1, 2]")
    assert "list.json, row 0 (counted from 0): a int, not an object" in message(str(tmp_path / "list.json"))
    (tmp_path / "bad.jsonl").write_text(json.dumps(row(0)) + "\n\n{oops\n")
    assert "bad.jsonl, line 3: not valid JSON" in message(str(tmp_path / "bad.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    assert f"data.train_files: {tmp_path}/empty.jsonl has no rows" in message(str(tmp_path / "empty.jsonl"))
    assert "empty.json has no rows" in message([good, write_rows(tmp_path / "empty.json", [])])
    missing = message(good, prompt_key="question")
    assert "good.parquet: no column 'question'; it has 'data_source', 'prompt', 'ability'" in missing
    assert "no column 'task'" in message(write_rows(tmp_path / "good.json", [row(0)]), reward_fn_key="task")


def test_parquet_damaged_inside(tmp_path, tokenizer, data_config):
    path = tmp_path / "a.parquet"
    write_rows(path, [row(i, f"unique text {i} " * 20) for i in range(200)], compression="zstd", row_group_size=50)
    content = bytearray(path.read_bytes())
    middle = pq.ParquetFile(path).metadata.row_group(2).column(1).data_page_offset
    content[middle : middle + 400] = b"\xff" * 400
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: row group 2 is damaged"):
        create_rl_dataset(str(path), data_config(max_prompt_length=2000), tokenizer)


def test_jsonl_with_blank_lines_crlf_and_no_final_newline(tmp_path, tokenizer, data_config):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row(i)) for i in range(3)]
    path.write_bytes(("\n" + lines[0] + "\r\n\r\n" + lines[1] + "\n   \n" + lines[2]).encode())
    data = create_rl_dataset(str(path), data_config(), tokenizer)
    assert [data[i].extra_info["index"] for i in range(len(data))] == [0, 1, 2]
    # .json files hold one object a line as well
    (tmp_path / "b.json").write_bytes(path.read_bytes())
    assert len(create_rl_dataset(str(tmp_path / "b.json"), data_config(), tokenizer)) == 3


def test_system_prompt_and_tools_in_the_prompt(tmp_path, tokenizer, data_config):
    """Shown where the template has no place for tools: at the end of the system message, in the Hermes format."""
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "x"}]
    rows = [row(0), row(1, prompt=own), row(2, agent_name="single_turn_agent"), row(3, agent_name="mine")]
    path = write_rows(tmp_path / "a.jsonl", rows)
    tools = [{"type": "function", "function": {"name": "add"}}]
    config = data_config(system_prompt="Be brief.", max_prompt_length=600)
    data = create_rl_dataset(path, config, tokenizer, tools=tools)
    texts = [tokenizer.decode(data[i].token_ids) for i in range(4)]
    assert texts[0].startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions:\n<tools>\n")
    assert json.dumps(tools[0]) in texts[0]
    assert texts[1].startswith("<|im_start|>system\nOwn.\n\nYou can call")
    assert texts[2].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert [data[i].agent_name for i in range(4)] == [None, None, "single_turn_agent", "mine"]
    assert data.agent_names == {"single_turn_agent", "mine"}
    assert data[1].messages == own  # what the row said
    without = create_rl_dataset(path, data_config(max_prompt_length=600), tokenizer)
    assert tokenizer.decode(without[0].token_ids).startswith("<|im_start|>user")


def test_tools_go_where_the_template_has_a_place_for_them(tmp_path, model_folder, data_config):
    template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[-1].content }}"
    tokenizer = hf_tokenizer(model_folder, custom_chat_template=template)
    path = write_rows(tmp_path / "a.jsonl", [row(0, "hi"), row(1, "ho", agent_name="single_turn_agent")])
    tools = [{"type": "function", "function": {"name": "add"}}]
    data = create_rl_dataset(path, data_config(), tokenizer, tools=tools)
    assert [tokenizer.decode(data[i].token_ids) for i in range(2)] == ["[add]hi", "ho"]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row(0), row(1, agent_name=3)], r"a\.jsonl, line 2: column 'agent_name' must be text, not int 3"),
        ([row(0), row(1, data_source=None)], r"line 2: column 'data_source'"),
        ([{"text": "x"}], r"a\.jsonl: no column 'prompt', 'data_source'"),
    ],
)
def test_messages_name_the_key(tmp_path, tokenizer, data_config, rows, told):
    path = write_rows(tmp_path / "a.jsonl", rows)
    for key, is_train in (("data.train_files", True), ("data.val_files", False)):
        with pytest.raises(DataError, match=f"^{re.escape(key)}: .*{told}"):
            create_rl_dataset(path, data_config(), tokenizer, is_train=is_train)

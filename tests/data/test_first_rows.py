"""What a start sees in the first rows: prompts that are too long, bad rows, what faults of keys leave to look at."""

import pytest
from row_files import row, write_rows

from jaxrl_ppo import first_rows
from jaxrl_ppo.data.quick_tokenizer import QuickTokenizer
from jaxrl_ppo.data.tokenizer import hf_tokenizer
from jaxrl_ppo.first_rows import look_at_rows
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault

LONG = "fox " * 40


@pytest.fixture
def config(model_folder):
    def make(train, val=None, **keys):
        made = Config()
        made.actor_rollout_ref.model.path = str(model_folder)
        made.data.train_files, made.data.val_files = train, val
        for name, value in {"max_prompt_length": 30, **keys}.items():
            setattr(made.data, name, value)
        return made

    return make


def length(tokenizer, text):
    messages = [{"role": "user", "content": text}]
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def looked(config, known=()):
    found = look_at_rows(config, known, fetch=False)
    return [fault.message for fault in found.faults], found


@pytest.mark.parametrize(
    "template", [None, "{{ bos_token }}{% for tool in tools or [] %}{{ tool }}{% endfor %}{{ x }}!"]
)
def test_the_quick_tokenizer_counts_as_the_models_own(model_folder, template):
    quick = QuickTokenizer(model_folder, template)
    own = hf_tokenizer(model_folder, custom_chat_template=template)
    for tools in (None, [{"type": "function", "function": {"name": "add"}}]):
        texts = [
            made.apply_chat_template(row(3)["prompt"], tools=tools, tokenize=False, add_generation_prompt=True, x="é")
            for made in (quick, own)
        ]
        assert texts[0] == texts[1]
        assert quick(texts, add_special_tokens=False)["input_ids"] == own(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("filters", [True, False])
def test_prompts_that_are_all_too_long_are_a_fault(tmp_path, tokenizer, config, filters):
    path = write_rows(tmp_path / "a.parquet", [row(0, LONG), row(1, LONG + LONG)])
    (fault,), found = looked(config(path, filter_overlong_prompts=filters))
    assert fault.startswith("data.train_files: ")
    assert "data.max_prompt_length=30 tokens" in fault
    assert path in fault
    shortest, longest = length(tokenizer, LONG), length(tokenizer, LONG + LONG)
    told = "the shortest has {}, the longest {}" if filters else "the shortest: {}, the longest: {}"
    assert told.format(shortest, longest) in fault
    assert "Raise data.max_prompt_length" in fault
    assert looked(config(path, max_prompt_length=longest, filter_overlong_prompts=filters))[0] == []
    assert found.sources == {"arithmetic"}


@pytest.mark.parametrize(
    ("keys", "fate"),
    [({"filter_overlong_prompts": True}, "left out"), ({"truncation": "left"}, r"cut (data.truncation=left)")],
)
def test_some_that_are_too_long_are_noted_with_their_number(tmp_path, config, keys, fate):
    path = write_rows(tmp_path / "a.jsonl", [row(0), row(1, LONG), row(2, LONG)])
    faults, found = looked(config(path, val=path, **keys))
    assert faults == []
    assert [note.split(":")[0] for note in found.notes] == ["data.train_files", "data.val_files"]
    assert "2 of all 3 prompts are longer than data.max_prompt_length=30" in found.notes[0]
    assert fate in found.notes[0]


def test_a_run_that_would_leave_one_out_goes_on_when_it_is_an_error_by_chance_only(tmp_path, config):
    path = write_rows(tmp_path / "a.jsonl", [row(0), row(1, LONG)])
    assert len(looked(config(path))[0]) == 1
    faults, found = looked(config(path, train_max_samples=1))
    assert faults == []
    assert "an error when their turn comes" in found.notes[0]


def test_more_rows_are_looked_at_while_every_prompt_is_too_long(tmp_path, config, monkeypatch):
    monkeypatch.setattr(first_rows, "ROWS", 2)
    path = write_rows(tmp_path / "a.jsonl", [row(i, LONG) for i in range(5)] + [row(5), row(6), row(7)])
    faults, found = looked(config(path, filter_overlong_prompts=True))
    assert faults == []
    assert "5 of the first 6 prompts" in found.notes[0]


def test_rows_that_cannot_be_used_are_counted_and_the_first_few_named(tmp_path, config):
    empty = {**row(0), "prompt": []}
    path = write_rows(tmp_path / "a.jsonl", [row(0), *[empty] * 5])
    (fault,), _ = looked(config(path))
    named = "; ".join(f"{path}, line {number}: the prompt is empty" for number in (2, 3, 4))
    assert fault == f"data.train_files: 5 of the first 6 rows cannot be used: {named}; and 2 more."


def test_one_file_of_long_prompts_beside_another_is_no_fault(tmp_path, config):
    files = [write_rows(tmp_path / f"{n}.jsonl", [row(0, text)]) for n, text in (("a", LONG), ("b", "x"))]
    faults, found = looked(config(files, filter_overlong_prompts=True))
    assert faults == []
    assert len(found.notes) == 1


def test_what_a_faulty_key_does_not_touch_is_looked_at(tmp_path, config):
    bad = write_rows(tmp_path / "bad.jsonl", [row(0), row(1, prompt=[])])
    long = write_rows(tmp_path / "long.jsonl", [row(0, LONG)])
    made = config([bad, str(tmp_path / "gone.jsonl")], val=long)
    known = [
        Fault(("data.train_files",), f"{tmp_path / 'gone.jsonl'}: there is no such file"),
        Fault(("trainer",), "x"),
    ]
    faults, _ = looked(made, known)
    assert faults[0] == f"data.train_files: {bad}, line 2: the prompt is empty."
    assert faults[1].startswith("data.val_files: 1 of 1 prompts are longer")
    length_unknown = [*known, Fault(("data.max_prompt_length",), "x")]
    assert looked(made, length_unknown)[0] == faults[:1]
    assert looked(made, [Fault(("data.prompt_key",), "x")])[0] == []


def test_a_model_folder_without_a_tokenizer_is_a_fault(tmp_path, config):
    path = write_rows(tmp_path / "a.jsonl", [row(0)])
    made = config(path)
    (tmp_path / "bare").mkdir()
    made.actor_rollout_ref.model.path = str(tmp_path / "bare")
    (fault,), _ = looked(made)
    assert fault.startswith(f"actor_rollout_ref.model.path: {tmp_path / 'bare'}: no tokenizer there")
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    (tmp_path / "bare" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (fault,), _ = looked(made)
    assert "its tokenizer cannot be loaded" in fault

"""The stream: order, epochs, ordinals, and resume at any point, for every source, sampler and number of threads."""

import json
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_files import row, write_rows

from jaxrl_ppo.data.dataset import create_rl_dataset
from jaxrl_ppo.data.rows import DataError
from jaxrl_ppo.data.sampler import ShuffledOrder, create_rl_sampler
from jaxrl_ppo.data.stream import PromptStream
from jaxrl_ppo.schema.config import CustomClassConfig, DataConfig, SamplerConfig

SAMPLERS = '''
import random


class Skipping:
    """No state of its own: its order is the same each time."""

    def __init__(self, data_source, data_config):
        self.rows = len(data_source)

    def __len__(self):
        return self.rows

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(random.Random(self.epoch).sample(range(self.rows), self.rows))


class Curriculum:
    """Learns from results: rows with a low reward come more often."""

    def __init__(self, data_source, data_config):
        self.rows, self.given, self.random = len(data_source), 0, random.Random(7)
        self.weights = [1.0] * self.rows

    def __len__(self):
        return self.rows

    def __iter__(self):
        if self.given == self.rows:
            self.given = 0
        while self.given < self.rows:
            self.given += 1
            yield self.random.choices(range(self.rows), self.weights)[0]

    def update(self, prompts, samples):
        for prompt, sample in zip(prompts, samples):
            self.weights[prompt.extra_info["index"]] = 0.1 + sample

    def state_dict(self):
        return {"weights": list(self.weights), "given": self.given, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.weights, self.given = list(state["weights"]), state["given"]
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))
'''


@pytest.fixture
def user_sampler(tmp_path):
    file = tmp_path / "samplers.py"
    file.write_text(SAMPLERS)

    def named(name):
        return SamplerConfig(class_path=str(file), class_name=name)

    return named


def indices(prompts):
    return [prompt.extra_info["index"] for prompt in prompts]


class Rows:
    """A user's data set."""

    def __init__(self, data_files, tokenizer, processor, config):
        self.rows = [row(i) for i in range(22)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


CUSTOM = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_prompt_stream import Rows\n"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Every kind of source, of 22 rows: files as `data.train_files` names them, and further keys."""
    folder = tmp_path_factory.mktemp("sources")
    found = {}
    for suffix in ("parquet", "json", "jsonl"):
        first = write_rows(folder / f"a.{suffix}", [row(i) for i in range(13)])
        second = write_rows(folder / f"b.{suffix}", [row(i) for i in range(13, 22)])
        found[suffix] = ([first, second], {})
    many = {"row_group_size": 3}
    found["row groups"] = (write_rows(folder / "many.parquet", [row(i) for i in range(22)], **many), {})
    fsspec.filesystem("memory").put(str(folder / "many.parquet"), "/sources/many.parquet")
    found["remote"] = ("memory://sources/many.parquet", {})
    (folder / "rows.py").write_text(CUSTOM)
    found["class"] = ("anything", {"custom_cls": CustomClassConfig(path=str(folder / "rows.py"), name="Rows")})
    (folder / "samplers.py").write_text(SAMPLERS)
    return folder, found


def consume(stream, counts):
    """Take prompts in portions, and tell the sampler what became of each portion."""
    taken = []
    for count in counts:
        prompts = stream.take(count)
        stream.update(prompts, [prompt.ordinal % 3 for prompt in prompts])
        taken += prompts
    return taken


ORDERS = ["sequential", "shuffled", "mixed", "mixed shuffled", "Skipping", "Curriculum"]


@given(
    kind=st.sampled_from(["parquet", "json", "jsonl", "row groups", "remote", "class"]),
    order=st.sampled_from(ORDERS),
    threads=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 5),
    counts=st.lists(st.sampled_from([1, 2, 4, 4, 7, 20]), min_size=1, max_size=16),
    cut=st.integers(0, 16),
    ahead=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_n_and_resume_and_n_are_2n(sources, tokenizer, kind, order, threads, seed, counts, cut, ahead):
    """For every source, order and number of threads, cut anywhere, whatever was taken after the state."""
    folder, found = sources
    files, keys = found[kind]
    keys = keys | {"shuffle": "shuffled" in order, "seed": seed}
    if "mixed" in order and kind in ("parquet", "json", "jsonl"):
        keys["train_files_weights"] = [1.0, 2.5]
    if order[0].isupper():
        keys["sampler"] = SamplerConfig(class_path=str(folder / "samplers.py"), class_name=order)
    config = DataConfig(max_prompt_length=128, train_batch_size=4, **keys)

    def stream():
        data = create_rl_dataset(files, config, tokenizer)
        return PromptStream(data, create_rl_sampler(config, data), 4, read_ahead_threads=threads)

    whole = consume(stream(), counts)
    assert [prompt.ordinal for prompt in whole] == list(range(sum(counts)))
    first = stream()
    before = consume(first, counts[:cut])
    state = json.loads(json.dumps(first.state()))
    first.take(ahead)
    second = stream()
    second.restore(state)
    assert before + consume(second, counts[cut:]) == whole


@pytest.mark.parametrize("shuffle", [False, True])
def test_files_are_mixed_in_the_given_proportions(tmp_path, tokenizer, data_config, shuffle):
    """30 rows of one file and 10 of another, 1 : 3: an epoch of 40 has 10 of the first and each of the second 3 times,
    and three epochs have every row of the first once."""
    files = [
        write_rows(tmp_path / "long.jsonl", [row(i) for i in range(30)]),
        write_rows(tmp_path / "short.jsonl", [row(i) for i in range(30, 40)]),
    ]
    config = data_config(train_files_weights=[1.0, 3.0], shuffle=shuffle)
    data = create_rl_dataset(files, config, tokenizer)
    stream = PromptStream(data, create_rl_sampler(config, data), 4)
    epochs = [indices(stream.take(40)) for _ in range(3)]
    for epoch in epochs:
        assert sum(index < 30 for index in epoch) == 10
        assert [epoch.count(index) for index in range(30, 40)] == [3] * 10
        assert len({index < 30 for index in epoch[:12]}) == 2  # not one file after the other
    assert sorted(index for epoch in epochs for index in epoch if index < 30) == list(range(30))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = PromptStream(data, create_rl_sampler(data_config(train_files_weights=[1.0, 2.0]), data), 4)
    with pytest.raises(DataError, match=r"data\.train_files_weights was 3.0 and is 2.0"):
        other.restore(stream.state())
    with pytest.raises(DataError, match="has 1 numbers for 2 files"):
        create_rl_sampler(data_config(train_files_weights=[1.0]), data)


def test_resumes_exactly_at_an_epoch_boundary(tmp_path, tokenizer, data_config, user_sampler):
    files = write_rows(tmp_path / "a.parquet", [row(i) for i in range(10)])
    for name in ("Skipping", "Curriculum"):
        config = data_config(sampler=user_sampler(name))

        def stream(config=config):
            data = create_rl_dataset(files, config, tokenizer)
            return PromptStream(data, create_rl_sampler(config, data), 4)

        whole = stream().take(24)
        first = stream()
        first.take(8)  # an epoch: two batches of 4, two of the 10 rows left out
        second = stream()
        second.restore(first.state())
        assert second.take(16) == whole[8:]


def test_an_epoch_gives_each_row_once_in_whole_batches(tmp_path, tokenizer, data_config):
    config = data_config()
    data = create_rl_dataset(write_rows(tmp_path / "a.jsonl", [row(i) for i in range(11)]), config, tokenizer)
    stream = PromptStream(data, create_rl_sampler(config, data), 4)
    assert stream.steps_per_epoch == 2
    epochs = [indices(stream.take(2 * stream.batch_size)) for _ in range(6)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6  # a new order each time
    assert set().union(*epochs) == set(range(11))  # and not always the same rows left out


def test_order_depends_on_seed_and_epoch_alone(tmp_path, tokenizer, data_config):
    files = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(40)])

    def order(seed, threads=0):
        config = data_config(seed=seed)
        data = create_rl_dataset(files, config, tokenizer)
        return indices(PromptStream(data, create_rl_sampler(config, data), 8, read_ahead_threads=threads).take(80))

    assert order(3) == order(3, threads=4)
    assert order(3) != order(4)
    assert order(None) == order(1)
    # Stored once: a change of these numbers means that runs no longer resume across versions.
    assert order(3)[:10] == [8, 30, 36, 19, 5, 2, 11, 26, 10, 6]


def test_the_number_of_threads_may_change_on_resume(tmp_path, tokenizer, data_config):
    config = data_config()
    data = create_rl_dataset(write_rows(tmp_path / "a.jsonl", [row(i) for i in range(40)]), config, tokenizer)

    def stream(threads):
        return PromptStream(data, create_rl_sampler(config, data), 8, read_ahead_threads=threads)

    whole = stream(0).take(100)
    for before, after in ((3, 0), (0, 3), (1, 4)):
        first, second = stream(before), stream(after)
        assert first.take(37) == whole[:37]
        second.restore(first.state())
        assert second.take(63) == whole[37:]
        first.close()
        second.close()


def test_shuffle_over_windows_reads_every_block_once_an_epoch():
    sizes = np.array([5, 1, 7, 0, 3, 9, 4, 6])
    order = ShuffledOrder(sizes, window=3, seed=11)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    seen = set()
    for epoch in range(4):
        rows = [order.row(epoch, position) for position in range(len(order))]
        assert sorted(rows) == list(range(35))
        seen.add(tuple(rows))
        blocks = owner[rows]
        spans = [np.flatnonzero(blocks == block)[[0, -1]] for block in np.unique(blocks)]
        open_at_once = max(sum(a <= position <= b for a, b in spans) for position in range(35))
        assert open_at_once <= 3
    assert len(seen) == 4
    # any position can be asked for in any order
    assert order.row(1, 20) == [order.row(1, p) for p in range(35)][20]


def test_large_row_groups_are_read_one_window_at_a_time(tmp_path, tokenizer, data_config, monkeypatch):
    from jaxrl_ppo.data import rows as rows_module

    monkeypatch.setattr(rows_module, "BLOCK_MEMORY", 4000)
    path = write_rows(tmp_path / "a.parquet", [row(i) for i in range(200)], row_group_size=20)
    config = data_config()
    data = create_rl_dataset(path, config, tokenizer)
    assert 1 <= data.window < len(data.block_sizes) == 10
    stream = PromptStream(data, create_rl_sampler(config, data), 4)
    loads = []
    original = data._rows._blocks[:]
    for number, block in enumerate(original):

        def load(block=block, number=number):
            loads.append(number)
            return block.load()

        data._rows._blocks[number] = rows_module.dataclasses.replace(block, load=load)
    assert sorted(indices(stream.take(200))) == list(range(200))
    assert len(loads) <= 10 + data.window + 1  # those of the survey are still in memory
    assert len(data._rows._loaded) <= data.window + 1


def test_a_changed_data_set_is_named(tmp_path, tokenizer, data_config):
    files = [write_rows(tmp_path / f"{n}.jsonl", [row(i) for i in range(8)]) for n in "ab"]

    def stream(files, batch=4, **keys):
        config = data_config(**keys)
        data = create_rl_dataset(files, config, tokenizer)
        return PromptStream(data, create_rl_sampler(config, data), batch)

    state = stream(files).state()
    stream(files).restore(state)
    with pytest.raises(DataError, match="there were 2 files and are 1"):
        stream(files[:1]).restore(state)
    with pytest.raises(DataError, match=r"data\.train_batch_size was 4 and is 2"):
        stream(files, batch=2).restore(state)
    with pytest.raises(DataError, match=r"data\.seed was 1 and is 5"):
        stream(files, seed=5).restore(state)
    with pytest.raises(DataError, match="order was shuffled and is sequential"):
        stream(files, shuffle=False).restore(state)
    write_rows(tmp_path / "b.jsonl", [row(i) for i in range(1, 9)])
    with pytest.raises(DataError, match=r"b\.jsonl ends was"):
        stream(files).restore(state)


def test_batch_larger_than_the_data(tmp_path, tokenizer, data_config):
    config = data_config()
    data = create_rl_dataset(write_rows(tmp_path / "a.jsonl", [row(i) for i in range(3)]), config, tokenizer)
    with pytest.raises(DataError, match=r"data\.train_batch_size=4 is more than the 3 rows"):
        PromptStream(data, create_rl_sampler(config, data), 4)


def test_a_bad_row_met_while_reading_ahead_is_named(tmp_path, tokenizer, data_config, monkeypatch):
    from jaxrl_ppo.data import dataset

    monkeypatch.setattr(dataset, "SURVEY_ROWS", 10)
    path = write_rows(tmp_path / "a.jsonl", [row(i, "" if i == 9 else None) for i in range(20)])
    config = data_config(shuffle=False)
    for threads in (0, 2):
        data = create_rl_dataset(path, config, tokenizer)
        assert data.data_sources is None
        stream = PromptStream(data, create_rl_sampler(config, data), 4, read_ahead_threads=threads)
        stream.take(8)
        with pytest.raises(DataError, match=r"a\.jsonl, line 10: the prompt is empty"):
            stream.take(4)
        stream.close()


def test_user_samplers_that_do_not_keep_their_word(tmp_path, tokenizer, data_config):
    file = tmp_path / "samplers.py"
    file.write_text(
        "class Base:\n    def __init__(self, data_source, data_config): self.n = len(data_source)\n"
        "    def __len__(self): return self.n\n"
        "class Short(Base):\n    def __iter__(self): return iter(range(2))\n"
        "class Wild(Base):\n    def __iter__(self): return iter(range(5, 99))\n"
        "class NoIter(Base):\n    pass\n"
        "class Failing(Base):\n    def __iter__(self): yield self.rows\n"
        "class Unbuilt(Base):\n    def __init__(self, data_source, data_config): self.n = data_source.rows\n"
    )
    from jaxrl_ppo.user_code import UserCodeError

    path = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(8)])

    def stream(name):
        config = data_config(sampler=SamplerConfig(class_path=str(file), class_name=name))
        data = create_rl_dataset(path, config, tokenizer)
        return PromptStream(data, create_rl_sampler(config, data), 4)

    with pytest.raises(DataError, match="Short gave 2 rows in epoch 0, its length is 8"):
        stream("Short").take(4)
    with pytest.raises(DataError, match="Wild gave row 8; there are rows 0 to 7"):
        stream("Wild").take(4)
    with pytest.raises(UserCodeError, match=r"NoIter in .* needs __len__ and __iter__"):
        stream("NoIter")
    for name, line in {"Failing": 11, "Unbuilt": 13}.items():
        with pytest.raises(
            UserCodeError, match=rf"data.sampler: AttributeError: .*'\w+' .*samplers\.py, line {line}\)"
        ):
            stream(name)
    with pytest.raises(
        UserCodeError, match=r"has no 'Missing'; what it defines: Base, Failing, NoIter, Short, Unbuilt, Wild"
    ):
        stream("Missing")

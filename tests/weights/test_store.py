"""The weight store and its reader: round trips, atomic commits, crashes, corruption, full file systems."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxrl_ppo.weights import store as store_module
from jaxrl_ppo.weights.manifest import WeightError, WeightManifest
from jaxrl_ppo.weights.reader import read_tensors
from jaxrl_ppo.weights.store import StoreFullError, WeightStore, choose_root


@pytest.fixture
def store(tmp_path):
    store = WeightStore(tmp_path / "store")
    yield store
    store.close()


def tensors(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    names = ["model.layers.10.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"]
    return {name: rng.normal(size=(3, 5)).astype(dtype) for name in names}


def write(store, version, values):
    store.begin(version)
    for name, value in values.items():
        store.put(version, {name: value})
    return store.commit(version)


def flip_byte(path, offset=-1):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_round_trip_is_bit_identical_and_ordered_by_layer(store, dtype):
    values = tensors(0, dtype)
    manifest = write(store, 7, values)
    read = dict(read_tensors(manifest))
    assert list(read) == sorted(values, key=lambda name: (["embed" not in name, "10" in name]))
    for name, value in values.items():
        assert read[name].dtype == value.dtype
        assert read[name].tobytes() == value.tobytes()
    assert (manifest.version, store.latest()) == (7, manifest)


def test_files_are_safetensors_and_views_of_memory_are_stored_as_they_read(store):
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    manifest = write(store, 1, {"a": value.T, "b": value.astype(ml_dtypes.bfloat16)[:, ::2]})
    np.testing.assert_array_equal(load_file(Path(manifest.folder, manifest.tensors["a"].file))["a"], value.T)
    with safe_open(Path(manifest.folder, manifest.tensors["b"].file), "np") as file:
        np.testing.assert_array_equal(file.get_tensor("b").astype(np.float32), value[:, ::2])


def test_written_arrays_can_be_changed_without_changing_the_store(store):
    manifest = write(store, 1, tensors(1))
    for _, array in read_tensors(manifest):
        array[:] = 0
    for _, array in read_tensors(manifest):
        assert np.any(array)


def test_uncommitted_version_is_invisible_and_dropped_by_the_next_begin(store):
    write(store, 1, tensors(1))
    store.begin(2)
    store.put(2, tensors(2))
    assert store.latest().version == 1
    store.begin(3)
    with pytest.raises(WeightError, match="version 2: not begun"):
        store.put(2, tensors(2))
    store.put(3, tensors(3))
    store.commit(3)
    assert [store.latest().version, len(list(store.root.glob("*-version-*")))] == [3, 2]
    assert not list(store.root.glob("writing-*"))


def test_newest_two_commits_are_kept_also_when_versions_go_back(store):
    for version in (5, 6, 7, 6):
        write(store, version, tensors(version))
    assert store.latest().version == 6
    assert sorted(folder.name for folder in store.root.glob("*-version-*")) == [
        "00000003-version-7",
        "00000004-version-6",
    ]


def test_a_reader_finishes_a_version_that_was_deleted_under_it(store):
    values = tensors(1)
    manifest = write(store, 1, values)
    reading = read_tensors(manifest)
    read = dict([next(reading)])
    write(store, 2, tensors(2))
    write(store, 3, tensors(3))
    assert not os.path.exists(manifest.folder)
    read |= dict(reading)
    assert all(read[name].tobytes() == value.tobytes() for name, value in values.items())


def test_a_version_already_gone_is_an_error(store):
    manifest = write(store, 1, tensors(1))
    write(store, 2, tensors(2))
    write(store, 3, tensors(3))
    with pytest.raises(WeightError, match=r"weight version 1: .*not a readable"):
        list(read_tensors(manifest))


def test_corrupt_byte_names_the_tensor(store):
    values = tensors(1)
    manifest = write(store, 4, values)
    name = "model.layers.2.mlp.up_proj.weight"
    flip_byte(Path(manifest.folder, manifest.tensors[name].file))
    with pytest.raises(WeightError, match=re.escape(f"version 4, tensor {name}") + r".*checksum"):
        list(read_tensors(manifest))
    assert len(list(read_tensors(manifest, verify=False))) == 3


def test_missing_mis_shaped_and_retyped_tensors_are_named(store):
    manifest = write(store, 1, {"a": np.zeros((2, 3), np.float32)})
    record = manifest.tensors["a"]

    def with_record(name, **changes):
        changed = WeightManifest(1, manifest.folder, {name: type(record)(**{**fields(record), **changes})})
        return pytest.raises(WeightError, match=f"tensor {name}"), changed

    for name, changes in [("a", {"shape": (3, 2)}), ("a", {"dtype": "bfloat16"}), ("b", {})]:
        raises, changed = with_record(name, **changes)
        with raises:
            list(read_tensors(changed))


def fields(record):
    return {name: getattr(record, name) for name in ("file", "dtype", "shape", "checksum")}


@pytest.mark.parametrize("damage", [b"", b"\x10", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_unreadable_file_is_named(store, damage):
    manifest = write(store, 1, {"a": np.zeros(3, np.float32)})
    path = Path(manifest.folder, manifest.tensors["a"].file)
    path.write_bytes(damage)
    with pytest.raises(WeightError, match=f"{re.escape(str(path))} is not a readable"):
        list(read_tensors(manifest))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1, "tensors": {"a": {}}}'])
def test_malformed_manifest_is_refused(store, content):
    manifest = write(store, 1, {"a": np.zeros(3, np.float32)})
    Path(manifest.folder, "manifest.json").write_text(content)
    with pytest.raises(WeightError, match=r"manifest\.json"):
        store.latest()


def test_wrong_puts_are_refused(store):
    store.begin(1)
    with pytest.raises(WeightError, match="tensor a is float16, not float32 or bfloat16"):
        store.put(1, {"a": np.zeros(3, np.float16)})
    store.put(1, {"a": np.zeros(3, np.float32)})
    with pytest.raises(WeightError, match="tensor a was put twice"):
        store.put(1, {"a": np.zeros(3, np.float32)})
    store.begin(2)
    with pytest.raises(WeightError, match="without a single tensor"):
        store.commit(2)


def test_full_file_system_leaves_the_old_version_intact(store):
    """The file size limit of the process stands for a full disk: the write itself fails, halfway through."""
    values = tensors(1)
    manifest = write(store, 1, values)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        store.begin(2)
        with pytest.raises(StoreFullError, match=r"writing-2: could not write.*MiB free.*another root"):
            store.put(2, {"a": np.zeros(100_000, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(store.root.glob("writing-*"))
    assert store.latest() == manifest
    assert all(array.tobytes() == values[name].tobytes() for name, array in read_tensors(manifest))
    with pytest.raises(WeightError, match="failed put"):
        store.commit(2)
    assert write(store, 2, tensors(2)) == store.latest()


CRASH = """
import os, sys
import numpy as np
from jaxrl_ppo.weights.store import WeightStore
store = WeightStore(sys.argv[1])
store.begin(1)
store.put(1, {"a": np.ones(3, np.float32)})
store.commit(1)
store.begin(2)
store.put(2, {"a": np.zeros(3, np.float32)})
os.kill(os.getpid(), 9)
"""


def test_next_owner_keeps_a_crashed_ones_commits_and_drops_the_rest(tmp_path):
    root = tmp_path / "store"
    assert subprocess.run([sys.executable, "-c", CRASH, root]).returncode == -9
    assert list(root.glob("writing-*"))
    store = WeightStore(root)
    assert not list(root.glob("writing-*"))
    np.testing.assert_array_equal(dict(read_tensors(store.latest()))["a"], np.ones(3))
    write(store, 2, tensors(2))
    assert store.latest().version == 2
    store.close()
    assert not root.exists()


def test_stores_of_crashed_runs_are_deleted_and_living_ones_left_alone(tmp_path):
    crashed, alive, other = (tmp_path / (store_module.PREFIX + name) for name in ("crashed", "alive", "other"))
    assert subprocess.run([sys.executable, "-c", CRASH, crashed]).returncode == -9
    living = WeightStore(alive)
    write(living, 1, tensors(1))
    long_ago = time.time() - 2 * store_module.ABANDONED_AFTER_S
    for root in (crashed, alive):
        os.utime(root / "lock", (long_ago, long_ago))
    (tmp_path / "unrelated").mkdir()
    with_neighbours = WeightStore(other)
    assert not crashed.exists()
    assert (tmp_path / "unrelated").exists()
    assert len(list(read_tensors(living.latest()))) == 3
    living.close()
    with_neighbours.close()


def test_second_owner_is_refused(store):
    with pytest.raises(WeightError, match="another running process"):
        WeightStore(store.root)


READ = """
import json, sys
from jaxrl_ppo.weights.manifest import WeightManifest
from jaxrl_ppo.weights.reader import read_tensors
for _ in range(20):
    for name, array in read_tensors(WeightManifest.read(sys.argv[1])):
        pass
print(json.dumps({name: float(array.sum()) for name, array in read_tensors(WeightManifest.read(sys.argv[1]))}))
"""


def test_several_processes_read_at_once_while_the_next_version_is_written(store):
    values = tensors(1)
    manifest = write(store, 1, values)
    readers = [
        subprocess.Popen([sys.executable, "-c", READ, manifest.folder], stdout=subprocess.PIPE) for _ in range(3)
    ]
    write(store, 2, tensors(2))
    for reader in readers:
        output, _ = reader.communicate()
        sums = json.loads(output)
        assert sums == {name: float(value.sum()) for name, value in values.items()}


def test_root_is_shared_memory_only_when_three_versions_fit(monkeypatch, tmp_path):
    monkeypatch.setattr(store_module, "SHARED_MEMORY", tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300))
    assert choose_root("run", 100) == tmp_path / "jaxrl_ppo-run"
    assert choose_root("run", 101).parent != tmp_path


def test_store_and_reader_import_no_framework():
    code = (
        "import sys, jaxrl_ppo.weights.store, jaxrl_ppo.weights.reader\n"
        "print([name for name in ('ray', 'torch', 'vllm', 'jax') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"

"""The probe after a weight sync: what it lets pass, and which of its messages a fault gets."""

from contextlib import nullcontext

import numpy as np
import pytest

from jaxrl_ppo.rollout.probe import ProbeMismatch, WeightProbe, check_probe
from jaxrl_ppo.weights.manifest import TensorRecord, WeightManifest

RNG = np.random.default_rng(0)
OLD = RNG.normal(-2, 1, 40).astype(np.float32)
NEW = OLD + RNG.normal(0, 0.1, 40).astype(np.float32)


def noisy(scores, size):
    return scores + RNG.normal(0, size, len(scores)).astype(np.float32)


def check(measured, dtype="float32", **other):
    return check_probe(replica=3, version=8, measured=measured, expected=NEW, dtype=dtype, **other)


def manifest(version, checksum):
    return WeightManifest(version, "", {"a": TensorRecord("", "float32", (1,), checksum)})


def test_what_the_data_types_explain_passes_and_is_returned():
    assert check(NEW, previous=OLD, measured_before=OLD) == 0
    assert 0 < check(noisy(NEW, 0.005), previous=OLD) < 0.01
    assert 0.03 < check(noisy(NEW, 0.06), dtype="bfloat16", previous=OLD) < 0.1
    with pytest.raises(ProbeMismatch):
        check(noisy(NEW, 0.06))


def test_old_weights_are_recognised_through_noise_larger_than_the_update():
    with pytest.raises(ProbeMismatch, match=r"replica 3, after loading weight version 8.*still on the old weights"):
        check(noisy(OLD, 0.005), previous=OLD)
    # Within the threshold of bfloat16, but nearer to the old version.
    with pytest.raises(ProbeMismatch, match="still on the old weights"):
        check(noisy(OLD, 0.02), dtype="bfloat16", previous=OLD)
    # An update far smaller than the noise: the replica's own scores tell.
    before = noisy(NEW, 0.06)
    with pytest.raises(ProbeMismatch, match="exactly those from before: it is still on the old weights"):
        check(before.copy(), dtype="bfloat16", previous=NEW + 1e-4, measured_before=before)


def test_an_update_lost_in_noise_is_not_taken_for_old_weights():
    for size in (1e-7, 1e-5):
        assert check(noisy(NEW + 1e-6, 0), previous=NEW + 1e-6 + size) < 1e-5


def test_other_weights_and_broken_ones_are_told_from_old_ones():
    for measured in (noisy(OLD, 1.0), np.full(40, np.nan, np.float32)):
        with pytest.raises(
            ProbeMismatch, match=r"differ .* by (\d|nan).*float32 explains 0\.02, and it is not on the old"
        ):
            check(measured, previous=OLD, measured_before=OLD)
    with pytest.raises(ProbeMismatch, match="39 log-probs of the probe, the trainer has 40"):
        check(NEW[1:])


class FakeReplica:
    def __init__(self, scores):
        self.scores = scores

    async def score(self, token_ids):
        assert token_ids == [4, 5, 6]
        return self.scores


async def test_probe_follows_versions_per_replica():
    probe = WeightProbe([4, 5, 6], ("float32", "float32"))
    good, stuck = FakeReplica(OLD), FakeReplica(OLD)
    probe.expect(7, OLD)
    for index, replica in enumerate((good, stuck)):
        await probe.verify(index, replica, manifest(7, 1))
    probe.expect(8, NEW)
    good.scores = NEW
    await probe.verify(0, good, manifest(8, 2))
    with pytest.raises(ProbeMismatch, match=r"replica 1, .*version 8.*exactly those from before"):
        await probe.verify(1, stuck, manifest(8, 2))
    assert probe.differences == {0: 0.0, 1: 0.0}
    # A skipped update: same weights under a new version, same scores.
    probe.expect(9, NEW)
    await probe.verify(0, good, manifest(9, 2))
    # A replacement has no past.
    await probe.verify(1, FakeReplica(NEW), manifest(9, 2))


async def test_the_coarsest_data_type_decides():
    drifted = FakeReplica(noisy(NEW, 0.06))
    for dtypes, passes in ((("float32", "bfloat16"), True), (("float32", "float32"), False)):
        probe = WeightProbe([4, 5, 6], dtypes)
        probe.expect(1, NEW)
        with nullcontext() if passes else pytest.raises(ProbeMismatch, match="what bfloat16 makes"):
            await probe.verify(0, drifted, manifest(1, 1))

"""What the driver shows of a run."""

from __future__ import annotations

from types import SimpleNamespace

from jaxrl_ppo.cluster import launch
from jaxrl_ppo.schema.config import Config


def test_what_is_told_before_the_steps_are_known_is_shown(monkeypatch, capsys):
    told = [("note", "asked to stop"), ("warning", "a long wait")]
    monkeypatch.setattr(launch.ray, "get", lambda reference: reference)
    stream = SimpleNamespace(remote=lambda: iter(told))
    runner = SimpleNamespace(events=SimpleNamespace(options=lambda num_returns: stream))
    launch._show(runner, Config())
    assert capsys.readouterr().out == "asked to stop\nwarning: a long wait\n"

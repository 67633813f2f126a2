"""The command works from an installed wheel and through `ray job submit`, not only from a checkout."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD_PORT = 28265


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel's content, as an installation would have it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder / "dist", ROOT]
    subprocess.run(wheel, check=True, cwd=folder)
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", folder / "site", *(folder / "dist").glob("*.whl")], check=True
    )
    return folder / "site"


def dry_run(quickstart: Path) -> list[str]:
    return [
        "-m",
        "jaxrl_ppo.main",
        "--config-name",
        "quickstart",
        f"actor_rollout_ref.model.path={quickstart / 'SmolLM2-135M-Instruct'}",
        f"data.train_files={quickstart / 'train.parquet'}",
        f"data.val_files={quickstart / 'val.parquet'}",
        "trainer.dry_run=true",
    ]


def test_a_wheel_carries_the_configuration_tree_and_the_report_page(site, quickstart, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *dry_run(quickstart)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "prompts per step" in done.stdout
    where = "import jaxrl_ppo, device, config; print(jaxrl_ppo.__file__, device.__file__, config.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert all(path.startswith(str(site)) for path in found.stdout.split()), found.stdout
    assert list((site / "jaxrl_ppo/observability/report/page").glob("*"))


def test_ray_job_submit_runs_the_command(quickstart, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "RAY_AUTH_MODE": "disabled"}  # a cluster of this machine's own
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    address = f"http://127.0.0.1:{DASHBOARD_PORT}"
    start = [*ray, "start", "--head", "--block", "--port=0", "--num-cpus=2", f"--dashboard-port={DASHBOARD_PORT}"]
    start += [f"--dashboard-agent-listen-port={DASHBOARD_PORT + 1}"]  # its default is that of any cluster's agent here
    start += ["--disable-usage-stats", f"--temp-dir={tempfile.mkdtemp(prefix='ray')}"]  # its sockets need a short path
    log = (tmp_path / "head.log").open("w")
    head = subprocess.Popen(start, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.time() + 120
        while not answers(f"{address}/api/version"):
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            assert time.time() < deadline, (tmp_path / "head.log").read_text()
            time.sleep(0.5)
        for part in ("jaxrl_ppo", "device", "config"):
            shutil.copytree(ROOT / part, tmp_path / "project" / part)
        submit = [*ray, "job", "submit", f"--address={address}", "--working-dir", tmp_path / "project", "--", "python"]
        done = subprocess.run([*submit, *dry_run(quickstart)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "prompts per step" in done.stdout
    finally:
        if head.poll() is None:
            os.killpg(head.pid, signal.SIGTERM)
        head.wait(timeout=60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status < 500
    except urllib.error.HTTPError as error:
        return error.code < 500  # it asks for a token, but is there
    except OSError:
        return False

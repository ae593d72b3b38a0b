"""A folder to run train.py in, where the cold start of tests/tiny_run.py has been made."""

import signal

import pytest
import torch

from tiny_run import TINY


@pytest.fixture(scope="session")
def cold_start(tmp_path_factory):
    """runs/cold_start with the tiny policy, right about 70 % of the time; made once, in seconds."""
    from plumbing import policy              # here: the tests that need no run begin seconds sooner
    import train
    home = tmp_path_factory.mktemp("cold_start")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(policy, "MUST_PASS", 0.0)              # the few held-out sums there are say little
        train.main([*TINY, "--steps", "1", "--output_dir", "unused"])
    return home / "runs" / "cold_start"


@pytest.fixture
def workplace(cold_start, tmp_path, monkeypatch):
    """The current folder, empty but for the cold start. Signal handlers and threads are put back afterwards."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "cold_start").symlink_to(cold_start)
    monkeypatch.chdir(tmp_path)
    handlers, threads = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}, torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)

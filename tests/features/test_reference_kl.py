"""The reference policy of --beta. python -m pytest tests/features/test_reference_kl.py"""

from pathlib import Path

import pytest
import torch

import train
from plumbing.model import checksums
from tiny_run import TINY


def test_a_checkpoint_without_the_reference_that_moved_is_refused_in_one_line(workplace, capsys):
    train.main([*TINY, "--steps", "1", "--beta", "0.1", "--sync_ref_model",
                "--ref_model_sync_steps", "1", "--output_dir", "run"])
    folder = Path("run/checkpoints/step_1")
    state = torch.load(folder / "state.pt", weights_only=True)
    state["extras"] = state.pop("features")["ReferenceKL"]   # where older versions kept it
    torch.save(state, folder / "state.pt")
    (folder / checksums.NAME).unlink()
    checksums.seal(folder)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main(["--output_dir", "run", "--resume", "--steps", "2"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "has no reference policy, which --sync_ref_model moves" in said

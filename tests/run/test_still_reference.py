"""A reference policy that cannot move in this run is said. python -m pytest tests/run/test_still_reference.py"""

import pytest

import train
from tiny_run import TINY


@pytest.mark.parametrize("every, said", [("2", True), ("3", True), ("1", False)])
def test_a_reference_that_never_moves_is_said(every, said, workplace, capsys):
    train.main([*TINY, "--steps", "2", "--beta", "0.1", "--sync_ref_model",
                "--ref_model_sync_steps", every, "--output_dir", "run"])
    words = (f"the reference policy moves after every {every} rollout batches "
             "(--ref_model_sync_steps), and never in this run of 2")
    assert (words in capsys.readouterr().out) == said

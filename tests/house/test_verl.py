"""The tables of docs/speed.md against the configuration and the source of verl 0.9.1.
python -m pytest tests/house/test_verl.py"""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from documents import table

VERL = importlib.util.find_spec("verl")
pytestmark = [pytest.mark.trl, pytest.mark.skipif(
    VERL is None, reason="verl is missing: pip install --no-deps verl==0.9.1")]


def source(path):
    return Path(VERL.submodule_search_locations[0], path).read_text(encoding="utf-8")


def verl_default(key):
    """The default of a key as the table writes it."""
    value = yaml.safe_load(source("trainer/config/_generated_ppo_trainer.yaml"))
    if key.startswith(("actor.", "rollout.")):
        key = f"actor_rollout_ref.{key}"
    for name in key.split("."):
        value = value[name]
    return value


def test_the_keys_of_verl_exist():
    cells = [row[2] for row in table("docs/speed.md", "| here | TRL | verl |")]
    keys = re.findall(r"`((?:\w+\.)?\w+\.\w+)", " ".join(cells))
    assert len(keys) == 7
    for key in keys:
        verl_default(key)
    assert '@register_policy_loss("gspo")' in source("trainer/ppo/core_algos.py")
    assert ("ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n"
            in source("trainer/ppo/v1/trainer_base.py")), "counted in prompts"


def test_what_changes_silently_in_verl():
    rows = {row[0]: row[2] for row in table("docs/speed.md", "| | TRL 1.16 | verl 0.9.1 |")}
    core = source("trainer/ppo/core_algos.py")
    assert "token-mean" in rows["averaging of GSPO's tokens"]
    assert verl_default("actor.loss_agg_mode") == "token-mean"
    assert rows["clip range"].startswith(f"{verl_default('actor.clip_ratio_low')};")
    assert verl_default("actor.clip_ratio_high") == verl_default("actor.clip_ratio_low")
    assert "clip_ratio_low=1" in rows["CISPO's weight"]
    assert rows["sampler's log-probs, with vLLM"] == "weights off"
    assert verl_default("algorithm.rollout_correction.rollout_is") is None
    assert "low_var_kl" in rows["KL"] and "max=10" in core.replace(" ", "")

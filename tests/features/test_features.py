"""A feature is one file: without it and its two lines the default run is the same to the last bit, its flags are unknown,
and the other features' flags work. python -m pytest tests/features/test_features.py"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from features import FEATURES
from features.feature import HOOKS, Feature, Features, flag
from plumbing.run.arguments import Core, Settings
from tiny_run import TINY, differences

ROOT = Path(train.__file__).parent
ON = {                                                       # flags that switch it on
    "Rounding": "--bf16", "DynamicSampling": "--dynamic_sampling",
    "LoadBalancing": "--router_aux_loss_coef 0.01", "SRPO": "--algorithm srpo --stage2_step 1",
    "Lengths": "--overlong_cache 0.5 --mask_truncated_completions",
    "TokenCredit": "--algorithm grpo --advantage token_credit",
    "Distillation": "--algorithm grpo --advantage distillation --self_distillation answer",
    "AdvantageClip": "--advantage_clip 0.5", "ReferenceKL": "--beta 0.1", "Mismatch": "--mismatch token_truncate",
    "Entropy": "--entropy_coef 0.01", "Critic": "--algorithm ppo",
    "Likelihood": "--positive_example_nll_weight 0.1", "Trackers": "--report_to tensorboard",
    "RoutingReplay": "--routing_replay old"}
NAMES = [feature.__name__ for feature in FEATURES]


def file_of(feature):
    return Path(sys.modules[feature.__module__].__file__).name


def without(place, names):
    """A copy of the program in the folder `place`, without these features."""
    for folder in ("features", "plumbing", "tools"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, place)
    listed = place / "features/__init__.py"
    text = listed.read_text()
    for feature in FEATURES:
        if feature.__name__ in names:
            (place / "features" / file_of(feature)).unlink()
            text = re.sub(rf"^from features\.\w+ import {feature.__name__}\n", "", text, flags=re.M)
            text = re.sub(rf"\b{feature.__name__}\b,? ?", "", text)
    listed.write_text(text)
    if len(names) == len(FEATURES):
        shutil.rmtree(place / "tools", ignore_errors=True)
    return place


def script(place, home, *argv):
    """train.py of the copy, in the folder `home`, where the cold start is."""
    return subprocess.run([sys.executable, str(place / "train.py"), *argv], cwd=home, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("names", [*([name] for name in NAMES), NAMES], ids=lambda names: "+".join(names))
def test_without_its_file_everything_else_is_as_it_was(names, workplace, tmp_path):
    train.main([*TINY, "--steps", "2", "--output_dir", "whole"])
    place = without(tmp_path / "program", names)
    done = script(place, workplace, *TINY, "--steps", "2", "--output_dir", "less")
    assert done.returncode == 0, done.stderr
    flags = "state.pt/origin/settings"                       # a checkpoint lists the flags that there are
    assert [place for place in differences("whole", "less", 2) if not place.startswith(flags)] == []
    assert script(place, workplace, "--help").returncode == 0
    for feature in FEATURES:
        done = script(place, workplace, *TINY, *ON[feature.__name__].split(), "--steps", "1", "--output_dir", feature.__name__)
        gone = feature.__name__ in names and feature.__name__ != "Rounding"      # which has no flag
        assert done.returncode == (2 if gone else 0), done.stderr
        assert not gone or re.search("unknown argument|reads .* which is missing|is unknown", done.stderr), done.stderr
        assert done.stderr.count("\n") == gone


def test_the_flags_of_a_feature_stand_in_its_file_alone():
    core = {f.name for f in fields(Core)}
    of_features = [f.name for feature in FEATURES if feature.flags for f in fields(feature.flags)]
    assert len(of_features) == len(set(of_features)) and not core & set(of_features)
    assert {f.name for f in fields(Settings)} == core | set(of_features)
    assert all("section" in fields(feature.flags)[0].metadata for feature in FEATURES if feature.flags)
    assert set(ON) == set(NAMES)


def test_only_the_hooks_of_a_feature_are_called():
    class Quiet(Feature):
        pass

    class Loud(Feature):
        old = {"entropy": True}
        new = {"entropy": False, "record": True}

        def before_updates(self, learner, batch, old):
            batch.more["heard"] = self

        def state_dict(self):
            return {"count": 3}
    loud = Loud(None)
    features = Features([Quiet(None), loud])
    assert features.hooks == {hook: [getattr(loud, hook)] if hook in ("before_updates", "state_dict") else [] for hook in HOOKS}
    assert features.old == {"entropy": True} and features.new == {"record": True} and not features.adds_gradient
    assert features.state_dict() == {"Loud": {"count": 3}}


def test_a_state_that_no_feature_claims_is_refused():
    with pytest.raises(ValueError, match="the checkpoint has the state of Gone, which this run does not have"):
        Features().load_state_dict({"Gone": {"x": 1}})


def test_a_moved_reference_is_kept_by_its_name(workplace):
    moving = "--beta 0.1 --sync_ref_model --ref_model_sync_steps 1 --lr_scheduler_type constant_with_warmup".split()
    train.main([*TINY, *moving, "--steps", "3", "--output_dir", "whole"])
    train.main([*TINY, *moving, "--steps", "2", "--output_dir", "parts"])
    train.main([*TINY, *moving, "--steps", "3", "--output_dir", "parts", "--resume"])
    assert differences("whole", "parts", 3) == []


def test_a_condition_may_name_a_flag_that_is_not_there():
    from plumbing.run.checks import holds
    assert not holds(SimpleNamespace(steps=1), "gone") and not holds(SimpleNamespace(steps=1), "gone=1")
    assert flag(0.0, "help", needs="gone").metadata["needs"] == "gone"

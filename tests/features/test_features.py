"""A feature is one file: without it and its two lines the default run is the same to the last bit,
its flags are unknown, and the other features' flags work.
python -m pytest tests/features/test_features.py"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from features import FEATURES
from features.feature import flag
from tiny_run import TINY, chance, differences, flags, program, python, write


ON = {                                                       # flags that switch it on
    "DynamicSampling": "--dynamic_sampling",
    "LoadBalancing": "--router_aux_loss_coef 0.01", "SRPO": "--algorithm srpo --stage2_step 1",
    "Lengths": "--overlong_cache 0.5 --mask_truncated_completions",
    "ReferenceKL": "--beta 0.1",
    "Mismatch": "--mismatch token_truncate",
    "Entropy": "--entropy_coef 0.01 --entropy_quantile 0.5 --algorithm grpo",
    "Critic": "--algorithm ppo",
    "Trackers": "--report_to tensorboard",
    "RoutingReplay": "--routing_replay old", "SamplerFormat": "--sampler_dtype int4",
    "Turns": "--environment mine.py:Seven --stop , --model_name_or_path model --max_turns 3 "
             "--dataset_name rows.jsonl --max_completion_length 8 --algorithm gspo_token "
             "--advantage turn_returns",
    "VLLM": "--sampler vllm", "LoRA": "--use_peft",
    "Minibatches": "--save_minibatches"}
NAMES = [feature.__name__ for feature in FEATURES if feature.__name__ in ON]    # one per file
IN_TURN = """
import contextlib, io, json, sys
import train
found = []
for argv in json.loads(sys.argv[1]):
    said = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(said):
        try:
            train.main(argv)
        except SystemExit as stop:
            code = stop.code
        except ValueError as error:              # the reader's: an advantage without its feature
            code = 2
            said.write(str(error))
    found.append([code, said.getvalue()])
print(json.dumps(found))
"""


def file_of(feature):
    return Path(sys.modules[feature.__module__].__file__).name


def without(place, cold_start, names):
    """A copy of the program in the folder `place`, without these features."""
    program(place, cold_start)
    listed = place / "features/__init__.py"
    text = listed.read_text(encoding="utf-8")
    files = {file_of(feature) for feature in FEATURES if feature.__name__ in names}
    for file in files:
        (place / "features" / file).unlink()
        text = re.sub(rf"^from features\.{file[:-3]} import .*\n", "", text, flags=re.M)
    for feature in FEATURES:
        if file_of(feature) in files:
            text = re.sub(rf"\b{feature.__name__}\b,? ?", "", text)
    write(listed, text)
    return place


def in_turn(place, home, names):
    """[(exit code, what stderr says)] of a run of the copy with each feature on; one process for
    all, because most of a tiny run is the imports."""
    runs = [flags(*ON[name].split(), "--steps", "1", "--output_dir", name) for name in names]
    done = subprocess.run([sys.executable, "-c", IN_TURN, json.dumps(runs)], cwd=home,
                          encoding="utf-8", capture_output=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def named(workplace, cold_start):
    """What the flags of ON name: rows.jsonl, mine.py and model."""
    chance()
    write("mine.py", """
import random
class Seven:
    begun = 0
    def __init__(self, row, seed):
        self.rng = random.Random(seed)
        Seven.begun += 1
    def reset(self, **row):
        return "1+"[:Seven.begun % 4]            # prompts differ within a group
    def step(self, text):
        return "7", len(text) / 10, self.rng.random() < 0.2
""")
    Path("model").symlink_to(cold_start)


@pytest.mark.slow
@pytest.mark.parametrize("names", [*([name] for name in NAMES), NAMES], ids="+".join)
def test_without_its_file_everything_else_is_as_it_was(names, workplace, cold_start, tmp_path):
    train.main([*TINY, "--steps", "2", "--output_dir", "whole"])
    place = without(tmp_path / "program", cold_start, names)
    python(place / "train.py", *TINY, "--steps", "2", "--output_dir", "less")
    assert differences("whole", "less", 2) == []
    others = [name for name in NAMES if name in names or name != "VLLM" or find_spec("vllm")]
    for name, (code, said) in zip(others, in_turn(place, workplace, others), strict=True):
        gone = name in names
        assert code == (2 if gone else 0), said
        words = "unrecognized |reads .* which is missing|invalid choice|must be FILE.py:CLASS"
        assert not gone or re.search(words, said), said


MORE = {  # flags with which it has more of a state
    "Lengths": "--max_completion_length 3 --mask_truncated_completions --overlong_cache 0.5",
    "LoadBalancing": "--router_aux_loss_coef 1"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "VLLM"])
def test_resumed_or_in_micro_batches_the_plain_way_a_run_is_the_same(name, run, killed):
    """Resumed to the last bit; the other way the first batch, but for rounding."""
    for package in {"LoRA": ["peft"], "Trackers": ["tensorboard"]}.get(name, []):
        pytest.importorskip(package)
    line = (f"{(ON | MORE)[name]} --save_steps 1 --warmup_steps 0 --learning_rate 0.001 "
            "--lr_scheduler_type constant_with_warmup --steps")
    whole = run(f"{line} 3", folder="whole")
    killed(2, f"{line} 3")
    run("--resume" + " --environment mine.py:Seven" * (name == "Turns"))     # code is named again
    assert differences("whole", "run", 3) == []
    numbers = {key: value for key, value in whole[0].items() if isinstance(value, float)}
    other, *_ = run(f"{line} 1 --plain --micro_batch_size 2", folder="other")
    assert {key: other[key] for key in numbers} == pytest.approx(numbers, rel=5e-3, abs=2e-5)


def test_a_condition_may_name_a_flag_that_is_not_there():
    from session.checks import is_met
    assert not any(is_met(SimpleNamespace(steps=1), words) for words in ("gone", "gone=1"))
    assert flag(0.0, "help", needs="gone").metadata["needs"] == {"gone": ""}

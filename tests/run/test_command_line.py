"""Flags are checked, and --help is printed, before the slow imports.
python -m pytest tests/run/test_command_line.py"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import eval
import train
from session.arguments import flags, parse
from tools.commands import parse_passk
from tiny_run import SUMS, jsonl, python

ROOT = Path(__file__).parents[2]

LOOK = """
import runpy, sys
SLOW = {"transformers", "peft", "trl", "datasets", "matplotlib", "scipy", "pandas", "sklearn",
        "bitsandbytes"}

def ends(script, *argv):
    sys.argv = [script, *argv]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        print("END", script, *argv, stop.code, sorted(SLOW & sys.modules.keys()), len(sys.modules))

for flags in (["--help"], ["--lr", "1"], ["--temperature", "0"]):
    ends("train.py", *flags)
for flags in (["--help"], ["passk", "--help"], ["passk", "--n", "0"], ["view"], ["pass"]):
    ends("eval.py", *flags)
"""


def test_help_and_refusals_import_torch_and_nothing_slow_besides():
    """transformers takes 2 to 4 seconds; peft, which its trainer imports, as many again."""
    done = python("-c", LOOK, cwd=ROOT)
    ends = [line for line in done.stdout.splitlines() if line.startswith("END")]
    assert len(ends) == 8, done.stderr
    assert "\ntrain.py: --temperature 0.0 is not at least 1e-06\n" in done.stderr
    for line in ends:
        assert " [] " in line and int(line.split()[-1]) < 2000, line
        assert (" 2 [] " in line) == ("--help" not in line), line


@pytest.mark.slow
def test_train_py_imports_transformers_without_its_trainer():
    slow = ("import sys, train; print(*sorted({'peft', 'trl', 'datasets', 'transformers', "
            "'transformers.trainer'} & sys.modules.keys()))")
    done = python("-c", slow, cwd=ROOT)
    assert done.stdout.split() == ["transformers"], done.stderr


@pytest.mark.parametrize("flag, meant", {
    "lr": "learning_rate", "learning-rate": "learning_rate",
    "epochs": "steps", "batch-size": "prompts_per_step",
    "kl_coef=0.1": "beta", "max_new_tokens": "max_completion_length",
    "learning_rat": "learning_rate", "lora_rank": "lora_r", "entropy_coeff": "entropy_coef",
    "mu": "num_iterations", "ppo_epochs": "num_iterations", "use_vllm": "sampler vllm",
    "vllm_mode=colocate": "sampler vllm", "delta": "dual_clip",
    "importance_sampling_level": "algorithm gspo", "validation_split": "test_dataset_name",
    "per_device_train_batch_size": "micro_batch_size", "use_cpu": "device cpu",
}.items())
def test_a_near_miss_is_known_by_its_meaning(flag, meant):
    """TRL's words, too."""
    known = f"unknown argument --{flag}, did you mean --{meant}( \\(|\\?)"
    with pytest.raises(ValueError, match=known):
        parse([f"--{flag}", "1"])


def test_a_word_without_a_flag_is_no_near_miss():
    with pytest.raises(ValueError, match="unknown argument mu, which belongs to no flag;"):
        parse(["mu"])
    with pytest.raises(ValueError, match="--logging_steps: it is not needed: every"):
        parse(["--logging_steps", "1"])


@pytest.mark.parametrize("flag", ["adam_beta1", "log_completions", "dtype", "logging_strategy",
                                  "generation_batch_size", "max_tool_calling_iterations",
                                  "adam_epsilon", "entropy_coef_min", "trust_remote_code",
                                  "use_cache", "hub_token", "nonsense"])
def test_a_flag_of_another_meaning_is_not_suggested(flag):
    with pytest.raises(ValueError, match=f"unknown argument --{flag}") as error:
        parse([f"--{flag}", "1"])
    assert "did you mean" not in str(error.value)


def test_a_name_of_other_programs_means_one_flag():
    """And it is no flag itself."""
    names = [name.partition("=")[0] for f in flags() for name in f.metadata.get("also", "").split()]
    assert len(names) > 80 and len(set(names)) == len(names)
    assert not {f.name for f in flags()} & {*names}


def test_passk_takes_train_pys_names_for_its_numbers():
    own, args = parse_passk("--num_generations 4 --eval_prompts 9 --temperature 0.5".split())
    assert (own.n, own.problems, own.k, args.temperature) == (4, 9, [1, 4], .5)
    own, _ = parse_passk(["--eval_samples", "2"])
    assert own.k == [1] and own.n == 2
    assert parse_passk([])[0].k == [1, 4, 16]


def test_the_folder_of_a_run_is_no_checkpoint_but_has_one(run):
    run(folder="runs/gspo")
    jsonl("rows.jsonl", SUMS)
    new = "--dataset_name rows.jsonl --verifier exact --output_dir next"
    for folder in ("runs/gspo", "runs/gspo/checkpoints"):
        for main, words in ((train.main, new), (eval.main, "passk --device cpu")):
            assert ("it is the folder of a run; its checkpoints: runs/gspo/checkpoints/step_1"
                    ) in run.refused(f"{words} --model_name_or_path {folder}", main=main)


# --------------------------------------------------------- threads of torch that wait do not spin

# libgomp reads GOMP_SPINCOUNT when torch is loaded: each entry point must set it before.
SPIN = """
import importlib.abc, os, sys

class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Look())
import {entry}
"""


@pytest.mark.parametrize("entry", ["train", "eval"])
@pytest.mark.parametrize("given, spins", [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_before_torch_is_imported_the_spinning_is_limited_unless_the_user_has_set_it(
        entry, given, spins):
    own = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    bare = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run([sys.executable, "-c", SPIN.format(entry=entry)], env=bare | given,
                          cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.stdout.strip() == spins, done.stderr

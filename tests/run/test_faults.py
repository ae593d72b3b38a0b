"""What goes wrong in a run: numbers that are not finite, code hidden in a checkpoint.
python -m pytest tests/run/test_faults.py"""

import itertools
import json
import os
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import train
from session import checkpoints
from tiny_run import metrics, read_json, slow, state, write

# ------------------------------------------------------------------------------- not finite

NAN = float("nan")


def spoil(then, which, how=lambda loss: loss * NAN):
    """Make the loss of the optimizer steps numbered `which`, from 1 on, go wrong."""
    count = itertools.count(1)
    then(train, "policy_loss", lambda result, *_, **__:
         (how(result[0]), result[1]) if next(count) in which else None)


HOWS = {"loss, grad_norm": lambda loss: loss * NAN,
        "grad_norm": lambda loss: (loss - loss.detach()) * 1e38 * 1e38 + loss.detach(),
        "loss": lambda loss: loss.detach() * 0 + NAN + loss * 0}


@pytest.mark.parametrize("wrong", HOWS)
def test_update_that_is_not_finite_is_skipped_and_counted_and_moves_no_schedule(
        wrong, run, then, capsys):
    """Four updates with a warm-up of three. The first is spoilt: torch has nothing to warn of."""
    weights, rates = [], []

    def seen(learner):
        weights.append(torch.cat([p.detach().flatten() for p in learner.policy.parameters()]))
        rates.append(learner.optimizer.param_groups[0]["lr"])
    then(train, "Learner", lambda learner, *_: seen(learner))
    then(train, "update", lambda stats, learner, mini: seen(learner))
    spoil(then, {1}, HOWS[wrong])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = run("--steps 2 --learning_rate 0.3 --warmup_steps 3 --algorithm grpo --beta 0.1")
    moved = [not torch.equal(one, other) for one, other in pairwise(weights)]
    assert moved == [False, True, True, True] and rates[:4] == pytest.approx([0.1, 0.1, 0.2, 0.3])
    assert all(w.isfinite().all() for w in weights)
    assert [record["skipped"] for record in records] == [1, 0]
    assert capsys.readouterr().out.count("1 update(s) not finite, skipped") == 1


@pytest.mark.parametrize("wrong", HOWS)
def test_too_many_bad_updates_in_a_row_stop_the_run_with_its_checkpoint_intact(wrong, run, then):
    spoil(then, {1, 3, 4, 6, 7, 8}, HOWS[wrong])      # two in a row: on; three: stop
    with pytest.raises(SystemExit) as stop:
        run("--steps 4 --save_steps 1")
    message = str(stop.value)
    names = message.partition(": ")[2].partition(";")[0]
    assert message.startswith("3 updates in a row") and {*wrong.split(", ")} == {*names.split(", ")}
    assert stop.value.code not in (0, None)
    assert [record["skipped"] for record in metrics("run")] == [1, 2, 1]
    moments = [x for s in state("run", 3)["optimizer"]["state"].values() for x in s.values()]
    assert moments and all(x.isfinite().all() for x in moments)


def test_learning_rate_that_ruins_the_policy(run):
    """No fault injected: the weights overflow, sampling goes on without a crash, every later
    update is skipped, the run stops."""
    with pytest.raises(SystemExit, match="updates in a row were not finite"):
        run("--steps 9 --learning_rate 1e38 --warmup_steps 0 --max_grad_norm 0")


# ------------------------------------------------------------------------------- hidden code

class Payload:
    """What a pickle can do: run code when it is read."""

    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.fixture
def model(workplace, cold_start):
    """A copy of a checkpoint, in which code is hidden."""
    return Path(shutil.copytree(cold_start, "model"))


@pytest.mark.parametrize("content", [Payload(), {"optimizer": Payload()}])
def test_code_in_the_optimizer_state_is_not_run(content, run):
    run("--steps 2 --save_steps 1")
    file = Path("run/checkpoints/step_2") / checkpoints.STATE
    torch.save(content, file)
    with pytest.raises(Exception, match="weights_only|Weights only"):
        run("--resume")
    assert not Path("owned").exists()
    shutil.rmtree(file.parent)
    assert [record["step"] for record in run("--resume")] == [1, 2]


def test_code_in_a_model_folder_is_refused_and_not_run(model, refused):
    (model / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors"):
        torch.save({"model.norm.weight": Payload()}, model / name)
        assert "./model" in refused("--model_name_or_path ./model") and not Path("owned").exists()
        (model / name).unlink()


def test_python_files_in_a_model_folder_are_not_run(model, run):
    write(model / "evil.py", "import os; os.system('touch owned')\nclass Config: pass\n"
                             "class Model: pass\nclass Tokenizer: pass\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    both = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    for name, key in (("config.json", names), ("tokenizer_config.json", both)):
        kept = read_json(model / name)
        write(model / name, json.dumps(kept | {"auto_map": key}))
    try:
        run("--model_name_or_path ./model")                  # transformers knows its type
    except SystemExit as stop:
        assert stop.code == 2
    assert not Path("owned").exists()


# ------------------------------------------------------- code that a run's config.json names

NAMES = {                                                    # flag: (what is typed at first, NAME)
    "verifier": "--verifier exact mine.py:reward",
    "sampler": "--verifier exact --sampler mine.py:Mine",
    "environment": "--verifier exact --environment mine.py:Play"}
MINE = """
print("RAN")
from rollout import Sampler
class Mine(Sampler): pass
def reward(response, answer): return 1.0
class Play:
    def __init__(self, row): pass
    def step(self, text): return "", 1.0, True
"""


@pytest.mark.parametrize("flag", ["sampler", "environment", slow("verifier")])
def test_no_code_is_run_that_a_run_names_and_nobody_typed(flag, own, run, capfd):
    import eval
    write("mine.py", MINE)
    run(own + NAMES[flag])
    again = NAMES[flag].removeprefix("--verifier exact " if flag != "verifier" else "")
    capfd.readouterr()
    passk = "passk run/checkpoints/step_{} --n 1 --problems 2"
    for line, main in (("--output_dir run --resume --steps 2", train.main),
                       (passk.format(1), eval.main)):
        assert f"--{flag}" in run.refused(line, main=main) and "RAN" not in capfd.readouterr().out
    for step, typed in ((2, again), (3, "--trust_run_code")):
        assert len(run(f"--resume --steps {step} {typed}")) == step
        eval.main(f"{passk.format(step)} {typed}".split())

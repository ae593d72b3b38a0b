"""What goes wrong in a run, by nobody's fault or by somebody's: numbers that are not finite, code
hidden in a checkpoint, a collapse. Full disks and errors: tests/run/test_resume.py.
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
from session.metrics import describe_collapse
from tiny_run import metrics, read_json, write

# ------------------------------------------------------------------------------- not finite

NAN = float("nan")


def spoil(then, which, how=lambda loss: loss * NAN):
    """Make the loss of the optimizer steps numbered `which`, from 1 on, go wrong."""
    count = itertools.count(1)
    then(train, "policy_loss", lambda result, *_, **__:
         (how(result[0]), result[1]) if next(count) in which else None)


@pytest.mark.parametrize("how", [
    lambda loss: loss * NAN, lambda loss: loss * float("inf"),
    lambda loss: loss.detach() * 0 + NAN + loss * 0],
    ids=["nan gradient", "infinite gradient", "nan loss"])
def test_update_that_is_not_finite_is_skipped_and_counted_and_moves_no_schedule(
        how, run, then, capsys):
    """Four updates with a warm-up of three. The first is spoilt: torch has nothing to warn of."""
    weights, rates = [], []

    def seen(learner):
        weights.append(torch.cat([p.detach().flatten() for p in learner.policy.parameters()]))
        rates.append(learner.optimizer.param_groups[0]["lr"])
    then(train, "make_learner", lambda learner, *_: seen(learner))
    then(train, "update", lambda stats, args, learner, mini: seen(learner))
    spoil(then, {1}, how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = run("--steps 2 --learning_rate 0.3 --warmup_steps 3 --algorithm grpo --beta 0.1")
    moved = [not torch.equal(one, other) for one, other in pairwise(weights)]
    assert moved == [False, True, True, True] and rates[:4] == pytest.approx([0.1, 0.1, 0.2, 0.3])
    assert all(w.isfinite().all() for w in weights)
    assert [record["skipped"] for record in records] == [1, 0]
    assert capsys.readouterr().out.count("1 bad update(s) skipped") == 1


def test_too_many_bad_updates_in_a_row_stop_the_run_with_its_checkpoint_intact(run, then):
    spoil(then, {1, 2, 5, 6, 7, 8})                   # two in a row: on; three: stop
    with pytest.raises(SystemExit) as stop:
        run("--steps 4 --save_steps 1")
    message = str(stop.value.code)
    assert message.startswith("train.py: 3 updates in a row")
    assert "stopped in batch 4" in message and "--learning_rate" in message
    assert [record["skipped"] for record in metrics("run")] == [2, 0, 2]
    step, folder = checkpoints.list_checkpoints(Path("run"))[-1]
    state = torch.load(folder / "state.pt", weights_only=True)
    assert step == 3 and state["progress"]["bad"] == 2       # the count goes on where the run does
    moments = [x for s in state["optimizer"]["state"].values() for x in s.values()]
    assert moments and all(x.isfinite().all() for x in moments)


def test_learning_rate_that_ruins_the_policy(run):
    """No fault injected: the weights overflow, sampling goes on without a crash, every later
    update is skipped, the run stops."""
    with pytest.raises(SystemExit) as stop:
        run("--steps 9 --learning_rate 1e38 --warmup_steps 0 --max_grad_norm 0")
    assert "updates in a row had a" in str(stop.value.code)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("length", [0, 100])
def test_a_warm_up_that_is_cut_off_is_one_line(name, length, run, cold_start, workplace):
    folder = workplace / "runs/cold_start" / cold_start.name
    folder.unlink()
    shutil.copytree(cold_start, folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:length])
    said = run.refused("--steps 1")
    assert f"{cold_start.name} cannot be read" in said and "delete it, and it is made again" in said


# ------------------------------------------------------------------------------- hidden code

class Payload:
    """What a pickle can do: run code when it is read."""

    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.fixture
def model(workplace, cold_start):
    """A copy of a checkpoint, in which code is hidden."""
    return Path(shutil.copytree(cold_start, "model"))


def test_code_in_the_optimizer_state_is_refused_and_not_run(run):
    run("--steps 2 --save_steps 1")
    state = Path("run/checkpoints/step_2/state.pt")
    resume = "--output_dir run --resume"
    for content in (Payload(), {"optimizer": Payload()}):
        torch.save(content, state)
        err = run.refused(resume)
        assert str(state) in err and "never executed" in err and "delete this checkpoint" in err
    state.write_bytes(state.read_bytes()[:100])
    assert "it lacks state.pt, or a part of it; delete it to continue" in run.refused(resume)
    assert not Path("owned").exists()
    shutil.rmtree(state.parent)                              # what the message advises
    assert [record["step"] for record in run("--resume")] == [1, 2]
    torch.load(state, weights_only=True)


def test_code_in_a_model_folder_is_refused_and_not_run(model, refused):
    (model / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors", "model.bin", "pytorch_model.pt"):
        torch.save({"model.norm.weight": Payload()}, model / name)
        said = refused("--model_name_or_path ./model --output_dir run")
        assert "--model_name_or_path ./model" in said and not Path("owned").exists()
        assert "no file named model.safetensors" in said or name != "pytorch_model.bin"
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


def test_code_in_a_chat_template_is_not_run(model, refused):
    write(model / "chat_template.jinja",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__ }}"
        "{{ messages[0]['content'] }}")
    write("rows.jsonl", '{"prompt": "2+2=", "answer": "4"}\n'
                        '{"prompt": "2+3=", "answer": "5"}\n')
    err = refused("--model_name_or_path ./model --dataset_name rows.jsonl --verifier exact "
                  "--output_dir run --max_completion_length 4")
    assert "cannot be tokenized" in err and "unsafe" in err


# ------------------------------------------------------------------------------- collapse


@pytest.mark.parametrize("pass_rate, entropy, best, words", [
    (0.3, 1e-6, 0.3, "no entropy left"), (1.0, 1e-6, 1.0, ""), (0.3, 0.1, 0.5, ""),
    (0.2, 0.1, 0.5, "pass rate below half its best"), (0.05, 0.1, 0.15, "")])
def test_a_collapse_is_half_the_best_pass_rate_or_no_entropy(pass_rate, entropy, best, words):
    assert describe_collapse({"pass_rate": pass_rate, "entropy": entropy}, best) == words

"""What goes wrong without anybody's fault or by somebody's: numbers that are not finite, a full disk, code hidden in a checkpoint, a collapse."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from plumbing.model import checksums
from plumbing.run import checkpoints
import train
from plumbing.run.metrics import collapse
from tiny_run import SMALL, TINY, TINY_MODEL, differences, metrics


def refused(capsys, *argv):
    """The one line on stderr of a run that ends with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main([*map(str, argv)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("train.py: "), err
    return err


# ------------------------------------------------------------------------------------------------------------- not finite

def spoil(monkeypatch, which, how):
    """Make the loss of the optimizer steps numbered `which`, from 1 on, go wrong."""
    count, loss = [0], train.policy_loss

    def spoilt(*args, **kwargs):
        count[0] += 1
        value, stats = loss(*args, **kwargs)
        return (how(value) if count[0] in which else value), stats
    monkeypatch.setattr(train, "policy_loss", spoilt)


@pytest.mark.parametrize("how", [lambda loss: loss * float("nan"), lambda loss: loss * float("inf"), lambda loss: loss.detach() * 0 + float("nan") + loss * 0],
                         ids=["nan gradient", "infinite gradient", "nan loss"])
def test_update_that_is_not_finite_is_skipped_counted_and_kept_for_a_look(how, workplace, monkeypatch, capsys):
    weights = []
    update = train.update

    def watching(args, learner, mini):
        done = update(args, learner, mini)
        weights.append(torch.cat([p.detach().flatten().clone() for p in learner.policy.parameters()]))
        return done
    monkeypatch.setattr(train, "update", watching)
    spoil(monkeypatch, {3}, how)                             # two mini-batches per batch: the first of batch 2
    train.main([*TINY, "--steps", "3", "--warmup_steps", "0", "--lr_scheduler_type", "constant_with_warmup", "--output_dir", "run"])
    assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[2], weights[3])          # skipped, then on
    assert all(w.isfinite().all() for w in weights)
    assert [r["skipped"] for r in metrics("run")] == [0, 1, 0]
    assert sum("1 bad update(s) skipped" in line for line in capsys.readouterr().out.splitlines()) == 1
    batch = torch.load("run/bad_batch_step_2.pt", weights_only=True)                                 # plain data too
    assert batch["step"] == 2 and batch["response_ids"].shape == batch["old_logp"].shape == batch["mask"].shape and len(batch["texts"]) == 8


def test_too_many_bad_updates_in_a_row_stop_the_run_with_its_checkpoint_intact(workplace, monkeypatch, capsys):
    argv = [*TINY, "--steps", "4", "--save_steps", "1"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        spoil(patch, {1, 2, 5, 6, 7, 8}, lambda loss: loss * float("nan"))                          # two in a row: on; three: stop
        train.main([*argv, "--output_dir", "run"])
    message = str(stop.value.code)
    assert message.startswith("train.py: 3 updates in a row") and "bad_batch_step_4.pt" in message and "--learning_rate" in message
    assert [r["skipped"] for r in metrics("run")] == [2, 0, 2]
    (step, folder), = checkpoints.whole(Path("run"))[-1:]
    state = torch.load(folder / "state.pt", weights_only=True)
    assert step == 3 and state["progress"]["bad"] == 2       # the count goes on where the run does
    assert all(x.isfinite().all() for s in state["optimizer"]["state"].values() for x in s.values())


def test_learning_rate_that_ruins_the_policy(workplace, capsys):
    """No fault injected: the weights overflow, sampling goes on without a crash, every later update is skipped, the run stops."""
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, "--steps", "9", "--learning_rate", "1e38", "--warmup_steps", "0", "--max_grad_norm", "0", "--output_dir", "run"])
    assert "updates in a row had a" in str(stop.value.code)


# ------------------------------------------------------------------------------------------------------------ hidden code

class Payload:
    """What a pickle can do: run code when it is read."""

    def __reduce__(self):
        return os.system, ("touch owned",)


def test_code_in_the_optimizer_state_is_refused_and_not_run(workplace, capsys):
    argv = [*TINY, "--steps", "2", "--save_steps", "1", "--output_dir", "run"]
    train.main(argv)
    state = Path("run/checkpoints/step_2/state.pt")
    for content in (Payload(), {"optimizer": Payload()}):
        torch.save(content, state)
        checksums.seal(state.parent)                       # whoever can change the file can change its checksum
        err = refused(capsys, *argv, "--resume")
        assert str(state) in err and "never executed" in err and "delete this checkpoint" in err
    state.write_bytes(state.read_bytes()[:100])
    assert "damaged" in refused(capsys, *argv, "--resume")
    assert not Path("owned").exists()
    shutil.rmtree(state.parent)                              # what the message advises
    train.main([*argv, "--resume"])
    assert [r["step"] for r in metrics("run")] == [1, 2]
    torch.load(state, weights_only=True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.bin", "pytorch_model.pt"])
def test_code_in_a_model_folder_is_refused_and_not_run(name, workplace, cold_start, capsys):
    shutil.copytree(next(cold_start.iterdir()), "model")
    Path("model/model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload()}, f"model/{name}")
    assert "--model_name_or_path ./model" in refused(capsys, *TINY_MODEL, "--model_name_or_path", "./model", "--output_dir", "run")
    assert not Path("owned").exists() and not Path("run").exists()


def test_python_files_in_a_model_folder_are_not_run(workplace, cold_start, capsys):
    shutil.copytree(next(cold_start.iterdir()), "model")
    code = "import os; os.system('touch owned')\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    Path("model/evil.py").write_text(code)
    for name, key in (("config.json", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
                      ("tokenizer_config.json", {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]})):
        path = Path("model", name)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": key}))
    try:
        train.main([*TINY_MODEL, "--steps", "1", "--model_name_or_path", "./model", "--output_dir", "run"])      # a type transformers knows needs none of it
    except SystemExit as stop:
        assert stop.code == 2
    assert not Path("owned").exists()


def test_code_in_a_chat_template_is_not_run(workplace, cold_start, capsys):
    shutil.copytree(next(cold_start.iterdir()), "model")
    Path("model/chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__ }}{{ messages[0]['content'] }}")
    Path("rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "2+3=", "answer": "5"}\n')
    err = refused(capsys, *SMALL, "--model_name_or_path", "./model", "--dataset_name", "rows.jsonl", "--verifier", "exact", "--output_dir", "run",
                  "--max_completion_length", "4")
    assert "cannot be tokenized" in err and "unsafe" in err


# ---------------------------------------------------------------------------------------------------- no space, no permission

def full_disk(path, *args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def broken_zip(*args, **kwargs):                             # what torch.save says when the disk is full
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")


def no_permission(a, b):
    raise PermissionError(errno.EACCES, "Permission denied", str(b))


@pytest.mark.parametrize("where, fault, words", [
    ((torch, "save"), broken_zip, ["run/checkpoints/step_3", "the last complete checkpoint is step_2", "inline_container"]),
    ((os, "rename"), no_permission, ["run/checkpoints/step_3", "the last complete checkpoint is step_2", "Permission denied"]),
    ((os, "fsync"), full_disk, ["run/checkpoints/step_3", "No space left"]),
    ((checkpoints, "open"), full_disk, ["run/metrics.jsonl could not be written", "No space left"]),
])
def test_write_that_fails_leaves_the_last_checkpoint(where, fault, words, whole, workplace, monkeypatch, capsys):
    argv, alone = [*TINY, "--steps", "4", "--save_steps", "1"], whole()
    append = checkpoints.append

    def breaking(path, record):
        if record["step"] == 3:
            monkeypatch.setattr(*where, fault, raising=False)
        append(path, record)
    with monkeypatch.context():
        monkeypatch.setattr(checkpoints, "append", breaking)
        err = refused(capsys, *argv, "--output_dir", "run")
        monkeypatch.undo()
    os.chdir(workplace)
    assert [w for w in words if w not in err] == [], err
    assert "MB are free there)" in err
    assert sorted(os.listdir("run/checkpoints")) == ["step_1", "step_2"]
    train.main([*argv, "--output_dir", "run", "--resume"])
    assert differences(alone, "run", 4) == []


def test_file_size_limit_of_the_system(whole, workplace, monkeypatch, capsys):
    """A real failing write, in the middle of model.safetensors."""
    argv, alone = [*TINY, "--steps", "4", "--save_steps", "1"], whole()
    size, (soft, hard) = (alone / "checkpoints/step_4/model.safetensors").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    save = checkpoints.save

    def limited(run, step, *rest):
        try:
            if step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
            save(run, step, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.setattr(checkpoints, "save", limited)
    err = refused(capsys, *argv, "--output_dir", "run")
    assert "run/checkpoints/step_2 (the last complete checkpoint is step_1) could not be written" in err and "too large" in err
    assert os.listdir("run/checkpoints") == ["step_1"]
    monkeypatch.setattr(checkpoints, "save", save)
    train.main([*argv, "--output_dir", "run", "--resume"])
    assert differences(alone, "run", 4) == []

# ------------------------------------------------------------------------ an error saves first

def failing(monkeypatch, owner, name, step, fault):
    """owner.name raises `fault` once batch `step` has begun."""
    collect, now, call = train.collect, [0], getattr(owner, name)

    def counting(*args):
        now[0] = args[-1]
        return collect(*args)

    def breaking(*args, **options):
        if now[0] == step:
            raise fault
        return call(*args, **options)
    monkeypatch.setattr(train, "collect", counting)
    monkeypatch.setattr(owner, name, breaking)


@pytest.mark.parametrize("name, fault", [
    ("Learner.score", ValueError("bad")), ("estimate_advantages", RuntimeError("bug")),
    ("reward", OSError("gone")), ("update", torch.OutOfMemoryError("no memory"))])
def test_an_error_after_the_first_batch_saves_it_first(name, fault, whole, workplace, monkeypatch, capsys):
    """No --save_steps: without that the batches before the error would be lost. Resumed, the run is the whole one."""
    argv, alone = [*TINY, "--steps", "4"], whole()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda: (0, 8 * 10 ** 9))
        owner = train.Learner if name == "Learner.score" else train
        failing(patch, owner, name.rpartition(".")[2], 3, fault)
        with pytest.raises((SystemExit, RuntimeError)):
            train.main([*argv, "--output_dir", "run"])
    assert "error in batch 3; run/checkpoints/step_2 was saved; --resume continues from it" in capsys.readouterr().out
    assert os.listdir("run/checkpoints") == ["step_2"]
    train.main([*argv, "--output_dir", "run", "--resume"])
    assert differences(alone, "run", 4) == []


def test_an_error_between_two_updates_says_what_the_checkpoint_holds(workplace, monkeypatch, capsys):
    update, calls = train.update, [0]

    def breaking(*args):
        calls[0] += 1
        if calls[0] == 4:
            raise ValueError("bad")
        return update(*args)
    monkeypatch.setattr(train, "update", breaking)
    err = refused(capsys, *TINY, "--steps", "3", "--output_dir", "run")
    assert err == "train.py: bad\n" and os.listdir("run/checkpoints") == ["step_1"]
    monkeypatch.setattr(train, "update", update)
    train.main([*TINY, "--steps", "3", "--output_dir", "run", "--resume"])
    assert [r["step"] for r in metrics("run")] == [1, 2, 3]


def test_an_error_in_the_first_batch_and_ruined_weights_save_nothing(workplace, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        failing(patch, train.Learner, "score", 1, ValueError("bad"))
        refused(capsys, *TINY, "--steps", "2", "--output_dir", "run")
    assert not Path("run/checkpoints").exists()
    score = train.Learner.score

    def ruining(learner, *rest, **options):
        if Path("ruined/metrics.jsonl").exists():
            next(learner.policy.parameters()).data.fill_(float("nan"))
            raise ValueError("bad")
        return score(learner, *rest, **options)
    monkeypatch.setattr(train.Learner, "score", ruining)
    refused(capsys, *TINY, "--steps", "2", "--output_dir", "ruined")
    assert not Path("ruined/checkpoints").exists()


# --------------------------------------------------------------------------------------------------------------- collapse

def test_collapse_is_announced_in_the_line_of_its_batch(workplace, monkeypatch, capsys):
    make, answers = train.tasks.running_sum, [0]

    def fading(*args, **kwargs):
        task = make(*args, **kwargs)

        def verify(response, problem):
            answers[0] += 1
            return float(answers[0] <= 2 * 16)               # two batches of 16 responses are right, then none is
        task.verify = verify
        return task
    monkeypatch.setattr(train.tasks, "running_sum", fading)
    train.main([*TINY, "--steps", "3", "--output_dir", "run"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch ")]
    assert ["COLLAPSED" in line for line in lines] == [False, False, True] and "pass rate below half its best" in lines[2]


def test_lost_entropy_is_announced_unless_all_is_learnt():
    assert collapse({"pass_rate": 0.3, "entropy": 1e-6}, 0.3) == "no entropy left"
    assert collapse({"pass_rate": 1.0, "entropy": 1e-6}, 1.0) == ""
    assert collapse({"pass_rate": 0.3, "entropy": 0.1}, 0.5) == ""

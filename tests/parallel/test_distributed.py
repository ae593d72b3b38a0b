"""Two processes are one: the weights of torchrun's runs against a single process's. Needs no GPU (gloo); python -m pytest -m slow -s tests/parallel/test_distributed.py"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plumbing.run import checkpoints
from plumbing.model import cold_start
import train
from tiny_run import TRAIN, differences, metrics

FLAGS = ("--min_terms 1 --max_terms 2 --hidden_size 32 --num_experts 4 --num_hidden_layers 2 --cold_start_steps 200 "
         "--cold_start_learning_rate 0.005 --prompts_per_step 8 --num_generations 4 --steps_per_generation 2 --warmup_steps 0 --learning_rate 1e-3 "
         "--max_completion_length 12 --temperature 1.5 --steps 5 --device cpu").split()


def tiny(argv):
    """The flags of a run with these: none of the tiny MoE and its task beside a checkpoint and data."""
    return FLAGS[FLAGS.index("--prompts_per_step"):] if "--dataset_name" in argv else FLAGS


RUNS = {"gspo": ["--eval_samples", "0"],
        "ppo": ["--algorithm", "ppo", "--eval_samples", "2", "--eval_prompts", "5"],     # a critic; an evaluation that does not divide evenly
        "rspo": ["--algorithm", "rspo", "--beta", "0.05", "--router_aux_loss_coef", "0.01", "--micro_batch_size", "2", "--eval_samples", "0"]}
RUNS["teacher"] = ["--algorithm", "grpo", "--advantage", "distillation", "--teacher_model_name_or_path",
                   "gspo/checkpoints/step_5", "--eval_samples", "0"]
RUNS["self"] = ["--algorithm", "grpo", "--distillation_coef", "0.5", "--self_distillation", "answer", "--eval_samples", "0"]
RUNS["moving"] = ["--beta", "0.05", "--sync_ref_model", "--ref_model_sync_steps", "2", "--max_completion_length", "5",
                  "--mask_truncated_completions", "--eval_samples", "0"]
RUNS["sdpo"] = ["--algorithm", "sdpo", "--eval_samples", "0"]
RUNS["prefix"] = ["--model_name_or_path", "model", "--dataset_name", "prefix.jsonl", "--verifier", "exact",
                  "--no_chat_template", "--eval_samples", "0"]     # more than fast.MIN_PREFIX equal tokens
SHARD, WIDTHS = {"ddp": [], "fsdp2": ["--shard"]}, []

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the cold start and the single process's runs."""
    home, threads = tmp_path_factory.mktemp("distributed"), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(cold_start, "MUST_PASS", 0.0)
        patch.setattr(train, "update", watching(train.update))
        train.main([*FLAGS, "--eval_samples", "0", "--steps", "1", "--output_dir", "first"])
        shutil.copytree(next((home / "runs" / "cold_start").iterdir()), home / "model")
        rows = [{"prompt": f"1+2+3+4+5+6+7+8+9+{i}+{i}=", "answer": str(5 + 2 * i)[-1]} for i in range(10)]
        (home / "prefix.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
        for name, flags in RUNS.items():
            train.main([*tiny(flags), *flags, "--output_dir", name])
    torch.set_num_threads(threads)
    return home


def watching(update):
    """Notes how wide the two halves of every mini-batch are, which two processes would get."""
    def noting(args, learner, mini):
        halves = mini.rollout.mask.chunk(2)
        WIDTHS.append(tuple(int(part.sum(-1).max()) for part in halves))
        return update(args, learner, mini)
    return noting


def torchrun(home, *argv, script=TRAIN, expect=0):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), *tiny(argv), *argv],
                          cwd=home, capture_output=True, text=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode == 0) == (expect == 0), done.stdout + done.stderr
    return done


def distance(home, one, two):
    a, b = (load_file(home / run / "checkpoints" / "step_5" / "model.safetensors") for run in (one, two))
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.mark.parametrize("name, how", [("gspo", "ddp"), ("gspo", "fsdp2"), ("ppo", "fsdp2"), ("rspo", "ddp"),
                                       ("prefix", "fsdp2"), ("teacher", "fsdp2"), ("self", "ddp"), ("moving", "fsdp2"), ("sdpo", "ddp")])
def test_two_processes_end_with_the_weights_of_one(name, how, home):
    run = f"{name}-{how}"
    done = torchrun(home, *RUNS[name], *SHARD[how], "--output_dir", run)
    far = distance(home, name, run)
    print(f"\nlargest weight difference to one process after 5 batches, {run}: {far:.1e}")
    assert far < 1e-4
    assert any(one != other for one, other in WIDTHS)                                          # the processes had rows of unequal width
    assert sum(line.startswith("batch ") for line in done.stdout.splitlines()) == 5            # the first process alone prints
    for a, b in zip(metrics(home / name), metrics(home / run), strict=True):
        for key in ("reward", "length", "truncated"):                                          # the same responses
            assert a[key] == b[key], (a["step"], key)
        for key in ("loss", "grad_norm", "clip_low", "clip_high", "perplexity_new", "flip_rate", "kl", "value_loss"):
            assert a.get(key) is b.get(key) is None or a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (a["step"], key)
    if name == "ppo":
        one, two = (torch.load(home / r / "checkpoints/step_5/state.pt", weights_only=True)["critic"] for r in (name, run))
        assert one.keys() == two.keys() and all(torch.allclose(one[key], two[key], atol=1e-4) for key in one)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_killed_rank_ends_the_job_and_the_resumed_job_is_bit_equal(how, home):
    """SIGKILL for the second process in batch 4, after the checkpoint of batch 2: no hang, an exit code, a whole checkpoint, a resume."""
    run, whole, flags = f"killed-{how}", f"whole-{how}", [*RUNS["ppo"], *SHARD[how], "--save_steps", "2"]
    torchrun(home, *flags, "--output_dir", whole)
    script = home / "dying.py"
    script.write_text(textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(Path(TRAIN).parent)!r})
        import train
        estimate, batch = train.estimate_advantages, [0]
        def dying(*args, **options):
            batch[0] += 1
            if batch[0] == 4 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), 9)
            return estimate(*args, **options)
        train.estimate_advantages = dying
        train.main()
    """))
    done = torchrun(home, *flags, "--output_dir", run, script=script, expect=1)
    assert "train.py: process 0 stops because another process of this job has died" in done.stderr and "--resume" in done.stderr
    steps = [2, 3] if how == "ddp" else [2]                  # one replica can save what it has, one shard cannot
    assert [step for step, _ in checkpoints.whole(home / run)] == steps and len(os.listdir(home / run / "checkpoints")) == len(steps)
    torchrun(home, *flags, "--output_dir", run, "--resume")
    assert differences(home / whole, home / run, 5) == []


def test_ddp_is_freed_before_the_process_group(home):
    """Freed after the group, it now and then hangs its process: see processes.stop."""
    script = home / "stopping.py"
    script.write_text(textwrap.dedent(f"""
        import gc, os, sys
        sys.path.insert(0, {str(Path(TRAIN).parent)!r})
        from torch.nn.parallel import DistributedDataParallel
        import train
        from plumbing.parallel import processes
        stop, wrap, wrapped = processes.stop, processes.wrap, []
        def counting(*args):
            scorer = wrap(*args)
            wrapped.append(type(scorer).__name__)
            return scorer
        def checked():
            alive = sum(type(each) is DistributedDataParallel for each in gc.get_objects())
            with open(f"alive-{{os.environ['RANK']}}", "w") as file:
                file.write(f"{{wrapped}} {{alive}}")
            stop()
        processes.stop, processes.wrap = checked, counting
        train.main()
    """))
    torchrun(home, *RUNS["ppo"], "--steps", "1", "--output_dir", "stopping", script=script)
    assert [(home / f"alive-{rank}").read_text() for rank in range(2)] == ["['DistributedDataParallel'] 0"] * 2


def test_bad_argument_is_one_line_per_process(home):
    done = torchrun(home, "--prompts_per_step", "6", "--output_dir", "refused", expect=2)
    lines = {line for line in done.stderr.splitlines() if line.startswith("train.py: ")}
    assert lines == {"train.py: --prompts_per_step 6 / --steps_per_generation 2 prompts per mini-batch cannot be divided equally among 2 processes"}
    assert not (home / "refused").exists()


def test_folder_that_holds_a_run_is_refused_by_all(home):
    done = torchrun(home, "--eval_samples", "0", "--output_dir", "gspo", expect=2)
    assert "holds a run" in done.stderr and "Traceback (most recent call last):\n  File \"" + TRAIN not in done.stderr


def test_a_cold_start_made_by_two_processes_is_whole(home):
    """transformers lets the first process alone write a model: a folder of the second's has none."""
    script = home / "slow_first.py"
    script.write_text(textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(TRAIN).parent)!r})
        import train
        from moe import TinyMoE
        from plumbing.model import cold_start
        cold_start.MUST_PASS, save = 0.0, TinyMoE.save_pretrained
        def saved(*args):
            time.sleep(3 * (os.environ["RANK"] == "0"))
            save(*args)
        TinyMoE.save_pretrained = saved
        train.main()
    """))
    cold_starts = home / "runs" / "cold_start"
    before = set(cold_starts.iterdir())
    torchrun(home, "--seed", "1", "--cold_start_steps", "20", "--steps", "1", "--eval_samples", "0", "--output_dir", "made-by-two", script=script)
    made, = set(cold_starts.iterdir()) - before
    assert {file.name for file in made.iterdir()} == {file.name for file in before.pop().iterdir()} > {"config.json", "model.safetensors"}

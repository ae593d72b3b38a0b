"""Two processes are one: the weights of torchrun's runs against a single process's. Needs no GPU
(gloo). python -m pytest -m slow -s tests/parallel/test_distributed.py"""

import os
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from tiny_run import TRAIN, differences, jsonl, metrics, python, write

POLICY = ("--min_terms 1 --max_terms 2 --hidden_size 32 --num_experts 4 --num_hidden_layers 2 "
          "--cold_start_steps 200 --cold_start_learning_rate 0.005 ")
FLAGS = ("--prompts_per_step 8 --num_generations 4 --steps_per_generation 2 --warmup_steps 0 "
         "--learning_rate 1e-3 --max_completion_length 12 --temperature 1.5 --steps 5 --device cpu "
         "--eval_samples 0 ")
RUNS = {
    "gspo": "",
    "ppo": "--algorithm ppo "
           "--eval_samples 2 --eval_prompts 5",              # that does not divide evenly
    "rspo": "--algorithm rspo --beta 0.05 --router_aux_loss_coef 0.01 --micro_batch_size 2",
    "cut": "--beta 0.05 --max_completion_length 5 --mask_truncated_completions",
    "prefix": "--model_name_or_path model --dataset_name prefix.jsonl --verifier exact "
              "--chat_template false",           # more than fast.MIN_PREFIX equal tokens
    "turns": "--model_name_or_path model --dataset_name prefix.jsonl --chat_template false "
             "--environment play.py:Play --stop , --algorithm gspo_token "
             "--advantage turn_returns --eval_samples 2 --eval_prompts 3 "
             "--learning_rate 2e-4",               # at 1e-3 ratios of 8 make much of rounding
}
PLAY = """
import random
class Play:
    def __init__(self, row):
        self.rng = random.Random(row["prompt"])
    def step(self, text):
        return self.rng.choice(["1+", "2+1="]), len(text) / 10, self.rng.random() < 0.3
"""
CLOSE = "loss grad_norm clip_low clip_high perplexity_new flip_rate kl value_loss".split()
SHARD, WIDTHS = {"ddp": "", "fsdp2": " --shard"}, []

pytestmark = pytest.mark.slow


def words(flags):
    """Those of a run: none of the tiny MoE and its task beside a checkpoint and data."""
    return (POLICY * ("--dataset_name" not in flags) + FLAGS + flags).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the cold start and the single process's runs."""
    home, threads = tmp_path_factory.mktemp("distributed"), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(train, "update", watching(train.update))
        train.main(words("--steps 1 --output_dir first"))
        shutil.copytree(next((home / "runs/cold_start").iterdir()), home / "model")
        jsonl("prefix.jsonl", [{"prompt": f"1+2+3+4+5+6+7+8+9+{i}+{i}=",
                                "answer": str(5 + 2 * i)[-1]} for i in range(10)] * 2)
        write("play.py", PLAY)
        for name, flags in RUNS.items():
            train.main(words(f"{flags} --output_dir {name}"))
    torch.set_num_threads(threads)
    return home


def watching(update):
    """Notes how wide the two halves of every mini-batch are, which two processes would get."""
    def noting(learner, mini):
        halves = mini.rollout.mask.chunk(2)
        WIDTHS.append(tuple(int(part.sum(-1).max()) for part in halves))
        return update(learner, mini)
    return noting


def torchrun(home, flags, script=TRAIN, code=0):
    return python(script, *words(flags), cwd=home, processes=2, code=code)


def changed(home, change):
    """A script that changes something, and then is train.py."""
    file = home / "changed.py"
    there = f"import os, sys\nsys.path.insert(0, {str(Path(TRAIN).parent)!r})\nimport train\n"
    write(file, f"{there}{textwrap.dedent(change)}\ntrain.main()\n")
    return file


@pytest.mark.parametrize("run", [
    "gspo-ddp", "gspo-fsdp2", "ppo-fsdp2", "rspo-ddp", "prefix-fsdp2", "cut-fsdp2", "turns-ddp"])
def test_two_processes_end_with_the_weights_of_one(run, home):
    name, how = run.split("-")
    done = torchrun(home, f"{RUNS[name]}{SHARD[how]} --output_dir {run}")
    step = [home / one / "checkpoints/step_5" for one in (name, run)]
    a, b = (load_file(folder / "model.safetensors") for folder in step)
    assert a.keys() == b.keys()
    far = max((a[key] - b[key]).abs().max().item() for key in a)
    print(f"\nlargest weight difference to one process after 5 batches, {run}: {far:.1e}")
    assert far < 1e-4
    assert any(one != other for one, other in WIDTHS), "the processes had rows of unequal width"
    said = done.stdout.splitlines()
    assert sum(line.startswith("batch ") for line in said) == 5, "the first process alone prints"
    for a, b in zip(metrics(home / name), metrics(home / run), strict=True):
        for key in ("reward", "length", "truncated"):        # the same responses
            assert a[key] == b[key], (a["step"], key)
        for key in CLOSE:
            one, two = a.get(key), b.get(key)
            near = two if two is None else pytest.approx(two, rel=1e-3, abs=1e-5)
            assert one == near, (a["step"], key)
    if name == "ppo":
        one, two = (torch.load(folder / "state.pt", weights_only=True)["critic"] for folder in step)
        assert one.keys() == two.keys()
        assert all(torch.allclose(one[key], two[key], atol=1e-4) for key in one)


@pytest.mark.parametrize("how", SHARD)
def test_killed_rank_ends_the_job_and_the_resumed_job_is_bit_equal(how, home):
    """SIGKILL for the second process in batch 4, after the checkpoint of batch 2: no hang, an exit
    code, whole checkpoints, a resume."""
    run, whole = f"killed-{how}", f"whole-{how}"
    flags = f"{RUNS['ppo']}{SHARD[how]} --save_steps 2 --output_dir"
    torchrun(home, f"{flags} {whole}")
    dying = changed(home, """
        estimate, batch = train.estimate_advantages, [0]
        def dying(*args, **options):
            batch[0] += 1
            if batch[0] == 4 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), 9)
            return estimate(*args, **options)
        train.estimate_advantages = dying""")
    torchrun(home, f"{flags} {run}", script=dying, code=1)
    assert os.listdir(home / run / "checkpoints") == ["step_2"]
    torchrun(home, f"{flags} {run} --resume")
    assert differences(home / whole, home / run, 5) == []


@pytest.mark.parametrize("how, kind", [
    ("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPActor")])
def test_the_kind_of_module_that_trains_and_ddp_is_freed_before_the_process_group(how, kind, home):
    """Freed after the group, it now and then hangs its process: see processes.stop."""
    counting = changed(home, """
        import gc
        from torch.nn.parallel import DistributedDataParallel
        from plumbing.parallel import processes
        stop, wrap, wrapped = processes.stop, processes.wrap, []
        def counting(*args):
            scorer = wrap(*args)
            wrapped.append(type(scorer).__name__)
            return scorer
        def checked():
            alive = sum(type(each) is DistributedDataParallel for each in gc.get_objects())
            with open(f"alive-{os.environ['RANK']}", "w") as file:
                file.write(f"{wrapped} {alive}")
            stop()
        processes.stop, processes.wrap = checked, counting""")
    torchrun(home, f"{RUNS['ppo']} --steps 1{SHARD[how]} --output_dir {how}",
             script=counting)
    for rank in (0, 1):
        assert (home / f"alive-{rank}").read_text(encoding="utf-8") == f"['{kind}'] 0"


def test_folder_that_holds_a_run_is_refused_by_all(home):
    said = torchrun(home, "--output_dir gspo", code=1).stderr
    assert said.count("config.json exists") == 2 and f'File "{TRAIN}' not in said


def test_a_cold_start_made_by_two_processes_is_whole(home):
    """transformers lets the first process alone write a model: the second's folder has none."""
    slow = changed(home, """
        import time
        from moe import TinyMoE
        save = TinyMoE.save_pretrained
        def saved(*args):
            time.sleep(3 * (os.environ["RANK"] == "0"))
            save(*args)
        TinyMoE.save_pretrained = saved""")
    cold_starts = home / "runs/cold_start"
    before = set(cold_starts.iterdir())
    torchrun(home, "--seed 1 --cold_start_steps 20 --steps 1 --output_dir made-by-two", script=slow)
    made, = set(cold_starts.iterdir()) - before
    files, known = ({file.name for file in folder.iterdir()} for folder in (made, before.pop()))
    assert files == known > {"config.json", "model.safetensors"}

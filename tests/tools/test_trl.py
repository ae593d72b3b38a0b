"""What `python tools/export.py trl` prints, in TRL 1.16. python -m pytest tests/tools/test_trl.py"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.data.tasks import from_arguments
from plumbing.run.arguments import parse
from tools import export
from tools.trl import batch_rows

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.trl, pytest.mark.skipif(not importlib.util.find_spec("trl"),
                                                  reason="trl is missing: pip install trl==1.16.0")]
SIZE = ("--steps 1 --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 "
        "--micro_batch_size 4 --max_completion_length 6 --device cpu --learning_rate 0.01 "
        "--warmup_steps 0 --lr_scheduler_type constant_with_warmup").split()

MINE = '''
def plain(response, answer):
    return float(response.strip() == answer)

def parts(response, answer):
    return {"seven": float("7" in response), "short": 0.5 * (len(response) < 6)}

def with_problem(response, answer, problem):
    return float(problem["question"][0] in response)

def whole_batch(prompts, completions, answer, **columns):
    return [float(len(text)) for text in completions]
'''


def make_checkpoint(folder):
    """A tiny random Qwen2 over the characters of the built-in task."""
    tokenizer = builtin_tokenizer()
    config = AutoConfig.for_model(
        "qwen2", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, vocab_size=len(tokenizer), bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def printed(capsys, *flags):
    export.main(["trl", *flags])
    return capsys.readouterr().out


def config_of(text, **more):
    """The GRPOConfig that is printed."""
    from trl import GRPOConfig
    make = SimpleNamespace(GRPOConfig=lambda **fields: GRPOConfig(**fields | more))
    return eval(text, {"trl": make})


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a checkpoint, rows and verifiers; the flags that name the first two."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(4) for b in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(MINE)
    return ["--model_name_or_path", make_checkpoint(tmp_path / "model"),
            "--dataset_name", "rows.jsonl", *SIZE]


FORMS = ["exact", "math", "mine.py:plain", "mine.py:parts", "mine.py:with_problem",
         "mine.py:whole_batch", "./mine.py:plain", "{here}/mine.py:plain", "exact mine.py:parts"]


@pytest.mark.parametrize("form", [
    form if form == "exact mine.py:parts" else pytest.param(form, marks=pytest.mark.slow)
    for form in FORMS])
def test_a_config_is_printed_for_every_form_of_a_verifier_and_trains(form, work, capsys):
    """Two optimizer steps of two micro-batches each. The prompts and the rewards are the user's
    part, as a comment says; here they come from this project's task."""
    from datasets import Dataset
    from trl import GRPOTrainer
    verifiers = form.format(here=os.getcwd()).split()
    flags = [*work, "--verifier", *verifiers]
    args = parse(flags)
    assert batch_rows(args) == (4, 2)
    text = printed(capsys, *flags)
    others, = [line for line in text.splitlines() if line.startswith("# not in trl.GRPOConfig")]
    assert f"--verifier {' '.join(verifiers)}" in others
    task = from_arguments(args)
    assert task.judge(["7"], task.train[:1]).shape[0] == 1
    rows = [{"prompt": problem.prompt, "index": i} for i, problem in enumerate(task.train)]
    rewards = []

    def reward(completions, index, **columns):
        problems = [task.train[i] for i in index]
        rewards.append(task.total(task.judge(completions, problems)).tolist())
        return rewards[-1]

    model = args.model_name_or_path
    trainer = GRPOTrainer(model, reward, config_of(text, disable_tqdm=True), Dataset.from_list(rows),
                          processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"))
    trainer.train()
    assert trainer.state.global_step == 2                    # --steps 1 of two mini-batches
    assert sum(map(len, rewards)) == 16                      # 4 prompts of 4 responses


@pytest.mark.parametrize("decay", ["0", "0.1"])
def test_weight_decay_of_biases_and_norms_is_said_to_differ(decay, work, capsys):
    """TRL's own optimizer leaves them out; ours decays every weight."""
    from datasets import Dataset
    from trl import GRPOTrainer
    flags = [*work, "--weight_decay", decay]
    text = printed(capsys, *flags)
    assert ("# weight decay: TRL leaves out biases and the weights of norms" in text) == (
        decay != "0")
    args = parse(flags)
    trainer = GRPOTrainer(args.model_name_or_path, lambda completions, **columns: [0.0],
                          config_of(text), Dataset.from_list([{"prompt": "1+1"}] * 4))
    theirs = trainer.create_optimizer()
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    spared = {names[id(p)] for group in theirs.param_groups for p in group["params"]
              if group["weight_decay"] == 0}
    ours = train.make_optimizer(args, trainer.model)
    assert all(group["weight_decay"] == float(decay) for group in ours.param_groups)
    for name in names.values():
        left_out = decay == "0" or name.endswith("bias") or "norm" in name
        assert (name in spared) == left_out, name
    one = theirs.param_groups[0]
    assert (type(theirs), one["lr"], one["betas"]) == (torch.optim.AdamW, 0.01, (0.9, 0.95))


@pytest.mark.slow
def test_what_is_printed_runs_as_a_script(work, capsys):
    """The text itself, in a process of its own: its only name is trl."""
    text = printed(capsys, *work)
    Path("run.py").write_text(
        "import trl\nfrom datasets import Dataset\n"
        f"config = {text[text.index('trl.GRPOConfig('):]}\n"
        "rows = Dataset.from_list([{'prompt': f'{i}+1'} for i in range(8)])\n"
        "def reward(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
        "trainer = trl.GRPOTrainer('model', reward, config, rows)\n"
        "trainer.train()\ntrainer.save_model()\n")
    environment = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "run.py"], env=environment, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    before = load_file("model/model.safetensors")
    after = load_file("runs/trl-gspo/model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("micro, rows, accumulated", [(None, 128, 1), (48, 32, 4), (8, 8, 16), (1024, 128, 1)])
def test_a_micro_batch_divides_the_mini_batch(micro, rows, accumulated):
    """32 prompts of 16 responses in 4 mini-batches of 128."""
    flags = ["--num_generations", "16", *(["--micro_batch_size", str(micro)] if micro else [])]
    assert batch_rows(parse(flags)) == (rows, accumulated)


def test_what_trl_has_under_the_same_name_is_in_its_config_and_what_it_lacks_is_named(capsys):
    text = printed(capsys, "--mask_truncated_completions", "--beta", "0.1", "--sync_ref_model",
                   "--ref_model_sync_steps", "3")
    for field in ("mask_truncated_completions=True", "ref_model_mixup_alpha=0.6",
                  "ref_model_sync_steps=12"):
        assert f"    {field},\n" in text
    assert "# TRL lets AdamW step on its momentum where a mini-batch has no loss token" in text
    for flags, words in ((["--top_p", "0.9"], "renormalized"),
                         (["--length_penalty", "0.1"], "length penalty"),
                         (["--positive_example_nll_weight", "0.1"], "likelihood")):
        assert words in printed(capsys, *flags)


def test_a_flag_that_is_gone_says_what_to_type(capsys):
    for program in ("trl", "verl"):
        with pytest.raises(SystemExit) as stop:
            train.main([f"--print_{program}_config", "--beta", "0.1"])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and f"python tools/export.py {program}" in error
        assert error.count("\n") == 1


def test_the_command_line_of_the_exports(capsys):
    """No file of train.py's; errors are one line."""
    done = subprocess.run([sys.executable, ROOT / "tools/export.py", "trl", "--epsilon", "-1"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("export.py: --epsilon")
    for words in (["tlr"], ["verl", "--lerning_rate", "1"]):
        with pytest.raises(SystemExit) as stop:
            export.main(words)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_vllm_is_in_the_config_of_a_run_with_vllm_alone(monkeypatch, tmp_path, capsys):
    """TRL takes the fields; its weights, which drop whole responses by default, are on only where
    the run has them."""
    assert "vllm" not in printed(capsys, "--device", "cpu").lower()
    monkeypatch.syspath_prepend(str(ROOT / "tests/engines/fake"))
    more = ["--vllm_gpu_memory_utilization", "0.5", "--mismatch", "token_truncate"]
    for flags, share, mode in (([], 0.3, None), (more, 0.5, "token_truncate")):
        text = printed(capsys, "--device", "cpu", "--sampler", "vllm", *flags)
        assert "# not in trl.GRPOConfig" not in text and "pip install trl[vllm], and a GPU" in text
        found = config_of(text, output_dir=str(tmp_path))
        assert found.use_vllm and found.vllm_mode == "colocate"
        assert found.vllm_gpu_memory_utilization == share
        assert found.vllm_importance_sampling_correction == (mode is not None)
        assert mode is None or found.vllm_importance_sampling_mode == mode

"""What `python tools/export.py trl` prints, in TRL 1.16.
python -m pytest tests/tools/test_trl.py"""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from models import saved
from plumbing.data.tasks import prepare_task
from session.arguments import INSTEAD, flags, parse, suggest_flag
from test_losses_against_trl import trl_config
from tiny_run import jsonl, slow, write
from tools import export
from tools.trl import batch_rows

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.trl
WORK = ("--model_name_or_path model --dataset_name rows.jsonl --steps 1 --prompts_per_step 4 "
        "--num_generations 4 --steps_per_generation 2 --micro_batch_size 4 --device cpu "
        "--max_completion_length 6 --learning_rate 0.01 --warmup_steps 0 "
        "--lr_scheduler_type constant_with_warmup ")

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


@pytest.fixture
def printed(capsys):
    """printed("--flags") is the text of the export."""
    def export_of(line=""):
        export.main(["trl", *line.split()])
        return capsys.readouterr().out
    return export_of


def trainer_of(text, rows, reward=lambda completions, **columns: [0.0]):
    """TRL's trainer of these settings."""
    from datasets import Dataset
    from trl import GRPOTrainer
    tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")
    return GRPOTrainer("model", reward, trl_config(text, disable_tqdm=True),
                       Dataset.from_list(rows), processing_class=tokenizer)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a random Qwen2, rows and verifiers, as WORK names them."""
    monkeypatch.chdir(tmp_path)
    jsonl("rows.jsonl", [{"question": f"{a}+{b}", "answer": str(a + b)}
                         for a in range(4) for b in range(4)])
    write("mine.py", MINE)
    saved("model", "qwen2", num_hidden_layers=1)


@pytest.mark.parametrize("form", [
    *map(slow, "exact math mine.py:plain mine.py:parts mine.py:with_problem mine.py:whole_batch "
               "./mine.py:plain {here}/mine.py:plain".split()), "exact mine.py:parts"])
def test_a_config_is_printed_for_every_form_of_a_verifier_and_trains(form, work, printed):
    """Two optimizer steps of two micro-batches each. The prompts and the rewards are the user's
    part, as a comment says; here they come from this project's task."""
    verifiers = "--verifier " + form.format(here=os.getcwd())
    args = parse((WORK + verifiers).split())
    assert batch_rows(args) == (4, 2)
    text = printed(WORK + verifiers)
    others, = [line for line in text.splitlines() if line.startswith("# not in trl.GRPOConfig")]
    assert verifiers in others
    task = prepare_task(args)
    rewards = []

    def reward(completions, index, **columns):
        problems = [task.train[i] for i in index]
        rewards.append(task.total(task.reward_components(completions, problems)).tolist())
        return rewards[-1]
    trainer = trainer_of(text, [{"prompt": problem.prompt, "index": i}
                                for i, problem in enumerate(task.train)], reward)
    trainer.train()
    assert trainer.state.global_step == 2                    # --steps 1 of two mini-batches
    assert sum(map(len, rewards)) == 16                      # 4 prompts of 4 responses


OWN_DATA = "--model_name_or_path some/model --dataset_name rows.jsonl "
SAYS = {  # flags: the fields that are printed, or what a comment says
    "--reward_weights 0.5 --scale_rewards none": ["reward_weights=[0.5]"],
    "--num_generations 4": ["num_generations=4"],
    "--temperature 0.7": ["temperature=0.7"],
    "--learning_rate 0.01 --weight_decay 0.1": ["learning_rate=0.01", "weight_decay=0.1"],
    "--seed 7": ["seed=7"],
    "--lr_scheduler_type linear --warmup_steps 3": ["lr_scheduler_type='linear'", "warmup_steps=3"],
    "--max_grad_norm 0": ["max_grad_norm=0"],
    "--steps 9 --steps_per_generation 2 --save_steps 2":
        ["max_steps=18", "save_steps=4", "logging_steps=2", "steps_per_generation=2"],
    "--prompts_per_step 16 --num_generations 4 --micro_batch_size 8 --steps_per_generation 2":
        ["per_device_train_batch_size=8", "gradient_accumulation_steps=4",
         "steps_per_generation=8"],
    "--max_completion_length 33": ["max_completion_length=33"],
    "--optim adamw_8bit": ["optim='adamw_8bit'"],
    "--bf16 --gradient_checkpointing": ["bf16=True", "gradient_checkpointing=True"],
    "--scale_rewards batch": ["scale_rewards='batch'"],
    "--output_dir there --report_to tensorboard": ["output_dir='there'", "report_to='tensorboard'"],
    "--mask_truncated_completions --beta 0.1 --sync_ref_model --ref_model_sync_steps 3":
        ["mask_truncated_completions=True", "ref_model_mixup_alpha=0.6", "ref_model_sync_steps=6",
         "# TRL lets AdamW step on its momentum where a mini-batch has no loss token"],
    "--weight_decay 0.1": ["TRL leaves out biases"],
    "--stop a b": ["stop strings ['a', 'b']"],
    "--use_peft --lora_r 3 --lora_alpha 5 --lora_target_modules q_proj":
        ["peft_config=LoraConfig(", "r=3,", "lora_alpha=5", "target_modules=['q_proj']"],
    **{line: [line] for line in ("--plain", "--max_prompt_length 99", "--verifier exact",
                                 "--columns a b", "--eval_steps 3", "--system_prompt Think.")},
    "--top_p 0.9": ["renormalized"],
    "--algorithm grpo --beta 0.1 --use_kl_in_reward": ["it has no KL in the reward"],
    "--sampler_dtype int4 --zero_variance_filter":
        ["no filter of zero-variance groups, no rounded sampler"],
}


@pytest.mark.parametrize("line", SAYS)
def test_what_trl_has_is_in_its_config_and_what_it_lacks_is_named(line, printed, tmp_path):
    text = printed(OWN_DATA + line)
    assert [words for words in SAYS[line] if words not in text] == []
    if not text.startswith("# no equivalent"):
        trl_config(text, output_dir=str(tmp_path), use_cpu=True)
        assert OWN_DATA.strip() in text, "what is left to the user"


def test_a_config_is_printed_without_the_files_of_the_run(printed):
    assert "it has no environment" in printed("--environment nowhere.py:Play")


def test_the_command_line_of_the_exports(refused):
    """No file of train.py's; errors are one line."""
    assert refused("trl --epsilon -1", main=export.main).startswith("export.py: --epsilon")
    assert "docs/speed.md" in refused("verl --beta 0.1", main=export.main)
    refused("tlr", main=export.main)
    assert "no readable config.json" in refused("trl --resume --output_dir x", main=export.main)


@pytest.mark.parametrize("line, share, mode", [
    ("", 0.3, None),
    ("--vllm_gpu_memory_utilization 0.5 --mismatch token_truncate", 0.5, "token_truncate")])
def test_vllm_is_in_the_config_of_a_run_with_vllm_alone(line, share, mode, printed, monkeypatch,
                                                        tmp_path):
    """TRL takes the fields; its weights, which drop whole responses by default, are on only where
    the run has them."""
    assert "vllm" not in printed("--device cpu").lower()
    monkeypatch.syspath_prepend(str(ROOT / "tests/features/fake"))
    text = printed(f"--device cpu --sampler vllm {line}")
    assert "# not in trl.GRPOConfig" not in text and "pip install trl[vllm], and a GPU" in text
    found = trl_config(text, output_dir=str(tmp_path))
    assert found.use_vllm and found.vllm_mode == "colocate"
    assert found.vllm_gpu_memory_utilization == share
    assert found.vllm_importance_sampling_correction == (mode is not None)
    assert mode is None or found.vllm_importance_sampling_mode == mode


# ----------------------------------------------------------------------------- the names of TRL

MEANT = {  # fields of GRPOConfig for which a flag of another name is suggested
    "activation_checkpointing": "gradient_checkpointing", "data_seed": "seed",
    "deepspeed": "shard", "delta": "dual_clip", "eval_strategy": "eval_steps", "fsdp": "shard",
    "gradient_accumulation_steps": "micro_batch_size",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    "importance_sampling_level": "algorithm gspo", "max_steps": "steps",
    "num_generations_eval": "eval_samples", "num_train_epochs": "steps",
    "off_policy_mask_threshold": "off_policy_mask",
    "per_device_train_batch_size": "micro_batch_size", "resume_from_checkpoint": "resume",
    "run_name": "output_dir", "save_strategy": "save_steps",
    "use_bias_correction_kl": "kl_estimator k3_is", "use_cpu": "device cpu",
    "use_vllm": "sampler vllm", "vllm_mode": "sampler vllm"}


def test_a_field_of_trl_is_a_flag_or_the_right_other_name_or_unknown():
    from trl import GRPOConfig
    fields = {f.name for f in dataclasses.fields(GRPOConfig)} - {f.name for f in flags()}
    instead = {name for names in INSTEAD.values() for name in names.split()}
    assert len(fields) > 150 and len(fields & instead) > 20 and MEANT.keys() <= fields - instead
    for name in fields - instead:
        text = suggest_flag(f"--{name}=1")
        meant = re.match(r", did you mean --(\S+?( (vllm|gspo|cpu|k3_is))?)( \(|\?)", text)
        assert (meant and meant[1]) == MEANT.get(name), f"{name}{text}"


def documented():
    """(fields of GRPOConfig, flags) of the rows of docs/data.md that have values."""
    table = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("| GRPOConfig |")[2]
    for row in table.partition("\n\n")[0].splitlines():
        theirs, ours = (re.findall("`([^`]+)`", cell) for cell in row.split("|")[1:3]) if (
            row.count("|") == 3) else ((), ())
        yield from ((x, y) for x, y in zip(theirs, ours) if "=" in x)


@pytest.mark.parametrize("theirs, ours", [*documented()])
def test_a_row_of_the_page_about_trl_is_what_the_export_says(theirs, ours, work, printed,
                                                             monkeypatch):
    monkeypatch.setattr("features.vllm.VLLM.check", lambda settings: None)    # not installed
    base = "" if "algorithm" in ours else "--algorithm grpo --reduction token-mean "
    config = trl_config(printed(WORK + base + ours))
    want = trl_config(f"trl.GRPOConfig({theirs}, use_cpu=True)")
    names = ["loss_type", "importance_sampling_level", "scale_rewards", "beta", "delta", "use_vllm"]
    names += [] if "cispo" in theirs else ["epsilon"]        # which TRL's CISPO does not read
    names += ["use_bias_correction_kl"] if want.beta else []
    prefix = "vllm_importance_sampling"
    names += [f"{prefix}_{end}" for end in ("correction", "mode", "clip_max") if want.use_vllm]
    assert {name: getattr(config, name) for name in names} == {
        name: getattr(want, name) for name in names}
    high = want.epsilon if want.epsilon_high is None else want.epsilon_high
    assert config.epsilon_high == high

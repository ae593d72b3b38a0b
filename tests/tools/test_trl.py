"""What `python tools/export.py trl` prints, in TRL 1.16.
python -m pytest tests/tools/test_trl.py"""

import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from models import saved
from plumbing.data.tasks import prepare_task
from session.arguments import Settings, parse
from tiny_run import ROOT, SUMS, jsonl
from tools import export

pytest.importorskip("trl", minversion="1.16", reason="pip install trl==1.16.0")
pytestmark = pytest.mark.trl
WORK = ("--model_name_or_path model --dataset_name rows.jsonl --verifier exact --steps 1 "
        "--prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --micro_batch_size 4 "
        "--device cpu --max_completion_length 6 --warmup_steps 0 ")


def trl_config(text, **more):
    """The GRPOConfig that an export prints, with more fields."""
    from trl import GRPOConfig
    make = SimpleNamespace(GRPOConfig=lambda **fields: GRPOConfig(**fields | more))
    return eval(text, {"trl": make})


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """printed("--flags") is the text of the export, in a folder with a random Qwen2 and rows."""
    monkeypatch.chdir(tmp_path)
    jsonl("rows.jsonl", SUMS)
    saved("model", "qwen2", num_hidden_layers=1)

    def export_of(line=""):
        export.main(["trl", *(WORK + line).split()])
        return capsys.readouterr().out
    return export_of


def test_a_config_trains_the_optimizer_steps_of_the_run(printed):
    """Two of two micro-batches each. Prompts and rewards are the user's part; here they come from
    this project's task."""
    from datasets import Dataset
    from trl import GRPOTrainer
    settings = parse(WORK.split())
    assert export.batch_rows(settings) == (4, 2)
    task, rewards = prepare_task(settings), []

    def reward(completions, index, **columns):
        problems = [task.train[i] for i in index]
        rewards.append(task.total(task.reward_components(completions, problems)).tolist())
        return rewards[-1]
    rows = [{"prompt": problem.prompt, "index": i} for i, problem in enumerate(task.train)]
    trainer = GRPOTrainer("model", reward, trl_config(printed(), disable_tqdm=True),
                          Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(
                              "model", padding_side="left"))
    trainer.train()
    assert trainer.state.global_step == 2                    # --steps 1 of two mini-batches
    assert sum(map(len, rewards)) == 16                      # 4 prompts of 4 responses


SAYS = {  # flags: the fields that are printed, or the flags that a comment names
    "--temperature 0.7": ["temperature=0.7"],
    "--learning_rate 0.01 --weight_decay 0.1": ["learning_rate=0.01", "weight_decay=0.1"],
    "--seed 7 --scale_rewards none": ["seed=7", "scale_rewards='none'"],
    "--steps 9 --max_completion_length 33": ["max_steps=18", "max_completion_length=33"],
    "--prompts_per_step 16 --micro_batch_size 8":
        ["per_device_train_batch_size=8", "gradient_accumulation_steps=4",
         "steps_per_generation=8"],
    "--mask_truncated_completions --beta 0.1": ["mask_truncated_completions=True", "beta=0.1"],
    "--reward_weights 2 --chat_template_kwargs a=1": ["reward_weights=[2.0]", "{'a': 1}"],
    "--algorithm grpo --entropy_quantile 0.75": ["top_entropy_quantile=0.25"],
    "--algorithm sapo --constants tau_negative=3": ["sapo_temperature_neg=3,"],
    "--router_aux_loss_coef 0.1": ["router_aux_loss_coef=0.1", "tf32=False"],
    "--stop a b": ["# ", "stop"], "--use_peft --lora_r 3": ["# ", "use_peft, lora_r"],
    "--beta 0.1 --use_kl_in_reward": ["# ", "use_kl_in_reward"],
    "--algorithm gmpo": ["# ", "algorithm"], "--beta 1 --kl_estimator k2": ["# ", "kl_estimator"],
}


@pytest.mark.parametrize("line", SAYS)
def test_what_trl_has_is_in_its_config_and_what_it_lacks_is_named(line, printed):
    text = printed(line)
    assert [words for words in SAYS[line] if words not in text] == []
    assert text.startswith("#") == (SAYS[line][0] == "# ")
    trl_config(text, use_cpu=True)


def test_a_flag_that_trl_has_by_the_same_name_is_translated():
    from trl import GRPOConfig
    names = {f.name for f in fields(GRPOConfig)} & {f.name for f in fields(Settings)}
    assert names - {*export.SAME, *export.READ} == {"output_dir", "save_steps", "eval_steps"}


def documented():
    """(fields of GRPOConfig, flags) of the rows of docs/data.md that have values."""
    table = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("| GRPOConfig |")[2]
    for row in table.partition("\n\n")[0].splitlines():
        theirs, ours = (re.findall("`([^`]+)`", cell) for cell in row.split("|")[1:3]) if (
            row.count("|") == 3) else ((), ())
        yield from ((x, y) for x, y in zip(theirs, ours) if "=" in x and "vllm" not in x)


@pytest.mark.parametrize("theirs, ours", [*documented()])
def test_a_row_of_the_page_about_trl_is_what_the_export_says(theirs, ours, printed):
    base = "" if "algorithm" in ours else "--algorithm grpo --reduction token-mean "
    config = trl_config(printed(base + ours))
    want = trl_config(f"trl.GRPOConfig({theirs}, use_cpu=True)")
    names = ["loss_type", "importance_sampling_level", "scale_rewards", "beta", "delta"]
    names += [] if "cispo" in theirs else ["epsilon"]        # which TRL's CISPO does not read
    names += ["use_bias_correction_kl"] if want.beta else []
    assert {name: getattr(config, name) for name in names} == {
        name: getattr(want, name) for name in names}
    high = want.epsilon if want.epsilon_high is None else want.epsilon_high
    assert config.epsilon_high == high

"""Every bad input ends with exit code 2 and one line that says what was wrong and what would be
right; nothing is left behind (tests/conftest.py: refused). A value equal to the default never is
bad. Rows of data: tests/data. python -m pytest tests/run/test_bad_arguments.py"""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import eval
import models
from plumbing.parallel import processes
from session.arguments import ALGORITHMS, Settings, make_parser, parse
from tiny_run import TRAIN, python, write

MODEL = "--model_name_or_path m"
DATA = f"{MODEL} --dataset_name rows.jsonl"
# what the line says: flags with their values
OUT_OF_RANGE = {
    "at least 1": """steps=0 steps=-3 prompts_per_step=0 num_generations=0 steps_per_generation=0
        max_prompt_length=0 max_completion_length=0 micro_batch_size=0 hidden_size=0
        num_hidden_layers=0 num_experts=0 num_experts_per_tok=0 min_terms=0 eval_prompts=0""",
    "at least 0": """save_steps=-1 eval_steps=-1 eval_samples=-1 warmup_steps=-1 stage2_step=-1
        cold_start_steps=-1 seed=-1 max_grad_norm=-1 beta=-1 entropy_coef=-1 overlong_cache=-1
        router_aux_loss_coef=-1""",
    "above 0": "learning_rate=0 learning_rate=-0.5 cold_start_learning_rate=0 mismatch_high=0",
    "above 1": "dual_clip=0 dual_clip=0.5 dual_clip=1",
    "at least 1e-06": "temperature=1e-39 temperature=0",
    "invalid finite value": """temperature=nan temperature=-inf temperature=inf learning_rate=inf
        reward_weights=nan beta=inf verifier_timeout=inf beta=x""",
    "clip range": "epsilon=-0.1 epsilon=1.5 epsilon=nan epsilon_high=-0.1 epsilon_high=nan",
    "at most 1": "overlong_cache=1.5",
    f"at most {2 ** 28 - 1}": f"seed={2 ** 28}",             # modulo which torch counts them
    "invalid choice": """algorithm=nonsense advantage=nonsense scale_rewards=nonsense
        reduction=nonsense kl_estimator=nonsense old_logp=nonsense sampler_dtype=nonsense
        mismatch=nonsense mismatch_mask=nonsense lr_scheduler_type=nonsense device=tpu""",
    "invalid int value": "steps=many steps=1.5",
    "invalid float value": "epsilon=x",
    "invalid boolean value": "dynamic_sampling=perhaps",
    "multiple of 8": "hidden_size=20",
}


@pytest.mark.parametrize("given, words", [
    (given, words) for words, listed in OUT_OF_RANGE.items() for given in listed.split()])
def test_a_value_out_of_range(given, words, refused):
    said = refused(f"--{given}")
    assert words in said and (f"--{given.split('=')[0]}" in said or words == "clip range")


OWN_DATA = "needs --dataset_name|environment"
# flags: what the line says, with … where something is left out
REFUSED = {
    "--learning_rat 1 --sede 2": "--learning_rat 1 --sede 2",
    "nonsense": "nonsense",
    "--steps": "--steps … expected",
    "--max_terms 7 --min_terms 8": "--max_terms 7 is below --min_terms 8",
    # -------------------------------------------------------------------------- the batch
    "--num_generations 1": "--num_generations 1 is too few … --advantage group",
    "--algorithm ppo --num_generations 1 --dynamic_sampling":
        "--dynamic_sampling True cannot be combined with --num_generations=1: a group of one",
    "--prompts_per_step 3": "--steps_per_generation 2 … --prompts_per_step 3",
    "--micro_batch_size 3": "--micro_batch_size 3 … divide",
    "--num_experts_per_tok 9": "--num_experts_per_tok 9 is above --num_experts 4",
    # -------------------------------------------------------------------------- the objective
    "--dual_clip 2": "dual_clip … gspo",
    "--algorithm sapo --epsilon 0.1": "sapo … clip range",
    "--advantage gae": "gspo … per token",
    "--algorithm sapo --constants tau=3": "sapo, which has tau_positive, tau_negative",
    "--constants tau_negative=3": "gspo, which has none",
    "--algorithm dro --constants beta": "--constants: beta: NAME=VALUE",
    "--kl_estimator k2": "--kl_estimator k2 … beta",
    "--use_kl_in_reward": "--use_kl_in_reward True … beta",
    "--beta 0.1 --use_kl_in_reward --kl_estimator k2":
        "--kl_estimator k2 has no effect: k1 is subtracted from the rewards",
    "--lam 0.9": "--lam 0.9 … --advantage",
    # -------------------------------------------------------------------------- the sampler
    "--algorithm rspo --old_logp sampler": "--old_logp sampler … rspo",
    "--algorithm ppo --old_logp sampler": "--old_logp sampler … gae",
    "--routing_replay old --old_logp sampler": "--old_logp sampler … --routing_replay",
    "--mismatch seq_truncate --old_logp sampler": "--mismatch seq_truncate … old_logp=recompute",
    "--algorithm minirl --old_logp sampler": "--mismatch token_truncate … old_logp=recompute",
    "--mismatch_high 3": "--mismatch_high 3.0 needs --mismatch",
    "--mismatch_mask token --mismatch_mask_bounds 6 5": "--mismatch_mask_bounds … two numbers",
    "--mismatch_mask token --mismatch_mask_bounds 3": "--mismatch_mask_bounds … two numbers",
    "--sampler guess": "--sampler guess must be vllm or FILE.py:CLASS",
    # -------------------------------------------------------------------------- data
    "--dataset_name rows.jsonl": "--dataset_name rows.jsonl … model_name_or_path",
    "--test_dataset_name rows.jsonl": "--test_dataset_name rows.jsonl … dataset_name",
    "--columns a b": f"--columns a b {OWN_DATA}",
    "--verifier exact": f"--verifier exact {OWN_DATA}",
    f"{DATA} --verifier nowhere.py:judge": "nowhere.py",
    f"{DATA} --verifier mine.py:judge": "mine.py has no function or class 'judge'",
    f"{MODEL} --environment mine.py:Play": "mine.py has no function or class 'Play'",
    f"{DATA} --verifier mine.py:LIMIT": "mine.py has no function or class 'LIMIT'",
    "--chat_template_kwargs x=y": "--chat_template_kwargs: x=y: NAME=VALUE",
    "--chat_template_kwargs [1]": "--chat_template_kwargs: [1]: NAME=VALUE",
    "--stop ''": "--stop … must hold no empty text",
    "--model_name_or_path ./nowhere": "./nowhere … there is no such folder",
    "--verifier_timeout 5": f"--verifier_timeout 5.0 {OWN_DATA}",
    f"{DATA} --system_prompt @nowhere.txt": "No such file … nowhere.txt",
    f"{DATA} --verifier exact --prompt_template Q:": "--prompt_template Q: … contain {prompt}",
    "--environment mine.py:Play --stage2_step 3": "--stage2_step 3 … one source of rows",
    f"{DATA} --environment mine.py:Play --shard": "--environment mine.py:Play … --shard",
    "--stage2_dataset_name rows.jsonl --stage2_step 3": "--stage2_dataset_name … dataset_name",
    "--max_turns 2": "--max_turns 2 … nvironment",
    # -------------------------------------------------------------------------- the policy
    "--lora_r 8": "--lora_r 8 … peft",
    # -------------------------------------------------------------------------- the run
    "--resume true": "--resume … output_dir",
    "--dry_run --resume --output_dir x": "x is not the folder of a run",
    "--resume --output_dir gone": "gone is not the folder of a run",
    "--output_dir old": "old/config.json exists: use --resume",
    "--config gone.yaml": "--config gone.yaml: … No such file",
}


@pytest.mark.parametrize("given", REFUSED)
def test_flags_that_do_not_fit(given, refused):
    write("rows.jsonl", '{"prompt": "2+2=", "answer": "4"}\n' * 3)
    write("mine.py", "LIMIT = 3\n")
    Path("old").mkdir()
    write("old/config.json", "{}")
    said = refused(given)
    assert re.search(".*".join(map(re.escape, REFUSED[given].split(" … "))), said), said


EVAL = {                                                     # the line of eval.py: what it says
    "": "required: {passk,ask,dashboard,view}", "pass": "invalid choice: 'pass'",
    "ask gspo": "required: prompt", "ask gspo 3+8= --n 0": "--n: invalid",
    "passk --n 3": "required: DIR_OR_HUB", "passk gspo --temprature 1": "--temprature 1",
    "passk gspo --temperature 0": "--temperature 0.0 is not at least",
    "passk gspo --n 8 --k 4 9": "--k 9 is above --n 8",
    "passk gspo": "gspo cannot be loaded", "dashboard": "required: RUN",
    "dashboard gspo": "there is no gspo/metrics.jsonl", "view gspo": "gspo is not the folder"}


@pytest.mark.parametrize("line", EVAL)
def test_flags_of_eval_py(line, refused):
    assert EVAL[line] in refused(line, main=eval.main)


def test_a_refusal_is_one_line_of_the_script_before_the_slow_imports():
    done = python("-X", "importtime", TRAIN, "--sede", "2", code=2)
    imports, said = done.stderr.splitlines()[:-1], done.stderr.splitlines()[-1]
    assert "--sede" in said and done.stdout == ""
    assert not any("| transformers" in line.replace(" ", "") for line in imports)
    assert any("torch" in line for line in imports)
    assert "--learning_rate" in python(TRAIN, "--help").stdout


ACCEPTED = [
    f"{DATA} --reward_weights 2 --scale_rewards none", f"{MODEL} --min_terms 3 --max_terms 3",
    "--eval_samples 0", "--algorithm grpo --epsilon 1", "--algorithm dr_grpo --dynamic_sampling",
    f"{DATA} --algorithm srpo --stage2_dataset_name more.jsonl", f"--seed {2 ** 28 - 1}",
    "--report_to none --num_generations 2", "--sampler_dtype float32",
    "--beta 0.1 --algorithm ppo --lam 0.9", "--algorithm grpo --epsilon 1 --epsilon_high inf",
    "--max_grad_norm inf --algorithm grpo --dual_clip inf",
    "--mismatch_mask seq --mismatch_mask_bounds 0 inf"]


@pytest.mark.parametrize("line", [
    *ACCEPTED, *(f"--algorithm {name}" for name in ALGORITHMS if name != "srpo")])
def test_flags_that_fit_are_accepted(line):
    parse(line.split())


def test_a_list_or_an_object_that_is_typed_twice_is_joined_and_a_scalar_is_replaced():
    settings = parse(f"{DATA} --stop a --stop b c --seed 1 --seed 2 --reward_weights 1 "
                     "--reward_weights -1e-3 -.5 --algorithm sapo --constants tau_positive=1 "
                     "tau_negative=2 --constants tau_positive=4".split())
    assert settings.stop == ["a", "b", "c"] and settings.seed == 2
    assert settings.reward_weights == [1.0, -1e-3, -0.5]
    assert settings.row.constants == dict(tau_positive=4, tau_negative=2)


def test_a_value_equal_to_the_default_is_accepted():
    for f in fields(Settings):
        value = getattr(Settings(), f.name)
        if value not in (None, [], {}):
            parse([f"--{f.name}", str(value)])


@pytest.mark.parametrize("word, scale", [
    ("true", "group"), ("False", "none"), ("batch", "batch")])
def test_scale_rewards_takes_trls_words(word, scale):
    assert parse(["--scale_rewards", word]).scale_rewards == scale


def test_every_flag_has_a_help():
    assert all(action.help for action in make_parser()._actions)


# ------------------------------------------------------------------------------- the clip range

@pytest.mark.parametrize("line, warned", [
    ("--epsilon 0.03", False), ("--epsilon 0.03 --epsilon_high 0.1", True),
    ("--algorithm luspo --epsilon 0.2 --epsilon_high 0.2", True),
    ("--algorithm grpo --epsilon 0.2", False)])
def test_a_clip_range_of_tokens_is_noted_where_a_response_is_clipped(line, warned, run, capsys):
    run(line)
    assert ("warning: ends of 0.1 or more" in capsys.readouterr().out) == warned


# ------------------------------------------------------------------------------- models

def test_a_prompt_that_is_too_long(cold_start, refused):
    said = refused("--max_prompt_length 3 --eval_samples 1 --model_name_or_path", cold_start)
    assert "4 tokens" in said and "between 1 and 3" in said


def test_a_dense_model_where_routers_are_needed(refused):
    models.saved("model", num_hidden_layers=1)
    for line in ("--algorithm rspo", "--routing_replay old", "--router_aux_loss_coef 0.1"):
        refused(f"--model_name_or_path model {line}")


# ------------------------------------------------------------------------ the folder, the machine

def test_a_folder_that_cannot_be_made(run):
    write("file", "mine")
    assert "file" in run.refused("--steps 1 --output_dir file/below")


def test_queries_that_do_not_divide_over_processes(refused, monkeypatch):
    monkeypatch.setattr(processes, "world", lambda: 3)
    assert "cannot be divided equally among 3 processes" in refused("")

"""A flag that nothing reads, or that another contradicts, is refused in one line; a value equal to the default never is; what a recipe
may carry to another model or machine is noted. python -m pytest tests/run/test_unread_flags.py"""

from dataclasses import MISSING

import pytest

import train
from plumbing.run.arguments import ALGORITHMS, flags, parse
from tiny_run import TINY, TINY_MODEL

CHECKPOINT = "--model_name_or_path m"
DATA = f"{CHECKPOINT} --dataset_name rows.jsonl"
OWN_DATA = "needs --dataset_name: the built-in task has its own prompts and its own verifier"
OWN_MODEL = "cannot be combined with --model_name_or_path m: a checkpoint has its own shape and no cold start"
OWN_SUMS = "cannot be combined with --dataset_name rows.jsonl: it describes the built-in sums"
SAME = "multiplies every reward by the same number, and --scale_rewards group divides by it again: leave it out"

UNREAD = [
    ("--lora_r 8", "--lora_r 8 needs --use_peft"),
    ("--lora_alpha 8", "--lora_alpha 8 needs --use_peft"),
    ("--kl_estimator k2", "--kl_estimator k2 needs --beta"),
    ("--mismatch_high 3", "--mismatch_high 3.0 needs --mismatch"),
    ("--mismatch_mask_bounds 0.1 2", "--mismatch_mask_bounds 0.1 2.0 needs --mismatch_mask"),
    ("--verifier_timeout 5", f"--verifier_timeout 5.0 {OWN_DATA}"),
    ("--reward_weights 2", f"--reward_weights 2.0 {OWN_DATA}"),
    (f"{DATA} --reward_weights 2", f"--reward_weights 2.0 {SAME}"),
    (f"{DATA} --verifier exact mine.py:f --reward_weights 2 2", f"--reward_weights 2.0 2.0 {SAME}"),
    ("--columns a b", f"--columns a b {OWN_DATA}"),
    (f"{CHECKPOINT} --columns a b", f"--columns a b {OWN_DATA}"),
    (f"{CHECKPOINT} --dataset_name reasoning_gym:chain_sum --columns a b",
     "--columns a b has no effect on reasoning_gym, whose problems have no columns to choose"),
    ("--verifier exact", f"--verifier exact {OWN_DATA}"),
    ("--eval_samples 0 --eval_prompts 3", "--eval_prompts 3 cannot be combined with --eval_samples 0"),
    ("--eval_samples 0 --eval_steps 3", "--eval_steps 3 cannot be combined with --eval_samples 0"),
    (f"{CHECKPOINT} --hidden_size 32", f"--hidden_size 32 {OWN_MODEL}"),
    (f"{CHECKPOINT} --num_hidden_layers 2", f"--num_hidden_layers 2 {OWN_MODEL}"),
    (f"{CHECKPOINT} --num_experts 4", f"--num_experts 4 {OWN_MODEL}"),
    (f"{CHECKPOINT} --num_experts_per_tok 1", f"--num_experts_per_tok 1 {OWN_MODEL}"),
    (f"{CHECKPOINT} --cold_start_steps 0", f"--cold_start_steps 0 {OWN_MODEL}"),
    (f"{CHECKPOINT} --cold_start_learning_rate 0.1", f"--cold_start_learning_rate 0.1 {OWN_MODEL}"),
    (f"{DATA} --min_terms 2", f"--min_terms 2 {OWN_SUMS}"),
    (f"{DATA} --max_terms 20", f"--max_terms 20 {OWN_SUMS}"),
    (f"{DATA} --verbose_answers", f"--verbose_answers True {OWN_SUMS}"),
    ("--algorithm minirl --old_logp sampler",
     "--mismatch token_truncate needs --old_logp recompute: it compares the recomputed log-probs with the sampler's"),
    ("--algorithm grpo --distillation_coef 1", "--distillation_coef 1.0 needs --teacher_model_name_or_path or --self_distillation"),
    ("--top_k 5 --sampler vllm", "--top_k 5 cannot be combined with --sampler vllm: only the built-in sampler returns the tokens that it "
                                 "left to draw from, over which log-probs are renormalized"),
]


@pytest.mark.parametrize("argv, line", UNREAD, ids=[argv for argv, _ in UNREAD])
def test_a_flag_that_nothing_reads_is_refused_in_one_line(argv, line):
    with pytest.raises(ValueError) as error:
        parse(argv.split())
    assert str(error.value) == line


def test_what_needs_nothing_or_changes_something_is_accepted():
    parse(f"{DATA} --reward_weights 2 --scale_rewards none".split())
    parse(f"{DATA} --reward_weights 2 --length_penalty 0.5".split())
    parse(f"{CHECKPOINT} --min_terms 2 --max_terms 3".split())       # a checkpoint on the built-in task
    parse("--eval_samples 0".split())


@pytest.mark.parametrize("f", [f for f in flags() if f.default is not MISSING and f.default is not None], ids=lambda f: f.name)
def test_a_value_equal_to_the_default_is_never_refused(f):
    for also in ("", CHECKPOINT, DATA, "--eval_samples 0", "--old_logp sampler"):
        if f"--{f.name}" not in also:
            parse([*also.split(), f"--{f.name}={f.default}"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("policy", ["", CHECKPOINT, DATA])
def test_every_preset_is_accepted(algorithm, policy):
    second = "--stage2_dataset_name more.jsonl" if algorithm == "srpo" and policy == DATA else ""
    parse(f"{policy} --algorithm {algorithm} {second}".split())


@pytest.mark.parametrize("flag, note", [
    ("--no_chat_template", "note: --no_chat_template changes nothing: these prompts have no chat template"),
    ("--shard", "note: --shard changes nothing in one process; torchrun starts several")])
def test_what_a_recipe_may_carry_is_noted(flag, note, workplace, cold_start, capsys):
    for name, argv in (("own", [*TINY_MODEL, "--model_name_or_path", str(next(cold_start.iterdir()))]), ("built-in", TINY)):
        train.main([*argv, flag, "--steps", "1", "--output_dir", name])
        assert capsys.readouterr().out.splitlines().count(note) == 1

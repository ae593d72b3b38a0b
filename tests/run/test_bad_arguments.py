"""Every bad input ends with exit code 2 and one line that says what was wrong and what would be
right; nothing is left behind (tests/conftest.py: refused). A value equal to the default never is
bad; what a recipe may carry to another model or machine is noted.
python -m pytest tests/run/test_bad_arguments.py"""

import json
import re
import shlex
import shutil
from dataclasses import MISSING
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from plumbing.parallel import processes
from session.arguments import ALGORITHMS, flags, parse
from tiny_run import read_json, write

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
    "above 0": """learning_rate=0 learning_rate=-0.5 cold_start_learning_rate=0 mismatch_high=0""",
    "above 1": "dual_clip=0 dual_clip=0.5 dual_clip=1",
    "finite": """temperature=nan temperature=inf temperature=-inf learning_rate=nan
        cold_start_learning_rate=inf mismatch_high=nan dual_clip=inf beta=nan beta=-inf
        overlong_cache=nan epsilon=nan epsilon=inf reward_weights=nan""",
    "between 0 and 1": """epsilon=-0.1 epsilon=0 epsilon=1 epsilon=1.5 epsilon_high=-0.1
        epsilon_high=1.5""",
    "at most 1": "overlong_cache=1.5 ref_model_mixup_alpha=2",
    "known: ": """algorithm=nonsense advantage=nonsense scale_rewards=nonsense reduction=nonsense
        kl_estimator=nonsense old_logp=nonsense sampler_dtype=nonsense mismatch=nonsense
        mismatch_mask=nonsense lr_scheduler_type=nonsense""",
    "is not an integer": "steps=many steps=1.5",
    "is not a number": "beta=x",
    "true/false": "dynamic_sampling=perhaps",
    "at least 1e-06": "temperature=1e-39 temperature=0 temperature=-0.5",
    "at most 4294967295": f"seed={2 ** 32}",
    "multiple of 8": "hidden_size=20",
}
OTHERS = [("--algorithm cispo --epsilon 0", "is not above 0; the paper of cispo"),
          ("--epsilon 1", "is not between 0 and 1; the paper of gspo"),
          ("--algorithm rollout_is --epsilon_high -1", "is not above 0; ")]


@pytest.mark.parametrize("given, words", [
    (given, words) for words, listed in OUT_OF_RANGE.items() for given in listed.split()])
def test_a_value_out_of_range(given, words, refused):
    said = refused(f"--{given}")
    assert f"--{given.split('=')[0]}" in said and words in said


@pytest.mark.parametrize("line, words", OTHERS)
def test_the_bound_that_is_printed_is_the_one_that_is_checked(line, words, refused):
    assert words in refused(line)


OWN_DATA = ("needs --dataset_name or --environment: the built-in task has its own prompts and its "
            "own reward")
OWN_MODEL = ("cannot be combined with --model_name_or_path: a checkpoint has its own shape and "
             "no supervised warm-up")
OWN_SUMS = ("cannot be combined with --dataset_name or --environment: it describes the built-in "
            "sums")
BOUNDS = "--mismatch_mask_bounds … two numbers"
# flags: what the line says, with … where something is left out
REFUSED = {
    "--learning_rat 1": "--learning_rat, did you mean --learning_rate?",
    "nonsense": "nonsense",
    "--steps": "--steps … expected",
    "--algorithm gpso": "did you mean gspo? … gspo_token",
    "--algorithm GRPO": "known: … grpo",
    "--max_terms 7 --min_terms 8": "--max_terms 7 is below --min_terms 8",
    # -------------------------------------------------------------------------- the batch
    "--num_generations 1": "--num_generations 1 … at least 2",
    "--algorithm ppo --num_generations 1 --dynamic_sampling":
        "--dynamic_sampling True cannot be combined with --num_generations 1: a group of one",
    "--prompts_per_step 3": "--steps_per_generation 2 … --prompts_per_step 3",
    "--micro_batch_size 3": "--micro_batch_size 3 … divide",
    "--scoring_batch_size 3": "--scoring_batch_size 3 … divide",
    "--scoring_batch_size 4 --bf16 true": "--scoring_batch_size 4 cannot … bfloat16",
    "--tf32": "--tf32 True needs a CUDA GPU",
    "--num_experts_per_tok 9": "--num_experts_per_tok 9 … --num_experts 4",
    # -------------------------------------------------------------------------- the objective
    "--dual_clip 2": "dual_clip … gspo",
    "--algorithm sapo --epsilon 0.1": "--epsilon 0.1 has no effect: sapo has no clip range",
    "--advantage token_credit": "gspo … gspo_token",
    "--advantage gae": "gspo … gspo_token",
    "--kl_estimator k2": "--kl_estimator k2 needs --beta",
    "--sync_ref_model": "needs --beta",
    "--ref_model_mixup_alpha 0.5 --beta 0.1": "needs --sync_ref_model",
    "--zero_variance_filter --algorithm ppo --num_generations 1":
        "--zero_variance_filter True cannot be combined with --num_generations 1: a group of one",
    "--use_kl_in_reward": "--use_kl_in_reward True needs --beta",
    "--beta 0.1 --use_kl_in_reward --kl_estimator k2":
        "--kl_estimator k2 has no effect: k1 is subtracted from the rewards",
    "--beta 0.1 --algorithm reinforce_plus_plus --kl_estimator k2":
        "--kl_estimator k2 has no effect: k1 is subtracted … an --advantage that reads kl",
    "--beta 0.1 --advantage gdpo --use_kl_in_reward":
        "--use_kl_in_reward True has no effect: --advantage gdpo does not read the total reward",
    "--beta 0.1 --algorithm maxrl --use_kl_in_reward":
        "--use_kl_in_reward True cannot be combined with --scale_rewards mean",
    "--lam 0.9": "--lam 0.9 needs a critic: --algorithm ppo",
    "--algorithm reinforce_plus_plus --critic_warmup 1": "--critic_warmup 1 needs a critic",
    "--algorithm ppo --critic_warmup 2 --steps 2": "--critic_warmup 2 leaves none of the --steps 2",
    "--algorithm grpo --distillation_coef 1":
        "--distillation_coef 1.0 needs --teacher_model_name_or_path or --self_distillation",
    # -------------------------------------------------------------------------- the rewards
    "--algorithm maxrl --overlong_cache 0.2":
        "--overlong_cache 0.2 … --scale_rewards mean … below 0",
    "--algorithm dapo --scale_rewards mean": "--overlong_cache 0.2 … --scale_rewards group",
    f"{DATA} --algorithm maxrl --reward_weights -1":
        "--reward_weights … below 0 … --scale_rewards mean",
    # -------------------------------------------------------------------------- the sampler
    "--algorithm rspo --old_logp sampler": "--old_logp sampler … rspo",
    "--algorithm ppo --old_logp sampler": "--old_logp sampler … gae",
    "--routing_replay old --old_logp sampler": "--old_logp sampler … --routing_replay",
    "--mismatch seq_truncate --old_logp sampler":
        "--mismatch seq_truncate … --old_logp recompute",
    "--mismatch_mask geo --old_logp sampler": "--mismatch_mask geo … --old_logp recompute",
    "--algorithm minirl --old_logp sampler":
        "--mismatch token_truncate needs --old_logp recompute: it compares the recomputed "
        "log-probs with the sampler's",
    "--mismatch_high 3": "--mismatch_high 3.0 needs --mismatch",
    "--mismatch_mask_bounds 0.1 2": "--mismatch_mask_bounds 0.1 2.0 needs --mismatch_mask",
    "--mismatch_mask token --mismatch_mask_bounds 6 5": BOUNDS,
    "--mismatch_mask token --mismatch_mask_bounds 3": BOUNDS,
    "--mismatch_mask token --mismatch_mask_bounds 0 nan": "not a finite number",
    "--top_k 5 --sampler vllm":
        "--top_k 5 cannot be combined with --sampler vllm: only the built-in sampler returns the "
        "tokens that it left to draw from, over which log-probs are renormalized",
    # -------------------------------------------------------------------------- data
    "--dataset_name rows.jsonl": "--dataset_name rows.jsonl … --model_name_or_path",
    "--test_dataset_name rows.jsonl": "--test_dataset_name rows.jsonl … --dataset_name",
    f"{DATA} --columns ask": "--columns … two",
    "--columns a b": f"--columns a b {OWN_DATA}",
    "--verifier exact": f"--verifier exact {OWN_DATA}",
    f"{DATA} --verifier nowhere.py:judge": "nowhere.py",
    f"{DATA} --verifier guess": "guess … exact",
    "--verifier_timeout 5": f"--verifier_timeout 5.0 {OWN_DATA}",
    "--system_prompt 2": "--system_prompt 2 … --dataset_name … its own prompts",
    f"{DATA} --system_prompt @nowhere.txt": "--system_prompt @nowhere.txt … cannot be read",
    "--prompt_template {prompt}": "--prompt_template {prompt} … --dataset_name",
    "--stop=": "--stop … must not be empty",
    f"{DATA} --prompt_template Q:": "--prompt_template Q: … must contain {prompt}",
    "--environment mine.py:Play": "--environment mine.py:Play … FileNotFoundError",
    "--environment mine.py:Play --min_terms 2 --max_terms 3":
        "--min_terms 2 … --environment",
    "--max_turns 2": "--max_turns 2 … needs --environment",
    "--environment mine.py:Play --stage2_step 3": "--stage2_step 3 … has one source of rows",
    "--environment mine.py:Play --algorithm gspo_token --advantage token_credit":
        "token_credit reads blamed … the built-in task knows it",
    "--environment mine.py:Play --test_dataset_name rows.jsonl": "needs --dataset_name: … rows()",
    f"{DATA} --environment nowhere.py:Play": "--environment nowhere.py:Play … No such file",
    f"{DATA} --environment Play": "--environment Play … FILE.py:CLASS is needed",
    f"{DATA} --environment mine.py:Play --shard": "--environment mine.py:Play … --shard",
    f"{DATA} --environment mine.py:Play --top_p 0.9": "--top_p 0.9 … with --environment",
    f"{DATA} --environment mine.py:Play --routing_replay rollout": "--environment … routes",
    f"{DATA} --tool mine.py:add": "--tool: write … --environment FILE.py:CLASS",
    "--advantage turn_returns --algorithm gspo_token": "turn_returns … --environment",
    "--advantage turn_returns": "--advantage turn_returns … gspo_token",
    f"{DATA} --min_terms 2": f"--min_terms 2 {OWN_SUMS}",
    # -------------------------------------------------------------------------- two stages
    "--stage2_dataset_name rows.jsonl --stage2_step 3":
        "--stage2_dataset_name rows.jsonl … --dataset_name",
    "--algorithm srpo --min_terms 5 --max_terms 5": "--stage2_step 20 … --max_terms",
    f"{DATA} --algorithm srpo": "--stage2_step 20 … --stage2_dataset_name",
    f"{DATA} --stage2_dataset_name e": "--stage2_dataset_name e … --stage2_step",
    # -------------------------------------------------------------------------- the policy
    f"{MODEL} --hidden_size 32": f"--hidden_size 32 {OWN_MODEL}",
    f"{MODEL} --cold_start_steps 0": f"--cold_start_steps 0 {OWN_MODEL}",
    "--lora_r 8": "--lora_r 8 needs --use_peft",
    # -------------------------------------------------------------------------- the run
    "--eval_samples 0 --eval_steps 3":
        "--eval_steps 3 cannot be combined with --eval_samples 0",
    "--resume true": "--resume … --output_dir",
    "--overwrite_output_dir true": "--overwrite_output_dir … --output_dir",
    "--resume true --overwrite_output_dir true --output_dir x":
        "--resume … --overwrite_output_dir",
    "--resume --output_dir gone": "gone has no readable config.json",
    "--resume --output_dir empty": "empty has no readable config.json",
    "--output_dir file": "--output_dir file cannot be made: File exists",
    "--output_dir file/below": "file/below",
    "--output_dir work": "--output_dir work is not empty",
    "--output_dir work --overwrite_output_dir": "nothing in it is replaced",
    # ------------------------------------------------------- a folder with a config.json, too
    **{f"--output_dir {name} --overwrite_output_dir": "nothing in it is replaced"
       for name in ("llama", "list", "broken")},
    **{f"--output_dir {name} --resume": f"{name} has no readable config.json"
       for name in ("llama", "list", "broken")},
}


@pytest.mark.parametrize("given", REFUSED)
def test_flags_that_do_not_fit(given, refused):
    write("rows.jsonl", '{"prompt": "2+2=", "answer": "4"}\n' * 3)
    write("file", "mine")
    Path("empty").mkdir()
    for file, text in {"work/thesis.tex": "years", "llama/config.json": '{"model_type": "llama"}',
                       "list/config.json": "[]", "broken/config.json": "broken"}.items():
        Path(file).parent.mkdir()
        write(file, text)
    said = refused(given)
    assert re.search(".*".join(map(re.escape, REFUSED[given].split(" … "))), said), said


ACCEPTED = [
    f"{DATA} --reward_weights 2 --scale_rewards none",
    f"{DATA} --reward_weights 2 --overlong_cache 0.5",
    f"{DATA} --verifier exact mine.py:f --algorithm maxrl --reward_weights 0 1",
    f"{MODEL} --min_terms 3 --max_terms 3",                  # a checkpoint on the built-in task
    "--eval_samples 0",
    "--beta 0.1 --algorithm reinforce_plus_plus --use_kl_in_reward",         # it reads kl itself
    *(f"{also} --{f.name}={shlex.quote(str(f.default))}" for f in flags()
      if f.default not in (MISSING, None) for also in
      ("", MODEL, DATA, "--eval_samples 0", "--old_logp sampler")
      if f"--{f.name}" not in also),
    *(f"{policy} --algorithm {name}" for name in ALGORITHMS for policy in ("", MODEL, DATA)
      if (name, policy) != ("srpo", DATA)),
    f"{DATA} --algorithm srpo --stage2_dataset_name more.jsonl",
]


def test_defaults_presets_and_what_has_an_effect_are_accepted():
    for given in ACCEPTED:
        try:
            parse(shlex.split(given))
        except ValueError as error:
            pytest.fail(f"{given}: {error}")


@pytest.mark.parametrize("line, note", [
    ("--bf16 true", "note: bfloat16 rounds log s by about 0.027/√L … up to 72,900 tokens … --bf16 "
                    "false, or a wider --epsilon"),
    ("--bf16 true --epsilon 0.3 --epsilon_high 0.3", None),
    ("--bf16 true --algorithm grpo", None),
    ("", None)])
def test_a_clip_range_that_is_narrower_than_rounding_is_noted(line, note, run, capsys):
    run(f"{line} --steps 1")
    notes = [text for text in capsys.readouterr().out.splitlines() if "rounds log s" in text]
    assert len(notes) == bool(note) and all(part in text for text in notes
                                            for part in (note or "").split(" … "))


ONE_UPDATE = "--algorithm grpo --steps_per_generation 1 --num_iterations 1"


@pytest.mark.parametrize("line, note", [
    (f"{ONE_UPDATE} --epsilon 0.1", "note: --epsilon has no effect: with one update per rollout"),
    (f"{ONE_UPDATE} --dual_clip 3", "note: --dual_clip has no effect: with one update per rollout"),
    (ONE_UPDATE, None),
    ("--algorithm grpo --epsilon 0.1", None),
    ("--epsilon 0.03", "note: --epsilon 0.03 sets both ends of the clip range, which are 0.0003 "
                       "and 0.0004 in gspo; "),
    ("--algorithm icepop --epsilon 0.3", "note: --epsilon 0.3 sets both ends of the clip range, "
                                         "which are 0.5 and 4 in icepop; "),
    ("--epsilon 0.03 --epsilon_high 0.03", None),
    ("--epsilon 0.03 --epsilon_high 0.1", "warning: ends of 0.1 or more are … its paper has "
                                          "--epsilon 0.0003 --epsilon_high 0.0004"),
    ("--epsilon_high 0.2", "warning: ends of 0.1 or more"),
    ("--algorithm luspo --epsilon 0.2 --epsilon_high 0.2",
     "warning: … its paper has --epsilon 0.002 --epsilon_high 0.0025")])
def test_a_clip_range_that_does_not_what_is_meant_is_noted(line, note, run, capsys):
    run(line)
    notes = [text for text in capsys.readouterr().out.splitlines()
             if text.startswith(("note: ", "warning: "))]
    pattern = ".*".join(map(re.escape, (note or "").split(" … ")))
    assert len(notes) == bool(note) and all(re.match(pattern, text) for text in notes), notes


# ------------------------------------------------------------------------------- data, models

def test_a_data_file(refused):
    """Others: tests/data/test_hostile_data.py."""
    write("rows.jsonl", '{"prompt": "1", "answer": "1"}\n{"prompt": \n')
    assert "rows.jsonl line 2: broken JSONL" in refused(f"{DATA} --output_dir run")


def test_a_prompt_that_is_too_long(cold_start, refused):
    model = cold_start
    said = refused("--max_prompt_length 3 --output_dir run --eval_samples 1 --model_name_or_path",
                   model)
    assert "4 tokens" in said and "between 1 and 3" in said


@pytest.fixture
def model(cold_start, refused):
    return Path(shutil.copytree(cold_start, "model"))


def config(model, **changes):
    path = model / "config.json"
    write(path, json.dumps(read_json(path) | changes))


def without_a_weight(model):
    weights = load_file(model / "model.safetensors")
    weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def with_nan(model):
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def cut(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def no_tokenizer(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()


EVIL = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


@pytest.mark.parametrize("damage, words", [
    (shutil.rmtree, "there is no such folder"),
    (lambda model: (model / "config.json").unlink(), "no config.json"),
    (lambda model: write(model / "config.json", "{broken"), "cannot be loaded"),
    (lambda model: config(model, model_type="nonsense"), "nonsense"),
    (lambda model: config(model, model_type="nonsense", auto_map=EVIL), ""),
    (lambda model: config(model, num_experts_per_tok=99), "99"),
    (lambda model: config(model, hidden_size=64), ""),
    (without_a_weight, "q_proj"),
    (with_nan, "its weight model.norm.weight holds numbers that are not finite"),
    (cut, "cannot be loaded"),
    (no_tokenizer, "no tokenizer")])
def test_model_folders(damage, words, model, refused):
    damage(model)
    said = refused("--model_name_or_path ./model --output_dir run")
    assert "--model_name_or_path" in said and "./model" in said and words in said


def test_hub_id_that_cannot_be_had(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused("--model_name_or_path nobody/nothing --output_dir run")
    assert "--model_name_or_path nobody/nothing cannot be loaded" in said


def test_a_dense_model(refused):
    """Where routers are needed, and without one of its weights."""
    models.saved("model", num_hidden_layers=1)
    for line in ("--algorithm rspo", "--routing_replay old", "--router_aux_loss_coef 0.1"):
        said = refused(f"--model_name_or_path model --output_dir run {line}")
        assert "is dense" in said
    without_a_weight(Path("model"))
    said = refused("--model_name_or_path ./model --output_dir run")
    assert "lack model.layers.0.self_attn.q_proj.weight" in said


# ------------------------------------------------------------------------ the folder, the machine

def test_folder_without_permission(refused, monkeypatch):
    def mkdir(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert "--output_dir run cannot be made: Permission denied" in refused("--output_dir run")


def test_process_without_a_gpu_of_its_own(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "no GPU of its own (1 here)" in refused("--output_dir run --device auto")


def test_queries_that_do_not_divide_over_processes(refused, monkeypatch):
    monkeypatch.setattr(processes, "world", lambda: 3)
    said = refused("--output_dir run")
    assert "cannot be divided equally among 3 processes" in said

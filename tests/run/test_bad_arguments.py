"""Every bad input ends with exit code 2 and one line on stderr that says what was wrong and what would be right; nothing is left behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plumbing.parallel import processes as distributed
from plumbing.run.arguments import GONE
import train
from tiny_run import TINY, TINY_MODEL, TRAIN, metrics


def refused(capsys, *argv):
    """The one line on stderr of a run that must be refused."""
    before = tree()
    with pytest.raises(SystemExit) as stop:
        train.main([*map(str, argv)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("train.py: "), err
    assert tree() == before, "something was left behind"
    return err


def tree():
    return sorted((str(p), p.read_bytes() if p.is_file() else None) for p in Path(".").rglob("*") if p != Path("runs"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ----------------------------------------------------------------------------------------------------------------- flags

INTEGERS_FROM_1 = ("steps prompts_per_step num_generations steps_per_generation max_prompt_length max_completion_length micro_batch_size "
                   "hidden_size num_hidden_layers num_experts num_experts_per_tok min_terms eval_prompts").split()
FROM_0 = ("save_steps eval_steps eval_samples warmup_steps cold_start_steps stage2_step seed max_grad_norm beta entropy_coef "
          "router_aux_loss_coef overlong_cache").split()
ABOVE_0 = "temperature learning_rate cold_start_learning_rate mismatch_high dual_clip".split()
CHOICES = "algorithm advantage scale_rewards reduction kl_estimator old_logp sampler_dtype mismatch mismatch_mask lr_scheduler_type".split()


@pytest.mark.parametrize("flag, value, words", [
    *((name, value, "at least 1") for name in INTEGERS_FROM_1 for value in ("0", "-3")),
    *((name, "-1", "at least 0") for name in FROM_0),
    *((name, value, "above 0") for name in ABOVE_0 for value in ("0", "-0.5")),
    *((name, value, "finite") for name in [*ABOVE_0, "beta", "overlong_cache", "epsilon"] for value in ("nan", "inf", "-inf")),
    *((name, value, "between 0 and 1") for name in ("epsilon", "epsilon_high") for value in ("-0.1", "1.5")),
    ("overlong_cache", "1.5", "between 0 and 1"),
    ("temperature", "1e-39", "below 1e-06"), ("epsilon", "0", "between 0 and 1"), ("epsilon", "1", "between 0 and 1"),
    *((name, "nonsense", "known: ") for name in CHOICES),
    ("steps", "many", "invalid int"), ("steps", "1.5", "invalid int"), ("beta", "a lot", "invalid float"), ("dynamic_sampling", "perhaps", "true/false"),
    ("seed", str(2 ** 32), "below 2^32"), ("hidden_size", "20", "multiple of 8"), ("max_terms", "7", "below --min_terms 8"),
])
def test_values_out_of_range(flag, value, words, capsys):
    err = refused(capsys, f"--{flag}={value}")
    assert f"--{flag}" in err and words in err


@pytest.mark.parametrize("argv, words", [
    ("--learning_rat 1", ["--learning_rat", "did you mean --learning_rate?"]), ("nonsense", ["nonsense"]), ("--steps", ["--steps", "expected"]),
    ("--algorithm gpso", ["did you mean gspo?", "gspo_token"]), ("--algorithm GRPO", ["known: ", "grpo"]),
    ("--num_generations 1", ["--num_generations 1", "at least 2"]), ("--num_generations 1 --advantage leave_one_out", ["--num_generations 1"]),
    ("--prompts_per_step 30", ["--steps_per_generation 4", "--prompts_per_step 30"]), ("--micro_batch_size 3", ["--micro_batch_size 3", "divide"]),
    ("--num_experts_per_tok 9", ["--num_experts_per_tok 9", "--num_experts 8"]), ("--dual_clip 2", ["dual_clip", "gspo"]),
    ("--algorithm grpo --dual_clip 0.5", ["dual_clip is 0.5", "> 1"]),
    ("--algorithm sapo --epsilon 0.1", ["epsilon is 0.1", "sapo has no clip range"]),
    ("--advantage token_credit", ["gspo", "gspo_token"]), ("--advantage gae", ["gspo", "gspo_token"]),
    ("--algorithm rspo --old_logp sampler", ["--old_logp sampler", "rspo"]),
    ("--algorithm ppo --old_logp sampler", ["--old_logp sampler", "gae"]),
    ("--routing_replay old --old_logp sampler", ["--old_logp sampler", "--routing_replay"]),
    ("--mismatch seq_truncate --old_logp sampler", ["--mismatch seq_truncate", "--old_logp recompute"]),
    ("--mismatch_mask geo --old_logp sampler", ["--mismatch_mask geo", "--old_logp recompute"]),
    *((f"--mismatch_mask token --mismatch_mask_bounds {bounds}", ["--mismatch_mask_bounds", "two numbers"]) for bounds in ("6 5", "-1 2", "3", "0 nan", "0 inf")),
    ("--model_name_or_path m --dataset_name rows.jsonl --columns ask", ["--columns", "two"]),
    ("--tool mine.py:add", ["--tool mine.py:add", "--dataset_name"]), ("--tool_stop ]", ["--tool_stop ]", "needs --tool"]),
    ("--model_name_or_path m --dataset_name rows.jsonl --tool nowhere.py:add", ["--tool nowhere.py:add", "no file nowhere.py"]),
    ("--model_name_or_path m --dataset_name rows.jsonl --tool add", ["--tool add", "file.py:function is needed"]),
    ("--model_name_or_path m --dataset_name rows.jsonl --tool add --tool_stop=", ["--tool_stop", "is empty"]),
    ("--system_prompt 2", ["--system_prompt 2", "--dataset_name", "its own prompts"]),
    ("--prompt_template {prompt}", ["--prompt_template {prompt}", "--dataset_name"]),
    ("--model_name_or_path m --dataset_name rows.jsonl --prompt_template Q:", ["--prompt_template Q:", "must contain {prompt}"]),
    ("--model_name_or_path m --dataset_name rows.jsonl --prompt_template=", ["--prompt_template", "must contain {prompt}"]),
    ("--model_name_or_path m --dataset_name rows.jsonl --system_prompt @nowhere.txt", ["--system_prompt @nowhere.txt", "cannot be read"]),
    ("--algorithm maxrl --overlong_cache 0.2", ["--overlong_cache 0.2", "below 0", "--scale_rewards mean"]),
    ("--algorithm dapo --scale_rewards mean", ["--overlong_cache 0.2", "--scale_rewards group"]),
    ("--algorithm maxrl --length_penalty 0.3", ["--length_penalty 0.3", "below 0", "--scale_rewards mean"]),
    ("--model_name_or_path m --dataset_name rows.jsonl --algorithm maxrl --reward_weights -1",
     ["--reward_weights", "below 0", "--scale_rewards mean"]),
    ("--algorithm ppo --num_generations 1 --dynamic_sampling", ["--dynamic_sampling", "--num_generations", "at least 2"]),
    ("--dataset_name rows.jsonl", ["--dataset_name rows.jsonl", "--model_name_or_path"]),
    ("--test_dataset_name rows.jsonl", ["--test_dataset_name rows.jsonl", "--dataset_name"]),
    ("--stage2_dataset_name rows.jsonl --stage2_step 3", ["--stage2_dataset_name rows.jsonl", "--dataset_name"]),
    ("--algorithm srpo --min_terms 5 --max_terms 5", ["--stage2_step 20", "--max_terms"]),
    ("--algorithm srpo --model_name_or_path m --dataset_name d", ["--stage2_step 20", "--stage2_dataset_name"]),
    ("--model_name_or_path m --dataset_name d --stage2_dataset_name e", ["--stage2_dataset_name e", "--stage2_step"]),
    ("--resume true", ["--resume", "--output_dir"]), ("--overwrite_output_dir true", ["--overwrite_output_dir", "--output_dir"]),
    ("--resume true --overwrite_output_dir true --output_dir x", ["--resume", "--overwrite_output_dir"]),
    ("--max_terms 1 --min_terms 1 --cold_start_steps 0", ["cold start failed", "--cold_start_steps"]),
    ("--model_name_or_path m --verifier nowhere.py:judge --dataset_name rows.jsonl", ["nowhere.py"]),
    ("--model_name_or_path m --verifier guess --dataset_name rows.jsonl", ["guess", "exact"]),
])
def test_contradictions(argv, words, capsys):
    Path("rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n' * 3)
    err = refused(capsys, *argv.split(), *(["--hidden_size", "32"] if "cold_start" in argv else []))
    assert [w for w in words if w not in err] == [], err


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_says_what_to_do_instead(name, capsys):
    words = f"--{name}"
    line = f"train.py: {words} is gone: {GONE[name]}\n"
    assert refused(capsys, *words.split()) == line
    assert refused(capsys, words.replace(" ", "=")) == line



@pytest.mark.slow
def test_the_real_script_prints_one_line_and_exits_with_2(tmp_path):
    """Its fast cousin: tests/run/test_first_word.py."""
    done = subprocess.run([sys.executable, TRAIN, "--temperature", "0"], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == "train.py: --temperature 0.0 is not above 0\n"
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------------- data files

@pytest.mark.parametrize("content, words", [
    (None, ["rows.jsonl", "no such data file"]), ("", ["rows.jsonl", "empty"]),
    ('{"prompt": "1", "answer": "1"}\n{"prompt": \n', ["rows.jsonl line 2", "broken JSONL"]),
    ('{"query": "1", "result": "1"}\n', ["rows.jsonl", "no column prompt", "query, result"]),
    ('{"prompt": "1", "answer": "1"}\n{"prompt": "2", "answer": null}\n', ["rows.jsonl line 2", "answer is null"]),
])
def test_data_files(content, words, capsys):
    if content is not None:
        Path("rows.jsonl").write_text(content)
    err = refused(capsys, "--model_name_or_path", "m", "--dataset_name", "rows.jsonl", "--output_dir", "run")
    assert [w for w in words if w not in err] == [], err


def test_a_prompt_that_is_too_long(workplace, cold_start, capsys):
    model = next(cold_start.iterdir())
    err = refused(capsys, *TINY_MODEL, "--model_name_or_path", model, "--max_prompt_length", "3", "--output_dir", "run", "--eval_samples", "1")
    assert "4 tokens" in err and "between 1 and 3" in err


# --------------------------------------------------------------------------------------------------------------- the model

@pytest.fixture
def model(cold_start, here):
    shutil.copytree(next(cold_start.iterdir()), "model")
    return Path("model")


def config(**changes):
    path = Path("model/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled():
    Path("model/model.safetensors").unlink()
    torch.save({}, "model/pytorch_model.bin")


def without_a_weight():
    from safetensors.torch import load_file, save_file
    weights = load_file("model/model.safetensors")
    weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, "model/model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("damage, words", [
    (lambda: shutil.rmtree("model"), ["./model", "there is no such folder"]),
    (lambda: Path("model/config.json").unlink(), ["./model", "no config.json"]),
    (lambda: Path("model/config.json").write_text("{broken"), ["./model", "cannot be loaded"]),
    (lambda: config(model_type="nonsense"), ["./model", "nonsense"]),
    (lambda: config(model_type="nonsense", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}), ["./model"]),
    (lambda: config(num_experts_per_tok=99), ["./model", "99"]),
    (lambda: config(hidden_size=64), ["./model"]),
    (pickled, ["./model", "pickled weights are not read"]),
    (without_a_weight, ["./model", "q_proj"]),
    (lambda: Path("model/model.safetensors").write_bytes(Path("model/model.safetensors").read_bytes()[:5000]), ["./model", "cannot be loaded"]),
    (lambda: Path("model/model.safetensors").write_bytes(b"\x80\x04" + b"pickle" * 99), ["./model", "cannot be loaded"]),
    (lambda: [Path("model", name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")], ["./model", "no tokenizer"]),
])
def test_model_folders(damage, words, model, capsys):
    damage()
    err = refused(capsys, *TINY_MODEL, "--model_name_or_path", "./model", "--output_dir", "run")
    assert [w for w in ["--model_name_or_path", *words] if w not in err] == [], err


def test_hub_id_that_cannot_be_had(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "--model_name_or_path nobody/nothing cannot be loaded" in refused(capsys, "--model_name_or_path", "nobody/nothing", "--output_dir", "run")


@pytest.fixture
def dense(cold_start, here):
    """A Hugging Face model that is no mixture of experts, with the built-in task's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    shutil.copytree(next(cold_start.iterdir()), "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    Qwen3ForCausalLM(Qwen3Config(vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 num_key_value_heads=2, head_dim=8)).save_pretrained("model")


def test_dense_model_without_a_weight(dense, capsys):
    without_a_weight()
    err = refused(capsys, *TINY_MODEL, "--model_name_or_path", "./model", "--output_dir", "run")
    assert "lack model.layers.0.self_attn.q_proj.weight" in err


@pytest.mark.parametrize("flags", ["--algorithm rspo", "--routing_replay old", "--router_aux_loss_coef 0.1"])
def test_dense_model_where_routers_are_needed(flags, dense, capsys):
    assert "is dense" in refused(capsys, *TINY_MODEL, "--model_name_or_path", "model", *flags.split(), "--output_dir", "run")


def test_an_overwritten_run_survives_until_its_successor_can_begin(workplace, capsys):
    train.main([*TINY, "--steps", "1", "--output_dir", "mine"])
    capsys.readouterr()
    refused(capsys, *TINY_MODEL, "--steps", "1", "--output_dir", "mine", "--overwrite_output_dir", "true", "--model_name_or_path", "./gone")
    assert len(metrics("mine")) == 1


# -------------------------------------------------------------------------------------------------------------- the folder

def test_output_folder_is_a_file_or_below_one(capsys):
    Path("file").write_text("mine")
    assert "--output_dir file is a file" in refused(capsys, "--output_dir", "file")
    assert "file/below" in refused(capsys, "--output_dir", "file/below")


def test_output_folder_holds_something_else(capsys):
    Path("work").mkdir()
    Path("work/thesis.tex").write_text("years")
    assert "--output_dir work is not empty" in refused(capsys, "--output_dir", "work")
    assert "does not look like the folder of a run" in refused(capsys, "--output_dir", "work", "--overwrite_output_dir", "true")


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', "[]", "broken"])
def test_a_model_folder_is_never_taken_for_a_run(text, capsys):
    """It has a config.json too: neither overwritten nor resumed."""
    Path("llama").mkdir()
    Path("llama/config.json").write_text(text)
    assert "does not look like the folder of a run" in refused(capsys, "--output_dir", "llama", "--overwrite_output_dir", "true")
    assert "nothing to resume in llama" in refused(capsys, "--output_dir", "llama", "--resume", "true")


def test_nothing_to_resume(capsys):
    assert "nothing to resume in gone" in refused(capsys, "--resume", "true", "--output_dir", "gone")
    Path("empty").mkdir()
    assert "nothing to resume in empty" in refused(capsys, "--resume", "true", "--output_dir", "empty")


def test_run_of_another_configuration(workplace, capsys):
    train.main([*TINY, "--steps", "1", "--output_dir", "mine"])
    capsys.readouterr()
    for flags in (["--resume", "true"], []):
        err = refused(capsys, *TINY, "--steps", "2", "--seed", "7", "--output_dir", "mine", *flags)
        assert "with other flags" in err and "seed" in err and "temperature" not in err
        assert ("steps" in err) == (not flags), "--resume may extend a run"


def test_folder_without_permission(capsys, monkeypatch):
    def mkdir(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert "Permission denied: 'run'" in refused(capsys, "--output_dir", "run")


# ------------------------------------------------------------------------------------------------------------- the machine

def test_process_without_a_gpu_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "no GPU of its own (1 here)" in refused(capsys, "--output_dir", "run")


def test_queries_that_do_not_divide_over_processes(capsys, monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: 3)
    assert "cannot be divided equally among 3 processes" in refused(capsys, "--output_dir", "run")

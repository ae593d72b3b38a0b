"""The script that --print_trl_config prints is run by TRL 1.16. python -m pytest tests/tools/test_trl.py"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from plumbing.data.running_sum import builtin_tokenizer
from plumbing.run.arguments import parse
from tools.trl import batch_rows, config_of, missing, trl_script

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.trl, pytest.mark.slow,
              pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is missing: pip install trl==1.16.0")]
SIZE = ("--steps 1 --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --micro_batch_size 4 --max_completion_length 6 "
        "--device cpu --learning_rate 0.01 --warmup_steps 0 --lr_scheduler_type constant_with_warmup").split()


def make_checkpoint(folder, chat=False):
    """A tiny random Qwen2 over the characters of the built-in task."""
    tokenizer = builtin_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    config = AutoConfig.for_model("qwen2", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                                  intermediate_size=32, vocab_size=len(tokenizer), bos_token_id=None,
                                  eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(text, folder, *argv):
    """Run a printed script in this folder: TRL's log, [number of rows, sixth row] of its data, the weights that it saved."""
    seen = "import json\njson.dump([trainer.state.log_history, [len(dataset), dataset[5]]], open('seen.json', 'w'))\n"
    (folder / "trl_run.py").write_text(f"{text}\n{seen}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "trl_run.py", *argv], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (text, done.stderr[-3000:])
    return *json.loads((folder / "seen.json").read_text()), load_file(folder / "runs/trl-gspo/model.safetensors")


MINE = '''
def sevens(response, answer):
    return {"seven": float("7" in response), "short": 0.5 * (len(response) < 6)}

def longer(prompts, completions, answer, **columns):
    assert isinstance(prompts[0], str) and isinstance(completions[0], str) and len(answer) == len(prompts)
    open("lengths.txt", "a").write(f"{prompts[0]} {answer[0]}\\n")
    return [float(len(text)) for text in completions]
'''


@pytest.mark.parametrize("chat, flags", [(False, "--verifier exact mine.py:longer"), (True, "--verifier mine.py:sevens mine.py:longer --reward_weights 1 2")])
def test_the_printed_script_trains_on_a_file(tmp_path, monkeypatch, chat, flags):
    """Two optimizer steps of two micro-batches each, with the prompts, rewards and batch sizes of the flags."""
    monkeypatch.chdir(tmp_path)
    model = make_checkpoint(tmp_path / "model", chat)
    rows = [{"question": f"{a}+{b}", "answer": f"because #### {a + b}"} for a in range(4) for b in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"question": "1+" * 60, "answer": "0"}]))
    Path("mine.py").write_text(MINE)
    args = parse(["--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--max_prompt_length", "20", *SIZE, *flags.split()])
    assert batch_rows(args) == (4, 2)
    prompt = [{"role": "user", "content": "1+1"}] if chat else "1+1"
    history, data, weights = run(trl_script(args), tmp_path)
    assert data == [16, {"question": "1+1", "answer": "2", "prompt": prompt}]
    assert history[-1]["step"] == 2                          # --steps 1 of two mini-batches
    names = ["sevens", "longer"] if chat else ["exact", "longer"]
    assert all(f"rewards/{name}/mean" in history[0] for name in names)
    before = load_file(tmp_path / "model/model.safetensors")
    assert any(not torch.equal(before[name], weights[name]) for name in before)
    if not chat:
        assert all(line.split()[0] in {row["question"] for row in rows} for line in Path("lengths.txt").read_text().splitlines())


def test_the_printed_script_trains_the_built_in_task(workplace):
    """Its prompts and rewards come from this project, its policy from a checkpoint of a run."""
    flags = [*SIZE, "--min_terms", "1", "--max_terms", "2"]
    model = make_checkpoint(workplace / "model")
    history, data, _ = run(trl_script(parse(flags)), workplace, model)
    assert "rewards/reward/mean" in history[0] and data[1]["index"] == 5


@pytest.mark.parametrize("micro, rows, accumulated", [(None, 128, 1), (48, 32, 4), (8, 8, 16), (1024, 128, 1)])
def test_a_micro_batch_divides_the_mini_batch(micro, rows, accumulated):
    """32 prompts of 16 responses in 4 mini-batches of 128."""
    flags = ["--num_generations", "16", *(["--micro_batch_size", str(micro)] if micro else [])]
    assert batch_rows(parse(flags)) == (rows, accumulated)


def test_what_trl_has_under_the_same_name_is_in_its_config_and_what_it_lacks_is_named():
    args = parse(["--mask_truncated_completions", "--beta", "0.1", "--sync_ref_model", "--ref_model_sync_steps", "3"])
    config = config_of(args)
    assert config["mask_truncated_completions"] and (config["ref_model_mixup_alpha"], config["ref_model_sync_steps"]) == (0.6, 12)
    assert not missing(args)
    for flags, words in ((["--top_p", "0.9"], "renormalized"), (["--length_penalty", "0.1"], "length penalty"),
                         (["--positive_example_nll_weight", "0.1"], "likelihood")):
        assert any(words in name for name in missing(parse(flags)))


def test_vllm_is_in_the_script_of_a_run_with_vllm_alone(monkeypatch, tmp_path):
    """TRL takes the fields; its weights, which drop whole responses by default, are on only where the run has them."""
    import trl
    assert "vllm" not in trl_script(parse(["--device", "cpu"])).lower()
    monkeypatch.syspath_prepend(str(ROOT / "tests/engines/fake"))
    for flags, share, mode in (([], 0.3, None), (["--vllm_gpu_memory_utilization", "0.5", "--mismatch", "token_truncate"], 0.5, "token_truncate")):
        args = parse(["--device", "cpu", "--sampler", "vllm", *flags])
        text, config = trl_script(args), config_of(args)
        assert "not in TRL's script" not in text and "pip install trl[vllm], and a GPU" in text and f"vllm_gpu_memory_utilization={share}," in text
        found = trl.GRPOConfig(**config, output_dir=str(tmp_path), use_cpu=True)
        assert found.use_vllm and found.vllm_mode == "colocate" and found.vllm_gpu_memory_utilization == share
        assert found.vllm_importance_sampling_correction == (mode is not None)
        assert mode is None or found.vllm_importance_sampling_mode == mode

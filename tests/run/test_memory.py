"""The memory estimate before a run: README's commands, the line that compares it with the device, and what to change. python -m pytest tests/run/test_memory.py"""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

import train
from plumbing.parallel import devices
from plumbing.run import memory
from plumbing.run.arguments import parse
from plumbing.run.memory import advice, comparison, footprint, parameters_of, within, work_of
from plumbing.speed.fast import FastSampler
from tiny_run import TINY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import memory as measuring  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = {device: (flags, float(gb)) for flags, device, gb in re.findall(
    r"^    python train\.py (--model_name_or_path Qwen/Qwen2\.5-0\.5B.*?) +# (.*?(\d+) GB)$", README, re.M)}
# config.json of Qwen/Qwen2.5-0.5B-Instruct as published
QWEN = dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
            vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768)


@pytest.fixture
def qwen(monkeypatch):
    """Its config and its number of parameters; the hub's id has that config."""
    config = AutoConfig.for_model("qwen2", **QWEN)
    monkeypatch.setattr(memory.AutoConfig, "from_pretrained", lambda name: config)
    monkeypatch.setitem(devices.THERE, "mps", lambda: True)
    return config, parameters_of(config)


def test_the_model_has_its_published_size(qwen):
    assert qwen[1] == 494_032_768


def test_readme_has_a_command_for_each_device():
    assert list(COMMANDS) == ["80 GB", "24 GB", "T4, 16 GB", "8 GB", "Mac, 16 GB"]
    assert "--device mps" in COMMANDS["Mac, 16 GB"][0]


@pytest.mark.parametrize("bfloat16", [True, False], ids=["bfloat16", "T4"])
@pytest.mark.parametrize("device", COMMANDS)
def test_readmes_commands_of_gspo_compute_in_float32(device, bfloat16, qwen, monkeypatch):
    """On every GPU: in 16 bits rounding moves log s by more than the paper's clip range (results/bfloat16.json)."""
    monkeypatch.setattr(devices, "has_bfloat16", lambda: bfloat16)
    monkeypatch.setitem(devices.THERE, "cuda", lambda: True)
    args = parse(shlex.split(COMMANDS[device][0]))
    assert args.algorithm == "gspo" and args.half is None
    noise = json.loads((ROOT / "results/bfloat16.json").read_text())["noise"]["steps"]["1"]["arms"]
    assert all(noise[half]["error_rms"] > args.epsilon_high for half in ("bfloat16", "float16"))


@pytest.mark.parametrize("device", COMMANDS)
def test_readmes_commands_fit_their_devices(device, qwen):
    flags, gb = COMMANDS[device]
    args = parse(shlex.split(flags))
    capacity = gb * 1e9 * (2 / 3 if "Mac" in device else 1)  # what Metal lends of a Mac's memory
    work = work_of(args, args.max_prompt_length)
    assert within(*qwen, work, capacity)
    need = footprint(*qwen, work)
    assert need["peak"] > 0.4 * capacity                     # and use them
    smaller = {"80 GB": 24e9, "24 GB": 16e9, "T4, 16 GB": 8e9, "8 GB": 4e9, "Mac, 16 GB": 4e9}[device]
    assert not within(*qwen, work, smaller)


@pytest.mark.parametrize("flags, capacity, wanted", [
    ("--bf16 --micro_batch_size 32", 24e9, ["--micro_batch_size 8", "--prompts_per_step 4", "LoRA (--use_peft --micro_batch_size 16)", "--optimizer_offload"]),
    ("--bf16 --micro_batch_size 8", 8e9, ["LoRA (--use_peft --micro_batch_size 4)", "a smaller model", "--shard"]),
    ("--bf16 --micro_batch_size 8 --prompts_per_step 512 --steps_per_generation 4", 40e9, ["--prompts_per_step 2", "LoRA (--use_peft --prompts"]),
    ("--bf16 --micro_batch_size 1 --gradient_checkpointing --eval_prompts 512", 14e9, ["--eval_prompts 47", "LoRA (--use_peft)"]),
    ("--bf16 --micro_batch_size 8 --use_peft", 8e9, ["--micro_batch_size 4", "--prompts_per_step 4", "--load_in_4bit"]),
    ("--bf16 --micro_batch_size 8", 80e9, ["--micro_batch_size 4", "--prompts_per_step 4", "LoRA (--use_peft)"])])
def test_what_memory_ran_out_of_names_numbers_that_fit(flags, capacity, wanted, qwen):
    """Also where the estimate says that the run fits: then it was too low, and the batches are halved."""
    args = parse(f"--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name d.jsonl --max_prompt_length 320 --max_completion_length 512 {flags}".split())
    line = advice(args, capacity)
    assert line.startswith("out of GPU memory: about ") and "\n" not in line
    assert [words for words in wanted if words not in line] == [], line
    step, work = args.steps_per_generation, work_of(args, args.max_prompt_length)
    if "--prompts_per_step" in line:
        fewer = int(re.search(r"--prompts_per_step (\d+)", line)[1])
        fit = [within(*qwen, memory.replace(work, prompts=n, rows=1, evaluated=0, gradient_checkpointing=True), capacity)
               for n in (fewer, fewer + step)]
        assert fewer % step == 0 and fewer < args.prompts_per_step and fit[0]
        assert not fit[1] or fewer == args.prompts_per_step // 2    # the largest that fits, or half of one that fits


@pytest.mark.slow
def test_an_evaluation_needs_what_is_measured():
    """The estimate of "evaluating" beside the measured peak of sampling all its rows at once."""
    model = measuring.random_model("llama", 64, 4, 4, 4, 128, 4096).eval()
    tokenizer = memory.builtin_tokenizer()
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    sampler = FastSampler(model, tokenizer, 48, 1.0, (), None)
    prompts = [[3 + i % 10] * 16 for i in range(32)]
    peak = measuring.peak_bytes(lambda: sampler.sample(prompts, 4, uniforms=torch.rand(128, 48)))
    work = memory.Work(1, 4, 16, 48, 4, padded=False, evaluated=128)
    estimate = footprint(model.config, parameters_of(model.config), work)["evaluating"]
    assert 0.7 * peak < estimate < 1.5 * peak


@pytest.fixture
def vllm(monkeypatch):
    """--sampler vllm is accepted: a stand-in is found."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/engines/fake"))


def device_of(monkeypatch, gb):
    monkeypatch.setattr(memory, "capacity_of", lambda device: gb * 1e9)
    return torch.device("cuda")


@pytest.mark.parametrize("gb, fits", [(80, True), (16, False)])
def test_the_line_before_the_first_batch(gb, fits, qwen, monkeypatch):
    args = parse("--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name d.jsonl --bf16".split())
    task = SimpleNamespace(ids={"a": [1] * 200, "b": [1] * 100}, test=[0] * 5, max_completion_length=512)
    line = comparison(args, qwen[0], task, device_of(monkeypatch, gb))
    need = footprint(*qwen, memory.replace(work_of(args, 200), evaluated=20, new_tokens=512))
    assert line.startswith(f"memory: about {need['peak'] / 1e9:.1f} GB needed of {gb}.0 (")
    assert ("this may not fit; try --micro_batch_size 4" in line) != fits and "\n" not in line


RUN = "--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name d.jsonl --bf16 --micro_batch_size 1 --gradient_checkpointing"


@pytest.mark.parametrize("more, share", [("", 0.3), ("--vllm_gpu_memory_utilization 0.5", 0.5)])
def test_vllm_takes_its_share_of_a_gpu_while_it_samples(more, share, qwen, vllm, monkeypatch):
    """Beside the weights and the optimizer; during updates it sleeps. --prompts_per_step changes nothing about it."""
    args = parse(f"{RUN} --sampler vllm {more}".split())
    task = SimpleNamespace(ids={"a": [1] * 200}, test=[0] * 5, max_completion_length=512)
    ours, with_vllm = (footprint(*qwen, work_of(args, 200, *engine)) for engine in ((), (share * 24e9, False)))
    assert with_vllm["sampling"] == with_vllm["evaluating"] == share * 24e9 and with_vllm["updating"] == ours["updating"]
    assert with_vllm["peak"] == ours["state"] + share * 24e9 > ours["peak"]
    line = comparison(args, qwen[0], task, device_of(monkeypatch, 24))
    assert f"memory: about {with_vllm['peak'] / 1e9:.1f} GB needed of 24.0" in line and f"sampling {share * 24:.1f}," in line
    assert ("may not fit" in line) == (not within(*qwen, work_of(args, 200, share * 24e9), 24e9))
    smaller = {0.3: 13, 0.5: 18}[share]
    line = comparison(args, qwen[0], task, device_of(monkeypatch, smaller))
    assert "this may not fit; try --vllm_gpu_memory_utilization 0." in line and "--prompts_per_step" not in line
    flags = re.search(r"--vllm_gpu_memory_utilization (\S+?),?$", line)
    fewer = parse(f"{RUN} --sampler vllm --vllm_gpu_memory_utilization {flags[1]}".split())
    assert "may not fit" not in comparison(fewer, qwen[0], task, device_of(monkeypatch, smaller))


def test_vllm_on_a_cpu_holds_a_copy_of_the_weights_and_its_cache_all_the_time(qwen, vllm):
    args = parse(f"{RUN} --device cpu --sampler vllm --sampler_dtype bfloat16".split())
    assert memory.engine_memory(args, qwen[1], 24e9, "cpu") == (2 ** 30 + 2 * qwen[1], True)
    ours, found = (footprint(*qwen, work_of(args, 200, *engine)) for engine in ((), (5e9, True)))
    assert found["state"] - ours["state"] == 5e9 and found["sampling"] == found["evaluating"] == 0
    assert memory.engine_memory(parse(f"{RUN} --device cpu".split()), qwen[1], 24e9, "cpu") == (0, False)


def test_a_run_prints_it_before_its_first_batch(workplace, monkeypatch, capsys):
    """A checkpoint on a CPU is compared with the machine's memory; the tiny MoE says nothing there."""
    train.main([*TINY, "--steps", "1", "--output_dir", "run"])
    assert "memory: about" not in capsys.readouterr().out
    Path("rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3."}\n{"prompt": "1+3=", "answer": "4."}\n')
    more = ["--model_name_or_path", "run/checkpoints/step_1", "--dataset_name", "rows.jsonl", "--verifier", "exact", "--steps", "1",
            "--prompts_per_step", "2", "--num_generations", "2", "--max_completion_length", "4", "--eval_samples", "0", "--device", "cpu"]
    train.main([*more, "--output_dir", "next"])
    lines = capsys.readouterr().out.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("memory: about 0.0 GB needed of ")]
    assert at and not any(line.startswith("batch ") for line in lines[:at[0]])

"""A finished checkpoint is served by transformers; one of adapters is loaded by the lines that its
run prints, and served once it is merged.
python -m pytest tests/run/test_serving.py -m slow"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from sysconfig import get_path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import models
from tiny_run import jsonl


@pytest.fixture
def trained(run):
    """trained(flags) -> the checkpoint of one step of a tiny model with a chat template."""
    tokenizer = models.ascii_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    models.saved("model", tokenizer=tokenizer)
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(1, 9)]

    def train(flags):
        run(f"--model_name_or_path {Path('model').resolve()} --dataset_name "
            f"{jsonl('rows.jsonl', rows)} --max_completion_length 4 {flags}")
        return Path("run/checkpoints/step_1").resolve()
    return train


def test_the_last_line_of_a_run_of_adapters_loads_them(trained, capsys):
    peft = pytest.importorskip("peft")
    Path("mine.py").write_text("def reward(response, answer):\n    return response < '5'\n")
    folder = trained("--verifier mine.py:reward --use_peft --learning_rate 0.1 --warmup_steps 0")
    line = capsys.readouterr().out.splitlines()[-1]
    there = dict(AutoModelForCausalLM=AutoModelForCausalLM, PeftModel=peft.PeftModel)
    exec(line.removeprefix("load: "), there)
    ids = torch.arange(20, 30)[None]                                                # [1, 10]
    plain = AutoModelForCausalLM.from_pretrained("model")(ids).logits
    changed = (there["model"](ids).logits - plain).abs().max()
    assert changed > 1e-4 and (folder / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--use_peft"])
def test_transformers_serves_a_checkpoint(flags, trained):
    pytest.importorskip("fastapi")
    folder = trained(flags)
    if flags:
        peft = pytest.importorskip("peft")
        base = AutoModelForCausalLM.from_pretrained("model")
        model = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
        model.save_pretrained("merged")
        AutoTokenizer.from_pretrained(folder).save_pretrained("merged")
        folder = Path("merged").resolve()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [Path(get_path("scripts"), "transformers"), "serve", folder, "--device", "cpu", "--port",
         str(port)], env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        for _ in range(120):
            try:
                assert urllib.request.urlopen(f"http://localhost:{port}/health").status == 200
                break
            except OSError:
                assert server.poll() is None
                time.sleep(1)
        asked = {"model": str(folder), "messages": [{"role": "user", "content": "1+2="}],
                 "max_tokens": 4}
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/chat/completions", json.dumps(asked).encode(),
            {"Content-Type": "application/json"})
        said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
        assert isinstance(said, str)
    finally:
        server.terminate()
        server.wait()

"""A tiny MoE of more than 4 layers: how its random weights are scaled, and that it learns.
python -m pytest tests/model/test_depth.py"""


import pytest
import torch

import train
from moe import TinyMoE
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.cold_start import scale_residual, make_tiny_config
from session.arguments import parse
from tiny_run import read_json


@pytest.mark.parametrize("layers, factor", [(1, None), (4, None), (16, 0.5), (9, 2 / 3)])
def test_only_deeper_models_begin_with_smaller_residual_weights(layers, factor):
    flags = f"--num_hidden_layers {layers} --hidden_size 16 --num_experts 2"
    config = make_tiny_config(parse(flags.split()), builtin_tokenizer())

    def weights(change):
        torch.manual_seed(0)
        return dict(change(TinyMoE(config)).named_parameters())
    plain, scaled = weights(lambda model: model), weights(scale_residual)
    changed = {name for name in plain if not torch.equal(plain[name], scaled[name])}
    writes = {f"model.layers.{i}.{part}" for i in range(layers)
              for part in ("self_attn.o_proj.weight", "mlp.experts.down_proj")}
    assert changed == (writes if factor else set())
    for name in changed:
        torch.testing.assert_close(scaled[name], plain[name] * factor)


@pytest.mark.slow
def test_sixteen_layers_learn_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                              # a cold start of its own
    train.main("--num_hidden_layers 16 --device cpu --steps 1 --eval_prompts 64 --eval_samples 2 "
               "--output_dir run".split())
    assert read_json("run/summary.json")["pass_at_1_before"] > 0.4

"""A tiny MoE of more than 4 layers: how its random weights are scaled, and that it learns.
python -m pytest tests/model/test_depth.py"""


import pytest
import torch

import train
from moe import TinyMoE
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.cold_start import make_tiny_config, read_sources, scale_residual
from plumbing.refusal import Refusal
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


def test_a_teacher_without_a_file_is_refused():
    with pytest.raises(Refusal, match="<stdin>"):
        read_sources("<stdin>")


@pytest.mark.slow
def test_sixteen_layers_learn_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                              # a cold start of its own
    train.main("--num_hidden_layers 16 --hidden_size 48 --num_experts 16 --min_terms 3 "
               "--max_terms 5 --cold_start_steps 500 --cold_start_learning_rate 1e-3 --steps 1 "
               "--device cpu --eval_prompts 64 --eval_samples 2 --output_dir run".split())
    assert read_json("run/summary.json")["pass_at_1_before"] > 0.4

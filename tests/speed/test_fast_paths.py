"""What is fast is equal to what is plain: plumbing/speed/fast.py; benchmarks/ measures it. python -m pytest tests/speed/test_fast_paths.py

References: transformers' own cache and logits; the CPU allocator's peak. Shared prompts and chunks one by one: tests/speed/test_logprobs.py.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import rollout
from losses import policy_loss
from plumbing.speed import fast
from plumbing.speed.fast import response_logp, sample
from test_rollout import MODELS, PROMPTS, TOKENIZER, make

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import bfloat16  # noqa: E402
import memory  # noqa: E402
import scaling  # noqa: E402
import timing  # noqa: E402
import versus_trl  # noqa: E402


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@pytest.mark.parametrize("kind", MODELS)
def test_the_quick_sampler_draws_the_tokens_of_the_plain_one(kind, temperature):
    model = make(kind)
    uniforms = torch.rand(9, 20, generator=torch.Generator().manual_seed(0))
    quick, plain = (way.sample(model, TOKENIZER, PROMPTS, 3, 20, temperature, uniforms)
                    for way in (fast, rollout))
    assert torch.equal(quick.mask, plain.mask) and quick.texts == plain.texts
    assert torch.equal(quick.response_ids[quick.mask], plain.response_ids[plain.mask])
    assert torch.equal(quick.truncated, plain.truncated)
    assert torch.allclose(quick.sampler_logp, plain.sampler_logp, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "tiny_moe"])
def test_all_fast_lines_together_give_the_gradient_of_plain_transformers_logits(kind):
    model = make(kind)
    batch = sample(model, TOKENIZER, PROMPTS, 3, 12, uniforms=torch.rand(9, 12, generator=torch.Generator().manual_seed(1)))
    weights = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(2))

    fast = response_logp(model, batch, 0.8, entropy=False, max_logits=17 * 7)
    (fast.logp * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()

    want = torch.zeros_like(weights)                         # one unpadded sequence at a time, all its logits
    for i, (ids, mask) in enumerate(zip(batch.response_ids, batch.mask)):
        prompt, answer = batch.prompt_ids[i // 3][batch.prompt_mask[i // 3]], ids[mask]
        logp = (model(input_ids=torch.cat([prompt, answer])[None]).logits[0] / 0.8).log_softmax(-1)
        want[i, :len(answer)] = logp[len(prompt) - 1:-1].gather(-1, answer[:, None]).squeeze(-1)
    (want * weights).sum().backward()
    reference = torch.cat([p.grad.flatten() for p in model.parameters()])

    assert fast.entropy is None
    assert torch.allclose(fast.logp, want, atol=1e-5)
    assert (gradient - reference).norm() < 1e-5 * reference.norm()


def test_the_peak_of_an_update_does_not_hold_the_logits_of_all_tokens(monkeypatch):
    V, peaks = 8192, []
    model = memory.random_model("qwen2", 16, 1, 2, 2, 16, V)
    for T in (256, 512):
        batch = memory.random_rollout(V, 1, 1, 8, T)
        peaks.append(memory.peak_bytes(lambda: response_logp(model, batch, entropy=False, max_logits=64 * V).logp.sum().backward()))
        model.zero_grad()
    assert peaks[1] - peaks[0] < 0.25 * 256 * V * 4, "256 more tokens cost far less than one row of logits each"


@pytest.mark.parametrize("script", [bfloat16, memory, scaling, versus_trl])
def test_benchmarks_explain_themselves(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0 and "--quick" in capsys.readouterr().out


def test_sides_take_turns_and_the_first_round_does_not_count():
    """Two sides, three rounds after the warm-up: their order, and quotients within a round."""
    order = []

    def side(name, seconds):
        def measure(turn):
            order.append((name, turn))
            return seconds[turn]
        return measure
    found = timing.in_turns({"a": side("a", [9.0, 2.0, 4.0, 6.0]),
                             "b": side("b", [9.0, 1.0, 1.0, 2.0])}, 3)
    assert order == [(name, turn) for turn in range(4) for name in "ab"]
    assert found == {"a": [2.0, 4.0, 6.0], "b": [1.0, 1.0, 2.0]}
    assert timing.quotients(found["a"], found["b"]) == {"min": 2.0, "median": 3.0, "max": 4.0}
    assert timing.timed(lambda turn: turn, iter([3.0, 5.5]).__next__)(0) == 2.5


@pytest.mark.slow
def test_a_benchmark_of_the_loop_measures_and_writes_its_page(tmp_path):
    """python benchmarks/scaling.py --quick --only plain: the other parts of the file stay."""
    file = tmp_path / "scaling.json"
    measured = json.loads((ROOT / "experiments/results/scaling.json").read_text())
    file.write_text(json.dumps(measured))
    scaling.main(["--quick", "--only", "plain", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["plain"]["median"] > 1 and found["plain"]["rounds"] == 2
    assert found["texts"]["plain"] == f"{found['plain']['median']:.1f}"
    assert found["growth"] == measured["growth"]


def test_without_trl_the_benchmark_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit) as stop:
        versus_trl.main(["--quick"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "pip install trl==1.16.0" in error and error.count("\n") == 1


def test_an_unknown_case_is_named(capsys):
    pytest.importorskip("trl")
    with pytest.raises(SystemExit) as stop:
        versus_trl.main(["--cases", "tiny_mo"])
    assert stop.value.code == 2 and "tiny_mo" in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_of_the_benchmark_compute_the_same_gradient():
    """TRL's trainer as the benchmark sets it up, on completions that it sampled: its old log-probs and its gradient are ours."""
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    case, cpu = ("", "tiny_moe", 4, None, 4, 8, 2, 1, ""), torch.device("cpu")
    args, task, folder, _ = versus_trl.prepare(case, cpu)
    ours, trainer = versus_trl.Ours(args, task, folder, cpu), versus_trl.Trl(args, task, folder, cpu).trainer
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": p.prompt, "number": i} for i, p in enumerate(task.train[:4]) for _ in range(4)])
    trainer._compute_loss(trainer.model, batch).backward()

    mask = batch["completion_mask"].bool()
    mini = rollout.Rollout(batch["prompt_ids"][::4], batch["prompt_mask"][::4].bool(), batch["completion_ids"], mask, torch.zeros(mask.shape),
                           torch.zeros(len(mask), dtype=torch.bool), [""] * len(mask), 4)
    logp = ours.learner.actor(mini, entropy=False).logp
    loss, _ = policy_loss("gspo", logp, batch["old_per_token_logps"], batch["advantages"], mask)
    loss.backward()
    assert mask.all() and torch.allclose(logp, batch["old_per_token_logps"], atol=1e-5)
    theirs = dict(trainer.model.named_parameters())
    for name, p in ours.learner.policy.named_parameters():
        assert (p.grad - theirs[name].grad).norm() < 1e-4 * p.grad.norm() + 1e-9, name

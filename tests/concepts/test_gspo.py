"""gspo.py, the page: its numbers are those of the concept files, it needs none of them, and it
runs. python -m pytest tests/concepts/test_gspo.py

The shortened page runs in this process (runpy), on a copy with smaller constants.
"""

import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gspo
import models
import rollout
from losses import policy_loss
from reference import only, ragged
from tiny_run import write

PAGE = Path(gspo.__file__)
SOURCE = PAGE.read_text(encoding="utf-8")
PROMPTS = [[3, 10, 8, 11], [9, 11], [1, 10, 2, 10, 3, 11]]
SHORT = dict(STEPS=2, PROMPTS_PER_STEP=2, NUM_GENERATIONS=4, MINI_BATCHES=2, MICRO_BATCH=2, steps=2)


def shortened(source, **constants):
    """The page with smaller constants, wherever it sets them; each must be there. What a checkpoint
    gets in their place, too."""
    source = source.replace("k=200 * ", "k=STEPS * ")
    for name, value in constants.items():
        source, count = re.subn(rf"\b{name} ?= ?[\d.e-]+(?=\D)", f"{name}={value}", source)
        assert count, name
    return source


def test_log_probs_are_those_of_one_response_at_a_time():
    """Prompts of unequal length; some responses are empty: their end token comes first. GPT-2's
    positions are absolute: padding may not shift them."""
    policy = models.make("gpt2", vocab_size=16, hidden_size=16, pad_token_id=None)
    drawn = gspo.sample(policy, gspo.Characters(), PROMPTS, 16, 12)
    lengths = drawn.mask.sum(-1).tolist()
    assert 1 in lengths and len(set(lengths)) > 2 and not drawn.prompt_mask.all()
    want = models.own_logp(policy, SimpleNamespace(group_size=1, **drawn._asdict()))
    found = gspo.response_logp(policy, drawn)
    torch.testing.assert_close(found[drawn.mask], want[drawn.mask])


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_a_loss_is_that_of_the_concept_file(name):
    """Value, gradient and clipped tokens, on responses of all kinds."""
    batch = ragged(absurd=[0.0])
    logp, old_logp, A, mask, *_ = only(batch.mask.any(-1), batch)
    logp.requires_grad_()
    loss, clipped = gspo.LOSSES[name](logp, old_logp, A, mask)
    want, stats = policy_loss(name, logp, old_logp, A, mask)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(x, logp)[0] for x in (loss, want)))
    assert clipped.sum().item() == pytest.approx(((stats["clip_low"] + stats["clip_high"])
                                                  * mask.sum()).item())
    assert not clipped[~mask].any() and (clipped.any() or name == "grpo")


def test_the_page_imports_nothing_of_this_project():
    imported = re.findall(r"(?m)^ *(?:from|import) (\w+)", SOURCE)
    assert {*imported} <= {"torch", "transformers", "datasets", *sys.stdlib_module_names}


def test_the_page_is_a_page():
    lines = SOURCE.splitlines()
    code = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len(code) <= 230 and len(lines) <= 260 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("response, right", [
    ("3 * 6 = 18\n#### 18", 1), ("#### $1,018.", 0), ("#### 18.\n", 1), ("18", 0), ("####", 0),
    ("", 0)])
def test_of_gsm8k_counts_what_follows_the_marks(response, right):
    assert gspo.reward(response, "He has 3 * 6 = <<3*6=18>>18.\n#### 18") == right
    assert gspo.reward("#### $1,018", "#### 1,018") == 1


def run(monkeypatch, path, source, *argv):
    """The page from the command line, in this process."""
    write(path, source)
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, argv)])
    runpy.run_path(str(path), run_name="__main__")


def test_the_shortened_page_runs(tmp_path, monkeypatch, capsys):
    """Seven batches of three tokens, with a reward that is a matter of chance."""
    source = shortened(SOURCE, **SHORT | dict(STEPS=7, MAX_NEW_TOKENS=3))
    right, chance = "float(response == answer)", "float(response < '7')"
    assert source.count(right) == 1
    run(monkeypatch, tmp_path / "short.py", source.replace(right, chance))
    agreement, *batches, said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"log-probs of sampling and of scoring differ by at most [\d.e-]+ nats",
                        agreement)
    for line in batches:
        assert re.fullmatch(r"batch +\d/7   reward [\d.]+   clipped of A≠0: gspo [\d.]+   "
                            r"grpo [\d.]+   [\d.]+ s", line)
    means = [float(line.split()[3]) for line in batches]
    fives = [sum(part) / 5 for part in (means[:5], means[-5:])]
    assert len(means) == 7 and fives[0] != fives[1]
    assert [float(x) for x in re.findall(r"0\.\d+", said)] == pytest.approx(fives, abs=1e-3)


@pytest.mark.parametrize("warmup, updates", [(10, 50), (10, 10), (3, 4), (10, 4)])
def test_the_learning_rate_rises_from_a_share_of_the_highest_and_falls_as_a_cosine(warmup, updates):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = gspo.make_schedule(optimizer, warmup, updates), []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    falling = [math.cos(math.pi / 2 * k / (updates - warmup)) ** 2 for k in range(updates - warmup)]
    assert rates == pytest.approx([(k + 1) / warmup for k in range(min(warmup, updates))] + falling)


@pytest.mark.parametrize("of_tokenizer, of_model", [(15, None), (0, None), (0, 15), (None, 0),
                                                    (15, [0, 14]), (None, [3])])
def test_it_knows_the_end_tokens_that_train_py_knows(of_tokenizer, of_model):
    torch.manual_seed(0)
    tokenizer = gspo.Characters()
    tokenizer.eos_token_id = of_tokenizer
    policy = gspo.tiny_policy(gspo.Characters())
    policy.generation_config.eos_token_id = of_model
    ends = torch.tensor(rollout.end_tokens(policy, tokenizer))
    drawn = gspo.sample(policy, tokenizer, PROMPTS[:2], 64, 12)
    ended = torch.isin(drawn.response_ids, ends)                        # [B, T]
    before = (ended.cumsum(-1) - ended.long()) == 0                     # no end token stands before
    assert torch.equal(drawn.mask, before) and (ended & drawn.mask).any(-1).sum() > 10
    assert all(ended[drawn.response_ids == end].all() for end in ends)
    assert drawn.prompt_ids[64:, :2].unique().item() in ends


@pytest.mark.parametrize("kind, sizes", [
    ("Mamba", dict(state_size=4)), ("Rwkv", dict(attention_hidden_size=32))])
def test_a_model_whose_state_is_no_kv_cache_is_refused_in_a_line(kind, sizes, capsys):
    policy = models.make(kind.lower(), vocab_size=16, pad_token_id=None, intermediate_size=64,
                         **sizes)
    for weight in policy.parameters():           # as trained weights: predictions that differ
        weight.data += 0.3 * torch.randn_like(weight)
    drawn = gspo.sample(policy, gspo.Characters(), PROMPTS[:2], 2, 8)
    with pytest.raises(SystemExit, match=f"^gspo.py: {kind}ForCausalLM .*probabilities$"):
        gspo.check_log_probs(policy, drawn)
    said = re.search(r"differ by at most ([\d.e+-]+) nats", capsys.readouterr().out)
    assert float(said[1]) > 0.1


def test_the_page_trains_a_checkpoint_on_rows_of_a_file(tmp_path, monkeypatch, capsys):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = models.ascii_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    checkpoint = models.saved(tmp_path / "model", tokenizer=tokenizer, num_hidden_layers=1)
    rows = tmp_path / "rows.jsonl"
    write(rows, '{"question": "What is 3 * 6?", "answer": "#### 18"}\n'
                '{"question": "2 + 2?", "answer": "#### 4"}\n')
    source = shortened(SOURCE, **SHORT | dict(
        micro_batch=3, max_new_tokens=8, learning_rate=1e-3))
    run(monkeypatch, tmp_path / "short.py", source, checkpoint, rows)
    assert capsys.readouterr().out.count("batch ") == 2



"""Turns: what an environment's reset adds to the prompt of a response.
python -m pytest tests/features/test_reset.py"""

import re
from dataclasses import replace

import pytest
import torch

import eval
import models
import train
from features import distillation
from models import chat_tokenizer
from plumbing.data.datafiles import Problem
from plumbing.data.task import Task
from plumbing.speed import fast
from plumbing.speed.rollouts import concat
from rollout import Sampler
from test_environment import LETTERS, PROMPTS, chat_policy, make, play
from test_environment import environment  # noqa: F401
from tiny_run import SMALL, differences, read_json, write

# The openings of the responses, in their order; each lasts for two turns.
OPENS = """
class Opens:
    template = False
    texts = []
    def __init__(self, row):
        self.turn = 0
    def reset(self):
        return Opens.texts.pop(0)
    def step(self, text):
        self.turn += 1
        return "3+", len(text) / 8, self.turn == 2
"""
PROBLEMS = [Problem("3+8=", ""), Problem("9+5+1=", "")]
TASK = Task("sums", PROBLEMS, [], None, played=True)


def gradients(score, model, rollout):
    """log π and the gradients of its sum, weighted differently in each response and token."""
    model.zero_grad()
    logp = score(model, rollout).logp
    weights = torch.rand(logp.shape, generator=torch.Generator().manual_seed(1))
    (logp * weights).sum().backward()
    return [logp.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_the_groups_of_equal_openings_share_their_prompts_as_those_without(
        environment, calls):  # noqa: F811
    opens = environment(OPENS)
    opens.kind.texts = ["a"] * 4 + [None] * 4
    seen = calls(fast, "fast_sample")
    player = play(fast.FastSampler(make(), LETTERS, 9, 1.0, ("+",)), opens)
    rollout = player.sample(PROMPTS, 4, torch.rand(8, 9), problems=PROBLEMS, task=TASK)
    (*_, prompts, group_size, _, _, _, _), *_ = [inputs for inputs, *_ in seen]
    assert not rollout.own_prompts and group_size == 4
    assert prompts == [LETTERS("3+8=a")["input_ids"], PROMPTS[1]]
    other = replace(rollout, own_prompts=True)
    assert concat([rollout, other]).own_prompts and not concat([rollout, rollout]).own_prompts


# -------------------------------------------------------------------------- the script; its files

NAMED = """
import asyncio
import random
class Play:
    count = 0
    def __init__(self, row):
        pass
    {reset}
    def step(self, text):
        return "5", len(text) / 10, len(text) > 1
def reward(completions, prompts, largest):
    assert all(prompt.endswith("=2+") or prompt.endswith("=4+") for prompt in prompts)
    return [len(prompt) / 100 for prompt in prompts]
"""
OWN = "async def reset(self, largest, **row):\n        await asyncio.sleep(0)\n" \
      "        Play.count += 1\n        return f'{2 * (1 + Play.count % 2)}+', {'info': 1}"
PLAY = "--environment mine.py:Play --stop , + --max_completion_length 6 "


@pytest.mark.parametrize("line", ["", "--plain", "--algorithm ppo", "--routing_replay old",
                                  "--micro_batch_size 2", "--self_distillation answer "
                                  "--algorithm gspo_token --distillation_coef 1"])
def test_a_run_reads_shows_and_keeps_the_openings(line, run, own, capsys, killed, calls):
    """In rewards, samples, tokens, hints and evaluations; the same to the bit after a --resume."""
    hinted = calls(distillation, "hinted_prompt")
    write("mine.py", NAMED.format(reset=OWN))
    play = (f"{own} {PLAY} --verifier mine.py:reward --eval_samples 2 --eval_prompts 8 "
            f"--save_tokens --save_steps 1 {line} --steps ")
    records = run(play + "2", folder="whole")
    assert records[0]["mismatch_kl"] < 1e-8
    said = capsys.readouterr().out
    assert "note: the first prompt is shown without what reset() adds" in said
    assert re.search(r"before\n  reads   '[24]\+'\n  writes  ", said)
    for step in read_json("whole/samples.jsonl"):
        assert all(re.fullmatch(r"\d\+\d=[24]\+", sample["prompt"]) for sample in step["samples"])
    for group in read_json("whole/tokens.jsonl"):
        first, second = group["prompt"].replace(" ", "").split("\n")
        assert {first[-2:], second[-2:]} == {"2+", "4+"} and first[:-2] == second[:-2]
    endings = {problem.prompt[-2:] for (*_, problem), *_ in hinted if problem.prompt[-1] == "+"}
    assert endings == ({"2+", "4+"} if "distillation" in line else set())
    if not line:
        killed(1, play + "2")
        run("--resume --environment mine.py:Play --verifier mine.py:reward")
        assert differences("whole", "run", 2) == []
        eval.main(["passk", "--model_name_or_path", "run/checkpoints/step_2", "--n", "2",
                   "--problems", "3", *"--environment mine.py:Play".split(),
                   *"--verifier mine.py:reward".split()])


def test_a_dry_run_shows_the_prompt_with_its_opening(run, own, capsys):
    write("mine.py", NAMED.format(reset=OWN))
    train.main([*f"{own} {PLAY} --dry_run".split(), *SMALL])
    said = capsys.readouterr().out
    assert re.search(r"prompt: '\d\+\d=[24]\+'\n", said) and "  reads   '" in said


@pytest.mark.parametrize("attribute", ["", "template = False"])
def test_control_tokens_in_an_opening_are_named_once(attribute, environment, capsys):  # noqa: F811
    tokenizer = chat_tokenizer(models.CHATML)
    opens = environment(OPENS.replace("template = False", attribute or "pass"))
    opens.kind.texts = ["a<|im_end|>", "<|im_end|>"]
    player = play(Sampler(chat_policy(tokenizer), tokenizer, 5), opens)
    player.sample([[1]], 2, torch.rand(2, 5), problems=PROBLEMS[:1], task=TASK)
    said = capsys.readouterr().err
    assert said.count("\n") == ("reset returns contains control tokens" in said) == (not attribute)


# --------------------------------------------------------------------------- errors, in one line

BAD = {
    "return 7": "reset returned 7 for the row .*: a text that is added to the prompt, None or",
    "return 'a', 1, 2": "reset returned .'a', 1, 2. for the row",
    "return ['a']": "reset returned .'a'. for the row",
    "return 1 // 0": "reset raised ZeroDivisionError.* .mine.py:9. .for the row",
    "raise asyncio.CancelledError": "reset raised CancelledError.* .mine.py:9. .for the row",
    "return '1' * 30": "with what reset returned: rows.jsonl line .* has 34 tokens; between 1 and",
    "return '€'": "with what reset returned: rows.jsonl line .* cannot be tokenized"}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("body", BAD)
def test_a_bad_reset_ends_the_run_in_one_line(body, kind, own, refused):
    write("mine.py", NAMED.format(reset=f"{kind} reset(self, **row):\n        {body}"))
    said = refused(f"{own} {PLAY} --max_prompt_length 20 --steps 1 --output_dir run", begun=True)
    assert "--environment mine.py:Play: " in said and re.search(BAD[body], said), said


# -------------------------------------------------------- the tiny MoE plays in its own characters



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
from plumbing.model import cold_start as warm_up
from plumbing.speed import fast
from plumbing.speed.rollouts import concat
from rollout import Sampler
from rollout import response_logp as plain_logp
from test_environment import LETTERS, PROMPTS, Unlimited, chat_policy, make, play
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
TEXTS = ["a", "", "bb+c=", "a", "dd", "", "bb+c=", "7"]


def gradients(score, model, rollout):
    """log π and the gradients of its sum, weighted differently in each response and token."""
    model.zero_grad()
    logp = score(model, rollout).logp
    weights = torch.rand(logp.shape, generator=torch.Generator().manual_seed(1))
    (logp * weights).sum().backward()
    return [logp.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("long", [False, True], ids=["packed", "shared prompts"])
def test_openings_that_differ_within_a_group_are_read_and_scored_as_they_are(
        long, environment):  # noqa: F811
    """Three samplers draw the same; plain and fast scores and gradients agree, of the batch and of
    parts of it; each response has its own prompt."""
    opens = environment(OPENS)
    model = make()
    start = "".join("abcdef"[i % 6] for i in range(300 * long))     # beyond fast.MAX_PACKED
    problems = [replace(p, prompt=start + p.prompt) for p in PROBLEMS]
    prompts = TASK.encode(LETTERS, problems)
    uniforms = torch.rand(8, 9, generator=torch.Generator().manual_seed(0))
    rollouts = []
    for sampler in (Sampler, fast.FastSampler, Unlimited):
        opens.kind.texts = [*TEXTS]
        player = play(sampler(model, LETTERS, 9, 1.0, ("+", "9")), opens)
        rollouts.append(player.sample(prompts, 4, uniforms, problems=problems, task=TASK))
    for rollout in rollouts:
        assert rollout.own_prompts and rollout.group_size == 4
        read = [LETTERS.decode(ids[mask]).replace(" ", "")
                for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask)]
        assert read == [problems[i // 4].prompt + TEXTS[i] for i in range(8)]
        assert [game.opening for game in rollout.games] == TEXTS
        assert torch.equal(rollout.response_ids, rollouts[0].response_ids)
        torch.testing.assert_close(rollout.sampler_logp, rollouts[0].sampler_logp, atol=1e-5,
                                   rtol=1e-5)
    fast_one = rollouts[1]
    assert (fast_one.prefix >= 16) == long
    for part in (fast_one, fast_one.take(torch.arange(4, 8)), fast_one.take(torch.tensor([0, 2])),
                 concat([fast_one.take(torch.arange(4)), fast_one.take(torch.arange(4, 8))])):
        plain, quick = (gradients(score, model, part)
                        for score in (plain_logp, fast.fast_response_logp))
        torch.testing.assert_close(quick, plain, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(plain[0], fast_one.sampler_logp, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("template", ["", "Q: {prompt} A:"])
def test_an_opening_ends_the_last_message_of_the_user(template, environment):  # noqa: F811
    """Inside the prompt template and the chat template."""
    tokenizer = models.ascii_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    policy = models.make("qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    opens = environment(OPENS)
    opens.kind.texts = [" You see a wall.", " You see a door."]
    problem = Problem("Go.", "", earlier=(("user", "Hi"), ("assistant", "Ho")))
    task = replace(TASK, prompt_template=template or "{prompt}")
    prompts = task.encode(tokenizer, [problem])
    rollout = play(Sampler(policy, tokenizer, 5), opens).sample(
        prompts, 2, torch.rand(2, 5), problems=[problem], task=task)
    read = ["".join(tokenizer.convert_ids_to_tokens(ids[mask])) for ids, mask
            in zip(rollout.prompt_ids, rollout.prompt_mask)]
    start, end = (template or "{prompt}").split("{prompt}")
    assert read == [f"<user>Hi\n<assistant>Ho\n<user>{start}Go. {seen}{end}\n<assistant>"
                    for seen in ("You see a wall.", "You see a door.")]


@pytest.mark.parametrize("attribute", ["", "template = False"])
def test_control_tokens_in_an_opening_are_named_once(attribute, environment, capsys):  # noqa: F811
    tokenizer = chat_tokenizer(models.CHATML)
    opens = environment(OPENS.replace("template = False", attribute or "pass"))
    opens.kind.texts = ["a<|im_end|>", "<|im_end|>"]
    player = play(Sampler(chat_policy(tokenizer), tokenizer, 5), opens)
    player.sample([[1]], 2, torch.rand(2, 5), problems=PROBLEMS[:1], task=TASK)
    said = capsys.readouterr().err
    assert said.count("\n") == ("reset returns contains control tokens" in said) == (not attribute)


SEEDED = """
class Seeded:
    template = False
    got = []
    def __init__(self, row):
        pass
    def reset(self, {parameters}):
        Seeded.got.append({{"n": n}} | {also})
        n.clear()
    def step(self, text):
        return "", 0.0, True
"""


@pytest.mark.parametrize("parameters, also, row, expected", [
    ("n", "{}", {"n": [1]}, {}), ("n, **row", "row", {"n": [1], "m": 2}, {"m": 2}),
    ("n, seed", "{'seed': seed}", {"n": [1]}, {"seed": int}),
    ("n, seed", "{'seed': seed}", {"n": [1], "seed": 7}, {"seed": 7}),
    ("n, **row", "row", {"n": [1], "seed": 7}, {"seed": 7})])
def test_reset_gets_copies_of_the_columns_that_it_names_and_a_seed(parameters, also, row, expected,
                                                                   environment):  # noqa: F811
    """The seed is equal for the responses to a prompt; a column of this name goes before it."""
    seeded = environment(SEEDED.format(parameters=parameters, also=also))
    player = play(Sampler(make(), LETTERS, 4), seeded)
    problems = [Problem("", "", row=row)] * 2
    rollout = player.sample(PROMPTS, 2, torch.rand(4, 4), problems=problems, task=TASK)
    assert not rollout.own_prompts and [game.opening for game in rollout.games] == [""] * 4
    first, second, third, _ = got = seeded.kind.got
    assert first == second
    for entry in got:
        assert entry.pop("n") in ([1], [])                   # what it has cleared itself
        assert entry.keys() == expected.keys()
    if expected == {"seed": int}:
        assert first != third
    else:
        assert first == third == expected


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


def test_a_parameter_that_the_row_lacks_is_named(own, refused):
    write("mine.py", NAMED.format(reset="def reset(self, depth):\n        pass"))
    said = refused(f"{own} {PLAY} --steps 1 --output_dir run", begun=True)
    assert "reset raised TypeError: " in said and "'depth'" in said


# -------------------------------------------------------- the tiny MoE plays in its own characters

def test_the_warm_up_of_the_tiny_moe_reads_the_opening_first(run):
    """A teacher's list of even length begins with what reset returns, which is not in the loss."""
    write("mine.py", NAMED.format(reset="def reset(self, tail):\n        return tail").replace(
        "    count = 0\n", '''    characters = "0123456789+=,. "
    rows = lambda: [{"prompt": f"{i}+", "tail": f"{i % 3}="} for i in range(9)]
    teacher = lambda row, rng: [row["tail"], "1,", "5", "2."]
'''))
    run("--environment mine.py:Play --stop , . --cold_start_steps 3 --max_completion_length 6")
    sample = read_json("run/samples.jsonl")[0]["samples"][0]
    assert re.fullmatch(r"\d\+\d=", sample["prompt"])
    policy = models.make()
    rollout = warm_up.make_teacher_rollout(policy, LETTERS, [Problem("3+", "")],
                                           [["1=", "1,", "5", "2."]])
    assert LETTERS.decode(rollout.response_ids[0]).replace(" ", "") == "1=1,52.<eos>"
    assert rollout.mask[0].int().tolist() == [0, 0, 1, 1, 0, 1, 1, 1]

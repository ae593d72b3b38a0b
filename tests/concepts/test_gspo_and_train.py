"""`python gspo.py` and `python train.py --plain` do the same: one task, one start and one set of
random numbers give the same weights after two rollout batches.
python -m pytest tests/concepts/test_gspo_and_train.py

Both sides are used from outside: train.main with a dataset, a verifier and a sampler of the test's
own, and gspo.train. The page has six mini-batches of two groups in micro-batches of 3; train.py
takes a mini-batch at once.
"""

import math
import re
import runpy

import pytest
import torch
from safetensors.torch import load_file

import gspo
import train
from plumbing.data.running_sum import builtin_tokenizer
from rollout import draw
from tiny_run import chance, metrics, read_json, write

Q, G, T, MINI = 6, 4, 8, 3                       # T: of tiny_run.chance
SHORT = dict(PROMPTS_PER_STEP=Q, NUM_GENERATIONS=G, MINI_BATCHES=MINI)
FLAGS = f"""--plain --device cpu --steps 2 --prompts_per_step {Q} --num_generations {G}
            --steps_per_generation {MINI} --warmup_steps 10 --learning_rate 4e-4 --eval_samples 0
            --save_tokens false --model_name_or_path start --sampler recorded.py:Recorded
            --output_dir run """
RECORDED = '''
import json

import torch

from rollout import Sampler

batches = 0


def uniforms(number, B):
    """Of rollout batch `number`, [B, T]."""
    return torch.rand(B, 8, generator=torch.Generator().manual_seed(number))


class Recorded(Sampler):
    def sample(self, prompts, group_size, **ignored):
        global batches
        batches += 1
        with open("prompts.jsonl", "a") as file:
            file.write(json.dumps(prompts) + "\\n")
        return super().sample(prompts, group_size, uniforms(batches, len(prompts) * group_size))
'''


class Characters(gspo.Characters):
    """The page's tokenizer with the padding token of the built-in one: they number alike."""
    characters = gspo.Characters.characters + "~"

    def decode(self, ids, skip_special_tokens=True):
        return super().decode([i for i in ids if i != 16])


@pytest.fixture(scope="module", params=[
    1, pytest.param(2, marks=pytest.mark.slow)], ids=["once", "twice"])
def page(request, tmp_path_factory):
    """With every mini-batch used once, and twice. train.py trains two batches from a start;
    page() lets the page train on the same tokens and returns how far its weights are from
    train.py's, as a share of how far train.py moved them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("both"))
        patch.setattr(torch, "randperm", lambda n, **where: (torch.arange(n) * 5 + 1) % n)
        yield made(request.param)


def made(uses):
    torch.manual_seed(0)
    gspo.tiny_policy(Characters()).save_pretrained("start")
    builtin_tokenizer().save_pretrained("start")
    write("recorded.py", RECORDED)
    train.main(f"{FLAGS} {chance()} --num_iterations {uses}".split())
    problems = [(ids, "1") for batch in read_json("prompts.jsonl") for ids in batch]
    uniforms = runpy.run_path("recorded.py")["uniforms"]
    reward = runpy.run_path("mine.py")["reward"]
    start, house = (load_file(f"{folder}/model.safetensors")
                    for folder in ("start", "run/checkpoints/step_2"))
    moved = distance(house, start)

    def run(seen):
        drawn = iter([u for number in (1, 2) for u in uniforms(number, Q * G).T])
        token = lambda p, n: draw(p.log(), next(drawn))[:, None]

        def counted(logp, old_logp, advantages, mask):
            loss, clipped = gspo.gspo_loss(logp, old_logp, advantages, mask)
            seen.append((clipped.sum().item(), mask.sum().item()))
            return loss, clipped
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (SHORT | dict(NUM_ITERATIONS=uses, reward=reward)).items():
                patch.setattr(gspo, name, value)
            patch.setattr(torch, "multinomial", token)
            patch.setitem(gspo.LOSSES, "gspo", counted)
            policy = gspo.Qwen3MoeForCausalLM.from_pretrained("start", dtype=torch.float32)
            gspo.train(policy, Characters(), problems, micro_batch=3, max_new_tokens=T)
            policy.save_pretrained("page")
        return distance(load_file("page/model.safetensors"), house) / moved
    return run


def distance(one, other):
    assert one.keys() == other.keys()
    return math.sqrt(sum((one[name] - other[name]).double().square().sum().item() for name in one))


def test_two_batches_of_the_page_and_of_train_py_give_the_same_weights(page, capsys):
    capsys.readouterr()
    seen = []                            # (clipped, all) tokens of each micro-batch
    assert page(seen) < 3e-4             # 8e-5 here: rounding, divided by Adam's small denominators
    shown = r"reward ([\d.]+)   clipped of A≠0: gspo ([\d.]+)"
    printed = re.findall(shown, capsys.readouterr().out)
    logged = metrics("run")
    rewards = [m["reward"] for m in logged]
    assert len(rewards) == 2
    assert [float(r) for r, _ in printed] == pytest.approx(rewards, abs=6e-4)
    assert all(0.1 < float(c) < 0.9 for _, c in printed)
    parts = Q * G // MINI // 3 + 1       # micro-batches of a mini-batch
    minis = [[*map(sum, zip(*seen[i:i + parts]))] for i in range(0, len(seen), parts)]
    each = [[c / n for c, n in part] for part in (minis[:len(minis) // 2], minis[len(minis) // 2:])]
    shares = [m["clip_low"] + m["clip_high"] for m in logged]
    assert [sum(x) / len(x) for x in each] == pytest.approx(shares, abs=1e-6) and min(shares) > 0.1

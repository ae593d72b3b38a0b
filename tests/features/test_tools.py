"""Masks with holes: what a tool inserted is read by the policy and is no loss token.
python -m pytest tests/features/test_tools.py"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from models import make as model_of
from plumbing.data.running_sum import builtin_tokenizer
from experiments import stale
from features.tools import InsertingSampler, Tool, insert
from session.metrics import token_record
from plumbing.speed import fast
from rollout import Sampler
from rollout import response_logp as plain_logp
from tiny_run import chance, read_json, slow

TOKENIZER = builtin_tokenizer("0123456789+=,. sum()")
LETTERS = builtin_tokenizer("0123456789+=,. abcdef")         # StopStringCriteria wants letters
PROMPTS = ["3+8=", "9+5+1="]
WAYS = {"plain": (Sampler, plain_logp), "fast": (fast.FastSampler, fast.fast_response_logp)}
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def make(tokenizer=TOKENIZER, seed=0):
    return model_of("tiny_moe", seed=seed, vocab_size=len(tokenizer), initializer_range=0.02,
                    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


class Everywhere:
    """A function of the text that is asked after every token."""

    def __init__(self, function):
        self.function = function

    def asked(self, tokenizer, response):
        return torch.ones(len(response), dtype=torch.bool)                          # [B]

    def __call__(self, text):
        return self.function(text)


def sampled(kind, group_size, width, seed=1, *, tool, prompts=PROMPTS, model=None, stop=(),
            tokenizer=TOKENIZER, uniforms=None, **options):
    tool = tool if hasattr(tool, "asked") else Everywhere(tool)
    sampler = InsertingSampler(kind(model or make(), tokenizer, width, 1.0, stop), tool)
    if uniforms is None:
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(len(prompts) * group_size, width, generator=generator)
    return sampler.sample(prompts, group_size, uniforms=uniforms, **options)


def spelled(tokenizer, ids):
    """One character per token."""
    return "".join({"<eos>": "$", "<pad>": "_"}.get(t, t) for t in
                   tokenizer.convert_ids_to_tokens(ids))


def length_of(rollout, row):
    """Up to the last loss token, or to the limit."""
    mask = rollout.mask[row]
    return len(mask) if rollout.truncated[row] else int(mask.nonzero().max()) + 1


def test_rows_that_differ_in_a_tools_words_or_in_who_wrote_them_are_scored_apart():
    rollout = Sampler(make(), TOKENIZER, 6).sample(["3+8="], 6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[::2, 2] = False                                     # there, a tool has written
    ids = rollout.response_ids[:1].repeat(6, 1)
    ids[0, 2] = (ids[0, 2] + 1) % 10
    rollout = replace(rollout, response_ids=ids, mask=mask)
    assert fast.distinct(rollout)[0].group_size == 3         # three kinds, and no more than that
    close(fast.fast_response_logp(make(), rollout).logp, plain_logp(make(), rollout).logp)


@pytest.mark.parametrize("seed", range(6))
def test_any_tool_gives_text_that_is_what_the_loss_tokens_and_the_holes_spell(seed):
    """Tools that insert stop strings, end-of-sequence tokens, too much: the text goes on past a
    tool's stop and ends at the policy's or at the limit; fast samples and scores as plain does."""
    def roughly():
        """Answers at random, differently for equal text: words of any kind, or nothing."""
        rng = random.Random(seed)
        words = ["7,", "+", "9", "+9+", "<eos>", "abcdefabcdefabcdef"]
        return lambda text: rng.choice(words) if rng.random() < 0.4 else ""
    model = make(LETTERS, seed)
    uniforms, both = torch.rand(12, 14), []
    for (kind, score), more in zip(WAYS.values(), ({}, {"drop_every": 1 + seed})):
        rollout = sampled(kind, 6, 14, tool=roughly(), model=model, tokenizer=LETTERS,
                          uniforms=uniforms, stop=("+", "9"), **more)
        both.append(rollout)                                 # asked in one order: it says the same
        for row, text in enumerate(rollout.texts):
            length, cut = length_of(rollout, row), bool(rollout.truncated[row])
            own = rollout.mask[row]
            tokens = spelled(LETTERS, rollout.response_ids[row, :length])
            ends = [t for t in range(length) if own[t] and tokens[t] in "+9$"]
            assert ends == ([] if cut else [length - 1])
            kept = tokens[:length - len(ends)]
            assert text == kept.replace("$", "").replace("_", ""), (text, tokens, own)
        close(score(model, rollout).logp, rollout.sampler_logp)
    plain, quick = both
    assert plain.texts == quick.texts and torch.equal(plain.mask, quick.mask)
    assert torch.equal(plain.response_ids, quick.response_ids)


# ------------------------------------------------------------------- --tool file.py:function

@pytest.fixture
def tool(tmp_path):
    """tool(source, stop) is a Tool, the function `tool` of mine.py with this body; its calls stand
    in `calls`."""
    def make(source, stop):
        (tmp_path / "mine.py").write_text(
            "calls = []\ndef tool(text):\n    calls.append(text)\n" + source, encoding="utf-8")
        made = Tool(f"{tmp_path}/mine.py:tool", stop)
        made.calls = made.function.__globals__["calls"]
        return made
    return make


@pytest.mark.parametrize("way", WAYS)
def test_a_tool_is_called_where_the_policy_ends_a_segment_and_its_words_are_no_loss_tokens(
        way, tool):
    """Nor where the tool's own words end one. It reads the response so far, up to the stop. The
    policy reads its words; the viewer shows them as such."""
    calculator = tool("    return '7+'\n", "+")
    kind, response_logp = WAYS[way]
    rollout = sampled(kind, 6, 14, tool=calculator)
    saved = token_record(1, rollout, TOKENIZER, rollout.sampler_logp, rollout.sampler_logp,
                         torch.zeros(12), torch.zeros(12))
    expected = []
    for row, own in enumerate(rollout.mask.tolist()):
        length = length_of(rollout, row)
        text, inserted = spelled(TOKENIZER, rollout.response_ids[row, :length]), set()
        for t in range(1, length):
            if text[t - 1] == "+" and t - 1 not in inserted:
                expected.append(text[:t])
                assert text[t:t + 2] == "7+"[:length - t]
                inserted |= {t, t + 1}
        assert own[:length] == [t not in inserted for t in range(length)]
        shown = saved["mask"][row]                           # up to the last loss token
        assert shown == own[:len(shown)]
    assert sorted(calculator.calls) == sorted(expected) and len(expected) > 3
    assert any("+7+" in text for text in rollout.texts)
    close(response_logp(make(), rollout).logp, rollout.sampler_logp)
    assert (rollout.sampler_logp[~rollout.mask] == 0).all()


def test_a_segment_may_end_with_several_tokens(tool):
    """A number is inserted as text, None is nothing."""
    calculator = tool("    return 7 if len(calls) % 2 else None\n", "+9")
    ids = torch.tensor([TOKENIZER(text)["input_ids"] for text in ("1+9", "+91", "9+8", "1+9")])
    assert calculator.asked(TOKENIZER, ids).tolist() == [True, False, False, True]
    inserted = torch.full((4, 5), -1)
    insert(calculator, TOKENIZER, ids, inserted, torch.ones(4, dtype=torch.bool))
    assert calculator.calls == ["1+9", "1+9"]
    assert inserted[:, 3].tolist() == TOKENIZER("7")["input_ids"] + [-1] * 3
    assert (inserted[:, 4] == -1).all()


def test_what_no_token_spells_is_refused(tool):
    told = tool("    return 'the sum'\n", "+")
    ids = torch.tensor([TOKENIZER("1+")["input_ids"]])
    with pytest.raises(ValueError, match="--tool returned 'the sum', which the tokenizer cannot"):
        insert(told, TOKENIZER, ids, torch.full((1, 5), -1), torch.ones(1, dtype=torch.bool))


def test_what_a_tool_raises_is_inserted_and_said_once(tool, capfd):
    calculator = tool("    return 1 // 0\n", "+")
    said = "error: integer division or modulo by zero"
    assert calculator("1+") == calculator("2+") == said
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert all(words in err for words in ("--tool", "ZeroDivisionError", "'1+'"))


@pytest.mark.parametrize("source, words", [
    ("def tool():\n    pass\n", "TypeError: too many positional arguments"),
    ("import nowhere_at_all\n", "ModuleNotFoundError"), ("raise SystemExit\n", "SystemExit"),
    ("", "has no attribute 'tool'")])
def test_a_function_that_is_no_tool_is_refused(source, words, tmp_path):
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    words = f"--tool .*mine.py:tool does not load as a function of the text: .*{words}"
    with pytest.raises(ValueError, match=words):
        Tool(f"{tmp_path}/mine.py:tool")


# ------------------------------------------- the script; resumed, plain = fast: test_features.py

@pytest.mark.parametrize("line", [
    "--algorithm ppo", "--algorithm dr_grpo --routing_replay rollout --sampler_dtype int4",
    "--top_p 0.9 --plain", slow(""), slow("--algorithm reinforce_plus_plus"),
    slow("--beta 0.1 --entropy_coef 0.01 --entropy_quantile 0.5")])
def test_a_run_with_a_tool_trains_with(line, run, cold_start):
    data = chance()
    with open("mine.py", "a", encoding="utf-8") as file:
        file.write("def tool(text):\n    return len(text) % 10 if len(text) % 3 else None\n")
    first, _ = run(f"{data} --model_name_or_path {cold_start} --tool mine.py:tool --tool_stop , "
                   f"--save_tokens --steps 2 --eval_samples 1 {line}")
    assert first["mismatch_kl"] < (1 if "int4" in line else 1e-8)
    assert any(0 in mask for group in read_json("run/tokens.jsonl") for mask in group["mask"])
    samples = read_json("run/samples.jsonl")
    longest = max(len(sample["response"]) for line in samples for sample in line["samples"])
    assert first["length"] < longest + 1                     # the tool's tokens are in no length


def test_a_sampler_of_ones_own_does_not_stop_for_a_tool(refused):
    words = refused("--model_name_or_path m --dataset_name d.jsonl --tool mine.py:tool "
                    f"--sampler {stale.__file__}:Stale0")
    assert "--tool mine.py:tool cannot be combined with --sampler" in words

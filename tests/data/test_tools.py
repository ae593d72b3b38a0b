"""Masks with holes: what a tool inserted is read by the policy and is no loss token. python -m pytest tests/data/test_tools.py"""

import json
import sys
from pathlib import Path

import pytest
import torch

import train
from losses import policy_loss
from moe import TinyMoE
from plumbing.speed import fast
from plumbing.run.arguments import parse
from plumbing.model.cold_start import teacher_rollout, tiny_config
from plumbing.data.running_sum import builtin_tokenizer
from ratios import sequence_ratio
from rollout import response_logp as plain_logp
from rollout import sample as plain_sample
from rollout import use_tool
from plumbing.run.metrics import token_record
from tiny_run import TINY, metrics

sys.path.insert(0, str(Path(__file__).parent))
import calculator as toy  # noqa: E402

TOKENIZER = builtin_tokenizer("0123456789+=,. sum()")
PROMPTS = ["3+8=", "9+5+1="]
WAYS = {"plain": (plain_sample, plain_logp), "fast": (fast.sample, fast.response_logp)}


def make():
    torch.manual_seed(0)
    args = parse("--hidden_size 32 --num_hidden_layers 2".split())
    return TinyMoE(tiny_config(args, TOKENIZER))


def echo(text):
    """After a digit, twice the digit and a dot; never after its own output, which is not asked about."""
    return f"{2 * int(text[-1])}." if text and text[-1].isdigit() else ""


def holes(text, tool):
    """Which characters of a response a tool inserted, by reading it from the left: [len] bool."""
    found, read = [], 0
    while read < len(text):
        read, said = read + 1, tool(text[:read + 1])
        found += [False] + [True] * len(said)
        read += len(said)
    return found[:len(text)]


@pytest.mark.parametrize("way", WAYS)
def test_a_tools_tokens_are_read_and_are_no_loss_tokens(way):
    sample, response_logp = WAYS[way]
    model, uniforms = make(), torch.rand(12, 14, generator=torch.Generator().manual_seed(1))
    rollout = sample(model, TOKENIZER, PROMPTS, 6, 14, uniforms=uniforms, tool=echo)
    inserted = 0
    for row in range(12):
        ids = rollout.response_ids[row].tolist()
        last = max(t for t in range(len(ids)) if rollout.mask[row, t]) + 1
        length = last if not rollout.truncated[row] else len(ids)
        text = "".join(TOKENIZER.convert_ids_to_tokens(ids[:length]))
        clean = text.replace("<eos>", "$").replace("<pad>", "_")
        assert rollout.mask[row, :length].tolist() == [not hole for hole in holes(clean, echo)]
        inserted += sum(holes(clean, echo))
    assert inserted > 10
    logp = response_logp(model, rollout).logp                  # over tool output as over any other input
    torch.testing.assert_close(logp, rollout.sampler_logp, atol=1e-5, rtol=1e-5)
    assert (rollout.sampler_logp[~rollout.mask] == 0).all()
    assert any(echo(text[:1]) and text[1:].startswith(echo(text[:1])) for text in rollout.texts)


def test_the_viewers_mask_is_0_where_the_tool_wrote():
    model, uniforms = make(), torch.rand(12, 14, generator=torch.Generator().manual_seed(1))
    rollout = fast.sample(model, TOKENIZER, PROMPTS, 6, 14, uniforms=uniforms, tool=echo)
    logp, none = rollout.sampler_logp, torch.zeros(12)
    saved = token_record(1, rollout, TOKENIZER, logp, logp, none, none)
    for tokens, mask in zip(saved["tokens"], saved["mask"]):
        clean = "".join(token if len(token) == 1 else "$" for token in tokens)
        assert [not own for own in mask] == holes(clean, echo)
    assert sum(mask.count(0) for mask in saved["mask"]) > 10


def test_plain_and_fast_insert_the_same():
    model, uniforms = make(), torch.rand(12, 14, generator=torch.Generator().manual_seed(1))
    for drop_every in (1, 3):
        plain = plain_sample(model, TOKENIZER, PROMPTS, 6, 14, uniforms=uniforms, tool=echo)
        quick = fast.sample(model, TOKENIZER, PROMPTS, 6, 14, uniforms=uniforms, tool=echo,
                            drop_every=drop_every)
        assert plain.texts == quick.texts and torch.equal(plain.mask, quick.mask)
        assert torch.equal(plain.response_ids, quick.response_ids)
        torch.testing.assert_close(plain.sampler_logp, quick.sampler_logp, atol=1e-5, rtol=1e-5)


def test_a_tools_words_are_cut_at_the_limit():
    model, uniforms = make(), torch.rand(8, 9, generator=torch.Generator().manual_seed(2))
    for sample in (plain_sample, fast.sample):
        rollout = sample(model, TOKENIZER, PROMPTS, 4, 9, uniforms=uniforms, tool=lambda text: "1=,.1=,.1=,.")
        for mask, truncated, text in zip(rollout.mask.tolist(), rollout.truncated.tolist(), rollout.texts):
            assert sum(mask) == 1 and mask[0]                  # one token of its own, then the tool talks
            assert text.endswith("1=,.1=,.") if truncated else text == ""


def by_turns():
    """A tool that answers differently each time it is asked, also for equal text."""
    said = iter(range(10_000))

    def tool(text):
        return f"{next(said) % 10}" if text and text[-1].isdigit() else ""
    return tool


def test_answers_that_differ_only_in_what_the_tool_inserted_are_scored_apart():
    """All draw the same tokens; the tool's differ, and the policy reads them."""
    model, uniforms = make(), torch.rand(1, 10, generator=torch.Generator().manual_seed(6)).repeat(8, 1)
    rollout = plain_sample(model, TOKENIZER, ["3+8="], 8, 10, uniforms=uniforms, tool=by_turns())
    own = rollout.response_ids.masked_fill(~rollout.mask, -1)
    assert len(own.unique(dim=0)) < len(rollout.response_ids.unique(dim=0))
    plain, quick = plain_logp(model, rollout).logp, fast.response_logp(model, rollout).logp
    torch.testing.assert_close(quick, plain, atol=1e-5, rtol=1e-5)


def test_a_row_of_the_policys_own_and_one_of_the_tools_are_scored_apart():
    """Equal tokens, one written by the policy and one by the tool: the loss tokens differ."""
    from dataclasses import replace
    model = make()
    rollout = plain_sample(model, TOKENIZER, ["3+8="], 6, 6)
    ids = rollout.response_ids[:1].repeat(6, 1)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[::2, 2] = False
    rollout = replace(rollout, response_ids=ids, mask=mask)
    small, _ = fast.distinct(rollout)
    assert small.group_size == 2                               # two kinds, and no more than that
    torch.testing.assert_close(fast.response_logp(model, rollout).logp, plain_logp(model, rollout).logp,
                               atol=1e-5, rtol=1e-5)


LETTERS = builtin_tokenizer("0123456789+=,. abcdef")           # StopStringCriteria wants letters


def roughly(seed, words):
    """A tool that answers at random, differently for equal text: words of any kind, or nothing."""
    import random
    rng = random.Random(seed)
    return lambda text: rng.choice(words) if rng.random() < 0.4 else ""


@pytest.mark.parametrize("seed", range(6))
def test_any_tool_gives_text_that_is_what_the_loss_tokens_and_the_holes_spell(seed):
    """Tools that insert stop strings, end-of-sequence tokens, too much: the text goes on past a tool's stop and
    ends at the policy's, the limit and the penalty count alike, fast scores as plain does."""
    from plumbing.loop.extras import shaped
    torch.manual_seed(seed)
    model = TinyMoE(tiny_config(parse("--hidden_size 32 --num_hidden_layers 2".split()), LETTERS))
    words, stop = ["7,", "+", "9", "+9+", "<eos>", "abcdefabcdefabcdef"], ("+", "9")
    uniforms, texts = torch.rand(12, 14), []
    for sample, score in WAYS.values():                        # asked in the same order, the tool says the same
        rollout = sample(model, LETTERS, PROMPTS, 6, 14, uniforms=uniforms, stop=stop, tool=roughly(seed, words))
        texts.append(rollout.texts)
        penalty = shaped(parse(["--overlong_cache", "0.3"]), torch.zeros(12, 1), rollout, 14)[:, 1]
        for row, text in enumerate(rollout.texts):
            ids, own = rollout.response_ids[row].tolist(), rollout.mask[row].tolist()
            length = 14 if rollout.truncated[row] else 14 - own[::-1].index(True) - (14 - len(own))
            tokens = LETTERS.convert_ids_to_tokens(ids[:length])
            ends = [t for t in range(length) if own[t] and tokens[t] in ("+", "9", "<eos>")]
            assert ends == ([] if rollout.truncated[row] else [length - 1])
            clean = [t for t in tokens[:length - len(ends)] if t not in ("<eos>", "<pad>")]
            assert text == "".join(clean), (text, tokens, own)
            assert penalty[row].item() == pytest.approx(min(0.0, max(-1.0, (14 - 4 - length) / 4)))
            if rollout.truncated[row]:
                assert penalty[row].item() == -1
        torch.testing.assert_close(score(model, rollout).logp, rollout.sampler_logp, atol=1e-5, rtol=1e-5)
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------------- --tool file.py:function

@pytest.fixture
def tool(tmp_path):
    """make(source, stop) -> a Tool from the text of mine.py's function `tool`; its calls stand in `calls`."""
    from plumbing.data.tool import Tool

    def make(source, stop):
        (tmp_path / "mine.py").write_text("calls = []\ndef tool(text):\n    calls.append(text)\n" + source)
        made = Tool(f"{tmp_path}/mine.py:tool", stop)
        made.calls = made.function.__globals__["calls"]
        return made
    return make


@pytest.mark.parametrize("way", WAYS)
def test_a_tool_is_called_where_the_policy_ends_a_segment_and_nowhere_else(way, tool):
    """Nor where the tool's own words end one. What it reads is the response so far, up to the stop."""
    calculator = tool("    return '7+'\n", "+")
    sample, response_logp = WAYS[way]
    rollout = sample(make(), TOKENIZER, PROMPTS, 6, 14, tool=calculator,
                     uniforms=torch.rand(12, 14, generator=torch.Generator().manual_seed(1)))
    expected = []
    for ids, own, truncated in zip(rollout.response_ids.tolist(), rollout.mask.tolist(), rollout.truncated.tolist()):
        text = [TOKENIZER.convert_ids_to_tokens(i) for i in ids]
        for t, character in enumerate(text):
            if own[t] and character == "+" and t + 1 < 14:
                expected.append("".join(text[:t + 1]))
                assert "".join(text[t + 1:t + 3]) == "7+"[:14 - t - 1] and not any(own[t + 1:t + 3])
    assert sorted(calculator.calls) == sorted(expected) and len(expected) > 3
    torch.testing.assert_close(response_logp(make(), rollout).logp, rollout.sampler_logp, atol=1e-5, rtol=1e-5)


def test_a_segment_may_end_with_several_tokens(tool):
    calculator = tool("    return 7 if len(calls) % 2 else None\n", "+9")
    ids = torch.tensor([TOKENIZER(text)["input_ids"] for text in ("1+9", "+91", "9+8", "1+9")])
    assert calculator.asked(TOKENIZER, ids).tolist() == [True, False, False, True]
    inserted = torch.full((4, 5), -1)
    use_tool(calculator, TOKENIZER, ids, inserted, torch.tensor([True, True, True, True]))
    assert calculator.calls == ["1+9", "1+9"]                  # a number is inserted as text, None is nothing
    assert inserted[:, 3].tolist() == [TOKENIZER("7")["input_ids"][0], -1, -1, -1] and (inserted[:, 4] == -1).all()


def test_what_a_tool_raises_is_inserted_and_said_once(tool, capfd):
    calculator = tool("    return 1 // 0\n", "+")
    assert calculator("1+") == calculator("2+") == "error: integer division or modulo by zero"
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "--tool" in err and "ZeroDivisionError" in err and "'1+'" in err


@pytest.mark.parametrize("source, words", [
    ("def tool():\n    pass\n", "TypeError: too many positional arguments"), ("import nowhere_at_all\n", "ModuleNotFoundError"),
    ("raise SystemExit\n", "SystemExit"), ("", "has no attribute 'tool'")])
def test_a_function_that_is_no_tool_is_refused(source, words, tmp_path):
    from plumbing.data.tool import Tool
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ValueError, match=f"--tool .*mine.py:tool does not load as a function of the text: .*{words}"):
        Tool(f"{tmp_path}/mine.py:tool")


def test_lengths_in_gspos_ratio_count_the_policys_tokens_alone():
    model = make()
    rollout = fast.sample(model, TOKENIZER, PROMPTS, 6, 14, tool=echo)
    old = rollout.sampler_logp
    new = (old + torch.randn(old.shape, generator=torch.Generator().manual_seed(0)) * 0.01).requires_grad_()
    s = sequence_ratio(new, old, rollout.mask)
    for row in range(12):
        own = [t for t in range(old.shape[1]) if rollout.mask[row, t]]
        mean = sum((new[row, t] - old[row, t]).item() for t in own) / len(own)
        assert s[row].item() == pytest.approx(torch.tensor(mean).exp().item(), rel=1e-5)
    loss, _ = policy_loss("gspo", new, old, torch.tensor([1.0, -1] * 6), rollout.mask, epsilon=0.9, epsilon_high=0.9)
    gradient = torch.autograd.grad(loss, new)[0]
    assert (gradient[~rollout.mask] == 0).all() and (gradient[rollout.mask] != 0).all()


def test_the_cold_start_does_not_learn_the_tools_words():
    answer = "sum(3,8)=11,sum(11,5)=16."
    batch = teacher_rollout(make(), TOKENIZER, [toy.Problem("3+8+5=", answer)], [answer], toy.calculator)
    assert "".join(c if own else "_" for c, own in zip(answer + "$", batch.mask[0].tolist())) == \
        "sum(3,8)=__,sum(11,5)=__.$"


# ------------------------------------------------------------------------------------------------- the script

TOY = [*TINY, "--steps", "2", "--cold_start_steps", "30", "--steps_per_generation", "2"]


@pytest.fixture
def small(workplace, monkeypatch):
    from plumbing.model import cold_start
    monkeypatch.setattr(cold_start, "MUST_PASS", 0.0)
    monkeypatch.setattr(toy, "FLAGS", TOY)
    monkeypatch.setattr(toy, "task_with_calculator", lambda: made)
    made = TASK(2, 2, train_size=40, test_size=8)


TASK = toy.task_with_calculator


def slow(*flags):
    return pytest.param(list(flags), marks=pytest.mark.slow)


@pytest.mark.parametrize("flags", [
    ["--algorithm", "ppo"],
    ["--algorithm", "dr_grpo", "--routing_replay", "rollout", "--sampler_dtype", "int4"],
    slow(), slow("--algorithm", "reinforce_plus_plus"),
    slow("--beta", "0.1", "--entropy_coef", "0.01", "--entropy_quantile", "0.5")])
def test_the_calculator_trains_with(flags, small):
    toy.run(0, "run", *flags, "--eval_samples", "1")
    records, samples = metrics("run"), Path("run/samples.jsonl").read_text()
    assert len(records) == 2 and records[0]["mismatch_kl"] < (1e-8 if "int4" not in flags else 1)
    texts = [s["response"] for line in samples.splitlines() for s in json.loads(line)["samples"]]
    assert records[0]["length"] < max(map(len, texts)) + 1     # the tool's tokens are in no length


def test_plain_and_fast_runs_agree_with_a_tool(small):
    for name, flags in (("fast", []), ("plain", ["--plain"])):
        toy.run(0, name, *flags, "--eval_samples", "0")
    one, other = metrics("fast")[0], metrics("plain")[0]
    assert one["reward"] == other["reward"] and one["length"] == other["length"]
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_resumed_run_with_a_tool_is_the_uninterrupted_one(small):
    toy.run(0, "whole", "--eval_samples", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "FLAGS", [*TOY, "--steps", "2", "--save_steps", "1"])
        stop = train.checkpoints.stop_on_signals
        patch.setattr(train.checkpoints, "stop_on_signals", lambda team: lambda: True)  # after the first batch
        with pytest.raises(SystemExit):
            toy.run(0, "parts", "--eval_samples", "0")
        patch.setattr(train.checkpoints, "stop_on_signals", stop)
        toy.run(0, "parts", "--eval_samples", "0", "--resume")
    assert metrics("whole") == metrics("parts")


def test_without_its_tool_the_policy_is_lost():
    task = toy.task_with_calculator(train_size=8, test_size=8)
    right = task.test[0].answer
    assert task.verify(right, task.test[0]) == 1 and task.verify(right[:-1], task.test[0]) == 0
    assert toy.calculator("sum(3,8)=") == "11" and toy.calculator("sum(3,8)") == toy.calculator("3+8=") == ""

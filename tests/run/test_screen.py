"""The screen: the reward beside pass@1, advice that follows from the run, progress through a pipe. python -m pytest tests/run/test_screen.py"""

import json
import shlex
import sys

import pytest

import train
from plumbing.model import cold_start as warm_up
from plumbing.run import trackers
from plumbing.run.advice import command, next_steps
from plumbing.run.arguments import parse
from tiny_run import TINY


def test_the_reward_and_its_parts_stand_beside_pass_at_1(workplace, monkeypatch, capsys):
    (workplace / "mine.py").write_text("def reward(response, answer):\n    return {'some': .5 * (response < '6'), 'any': .25}\n")
    (workplace / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(1, 8) for b in range(1, 5)))
    model = str(next((workplace / "runs/cold_start").resolve().iterdir()))
    train.main([*TINY, "--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--verifier", "mine.py:reward", "--max_completion_length", "5",
                "--steps", "2", "--eval_samples", "2", "--eval_prompts", "2", "--eval_steps", "1", "--reward_weights", "1", "2", "--output_dir", "run"])
    summary = json.loads((workplace / "run/summary.json").read_text())
    for when in ("before", "after"):
        parts = summary[f"reward_parts_{when}"]
        assert parts.keys() == {"some", "any"} and parts["any"] == .25 and 0 < parts["some"] <= .5
        assert summary[f"reward_{when}"] == pytest.approx(parts["some"] + 2 * parts["any"])
        low, high = summary[f"reward_interval_{when}"]
        assert low <= summary[f"reward_{when}"] <= high
        assert summary[f"pass_at_1_{when}"] == 0 and summary[f"interval_{when}"] == [0, pytest.approx(1 - .025 ** .5)]
    screen = capsys.readouterr().out
    assert "pass@1 0.000 [0.000, 0.842], greedy 0.000, mean reward " in screen and "any 0.250)" in screen
    first = json.loads((workplace / "run/metrics.jsonl").read_text().splitlines()[0])
    assert first["pass_at_1"][0] == 0 and first["held_out_reward"][0] > 0 and first["held_out_parts"]["any"] == .25


# ------------------------------------------------------------------------------------------------------------------ advice

HEALTHY = dict(step=1, pass_rate=.6, entropy=.5, clip_low=.1, clip_high=.1, dead_groups=.3, truncated=0.0, skipped=0, reward_parts={"correct": .6})


def advised(argv="", **last):
    args = parse([*argv.split(), "--device", "cpu"])
    return next_steps(args, "runs/x", [HEALTHY] * 6 + [HEALTHY | last] * 5, limit=20)


@pytest.mark.parametrize("algorithm, other", [("gspo", "grpo"), ("grpo", "gspo"), ("dapo", "gspo")])
def test_after_a_healthy_run_another_algorithm_is_worth_trying_but_not_its_own(algorithm, other):
    lines = advised(f"--algorithm {algorithm} --seed 3")
    commands = [line for line, _ in lines if line.startswith("python train.py")]
    assert commands[0].split()[2:4] != ["--algorithm", algorithm] and "--seed 3" in commands[0]
    assert parse(commands[0].split()[2:]).algorithm == other
    assert any("GRPO's clip range" in why for _, why in lines) == (algorithm == "gspo")


@pytest.mark.parametrize("last, words, changed", [
    (dict(pass_rate=.1), "collapsed (pass rate below half its best)", dict(learning_rate=1.3e-4)),
    (dict(pass_rate=.45, entropy=1e-6), "collapsed (no entropy left)", dict(learning_rate=1.3e-4)),
    (dict(skipped=1), "not finite", dict(learning_rate=1.3e-4)),
    (dict(clip_low=.5, clip_high=.45), "the clip removed 95% of the tokens", dict(learning_rate=1.3e-4)),
    (dict(dead_groups=1.0), "100% of the groups have equal rewards and give no gradient", dict(dynamic_sampling=True)),
    (dict(dead_groups=1.0, pass_rate=1.0), "nearly all responses are right", dict(max_terms=20)),
    (dict(truncated=.5), "50% of the responses were cut off", dict(max_completion_length=40))])
def test_every_trouble_has_its_own_line_and_its_flags_are_accepted(last, words, changed):
    (line, why), *rest = advised("--max_terms 10 --seed 3", **last)
    assert words in why and not any("from the same start" in other for _, other in rest)
    args = parse(line.split()[2:])
    for name, value in changed.items():
        assert getattr(args, name) == pytest.approx(value)
    assert args.max_terms == changed.get("max_terms", 10), "what the run was given stays"
    given = {f"--{name}" for name in ("max_terms", "seed", "device", *changed)}
    assert {word for word in line.split() if word.startswith("--")} == given, "nothing that nobody gave"


@pytest.mark.parametrize("flags, words", [
    (["--stop", "\\n", "a b"], ["--stop", "\\n", "a b"]), (["--prompt_template", "Q: {prompt}\\nA:"], ["--prompt_template", "Q: {prompt}\\nA:"]),
    (["--temperature", "1.0"], ["--temperature", "1"])])
def test_an_advised_command_is_one_line_that_reads_as_it_was_typed(flags, words):
    own = ["--model_name_or_path", "m", "--dataset_name", "rows.jsonl"]
    given = parse([*own, *flags, "--device", "cpu"])
    line = command(given)
    typed = shlex.split(line)[2:]
    at = typed.index(words[0])
    assert "\n" not in line and parse(typed) == given and typed[at:at + len(words)] == words


def test_no_right_answer_asks_for_easier_problems():
    none = HEALTHY | dict(pass_rate=0.0, dead_groups=1.0)
    (line, why), *_ = next_steps(parse(["--device", "cpu"]), "runs/x", [none] * 9, limit=20)
    assert "easier problems" in line and "hardly any response is right: 100% of the groups" in why


@pytest.mark.parametrize("truncated, rewarded, passed, longer", [
    (.5, 0.0, .4, False), (1.0, 0.0, .4, True), (.5, .1, .4, True), (.2, .1, .4, False), (.5, 1.0, .95, False)])
def test_a_longer_limit_is_advised_only_where_it_could_help(truncated, rewarded, passed, longer):
    """Where responses that ended by themselves have no reward either, or nearly all are right, the limit is not what is wrong."""
    parts = {"correct": rewarded, "overlong": -.4}
    told = advised("--max_completion_length 20", truncated=truncated, reward_parts=parts, pass_rate=passed)
    assert any("cut off" in why for _, why in told) == longer


def test_dynamic_sampling_is_not_advised_to_a_run_that_has_it():
    (line, why), *_ = advised("--dynamic_sampling", dead_groups=1.0)
    assert "medium difficulty" in line and "discarded" in why


@pytest.mark.parametrize("rule, reward, words", [
    ("0.0", 0, "all rewards were equal, so"), ("len(problem.prompt) / 100", None, "all rewards were equal within every group, so")])
def test_three_batches_of_equal_rewards_are_reported_at_once(rule, reward, words, workplace, monkeypatch, capsys):
    sums = train.tasks.running_sum

    def judged(*args, **kwargs):
        task = sums(*args, **kwargs)
        task.verify = lambda response, problem: eval(rule.replace("problem.prompt", "problem.prompt.strip()"))
        return task
    monkeypatch.setattr(train.tasks, "running_sum", judged)
    train.main([*TINY, "--steps", "5", "--output_dir", "run"])
    printed = capsys.readouterr().out.splitlines()
    note, = [i for i, text in enumerate(printed) if text.startswith("note: in the last 3 batches")]
    first = json.loads((workplace / "run/samples.jsonl").read_text().splitlines()[2])["samples"][0]
    assert printed[note - 1].startswith("batch 3/5") and words in printed[note]
    assert f"with reward {first['reward']:g}: {first['prompt'].strip()!r} -> {first['response']!r}" in printed[note]
    assert "dead 1.00" in printed[note - 1] and reward in (None, first["reward"])
    train.main([*TINY, "--steps", "3", "--output_dir", "other", "--advantage", "gae", "--algorithm", "ppo"])
    assert ("note: in the last" in capsys.readouterr().out) == (reward == 0), "a critic learns from rewards that differ between prompts"


def test_trackers_get_both_ends_of_the_held_out_scores(workplace, monkeypatch):
    """Without --eval_steps: before the first batch and after the last."""
    sent = []
    monkeypatch.setattr(trackers, "check", lambda name: None)
    monkeypatch.setattr(trackers, "start", lambda *args: lambda numbers, step: sent.append((step, numbers)))
    train.main([*TINY, "--steps", "2", "--eval_samples", "1", "--eval_prompts", "4", "--report_to", "tensorboard", "--output_dir", "run"])
    summary = json.loads((workplace / "run/summary.json").read_text())
    ends = [(step, numbers) for step, numbers in sent if "held_out_reward/0" in numbers]
    assert [step for step, _ in ends] == [0, 2] and len(sent) == 4
    for (_, numbers), when in zip(ends, ("before", "after")):
        assert numbers["held_out_reward/0"] == summary[f"reward_{when}"] and numbers["pass_at_1/0"] == summary[f"pass_at_1_{when}"]
        assert numbers["held_out_parts/correct"] == summary[f"reward_parts_{when}"]["correct"]


@pytest.mark.parametrize("more", ["", "--num_hidden_layers 48 --learning_rate 4e-4", "--num_hidden_layers 2 --min_terms 3"])
def test_the_command_of_a_run_repeats_it(more):
    given = f"--algorithm grpo --epsilon 0.1 --seed 7 --steps 3 --save_tokens false --device cpu --no_chat_template --reward_weights 1 2 {more}"
    args = parse(given.split())
    assert parse(command(args).split()[2:]) == args, "also where defaults follow the number of layers"
    switched = parse(command(args, algorithm="gspo").split()[2:])
    assert (switched.algorithm, switched.epsilon, switched.seed) == ("gspo", 3e-4, 7), "GRPO's clip range is not GSPO's"


# ---------------------------------------------------------------------------------------------------------------- progress

def test_the_cold_start_tells_its_progress_through_a_pipe(monkeypatch, capsys):
    clock = iter(range(0, 1000, 2))                          # a step takes two seconds
    monkeypatch.setattr(warm_up.time, "perf_counter", lambda: next(clock))
    assert list(warm_up.with_progress(10)) == list(range(1, 11))
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"cold start: {step} of 10 supervised steps, {left} s left" for step, left in ((3, 14), (6, 8), (9, 2))]
    assert printed.err == ""


def test_the_advice_names_the_users_own_script(tmp_path, monkeypatch):
    """A file that replaces train.make_optimizer is what the user runs again; a notebook or pytest is not."""
    monkeypatch.chdir(tmp_path)
    args = parse(["--device", "cpu", "--seed", "3"])
    assert command(args) == "python train.py --device cpu --seed 3"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "sgd.py"), raising=False)
    assert command(args).startswith("python sgd.py ")
    for elsewhere in (str(tmp_path / "elsewhere/ipykernel_launcher.py"), "/usr/bin/torchrun", None):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", elsewhere, raising=False)
        assert command(args).startswith("python train.py ")


def test_a_run_that_ends_before_its_second_stage_says_so():
    from plumbing.data import tasks
    from plumbing.run import screen
    late, early = (parse([*TINY, "--max_terms", "4", "--steps", "3", "--stage2_step", n]) for n in ("3", "2"))
    for args, said in ((late, True), (early, False)):
        words = screen.plan(args, "runs/x", tasks.from_arguments(args), "cpu")
        assert ("the second stage begins after batch 3, and this run ends with batch 3" in words) == said

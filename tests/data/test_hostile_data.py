"""Hostile input: data files that are not what they should be, and responses written to hang, crash or use the verifiers.

    python -m pytest tests/data/test_hostile_data.py -s            # the fuzz counts are printed
    python -m pytest tests/data/test_hostile_data.py -s -m slow    # 10,000 strings through math-verify: some minutes
"""
import json
import random
import re
import time
import zlib
from pathlib import Path

import pytest

import train

from plumbing.data.datafiles import checked_rows, read_rows
from plumbing.data.datafiles import Problem
from plumbing.data.tasks import load_task
from plumbing.data.running_sum import builtin_tokenizer, running_sum
from plumbing.data.task import encode_prompt
from plumbing.data.verifiers import Verifier, in_parallel
from tiny_run import SMALL

GOOD = '{"prompt": "2+2=", "answer": "4"}\n'


# ------------------------------------------------------------------------------------------------------------ bad data files

@pytest.mark.parametrize("name, content, words", [
    ("missing.jsonl", None, "missing.jsonl: there is no such data file"),
    ("a_folder.jsonl", "folder", "a_folder.jsonl: is a folder"),
    ("rows.txt", GOOD, "rows.txt: a data file ends in .jsonl, .json, .csv, .parquet"),
    ("empty.jsonl", "", "empty.jsonl: is empty"), ("empty.csv", "", "empty.csv: is empty"),
    ("empty.json", "[]", "empty.json: is empty"),
    ("empty.parquet", "", "empty.parquet: not a Parquet file"), ("blank.jsonl", "\n \n\n", "blank.jsonl: is empty"),
    ("header.csv", "prompt,answer\n", "header.csv: is empty"),
    ("broken.jsonl", GOOD * 2 + '{"prompt": "x", "ans\n' + GOOD, "broken.jsonl line 3: broken JSONL"),
    ("cut.jsonl", GOOD + '\n\n{"prompt": "x", "answer": "4"', "cut.jsonl line 4: broken JSONL"),       # blank lines count
    ("python.jsonl", GOOD + "{'prompt': 'x', 'answer': '4'}", "python.jsonl line 2: broken JSONL"),
    ("broken.json", '[\n{"prompt": "x",\n "answer": }\n]', "broken.json line 3: broken JSON"),
    ("deep.jsonl", GOOD + "[" * 200_000, "deep.jsonl line 2: broken JSONL"),
    ("digits.jsonl", GOOD + '{"prompt": "x", "answer": ' + "9" * 5000 + "}", "digits.jsonl line 2: broken JSONL"),
    ("quote.csv", 'prompt,answer\n1,2\n"open,3\n', "quote.csv line 3: broken CSV"),
    ("wide.csv", "prompt,answer\na,1\nb, or c,2\n", "wide.csv line 3: broken CSV: more cells than the header has names"),
    ("latin.jsonl", '{"prompt": "café", "answer": "4"}'.encode("latin-1"), "latin.jsonl: not UTF-8 text from byte 15"),
    ("zip.jsonl", b"PK\x03\x04\xff\xfe", "zip.jsonl: not UTF-8 text"),
    ("nothing.jsonl", "{}\n", "it has none"),
    ("columns.jsonl", '{"text": "x", "label": 1}\n', "no column prompt or question or problem for the prompt; it has text, lab"),
    ("answers.csv", "prompt,label\nx,1\n", "no column answer or solution for the answer; it has prompt, label"),
    ("list.jsonl", "[1, 2]\n", "list.jsonl row 1: not an object with named columns but int"),
    ("number.jsonl", "7\n", "number.jsonl line 1: not an object"),
    ("later.jsonl", GOOD + '"text"\n', "later.jsonl line 2: not an object with named columns but str"),
    ("null.jsonl", GOOD * 4 + '{"prompt": "x", "answer": null}\n', "null.jsonl line 5: answer is null"),
    ("lacks.jsonl", GOOD + '{"prompt": "x"}\n', "lacks.jsonl line 2: answer is null"),
    ("short.csv", "prompt,answer\nx,1\ny\n", "short.csv line 3: answer is null"),
    ("cell.csv", "prompt,answer\nx,1\ny,\n", "cell.csv line 3: answer is empty"),
    ("nan.jsonl", GOOD + '{"prompt": "x", "answer": NaN}\n', "nan.jsonl line 2: answer is nan"),
    ("huge.jsonl", GOOD + '{"prompt": "x", "answer": 1e999}\n', "huge.jsonl line 2: answer is inf"),
    ("null_prompt.jsonl", GOOD + '{"prompt": null, "answer": "1"}\n', "null_prompt.jsonl line 2: prompt is null"),
    ("empty_prompt.jsonl", GOOD + '{"prompt": "", "answer": "1"}\n', "empty_prompt.jsonl line 2: prompt is empty"),
    ("white_prompt.jsonl", GOOD + '{"prompt": " \\n\\t", "answer": "1"}\n', "white_prompt.jsonl line 2: prompt is empty"),
    ("types.jsonl", GOOD + '{"prompt": ["a", "b"], "answer": "1"}\n', "types.jsonl line 2: prompt holds 'a', which is not a message"),
    ("objects.jsonl", GOOD + '{"prompt": "x", "answer": {"value": 1}}\n', "objects.jsonl line 2: answer holds a dict"),
    ("boolean.jsonl", GOOD + '{"prompt": "x", "answer": true}\n', "boolean.jsonl line 2: answer holds a bool"),
    ("surrogate.jsonl", GOOD + '{"prompt": "\\ud83d", "answer": "1"}\n', "surrogate.jsonl line 2: prompt holds half a surrog"),
    ("hashes.jsonl", GOOD + '{"prompt": "x", "answer": "No idea ####  "}\n', "hashes.jsonl line 2: answer after #### is empty"),
], ids=lambda value: value if isinstance(value, str) and re.fullmatch(r"\w+\.\w+", value) else "")
def test_a_bad_file_is_refused_in_one_line_that_names_it(tmp_path, name, content, words):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((ValueError, FileNotFoundError)) as refusal:
        load_task(str(path), verifier="exact")
    message = str(refusal.value)
    assert words in message and name in message and "\n" not in message and len(message) < 400 + len(str(path))
    assert isinstance(refusal.value, FileNotFoundError) == (content in (None, "folder"))


def test_a_null_deep_inside_a_parquet_file_is_refused_by_its_row(tmp_path):
    import datasets
    rows = [{"prompt": f"p{i}", "answer": None if i == 70 else "1"} for i in range(100)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet row 71: answer is null"):
        load_task(str(tmp_path / "x.parquet"), verifier="exact")


def test_a_column_named_but_not_there_is_refused_with_those_there_are(tmp_path):
    (tmp_path / "x.jsonl").write_text(GOOD)
    with pytest.raises(ValueError, match="no column ask for the prompt; it has prompt, answer"):
        load_task(str(tmp_path / "x.jsonl"), prompt_column="ask", verifier="exact")


def test_a_bad_test_file_is_refused_too(tmp_path):
    (tmp_path / "x.jsonl").write_text(GOOD)
    (tmp_path / "y.jsonl").write_text("")
    with pytest.raises(ValueError, match="y.jsonl: is empty"):
        load_task(str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl"), verifier="exact")
    with pytest.raises(ValueError, match="every prompt is in the test split"):
        load_task(str(tmp_path / "x.jsonl"), str(tmp_path / "x.jsonl"), verifier="exact")


# ------------------------------------------------------------------------------------- odd but honest data, handled as documented

def test_unicode_and_control_characters_pass_unchanged(tmp_path):
    prompts = ["Grüße, 你好, שלום, 🙂👩\u200d👧", "tab\tbell\x07null\x00escape\x1b[31m", "line one\nline two\r\nthree\u2028four",
               "\u202eright to left", "e\u0301 and é", "\ufeffmark"]
    for escaped in (True, False):
        lines = [json.dumps({"prompt": p, "answer": p}, ensure_ascii=escaped) for p in prompts]
        (tmp_path / "x.jsonl").write_bytes(("\ufeff" * escaped + "\n".join(lines)).encode())             # with and without a mark
        task = load_task(str(tmp_path / "x.jsonl"), verifier="exact")
        assert {(p.prompt, p.answer) for p in task.train + task.test} == {(p, p) for p in prompts}


def test_numbers_become_text_and_may_be_mixed_with_it(tmp_path):
    rows = ['{"prompt": 1, "answer": 4}', '{"prompt": "b", "answer": "5"}', '{"prompt": "c", "answer": -6.5}']
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    assert [row[:2] for row in checked_rows(read_rows(tmp_path / "x.jsonl"), "x")] == [("1", "4"), ("b", "5"), ("c", "-6.5")]
    (tmp_path / "x.csv").write_text("prompt,answer\r\na,007\r\nb,1.50\r\n")              # text stays as it is written
    assert [row[1] for row in checked_rows(read_rows(tmp_path / "x.csv"), "x")] == ["007", "1.50"]


def test_a_dataset_of_one_row_is_both_splits_and_says_so(tmp_path):
    (tmp_path / "x.jsonl").write_text(GOOD)
    task = load_task(str(tmp_path / "x.jsonl"), verifier="exact")
    assert task.train == task.test == [Problem("2+2=", "4", f"{tmp_path}/x.jsonl line 1")]
    assert len(task.notes) == 1 and "only one problem" in task.notes[0]


def test_the_first_row_of_a_prompt_counts_and_no_prompt_is_in_both_splits(tmp_path):
    rows = [{"prompt": f"p{i % 7}", "answer": str(i)} for i in range(50)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(str(tmp_path / "x.jsonl"), verifier="exact")
    assert {p.prompt: p.answer for p in task.train + task.test} == {f"p{i}": str(i) for i in range(7)}
    assert len(task.train) == 6 and len(task.test) == 1
    assert task.notes[0] == "43 of 50 rows left out: their prompt came before or is in the test split"


def test_answers_that_math_verify_cannot_read_are_noticed(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "yes"}) + "\n" for i in range(4)))
    task = load_task(str(tmp_path / "x.jsonl"))
    task.verifiers[0].close()
    assert any("perhaps the verifier exact is meant" in note for note in task.notes) and not task.verifier_errors


LONG = "1+" * 500_000


@pytest.mark.parametrize("name, content", [("x.jsonl", "\n" + GOOD + json.dumps({"prompt": LONG, "answer": "4"})),
                                           ("x.csv", f"prompt,answer\n2+2=,4\n{LONG},4\n")], ids=["jsonl", "csv"])
def test_a_million_character_prompt_is_read_and_then_refused_by_its_row(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    task = load_task(str(tmp_path / name), verifier="exact")
    problem = next(p for p in task.train + task.test if len(p.prompt) == 1_000_000)
    with pytest.raises(ValueError, match=f"{name} line 3: the prompt has 1000000 characters, far too many for 512 tokens"):
        encode_prompt(builtin_tokenizer(), problem, chat=True, max_prompt_length=512)


def test_a_prompt_of_exactly_the_limit_fits_and_one_more_does_not():
    tokenizer = builtin_tokenizer()
    assert len(encode_prompt(tokenizer, Problem("1" * 24, ""), False, 24)) == 24
    with pytest.raises(ValueError, match="has 25 tokens"):
        encode_prompt(tokenizer, Problem("1" * 25, ""), False, 24)


def test_a_prompt_that_the_tokenizer_cannot_take_is_refused_by_its_row():
    with pytest.raises(ValueError, match="^rows.jsonl line 8: the prompt cannot be tokenized"):
        encode_prompt(builtin_tokenizer(), Problem("What is 2+2?", "4", "rows.jsonl line 8"), False, 24)


def test_random_bytes_are_read_or_refused_but_never_crash(tmp_path):
    """500 mutations of good files, a few bytes put in, left out or replaced: rows, or the ValueError that becomes a line."""
    good = {".jsonl": GOOD * 3, ".csv": 'prompt,answer\n"a,b",1\nc,2\n',
            ".json": '[{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]'}
    rng, read, refused = random.Random(0), 0, 0
    for _ in range(500):
        suffix = rng.choice(list(good))
        data = bytearray(good[suffix].encode())
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(data) + 1)
            noise = [rng.choice([rng.randrange(256), *b'0aA-, "{}[]:\n\\']) for _ in range(rng.randint(0, 3))]
            data[place:place + rng.randint(0, 3)] = bytes(noise)
        path = tmp_path / f"x{suffix}"
        path.write_bytes(data)
        try:
            assert all(isinstance(part, str) for row in checked_rows(read_rows(path), path) for part in row[:3])
            read += 1
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert read > 50 and refused > 50


# ---------------------------------------------------------------------------------------------------- fuzzing the verifiers

BOMBS = [
    "$9^{9^{9^9}}$", r"\boxed{9^{9^{9^{9}}}}", "9**9**9**9", r"$10^{10^{10}}$", r"$(10^9)!$", r"$\prod_{k=1}^{99999999} k$",
    r"$\sum_{n=1}^{10^{12}} \frac{1}{n}$", r"$\int_0^\infty e^{x^{x^x}} dx$", r"$x^{999999}-1=0$", "1e999999999",
    "0." + "0" * 5000 + "1", "(" * 5000, "[" * 3000 + "]" * 3000, "$" + "(" * 2000 + "1" + ")" * 2000 + "$",
    "((1+" * 300 + "1" + "))" * 300, r"\frac{" * 400, r"\boxed{" * 500 + "1" + "}" * 500,
    r"$\sqrt{" * 200, "1" * 20_000, "$" + "x+" * 1500 + "1$", "answer: " * 3000,
    "{" * 1000 + "}" * 1000, "$$" * 2000]
CODE = [
    "__import__('os').system('touch {0}')", "exec(\"open('{0}','w')\")", "$__import__('os').mkdir('{0}')$",
    "\\boxed{{open('{0}','w')}}", "().__class__.__bases__[0].__subclasses__()", "lambda: open('{0}', 'w')",
    "'; DROP TABLE rewards; --", "$(touch {0})", "`touch {0}`", "{{{{7*7}}}}", "%s%n%x", "\\input{{{0}}}",
    "\\write18{{touch {0}}}", "<script>alert(1)</script>",
    "[\"\", \"1\"]\n[\"\", \"1\"]", "null\n1.0\n"]


def hostile_strings(n, valid, trap, bombs, seed=0):
    """n responses: mutations of the valid one, noise, control characters, nesting, code that would make `trap`, and bombs."""
    rng = random.Random(seed)
    alphabets = ["0123456789+-*/=,. ", "0123456789\\{}$^_()[]frac sqrt boxed", "".join(map(chr, range(32))) + "\x7f\x85\u2028",
                 "٠١٢३४५①②½²∞π×÷√∑∫≤≠\u200b\u202e\u0301\ufeff", "🙂👩\u200d👧한국語ñß\ud800\U0010ffff", "()[]{}<>$\\\"'`;|&\n\t"]

    def noise():
        return "".join(rng.choices(rng.choice(alphabets), k=rng.choice([0, 1, 2, 5, 20, 60])))

    def mutation():
        text = list(rng.choice([valid, f"The answer is {valid}.", rf"\boxed{{{valid}}}", f"#### {valid}", f"${valid}$"]))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(text) + 1)
            text[place:place + rng.randint(0, 2)] = rng.choice([noise()[:3], rng.choice("0123456789"), "", text[:place]])
        return "".join(text)

    def nesting():
        opening, closing = rng.choice([("(", ")"), ("{", "}"), ("[", "]"), ("-", ""), ("$", "$"),
                                       (r"\frac{", "}{2}"), (r"\sqrt{", "}"), (r"\boxed{", "}")])
        depth = rng.choice([3, 10, 30])
        return opening * depth + rng.choice([valid, "1", ""]) + closing * rng.choice([depth, depth - 1, 0])
    for i in range(n):
        if i % bombs == bombs - 1:
            yield BOMBS[i // bombs % len(BOMBS)]
        else:
            kind = rng.random()
            yield (mutation() if kind < 0.45 else noise() if kind < 0.7 else nesting() if kind < 0.8 else
                   rng.choice(CODE).format(trap) if kind < 0.9 else mutation() + noise() + rng.choice(CODE).format(trap))


def fuzz(check, answer, responses, trap, limit):
    """Every response through check(response, answer): a finite number, in time, no trap sprung. Returns how many got a reward."""
    tried, rewarded, slowest = 0, 0, 0.0
    for response in responses:
        start = time.monotonic()
        reward = check(response, answer)                                                 # an exception fails the test: a crash
        slowest = max(slowest, time.monotonic() - start)
        assert isinstance(reward, float) and 0.0 <= reward <= 1.0, (response, reward)
        assert slowest < limit + 60, (response, slowest)                                 # a hang; a new worker has to load
        tried, rewarded = tried + 1, rewarded + (reward > 0)
    assert not trap.exists()
    errors = getattr(check, "errors", {})
    print(f"\n{getattr(check, 'kind', 'running_sum')}: strings tried {tried}, crashes 0, hangs 0; rewarded {rewarded}, "
          f"cut off at the limit {errors.get('timeout', 0)}, crashes caught {errors.get('crash', 0)}, slowest {slowest:.2f} s")
    return rewarded


def test_fuzzing_the_running_sum(tmp_path):
    """10,000 strings; what is rewarded is exactly what plain Python finds right, and the first error lies inside the response."""
    trap, task = tmp_path / "trap", running_sum(train_size=5, test_size=5)
    problem = task.test[0]
    terms = [int(term) for term in problem.prompt.strip()[:-1].split("+")]

    def check(response, answer):
        reward, error = task.verify(response, problem), task.first_error(response, problem)
        steps = re.fullmatch(r"[0-9](,[0-9])*\.", response)
        right = bool(steps) and [int(c) for c in response[:-1].split(",")] == [sum(terms[:i + 1]) % 10 for i in range(len(terms))]
        assert reward == right and (error is None) == right and (right or 0 <= error <= len(response))
        return reward
    responses = [*hostile_strings(10_000, problem.answer, trap, bombs=100), problem.answer]
    assert fuzz(check, problem.answer, responses, trap, limit=1) >= 1


def test_fuzzing_the_exact_verifier(tmp_path):
    trap = tmp_path / "trap"
    assert fuzz(Verifier("exact"), "42", [*hostile_strings(10_000, "42", trap, bombs=100), " 42 "], trap, limit=1) >= 1


@pytest.mark.parametrize("n", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzing_a_users_function(tmp_path, n):
    """Strings into a naive function in its worker: it raises on many of them, and every string arrives unchanged."""
    trap = tmp_path / "trap"
    (tmp_path / "mine.py").write_text("import zlib\ndef check(response, answer):\n"
                                      "    crc = zlib.crc32(response.encode('utf-8', 'surrogatepass'))\n"
                                      "    return crc == int(answer) if len(response) % 3 else int(response) * 0\n")
    check = Verifier(f"{tmp_path}/mine.py:check", time_limit=20.0)
    responses = list(hostile_strings(n, "42", trap, bombs=100))
    expected = [zlib.crc32(response.encode("utf-8", "surrogatepass")) for response in responses]
    arrived = 0
    for response, crc in zip(responses, expected):
        reward = check(response, str(crc))
        assert (reward == 1.0) == (len(response) % 3 > 0)
        arrived += reward == 1.0
    check.close()
    assert check.errors["crash"] > 100 and not check.errors["timeout"] and not trap.exists()
    print(f"\nuser's function: strings tried {len(responses)}, crashes 0, hangs 0; "
          f"arrived unchanged {arrived}, its own exceptions {check.errors['crash']}")


@pytest.mark.parametrize("n, bombs, limit", [(20, 10, 1.0), pytest.param(10_000, 100, 1.0, marks=pytest.mark.slow)])
def test_fuzzing_math_verify(tmp_path, n, bombs, limit):
    """Four at a time, as a run judges them: an answer that is cut off costs a second and a new worker."""
    trap, check = tmp_path / "trap", Verifier("math", time_limit=limit)
    responses = list(hostile_strings(n, "42", trap, bombs))
    rewarded = in_parallel(lambda part: fuzz(check, "42", part, trap, check.time_limit), [responses[i * n // 4:(i + 1) * n // 4] for i in range(4)], workers=4)
    assert sum(rewarded) > n // 50                                                       # some mutations leave the answer right
    check.time_limit = 30.0
    assert check("so 42", "42") == 1.0                                                   # and it still works
    check.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["countdown", "puzzle24", "polynomial_multiplication", "number_sorting", "simple_integration"])
def test_fuzzing_reasoning_gyms_verifiers(tmp_path, name):
    """Some of these hand the response to sympy's parser, which is eval: the trap must stay shut all the same."""
    pytest.importorskip("reasoning_gym")
    trap = tmp_path / "trap"
    task = load_task(f"reasoning_gym:{name}", size=10, time_limit=1.0)
    check, problem = task.verifiers[0], task.train[0]
    fuzz(check, "0", hostile_strings(500, problem.answer, trap, bombs=100), trap, check.time_limit)
    check.close()


# ------------------------------------------------------------------------ prompts that do not fit

@pytest.fixture
def checkpoint(workplace, cold_start):
    """Flags for a run of a checkpoint that knows 17 characters, at most 8 tokens per prompt."""
    return [*SMALL, "--model_name_or_path", str(next(cold_start.iterdir())), "--verifier", "exact", "--steps", "4",
            "--max_completion_length", "4", "--max_prompt_length", "8", "--num_generations", "2", "--output_dir", "run"]


def rows(name, *prompts):
    Path(name).write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return name


FIT, LONG_ONES = [f"{i}+{i}=" for i in range(1, 9)], [f"{i}+1+1+1+1=" for i in range(1, 4)]


def test_prompts_that_do_not_fit_are_left_out_before_the_run(checkpoint, capsys):
    """Every prompt is drawn twice here; a long one or an unknown letter would end the run on 4e7dd4c."""
    train.main([*checkpoint, "--dataset_name", rows("train.jsonl", *FIT, LONG_ONES[0], "hello="), "--eval_samples", "1",
                "--test_dataset_name", rows("test.jsonl", LONG_ONES[1], "7+7=", "9+9=")])
    out = capsys.readouterr().out
    assert "3 of 12 prompts left out; train.jsonl line 9: the prompt has 10 tokens; between 1 and 8 fit" in out
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("train_rows, test_rows, second, words", [
    (LONG_ONES, ["7+7="], None, "none of the 3 train prompts fits; train.jsonl line"),
    (FIT, LONG_ONES, None, "none of the 3 test prompts fits; test.jsonl line"),
    (FIT, ["7+7=9"], LONG_ONES, "none of the 2 train prompts fits; second.jsonl line")])
def test_a_split_without_any_prompt_that_fits_is_refused_before_the_run(checkpoint, capsys, train_rows, test_rows, second, words):
    stage2 = ["--stage2_dataset_name", rows("second.jsonl", *second), "--stage2_step", "1"] if second else []
    argv = [*checkpoint, *stage2, "--dataset_name", rows("train.jsonl", *train_rows), "--test_dataset_name", rows("test.jsonl", *test_rows)]
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and words in err and not Path("run").exists()


def test_a_prompt_is_tokenised_once(checkpoint, monkeypatch):
    from plumbing.data import task
    encode, asked = task.encode_prompt, []
    monkeypatch.setattr(task, "encode_prompt", lambda tokenizer, problem, *rest: (asked.append(problem), encode(tokenizer, problem, *rest))[1])
    train.main([*checkpoint, "--dataset_name", rows("train.jsonl", *FIT), "--eval_samples", "1", "--eval_steps", "1",
                "--test_dataset_name", rows("test.jsonl", "7+7=1", "9+9=2")])
    assert len(asked) == len(set(asked)) == 10

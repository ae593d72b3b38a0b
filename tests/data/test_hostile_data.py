"""Hostile input: data files that are not what they should be, and responses written to hang, crash
or misuse the reward functions.

    python -m pytest tests/data/test_hostile_data.py
    python -m pytest tests/data/test_hostile_data.py -m slow    # every response by math-verify
"""

import json
import time
import zlib
from decimal import Decimal

import pytest

from plumbing.data import task
from plumbing.data.datafiles import Problem, read_rows, to_problems
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.data.task import Task, encode_prompt
from plumbing.data.reward_functions import RewardFunction, in_parallel
from plumbing.refusal import Refusal
from tiny_run import jsonl, load_task, metrics, slow, write

GOOD = '{"prompt": "2+2=", "answer": "4"}\n'


# --------------------------------------------------------------------------------- bad data files

def row(prompt='"x"', answer='"4"'):
    """A good line of JSON and one with these values."""
    return f'{GOOD}{{"prompt": {prompt}, "answer": {answer}}}\n'


BAD = {  # file: what it holds, what the line says after the file's name
    "missing.jsonl": (None, ": there is no such data file"),
    "folder.jsonl": ("folder", ": there is no such data file"),
    "a_folder": ("folder", ": a data file ends in"),
    "rows.txt": (GOOD, ": a data file ends in .jsonl, .json, .csv, .parquet"),
    "empty.jsonl": ("", ": is empty"),
    "empty.parquet": ("", ": not a Parquet file"),
    "header.csv": ("prompt,answer\n", ": is empty"),
    "broken.jsonl": (f'{GOOD}{GOOD}{{"prompt": "x", "ans\n{GOOD}', " line 3: broken JSONL"),
    "broken.json": ('[\n{"prompt": "x",\n "answer": }\n]', " line 3: broken JSON"),
    "deep.jsonl": (GOOD + "[" * 200_000, " line 2: broken JSONL"),
    "digits.jsonl": (row(answer="9" * 5000), " line 2: broken JSONL"),
    "key.jsonl": (f'{GOOD}{{"prompt": "x", "answer": "1", "answer": "2"}}\n',
                  " line 2: broken JSONL: answer stands twice"),
    "quote.csv": ('prompt,answer\n1,2\n"open,3\n', " line 3: broken CSV"),
    "wide.csv": ("prompt,answer\na,1\nb, or c,2\n",
                 " line 3: broken CSV: more cells than the header has names"),
    "latin.jsonl": ('{"prompt": "café", "answer": "4"}'.encode("latin-1"),
                    ": not UTF-8 text from byte 15"),
    "nothing.jsonl": ("{}\n", ": no column prompt or question or problem for the prompt; it has "
                      "none"),
    "columns.jsonl": ('{"text": "x", "label": 1}\n',
                      ": no column prompt or question or problem for the prompt; it has text, lab"),
    "answers.csv": ("prompt,label\nx,1\n",
                    ": no column answer or solution for the answer; it has prompt, label: "
                    "--columns PROMPT ANSWER names two"),
    "list.jsonl": ("[1, 2]\n", " row 1: not an object with named columns but int"),
    "null.jsonl": (GOOD * 3 + row(answer="null"), " line 5: answer is None"),
    "lacks.jsonl": (f'{GOOD}{{"prompt": "x"}}\n', " line 2: answer is None"),
    "short.csv": ("prompt,answer\nx,1\ny\n", " line 3: answer is None"),
    "cell.csv": ("prompt,answer\nx,1\ny,\n", " line 3: answer is '': text"),
    "nan.jsonl": (row(answer="NaN"), " line 2: answer is nan"),
    "white_prompt.jsonl": (row('" \\n\\t"'), " line 2: prompt is ' \\n\\t': text"),
    "objects.jsonl": (row(answer='{"value": 1}'), " line 2: answer is {'value': 1}: text"),
    "surrogate.jsonl": (row('"\\ud83d"'), " line 2: prompt is '\\ud83d': text"),
    "twice.csv": ("prompt,answer,answer\nx,1,2\n",
                  " line 1: broken CSV: a name occurs twice: prompt, answer, answer"),
    "nested.jsonl": ('{"prompt": "x", "reward_model": {"ground_truth": "4"}}\n',
                     ": no column answer or solution for the answer; it has prompt, reward_model, "
                     "reward_model.ground_truth: --columns"),
    "no_messages.jsonl": (row("[]"), " line 2: prompt holds None, which is not a message"),
    "texts.jsonl": (row('["2+2="]'), " line 2: prompt holds '2+2=', which is not a message"),
    "content.jsonl": (row('[{"role": "user", "content": ["2"]}]'),
                      " line 2: prompt's content is ['2']: text"),
    "no_content.jsonl": (row('[{"role": "user"}]'), " line 2: prompt's content is None"),
    "assistant.jsonl": (row('[{"role": "user", "content": "2"},'
                            ' {"role": "assistant", "content": "4"}]'),
                        " line 2: prompt ends with a message of assistant"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line_that_names_it(name, tmp_path):
    content, words = BAD[name]
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Refusal) as refusal:
        load_task(str(path), verifier="exact")
    message = str(refusal.value)
    assert name + words in message
    assert "\n" not in message and len(message) < 400 + len(str(path))


def test_a_null_deep_inside_a_parquet_file_is_refused_by_its_row(tmp_path):
    import datasets
    rows = [{"prompt": f"p{i}", "answer": None if i == 70 else "1"} for i in range(100)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet row 71: answer is None"):
        load_task(str(tmp_path / "x.parquet"), verifier="exact")


@pytest.mark.parametrize("kind, values, texts", [
    ("float32", [0.1, 2.5], ["0.1", "2.5"]),
    ("float16", [0.1, 3.0], ["0.1", "3.0"]),
    ("float64", [3.0, 12.0], ["3", "12"]),                   # integers, as pandas writes them
    ("float64", [3.0, 2.5], ["3.0", "2.5"]),
    ("int64", [3, 12], ["3", "12"])])
def test_numbers_of_a_parquet_file_are_what_was_written(kind, values, texts, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"),
                                  "answer": datasets.Value(kind)})
    rows = [{"prompt": "x", "answer": value} for value in values]
    made = datasets.Dataset.from_list(rows, features=features)
    made.to_parquet(tmp_path / "x.parquet")
    found = to_problems(read_rows(tmp_path / "x.parquet"), "x.parquet")
    assert [problem.answer for problem in found] == texts


def test_an_integer_of_400_digits_is_a_number(tmp_path):
    write(tmp_path / "x.jsonl", row(answer="7" * 400))
    *_, last = to_problems(read_rows(tmp_path / "x.jsonl"), "x.jsonl")
    assert last.answer == "7" * 400


def test_a_decimal_of_a_parquet_file_is_a_number(tmp_path):
    import datasets
    datasets.Dataset.from_list([{"prompt": "x", "answer": Decimal("4.50")}]).to_parquet(
        tmp_path / "x.parquet")
    row, = to_problems(read_rows(tmp_path / "x.parquet"), "x.parquet")
    assert row.answer == "4.50"


def test_a_test_file_with_every_prompt_is_refused(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "2+2=", "answer": "4"}])
    with pytest.raises(ValueError, match="every prompt is in the test split"):
        load_task(path, path, verifier="exact")


@pytest.mark.parametrize("suffix, good", [
    (".jsonl", GOOD), (".csv", 'prompt,answer\n"a,b",1\nc,2\n'),
    (".json", '[{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]')])
def test_a_byte_put_in_left_out_or_replaced_is_read_or_refused(suffix, good, tmp_path):
    """At every place: rows, or the ValueError that becomes a line."""
    path = tmp_path / f"x{suffix}"
    read = refused = 0
    for place in range(len(good)):
        for noise in (b"", *(bytes([byte]) for byte in b'0 ,"{\n\\\xff')):
            for after in (place, place + 1):
                path.write_bytes(good[:place].encode() + noise + good[after:].encode())
                try:
                    rows = to_problems(read_rows(path), path)
                    assert all(isinstance(p.prompt + p.answer, str) for p in rows)
                    read += 1
                except ValueError as error:
                    assert str(path) in str(error)
                    refused += 1
    assert read > 50 and refused > 50


# ------------------------------------------------- odd but honest data, handled as documented

def test_unicode_and_control_characters_pass_unchanged(tmp_path):
    prompts = ["Grüße, 你好, שלום, 🙂👩\u200d👧", "tab\tbell\x07null\x00escape\x1b[31m",
               "line one\nline two\r\nthree\u2028four", "\u202eright to left", "e\u0301 and é",
               "\ufeffmark"]
    for escaped in (True, False):                            # with and without a byte order mark
        lines = [json.dumps({"prompt": p, "answer": p}, ensure_ascii=escaped) for p in prompts]
        (tmp_path / "x.jsonl").write_bytes(("\ufeff" * escaped + "\n".join(lines)).encode())
        task = load_task(str(tmp_path / "x.jsonl"), verifier="exact")
        assert {(p.prompt, p.answer) for p in task.train + task.test} == {(p, p) for p in prompts}


@pytest.mark.parametrize("name, text, answers", [
    ("x.jsonl", '{"prompt": 1, "answer": 4}\n{"prompt": "b", "answer": "5"}\n'
     '{"prompt": "c", "answer": -6.5}\n{"prompt": "d", "answer": 0.00001}\n'
     '{"prompt": "e", "answer": 1e16}', ["4", "5", "-6.5", "0.00001", "10000000000000000"]),
    ("x.csv", "prompt,answer\r\n1,007\r\nb,1.50\r\n", ["007", "1.50"])])
def test_numbers_become_text_and_text_stays_as_it_is_written(name, text, answers, tmp_path):
    write(tmp_path / name, text)
    rows = to_problems(read_rows(tmp_path / name), name)
    assert [(p.prompt, p.answer) for p in rows] == [*zip("1bcde", answers)]


def test_a_dataset_of_one_row_is_both_splits_and_says_so(tmp_path):
    write(tmp_path / "x.jsonl", GOOD)
    task = load_task(str(tmp_path / "x.jsonl"), verifier="exact")
    assert task.train == task.test == [Problem("2+2=", "4", f"{tmp_path}/x.jsonl line 1")]
    note, = task.notes
    assert "only one prompt" in note


def test_no_prompt_is_in_both_splits(tmp_path):
    rows = [{"prompt": f"p{i % 7}", "answer": str(i % 14), "id": 1e-9} for i in range(50)]
    path = jsonl(tmp_path / "x.jsonl", rows)
    task = load_task(path, verifier="exact")
    assert sorted(p.row["prompt"] for p in task.train + task.test) == sorted(
        row["prompt"] for row in rows)
    assert len({p.prompt for p in task.train}) == 6 and len({p.prompt for p in task.test}) == 1
    assert all(p.row == {"prompt": p.prompt, "answer": p.answer, "id": 1e-9} for p in task.train)
    for row in rows:
        row["prompt"] = "play"
        del row["answer"]
    task = load_task(jsonl(path, [row | {"secret": i} for i, row in enumerate(rows)]),
                     verifier=[], environment="mine.py:Game")
    # the split is by row, without answers
    assert len(task.train) == 45 and len(task.test) == 5 and not task.reward_functions
    assert {p.row["secret"] for p in task.train + task.test} == set(range(50))


def test_references_that_math_verify_cannot_read_are_named(model, run, capsys):
    """Ten that it can read come first."""
    odd = ["\\$18.90", "√2", "½", "no solution", "−5", 0.00001]
    files(train=[], test=["7+7="])
    jsonl("train.jsonl", [{"prompt": f"{i}+1=", "answer": answer}
                          for i, answer in enumerate([*range(1, 11), *odd])])
    run(FLAGS.replace("exact", "math"))
    out = capsys.readouterr().out
    assert ("misreads 3 of 16 different reference answers that were tried, such as '√2' "
            "(train.jsonl line 12), 'no solution' (train.jsonl line 14), '½' (train.jsonl line 13)"
            ) in out
    assert "--verifier exact" in out and out.index("misreads") < out.index("first prompt")


def test_a_million_character_prompt_is_read_and_then_refused_by_its_row(tmp_path):
    """Python's reader of CSV takes no such cell by itself."""
    write(tmp_path / "x.csv", f"prompt,answer\n2+2=,4\n{'1+' * 500_000},4\n")
    task = load_task(str(tmp_path / "x.csv"), verifier="exact")
    problem = next(p for p in task.train + task.test if len(p.prompt) == 1_000_000)
    words = "x.csv line 3: the prompt has 1000000 tokens"
    with pytest.raises(ValueError, match=words):
        task.encode(builtin_tokenizer(), [problem])


def test_a_prompt_of_exactly_the_limit_fits_and_no_other_is_read():
    task = Task("", [], [], None, max_prompt_length=24)
    encode = lambda problem: encode_prompt(task, builtin_tokenizer(), problem)
    assert len(encode(Problem("1" * 24, ""))) == 24
    for prompt, words in (("1" * 25, "has 25 tokens"),
                          ("What is 2+2?", "^rows.jsonl line 8: the prompt cannot be tokenized")):
        with pytest.raises(ValueError, match=words):
            encode(Problem(prompt, "", "rows.jsonl line 8"))


# -------------------------------------------------------- hostile responses to reward functions

BOMBS = [
    "$9^{9^{9^9}}$", r"\boxed{9^{9^{9^{9}}}}", "9**9**9**9", r"$10^{10^{10}}$", r"$(10^9)!$",
    r"$\prod_{k=1}^{99999999} k$", r"$\sum_{n=1}^{10^{12}} \frac{1}{n}$",
    r"$\int_0^\infty e^{x^{x^x}} dx$", r"$x^{999999}-1=0$", "1e999999999", f"0.{0:05000}1",
    "(" * 5000, "[" * 3000 + "]" * 3000, "$" + "(" * 2000 + "1" + ")" * 2000 + "$",
    "((1+" * 300 + "1" + "))" * 300, r"\frac{" * 400, r"\boxed{" * 500 + "1" + "}" * 500,
    r"$\sqrt{" * 200, "1" * 20_000, "$" + "x+" * 1500 + "1$", "answer: " * 3000,
    "{" * 1000 + "}" * 1000, "$$" * 2000]
CODE = [                                                     # TRAP: a file that they would make
    "__import__('os').system('touch TRAP')", "exec(\"open('TRAP','w')\")",
    "$__import__('os').mkdir('TRAP')$", "\\boxed{open('TRAP','w')}",
    "().__class__.__bases__[0].__subclasses__()", "lambda: open('TRAP', 'w')",
    "'; DROP TABLE rewards; --", "$(touch TRAP)", "`touch TRAP`", "{{7*7}}", "%s%n%x",
    "\\input{TRAP}", "\\write18{touch TRAP}", "<script>alert(1)</script>",
    "[\"\", \"1\"]\n[\"\", \"1\"]", "null\n1.0\n"]
ODD = [
    "", " ", "\n", "\0", "".join(map(chr, range(32))) + "\x7f\x85\u2028", "٠١٢", "३४५",
    "①②½²∞π×÷√∑∫≤≠", "\u200b42\u202e\u0301\ufeff", "🙂👩\u200d👧한국語ñß\U0010ffff",
    "\ud800", "4\udfff2", "²",
    "()[]{}<>$\\\"'`;|&\n\t", "((((((((((42", "-" * 30 + "42", "$$$42$$$", "\\",
    r"\frac{42}{",
    r"\frac{" * 10 + "42" + "}{2}" * 10, r"\sqrt{" * 10 + "42" + "}" * 9, r"\boxed{\boxed{42}"]


def damaged(answer):
    """The right answer as it is usually written, with a character left out, put in or doubled."""
    for form in ("{}", "The answer is {}.", r"\boxed{{{}}}", "#### {}", "${}$"):
        text = form.format(answer)
        for place in range(len(text) + 1):
            for noise in ("", "7", ",", "\\", "\0", "½", text[:place]):
                yield text[:place] + noise + text[place + 1:]
                yield text[:place] + noise + text[place:]


def hostile(answer, trap):
    """Every response of these tables."""
    return [*BOMBS, *(code.replace("TRAP", str(trap)) for code in CODE), *ODD, *damaged(answer)]


def judged(check, answer, responses, trap):
    """The reward of each response: a number in time, and no trap is sprung."""
    rewards = []
    for response in responses:
        begun = time.monotonic()
        rewards.append(check(response, answer))              # an exception fails the test: a crash
        assert isinstance(rewards[-1], float) and 0 <= rewards[-1] <= 1, response
        assert time.monotonic() - begun < 61, response       # the limit, and a new worker loads
    assert not trap.exists()
    return rewards


def test_every_string_reaches_a_users_function_unchanged(tmp_path):
    """A naive one in its worker, which raises on many of them."""
    write(tmp_path / "mine.py",
        "import zlib\ndef check(response, answer):\n"
        "    crc = zlib.crc32(response.encode('utf-8', 'surrogatepass'))\n"
        "    return crc == int(answer) if len(response) % 3 else int(response) * 0\n")
    check = RewardFunction(f"{tmp_path}/mine.py:check", time_limit=20.0)
    responses = hostile("42", tmp_path / "trap")
    for response in responses:
        crc = zlib.crc32(response.encode("utf-8", "surrogatepass"))
        assert check(response, str(crc)) == (len(response) % 3 > 0)
    check.close()
    assert check.errors["crash"] > 100 and not check.errors["timeout"]
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("every", [97, slow(1)])
def test_math_verify_survives(every, tmp_path, monkeypatch):
    """Four at a time, as a run judges them: an answer that is cut off costs a second and a new
    worker."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    trap, check = tmp_path / "trap", RewardFunction("math", time_limit=1.0)
    responses = hostile("42", trap)[::every]
    in_parallel(lambda part: judged(check, "42", part, trap),
                [responses[i::4] for i in range(4)])
    check.time_limit = 30.0
    assert check("so 42", "42") == 1.0                       # and it still works
    check.close()


# ------------------------------------------------------------------------ prompts that do not fit

FIT = [f"{i}+{i}=" for i in range(1, 9)]
LONG_ONES = [f"{i}+1+1+1+1=" for i in range(1, 4)]
FLAGS = ("--model_name_or_path model --dataset_name train.jsonl --test_dataset_name test.jsonl "
         "--verifier exact --max_completion_length 4 --max_prompt_length 8 --num_generations 2 ")


def files(**prompts):
    for name, texts in prompts.items():
        jsonl(f"{name}.jsonl", [{"prompt": text, "answer": "1"} for text in texts])


def test_prompts_that_do_not_fit_are_left_out_before_the_run(model, run, capsys):
    """Every prompt is drawn twice here; a long one or an unknown letter would end the run."""
    files(train=[*FIT, LONG_ONES[0], "hello="], test=[LONG_ONES[1], "7+7=", "9+9="])
    assert len(run(FLAGS + "--steps 4 --eval_samples 1")) == 4
    assert ("3 of 12 prompts left out; train.jsonl line 9: the prompt has 10 tokens; between 1 "
            "and 8 fit") in capsys.readouterr().out


@pytest.mark.parametrize("more, prompts, words", [
    ("", dict(train=LONG_ONES, test=["7+7="]),
     "none of the 3 train prompts fits; train.jsonl line"),
    ("", dict(train=FIT, test=LONG_ONES), "none of the 3 test prompts fits; test.jsonl line"),
    ("--stage2_dataset_name second.jsonl --stage2_step 1",
     dict(train=FIT, test=["7+7=9"], second=LONG_ONES),
     "--stage2_step 1: the second source has no train prompt that fits: raise --max_prompt")])
def test_a_split_without_any_prompt_that_fits_is_refused(more, prompts, words, model, refused):
    files(**prompts)
    assert words in refused(FLAGS + more)


def test_a_prompt_is_tokenised_once(model, run, calls):
    encoded = calls(task, "encode_prompt")
    files(train=FIT, test=["7+7=1", "9+9=2"])
    run(FLAGS + "--steps 4 --eval_samples 1 --eval_steps 1")
    asked = [problem for (_, _, problem, *_), *_ in encoded]
    assert len(asked) == len(set(asked)) == 10 and len(metrics("run")) == 4

"""Hostile input: data files that are not what they should be, and responses written to hang, crash
or misuse the reward functions.

    python -m pytest tests/data/test_hostile_data.py
    python -m pytest tests/data/test_hostile_data.py -m slow    # every response by math-verify
"""

import json
import zlib

import pytest

from plumbing.data import task
from plumbing.data.datafiles import Problem, read_rows, to_problems
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.data.task import Task, encode_prompt
from plumbing.data.reward_functions import RewardFunction
from plumbing.refusal import Refusal
from tiny_run import jsonl, load_task, metrics, slow, write

GOOD = '{"prompt": "2+2=", "answer": "4"}\n'


# --------------------------------------------------------------------------------- bad data files

def row(prompt='"x"', answer='"4"'):
    """A good line of JSON and one with these values."""
    return f'{GOOD}{{"prompt": {prompt}, "answer": {answer}}}\n'


BAD = {  # file: what it holds, what the line says after the file's name
    "missing.jsonl": (None, ""), "folder.jsonl": ("folder", ""),
    "rows.txt": (GOOD, " ends in none of .jsonl, .json, .csv, .parquet, and the hub gives"),
    "empty.jsonl": ("", ": a list of rows is needed"), "empty.parquet": ("", " row 1: "),
    "header.csv": ("prompt,answer\n", ": a list of rows is needed"),
    "object.json": ('{"rows": []}', ": a list of rows is needed"),
    "broken.jsonl": (f'{GOOD}{GOOD}{{"prompt": "x", "ans\n{GOOD}', " row 3: "),
    "broken.json": ('[\n{"prompt": "x",\n "answer": }\n]', " row 1: "),
    "quote.csv": ('prompt,answer\n1,2\n"open,3\n', " row 2: "),
    "wide.csv": ("prompt,answer\na,1\nb, or c,2\n", " row 2: not an object with the named columns"),
    "latin.jsonl": ('{"prompt": "café", "answer": "4"}'.encode("latin-1"), " row 1: 'utf-8'"),
    "nothing.jsonl": ("{}\n", " row 1: prompt is None"),
    "list.jsonl": ("[1, 2]\n", " row 1: not an object"), "number.jsonl": ("5\n", " row 1: not an"),
    "null.jsonl": (GOOD * 3 + row(answer="null"), " row 5: answer is None"),
    "cell.csv": ("prompt,answer\nx,1\ny,\n", " row 2: answer is ''"),
    "nan.jsonl": (row(answer="NaN"), " row 2: answer is nan"),
    "half.jsonl": (row('"a\\ud83d"'), " row 2: prompt is 'a\\ud83d'"),
    "white.jsonl": (row('" \\n\\t"'), " row 2: prompt is ' \\n\\t'"),
    "objects.jsonl": (row(answer='{"value": 1}'), " row 2: answer is {'value': 1}"),
    "no_messages.jsonl": (row("[]"), " row 2: messages like"),
    "texts.jsonl": (row('["2+2="]'), " row 2: messages like"),
    "assistant.jsonl": (row('[{"role": "user", "content": "2"},'
                            ' {"role": "assistant", "content": "4"}]'), " row 2: messages like"),
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
        load_task(str(path))
    message = str(refusal.value)
    assert name + words in message
    assert "\n" not in message and len(message) < 400 + len(str(path))


def test_a_test_file_with_every_prompt_is_refused(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "2+2=", "answer": "4"}])
    with pytest.raises(Refusal, match="every prompt is in the test split"):
        load_task(path, path)


# ------------------------------------------------- odd but honest data, handled as documented

def test_unicode_and_control_characters_pass_unchanged(tmp_path):
    prompts = ["Grüße, 你好, שלום, 🙂👩\u200d👧", "tab\tbell\x07null\x00escape\x1b[31m",
               "line one\nline two\r\nthree\u2028four", "e\u0301 and é", "\ufeffmark"]
    for escaped in (True, False):                            # with and without a byte order mark
        lines = [json.dumps({"prompt": p, "answer": p}, ensure_ascii=escaped) for p in prompts]
        (tmp_path / "x.jsonl").write_bytes(("\ufeff" * escaped + "\n".join(lines)).encode())
        loaded = load_task(str(tmp_path / "x.jsonl"))
        assert {(p.prompt, p.answer) for p in loaded.train + loaded.test} == {
            (p, p) for p in prompts}


HUGE = "123" * 133


@pytest.mark.parametrize("name, text, answers", [
    ("x.jsonl", '{"prompt": 1, "answer": 4}\n\n{"prompt": "b", "answer": "5"}\n'
     '{"prompt": "c", "answer": -6.5}\n', ["4", "5", "-6.5"]),
    ("x.jsonl", "".join(f'{{"prompt": "{x}", "answer": {n}}}\n' for x, n in zip(
        "1bcd", ("42.0", "0.00001", "1e16", HUGE))), ["42", "0.00001", "1" + 16 * "0", HUGE]),
    ("x.csv", "prompt,answer\r\n1,007\r\nb,1.50\r\n", ["007", "1.50"]),
    ("x.csv", f"prompt,answer,tests\n1,4,{'t' * 200_000}\n", ["4"])])
def test_numbers_become_text_and_text_stays_as_it_is_written(name, text, answers, tmp_path):
    write(tmp_path / name, text)
    rows = to_problems(read_rows(tmp_path / name)[0], name)
    assert [(p.prompt, p.answer) for p in rows] == [*zip("1bcd", answers)]


@pytest.mark.parametrize("columns", [["Q"], ["Q", "solution"]])
def test_a_column_that_is_not_named_is_found(columns):
    problem, = to_problems([{"prompt": "no", "Q": "2+2=", "solution": "4"}], "x.jsonl", columns)
    assert (problem.prompt, problem.answer) == ("2+2=", "4")


def test_a_dataset_of_one_row_is_both_splits(tmp_path):
    write(tmp_path / "x.jsonl", GOOD)
    loaded = load_task(str(tmp_path / "x.jsonl"))
    assert loaded.train == loaded.test == [Problem("2+2=", "4", f"{tmp_path}/x.jsonl row 1")]


def test_no_prompt_is_in_both_splits(tmp_path):
    rows = [{"prompt": f"p{i % 7}", "answer": str(i % 14), "id": 1e-9} for i in range(50)]
    loaded = load_task(jsonl(tmp_path / "x.jsonl", rows))
    assert len({p.prompt for p in loaded.train}) == 6 and len({p.prompt for p in loaded.test}) == 1
    assert len(loaded.train + loaded.test) == 50 and all(p.row["id"] for p in loaded.train)


JUDGES = "def batch(completions):\n    return [1] * len(completions)\n"


@pytest.mark.parametrize("judge", [dict(environment="mine.py:Game", verifier=[]),
                                   dict(verifier="mine.py:batch")])
def test_rows_need_no_answer_where_an_environment_or_functions_of_a_batch_judge(judge, tmp_path,
                                                                                monkeypatch):
    """TRL's rows have a prompt alone. With an environment all prompts may be the same one."""
    monkeypatch.chdir(tmp_path)
    write("mine.py", JUDGES)
    prompt = "play" if "environment" in judge else "p{}"
    rows = [{"prompt": prompt.format(i), "secret": i} for i in range(50)]
    loaded = load_task(jsonl("x.jsonl", rows), **judge)
    assert len(loaded.train) == 45 and len(loaded.test) == 5
    assert {p.row["secret"] for p in loaded.train + loaded.test} == set(range(50))
    with pytest.raises(Refusal, match="x.jsonl row 1: answer is None"):
        load_task("x.jsonl", verifier=["mine.py:batch", "exact"])


def test_a_prompt_of_exactly_the_limit_fits_and_no_other_is_read():
    """And a character that the tiny tokenizer lacks is one line."""
    limited = Task("", [], [], None, max_prompt_length=24)
    encode = lambda problem: encode_prompt(limited, builtin_tokenizer(), problem)
    assert len(encode(Problem("1" * 24, ""))) == 24
    for prompt, words in (("1" * 25, "^rows.jsonl row 8: the prompt has 25 tokens; between 1 and"),
                          ("What is 2+2?", "'What is 2[+]2[?]': the tokenizer lacks [?] W a h i")):
        with pytest.raises(Refusal, match=words) as refusal:
            encode(Problem(prompt, "", "rows.jsonl row 8"))
        assert "\n" not in str(refusal.value)


# -------------------------------------------------------- hostile responses to reward functions

BOMBS = [
    "$9^{9^{9^9}}$", r"\boxed{9^{9^{9^{9}}}}", "9**9**9**9", r"$(10^9)!$",
    r"$\prod_{k=1}^{99999999} k$", r"$\sum_{n=1}^{10^{12}} \frac{1}{n}$",
    r"$\int_0^\infty e^{x^{x^x}} dx$", r"$x^{999999}-1=0$", "1e999999999", "(" * 5000,
    "$" + "(" * 2000 + "1" + ")" * 2000 + "$", r"\boxed{" * 500 + "1" + "}" * 500, "1" * 20_000]
CODE = [                                                     # TRAP: a file that they would make
    "__import__('os').system('touch TRAP')", "$__import__('os').mkdir('TRAP')$",
    "\\boxed{open('TRAP','w')}", "().__class__.__bases__[0].__subclasses__()", "$(touch TRAP)",
    "\\write18{touch TRAP}", "[\"\", \"1\"]\n[\"\", \"1\"]", "null\n1.0\n"]
ODD = ["", " ", "\n", "\0", "".join(map(chr, range(32))) + "\x7f\x85\u2028", "٠١٢", "①②½²∞π×÷√∑",
       "\u200b42\u202e\u0301\ufeff", "🙂👩\u200d👧한국어ñß\U0010ffff", "\ud800", "4\udfff2",
       "((((((((((42", "$$$42$$$", "\\", r"\frac{42}{", r"\boxed{\boxed{42}"]


def test_every_string_reaches_a_users_function_unchanged(tmp_path):
    """A naive one in its worker, which raises on many of them."""
    write(tmp_path / "mine.py",
        "import zlib\ndef check(response, answer):\n"
        "    crc = zlib.crc32(response.encode('utf-8', 'surrogatepass'))\n"
        "    return crc == int(answer) if len(response) % 3 else int(response) * 0\n")
    check = RewardFunction(f"{tmp_path}/mine.py:check", time_limit=20.0)
    responses = [*BOMBS, *CODE, *ODD]
    crcs = [zlib.crc32(response.encode("utf-8", "surrogatepass")) for response in responses]
    scores = check.scores(responses, [Problem("", str(crc)) for crc in crcs])
    assert [sum(parts.values()) for parts in scores] == [len(text) % 3 > 0 for text in responses]
    assert check.errors > 5


@pytest.mark.parametrize("every", [6, slow(1)])
def test_math_verify_survives(every, tmp_path):
    trap, check = tmp_path / "trap", RewardFunction("math", time_limit=1.0)
    code = [text.replace("TRAP", str(trap)) for text in CODE]
    responses = [*BOMBS, *code, *ODD][::every]
    scores = check.scores(responses, [Problem("", "42")] * len(responses))
    assert {sum(parts.values()) for parts in scores} <= {0.0, 1.0} and not trap.exists()
    check.time_limit = 30.0
    assert check.scores(["so 42"], [Problem("", "42")]) == [{"math": 1.0}]   # it still works


# ------------------------------------------------------------------------ prompts that do not fit

FIT = [f"{i}+{i}=" for i in range(1, 9)]
LONG = [f"{i}+1+1+1+1=" for i in range(1, 4)]
FLAGS = ("--model_name_or_path model --dataset_name train.jsonl --test_dataset_name test.jsonl "
         "--verifier exact --max_completion_length 4 --max_prompt_length 8 --num_generations 2 ")


def files(**prompts):
    for name, texts in prompts.items():
        jsonl(f"{name}.jsonl", [{"prompt": text, "answer": "1"} for text in texts])


def test_prompts_that_do_not_fit_are_left_out_before_the_run(model, run, capsys, calls):
    """Every prompt is drawn twice here; a long one or an unknown letter would end the run. Each is
    tokenized once."""
    encoded = calls(task, "encode_prompt")
    files(train=[*FIT, LONG[0], "hello="], test=[LONG[1], "7+7=1", "9+9="])
    run(FLAGS + "--steps 4 --eval_samples 1 --eval_steps 1")
    assert len(metrics("run")) == 4 and len(encoded) == 10   # those that fit
    assert ("3 prompts left out; train.jsonl row 9: the prompt has 10 tokens; between 1 and 8 fit"
            ) in capsys.readouterr().out


@pytest.mark.parametrize("prompts, words", [
    (dict(train=FIT, test=LONG), "none of 3 prompts fits; test.jsonl row 3"),
    (dict(train=FIT, test=["7+7=9"], second=LONG),
     "--stage2_step 1: the two sources have 8 and 0")])
def test_a_split_without_any_prompt_that_fits_is_refused(prompts, words, model, run):
    files(**prompts)
    stages = "--stage2_dataset_name second.jsonl --stage2_step 1" if "second" in prompts else ""
    with pytest.raises(Refusal, match=words):
        run(FLAGS + stages)

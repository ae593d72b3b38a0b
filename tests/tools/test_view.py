"""`eval.py view`: the tokens that a run saves, and the page that shows them, in a real browser.

    python -m pytest tests/tools/test_view.py                 the file's contents
    python -m pytest tests/tools/test_view.py -m slow         the page, in a headless chromium
"""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eval import main
from losses import OBJECTIVES, policy_loss, token_weights, with_options
from plumbing.data.task import Task
from rollout import Rollout, Scores
from routes import Pass
from session.metrics import group_record
from tiny_run import jsonl, read_json, write
from tools import view
from train import Batch

HOSTILE = ('</script><img src=x onerror="document.title=1"><script>document.title=2</script>'
           "@SCRIPT@<!--")
WORDS = [HOSTILE, "<eos>", " a", "\n", "é", "7", "", "{{x}}", "`${1}`", "\u2028"]
G, T, L, K = 6, 9, 2, 2


class Words:
    """A tokenizer of ten words, one of them an attack."""
    def decode(self, ids):
        return "".join(WORDS[i] for i in ids)


def group(seed=0):
    """(mini-batch of one group, new Scores): answers that drift by little and by much, one with
    tool output in its middle, one without any loss token."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(T) < torch.tensor([9, 7, 4, 9, 6, 0])[:, None]                   # [G, T]
    mask[0, 3:5] = False
    old = -2 * torch.rand(G, T, generator=g)                                             # [G, T]
    drift = torch.tensor([1e-4, 0.02, 0.3, 0.8, 0.6, 0.5])                               # [G]
    new = old + drift[:, None] * torch.randn(G, T, generator=g)                          # [G, T]
    ids = torch.randint(len(WORDS), (G, T), generator=g)                                 # [G, T]
    ids[0, 0] = 0
    prompt, real = torch.tensor([[3, 4, 0, 5]]), torch.tensor([[False, True, True, True]])
    truncated, texts = torch.zeros(G, dtype=torch.bool), [f"answer {i}" for i in range(G)]
    prompt, real = (x.repeat(G, 1) for x in (prompt, real))
    rollout = Rollout(prompt, real, ids, mask, old + 0.001, truncated, texts, G)
    advantages = torch.tensor([1.2, -1.2, 0.7, -0.7, 1.0, -1.0])                         # [G]
    rewards = (advantages > 0).float()                                                   # [G]
    old_routes, new_routes = (Pass(torch.randint(4, (L, G, T, K), generator=g),
                                   torch.randn(L, G, T, 4, generator=g)) for _ in range(2))
    task = Task("", [], [], None)
    mini = Batch(rollout, [None] * G, rewards[:, None], old, task, (3e-4, 4e-4), advantages,
                 routes=old_routes)
    return mini, Scores(new, None, None, routes=new_routes)


def record(step=1, seed=0, per_token=None, **more):
    """The line of tokens.jsonl of a group, to which features add `more`. per_token [T]: factors of
    its advantages."""
    mini, new = group(seed)
    mini.step = step
    if per_token is not None:
        mini.advantages = mini.advantages[:, None] * per_token                           # [G, T]
    settings = SimpleNamespace(row=OBJECTIVES["gspo"])
    learner = SimpleNamespace(tokenizer=Words(), hooks={"tokens": [lambda rollout: more]},
                              settings=settings)
    errors = dict(zip(mini.rollout.texts, [None, 1, 2, 3, 4, None]))
    mini.task.first_error = lambda text, problem: errors[text]
    return group_record(mini, new, learner)


def factors(seed):
    """Weights per token as --mismatch and --entropy_quantile make them: some are 0."""
    weights = 2 * torch.rand(G, T, generator=torch.Generator().manual_seed(seed))        # [G, T]
    return weights * (weights > 0.6)


def write_run(folder, groups, ranges=(), **settings):
    """A run folder with these groups. ranges: the clip range in the line of each batch."""
    folder.mkdir()
    write(folder / "config.json", json.dumps({
        "algorithm": "gspo", "reduction": "sequence-mean", "epsilon": 3e-4, "epsilon_high": 4e-4,
        "dual_clip": None, "off_policy_mask": None, "max_completion_length": 16, **settings}))
    curve = {"pass_rate": 0.5, "clip_low": 0.1, "clip_high": 0.2, "log_s_var": 1e-4,
             "flip_rate": None}
    jsonl(folder / "tokens.jsonl", groups)
    own = itertools.chain(ranges, itertools.repeat({}))
    jsonl(folder / "metrics.jsonl",
          [{"step": group["step"], **curve, **one} for group, one in zip(groups, own)])
    return folder


def write_page(*runs):
    """The page of runs, in the first one's folder."""
    view.write_page(runs)
    return runs[0] / "view.html"


# -------------------------------------------------------------------------------- what a run saves

def test_a_record_holds_a_group_each_answer_cut_at_its_last_loss_token():
    mini, new = group()
    saved = record(step=3)
    assert (saved["step"], saved["prompt"]) == (3, Words().decode([4, 0, 5]))
    assert [len(row) for row in saved["mask"]] == [9, 7, 4, 9, 6, 9], "none: shown whole"
    assert saved["mask"][0] == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    for i in range(G):
        n = len(saved["mask"][i])
        ids = mini.rollout.response_ids[i, :n].tolist()
        assert saved["tokens"][i] == [WORDS[j] for j in ids]
        for name, x in (("old_logp", mini.old_logp), ("new_logp", new.logp)):
            torch.testing.assert_close(torch.tensor(saved[name][i]), x[i, :n], atol=1e-7, rtol=0)
        assert saved["old_experts"][i] == mini.routes.indices[:, i, :n].tolist()
        assert saved["new_experts"][i] == new.routes.indices[:, i, :n].tolist()
    assert saved["advantages"] == pytest.approx(mini.advantages.tolist())
    assert saved["rewards"] == mini.rewards.tolist()
    assert record(per_token=torch.arange(T))["advantages"][1][1:] == pytest.approx(
        [-1.2 * t for t in range(1, 7)])


def test_a_run_saves_a_live_group_per_batch_and_a_resumed_one_saves_the_same(run):
    records = run("--steps 3 --save_steps 1", folder="whole")
    saved = read_json("whole/tokens.jsonl")
    assert [group["step"] for group in saved] == [1, 2, 3]
    for group, record in zip(saved, records):
        assert len(group["rewards"]) == 4 and group["tokens"][0][-1] == "<eos>"
        assert {len(x) for x in group["old_experts"]} == {1} and "router_shift" in group
        live = any(group["advantages"])
        assert live or record["zero_variance_groups"] >= 0.5          # 2 of 4 groups are in `mini`
        for error, reward in zip(group["first_error"], group["rewards"]):
            assert (error is None) == (reward == 1)          # the built-in verifier's own words
    shutil.copytree("whole", "run")
    shutil.rmtree("run/checkpoints/step_3")
    run("--resume")
    assert read_json("run/tokens.jsonl") == saved


# -------------------------------------------------------------------------------- the file

def shown_runs(page):
    """The data of the runs in a page."""
    found = re.findall(r"<(style|script)\b[^>]*>(.*?)</\1>", page.read_text(encoding="utf-8"), re.S)
    assert [tag for tag, _ in found] == ["style", "script", "script"]
    assert "<" not in found[1][1]
    records = map(json.loads, found[1][1].splitlines())
    return [record for record in records if "groups" in record]


def test_hostile_text_stays_data_and_numbers_that_are_not_finite_become_null(tmp_path, capsys):
    steps = range(1, view.LARGEST + 10)                      # more than are shown
    groups = [record() | {"step": step, "new_logp": [[math.nan]]} for step in steps]
    main(["view", str(write_run(tmp_path / "run", groups))])
    page = tmp_path / "run/view.html"
    assert str(page) in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert not re.search("<img|<link|https://", html) and html.count("<script") == 2
    assert "http://" not in html.replace("http://www.w3.org/", "")
    [run] = shown_runs(page)
    assert HOSTILE in str(run["groups"][0]["tokens"]) and run["groups"][0]["new_logp"] == [[None]]
    assert [group["step"] for group in run["groups"]] == [*steps][::2]


# -------------------------------------------------------------------------------- in a browser

@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs: batches 1 to 3 of one, 2 and 3 of the other, whose name is an attack too."""
    folder = tmp_path_factory.mktemp("runs")
    gspo = write_run(folder / "gspo", [record(step, seed=step) for step in (1, 2, 3)],
                     off_policy_mask=0.002)
    other = write_run(folder / "<img src=x onerror=alert(1)>",
                      [record(step, seed=step + 9, factors=factors(step)) for step in (2, 3)],
                      algorithm="grpo",
                      reduction="token-mean", epsilon=0.2, epsilon_high=0.2, dual_clip=1.5)
    return write_page(gspo, other)


class Page:
    """A page in the browser: js("return …", argument, …) is what a script returns."""

    def __init__(self, browser):
        self.browser, self.js = browser, browser.execute_script
        self.find = lambda css: browser.find_element("css selector", css)

    def open(self, page):
        self.browser.get(page.as_uri())

    def press(self, keys):
        from selenium.webdriver.common.action_chains import ActionChains
        ActionChains(self.browser).send_keys(keys).perform()

    def says(self, panel=0):
        """(objective, batch, epsilon, epsilon_high) of a panel."""
        return self.js("const p = state.panels[arguments[0]];"
                       "return [p.name, state.step, p.epsilon, p.epsilonHigh]", panel)

    def tokens(self, panel=0):
        """[(push, removed, struck, id)] of a panel's tokens, answer by answer."""
        return self.js(
            "return [...document.querySelectorAll('.panel')[arguments[0]]"
            ".querySelectorAll('.token')].map(t => [Number(t.dataset.push), t.dataset.removed,"
            " t.classList.contains('struck'), t.classList.contains('tool') && t.id])", panel)

    def compare(self, group, run, panel=0):
        """Compare what a panel shows with policy_loss: its tokens, which are returned, and the
        statistics of the loss, too."""
        name, _, epsilon, epsilon_high = self.says(panel)
        push, struck, stats = reference(group, name, epsilon, epsilon_high, run)
        tokens = self.tokens(panel)
        assert [t[0] for t in tokens] == pytest.approx(push, rel=1e-6, abs=1e-12), name
        if OBJECTIVES[name].clip != "tv-two-sided":          # there, they are still pulled
            assert [t[2] for t in tokens] == struck, name
        return tokens, stats

    def compare_all(self, names, group):
        """Compare what the first panel shows of these objectives."""
        for name in names:
            self.js("choose(0, arguments[0]); redraw()", name)
            self.compare(group, {"dual_clip": None, "off_policy_mask": None, "objective": ""})

    def usable(self):
        """The objectives that the first run's list offers."""
        return self.js("return usable(RUNS[0])")


@pytest.fixture
def page(browser, two_runs):
    """The page of two runs, open. Afterwards: no error, nothing blocked or loaded."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page = Page(browser)
    page.open(two_runs)
    yield page
    assert browser.get_log("browser") == []


@pytest.fixture
def show(page, tmp_path):
    """show(groups, flag=value) opens the page of one run with these groups."""
    def opened(groups, *ranges, **arguments):
        page.open(write_page(write_run(tmp_path / "run", groups, *ranges, **arguments)))
    return opened


def padded(rows, fill=0.0):
    """Lists of numbers -> [G, T] float64."""
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def reference(group, name, epsilon, epsilon_high, run):
    """(push, struck, stats) of every saved token by autograd through policy_loss, in float64."""
    mask, old = padded(group["mask"]).bool(), padded(group["old_logp"])                  # [G, T]
    new = padded(group["new_logp"]).requires_grad_()                                     # [G, T]
    A = group["advantages"]
    A = padded(A) if isinstance(A[0], list) else torch.tensor(A, dtype=torch.float64)  # [G], [G, T]
    row, own = OBJECTIVES[name], name == run["objective"]
    weighted = padded(group["factors"]) if "factors" in group else None                  # [G, T]
    varying = with_options(
        name, off_policy_mask=run["off_policy_mask"],
        dual_clip=run["dual_clip"] if (row.ratio, row.clip) == ("token", "min") else None)
    loss, stats = policy_loss(
        varying, new, old, A, mask, epsilon=epsilon, epsilon_high=epsilon_high,
        weights=token_weights(mask, run["reduction"]).double() if own else None,
        group_size=len(A), max_length=16, factors=weighted,
        router_shift=padded(group["router_shift"], 1.0) if row.ratio == "log-shifted" else None)
    push = -torch.autograd.grad(loss, new)[0]                                            # [G, T]
    struck = (push == 0) & mask & ((A if A.dim() == 2 else A[:, None]) != 0)             # [G, T]
    flat = lambda x: [value for values, saved in zip(x.tolist(), group["mask"])
                      for value in values[:len(saved)]]
    return flat(push), flat(struck), stats


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_struck_tokens_and_weights_are_those_of_policy_loss(page, two_runs, name):
    seen = set()
    if name not in page.usable():
        assert not OBJECTIVES[name].source, f"{name} is published: losses.js must know it"
        pytest.skip(f"losses.js does not know {name}, and the page says so")
    for step in (2, 3):
        page.js("RUNS.forEach((_, p) => choose(p, arguments[0])); goTo(arguments[1])", name, step)
        for band in (None, 0.05):                            # its own, and one that is set by hand
            if band and OBJECTIVES[name].epsilon is not None:
                page.js("state.panels.forEach(p => {p.epsilon = p.epsilonHigh = arguments[0]});"
                        "redraw()", band)
            for panel, run in enumerate(shown_runs(two_runs)):
                group = next(group for group in run["groups"] if group["step"] == step)
                tokens, stats = page.compare(group, run, panel)
                for side in ("low", "high"):
                    removed = float(stats[f"clip_{side}"] * stats["tokens"])
                    assert sum(t[1] == side for t in tokens) == round(removed)
                seen |= {t[1] for t in tokens}
    assert seen >= {"", "low"}                               # low: off_policy_mask
    assert "high" in seen or OBJECTIVES[name].clip not in ("min", "log-min", "tv", "kl")


@pytest.mark.slow
def test_a_clip_that_the_page_does_not_know_is_named_and_not_drawn(page, show, monkeypatch):
    mine = OBJECTIVES | {"mine": replace(OBJECTIVES["grpo"], clip="soft", source="")}
    monkeypatch.setattr(view, "OBJECTIVES", mine)
    monkeypatch.setitem(view.ALGORITHMS, "mine", {"objective": "mine"})
    show([record(1)], algorithm="mine", epsilon=0.2, epsilon_high=0.2)
    assert "mine" not in page.usable() and page.says()[0] == "grpo"
    said = page.find(".unknown").text
    assert "cannot show mine" in said and '"soft"' in said and "shows grpo" in said


@pytest.mark.slow
def test_with_advantages_per_token_only_ratios_per_token_are_offered(page, show):
    group = record(per_token=torch.arange(T) > 2)
    show([group], algorithm="gspo_token")
    names = page.usable()
    assert {"gspo_token", "grpo"} <= set(names) and not {"gspo", "gmpo", "vespo"} & set(names)
    page.compare_all(("gspo_token", "grpo", "cispo"), group)
    page.press("g")
    assert page.says()[0] == "gspo_token"


@pytest.mark.slow
def test_a_batch_is_shown_with_its_own_clip_range_and_the_constants_of_the_run(page, show):
    """An end that is null is open."""
    show([record(1), record(2)], [{"epsilon": .1, "epsilon_high": .2},
                                  {"epsilon": .3, "epsilon_high": None}], constants={"c": 3})
    page.js("goTo(1)")
    assert page.says() == ["gspo", 1, .1, .2]
    assert page.js("return state.panels[0].row.constants") == {"c": 3}
    page.press("n")
    assert page.js("return state.panels[0].epsilonHigh === Infinity") and page.says()[2] == .3


@pytest.mark.slow
def test_one_key_turns_grpo_into_gspo_and_others_move_through_the_run(page):
    theme = lambda: page.js("return document.documentElement.dataset.theme")
    assert [page.says(panel)[0] for panel in (0, 1)] == ["gspo", "grpo"]
    page.press("g")
    name, step, before, _ = page.says()
    assert name == "grpo" and page.says(1) == ["gspo", step, 3e-4, 4e-4]
    page.press("]")
    assert page.says()[2] == pytest.approx(1.5 * before)
    page.press("r")
    assert page.says()[2] == before
    page.press("pppp")
    assert page.says()[1] == 1
    assert "saved no tokens of batch 1" in page.find(".panel + .panel").text
    page.press("n")
    assert page.says()[1] == 2
    page.press("a")
    assert page.says()[0] == page.find("#objective0").get_attribute("value") != "grpo"
    page.press("e")
    assert page.js("return document.querySelectorAll('.layers').length") == 2 * G
    before = theme()
    page.press("d")
    assert {before, theme()} == {"dark", "light"}


@pytest.mark.slow
def test_a_hostile_answer_is_shown_and_not_run(page):
    assert page.js("return document.title") == "What does the clip remove?"
    assert page.js("return document.images.length") == 0
    assert HOSTILE in page.find(".panel .box").text.replace("␣", " ")
    assert "onerror=alert(1)" in page.find("#run1").text


EDGES = ("const box = document.querySelector(arguments[0]).getBoundingClientRect();"
         "return [box.top, box.bottom]")


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(390, 844), (1400, 900)])
def test_the_page_fits_a_phone_and_a_desk(page, browser, width, height):
    """The run's first token is on the screen below its title, the tokens to drag come after it, and
    nothing is under the bar at the bottom, which describes a token in up to six lines."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700})
    browser.refresh()
    assert page.js("return document.querySelector('.page').scrollWidth") <= width
    assert page.js(EDGES, ".handle")[0] > page.js(EDGES, "#panels")[1]
    assert 0 < page.js(EDGES, ".answer .token")[0] - page.js(EDGES, "header h1")[0] < 0.8 * height
    page.js("document.querySelector('.answer .token').focus()")
    bar, scrolled = (page.js(EDGES, name) for name in (".inspector", ".page"))
    assert scrolled[1] <= bar[0] + 0.5 and bar[1] <= height + 0.5


FIVE = ("grpo", "gspo", "gspo_token", "gmpo", "cispo")


def check_texts(page, name, group, push, struck):
    """The text of a token that is not struck through is the weight by which autograd multiplies Â
    and the reduction."""
    texts = page.js("return [...document.querySelectorAll(`[data-name=${arguments[0]}]`)]"
                    ".map(x => x.textContent)", name)
    mask, A = padded(group["mask"]), group["advantages"]                             # [G, T]
    A = padded(A) if isinstance(A[0], list) else torch.tensor(A)[:, None] * mask     # [G, T]
    weights = token_weights(mask.bool(), OBJECTIVES[name].reduction, group_size=len(A),
                            max_length=16).double()
    scales = (A * weights)[mask.bool()].tolist()             # in the order of the texts
    for text, pushed, cut, scale in zip(texts, push, struck, scales, strict=True):
        assert text == "·" if not scale else cut or float(text) == pytest.approx(
            pushed / scale, abs=0.0051), name


def drag(page, token, by):
    """Move a token of the first section by so many pixels, with the mouse."""
    from selenium.webdriver.common.action_chains import ActionChains
    handle = page.browser.find_element("id", token)
    actions = ActionChains(page.browser).move_to_element(handle).click_and_hold()
    actions.move_by_offset(0, by).release().perform()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["paper", "wide"])
def test_a_dragged_token_changes_the_weights_as_policy_loss_does(page, chosen):
    """By mouse and by keyboard; every row of every response against autograd."""
    before = page.js("return dragged.logw[0][0]")
    drag(page, "drag0-0", -18)
    assert page.js("return dragged.logw[0][0]") == pytest.approx(before + 0.3, abs=0.03)
    drag(page, "drag1-4", 12)
    page.press("\ue013")                                     # the arrow up: 0.01 more
    assert page.js("return dragged.logw[1][4]") == pytest.approx(-0.3 - 0.2 + 0.01, abs=0.03)
    page.js("const list = document.getElementById('dragrange'); list.value = arguments[0];"
            "list.dispatchEvent(new Event('change'))", chosen)
    ranges = {"gspo": page.js("return GSPO_RANGES[arguments[0]]", chosen)}
    ranges["gspo_token"] = ranges["gspo"]
    for name in FIVE:
        group = page.js("return preparedGroup(arguments[0])", name == "gspo_token")
        shown = page.js("return [...document.querySelectorAll(`[data-name=${arguments[0]}]`)]"
                        ".map(x => [Number(x.dataset.push), x.dataset.removed !== ''])", name)
        push, struck, _ = reference(group, name, *ranges.get(name, (None, None)),
                                    {"dual_clip": None, "off_policy_mask": None, "objective": ""})
        assert [x for x, _ in shown] == pytest.approx(push, rel=1e-6, abs=1e-12), name
        assert [x for _, x in shown] == struck, name
        check_texts(page, name, group, push, struck)
    grpo = page.js("return [...document.querySelectorAll('.grid .place')].map(x => x.textContent)")
    assert all("s " not in text[:2] for text in grpo if "0.8" in text)   # a range of w, not of s


# -------------------------------------------------------------------------------- the challenges

CHALLENGES = {                           # how to solve each: token, to which log w
    0: [("drag0-0", 0.26), ("drag0-7", -0.6)], 1: [("drag0-7", -0.31)],
    2: [("drag1-4", -0.2)], 3: [("drag3-1", -0.21)]}


def solved(page):
    return page.js("return CHALLENGES.map(one => Boolean(one.done))")


def move_by_mouse(page, token, logw):
    at = page.js("const [i, t] = arguments[0].slice(4).split('-');"
                 "document.getElementById(arguments[0]).scrollIntoView({block: 'center'});"
                 "return dragged.logw[i][t]", token)
    drag(page, token, round((at - logw) * 60))


@pytest.mark.slow
def test_a_challenge_is_solved_by_moves_and_not_by_its_beginning(page):
    for k, moves in CHALLENGES.items():
        page.js("document.getElementById(`challenge${arguments[0]}`).click()", k)
        assert solved(page) == [j < k for j in range(4)], "not by its beginning"
        for token, logw in moves:
            move_by_mouse(page, token, logw)
        assert solved(page) == [j <= k for j in range(4)], k
    assert "4 of 4 solved" in page.find("#solved").text

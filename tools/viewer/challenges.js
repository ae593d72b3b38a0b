// Questions to the first section that the page checks itself, by what losses.js makes of the tokens.
// `range` is the clip range of GSPO that a question fixes.

const removedBy = (name, i) => weighDragged(name, i).map(result => Boolean(result.removed));
const dropsAll = (name, i) => removedBy(name, i).every(Boolean);
const CHALLENGES = [
  {text: "Response 1: GRPO drops two tokens or more, GSPO keeps the response.", range: "paper",
   solved: () => count(removedBy("grpo", 0).map(Number)) >= 2 && !dropsAll("gspo", 0)},
  {text: "Response 1: a token at log w +0.25 or more, and GSPO keeps the response.", range: "paper",
   solved: () => Math.max(...dragged.logw[0]) >= 0.25 && !dropsAll("gspo", 0)},
  {text: "Response 2: GSPO drops it, GRPO none of its tokens.", range: "wide",
   solved: () => dropsAll("gspo", 1) && !removedBy("grpo", 1).includes(true)},
  {text: "Response 4: GSPO-token drops turn 2 and nothing else.", range: "paper",
   solved: () => removedBy("gspo_token", 3).every((gone, t) => gone === (t >= START[3].turns))},
];
let chosen = null;                 // the challenge that was begun last

function buildChallenges() {
  CHALLENGES.forEach((one, k) => {
    const button = make("button", "challenge", "", make("li", "", null, byId("challenges")));
    button.id = `challenge${k}`;
    button.type = "button";
    button.addEventListener("click", () => {
      chosen = k;
      dragged.range = byId("dragrange").value = one.range;
      byId("dragreset").click();
    });
  });
}

// Solved is what was begun and whose tokens and range now fit; it stays solved.
function checkChallenges() {
  const one = CHALLENGES[chosen];
  if (one && dragged.range === one.range && one.solved()) one.done = true;
  CHALLENGES.forEach((each, k) => {
    const button = byId(`challenge${k}`);
    const range = {"paper": "the paper's range", "wide": "range 0.03 / 0.04"}[each.range];
    button.textContent = `${each.done ? "☑" : "☐"} ${each.text} (${range})`;
    button.setAttribute("aria-pressed", k === chosen);
  });
  const done = CHALLENGES.filter(each => each.done).length;
  const said = one ? (one.done ? "Solved. " : "Begun: drag, or use the arrow keys. ") : "";
  const status = `${said}${done} of ${CHALLENGES.length} solved`;
  if (byId("solved").textContent !== status) byId("solved").textContent = status;
}

buildChallenges();
checkChallenges();

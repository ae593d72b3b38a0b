// Questions to the first section that the page checks itself, by what losses.js makes of the tokens,
// all with the paper's clip range.

const removedBy = (name, i) => weighDragged(name, i).map(result => Boolean(result.removed));
const dropsAll = (name, i) => removedBy(name, i).every(Boolean);
const CHALLENGES = [
  {text: "Response 1: GRPO drops two tokens or more, GSPO keeps the response.",
   solved: () => count(removedBy("grpo", 0).map(Number)) >= 2 && !dropsAll("gspo", 0)},
  {text: "Response 1: a token at log w +0.25 or more, and GSPO keeps the response.",
   solved: () => Math.max(...dragged.logw[0]) >= 0.25 && !dropsAll("gspo", 0)},
  {text: "Response 2: GSPO drops it, GRPO none of its tokens.",
   solved: () => dropsAll("gspo", 1) && !removedBy("grpo", 1).includes(true)},
  {text: "Response 4: GSPO-token drops turn 2 and nothing else.",
   solved: () => removedBy("gspo_token", 3).every((gone, t) => gone === (t >= START[3].turns))},
];
let chosen = null;                 // the challenge that was begun last

function buildChallenges() {
  CHALLENGES.forEach((_, k) => {
    const button = make("button", "challenge", "", make("li", "", null, byId("challenges")));
    button.id = `challenge${k}`;
    button.type = "button";
    button.addEventListener("click", () => {
      chosen = k;
      dragged.range = byId("dragrange").value = "paper";
      byId("dragreset").click();
    });
  });
}

// Solved is what was begun and whose tokens and range now fit; it stays solved.
function checkChallenges() {
  const one = CHALLENGES[chosen];
  if (one && dragged.range === "paper" && one.solved()) one.done = true;
  CHALLENGES.forEach((each, k) => {
    const button = byId(`challenge${k}`);
    button.textContent = `${each.done ? "☑" : "☐"} ${each.text}`;
    button.setAttribute("aria-pressed", k === chosen);
  });
  const done = CHALLENGES.filter(each => each.done).length;
  const said = one ? (one.done ? "Solved. " : "Not yet. ") : "";
  const status = `${said}${done} of ${CHALLENGES.length} solved`;
  if (byId("solved").textContent !== status) byId("solved").textContent = status;
}

buildChallenges();
checkChallenges();

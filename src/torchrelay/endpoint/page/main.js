// The loop: ask what goes on, show it, ask again.

const EVERY = 1000;
let knownSteps = "";
let shownState = "";
let timer = 0;

function options(id, steps, chosen) {
  byId(id).replaceChildren(...[...steps].reverse().map((step) => h("option", { value: step }, step)));
  byId(id).value = String(chosen);
}

async function takeSteps(status) {
  const { steps } = await ask("/page/steps.json");
  if (!steps.length || steps.join() === knownSteps) return;
  knownSteps = steps.join();
  const newest = steps[steps.length - 1];
  options("before", steps, steps[Math.max(0, steps.length - 2)]);
  options("after", steps, newest);
  byId("compare").disabled = steps.length < 2;
  if (steps.includes(state.pinned)) {
    options("tree-step", steps, state.pinned);
    return;
  }
  state.pinned = null;
  options("tree-step", steps, newest);
  // The tree of the next step is nearly always the same: it is fetched again if its size differs.
  const facts = (status.steps || []).find((one) => one.step === newest);
  const shape = facts ? `${facts.tensors}/${facts.bytes}` : String(newest);
  if (shape !== shownState) {
    shownState = shape;
    await loadTree(newest);
  } else {
    state.step = newest;
  }
}

async function look() {
  clearTimeout(timer);
  try {
    const status = await ask("/status.json");
    byId("where").textContent = status.url || "";
    showSummary(status);
    showSteps(status);
    showTransfers(status);
    showGraph(status);
    showStalls(status);
    connected(true, "live");
    await takeSteps(status);
  } catch (fault) {
    if (fault instanceof Refused) {
      connected(false, "token needed");
      askForToken(fault.message);
      return;
    }
    connected(false, "no answer: trying again");
  }
  timer = setTimeout(look, document.hidden ? 5 * EVERY : EVERY);
}

function connected(on, word) {
  byId("dot").className = on ? "dot on" : "dot off";
  byId("connection").textContent = word;
  document.body.classList.toggle("stale", !on);
}

watchDoor(look);
watchTree();
watchChanges();
document.addEventListener("visibilitychange", () => { if (!document.hidden && !byId("door").open) look(); });
look();

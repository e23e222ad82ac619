// What two steps do not have in common: paths, shapes, and which tensors have other bytes.

let changesList;

function changeRow(one) {
  return h("div", { class: "row" },
    h("span", { class: `mark ${one.mark}` }, { added: "+", removed: "−", changed: "~", maybe: "?" }[one.mark]),
    h("span", { class: "name", title: one.path }, one.path),
    h("span", { class: "shape" }, one.what));
}

async function compareSteps() {
  const [before, after] = [byId("before").value, byId("after").value];
  const said = byId("changes-totals");
  byId("compare").disabled = true;
  said.textContent = "comparing …";
  try {
    const found = await ask(`/page/changes.json?before=${before}&after=${after}`, 60);
    changesList.set([
      ...found.added.map((path) => ({ mark: "added", path, what: "added" })),
      ...found.removed.map((path) => ({ mark: "removed", path, what: "removed" })),
      ...found.changed.map((one) => ({ mark: "changed", path: one.path, what: `${one.before} → ${one.after}` })),
      ...found.touched.filter((row) => row[2]).map(([path, share]) => (
        { mark: "changed", path, what: share >= 1 ? "other values" : `other values in at most ${Math.ceil(100 * share)} % of its bytes` })),
      ...found.touched.filter((row) => !row[2]).map(([path]) => (
        { mark: "maybe", path, what: "perhaps other values: it shares a chunk with others" })),
    ]);
    const values = `${plural(found.touched.filter((row) => row[2]).length, "tensor")} with other values, ${found.same.toLocaleString("en")} with the same`;
    said.textContent = `${found.added.length} added, ${found.removed.length} removed, ${found.changed.length} changed; ${values}`;
  } catch (fault) {
    said.textContent = fault.message;
    changesList.set([]);
  }
  byId("compare").disabled = false;
}

function watchChanges() {
  changesList = new LongList("changes", changeRow);
  byId("compare").addEventListener("click", compareSteps);
}

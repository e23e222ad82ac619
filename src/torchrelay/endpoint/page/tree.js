// The state's paths as a tree with sizes, and what is in a tensor.

const state = { root: null, open: new Set(), chosen: null, at: null, step: null, pinned: null, asked: 0 };
let treeList;

function branch(name, path) {
  return { name, path, below: new Map(), bytes: 0, tensors: 0, leaf: null, text: null };
}

function grow(tree) {
  const root = branch("", "");
  const at = (path, size, count) => {
    let here = root;
    here.bytes += size; here.tensors += count;
    let upto = "";
    for (const part of path.split(".")) {
      upto = upto ? `${upto}.${part}` : part;
      if (!here.below.has(part)) here.below.set(part, branch(part, upto));
      here = here.below.get(part);
      here.bytes += size; here.tensors += count;
    }
    return here;
  };
  for (const [name, dtype, shape, size, ranks] of tree.tensors) {
    at(name, size, 1).leaf = { name, dtype, shape, size, ranks };
  }
  for (const [path, text] of tree.values) at(path, 0, 0).text = text;
  for (const [path, tensor] of tree.aliases) at(path, 0, 0).text = `= ${tensor}`;
  return root;
}

function visibleRows(wanted) {
  const rows = [];
  const walk = (node, depth) => {
    for (let child of node.below.values()) {
      let name = child.name;
      while (!child.leaf && child.text === null && child.below.size === 1) {
        child = child.below.values().next().value;
        name += `.${child.name}`;
      }
      if (wanted && !wanted.has(child)) continue;
      rows.push({ node: child, name, depth });
      if (child.below.size && (wanted || state.open.has(child.path))) walk(child, depth + 1);
    }
  };
  walk(state.root, 0);
  return rows;
}

function matchingNodes(text) {
  const found = new Set();
  const walk = (node) => {
    let hit = (node.leaf || node.text !== null) && node.path.toLowerCase().includes(text);
    for (const child of node.below.values()) hit = walk(child) || hit;
    if (hit) found.add(node);
    return hit;
  };
  walk(state.root);
  return found;
}

function drawTree() {
  if (!state.root) return;
  const text = byId("filter").value.trim().toLowerCase();
  treeList.set(visibleRows(text ? matchingNodes(text) : null));
}

function treeRow({ node, name, depth }) {
  const isLeaf = node.leaf !== null;
  const weight = h("i");
  weight.style.width = `${state.root.bytes ? (100 * node.bytes) / state.root.bytes : 0}%`;
  const opened = state.open.has(node.path) || byId("filter").value.trim() !== "";
  const row = h("div", {
    class: `row ${isLeaf ? "tensor" : node.below.size ? "group" : "value"}${state.chosen === node.path ? " chosen" : ""}${state.at === node.path ? " at" : ""}`,
    id: state.at === node.path ? "tree-at" : null, "aria-selected": String(state.chosen === node.path),
    role: "treeitem", "aria-level": depth + 1, "aria-expanded": node.below.size ? String(opened) : null,
    onclick: () => { state.at = node.path; if (isLeaf) choose(node); else toggle(node); } },
    h("span", { class: "twist" }, node.below.size ? (opened ? "▾" : "▸") : ""),
    h("span", { class: "name", title: node.path }, name),
    isLeaf ? h("span", { class: "kind" }, node.leaf.dtype) : null,
    h("span", { class: "shape" }, isLeaf ? node.leaf.shape.join("×") || "()" : node.text !== null ? node.text : node.tensors ? plural(node.tensors, "tensor") : ""),
    node.tensors ? h("span", { class: "size" }, bytes(node.bytes)) : null,
    node.tensors ? h("span", { class: "weight" }, weight) : null);
  row.style.paddingLeft = `${10 + depth * 16}px`;
  return row;
}

function toggle(node) {
  if (!node.below.size) return;
  if (!state.open.delete(node.path)) state.open.add(node.path);
  drawTree();
}

// Arrow keys go along the rows, and in and out of groups; Enter is a click.
function walkTree(event) {
  const rows = treeList.rows;
  const place = rows.findIndex(({ node }) => node.path === state.at);
  const row = rows[place];
  const opened = row && row.node.below.size && state.open.has(row.node.path);
  let next = place;
  if (event.key === "ArrowDown") next = place + 1;
  else if (event.key === "ArrowUp") next = place < 0 ? 0 : place - 1;
  else if (event.key === "Home") next = 0;
  else if (event.key === "End") next = rows.length - 1;
  else if (event.key === "ArrowRight" && row && row.node.below.size) { if (opened) next = place + 1; else toggle(row.node); }
  else if (event.key === "ArrowLeft" && row) {
    if (opened) toggle(row.node);
    else while (next > 0 && rows[next].depth >= row.depth) next -= 1;
  } else if ((event.key === "Enter" || event.key === " ") && row) { if (row.node.leaf) choose(row.node); else toggle(row.node); }
  else return;
  event.preventDefault();
  next = Math.max(0, Math.min(rows.length - 1, next));
  if (rows[next]) { state.at = rows[next].node.path; treeList.reveal(next); }
}

async function loadTree(step) {
  const asked = (state.asked += 1);
  state.step = step;
  let tree;
  try {
    tree = await ask(`/page/tree.json?step=${step}`, 60);
  } catch (fault) {
    if (asked === state.asked) byId("tree-totals").textContent = `Step ${step} cannot be shown: ${fault.message}`;
    return;
  }
  if (asked !== state.asked) return;
  state.root = grow(tree);
  if (!state.open.size) for (const child of state.root.below.values()) if (state.root.tensors <= 300 || state.root.below.size < 3) state.open.add(child.path);
  byId("tree-totals").textContent = `${plural(tree.tensors.length, "tensor")}, ${bytes(state.root.bytes)}`;
  drawTree();
}

async function choose(node) {
  state.chosen = node.path;
  drawTree();
  const step = state.step;
  const leaf = node.leaf;
  const head = [h("h3", {}, leaf.name),
    h("div", { class: "small" }, `${leaf.dtype} · ${leaf.shape.join("×") || "()"} · ${bytes(leaf.size)}${ranksOf(leaf.ranks)}`)];
  show("detail", ...head, muted("Reading its values …"));
  let found;
  try {
    found = await ask(`/page/histogram.json?step=${step}&tensor=${encodeURIComponent(leaf.name)}`, 120);
  } catch (fault) {
    if (state.chosen === node.path) show("detail", ...head, h("p", { class: "why" }, fault.message));
    return;
  }
  if (state.chosen !== node.path) return;
  show("detail", ...head, found.counts ? histogramOf(found) : muted("Elements of this dtype are no numbers."), factsOf(found, step));
}

const ranksOf = (ranks) => (ranks.length > 1 ? ` · on ranks ${ranks.join(", ")}` : ranks.length ? ` · on rank ${ranks[0]}` : "");

function histogramOf(found) {
  const [width, height] = [360, 150];
  const top = Math.max(...found.counts, 1);
  const each = width / found.counts.length;
  const step = (found.high - found.low) / found.counts.length;
  const sticks = found.counts.map((count, place) => {
    // The square root keeps rare values in sight.
    const tall = count ? Math.max(1.5, Math.sqrt(count / top) * 118) : 0;
    return s("rect", { class: "stick", x: place * each, y: 122 - tall, width: Math.max(0.6, each - 1), height: tall },
      s("title", {}, `${number(found.low + place * step)} to ${number(found.low + (place + 1) * step)}: ${plural(count, "element")}`));
  });
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Histogram of its values" },
    s("line", { class: "axis", x1: 0, x2: width, y1: 122.5, y2: 122.5 }), sticks,
    s("text", { x: 0, y: 140 }, number(found.low)),
    s("text", { x: width, y: 140, "text-anchor": "end" }, number(found.high)));
}

function factsOf(found, step) {
  const row = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  const rows = [row("step", step), row("elements", found.elements.toLocaleString("en"))];
  if (found.counts) {
    rows.push(row("norm", number(found.norm)), row("mean", number(found.mean)), row("min", number(found.min)),
      row("max", number(found.max)), row("zeros", found.zeros.toLocaleString("en")),
      row("NaN", found.nan.toLocaleString("en")), row("infinite", found.inf.toLocaleString("en")));
  }
  return h("dl", { class: "facts" }, ...rows.flat());
}

function watchTree() {
  treeList = new LongList("tree", treeRow);
  byId("tree").addEventListener("keydown", walkTree);
  byId("filter").addEventListener("input", drawTree);
  byId("tree-step").addEventListener("change", () => {
    state.pinned = Number(byId("tree-step").value);
    loadTree(state.pinned);
  });
}

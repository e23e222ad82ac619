// Who has the state and who is reading it, as a small graph: ranks left, seeds between, readers right.

const MOST = 24;

function column(items, x, height) {
  return items.map((item, place) => ({ ...item, x, y: ((place + 0.5) * height) / items.length }));
}

function showGraph(status) {
  const ranks = status.ranks && status.ranks.length ? status.ranks : status.url ? [status.url] : [];
  const seeds = (status.seeds || []).slice(0, MOST);
  const readers = new Map();
  for (const one of status.transfers) {
    const known = readers.get(one.reader) || { name: one.address || "?", rate: 0, share: 0 };
    known.rate += one.rate;
    known.share = one.total ? one.bytes / one.total : 0;
    readers.set(one.reader, known);
  }
  const shown = [...readers.values()].slice(0, MOST);
  if (!ranks.length) {
    show("graph", muted("No endpoint is being watched."));
    return;
  }
  const tallest = Math.max(Math.min(ranks.length, MOST), seeds.length, shown.length, 3);
  const [width, height] = [widthOf("graph"), Math.max(190, tallest * 46)];
  const short = (url) => url.replace(/^https?:\/\//, "");
  const left = column(ranks.slice(0, MOST).map((url, rank) => ({ kind: "trainer", name: short(url), rank })), width * 0.15, height);
  const middle = column(seeds.map((seed) => ({ kind: "seed", name: short(seed.url), share: seed.of ? seed.chunks / seed.of : 1 })), width * 0.5, height);
  const right = column(shown.map((one) => ({ kind: "reader", ...one })), width * 0.85, height);
  const link = (from, to, moving) => s("path", {
    class: moving ? "link moving" : "link", "stroke-width": moving ? 2.2 : 1.4,
    d: `M${from.x} ${from.y} C${(from.x + to.x) / 2} ${from.y} ${(from.x + to.x) / 2} ${to.y} ${to.x} ${to.y}` });
  const links = [];
  for (const rank of left) {
    for (const seed of middle) links.push(link(rank, seed, seed.share < 1));
    for (const reader of right) links.push(link(rank, reader, reader.rate > 0));
  }
  for (const seed of middle) for (const reader of right) links.push(link(seed, reader, false));
  const node = (one, label, below) => s("g", { class: `node ${one.kind}` },
    s("circle", { cx: one.x, cy: one.y, r: 11 }),
    s("text", { class: "strong", x: one.x, y: one.y + 4, "text-anchor": "middle" }, one.kind === "trainer" ? one.rank : ""),
    s("text", { x: one.x, y: one.y + 25, "text-anchor": "middle" }, label.slice(0, 26)),
    below ? s("text", { x: one.x, y: one.y - 16, "text-anchor": "middle" }, below) : null);
  const nodes = [
    ...left.map((one) => node(one, one.name)),
    ...middle.map((one) => node(one, one.name, one.share < 1 ? `${Math.floor(100 * one.share)} %` : "")),
    ...right.map((one) => node(one, one.name, one.rate ? `${bytes(one.rate)}/s` : `${Math.floor(100 * one.share)} %`)),
  ];
  const more = readers.size > MOST ? `, ${MOST} of them shown` : "";
  show("graph",
    s("svg", { class: "net", viewBox: `0 -12 ${width} ${height + 24}`, role: "img", "aria-label": "Readers and seeds" }, links, nodes),
    h("div", { class: "small" },
      `${plural(ranks.length, "rank")}, ${plural(seeds.length, "seed")}, ${plural(readers.size, "reader")}${more}`));
}

// Elements and words. Text from a state or a peer only ever becomes a text node.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) {
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return element;
}

const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

function show(id, ...children) {
  byId(id).replaceChildren(...children.flat().filter((child) => child !== null));
}

// Charts are drawn as wide as their card, so that their words stay readable on a phone.
const widthOf = (id) => Math.max(280, byId(id).clientWidth);
const muted = (text) => h("p", { class: "muted" }, text);

function bytes(count) {
  if (count < 1000) return `${count} B`;
  let unit = -1;
  do { count /= 1000; unit += 1; } while (count >= 999.5 && unit < 5);
  return `${count < 9.95 ? count.toFixed(1) : count.toFixed(0)} ${"kMGTPE"[unit]}B`;
}

function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 59.5) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  if (seconds < 3570) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86000) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const ago = (time, now) => `${duration(Math.max(0, now - time))} ago`;
const number = (value) => (value === null || value === undefined ? "–" : Number(value).toPrecision(5).replace(/\.?0+(e|$)/, "$1"));
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const compared = (one, other) => (one < other ? -1 : one > other ? 1 : 0);

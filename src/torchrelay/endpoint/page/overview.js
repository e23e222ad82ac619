// What is at a glance: figures, which steps are where, transfers, stalls.

function showSummary(status) {
  const rate = status.transfers.reduce((sum, one) => sum + one.rate, 0);
  const failed = status.failures || 0;
  const known = [...(status.steps || []), ...(status.disk || []).flatMap((disk) => disk.steps)];
  const newest = known.find((one) => one.step === status.step);
  const tile = (value, label, bad) =>
    h("div", { class: bad ? "tile bad" : "tile" }, h("b", {}, value), h("span", {}, label));
  show("summary",
    tile(status.step ?? "–", "newest step"),
    tile(newest ? bytes(newest.bytes) : "–", newest && newest.tensors ? plural(newest.tensors, "tensor") : "state"),
    tile(status.readers ?? 0, status.readers === 1 ? "reader" : "readers"),
    tile(rate ? `${bytes(rate)}/s` : "0", "going out"),
    tile(failed, "failed transfers", failed > 0));
}

function showSteps(status) {
  const places = [];
  const chip = (kind, step, ...words) =>
    h("span", { class: `chip ${kind}` }, h("b", {}, step), words.filter(Boolean).join(" · "));
  const place = (kind, name, chips) => places.push(
    h("div", { class: "place" }, h("h3", {}, kind),
      h("div", {}, h("div", { class: "name" }, name),
        h("div", { class: "chips" }, chips.length ? chips : h("span", { class: "muted" }, "nothing yet")))));
  if (status.steps) {
    const ranks = status.ranks && status.ranks.length > 1 ? ` and ${plural(status.ranks.length - 1, "other rank")}` : "";
    place("live", `${status.url}${ranks}`, status.steps.map((one) => chip("live", one.step,
      bytes(one.bytes), ago(one.shown, status.now), one.readers ? plural(one.readers, "reader") : "")));
  }
  for (const seed of status.seeds || []) {
    const share = seed.of ? seed.chunks / seed.of : 1;
    place("peer", seed.url, [chip("peer", seed.step, share < 1 ? `${Math.floor(100 * share)} %` : "whole")]);
  }
  for (const disk of status.disk || []) {
    place("disk", disk.url, disk.steps.map((one) => one.damage || one.unread
      ? chip("bad", one.step, one.damage ? `damaged: ${one.damage}` : `not checked: ${one.unread}`)
      : chip("disk", one.step, bytes(one.bytes), one.time ? ago(one.time, status.now) : "")));
  }
  show("steps", places.length ? places : muted("No step is there yet."));
}

const shortReader = (one) => one.agent || one.reader.slice(0, 8);

function runningTransfer(one, now) {
  const share = one.total ? Math.min(1, one.bytes / one.total) : 0;
  const left = share >= 1 ? "finishing" : one.rate > 0 ? `${duration((one.total - one.bytes) / one.rate)} left` : "waiting";
  const bar = h("div", { class: "fill" });
  bar.style.width = `${(100 * share).toFixed(1)}%`;
  return h("div", { class: "transfer running" },
    h("div", { class: "line" },
      h("span", {}, h("b", {}, one.address || "?"), ` takes step ${one.step}`),
      h("span", {}, `${bytes(one.rate)}/s · ${left}`)),
    h("div", { class: "track", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100 }, bar),
    h("div", { class: "line small" },
      h("span", {}, `${bytes(one.bytes)} of ${bytes(one.total)}`),
      h("span", {}, `${shortReader(one)} · ${one.kind} · since ${duration(now - one.begun)}`)));
}

function endedTransfer(one, now) {
  const failed = one.outcome !== "done";
  return h("div", { class: `transfer ${failed ? "failed" : "done"}` },
    h("div", { class: "line" },
      h("span", {}, h("span", { class: failed ? "tag failed" : "tag" }, failed ? "failed" : "done"),
        " ", h("b", {}, one.address || "?"), ` step ${one.step}`),
      h("span", { class: "small" }, `${bytes(one.bytes)} in ${duration(one.ended - one.begun)}, ${ago(one.ended, now)}`)),
    failed ? h("div", { class: "why" }, one.reason || "The reason is not known.") : null);
}

function some(all, most, make, nothing) {
  if (!all.length) return [muted(nothing)];
  const more = all.length - most;
  return [...all.slice(0, most).map(make), more > 0 ? muted(`and ${more} more`) : null];
}

function showTransfers(status) {
  const running = [...status.transfers].sort((one, other) => one.begun - other.begun);
  show("transfers", some(running, 50, (one) => runningTransfer(one, status.now), "Nobody is reading."));
  const ended = [...(status.finished || [])].sort((one, other) => other.ended - one.ended);
  show("finished", some(ended, 12, (one) => endedTransfer(one, status.now), "None yet."));
}

function showStalls(status) {
  const all = (status.publishes || []).slice(-200);
  if (!all.length) {
    show("stalls", muted("No publish has been timed here. An endpoint shows for how long each one stops training."));
    return;
  }
  const [width, height, low] = [widthOf("stalls"), 150, 124];
  const top = Math.max(...all.map((one) => one.stage_seconds), 1e-6);
  const each = Math.min(26, width / all.length);
  const sticks = all.map((one, place) => {
    const tall = one.skipped ? 5 : Math.max(2, (one.stage_seconds / top) * 104);
    const what = one.skipped
      ? `step ${one.step} was skipped: ${one.skipped}`
      : `step ${one.step}: training stood still for ${duration(one.stage_seconds)}, digests took ${duration(one.hash_seconds)}`;
    return s("rect", { class: one.skipped ? "stick skipped" : "stick", x: place * each, y: low - tall, rx: 2,
      width: Math.max(1, each - 3), height: tall }, s("title", {}, what));
  });
  const timed = all.filter((one) => !one.skipped).map((one) => one.stage_seconds).sort(compared);
  const middle = timed.length ? duration(timed[timed.length >> 1]) : "–";
  const skipped = all.length - timed.length;
  show("stalls",
    h("div", { class: "line small" },
      h("span", {}, `For how long each of the last ${plural(all.length, "publish").replace("publishs", "publishes")} stopped training: median ${middle}, longest ${duration(top)}`),
      h("span", {}, skipped ? `${skipped} skipped` : "")),
    s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Stalls over time" },
      s("line", { class: "axis", x1: 0, x2: width, y1: low + 0.5, y2: low + 0.5 }), sticks,
      s("text", { x: 0, y: height - 8 }, `step ${all[0].step}`),
      s("text", { x: Math.max(each * all.length, 120), y: height - 8, "text-anchor": "end" }, all.length > 1 ? `step ${all[all.length - 1].step}` : "")));
}

"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const ms = ns => (ns / 1e6).toFixed(2) + " ms";
const seconds = s => s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (1e3 * s).toPrecision(3) + " ms" : (1e6 * s).toPrecision(3) + " us";
const bytes = n => n >= 1e12 ? (n / 1e12).toFixed(2) + " TB" : (n / 1e9).toFixed(1) + " GB";
const percent = (x, digits = 1) => (100 * x).toFixed(digits) + " %";
const escaped = text => String(text).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const make = (name, attributes = {}, parent = null, text = "") => {
  const svg = ["svg", "g", "rect", "line", "text", "circle", "title", "path"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return parent ? parent.appendChild(node) : node;
};

// --- algorithms -----------------------------------------------------------------------------------------------
const [ROWS, COLUMNS] = data.mesh, CELL = 92, CHIP = 64, EDGE = 22;
const state = { time: 0, picked: 5, playing: false, panes: [0, 1] };
const COMPUTE = 0, TALK = 2;
const longest = () => Math.max(...state.panes.map(n => data.runs[n].end));
const union = spans => {
  let busy = 0, until = 0;
  for (const [begin, end] of [...spans].sort((a, b) => a[0] - b[0])) {
    busy += Math.max(0, end - Math.max(begin, until)); until = Math.max(until, end);
  }
  return busy;
};
const computing = (run, rank) => run.ranks[rank].filter(span => span[3] === COMPUTE);
const waited = (run, rank) => run.end - union(computing(run, rank));

class Pane {
  constructor(place) {
    this.place = place;
    const root = make("div", { class: "pane" }, byId("panes"));
    const head = make("h3", {}, root);
    this.select = make("select", { "aria-label": "algorithm" }, head);
    data.runs.forEach((run, n) => make("option", { value: n }, this.select, run.title));
    this.note = make("span", { class: "quiet" }, head);
    this.idea = make("p", { class: "idea" }, root);
    const size = COLUMNS * CELL + 2 * EDGE - (CELL - CHIP), tall = ROWS * CELL + 2 * EDGE - (CELL - CHIP);
    this.chips = make("svg", { class: "chips", viewBox: `0 0 ${size} ${tall}`, role: "img", "aria-label": "the chips and their links" }, root);
    this.links = []; this.cells = [];
    for (let row = 0; row < ROWS; row++) for (let column = 0; column < COLUMNS; column++) {
      const x = EDGE + column * CELL, y = EDGE + row * CELL, mid = CHIP / 2;
      for (const [axis, stubs] of [["col", column === 0], ["row", row === 0]]) {
        const lines = axis === "col" ? [[x + CHIP, y + mid, x + (column < COLUMNS - 1 ? CELL : CHIP + 16), y + mid]]
          : [[x + mid, y + CHIP, x + mid, y + (row < ROWS - 1 ? CELL : CHIP + 16)]];
        if (stubs) lines.push(axis === "col" ? [x - 16, y + mid, x, y + mid] : [x + mid, y - 16, x + mid, y]);
        for (const [x1, y1, x2, y2] of lines)
          this.links.push([row * COLUMNS + column, axis, make("line", { class: "link", x1, y1, x2, y2 }, this.chips)]);
      }
    }
    for (let rank = 0; rank < ROWS * COLUMNS; rank++) {
      const x = EDGE + (rank % COLUMNS) * CELL, y = EDGE + Math.floor(rank / COLUMNS) * CELL;
      const chip = make("g", { class: "chip", transform: `translate(${x} ${y})`, tabindex: 0, role: "button", "aria-label": `chip ${rank}` }, this.chips);
      make("rect", { class: "ground", width: CHIP, height: CHIP, rx: 6 }, chip);
      const done = make("rect", { class: "done", width: CHIP, height: 0, rx: 6 }, chip);
      make("rect", { class: "ring", x: -5, y: -5, width: CHIP + 10, height: CHIP + 10, rx: 9 }, chip);
      const share = make("text", { x: CHIP / 2, y: CHIP / 2 }, chip), word = make("text", { class: "state", x: CHIP / 2, y: CHIP / 2 + 18 }, chip);
      chip.onclick = () => { state.picked = rank; compare(); draw(); };
      chip.onkeydown = event => { if (event.key === "Enter") chip.onclick(); };
      this.cells.push({ chip, done, share, word });
    }
    this.lanes = make("svg", { class: "lanes", role: "img", "aria-label": "the lanes of the picked chip" }, root);
    const more = make("details", innerWidth > 900 ? { open: "" } : {}, root); // else it would part the two pictures
    make("summary", {}, more, "the program, and where the picked chip is in it");
    this.text = make("pre", { class: "program" }, more);
    this.select.onchange = () => { state.panes[this.place] = Number(this.select.value); lay(); };
  }
  lay() {
    this.run = data.runs[state.panes[this.place]];
    this.select.value = state.panes[this.place];
    this.note.textContent = `${this.run.config.replace(/^S=1$/, "whole")}: ${ms(this.run.end)}`;
    this.idea.textContent = this.run.idea;
    this.text.replaceChildren(...this.run.text.map(line => make("span", {}, null, line || " ")));
    this.rank = -1;
  }
  layLanes() {
    const run = this.run, left = 78, width = 600, scale = (width - left - 8) / longest();
    const lanes = run.lanes.map((name, n) => [name, n]).sort((a, b) => (b[0] === "compute") - (a[0] === "compute"));
    this.lanes.setAttribute("viewBox", `0 0 ${width} ${22 * lanes.length + 8}`);
    this.lanes.replaceChildren();
    this.boxes = [];
    lanes.forEach(([name, n], row) => {
      make("text", { x: left - 8, y: 22 * row + 15, "text-anchor": "end" }, this.lanes, name);
      make("rect", { class: "empty", x: left, y: 22 * row + 2, width: run.end * scale, height: 18 }, this.lanes);
      for (const span of run.ranks[state.picked].filter(span => span[2] === n)) {
        const box = make("rect", { class: "a" + span[3], x: left + span[0] * scale, y: 22 * row + 2, width: Math.max(1, (span[1] - span[0]) * scale - .6), height: 18 }, this.lanes);
        make("title", {}, box, `${run.names[span[4]]}: ${ms(span[0])} to ${ms(span[1])}`);
        this.boxes.push([span, box]);
      }
    });
    this.cursor = make("line", { class: "cursor", y1: 0, y2: 22 * lanes.length + 4 }, this.lanes);
    this.at = time => left + Math.min(time, longest()) * scale;
    this.rank = state.picked;
  }
  draw() {
    const run = this.run, time = Math.min(state.time, run.end);
    if (this.rank !== state.picked) this.layLanes();
    const talking = [];
    this.cells.forEach((cell, rank) => {
      const spans = run.ranks[rank], now = spans.filter(span => span[0] <= time && time < span[1]);
      talking[rank] = now.filter(span => span[3] === TALK).map(span => run.lanes[span[2]].slice(0, 3));
      const products = spans.filter(span => span[3] === COMPUTE), all = union(products);
      const share = union(products.filter(s => s[0] < time).map(s => [s[0], Math.min(s[1], time)])) / all;
      const busy = now.some(span => span[3] === COMPUTE), over = share > .9999;
      cell.done.setAttribute("height", CHIP * share); cell.done.setAttribute("y", CHIP * (1 - share));
      cell.chip.setAttribute("class", `chip ${busy ? "busy" : over ? "over" : "idle"} ${rank === state.picked ? "picked" : ""}`);
      cell.share.textContent = percent(share, 0);
      cell.word.textContent = busy ? "multiplies" : over ? "done" : "waits";
    });
    for (const [rank, axis, line] of this.links) line.classList.toggle("on", (talking[rank] || []).includes(axis));
    this.chips.style.setProperty("--dash", -(state.time / 4e4) % 1000);
    this.cursor.setAttribute("x1", this.at(state.time)); this.cursor.setAttribute("x2", this.at(state.time));
    const lines = new Map();
    for (const [span, box] of this.boxes) {
      const on = span[0] <= time && time < span[1];
      box.classList.toggle("now", on);
      if (on) lines.set(span[5], span[3]);
    }
    [...this.text.children].forEach((line, n) => { line.className = lines.has(n) ? "a" + lines.get(n) : ""; });
  }
}
const panes = state.panes.map((_, place) => new Pane(place));
const compare = () => {
  const [a, b] = [...panes].map(pane => pane.run).sort((x, y) => x.end - y.end);
  byId("versus").textContent = a === b ? `${a.title} beside itself: choose another.` :
    `${a.title} ends after ${ms(a.end)}: the picked chip multiplies all but ${ms(waited(a, state.picked))} of it. ` +
    `${b.title} takes ${ms(b.end)}, and the chip waits ${ms(waited(b, state.picked))} for what moves.`;
};
const lay = () => { panes.forEach(pane => pane.lay()); compare(); draw(); };
const draw = () => {
  state.time = Math.max(0, Math.min(state.time, longest()));
  byId("time").value = 1000 * state.time / longest();
  byId("clock").textContent = ms(state.time);
  byId("play").textContent = state.playing ? "stop" : "play";
  panes.forEach(pane => pane.draw());
};
const step = way => {
  const times = [...new Set(panes.flatMap(pane => pane.run.ranks[state.picked].flatMap(span => [span[0], span[1]])))].sort((a, b) => a - b);
  const next = way > 0 ? times.find(t => t > state.time + 1) : times.reverse().find(t => t < state.time - 1);
  state.playing = false; state.time = next ?? (way > 0 ? longest() : 0); draw();
};
const PLAY_MS = 10000;
let last = 0;
const tick = now => {
  if (!state.playing) return;
  state.time += (now - last) / PLAY_MS * longest(); last = now;
  if (state.time >= longest()) state.playing = false;
  draw(); requestAnimationFrame(tick);
};
const play = () => {
  state.playing = !state.playing;
  if (state.playing) { if (state.time >= longest()) state.time = 0; last = performance.now(); requestAnimationFrame(tick); }
  draw();
};
byId("back").onclick = () => step(-1); byId("next").onclick = () => step(1); byId("play").onclick = play;
byId("time").oninput = event => { state.playing = false; state.time = event.target.value / 1000 * longest(); draw(); };
byId("player").onkeydown = event => {
  if (event.target.id === "time") return;
  if (event.key === "ArrowLeft") step(-1); else if (event.key === "ArrowRight") step(1); else return;
  event.preventDefault();
};
state.time = .3 * longest(); lay();

// --- a plot with a tip ----------------------------------------------------------------------------------------
const tipOf = root => {
  const tip = make("div", { class: "tip", hidden: "" }, root);
  return (html, event) => {
    tip.hidden = !html; if (!html) return;
    tip.innerHTML = html;
    const box = root.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    tip.style.left = Math.max(0, Math.min(x + 12, box.width - tip.offsetWidth - 4)) + "px"; tip.style.top = y + 14 + "px";
  };
};

// --- plans ----------------------------------------------------------------------------------------------------
const stack = (amounts, colours, whole) => `<div class="stack">${Object.entries(colours).filter(([name]) => amounts[name] > 0).map(([name, [title, colour]]) =>
  `<span title="${title}: ${percent(amounts[name] / whole)}" style="width:${100 * amounts[name] / whole}%;background:${colour}"></span>`).join("")}</div>`;
const kinds = Object.fromEntries(Object.entries(data.kinds).map(([name, colour]) => [name, [name, colour]]));
const keysOf = (colours, used) => `<div class="keys">${Object.entries(colours).filter(([name]) => used(name)).map(([, [title, colour]]) =>
  `<span><span class="key" style="background:${colour}"></span>${title}</span>`).join("")}</div>`;
const models = [...new Set(data.plans.map(pair => pair.model))], clusters = [...new Set(data.plans.map(pair => pair.cluster))];
const grid = byId("grid");
grid.innerHTML = `<thead><tr><th class="l">model</th><th>chips</th>${clusters.map(name => `<th>${name}</th>`).join("")}</tr></thead>`;
const body = make("tbody", {}, grid), buttons = [];
for (const model of models) {
  const row = make("tr", {}, body), first = data.plans.find(pair => pair.model === model);
  make("td", { class: "l" }, row, model); make("td", {}, row, String(first.chips));
  for (const cluster of clusters) {
    const pair = data.plans.find(each => each.model === model && each.cluster === cluster);
    const button = make("button", { type: "button" }, make("td", {}, row), pair.rows ? percent(pair.rows[0].mfu) + (pair.unmeasured ? " *" : "") : "none");
    if (pair.rows) button.style.background = `color-mix(in srgb, var(--compute) ${Math.round(90 * pair.rows[0].mfu)}%, var(--ground))`;
    else button.className = "none";
    button.onclick = () => showPlan(pair, button);
    buttons.push(button);
  }
}
const answers = lines => {
  let html = "";
  for (const line of lines.filter(line => line.trim())) {
    const [, name, text] = line.match(/^(\S+(?: \S+)*?)  +(.*)$/) ?? (line.startsWith(" ") ? [null, "", line.trim()] : [null, "note", line]);
    html += name ? `${html ? "</dd>" : ""}<dt>${escaped(name)}</dt><dd>${escaped(text)}` : `<br>${escaped(text)}`;
  }
  return `<dl class="answer">${html}</dd></dl>`;
};
const showPlan = (pair, button) => {
  for (const each of buttons) each.setAttribute("aria-pressed", each === button);
  const root = byId("plan"), rows = pair.rows ?? [];
  const title = `<h3>${pair.model} on ${pair.chips} chips of ${pair.cluster}: ${pair.batch} sequences of ${pair.sequence} tokens</h3>`;
  if (!rows.length) { root.innerHTML = `${title}<p>${escaped(pair.refused)}</p>`; return; }
  const slowest = Math.max(...rows.map(row => row.step_s)), shown = rows.slice(0, 12);
  const used = name => shown.some(row => row.parts[name] > 0), memory = Math.max(pair.limit, ...shown.map(row => row.memory));
  const line = (row, bar, text) => `<div class="rank"><span>${escaped(row.text)}</span>${bar}<span>${text}</span></div>`;
  root.innerHTML = `${title}${answers(pair.summary.slice(1))}<h3>Time of a step, and MFU</h3>
    ${shown.map(row => line(row, stack(row.parts, data.parts, slowest), `${seconds(row.step_s)}, ${percent(row.mfu)}`)).join("")}
    ${keysOf(data.parts, used)}<h3>Memory of the fullest chip, of ${bytes(pair.limit)} that may be used</h3>
    ${shown.slice(0, 6).map(row => line(row, stack(row.kinds, kinds, memory), bytes(row.memory))).join("")}
    ${keysOf(kinds, name => shown.some(row => row.kinds[name] > 0))}`;
};
showPlan(data.plans.find(pair => pair.model === "llama-3-70b" && pair.cluster === "dgx-h100") ?? data.plans[0],
  buttons[data.plans.findIndex(pair => pair.model === "llama-3-70b" && pair.cluster === "dgx-h100")] ?? buttons[0]);

// --- published runs -------------------------------------------------------------------------------------------
const LOW = /mxfp8|fp8|nvfp4|int8/i;
for (const run of data.published) {
  run.kind = run.experts ? 2 : LOW.test(run.config) ? 1 : 0;
  run.count = Number.parseInt(run.chips, 10) || 1;
  run.chip = run.chips.replace(/^\d+\s*/, "").replace(/^(DGX|HGX|SXM)[- ]/, "") || "not stated";
}
const KINDS = ["16 bits", "products below 16 bits", "experts"];
const filter = { source: "", chip: "", kind: "", text: "" }, filters = byId("filters");
const choose = (name, values) => {
  const select = make("select", { "aria-label": name }, filters);
  make("option", { value: "" }, select, `any ${name}`);
  for (const [value, text] of values) make("option", { value }, select, text);
  select.onchange = () => { filter[name] = select.value; showRuns(); };
};
const distinct = of => [...new Set(data.published.map(of))].sort().map(value => [value, value]);
choose("source", distinct(run => run.source)); choose("chip", distinct(run => run.chip)); choose("kind", KINDS.map((name, n) => [String(n), name]));
const search = make("input", { type: "search", placeholder: "model or words", "aria-label": "model or words" }, filters);
search.oninput = () => { filter.text = search.value.toLowerCase(); showRuns(); };
const scatter = byId("scatter"), tip = tipOf(scatter);
let all = false, order = ["error", -1];
byId("more").onclick = () => { all = !all; showRuns(); };
const degrees = run => ["dp", "pp", "tp", "cp", "ep"].filter(name => run[name]).map(name => `${name} ${run[name]}`).join(" ");
const words = run => `<b>${escaped(run.model)} on ${escaped(run.chips)}</b>${escaped([degrees(run), run.gbs && `batch ${run.gbs}${run.seq ? ` x ${run.seq}` : ""}`,
  run.config].filter(Boolean).join(", "))}<br>${escaped(run.metric)}: published ${run.value}${run.error === null ? ", not predicted" :
  `, predicted ${predicted(run)} (${run.error > 0 ? "+" : ""}${percent(run.error)})`}<br><span class="quiet">${escaped(run.source)}</span>`;
const predicted = run => Number((run.value * (1 + run.error)).toPrecision(4));
const median = values => { const sorted = [...values].sort((a, b) => a - b), n = sorted.length; return n ? (sorted[Math.floor((n - 1) / 2)] + sorted[Math.ceil((n - 1) / 2)]) / 2 : 0; };
const MOST = .6;
const showRuns = () => {
  const rows = data.published.filter(run => (!filter.source || run.source === filter.source) && (!filter.chip || run.chip === filter.chip)
    && (!filter.kind || String(run.kind) === filter.kind) && (!filter.text || `${run.model} ${run.config} ${run.source} ${run.chips}`.toLowerCase().includes(filter.text)));
  const scored = rows.filter(run => run.error !== null), sizes = scored.map(run => Math.abs(run.error));
  byId("score").innerHTML = `<b>${rows.length}</b> runs, <b>${scored.length}</b> predicted` + (scored.length ? `: median error <b>${percent(median(sizes))}</b>, `
    + `<b>${percent(sizes.filter(e => e <= .2).length / scored.length, 0)}</b> within 20 %` : "")
    + KINDS.map((name, n) => `<span class="key k${n}"></span>${name}`).join("");
  const wide = scatter.clientWidth || 900, tall = 320, left = 52, bottom = 34;
  scatter.querySelector("svg")?.remove();
  const svg = make("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": "errors by number of chips" });
  scatter.prepend(svg);
  const x = n => left + 12 + (wide - left - 30) * Math.log2(Math.max(1, n)) / 14, y = error => 10 + (tall - bottom - 10) * (1 - (Math.max(-MOST, Math.min(MOST, error)) + MOST) / (2 * MOST));
  for (const error of [-.6, -.4, -.2, 0, .2, .4, .6]) {
    make("line", { class: error ? "grid" : "here", x1: left, x2: wide, y1: y(error), y2: y(error) }, svg);
    make("text", { x: left - 8, y: y(error) + 4, "text-anchor": "end" }, svg, (error > 0 ? "+" : "") + (100 * error).toFixed(0) + " %");
  }
  for (const n of [1, 8, 64, 512, 4096, 16384]) make("text", { x: x(n), y: tall - 14, "text-anchor": "middle" }, svg, `${n}`);
  make("text", { x: wide - 4, y: tall, "text-anchor": "end" }, svg, "chips");
  for (const run of scored) {
    const dot = make("circle", { class: "k" + run.kind, cx: x(run.count) + (run.line * 7 % 17) - 8, cy: y(run.error), r: 4.5 }, svg);
    dot.onpointerenter = event => tip(words(run), event); dot.onpointerleave = () => tip(""); dot.onclick = event => tip(words(run), event);
  }
  const heads = [["model", run => run.model], ["chips", run => run.count], ["layout", degrees], ["metric", run => run.metric], ["published", run => run.value],
    ["predicted", run => run.error === null ? -1 : run.value * (1 + run.error)], ["error", run => run.error === null ? -1 : Math.abs(run.error)], ["source", run => run.source]];
  const [name, way] = order, key = heads.find(head => head[0] === name)[1];
  const sorted = [...rows].sort((a, b) => way * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
  const list = all ? sorted : sorted.slice(0, 15);
  byId("runs").innerHTML = `<thead><tr>${heads.map(([head]) => `<th class="l"${head === name ? ` aria-sort="${way > 0 ? "ascending" : "descending"}"` : ""}><button type="button">${head}</button></th>`).join("")}</tr></thead><tbody>`
    + list.map(run => `<tr><td class="l">${escaped(run.model)}</td><td>${escaped(run.chips)}</td><td class="l">${escaped(degrees(run))}</td><td class="l">${escaped(run.metric)}</td><td>${run.value}</td>`
    + (run.error === null ? "<td>not predicted</td><td></td>" : `<td>${predicted(run)}</td><td>${run.error > 0 ? "+" : ""}${percent(run.error)}</td>`)
    + `<td class="l">${escaped(run.source)}</td></tr>`).join("") + "</tbody>";
  byId("runs").querySelectorAll("th button").forEach((button, n) => { button.onclick = () => { order = [heads[n][0], order[0] === heads[n][0] ? -order[1] : -1]; showRuns(); }; });
  byId("more").textContent = all ? "fewer rows" : `all ${rows.length} rows`;
};
showRuns();
let wasWide = innerWidth;
addEventListener("resize", () => { if (innerWidth !== wasWide) { wasWide = innerWidth; showRuns(); } });

// The plan of a step: sorted tables, timelines with zoom, and plots. Reads the JSON in #data; loads nothing.
{
const data = JSON.parse(document.getElementById("data").textContent);
const make = (tag, attributes = {}, parent = null, text = "") => {
  const svg = ["svg", "g", "path", "line", "circle", "text", "polyline", "rect"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  parent?.append(element);
  return element;
};
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const digits = value => String(+value.toPrecision(3));
const seconds = s => {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]])
    if (Math.abs(s) >= size || unit === "ns") return s ? digits(s / size) + " " + unit : "0 s";
};
// The colour that a style gives, for canvases, which do not know variables.
const probe = make("span", { hidden: "" }, document.body);
const colour = name => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
const redraws = [];
const redraw = () => redraws.forEach(each => each());
document.documentElement.addEventListener("themechange", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let scrolled = -1e9;
addEventListener("scroll", () => { scrolled = performance.now(); }, { passive: true });

// A box beside the pointer, kept inside of its parent.
const tooltip = parent => {
  const box = make("div", { class: "tip", role: "presentation", hidden: "" }, parent);
  return {
    hide() { box.hidden = true; },
    show(x, y, head, ...lines) {
      box.replaceChildren(make("b", {}, null, head), ...lines.filter(Boolean).map(line => make("div", {}, null, line)));
      box.hidden = false;
      box.style.left = clamp(x + 14, 0, Math.max(0, parent.clientWidth - box.offsetWidth)) + "px";
      box.style.top = (y > box.offsetHeight + 18 ? y - box.offsetHeight - 12 : y + 18) + "px";
    },
  };
};

// Buttons of which one is pressed.
const choices = (parent, names, chosen) => {
  const buttons = names.map((name, number) => {
    const button = make("button", { type: "button", "aria-pressed": String(number === 0) }, parent, name);
    button.onclick = () => {
      buttons.forEach(other => other.setAttribute("aria-pressed", String(other === button)));
      chosen(number);
    };
    return button;
  });
};

// ---- tables
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, column = [...head.parentElement.children].indexOf(head);
  const body = head.closest("table").tBodies[0], up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.children[column].dataset.value ?? row.children[column].textContent;
  const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b);
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
};

// ---- timelines
const AXIS = 24, TALL = 24, THIN = 12, GAP = 3, BETWEEN = 9;
const drawTimelines = root => {
  const bar = make("div", { class: "choices" }, root);
  choices(bar, data.timelines.map(each => each.title), number => { current = number; open(); });
  make("span", { class: "gap" }, bar);
  const tools = [["−", "zoom out", () => zoom(2)], ["+", "zoom in", () => zoom(.5)],
    ["◀", "earlier", () => pan(-.25)], ["▶", "later", () => pan(.25)], ["all", "show all of it", () => open()]];
  for (const [text, name, act] of tools) make("button", { type: "button", "aria-label": name, title: name }, bar, text).onclick = act;
  const frame = make("div", { class: "timeline" }, root), canvas = make("canvas", { tabindex: 0, role: "application" }, frame);
  const tip = tooltip(frame), status = make("p", { class: "quiet status", "aria-live": "polite" }, root);
  const keys = make("div", { class: "keys" }, root), remark = make("p", { class: "quiet" }, root);
  let current = 0, view = [0, 1], selected = null, rows = [], gutter = 0, width = 0;

  const line = () => data.timelines[current];
  const open = () => {
    view = [0, line().end]; selected = null; tip.hide();
    canvas.setAttribute("aria-label", `timeline, ${line().title}: arrows choose an op, plus and minus zoom, shift and arrows move, 0 shows all`);
    const used = new Set(line().lanes.flatMap(lane => lane.spans.map(span => span[2])));
    keys.replaceChildren(...data.kinds.map(([name, paint], kind) => {
      const key = make("span");
      make("span", { class: "key", style: `background:${paint}` }, key);
      key.append(name);
      return used.has(kind) ? key : "";
    }));
    remark.textContent = line().remark;
    status.textContent = `${seconds(line().end)} in all`;
    layout();
  };
  const layout = () => {
    width = frame.clientWidth; gutter = width < 600 ? 58 : 138;
    rows = []; let y = AXIS, group = null;
    for (const lane of line().lanes) {
      const main = lane.name === "computing" || lane.group === "one layer", height = main ? TALL : THIN;
      if (group !== null && lane.group !== group) y += BETWEEN;
      rows.push({ lane, y, height, first: lane.group !== group });
      group = lane.group; y += height + GAP;
    }
    const scale = devicePixelRatio || 1, height = y + 4;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = height + "px";
    draw();
  };
  const xOf = t => gutter + (t - view[0]) / (view[1] - view[0]) * (width - gutter);
  const tOf = x => view[0] + (x - gutter) / (width - gutter) * (view[1] - view[0]);
  const title = span => [data.kinds[span[2]][0], span[4] >= 0 ? `of micro-batch ${span[4]}` : ""].filter(Boolean).join(" ");
  const details = (row, span) => [span[3] >= 0 ? data.names[span[3]] : "", `${row.lane.group}, ${row.lane.name}` + (span[5] >= 0 ? `, stage ${span[5]}` : ""),
    `starts at ${seconds(span[0])}, takes ${seconds(span[1] - span[0])}`];
  const draw = () => {
    const scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
    const [ink, quiet, lane, ground, grid, accent] = ["ink", "quiet", "lane", "ground", "line", "accent"].map(colour);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, canvas.height);
    pen.textBaseline = "middle"; pen.font = "12px system-ui, sans-serif";
    const step = ticks(view[1] - view[0], Math.max(2, (width - gutter) / 90));
    for (let t = Math.ceil(view[0] / step) * step; t <= view[1] * (1 + 1e-12); t += step) {
      pen.fillStyle = grid; pen.fillRect(xOf(t), AXIS - 5, 1, canvas.height);
      const text = seconds(Math.abs(t) < step / 1e6 ? 0 : +t.toPrecision(8)), half = pen.measureText(text).width / 2;
      pen.fillStyle = quiet; pen.textAlign = "center";
      pen.fillText(text, clamp(xOf(t), gutter + half, width - half), 9);
    }
    for (const row of rows) {
      pen.textAlign = "left"; pen.fillStyle = row.first ? ink : quiet;
      const short = row.lane.group.replace("pipeline ", ""), middle = row.y + row.height / 2 + 1;
      if (row.lane.group === "one layer") pen.fillText(row.lane.name, 0, middle);
      else {
        if (row.first) pen.fillText(short, 0, middle);
        if (!row.first && width >= 600) { pen.font = "11px system-ui, sans-serif"; pen.fillText(row.lane.name, 62, middle); pen.font = "12px system-ui, sans-serif"; }
      }
      pen.fillStyle = lane; pen.fillRect(gutter, row.y, width - gutter, row.height);
      pen.save(); pen.beginPath(); pen.rect(gutter, row.y - 1, width - gutter, row.height + 2); pen.clip();
      let last = -1, lastKind = -1;
      for (const span of row.lane.spans) {
        if (span[1] < view[0] || span[0] > view[1]) continue;
        const begin = xOf(span[0]), end = Math.max(xOf(span[1]), begin + .7);
        if (end - begin < 1 && end - last < .7 && span[2] === lastKind) continue;
        last = end; lastKind = span[2];
        pen.fillStyle = data.kinds[span[2]][1];
        pen.fillRect(begin, row.y, end - begin, row.height);
        if (end - begin > 3 && row.height === TALL) { pen.fillStyle = ground; pen.fillRect(end - .8, row.y, .8, row.height); }
        if (row.height === TALL && end - begin > 15) {
          const text = span[4] >= 0 ? String(span[4]) : span[3] >= 0 ? data.names[span[3]] : data.kinds[span[2]][0];
          const left = Math.max(begin, gutter), room = Math.min(end, width) - left;
          if (pen.measureText(text).width + 6 < room) {
            pen.fillStyle = "#fff"; pen.textAlign = "center"; pen.fillText(text, left + room / 2, row.y + row.height / 2 + 1);
          }
        }
      }
      if (selected && selected.row === row) {
        pen.strokeStyle = ink; pen.lineWidth = 2;
        pen.strokeRect(xOf(selected.span[0]), row.y + 1, Math.max(xOf(selected.span[1]) - xOf(selected.span[0]), 2), row.height - 2);
      }
      pen.restore();
    }
    canvas.dataset.begin = view[0]; canvas.dataset.end = view[1];
  };
  const look = (begin, length) => {
    const whole = line().end;
    length = clamp(length, whole * 1e-5, whole);
    begin = clamp(begin, 0, whole - length);
    view = [begin, begin + length];
    draw();
  };
  const zoom = (factor, t = selected ? (selected.span[0] + selected.span[1]) / 2 : (view[0] + view[1]) / 2) => {
    tip.hide();
    look(t - (t - view[0]) * factor, (view[1] - view[0]) * factor);
  };
  const pan = share => { tip.hide(); look(view[0] + share * (view[1] - view[0]), view[1] - view[0]); };
  const under = (x, y) => {
    if (x < gutter) return null;
    const row = rows.find(each => y >= each.y - 1 && y <= each.y + each.height + 1), t = tOf(x);
    if (!row) return null;
    const near = (view[1] - view[0]) / (width - gutter) * 2;
    let best = null;
    for (const span of row.lane.spans) {
      const off = Math.max(span[0] - t, t - span[1], 0), size = span[1] - span[0];
      if (off <= near && (!best || off < best.off || (off === best.off && size <= best.size))) best = { row, span, off, size };
    }
    return best;
  };
  const point = (hit, x, y) => {
    if (!hit) return tip.hide();
    tip.show(x, y, title(hit.span), ...details(hit.row, hit.span));
  };
  const say = hit => { status.textContent = [title(hit.span), ...details(hit.row, hit.span)].filter(Boolean).join(" · "); };

  canvas.addEventListener("wheel", event => {
    const whole = view[1] - view[0] >= line().end;
    if (performance.now() - scrolled < 300 || (whole && event.deltaY > 0 && !event.shiftKey && !event.ctrlKey)) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / width);
    else zoom(Math.exp(clamp(event.deltaY, -250, 250) * (event.ctrlKey ? .008 : .0025)), tOf(Math.max(event.offsetX, gutter)));
  }, { passive: false });

  const fingers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", event => {
    fingers.set(event.pointerId, event.offsetX); moved = 0;
    if (event.pointerType !== "mouse" || event.button === 0) { try { canvas.setPointerCapture(event.pointerId); } catch { /* gone already */ } }
  });
  canvas.addEventListener("pointermove", event => {
    const { offsetX: x, offsetY: y, pointerId: id } = event;
    if (!fingers.has(id)) return point(under(x, y), x, y);
    const from = fingers.get(id), length = view[1] - view[0];
    if (fingers.size === 2) {
      const [other] = [...fingers].find(([each]) => each !== id).slice(1);
      const before = Math.max(Math.abs(from - other), 12), after = Math.max(Math.abs(x - other), 12);
      zoom(before / after, tOf((x + other) / 2));
    } else if (x !== from) {
      tip.hide();
      look(view[0] - (x - from) / (width - gutter) * length, length);
    }
    moved += Math.abs(x - from);
    fingers.set(id, x);
  });
  const lift = event => {
    if (fingers.delete(event.pointerId) && event.type === "pointerup" && moved < 5) {
      selected = under(event.offsetX, event.offsetY);
      if (selected) say(selected);
      point(selected, event.offsetX, event.offsetY);
      draw();
    }
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => tip.hide());
  canvas.addEventListener("dblclick", event => zoom(.25, tOf(event.offsetX)));

  canvas.addEventListener("keydown", event => {
    const choose = (row, span) => {
      selected = { row, span };
      if (span[0] < view[0] || span[1] > view[1]) look((span[0] + span[1] - view[1] + view[0]) / 2, view[1] - view[0]);
      say(selected);
      point(selected, clamp(xOf((span[0] + span[1]) / 2), gutter, width), row.y);
      draw();
    };
    const along = by => {
      if (!selected) return choose(rows[0], rows[0].lane.spans[0]);
      const spans = selected.row.lane.spans;
      choose(selected.row, spans[clamp(spans.indexOf(selected.span) + by, 0, spans.length - 1)]);
    };
    const across = by => {
      if (!selected) return along(0);
      const row = rows[clamp(rows.indexOf(selected.row) + by, 0, rows.length - 1)], middle = selected.span[0];
      choose(row, row.lane.spans.reduce((a, b) => Math.abs(b[0] - middle) < Math.abs(a[0] - middle) ? b : a));
    };
    const act = { "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), "0": open, Home: open, Escape: () => { selected = null; tip.hide(); draw(); },
      ArrowLeft: () => event.shiftKey ? pan(-.25) : along(-1), ArrowRight: () => event.shiftKey ? pan(.25) : along(1),
      ArrowUp: () => across(-1), ArrowDown: () => across(1) }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  canvas.addEventListener("blur", () => tip.hide());
  new ResizeObserver(() => { if (frame.clientWidth !== width) layout(); }).observe(frame);
  redraws.push(draw);
  open();
};
// A step of 1, 2 or 5 times a power of ten, of which `length` has at most `most`.
const ticks = (length, most) => {
  const power = 10 ** Math.floor(Math.log10(length / most));
  return power * [1, 2, 5, 10].find(each => length / (each * power) <= most);
};

// ---- plots: lines and points, with the nearest point under the pointer
const LINES = ["#3b6fb6", "#d9822b", "#2a9d76"];
const plot = root => {
  root.classList.add("plot");
  const svg = make("svg", { tabindex: 0, role: "img" }, root), tip = tooltip(root);
  let shown = [], settings = null, at = -1;
  const render = () => {
    if (!settings) return;
    const { lines, xText, yText, name, here, hereText, log, fromZero, xTicks, xFormat, yFormat } = settings;
    const width = root.clientWidth, height = settings.height ?? 230, left = 58, right = 12, top = 24, bottom = 42;
    const points = lines.flatMap(line => line.points);
    svg.replaceChildren(); shown = [];
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`); svg.setAttribute("height", height);
    svg.setAttribute("aria-label", `${name}: ${yText} over ${xText}; arrows go through the points`);
    if (!points.length) return;
    const kind = log ? Math.log2 : value => value, xs = [...points.map(each => each.x), ...(here === undefined ? [] : [here])].map(kind);
    let [low, high] = [Math.min(...xs), Math.max(...xs)];
    if (high - low < 1e-9 * Math.abs(high) || high === low) [low, high] = [low - 1, high + 1];
    else if (!log) [low, high] = [low - .06 * (high - low), high + .06 * (high - low)];
    const x = value => left + 8 + (kind(value) - low) / (high - low) * (width - left - right - 16);
    const most = Math.max(...points.map(each => each.y)), least = fromZero ? 0 : Math.min(...points.map(each => each.y));
    const step = ticks(Math.max(most - least, most * .02), 5), floor = Math.floor(least / step + 1e-9) * step, roof = Math.ceil(most / step - 1e-9) * step;
    const y = value => height - bottom - (value - floor) / (roof - floor || 1) * (height - top - bottom);
    for (let value = floor; value <= roof + step / 2; value += step) {
      make("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }, svg);
      make("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, svg, yFormat(+value.toPrecision(6)));
    }
    make("text", { x: 0, y: 11 }, svg, yText);
    make("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, svg, xText);
    let free = -1e9;
    const marks = xTicks ?? (log ? [...new Set(points.map(each => each.x))].sort((a, b) => a - b) : steps(low, high, width / 80));
    for (const value of marks) {
      const text = make("text", { x: x(value), y: height - bottom + 17, "text-anchor": "middle" }, svg, xFormat(value));
      const half = text.getComputedTextLength() / 2;
      if (x(value) - half < free + 6) text.remove(); else free = x(value) + half;
    }
    if (here !== undefined) {
      make("line", { class: "here", x1: x(here), x2: x(here), y1: top - 6, y2: height - bottom, "stroke-dasharray": "4 3" }, svg);
      if (hereText) make("text", { x: x(here) - 5, y: top + 4, "text-anchor": "end" }, svg, hereText);
    }
    lines.forEach(line => {
      if (line.joined !== false) make("polyline", { points: line.points.map(each => `${x(each.x)},${y(each.y)}`).join(" "), fill: "none", stroke: line.paint, "stroke-width": 2 }, svg);
      for (const each of line.points) {
        const dot = make("circle", { cx: x(each.x), cy: y(each.y), r: each.big ? 6 : 4, stroke: line.paint, "stroke-width": 2, fill: each.hollow ? "var(--ground)" : line.paint }, svg);
        shown.push({ x: x(each.x), y: y(each.y), dot, each });
      }
    });
    shown.sort((a, b) => a.x - b.x);
    at = -1;
  };
  const choose = number => {
    shown[at]?.dot.setAttribute("r", shown[at].each.big ? 6 : 4);
    at = number;
    if (!shown[at]) return tip.hide();
    shown[at].dot.setAttribute("r", 7);
    tip.show(shown[at].x, shown[at].y, ...shown[at].each.text);
    svg.setAttribute("aria-description", shown[at].each.text.join(", "));
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1, least = 60 ** 2;
    shown.forEach((each, number) => { const far = (each.x - px) ** 2 + (each.y - py) ** 2; if (far < least) [best, least] = [number, far]; });
    choose(best);
  });
  svg.addEventListener("pointerleave", () => choose(-1));
  svg.addEventListener("blur", () => choose(-1));
  svg.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(clamp(at + by, 0, shown.length - 1));
  });
  new ResizeObserver(render).observe(root);
  return given => { settings = given; render(); };
};
const steps = (low, high, most) => {
  const step = ticks(high - low, Math.max(2, most)), values = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) values.push(+value.toPrecision(8));
  return values;
};

// ---- curves
const METRICS = [["tokens/s per chip", "tokens/s per chip", 2, v => digits(v), v => Math.round(v) + " tokens/s per chip"],
  ["step time", "seconds a step", 1, v => digits(v), v => seconds(v)],
  ["MFU", "% MFU", 3, v => digits(100 * v), v => (100 * v).toFixed(1) + " % MFU"]];
const drawCurves = root => {
  const bar = make("div", { class: "choices" }, root), keys = make("div", { class: "keys" }, root);
  const plots = make("div", { class: "plots" }, root);
  data.choices.forEach((name, number) => {
    const key = make("span", {}, keys);
    make("span", { class: "key", style: `background:${LINES[number]}` }, key);
    key.append(name);
  });
  const drawn = data.curves.map(curve => {
    const box = make("div", {}, plots);
    make("h3", {}, box, { chips: "over chips", batch: "over the batch", links: "over the rate of links" }[curve.name]);
    return plot(make("div", { id: `curve-${curve.name}` }, box));
  });
  const show = number => data.curves.forEach((curve, place) => {
    const [, yText, index, tick, text] = METRICS[number];
    drawn[place]({
      name: curve.name, xText: curve.xText, yText, here: curve.here, log: true, fromZero: true,
      xFormat: value => curve.name === "links" ? digits(value) + " x" : value.toLocaleString("en"), yFormat: tick,
      lines: curve.lines.map((line, which) => ({ paint: LINES[which], points: line.map(point => ({
        x: point[0], y: point[index], hollow: !point[5], big: point[0] === curve.here,
        text: [text(point[index]), `${point[0].toLocaleString("en")} ${{ chips: "chips", batch: "sequences", links: "x today's rate" }[curve.name]}`,
          ...METRICS.filter((_, other) => other !== number).map(each => each[4](point[each[2]])),
          `${digits(point[4] / 1e9)} GB a chip` + (point[5] ? "" : ", which does not fit"), data.choices[which]],
      })) })),
    });
  });
  choices(bar, METRICS.map(each => each[0]), show);
  show(0);
};

// ---- time against memory
const drawFront = root => {
  const points = data.front.map(([bytes, step, text, front], number) => ({ x: bytes / 1e9, y: step, big: front, hollow: !front, text: [seconds(step), `${digits(bytes / 1e9)} GB a chip`, text] }));
  const front = data.front.flatMap(([, , , on], number) => on ? [points[number]] : []).sort((a, b) => a.x - b.x);
  plot(root)({
    name: "time against memory", xText: "GB of the fullest chip", yText: "seconds a step", here: data.limit / 1e9, hereText: "memory", height: 300,
    xFormat: digits, yFormat: digits,
    lines: [{ paint: LINES[0], points: points.filter(each => each.hollow), joined: false }, { paint: LINES[1], points: front }],
  });
};

if (data.timelines.length) drawTimelines(document.getElementById("timelines"));
if (data.curves.length) drawCurves(document.getElementById("curves"));
if (data.front.length) drawFront(document.getElementById("front"));
}

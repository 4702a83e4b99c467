let chosen = 0;

const rowName = (row) => row.name ?? (data.varied.map((n) => `${data.heads[n]} ${row.settings[n] ?? "–"}`).join(", ") || data.title);

function runLinks(row, parent) {
  row.runs.forEach((name, i) => {
    parent.append(i ? " " : "runs: ");
    element("a", { href: `#run-${name}` }, parent, String(i + 1));
  });
}

function sayRow(box, row) {
  box.replaceChildren();
  element("strong", {}, box, rowName(row));
  element("br", {}, box);
  for (const [name, text] of Object.entries(row.texts)) box.append(`${data.heads[name] ?? name} ${text} · `);
  runLinks(row, box);
}

/* The Pareto plot. */
function pareto() {
  const box = byId("pareto");
  if (!box) return;
  const every = data.rows.map((row, index) => ({ ...row, index })).filter((row) => row.memory);
  const rows = every.filter((row) => row.score !== null).sort((a, b) => a.memory - b.memory);
  const told = every.filter((row) => row.target && row.target.score !== undefined); // run here or not
  const controls = byId("filters"), said = byId("pareto-said"), picked = {};
  const series = [...new Set(every.map((row) => row.series))];
  if (series.length > 1) series.forEach((name, i) => {
    const item = element("span", {}, byId("pareto-series")), { d, color } = looks(i);
    shape("path", { d, style: `fill:${color}` }, shape("svg", { class: "swatch", viewBox: "-7 -7 14 14", "aria-hidden": "true" }, item));
    item.append(name);
  });
  for (const name of data.varied) {
    const values = [...new Set([...rows, ...told].map((row) => row.settings[name] ?? "–"))];
    if (values.length < 2) continue;
    const label = element("label", {}, controls, data.heads[name]);
    const select = element("select", { "data-setting": name }, label);
    for (const value of ["all", ...values]) element("option", { value }, select, value);
    select.addEventListener("change", () => { picked[name] = select.value; filter(); });
  }
  let front = null, frame = null, settle = null;
  function draw() {
    const all = [...rows.map((r) => [r.memory, r.score]), ...told.map((r) => [r.target.memory ?? r.memory, r.target.score])];
    if (!rows.length) { box.textContent = "No run has ended yet."; return; }
    frame = plot(box, { x: range(all.map((p) => p[0] / 1e6), true), y: range(all.map((p) => p[1])), logX: true,
      xLabel: "memory, counted (MB)", yLabel: data.score_label, label: "memory and score of every setting; arrow keys walk through them" });
    front = shape("path", { class: "front" }, frame.svg);
    const point = (row, kind, memory, score, paint, more = {}) => {
      const { d, color } = looks(series.indexOf(row.series));
      return shape("path", { class: kind, d, transform: `translate(${frame.atX(memory / 1e6)} ${frame.atY(score)})`,
        style: `${paint}:${color}`, "data-row": row.index, ...more }, frame.svg);
    };
    const points = [];
    for (const row of told) point(row, "point target", row.target.memory ?? row.memory, row.target.score, "stroke");
    for (const row of rows) {
      const node = point(row, "point", row.memory, row.score, "fill", { "aria-label": `${rowName(row)}: ${row.texts.counted_bytes ?? ""} MB, ${row.texts.score}` });
      points.push({ node, row });
    }
    settle = walkable(points, ({ row }) => sayRow(said, row), ({ row }) => choose(row.index));
    mark();
    filter();
  }
  function filter() {
    const fits = (row) => Object.entries(picked).every(([n, v]) => v === "all" || (row.settings[n] ?? "–") === v);
    for (const node of frame.svg.querySelectorAll(".point")) node.classList.toggle("off", !fits(data.rows[node.dataset.row]));
    let best = -Infinity, path = "";
    const shown = rows.filter(fits).sort((a, b) => a.memory - b.memory || b.score - a.score);
    for (const row of shown) {
      if (row.score <= best) continue;
      const x = frame.atX(row.memory / 1e6), y = frame.atY(row.score);
      path += path ? `H${x}V${y}` : `M${x} ${y}`;
      best = row.score;
    }
    front.setAttribute("d", path && `${path}H${frame.width - frame.right}`);
    settle();
    byId("pareto-count").textContent = `${shown.length} of ${rows.length} settings`;
  }
  if (rows.length) sayRow(said, rows.find((row) => row.index === chosen) ?? rows[0]);
  draw();
  return draw;
}

/* The timeline of one setting's step, and its pie. */
function timeline() {
  const box = byId("timeline");
  if (!box) return;
  const slider = byId("instant"), said = byId("instant-said");
  let frame = null, cursor = null, profile = null, at = [];
  const roles = () => Object.keys(profile.bytes);
  const total = (i) => roles().reduce((sum, role) => sum + profile.bytes[role][i], 0);
  function draw() {
    profile = data.profiles[data.rows[chosen].profile];
    byId("timeline-empty").hidden = Boolean(profile);
    for (const id of ["timeline-box", "pie-box"]) byId(id).hidden = !profile;
    if (!profile) return;
    const count = profile.labels.length;
    at = [...(profile.kept ?? profile.labels.keys()), profile.instants]; // of a long step not every instant is kept
    const behind = data.behind, most = Math.max(profile.peak_bytes, behind?.peak_bytes ?? 0);
    frame = plot(box, { x: [0, profile.instants], y: [0, most * 1.08 / 1e6], whole: true, xLabel: "instant of the step", yLabel: "live memory (MB)",
      label: "live bytes by category at every instant of a training step" });
    const below = new Array(count).fill(0);
    for (const role of roles()) {
      let up = "", down = "";
      profile.bytes[role].forEach((bytes, i) => {
        const [x0, x1] = [frame.atX(at[i]).toFixed(1), frame.atX(at[i + 1]).toFixed(1)];
        down = `L${x1} ${frame.atY(below[i] / 1e6).toFixed(1)}L${x0} ${frame.atY(below[i] / 1e6).toFixed(1)}` + down;
        below[i] += bytes;
        const y = frame.atY(below[i] / 1e6).toFixed(1);
        up += `${i ? "L" : "M"}${x0} ${y}L${x1} ${y}`;
      });
      shape("path", { d: `${up}${down}Z`, style: `fill:var(--${role})`, "data-role": role }, frame.svg);
    }
    if (behind) { // the plain step as a line, from its own start to its own end
      const ends = [...(behind.kept ?? behind.labels.keys()), behind.instants].map((i) => frame.atX(i / behind.instants * profile.instants).toFixed(1));
      const sums = behind.labels.map((_, i) => Object.values(behind.bytes).reduce((sum, bytes) => sum + bytes[i], 0));
      const d = sums.map((bytes, i) => `${i ? "L" : "M"}${ends[i]} ${frame.atY(bytes / 1e6).toFixed(1)}L${ends[i + 1]} ${frame.atY(bytes / 1e6).toFixed(1)}`).join("");
      shape("path", { class: "behind", d, id: "plain" }, frame.svg);
      const place = sums.indexOf(Math.max(...sums)), x = Number(ends[place]), right = x > frame.width / 2;
      shape("text", { x: x + (right ? -6 : 6), y: frame.top + 11, "text-anchor": right ? "end" : "start", id: "plain-label" }, frame.svg, `plain ${size(behind.peak_bytes)}`);
    }
    const peakX = frame.atX(at[profile.peak] + 0.5), late = peakX > frame.width / 2;
    shape("line", { class: "peak", x1: peakX, x2: peakX, y1: frame.top, y2: frame.height - frame.bottom }, frame.svg);
    shape("text", { x: peakX + (late ? -6 : 6), y: frame.top + (behind ? 28 : 11), "text-anchor": late ? "end" : "start", id: "peak-label" }, frame.svg,
      `peak ${size(profile.peak_bytes)}`);
    cursor = shape("line", { class: "cursor", y1: frame.top, y2: frame.height - frame.bottom }, frame.svg);
    for (const kind of ["pointermove", "pointerdown"]) frame.svg.addEventListener(kind, (event) => {
      const box = frame.svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * frame.width / box.width;
      const number = (x - frame.left) / (frame.width - frame.left - frame.right) * profile.instants;
      const i = at.findIndex((next) => next > number) - 1;
      if (i >= 0) { slider.value = i; say(i); }
    });
    slider.max = count - 1;
    slider.value = profile.peak;
    const name = rowName(data.rows[chosen]);
    byId("timeline-title").textContent = name === data.title ? "" : name;
    say(profile.peak);
    live();
    pie();
  }
  function say(i) {
    const x = frame.atX(at[i] + 0.5);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    const [operation, phase, module] = profile.labels[i].map((w) => profile.words[w]);
    const text = `instant ${at[i] + 1} of ${profile.instants}: ${operation.split(".")[1] ?? operation}${module ? ` of ${module}` : ""}, ${phase} · ${size(total(i))}`;
    slider.setAttribute("aria-valuetext", text);
    said.replaceChildren();
    element("strong", {}, said, text);
    const legend = element("div", { class: "legend" }, said);
    for (const role of roles()) {
      const part = element("span", {}, legend);
      element("span", { class: "swatch", style: `background:var(--${role})` }, part);
      part.append(`${words(role)} ${size(profile.bytes[role][i])}`);
    }
  }
  function live() {
    const body = byId("live");
    body.replaceChildren();
    for (const [module, role, bytes] of profile.live) {
      const row = element("tr", {}, body);
      const name = element("td", {}, row);
      (module || "(the model)").replaceAll(".", ".\n").split("\n").forEach((part, i) => name.append(...(i ? [document.createElement("wbr")] : []), part));
      const kind = element("td", {}, row);
      element("span", { class: "swatch", style: `background:var(--${role})` }, kind);
      kind.append(words(role));
      element("td", {}, row, size(bytes));
    }
    if (profile.live_rest_bytes) {
      const row = element("tr", {}, body);
      for (const text of ["others", "", size(profile.live_rest_bytes)]) element("td", {}, row, text);
    }
  }
  function pie() {
    const svg = byId("pie"), body = byId("pie-rows");
    svg.replaceChildren();
    body.replaceChildren();
    let from = 0;
    for (const role of roles()) {
      const bytes = profile.bytes[role][profile.peak];
      if (!bytes) continue;
      const part = bytes / profile.peak_bytes, to = from + part;
      const at = (f) => `${100 + 90 * Math.sin(2 * Math.PI * f)} ${100 - 90 * Math.cos(2 * Math.PI * f)}`;
      const d = part > 0.99999 ? "M100 10A90 90 0 1 1 99.99 10Z" : `M100 100L${at(from)}A90 90 0 ${part > 0.5 ? 1 : 0} 1 ${at(to)}Z`;
      shape("path", { d, style: `fill:var(--${role})`, stroke: "var(--panel)" }, svg);
      from = to;
      const row = element("tr", {}, body);
      const kind = element("td", {}, row);
      element("span", { class: "swatch", style: `background:var(--${role})` }, kind);
      kind.append(words(role));
      element("td", { "data-role": role, "data-bytes": bytes }, row, size(bytes));
      element("td", {}, row, `${(100 * part).toFixed(1)}%`);
    }
  }
  slider.addEventListener("input", () => say(Number(slider.value)));
  byId("to-peak").addEventListener("click", () => { slider.value = profile.peak; say(profile.peak); });
  draw();
  return draw;
}

/* The curves of the chosen setting's runs. */
function curves() {
  const box = byId("curves"), metric = byId("metric");
  if (!box) return;
  function draw() {
    const runs = data.rows[chosen].runs.filter((name) => data.curves[name]);
    const lines = runs.map((name) => [name, data.curves[name].epoch, data.curves[name][metric.value]]).filter(([, , ys]) => ys);
    const legend = byId("curve-names");
    legend.replaceChildren();
    if (!lines.length) { box.textContent = "No curve for this setting."; return; }
    const frame = plot(box, { x: [0, Math.max(...lines.flatMap(([, xs]) => xs)) * 1.02], y: range(lines.flatMap(([, , ys]) => ys)),
      whole: true, xLabel: "epoch", yLabel: words(metric.value), height: 280, label: "curves of the runs of the chosen setting" });
    lines.forEach(([name, xs, ys], i) => {
      const color = colors[i % colors.length];
      const d = xs.map((x, j) => `${j ? "L" : "M"}${frame.atX(x).toFixed(1)} ${frame.atY(ys[j]).toFixed(1)}`).join("");
      shape("path", { class: "curve", d, style: `stroke:${color}`, "data-run": name }, frame.svg);
      if (xs.length === 1) shape("circle", { cx: frame.atX(xs[0]), cy: frame.atY(ys[0]), r: 4, style: `fill:${color}` }, frame.svg);
      const item = element("span", {}, legend);
      element("span", { class: "swatch", style: `background:${color}` }, item);
      element("a", { href: `#run-${name}` }, item, data.curves[name].label);
      item.append(` ${ys[ys.length - 1]}`);
    });
  }
  metric.addEventListener("change", draw);
  draw();
  return draw;
}

/* Predicted beside measured: on the line they are equal. */
function agreement() {
  const box = byId("agreement");
  if (!box) return;
  const said = byId("agreement-said");
  const rows = data.rows.map((row, index) => ({ ...row, index })).filter((row) => row.predicted && row.measured);
  function draw() {
    const ends = range(rows.flatMap((row) => [row.predicted / 1e6, row.measured / 1e6]));
    const frame = plot(box, { x: ends, y: ends, xLabel: "predicted (MB)", yLabel: "measured (MB)", label: "predicted and measured peak of every setting" });
    shape("line", { class: "diagonal", x1: frame.atX(ends[0]), y1: frame.atY(ends[0]), x2: frame.atX(ends[1]), y2: frame.atY(ends[1]) }, frame.svg);
    const points = rows.map((row) => ({ row, node: shape("circle", { class: "point", r: 5, cx: frame.atX(row.predicted / 1e6), cy: frame.atY(row.measured / 1e6),
      style: `fill:${colors[0]}`, "aria-label": `${rowName(row)}: predicted ${size(row.predicted)}, measured ${size(row.measured)}` }, frame.svg) }));
    walkable(points, ({ row }) => {
      said.textContent = `${rowName(row)}: predicted ${size(row.predicted)}, measured ${size(row.measured)} (${(100 * (row.measured / row.predicted - 1)).toFixed(2)}%)`;
    }, ({ row }) => choose(row.index));
  }
  draw();
  return draw;
}

const setting = byId("setting");
if (setting) data.rows.forEach((row, i) => element("option", { value: i }, setting, rowName(row)));
const ofSetting = [timeline(), curves()].filter(Boolean);
const drawn = [pareto(), agreement(), typeof modules === "function" && modules(), ...ofSetting].filter(Boolean);

function mark() {
  for (const node of document.querySelectorAll("#pareto .point")) node.classList.toggle("chosen", Number(node.dataset.row) === chosen);
}

function choose(index) {
  chosen = index;
  if (setting) setting.value = index;
  mark();
  ofSetting.forEach((draw) => draw());
}
if (setting) setting.addEventListener("change", () => choose(Number(setting.value)));

/* Draw all again; the point that had the focus has it afterwards. */
function redraw() {
  const box = document.activeElement.closest("#pareto, #agreement");
  const points = () => [...box.querySelectorAll(".point:not(.target)")];
  const at = box ? points().indexOf(document.activeElement) : -1;
  drawn.forEach((draw) => draw());
  if (at >= 0) points()[at].focus({ preventScroll: true });
}

let wide = window.innerWidth, waiting = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === wide) return;
  wide = window.innerWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(redraw);
});
document.documentElement.dataset.ready = "yes";

"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colours = ["model", "gradient", "forward_activation", "optimizer_state", "transient",
  "backward_activation", "workspace", "input"].map((name) => `var(--${name})`);

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, parent = null, text = null) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function shape(tag, attributes, parent, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

function size(bytes) {
  let unit = "B", shown = bytes;
  for (const next of ["KB", "MB", "GB"]) {
    if (Math.abs(shown) < 999.95 || (unit === "B" && Math.abs(shown) < 1000)) break;
    shown /= 1000;
    unit = next;
  }
  return unit === "B" ? `${bytes} B` : `${shown.toFixed(1)} ${unit}`;
}

const words = (role) => role.replaceAll("_", " ");
const short = (number) => String(Number(number.toPrecision(4)));

/* Round numbers between two ends: 1, 2 and 5 times powers of ten. */
function ticks(low, high, count, log) {
  const found = [];
  if (log) {
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
    return found.filter((t) => t >= low && t <= high);
  }
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
  for (let i = Math.ceil(low / step); i * step <= high + 1e-12; i++) found.push(i * step);
  return found;
}

/* An empty plot with axes in `box`; returns the svg and how to place a value. */
function plot(box, { x, y, xLabel, yLabel, logX = false, height = 320, text = short, label }) {
  box.replaceChildren();
  const width = Math.max(280, box.clientWidth || 640);
  const left = 64, right = 14, top = 14, bottom = 44;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label }, box);
  const place = (value, [low, high], from, to, log) => {
    const f = log ? Math.log10 : (v) => v;
    return from + (to - from) * (high === low ? 0.5 : (f(value) - f(low)) / (f(high) - f(low)));
  };
  const atX = (value) => place(value, x, left, width - right, logX);
  const atY = (value) => place(value, y, height - bottom, top, false);
  for (const tick of ticks(y[0], y[1], 5, false)) {
    shape("line", { class: "grid", x1: left, x2: width - right, y1: atY(tick), y2: atY(tick) }, svg);
    shape("text", { x: left - 6, y: atY(tick) + 4, "text-anchor": "end" }, svg, text(tick));
  }
  let last = -Infinity;
  for (const tick of ticks(x[0], x[1], Math.max(3, width / 110), logX)) {
    shape("line", { class: "grid", x1: atX(tick), x2: atX(tick), y1: top, y2: height - bottom }, svg);
    if (atX(tick) - last < 34 || atX(tick) > width - right - 4) continue;
    last = atX(tick);
    shape("text", { x: last, y: height - bottom + 16, "text-anchor": "middle" }, svg, short(tick));
  }
  shape("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, svg, xLabel);
  shape("text", { x: 12, y: (top + height - bottom) / 2, "text-anchor": "middle",
    transform: `rotate(-90 12 ${(top + height - bottom) / 2})` }, svg, yLabel);
  return { svg, atX, atY, width, height, left, right, top, bottom };
}

/* Both ends with some air; of a log axis by a factor. */
function range(values, log = false, air = 0.06) {
  const low = Math.min(...values), high = Math.max(...values);
  if (log) return [low / 1.2, high * 1.2];
  const more = (high - low || Math.abs(high) || 1) * air;
  return [low - more, high + more];
}

/* Points one can point at, tap, or walk through with the arrow keys; `say` shows one. */
function walkable(points, say, choose) {
  points.forEach(({ node }, index) => {
    node.setAttribute("tabindex", index === 0 ? "0" : "-1");
    node.setAttribute("role", "button");
    for (const event of ["mouseenter", "focus"]) node.addEventListener(event, () => say(points[index]));
    node.addEventListener("click", () => choose(points[index]));
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(points[index]); return; }
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      for (let i = index + step; i >= 0 && i < points.length; i += step) {
        if (points[i].node.classList.contains("off")) continue;
        node.setAttribute("tabindex", "-1");
        points[i].node.setAttribute("tabindex", "0");
        points[i].node.focus();
        return;
      }
    });
  });
}

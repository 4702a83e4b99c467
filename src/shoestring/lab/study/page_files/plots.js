"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colors = ["model", "gradient", "forward_activation", "optimizer_state", "transient",
  "backward_activation", "workspace", "input"].map((name) => `var(--${name})`);

/* What points of a series look like: seven outlines and eight colors, so that 56 differ. */
const outlines = ["M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0Z", "M-5-5H5V5H-5Z", "M0-7L7 0L0 7L-7 0Z", "M0-6.5L6.5 5H-6.5Z",
  "M0 6.5L6.5-5H-6.5Z", "M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z", "M-6.5 0L5-6.5V6.5Z"];
const looks = (i) => ({ d: outlines[i % outlines.length], color: colors[i % colors.length] });

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
const round = (number) => String(Number(number.toPrecision(10)));

/* Round numbers between two ends: 1, 2 and 5 times powers of ten. */
function ticks(low, high, count, log, whole) {
  const found = [];
  if (log) {
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
    const inside = found.filter((t) => t >= low && t <= high);
    if (inside.length > 2) return inside;
    found.length = 0;
  }
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough && (s >= 1 || !whole)) ?? 1;
  for (let i = Math.ceil(low / step); i * step <= high + 1e-12; i++) found.push(i * step);
  return found;
}

/* An empty plot with axes in `box`; returns the svg and how to place a value. */
function plot(box, { x, y, xLabel, yLabel, logX = false, whole = false, height = 320, label }) {
  box.replaceChildren();
  const width = Math.max(280, box.clientWidth || 640);
  const left = 72, right = 14, top = 14, bottom = 44;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label }, box);
  const place = (value, [low, high], from, to, log) => {
    const f = log ? Math.log10 : (v) => v;
    return from + (to - from) * (high === low ? 0.5 : (f(value) - f(low)) / (f(high) - f(low)));
  };
  const atX = (value) => place(value, x, left, width - right, logX);
  const atY = (value) => place(value, y, height - bottom, top, false);
  for (const tick of ticks(y[0], y[1], 7, false)) {
    shape("line", { class: "grid", x1: left, x2: width - right, y1: atY(tick), y2: atY(tick) }, svg);
    shape("text", { x: left - 6, y: atY(tick) + 4, "text-anchor": "end" }, svg, round(tick));
  }
  let last = -Infinity;
  for (const tick of ticks(x[0], x[1], Math.max(4, width / 110), logX, whole)) {
    shape("line", { class: "grid", x1: atX(tick), x2: atX(tick), y1: top, y2: height - bottom }, svg);
    const half = 3.5 * round(tick).length + 2;
    if (atX(tick) - half < last || atX(tick) + half > width) continue;
    last = atX(tick) + half + 6;
    shape("text", { x: atX(tick), y: height - bottom + 16, "text-anchor": "middle" }, svg, round(tick));
  }
  shape("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, svg, xLabel);
  shape("text", { x: 18, y: (top + height - bottom) / 2, "text-anchor": "middle",
    transform: `rotate(-90 18 ${(top + height - bottom) / 2})` }, svg, yLabel);
  return { svg, atX, atY, width, height, left, right, top, bottom };
}

/* Both ends with some air; of a log axis by a factor. */
function range(values, log = false, air = 0.06) {
  const low = Math.min(...values), high = Math.max(...values);
  if (log) return [low / 1.2, high * 1.2];
  const more = (high - low || Math.abs(high) || 1) * air;
  return [low - more, high + more];
}

/* Points one can point at, tap near, or walk through with the arrow keys; `say` shows one.
   Tab reaches the one last shown; the returned function sees to that after some were hidden. */
function walkable(points, say, choose) {
  const shown = () => points.filter(({ node }) => !node.classList.contains("off"));
  const reach = (point) => points.forEach(({ node }) => node.setAttribute("tabindex", node === point.node ? "0" : "-1"));
  for (const point of points) {
    const { node } = point;
    node.setAttribute("role", "button");
    node.addEventListener("mouseenter", () => say(point));
    node.addEventListener("focus", () => { reach(point); say(point); });
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(point); return; }
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const all = shown();
      all[all.indexOf(point) + step]?.node.focus();
    });
  }
  points[0]?.node.ownerSVGElement.addEventListener("click", (event) => {
    const far = ({ node }) => {
      const box = node.getBoundingClientRect();
      return Math.hypot(event.clientX - box.x - box.width / 2, event.clientY - box.y - box.height / 2);
    };
    const near = shown().sort((a, b) => far(a) - far(b))[0];
    if (near && far(near) < 24) { near.node.focus(); choose(near); }
  });
  const settle = () => {
    const all = shown();
    if (all.length && !all.some(({ node }) => node.getAttribute("tabindex") === "0")) reach(all[0]);
  };
  settle();
  return settle;
}

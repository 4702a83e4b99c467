/* The tree of modules by what they hold at the peak, as a flame graph: a row for each level. */
function modules() {
  const box = byId("modules");
  if (!box) return;
  const said = byId("modules-said"), root = { name: "", label: "all modules", bytes: 0, children: [], parent: null };
  for (const [name, bytes] of Object.entries(data.modules)) {
    if (bytes <= 0) continue;
    let node = root;
    root.bytes += bytes;
    for (const part of name.startsWith("(") ? [name] : name.split(".")) {
      let next = node.children.find((child) => child.label === part);
      if (!next) {
        next = { name: node.name ? `${node.name}.${part}` : part, label: part, bytes: 0, children: [], parent: node };
        node.children.push(next);
      }
      next.bytes += bytes;
      node = next;
    }
  }
  const depth = (node) => 1 + Math.max(0, ...node.children.map(depth));
  const sorted = (node) => { node.children.sort((a, b) => b.bytes - a.bytes); node.children.forEach(sorted); };
  sorted(root);
  /* Bytes of no module have the color of their role, as above; modules are two shades of one color. */
  const tint = ({ label }, i) => label.startsWith("(")
    ? `color-mix(in srgb, var(--${label.slice(1, -1).replaceAll(" ", "_")}) 45%, var(--panel))`
    : `color-mix(in srgb, var(--accent) ${i % 2 ? 14 : 26}%, var(--panel))`;
  const high = 30;
  let top = root, shown = new Map();
  const say = (node) => {
    const inside = node.children.reduce((sum, child) => sum + child.bytes, 0);
    const rest = inside && node.bytes > inside ? ` · ${size(node.bytes - inside)} of its own` : "";
    said.textContent = `${node.name || node.label}: ${size(node.bytes)}, ${(100 * node.bytes / root.bytes).toFixed(1)}% of the peak${rest}`;
  };
  function zoom(node, focus) {
    top = node;
    draw();
    if (focus) shown.get(node)?.focus({ preventScroll: true });
    say(node);
  }
  function draw() {
    box.replaceChildren();
    shown = new Map();
    const above = [];
    for (let node = top; node; node = node.parent) above.unshift(node);
    const width = Math.max(280, box.clientWidth || 640), rows = above.length - 1 + depth(top);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${rows * high}`, role: "tree", "aria-label": "modules by bytes at the peak" }, box);
    const add = (node, x, wide, row, color) => {
      const g = shape("g", { role: "treeitem", tabindex: node === top ? "0" : "-1", class: "module", "data-module": node.name,
        "aria-level": row + 1, "aria-label": `${node.name || node.label}, ${size(node.bytes)}` }, svg);
      shape("rect", { x: x + 0.5, y: row * high + 0.5, width: Math.max(wide - 1, 0.5), height: high - 2, rx: 3, style: `fill:${color}` }, g);
      const letters = Math.floor((wide - 10) / 7.2), text = `${node.label} ${size(node.bytes)}`;
      const fits = text.length <= letters ? text : node.label.length <= letters ? node.label : letters > 3 ? `${node.label.slice(0, letters - 1)}…` : "";
      if (fits) shape("text", { x: x + 6, y: row * high + 19 }, g, fits);
      g.addEventListener("mouseenter", () => say(node));
      g.addEventListener("focus", () => {
        for (const other of shown.values()) other.setAttribute("tabindex", other === g ? "0" : "-1");
        say(node);
      });
      g.addEventListener("click", () => zoom(node === top && node.parent ? node.parent : node, true));
      g.addEventListener("keydown", (event) => {
        const among = node.parent ? node.parent.children.filter((child) => shown.has(child)) : [node];
        const to = { ArrowRight: among[among.indexOf(node) + 1], ArrowLeft: among[among.indexOf(node) - 1], ArrowUp: node.parent,
          ArrowDown: node.children.find((child) => shown.has(child)) }[event.key];
        if (to) shown.get(to)?.focus();
        else if (event.key === "Enter" || event.key === " ") zoom(node, true);
        else if ((event.key === "Escape" || event.key === "Backspace") && top.parent) zoom(top.parent, true);
        else return;
        event.preventDefault();
      });
      shown.set(node, g);
    };
    above.slice(0, -1).forEach((node, row) => add(node, 0, width, row, "var(--line)"));
    const fill = (node, x, wide, row, color) => {
      add(node, x, wide, row, color);
      let from = x;
      node.children.forEach((child, i) => {
        const part = wide * child.bytes / node.bytes;
        const own = node === top ? tint(child, i) : color;
        if (part >= 1.5) fill(child, from, part, row + 1, own);
        from += part;
      });
    };
    fill(top, 0, width, above.length - 1, "var(--line)");
  }
  draw();
  say(root);
  byId("modules-out").addEventListener("click", () => zoom(root, true));
  return draw;
}

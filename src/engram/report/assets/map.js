"use strict";
// The memory map and the other charts: embedded by bokeh, filled, filtered and listened to here.
(() => {
  const { data, state, $, el } = engram;
  const charts = JSON.parse($("charts").textContent);
  // logarithms, or of a share those of its odds: as Axis.place of memory_map.py
  const placed = ({ column, odds, low, high }) => Float32Array.from(data.numbers[column], (value) => {
    const kept = Math.min(Math.max(value, low), high);
    return Math.log10(odds ? kept / (1 - kept) : kept);
  });
  const [x, y] = data.map.axes.map(placed);
  const score = data.numbers.score || data.numbers.loo_loss;
  // the most sensitive last: they are drawn over the others
  const drawn = Uint32Array.from(x.keys()).sort((a, b) => (score[a] || 0) - (score[b] || 0));
  const from = (column) => Float32Array.from(drawn, (place) => column[place]);
  let map = null;

  const embed = async (id) => (await Bokeh.embed.embed_item(charts[id], id)).roots[0].model;
  engram.showCharts = async () => {
    const plot = await embed("chart-map"), model = (name) => plot.document.get_model_by_name(name);
    map = { plot, source: model("points"), ghosts: model("ghosts"), focus: model("focus"), filter: model("filter"),
      tools: { select: model("select"), move: model("move") }, ranges: [model("x"), model("y")] };
    map.start = map.ranges.map((range) => [range.start, range.end]);
    map.source.data = { x: from(x), y: from(y), score: from(score) };
    const { selected } = map.source;
    selected.connect(selected.properties.indices.change, pick);
    map.source.inspect.connect(([, { geometry }]) => peek(map.source.inspected.indices, geometry));
    $("chart-map").addEventListener("mouseleave", () => ($("peek").hidden = true));
    if (matchMedia("(pointer: coarse)").matches) useTool(""); // a finger on the map scrolls the page
    engram.paint();
    filterMap();
    await frame();
    performance.mark("map"); // drawn: what a person waits for
    for (const id of Object.keys(charts)) if (id !== "chart-map") { await idle(); await embed(id); }
    engram.paint();
    document.body.dataset.ready = "charts";
  };
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const idle = () => new Promise((done) => (window.requestIdleCallback || setTimeout)(done));

  let picking = false;
  const pick = () => {
    const { indices } = map.source.selected;
    if (picking) return;
    picking = true; // the change of the filter below clears what bokeh holds selected
    engram.change({ picked: indices.length ? new Set(Array.from(indices, (row) => drawn[row])) : null });
    picking = false;
  };

  const filterMap = () => {
    if (!map) return;
    const others = state.filtered;
    if (others && !map.ghosts.data.x.length) map.ghosts.data = { x: map.source.data.x, y: map.source.data.y };
    for (const renderer of map.plot.renderers) if (renderer.data_source === map.ghosts) renderer.visible = others;
    map.filter.booleans = others ? Array.from(drawn, (place) => state.mask[place] === 1) : null;
    if (!picking && !state.picked && map.source.selected.indices.length) { picking = true; map.source.selected.indices = []; picking = false; }
  };
  engram.listen(filterMap);

  engram.ring = (place) => { if (map) map.focus.data = place < 0 ? { x: [], y: [] } : { x: [x[place]], y: [y[place]] }; };

  const peek = (rows, geometry) => {
    const box = $("peek");
    box.hidden = !rows.length;
    if (!rows.length) return;
    const place = drawn[rows[rows.length - 1]];
    box.replaceChildren(...engram.brief(place));
    const figure = box.parentElement.getBoundingClientRect(), chart = $("chart-map").getBoundingClientRect();
    const left = chart.left - figure.left + geometry.sx, top = chart.top - figure.top + geometry.sy;
    box.style.left = `${Math.max(4, left + 16 + 250 > figure.width ? left - 266 : left + 16)}px`;
    box.style.top = `${top + 16 + box.offsetHeight > figure.height ? Math.max(4, top - 16 - box.offsetHeight) : top + 16}px`;
  };

  const useTool = (name) => {
    for (const [key, tool] of Object.entries(map.tools)) tool.active = key === name;
    for (const button of document.querySelectorAll("[data-tool]")) button.setAttribute("aria-pressed", String(button.dataset.tool === name));
  };
  const zoom = (factor) => map.ranges.forEach((range, axis) => {
    const [low, high] = factor === "reset" ? map.start[axis] : [range.start, range.end];
    const middle = (low + high) / 2, half = ((high - low) / 2) * (factor === "reset" ? 1 : Number(factor));
    range.setv({ start: middle - half, end: middle + half });
  });
  for (const button of document.querySelectorAll("[data-tool]"))
    button.addEventListener("click", () => map && useTool(button.getAttribute("aria-pressed") === "true" ? "" : button.dataset.tool));
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => map && zoom(button.dataset.zoom));
  // with Ctrl the wheel zooms, without it scrolls the page
  $("chart-map").addEventListener("wheel", (event) => {
    if (!map || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.85 : 1.18);
  }, { passive: false });
  $("scale-low").textContent = engram.figure(data.map.low, 2);
  $("scale-high").textContent = engram.figure(data.map.high, 2);
  engram.mapOf = { x, y, drawn, model: () => map };
})();

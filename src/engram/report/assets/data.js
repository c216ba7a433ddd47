"use strict";
// The examples as columns, read once. Everything that becomes text goes through `el`, which sets
// textContent: nothing of the data is ever read as HTML.
const engram = {};
(() => {
  const TYPES = {
    float32: Float32Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array,
  };
  const raw = JSON.parse(document.getElementById("data").textContent);

  const unpack = (column) => {
    if (!column || Array.isArray(column)) return column || null;
    const text = atob(column.data), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return new TYPES[column.type](bytes.buffer);
  };
  const each = (columns, change) =>
    Object.fromEntries(Object.entries(columns || {}).map(([name, value]) => [name, change(value)]));

  const neighbours = raw.neighbours && { each: raw.neighbours.each, row: new Map() };
  if (neighbours) {
    for (const name of ["of", "helpful", "harmful", "helpful_effect", "harmful_effect"])
      neighbours[name] = unpack(raw.neighbours[name]);
    neighbours.of.forEach((place, row) => neighbours.row.set(place, row));
  }
  engram.data = {
    ...raw,
    numbers: each(raw.numbers, unpack),
    labels: each(raw.labels, unpack),
    trust: unpack(raw.trust),
    flags: each(raw.flags, unpack),
    groups: each(raw.groups, (group) => ({ names: group.names, of: unpack(group.of) })),
    probabilities: raw.probabilities && { each: raw.probabilities.each, ...each(
      { classes: raw.probabilities.classes, before: raw.probabilities.before, after: raw.probabilities.after }, unpack) },
    neighbours,
    thumbnail: new Map((raw.sprite ? raw.sprite.positions : []).map((place, number) => [place, number])),
  };
  const { data } = engram;
  data.numbers.increase = data.numbers.loo_loss.map((loss, i) => loss - data.numbers.loss[i]);

  engram.idOf = (place) => (data.ids ? data.ids[place] : String(place));
  engram.label = (place, which) => {
    const column = data.labels[which];
    if (!column) return null;
    return data.classes.length ? data.classes[column[place]] : engram.figure(column[place]);
  };
  engram.figure = (value, digits = 3) => {
    if (typeof value === "string") return value;
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e5)
      ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
  };

  engram.el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
      if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
    return node;
  };
  engram.$ = (id) => document.getElementById(id);
})();

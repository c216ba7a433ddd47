"use strict";
// Which examples are asked for, and in which order. Listeners hear of every change.
(() => {
  const { data } = engram;
  const NARROW = 700, FEW = 8; // pixels; cards at first on a phone, where one fills the window
  if (innerWidth < NARROW) data.cards = Math.min(data.cards, FEW);
  const fresh = () => ({ query: "", given: -1, predicted: -1, trust: -1, groups: {}, flag: "", mark: "", picked: null });
  const state = { ...fresh(), sort: "", limit: data.cards, mask: new Uint8Array(data.count), order: [], filtered: false };
  const listeners = [];
  let haystacks = null;

  const haystack = (place) => {
    haystacks ||= new Array(data.count);
    return (haystacks[place] ??= [
      engram.idOf(place), engram.label(place, "given"), engram.label(place, "predicted"),
      data.texts?.[place], ...(data.rows?.cells[place] || []),
      ...Object.values(data.groups).map((group) => group.names[group.of[place]]),
    ].filter(Boolean).join("\n").toLowerCase());
  };

  const conditions = () => {
    const tests = [];
    const equal = (column, value) => value >= 0 && column && tests.push((i) => column[i] === value);
    equal(data.labels.given, state.given);
    equal(data.labels.predicted, state.predicted);
    equal(data.trust, state.trust);
    for (const [name, value] of Object.entries(state.groups)) equal(data.groups[name].of, value);
    if (state.flag) { const on = data.flags[state.flag]; tests.push((i) => on[i]); }
    if (state.mark) tests.push((i) => engram.marks.get(i));
    if (state.picked) tests.push((i) => state.picked.has(i));
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) tests.push((i) => { const text = haystack(i); return words.every((word) => text.includes(word)); });
    return tests;
  };

  // Highest first, except where low is bad and by id; what is not known comes last.
  const compared = () => {
    if (state.sort === "id") return (a, b) => a - b;
    const column = data.numbers[state.sort], sign = state.sort === "label_score" ? 1 : -1;
    return (a, b) => {
      const x = column[a], y = column[b];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return sign * (x - y) || a - b;
    };
  };

  engram.state = state;
  engram.listen = (listener) => listeners.push(listener);
  engram.change = (changes = {}) => {
    Object.assign(state, { limit: data.cards }, changes);
    const tests = conditions(), order = [];
    for (let i = 0; i < data.count; i++) {
      const kept = tests.every((test) => test(i));
      state.mask[i] = kept ? 1 : 0;
      if (kept) order.push(i);
    }
    state.filtered = tests.length > 0;
    state.order = order.sort(compared());
    for (const listener of listeners) listener();
  };
  engram.reset = () => engram.change(fresh());
})();

"use strict";
// Cards of the examples that are asked for, in their order.
(() => {
  const { data, state, $, el, figure, idOf, label } = engram;
  const TRUST = ["good", "caution", "unreliable"], TOLD = ["unreliable estimate", "contradicted label"]; // by other words of a card
  let focused = -1;

  if (data.sprite) {
    const bytes = Uint8Array.from(atob(data.sprite.data), (sign) => sign.charCodeAt(0));
    const url = URL.createObjectURL(new Blob([bytes], { type: "image/webp" }));
    document.head.append(el("style", {}, `.thumb { background-image: url("${url}"); }`));
  }

  engram.thumb = (place, side = 92) => {
    const number = data.thumbnail.get(place);
    if (number === undefined) return null;
    const { columns, small } = data.sprite;
    const node = el("div", { class: `thumb${side < 50 ? " tiny" : ""}${small ? " crisp" : ""}`, role: "img", "aria-label": `picture of ${idOf(place)}` });
    node.style.backgroundSize = `${columns * side}px auto`;
    node.style.backgroundPosition = `${-side * (number % columns)}px ${-side * Math.floor(number / columns)}px`;
    return node;
  };

  const turn = (place) => {
    const given = label(place, "given"), predicted = label(place, "predicted");
    if (given === null) return null;
    if (predicted === null || predicted === given) return el("div", { class: "turn" }, el("bdi", {}, given));
    return el("div", { class: "turn" }, el("bdi", {}, given), el("i", {}, " given, others say "), el("em", {}, el("bdi", {}, predicted)));
  };

  const words = (place) => data.texts?.[place] && el("p", { class: "text", dir: "auto" }, data.texts[place]);
  const cells = (place) => {
    const row = data.rows?.cells[place];
    if (!row) return null;
    const pairs = data.rows.columns.map((name, i) => el("div", {}, el("dt", {}, name), el("dd", {}, el("bdi", {}, row[i] || "–"))));
    return el("dl", { class: "cells" }, pairs, data.rows.more > 0 && el("div", {}, el("dt", {}, `and ${data.rows.more} more`)));
  };

  const share = (byte) => (byte === 255 ? NaN : byte / 254);
  const percent = (part) => (Number.isNaN(part) ? "–" : part > 0.995 && part < 1 ? ">99 %" : part < 0.005 ? "<1 %" : `${Math.round(100 * part)} %`);
  const bars = (place) => {
    const { probabilities: all } = data;
    if (!all) return null;
    const seen = new Set(), rows = [];
    for (let at = place * all.each; at < (place + 1) * all.each; at++) {
      const which = all.classes[at];
      if (seen.has(which)) continue;
      seen.add(which);
      const before = share(all.before[at]), after = share(all.after[at]), given = data.labels.given?.[place] === which;
      if (!given && !(before > 0.01 || after > 0.01)) continue;
      const line = [before, after].map((part) => { const bar = el("i"); bar.style.width = `${100 * (part || 0)}%`; return bar; });
      rows.push([given ? 2 : after, el("div", { class: given ? "same" : "" },
        el("span", { class: `name${given ? " given" : ""}`, title: data.classes[which] }, el("bdi", {}, data.classes[which])),
        el("span", { class: "bar2", "aria-hidden": "true" }, line),
        el("span", { class: "share", "aria-label": `${percent(before)} with it, ${percent(after)} without it` }, `${percent(before)} → ${percent(after)}`))]);
    }
    rows.sort((a, b) => b[0] - a[0]);
    return el("div", { class: "bars", "aria-label": "probabilities with the example and without it" }, rows.map(([, row]) => row));
  };

  // A neighbour without a picture: its text; of a row its id and label, and what differs in its title.
  const EACH_ROW = 3, ALL_ROWS = 2; // differences that are told of one row, and of all of a side
  const neighbour = (other) => {
    if (!data.rows) return [el("bdi", {}, data.texts?.[other] || idOf(other))];
    const given = label(other, "given");
    return [el("bdi", {}, idOf(other)), given !== null && el("bdi", {}, given)].filter(Boolean);
  };
  const told = (place, other) => engram.differences(place, other, EACH_ROW)
    .map(([name, one, two]) => `${name} ${two || "missing"}, here ${one || "missing"}`);
  const leanings = (place, others) => {
    const found = engram.leanings(place, others, ALL_ROWS);
    return found.length ? el("p", { title: "how they differ most from this one" },
      found.flatMap(([name, way], i) => [i ? ", " : "", el("bdi", {}, name), ` ${way}`])) : null;
  };

  const near = (place) => {
    const found = data.neighbours, row = found?.row.get(place);
    if (row === undefined || row === null) return null;
    const side = (name, title, hint) => {
      const links = [], others = [];
      for (let at = row * found.each; at < (row + 1) * found.each; at++) {
        const other = found[name][at];
        if (other < 0) continue;
        others.push(other);
        const effect = found[`${name}_effect`]?.[at], picture = engram.thumb(other, 38);
        const shown = [[idOf(other), label(other, "given"), effect !== undefined && figure(effect, 2)].filter(Boolean).join(", "), ...told(place, other)].join("; ");
        links.push(el("button", { type: "button", "data-go": other, title: shown, "aria-label": `${title}: ${shown}`, class: picture ? "pic" : data.rows ? "rowed" : data.texts ? "worded" : null },
          picture || neighbour(other)));
      }
      return links.length ? el("div", {}, el("span", { title: hint }, title), el("div", {}, links, leanings(place, others))) : null;
    };
    return el("div", { class: "near" }, side("helpful", "helped by", "without these the loss of the given label would rise"),
      side("harmful", "harmed by", "without these the loss of the given label would fall"));
  };

  const number = (name, title) => (place) => data.numbers[name] && el("span", { title }, `${name === "loo_loss" ? "loss left out" : name} ${figure(data.numbers[name][place])}`);
  const numbers = [number("loo_loss", "loss under the model without the example"), number("score", "how far the example moves its own prediction")];
  const trust = (place) => data.trust && el("span", { class: `chip ${TRUST[data.trust[place]]}`, title: "how far to trust these numbers" }, TRUST[data.trust[place]]);
  const flags = (place) => Object.entries(data.flags).filter(([name, on]) => on[place] && !TOLD.includes(name)).map(([name]) => el("span", { class: "chip" }, name));

  engram.brief = (place) => [
    engram.thumb(place), el("span", { class: "id" }, el("bdi", {}, idOf(place))), turn(place), words(place) || cells(place),
    el("div", { class: "foot" }, trust(place), numbers.map((make) => make(place))),
  ].filter(Boolean);

  const card = (place) => {
    const mark = engram.marks.get(place), name = idOf(place);
    const button = (value, title) => el("button", { type: "button", "data-mark": value, "aria-pressed": String(mark === value), "aria-label": `${title} ${name}` }, title);
    return el("article", { class: `card${mark ? ` ${mark}` : ""}`, tabindex: -1, "data-place": place, "aria-label": `example ${name}` },
      el("div", { class: "top" }, engram.thumb(place),
        el("div", { class: "what" }, el("span", { class: "id" }, el("bdi", {}, name)), turn(place), words(place), !words(place) && cells(place))),
      bars(place), near(place),
      el("div", { class: "foot" }, trust(place), flags(place), numbers.map((make) => make(place)),
        el("span", { class: "marks" }, button("wrong", "Wrong"), button("keep", "Keep"))));
  };

  const show = () => {
    const shown = state.order.slice(0, state.limit);
    $("cards").replaceChildren(...shown.map(card));
    const total = data.count.toLocaleString("en"), found = state.order.length.toLocaleString("en");
    $("count").textContent = state.filtered ? `${found} of ${total}${state.picked ? ", selected on the map" : ""}` : total;
    $("more").hidden = shown.length >= state.order.length;
    focused = -1;
    engram.ring(-1);
  };
  engram.listen(show);
  engram.more = () => { state.limit *= 2; show(); };

  engram.focusCard = (at) => {
    const all = $("cards").children;
    if (!all.length) return;
    focused = Math.max(0, Math.min(at, all.length - 1));
    all[focused].focus({ preventScroll: true });
    all[focused].scrollIntoView({ block: "nearest" });
    engram.ring(Number(all[focused].dataset.place));
  };
  engram.step = (by) => engram.focusCard(focused < 0 ? 0 : focused + by);
  engram.focusedPlace = () => (focused < 0 ? -1 : Number($("cards").children[focused]?.dataset.place ?? -1));
  engram.redraw = (place) => {
    const old = $("cards").querySelector(`[data-place="${place}"]`);
    if (!old) return;
    const had = old.contains(document.activeElement), mark = document.activeElement?.dataset.mark, fresh = card(place);
    old.replaceWith(fresh);
    if (had) (fresh.querySelector(`[data-mark="${mark}"]`) || fresh).focus({ preventScroll: true });
  };
  $("cards").addEventListener("focusin", (event) => {
    const node = event.target.closest(".card");
    focused = node ? [...$("cards").children].indexOf(node) : -1;
    if (node) engram.ring(Number(node.dataset.place));
  });
})();

"use strict";
// Controls, links and keys; then the first picture.
(() => {
  const { data, state, $, el } = engram;
  const SORTS = { label_score: "label score, worst first", loo_loss: "leave-one-out loss", score: "score", increase: "loss increase",
    prediction_error: "prediction error", prediction_variance: "prediction variance", id: "position" };

  const select = (title, options, chosen, change) => {
    const node = el("select", { "aria-label": title }, el("option", { value: -1 }, "all"),
      options.map((name, i) => el("option", { value: i }, name)));
    node.addEventListener("change", () => change(Number(node.value)));
    engram.listen(() => { node.value = String(chosen()); });
    $("selects").append(el("label", { class: "field" }, el("span", {}, title), node));
  };
  if (data.classes.length) {
    if (data.labels.given) select("Given label", data.classes, () => state.given, (given) => engram.change({ given }));
    if (data.labels.predicted) select("Left out", data.classes, () => state.predicted, (predicted) => engram.change({ predicted }));
  }
  for (const [name, group] of Object.entries(data.groups))
    select(name, group.names, () => state.groups[name] ?? -1, (value) => engram.change({ groups: { ...state.groups, [name]: value } }));
  if (data.trust) select("Trust", ["good", "caution", "unreliable"], () => state.trust, (trust) => engram.change({ trust }));

  for (const [name, on] of Object.entries(data.flags)) {
    const button = el("button", { type: "button", "aria-pressed": "false" }, name, el("span", {}, on.reduce((sum, one) => sum + one, 0).toLocaleString("en")));
    button.addEventListener("click", () => engram.change({ flag: state.flag === name ? "" : name }));
    engram.listen(() => button.setAttribute("aria-pressed", String(state.flag === name)));
    $("issues").append(button);
  }
  for (const [name, title] of Object.entries(SORTS))
    if (name === "id" || data.numbers[name]) $("sort").append(el("option", { value: name }, title));
  $("sort").value = data.sort;
  $("sort").addEventListener("change", () => engram.change({ sort: $("sort").value }));

  let waiting = 0;
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => engram.change({ query: $("search").value }), 120); });
  engram.listen(() => { $("clear").hidden = !state.filtered; if (!state.query && document.activeElement !== $("search")) $("search").value = ""; });
  const clear = () => { $("search").value = ""; engram.reset(); };
  $("clear").addEventListener("click", clear);
  $("more").addEventListener("click", engram.more);

  for (const link of document.querySelectorAll("[data-alert]")) {
    const { flag, group } = data.alerts[Number(link.dataset.alert)];
    const place = group ? data.groups[group[0]]?.names.indexOf(group[1]) ?? -1 : -1;
    if (!flag && place < 0) continue;
    link.addEventListener("click", () => { engram.reset(); engram.change(flag ? { flag } : { groups: { [group[0]]: place } }); });
    if (flag) engram.listen(() => (state.flag === flag ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }
  for (const button of document.querySelectorAll("[data-given]")) {
    if (button.dataset.shade) button.style.setProperty("--shade", button.dataset.shade);
    button.addEventListener("click", () => {
      engram.reset();
      engram.change({ given: Number(button.dataset.given), predicted: Number(button.dataset.predicted) });
      $("examples").scrollIntoView();
    });
  }
  $("cards").addEventListener("click", (event) => {
    const mark = event.target.closest("[data-mark]"), go = event.target.closest("[data-go]"), node = event.target.closest(".card");
    if (mark) engram.mark(Number(node.dataset.place), mark.dataset.mark);
    else if (go) { engram.reset(); engram.change({ picked: new Set([Number(go.dataset.go), Number(node.dataset.place)]) }); }
  });
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", async () => {
      const node = $(button.dataset.copy);
      try { await navigator.clipboard.writeText(node.textContent); button.textContent = "Copied"; } catch { getSelection().selectAllChildren(node); }
    });
  $("help-button").addEventListener("click", () => $("help").showModal());

  const KEYS = {
    "/": () => $("search").focus(), ArrowRight: () => engram.step(1), ArrowLeft: () => engram.step(-1), d: engram.switchTheme,
    w: () => engram.mark(engram.focusedPlace(), "wrong"), k: () => engram.mark(engram.focusedPlace(), "keep"),
    u: () => engram.mark(engram.focusedPlace(), ""), Escape: clear, "?": () => $("help").showModal(),
  };
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || (typing && event.key !== "Escape")) return;
    const action = KEYS[event.key];
    if (!action) return;
    event.preventDefault();
    if (typing) typing.blur();
    action();
  });
  engram.change({ sort: data.sort });
  document.body.dataset.ready = "cards";
  engram.showCharts();
})();

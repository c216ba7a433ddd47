"use strict";
// Marks that a person gives, kept in the browser as far as it lets us, and exported.
(() => {
  const { data, $, el, idOf, label } = engram;
  const key = `engram marks ${data.digest}`;
  const read = () => { try { return JSON.parse(localStorage.getItem(key)) || []; } catch { return []; } };
  const marks = (engram.marks = new Map(read().filter(([place, mark]) => place < data.count && ["wrong", "keep"].includes(mark))));
  const keep = () => { try { localStorage.setItem(key, JSON.stringify([...marks])); } catch { /* a page without memory */ } };

  const show = () => {
    const count = (mark) => [...marks.values()].filter((value) => value === mark).length;
    $("marks").hidden = marks.size === 0;
    $("marks-count").textContent = `${count("wrong")} wrong, ${count("keep")} kept`;
  };
  engram.mark = (place, mark) => {
    if (place < 0) return;
    if (!mark || marks.get(place) === mark) marks.delete(place); else marks.set(place, mark);
    keep();
    show();
    engram.redraw(place);
  };

  const save = (name, text, type) => {
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  // A table programme would run a text that begins like a formula: an apostrophe keeps it text.
  const cell = (value) => {
    let text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    if (/^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text))) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const sorted = () => [...marks].sort((a, b) => a[0] - b[0]);
  engram.csv = () => {
    const rows = sorted().map(([place, mark]) => [place, idOf(place), mark, label(place, "given"), label(place, "predicted"),
      data.numbers.loo_loss[place], data.numbers.score?.[place]]);
    return [["index", "id", "mark", "given", "predicted", "loo_loss", "score"], ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  };
  engram.indices = () => JSON.stringify(sorted().filter(([, mark]) => mark === "wrong").map(([place]) => place)) + "\n";

  $("export-csv").addEventListener("click", () => save("engram-marks.csv", engram.csv(), "text/csv"));
  $("export-indices").addEventListener("click", () => save("engram-wrong.json", engram.indices(), "application/json"));
  $("marks-show").addEventListener("click", () => { engram.change({ mark: "any" }); $("examples").scrollIntoView(); });
  $("marks-clear").addEventListener("click", () => { marks.clear(); keep(); show(); engram.change({ mark: "" }); });
  show();
})();

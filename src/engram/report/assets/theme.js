"use strict";
// Light and dark: CSS variables for the page, and the same colours for the charts of bokeh.
(() => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const SCALES = {
    light: ["#c6d0d8", "#aebcc6", "#d9bd86", "#dd8a45", "#b5301f"],
    dark: ["#333d48", "#4a5967", "#a98a52", "#e88b4f", "#ff6a55"],
  };
  const memory = { get: () => { try { return localStorage.getItem("engram theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("engram theme", value); } catch { /* a page without memory */ } } };
  let chosen = memory.get();

  const mixed = (a, b, share) => "#" + [1, 3, 5].map((at) => {
    const [x, y] = [a, b].map((colour) => parseInt(colour.slice(at, at + 2), 16));
    return Math.round(x + (y - x) * share).toString(16).padStart(2, "0");
  }).join("");
  const palette = (stops, count = 64) => Array.from({ length: count }, (_, i) => {
    const at = (i / (count - 1)) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    return mixed(stops[low], stops[low + 1], at - low);
  });

  const paintModel = (model, colour, font, scale) => {
    const tagged = model.tags?.find((tag) => ["ink", "accent", "cool", "pale"].includes(tag));
    if (/Axis$/.test(model.type))
      model.setv({ axis_line_color: colour("line"), major_label_text_color: colour("muted"), axis_label_text_color: colour("muted"),
        major_label_text_font: font, axis_label_text_font: font, major_label_text_font_size: "12px", axis_label_text_font_size: "12.5px" });
    else if (model.type === "Figure") { // painted, since bokeh does not clear what is transparent
      const ground = colour(model.tags.includes("card") ? "card" : "paper");
      model.setv({ background_fill_color: ground, border_fill_color: ground });
    } else if (model.type === "Grid") model.setv({ grid_line_color: colour("hair") });
    else if (model.type === "Legend") model.setv({ label_text_color: colour("muted"), label_text_font: font, label_text_font_size: "12px" });
    else if (model.type === "LogColorMapper") model.setv({ palette: scale });
    else if (tagged) {
      const of = colour(tagged), changes = {};
      if ("line_color" in model) changes.line_color = model.tags.includes("solid") ? null : of;
      if ("fill_color" in model && (model.tags.includes("solid") || model.tags.includes("band"))) changes.fill_color = of;
      model.setv(changes);
    }
  };

  const name = () => chosen || (dark.matches ? "dark" : "light");
  engram.paint = (theme = name()) => {
    root.dataset.theme = theme;
    const style = getComputedStyle(root), colour = (variable) => style.getPropertyValue(`--${variable}`).trim();
    const font = getComputedStyle(document.body).fontFamily, scale = palette(SCALES[theme]);
    engram.$("scale").style.background = `linear-gradient(90deg, ${SCALES[theme].join(",")})`;
    for (const document_ of window.Bokeh?.documents || [])
      for (const model of document_._all_models.values()) paintModel(model, colour, font, scale);
  };
  engram.switchTheme = () => { chosen = name() === "dark" ? "light" : "dark"; memory.set(chosen); engram.paint(); };
  engram.$("theme").addEventListener("click", engram.switchTheme);
  dark.addEventListener("change", () => engram.paint());
  addEventListener("beforeprint", () => {
    engram.paint("light");
    for (const document_ of window.Bokeh?.documents || []) // now: paper does not wait for the next frame
      for (const figure of document_.roots()) Bokeh.index.get_one(figure)?.repaint();
  });
  addEventListener("afterprint", () => engram.paint());
  engram.paint();
})();

"use strict";
// What tells rows of a table apart: their cells, each column of numbers in its own standard deviation
// over the rows that are here.
(() => {
  const { data } = engram;
  const WORDS = 1.5; // deviations that two different words are apart: more than most numbers are
  const TOLD = 0.5; // deviations from which a difference is worth a word
  let scales = null;

  const spread = (_, column) => {
    const numbers = Object.values(data.rows.cells).map((row) => row[column]).filter((cell) => cell !== "").map(Number);
    if (!numbers.length || numbers.some(Number.isNaN)) return null;
    const mean = numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
    return Math.sqrt(numbers.reduce((sum, x) => sum + (x - mean) ** 2, 0) / numbers.length);
  };

  // How far another row's cell is from one's: in deviations, with its sign; words are other or not.
  const apart = (one, two, i) => {
    if (one[i] === two[i]) return 0;
    const numbers = scales[i] !== null && one[i] !== "" && two[i] !== "";
    return numbers ? (two[i] - one[i]) / (scales[i] || 1) : WORDS;
  };

  const furthest = (distances, count) => distances.map((distance, i) => [distance, i])
    .filter(([distance]) => Math.abs(distance) >= TOLD)
    .sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, count);

  // The cells of another row that are furthest away: [name, one's, the other's].
  engram.differences = (place, other, count) => {
    const one = data.rows?.cells[place], two = data.rows?.cells[other];
    if (!one || !two) return [];
    scales ||= data.rows.columns.map(spread);
    return furthest(one.map((_, i) => apart(one, two, i)), count)
      .map(([, i]) => [data.rows.columns[i], one[i], two[i]]);
  };

  // The columns in which several rows together are furthest away: [name, which way].
  engram.leanings = (place, others, count) => {
    const one = data.rows?.cells[place], rows = others.map((other) => data.rows?.cells[other]).filter(Boolean);
    if (!one || !rows.length) return [];
    scales ||= data.rows.columns.map(spread);
    const mean = one.map((_, i) => rows.reduce((sum, two) => sum + apart(one, two, i), 0) / rows.length);
    return furthest(mean, count).map(([distance, i]) =>
      [data.rows.columns[i], scales[i] === null ? "other" : distance > 0 ? "higher" : "lower"]);
  };
})();

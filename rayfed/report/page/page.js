"use strict";
(() => {
  const numbers = {};
  const read = (name) => JSON.parse(document.getElementById(name).textContent);
  const twin = read("twin");
  const hover = read("hover");
  for (const part of [twin, ...twin.chapters].flatMap((c) => c.sections).flatMap((s) => s.parts)) {
    numbers[part.id] = part;
  }

  /* Colours: as the system, light, dark. */
  const theme = document.getElementById("theme");
  const themes = [["", "as the system"], ["light", "light"], ["dark", "dark"]];
  let chosen = 0;
  theme.addEventListener("click", () => {
    chosen = (chosen + 1) % themes.length;
    document.documentElement.dataset.theme = themes[chosen][0];
    theme.textContent = "Colours: " + themes[chosen][1];
  });

  document.getElementById("save").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(twin)], { type: "application/json" }));
    link.download = "report.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", () => {
      const range = document.createRange();
      range.selectNodeContents(button.parentElement.querySelector("code"));
      const selection = window.getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    });
  }

  /* Numbers as the tables show them; the same rules as Column.show. */
  const bytes = (v) => {
    for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (Math.abs(v) >= size) return (v / size).toFixed(1) + " " + unit;
    }
    return v.toFixed(0) + " B";
  };
  const shown = (v, kind) => {
    if (v === null || v === undefined) return "–";
    if (typeof v === "string") return v;
    if (kind === "percent" || kind === "points") return (100 * v).toFixed(1);
    if (kind === "bytes") return bytes(v);
    if (kind === "seconds") return v.toFixed(v >= 100 ? 0 : 1);
    if (kind === "count") return Math.round(v).toLocaleString("en");
    return String(Number(v.toPrecision(4)));
  };

  /* What is under the pointer, or at the place that the arrow keys chose. */
  const tip = document.getElementById("tip");
  const tell = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 4)) + "px";
    tip.style.top = Math.max(4, y + 14 + box.height > window.innerHeight ? y - box.height - 14 : y + 14) + "px";
  };
  const visible = (figure, series) => !figure.querySelector(`g[data-series="${series}"]`).classList.contains("off");
  const lineText = (figure, part, row, bands) => {
    const columns = part.columns;
    const lines = [columns[0].name + " " + shown(row[0], columns[0].holds)];
    let at = 1;
    bands.forEach((banded, series) => {
      const value = row[at];
      if (value !== null && visible(figure, series)) {
        const edges = banded ? ` (${shown(row[at + 1], columns[at].holds)} to ${shown(row[at + 2], columns[at].holds)})` : "";
        lines.push(columns[at].name + ": " + shown(value, columns[at].holds) + edges);
      }
      at += banded ? 3 : 1;
    });
    return lines.slice(0, 16).join("\n");
  };
  const watch = (figure, part, spec) => {
    const frame = figure.querySelector(".picture");
    const svg = frame.querySelector("svg");
    const rule = svg.querySelector(".rule");
    let place = -1;
    const showRow = (index, y) => {
      place = Math.max(0, Math.min(part.rows.length - 1, index));
      const [low, high, start, end] = spec.x;
      const x = start + (end - start) * (high > low ? (part.rows[place][0] - low) / (high - low) : 0.5);
      rule.setAttribute("x1", x);
      rule.setAttribute("x2", x);
      const box = svg.getBoundingClientRect();
      tell(lineText(figure, part, part.rows[place], spec.bands), box.left + x * box.width / svg.viewBox.baseVal.width, y ?? box.top + 20);
    };
    const showCell = (x, y, left, top) => {
      const [x0, y0, width, height] = spec.box;
      const across = part.columns.length - 1;
      const column = Math.floor((x - x0) / width * across);
      const row = Math.floor((y - y0) / height * part.rows.length);
      if (column < 0 || column >= across || row < 0 || row >= part.rows.length) { tip.hidden = true; return; }
      const cell = part.rows[row];
      const kind = part.columns[column + 1].holds;
      const unit = kind === "percent" ? " %" : "";
      tell(`${cell[0]}\n${spec.column} ${part.columns[column + 1].name}\n${spec.value}: ${shown(cell[column + 1], kind)}${unit}`, left, top);
    };
    const leave = () => { tip.hidden = true; if (rule) { rule.setAttribute("x1", -9); rule.setAttribute("x2", -9); } };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const ratio = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * ratio;
      const y = (event.clientY - box.top) * ratio;
      if (spec.kind === "cells") { showCell(x, y, event.clientX, event.clientY); return; }
      const [low, high, start, end] = spec.x;
      const wanted = low + (high - low) * (x - start) / (end - start);
      let best = 0;
      part.rows.forEach((row, index) => { if (Math.abs(row[0] - wanted) < Math.abs(part.rows[best][0] - wanted)) best = index; });
      showRow(best, event.clientY);
    });
    svg.addEventListener("pointerleave", leave);
    frame.addEventListener("blur", leave);
    frame.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step && spec.kind === "lines" && part.rows.length) { event.preventDefault(); showRow(place + step); }
      if (event.key === "Escape") leave();
    });
  };
  for (const [id, spec] of Object.entries(hover)) {
    const figure = document.getElementById(id);
    if (spec.kind && numbers[id]) watch(figure, numbers[id], spec);
    for (const button of figure.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        const number = button.dataset.series;
        for (const drawn of figure.querySelectorAll(`g[data-series="${number}"], g[data-band="${number}"]`)) {
          drawn.classList.toggle("off", !on);
        }
      });
    }
  }

  /* Tables: sorting by a column, choosing rows. */
  const compare = (a, b, numeric) => {
    if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
    return numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
  };
  for (const grid of document.querySelectorAll(".grid")) {
    const body = grid.querySelector("tbody");
    const heads = [...grid.querySelectorAll("thead th")];
    const rows = [...body.rows];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const numeric = head.classList.contains("number");
        const value = (row) => row.cells[column].dataset.value;
        const sorted = [...rows].sort((a, b) => {
          const order = compare(value(a), value(b), numeric);
          return up || value(a) === "" || value(b) === "" ? order : -order;
        });
        body.append(...sorted);
      });
    });
    const choices = [...grid.querySelectorAll("select")];
    const search = grid.querySelector("input");
    const output = grid.querySelector("output");
    if (!output) continue;
    const columns = choices.map((choice) => heads.findIndex((head) => head.dataset.name === choice.dataset.column));
    const choose = () => {
      const words = search ? search.value.trim().toLowerCase() : "";
      let count = 0;
      for (const row of rows) {
        const fits = choices.every((choice, i) => !choice.value || row.cells[columns[i]].textContent === choice.value);
        row.hidden = !(fits && (!words || row.textContent.toLowerCase().includes(words)));
        count += row.hidden ? 0 : 1;
      }
      output.textContent = count === rows.length ? `${count} rows` : `${count} of ${rows.length} rows`;
    };
    for (const control of [...choices, ...(search ? [search] : [])]) control.addEventListener("input", choose);
    choose();
  }
})();

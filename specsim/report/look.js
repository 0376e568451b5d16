"use strict";
// Tables sort by the column whose heading is pressed; figures show the value under the pointer or the finger.
function place(cell) {
  const text = cell.textContent.trim().replace("\u2212", "-").replace(/,(?=\d{3})/g, "");
  const number = parseFloat(text);
  return Number.isNaN(number) ? text : number;
}
function sort(heading) {
  const at = heading.cellIndex, body = heading.closest("table").tBodies[0], rows = [...body.rows];
  const down = heading.getAttribute("aria-sort") !== "descending";
  for (const other of heading.parentElement.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const empty = (value) => value === "" || value === "\u2013";
  rows.sort((first, second) => {
    const [a, b] = [place(first.cells[at]), place(second.cells[at])];
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  });
  body.append(...rows);
}
for (const heading of document.querySelectorAll("thead th")) {
  heading.setAttribute("aria-sort", "none");
  heading.tabIndex = 0;
  heading.addEventListener("click", () => sort(heading));
  heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(heading); });
}
const note = document.createElement("div");
note.id = "value";
note.hidden = true;
document.body.append(note);
for (const title of document.querySelectorAll("svg title")) {
  title.parentElement.dataset.value = title.textContent;
  title.remove();
}
function show(event) {
  const mark = event.target.closest ? event.target.closest("[data-value]") : null;
  note.hidden = mark === null;
  if (mark === null) return;
  note.textContent = mark.dataset.value;
  const left = Math.min(event.clientX + 12, innerWidth - note.offsetWidth - 8);
  note.style.left = `${Math.max(8, left)}px`;
  note.style.top = `${Math.max(8, event.clientY - note.offsetHeight - 10)}px`;
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);

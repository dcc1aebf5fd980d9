// Tables of the same columns with many rows get one field that keeps the rows with all of its words, e.g. `small seen`.
document.addEventListener("DOMContentLoaded", () => {
  const chinese = document.documentElement.lang.startsWith("zh");
  const groups = new Map();
  for (const table of document.querySelectorAll("article table")) {
    const columns = [...table.querySelectorAll("thead th, thead td")].map((cell) => cell.textContent.trim()).join("|");
    groups.set(columns, [...(groups.get(columns) ?? []), table]);
  }
  for (const tables of groups.values()) {
    const rows = tables.flatMap((table) => [...table.querySelectorAll("tbody > tr")]);
    if (rows.length < 12) continue;
    const field = document.createElement("input");
    field.type = "search";
    field.className = "rows";
    field.placeholder = chinese ? "筛选行" : "Filter the rows";
    field.setAttribute("aria-label", field.placeholder);
    const count = document.createElement("output");
    count.className = "rows";
    const text = rows.map((row) => row.textContent.toLowerCase());
    // A table without a row that is left goes with its section, if the section holds nothing else to filter.
    const places = tables.map((table) => {
      const section = table.closest("section");
      return tables.length > 1 && section?.querySelectorAll("table").length === 1 ? section : table.closest(".table-wrapper") ?? table;
    });
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = rows.filter((row, i) => !(row.hidden = !words.every((word) => text[i].includes(word))));
      tables.forEach((table, i) => (places[i].hidden = words.length > 0 && !table.querySelector("tbody > tr:not([hidden])")));
      count.textContent = words.length ? `${shown.length} / ${rows.length}` : "";
    });
    places[0].before(field, count);
  }
});

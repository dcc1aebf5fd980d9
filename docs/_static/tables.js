// Long tables get a field that keeps the rows with all of its words, for example `field seen`.
document.addEventListener("DOMContentLoaded", () => {
  const chinese = document.documentElement.lang.startsWith("zh") || location.pathname.includes("/zh/");
  for (const table of document.querySelectorAll("article table")) {
    const rows = [...table.querySelectorAll("tbody > tr")];
    if (rows.length < 12) continue;
    const field = document.createElement("input");
    field.type = "search";
    field.className = "rows";
    field.placeholder = chinese ? "筛选行" : "Filter the rows";
    field.setAttribute("aria-label", field.placeholder);
    const count = document.createElement("output");
    count.className = "rows";
    const text = rows.map((row) => row.textContent.toLowerCase());
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = rows.filter((row, i) => !(row.hidden = !words.every((word) => text[i].includes(word))));
      count.textContent = words.length ? `${shown.length} / ${rows.length}` : "";
    });
    const place = table.closest(".table-wrapper") ?? table;
    place.before(field, count);
  }
});

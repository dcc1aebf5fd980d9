// Code and tables that are wider than their place can be reached by the keyboard, and only those.
addEventListener("load", () => {
  const chinese = document.documentElement.lang.startsWith("zh");
  const wide = document.querySelectorAll("article pre, article .table-wrapper, article .math, article .cell_output .output");
  const mark = () => {
    for (const place of wide) {
      const scrolls = place.scrollWidth > place.clientWidth || place.scrollHeight > place.clientHeight;
      if (!scrolls) {
        for (const name of ["tabindex", "role", "aria-label"]) place.removeAttribute(name);
        continue;
      }
      place.tabIndex = 0;
      place.setAttribute("role", "group");
      place.setAttribute("aria-label", place.matches("pre") ? (chinese ? "代码" : "Code") : chinese ? "表格" : "Table");
    }
  };
  mark();
  addEventListener("resize", mark);
});

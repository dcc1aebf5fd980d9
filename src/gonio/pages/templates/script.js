"use strict";
// Sorts, filters and opens the rows of tables, reads values off charts, and marks the section in view. A page is whole
// without this script: it adds controls and moves what is there, and makes no text of its own from data.
(() => {
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const make = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const words = JSON.parse(document.body.dataset.words || "{}"); // of a page in another language
  const spoken = (name, english) => words[name] ?? english;
  const texts = new Map(); // of cells, as they were before controls were added
  const shownIn = (cell) => texts.get(cell) ?? (texts.set(cell, (cell.firstElementChild?.matches("button") ? cell.firstElementChild : cell).textContent.trim()), texts.get(cell));
  const value = (text) => {
    const found = /[-+]?\d+(\.\d+)?(e[-+]?\d+)?/.exec(text.replaceAll("−", "-").replaceAll(",", ""));
    return found ? Number(found[0]) : null;
  };
  const compare = (a, b, sign) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return x === y ? sign * a.localeCompare(b) : x === null ? 1 : -1;
    return sign * (x - y) || sign * a.localeCompare(b);
  };

  // --- tables: those with the same data-rows have the same rows, and are sorted and filtered together -------------

  class Rows {
    constructor(tables) {
      this.tables = tables.map((table) => {
        const rows = all(":scope > tbody > tr", table);
        return { table, body: table.tBodies[0], heads: all("thead th", table), rows, at: new Map(rows.map((row) => [row.dataset.i, row])) };
      });
      this.order = this.tables[0].rows.map((row) => row.dataset.i);
      this.codes = new Map(this.tables[0].rows.map((row) => [row.dataset.i, all("a.badge", row.cells[0])]));
      this.hidden = new Set();
      this.tables.forEach((one) => this.prepare(one));
      if (this.order.length > 5) this.addTools();
    }

    prepare(one) {
      one.heads.forEach((head, column) => {
        const button = make("button", { type: "button" }, ...head.childNodes);
        head.append(button);
        if (head.title) explain(button, head);
        button.addEventListener("click", () => this.sort(one, column));
      });
      if (!one.table.classList.contains("opens")) return;
      for (const row of one.rows) {
        const name = row.cells[0];
        name.prepend(make("button", { type: "button", "aria-expanded": "false" }, name.firstChild));
        row.classList.add("open");
      }
      one.body.addEventListener("click", (event) => {
        const row = event.target.closest("tr.open");
        if (row && !event.target.closest("a") && !String(getSelection())) this.toggle(one, row);
      });
      one.body.addEventListener("keydown", (event) => this.move(one, event));
    }

    sort(one, column) {
      const head = one.heads[column];
      const up = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "descending" : column === 0;
      this.tables.forEach(({ heads }) => heads.forEach((other) => other.removeAttribute("aria-sort")));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const sign = up ? 1 : -1;
      const text = (i) => shownIn(one.at.get(i).cells[column]);
      this.order = column ? this.order.toSorted((a, b) => compare(text(a), text(b), sign)) : this.order.toSorted((a, b) => sign * (a - b));
      this.close();
      this.tables.forEach(({ body, at }) => body.append(...this.order.map((i) => at.get(i)).filter(Boolean)));
    }

    addTools() {
      const { table, heads, rows } = this.tables[0];
      this.search = make("input", { type: "search", placeholder: spoken("placeholder", "name, type or code"), "aria-label": `${spoken("search", "Search")}: ${table.closest(".scroll").getAttribute("aria-label")}` });
      this.status = make("span", { role: "status" });
      const tools = this.tools = make("div", { class: "tools" }, this.search);
      this.levels = ["error", "warn", "info"].filter((level) => rows.some((row) => row.querySelector(`a.badge.${level}`)));
      this.pressed = new Set();
      for (const level of this.levels) {
        const button = make("button", { type: "button", "aria-pressed": "false" }, spoken(level, level));
        button.addEventListener("click", () => {
          this.pressed.has(level) ? this.pressed.delete(level) : this.pressed.add(level);
          button.setAttribute("aria-pressed", this.pressed.has(level));
          this.filter();
        });
        tools.append(button);
      }
      this.type = heads.findIndex((head) => shownIn(head) === spoken("kind", "type"));
      const types = this.type < 0 ? [] : [...new Set(rows.map((row) => shownIn(row.cells[this.type])))];
      if (types.length > 1) {
        this.select = make("select", { "aria-label": spoken("type", "Type of layer") }, ...[spoken("all", "all types"), ...types].map((type) => make("option", {}, type)));
        this.select.addEventListener("change", () => this.filter());
        tools.append(this.select);
      }
      tools.append(this.status);
      if (table.classList.contains("opens")) tools.append(make("span", {}, make("kbd", {}, "/"), ` ${spoken("find", "search")} `, make("kbd", {}, "↑"), make("kbd", {}, "↓"), ` ${spoken("move", "rows")} `, make("kbd", {}, "Enter"), ` ${spoken("open", "open")}`));
      this.search.addEventListener("input", () => this.filter());
      this.search.addEventListener("keydown", (event) => {
        const first = this.tables[0].body.querySelector("tr.open:not([hidden]) > th > button");
        if (event.key === "Escape") return this.search.blur();
        if (!first || (event.key !== "ArrowDown" && event.key !== "Enter")) return;
        event.preventDefault();
        first.focus();
        if (event.key === "Enter") first.click();
      });
      table.closest(".scroll").before(tools);
    }

    filter() {
      const words = (this.search?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      const { rows } = this.tables[0];
      this.hidden = new Set(rows.filter((row) => {
        const codes = this.codes.get(row.dataset.i);
        const type = this.type < 0 ? "" : shownIn(row.cells[this.type]);
        const text = [shownIn(row.cells[0]), type, ...codes.map((code) => code.textContent)].join(" ").toLowerCase();
        const asked = this.select?.selectedIndex ? this.select.value === type : true;
        const level = !this.pressed?.size || codes.some((code) => [...this.pressed].some((one) => code.classList.contains(one)));
        return !(asked && level && words.every((word) => text.includes(word)));
      }).map((row) => row.dataset.i));
      this.close();
      this.tables.forEach((one) => one.rows.forEach((row) => { row.hidden = this.hidden.has(row.dataset.i); }));
      if (this.status) this.status.textContent = this.hidden.size ? spoken("rows", "{} of {} rows").replace("{}", rows.length - this.hidden.size).replace("{}", rows.length) : "";
    }

    reset() {
      if (!this.search) return;
      this.search.value = "";
      this.pressed.clear();
      if (this.select) this.select.selectedIndex = 0;
      all("[aria-pressed]", this.tools).forEach((button) => button.setAttribute("aria-pressed", "false"));
      this.filter();
    }

    move(one, event) {
      const row = event.target.closest("tr.open");
      const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
      if (!row || (!step && event.key !== "Escape")) return;
      event.preventDefault();
      if (event.key === "Escape") return this.close();
      const shown = all(":scope > tr.open", one.body).filter((other) => !other.hidden);
      const next = shown[shown.indexOf(row) + step];
      if (!next) return;
      const opened = this.opened;
      next.querySelector("button").focus();
      if (opened) this.toggle(one, next);
    }

    close() {
      if (!this.opened) return;
      this.opened.more.remove();
      this.opened.row.querySelector("button").setAttribute("aria-expanded", "false");
      this.opened = null;
    }

    toggle(one, row) {
      const again = this.opened?.row === row;
      this.close();
      if (again) return;
      const cell = make("td", { colspan: one.heads.length }, this.detail(row));
      this.opened = { row, more: make("tr", { class: "more" }, cell) };
      row.after(this.opened.more);
      row.querySelector("button").setAttribute("aria-expanded", "true");
    }

    go(i) {
      const one = this.tables[0];
      const row = one.at.get(String(i));
      if (!row) return;
      if (row.hidden) this.reset();
      if (this.opened?.row !== row && row.classList.contains("open")) this.toggle(one, row);
      row.scrollIntoView({ block: "center" });
      row.querySelector("button")?.focus({ preventScroll: true });
    }

    // Everything that the page holds on one row: larger charts, findings with what to do, every figure explained.
    detail(row) {
      const pictures = make("div", { class: "pictures" });
      const figures = make("dl");
      const findings = make("ul");
      for (const { heads, at } of this.tables) {
        const cells = at.get(row.dataset.i)?.cells ?? [];
        heads.slice(1).forEach((head, k) => {
          const picture = cells[k + 1]?.querySelector("svg[data-ends]");
          const title = shownIn(head.firstElementChild);
          if (picture) pictures.append(larger(picture, title));
          else if (cells[k + 1]) figures.append(make("div", {}, make("dt", {}, title, make("small", {}, head.dataset.tip ?? "")), make("dd", {}, shownIn(cells[k + 1])), ...usual(cells[k + 1])));
        });
      }
      for (const code of this.codes.get(row.dataset.i) ?? []) {
        const found = document.getElementById(code.hash.slice(1));
        const item = make("li", {}, code.cloneNode(true), " ", found.textContent.replace(/^.*?: /s, ""), " ");
        item.append(make("span", { class: "note" }, found.closest(".rule").querySelector("p").firstChild.textContent.trim()));
        findings.append(item);
      }
      const made = make("div", { class: "detail" });
      made.append(...[findings, pictures, figures].filter((part) => part.childElementCount));
      const kind = row.dataset.kind ?? this.tables[0].at.get(row.dataset.i)?.dataset.kind;
      const said = kind && all("dd [data-kind]", row.closest("section")).find((one) => one.dataset.kind === kind);
      if (said) made.append(make("p", { class: "note" }, said.textContent));
      return made;
    }
  }

  // The range of a figure in trained networks, below it.
  const usual = (cell) => {
    if (!cell.dataset.usual) return [];
    const [low, high, place, figure] = cell.dataset.usual.split("|");
    const said = { low: spoken("low", "unusually low; usual {} to {}"), high: spoken("high", "unusually high; usual {} to {}"), usual: spoken("usual", "usual, {} to {}") };
    const shown = figure ? spoken("spread", "std/mean {}: ").replace("{}", figure) : "";
    return [make("dd", { class: `range ${place}` }, shown + said[place].replace("{}", low).replace("{}", high))];
  };

  const larger = (picture, title) => {
    const ends = picture.dataset.ends.split("|").map((end) => make("span", {}, end));
    const copy = picture.cloneNode(true);
    return make("figure", title === "norms" ? { class: "low" } : {}, make("figcaption", {}, title, make("small", {}, ` ${picture.getAttribute("aria-label")}`)), copy, make("div", { class: "ends", "aria-hidden": "true" }, ...ends));
  };

  // --- explanations of columns, for the pointer and for the keyboard ----------------------------------------------

  const tip = make("div", { class: "tip", role: "tooltip", id: "tip", hidden: "" });
  const explain = (button, head) => {
    head.dataset.tip = head.title;
    head.removeAttribute("title");
    const show = () => {
      tip.textContent = head.dataset.tip;
      tip.hidden = false;
      const box = button.getBoundingClientRect();
      tip.style.top = `${box.bottom + scrollY + 6}px`;
      tip.style.left = `${Math.max(8, Math.min(box.left + scrollX, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
      button.setAttribute("aria-describedby", "tip");
    };
    const hide = () => {
      tip.hidden = true;
      button.removeAttribute("aria-describedby");
    };
    for (const name of ["mouseenter", "focus"]) button.addEventListener(name, show);
    for (const name of ["mouseleave", "blur", "click"]) button.addEventListener(name, hide);
    button.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  };

  // --- charts over depth: a cross with the layer's figures; a click or Enter opens its row ------------------------

  const readDepth = (chart, rows) => {
    const count = Number(chart.dataset.count);
    const plots = all(".plot", chart);
    const cross = make("div", { class: "cross", hidden: "" });
    const readout = make("p", { class: "readout" }, rows ? spoken("hint", "Point at a layer, or use the arrow keys; a click or Enter opens its row.") : "");
    chart.after(readout);
    chart.append(cross);
    const table = rows.tables[0];
    const slider = plots.at(-1);
    const places = [...table.at.keys()].map(Number).sort((a, b) => a - b); // of a long table only some have rows
    let at = places[0], place = 0;
    const show = (k) => {
      place = Math.max(0, Math.min(places.length - 1, k));
      at = places[place];
      const row = table.at.get(String(at));
      const box = plots[0].getBoundingClientRect();
      cross.hidden = false;
      cross.style.left = `${box.left - chart.getBoundingClientRect().left + (box.width * (at + 0.5)) / count}px`;
      const said = [...row.cells].slice(1).map((cell, k) => [shownIn(table.heads[k + 1].firstElementChild), cell.textContent.trim()]).filter(([, text]) => text && text !== "–").slice(0, 9).map(([title, text]) => `${title} ${text}`);
      const codes = rows.codes.get(String(at)).map((code) => code.textContent);
      readout.replaceChildren(make("strong", {}, shownIn(row.cells[0])), ` ${[...codes, ...said].join(" · ")}`);
      slider.setAttribute("aria-valuenow", place + 1);
      slider.setAttribute("aria-valuetext", readout.textContent);
    };
    const index = (event) => {
      const box = plots[0].getBoundingClientRect();
      const wanted = Math.floor(((event.clientX - box.left) / box.width) * count);
      return places.reduce((best, one, k) => (Math.abs(one - wanted) < Math.abs(places[best] - wanted) ? k : best), 0);
    };
    for (const [name, text] of [["role", "slider"], ["tabindex", "0"], ["aria-label", spoken("layer", "Layer")], ["aria-valuemin", 1], ["aria-valuemax", places.length], ["aria-valuenow", 1], ["aria-valuetext", spoken("first", "first layer")]]) slider.setAttribute(name, text);
    slider.querySelector("svg").setAttribute("aria-hidden", "true");
    for (const plot of plots) {
      plot.addEventListener("mousemove", (event) => show(index(event)));
      plot.addEventListener("click", (event) => { show(index(event)); rows.go(at); });
    }
    slider.addEventListener("focus", () => show(place));
    chart.addEventListener("mouseleave", () => { cross.hidden = true; });
    slider.addEventListener("keydown", (event) => {
      const to = { ArrowRight: place + 1, ArrowUp: place + 1, ArrowLeft: place - 1, ArrowDown: place - 1, Home: 0, End: places.length - 1 }[event.key];
      if (to === undefined && event.key !== "Enter") return;
      event.preventDefault();
      event.key === "Enter" ? rows.go(at) : show(to);
    });
  };

  // --- curves: values under the pointer ---------------------------------------------------------------------------

  const readCurve = (picture) => {
    const { x, series, left, right, low, high, over } = JSON.parse(picture.dataset.curve);
    const line = make("div", { class: "hair", hidden: "" });
    const said = make("div", { class: "tip", hidden: "" });
    const figure = picture.parentElement;
    figure.append(line, said);
    picture.addEventListener("mousemove", (event) => {
      const box = picture.getBoundingClientRect();
      const outer = figure.getBoundingClientRect();
      const width = Number(picture.getAttribute("width"));
      const share = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right);
      const wanted = low + share * (high - low);
      const near = x.reduce((best, one, k) => (Math.abs(one - wanted) < Math.abs(x[best] - wanted) ? k : best), 0);
      const px = (box.width * (left + ((x[near] - low) / (high - low)) * (width - left - right))) / width;
      line.style.cssText = `left:${box.left - outer.left + px}px;top:${box.top - outer.top}px;height:${box.height}px`;
      said.textContent = [`${over} ${x[near]}`, ...Object.entries(series).filter(([, ys]) => ys[near] !== null && ys[near] !== undefined).map(([name, ys]) => `${name} ${ys[near]}`)].join(" · ");
      line.hidden = said.hidden = false;
      said.style.top = `${box.top - outer.top - 8}px`;
      said.style.left = `${Math.max(0, Math.min(box.left - outer.left + px, outer.width - said.offsetWidth))}px`;
    });
    picture.addEventListener("mouseleave", () => { line.hidden = said.hidden = true; });
  };

  // --- the page ----------------------------------------------------------------------------------------------------

  document.body.append(tip);
  const groups = new Map();
  for (const name of new Set(all("table[data-rows]").map((table) => table.dataset.rows))) {
    const tables = all(`table[data-rows="${name}"]`).filter((table) => table.tBodies[0].rows.length);
    if (tables.length) groups.set(name, new Rows(tables));
  }
  const layers = groups.get("layers");
  if (layers) all(".depth").forEach((chart) => readDepth(chart, layers));
  all("svg[data-curve]").forEach(readCurve);

  const follow = () => {
    const row = /^#t\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
    if (row) layers?.go(row.dataset.i);
  };
  addEventListener("hashchange", follow);
  follow();
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#t"]');
    if (link && link.hash === location.hash) follow();
  });
  // A page that is written anew while a network trains; not while the reader types, or has a row open.
  const seconds = Number(document.body.dataset.reload);
  const reading = () => document.activeElement?.matches("input, select") || document.querySelector("button[aria-expanded=true]");
  if (seconds) setInterval(() => reading() || location.reload(), 1000 * seconds);

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.matches("input, select, textarea") || !layers?.search) return;
    event.preventDefault();
    layers.search.focus();
  });

  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const inView = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? inView.add(entry.target.id) : inView.delete(entry.target.id);
    const first = [...links.keys()].find((id) => inView.has(id));
    links.forEach((link, id) => (id === first ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }, { rootMargin: "-70px 0px -50% 0px" });
  links.forEach((_, id) => { const section = document.getElementById(id); if (section) observer.observe(section); });
})();

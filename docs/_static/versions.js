// A switch to the site of another version, where there is one. Served, the list is versions.json of this site, which may
// have grown since the build; from a folder, where a page cannot read it, the list that the build put into the page.
document.addEventListener("DOMContentLoaded", async () => {
  const root = new URL(document.documentElement.dataset.content_root ?? "./", location.href);
  let versions = window.gonioVersions ?? [];
  if (location.protocol !== "file:") {
    try {
      const answer = await fetch(new URL("versions.json", root));
      if (answer.ok) versions = await answer.json();
    } catch {} // no list, or no JSON: what the build knew
  }
  const place = document.querySelector(".sidebar-brand");
  const named = Array.isArray(versions) ? versions.filter((one) => typeof one?.version === "string" && typeof one.url === "string") : [];
  const safe = named.filter((one) => ["http:", "https:", "file:"].includes(new URL(one.url, root).protocol));
  if (!place || safe.length < 2) return;
  const chinese = document.documentElement.lang.startsWith("zh");
  const select = document.createElement("select");
  select.className = "versions";
  select.setAttribute("aria-label", chinese ? "版本" : "Version");
  for (const one of safe) {
    const target = new URL(one.url, root);
    if (target.protocol === "file:") target.pathname = target.pathname.replace(/\/$/, "/index.html");
    const here = new URL(one.url, root).href === root.href;
    select.add(new Option(one.version, target.href, here, here));
  }
  select.addEventListener("change", () => location.assign(select.value));
  place.after(select);
});

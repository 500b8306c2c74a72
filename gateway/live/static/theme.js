// The theme: the system's, light or dark. It runs before the page is drawn, so that nothing flashes.
(() => {
  "use strict";
  const KEY = "alignedserve-theme";
  const CHOICES = ["auto", "light", "dark"];
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  let chosen = "auto";
  try {
    const kept = window.localStorage.getItem(KEY);
    if (CHOICES.includes(kept)) chosen = kept;
  } catch {
    // Storage is blocked: the choice lasts as long as the page.
  }

  function apply() {
    const theme = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
    document.documentElement.dataset.theme = theme;
    for (const button of document.querySelectorAll("[data-theme-toggle]")) button.textContent = `Theme: ${chosen}`;
    document.dispatchEvent(new Event("themechange"));
  }

  function next() {
    chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
    try {
      window.localStorage.setItem(KEY, chosen);
    } catch {
      // As above.
    }
    apply();
  }

  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", apply);
  document.addEventListener("click", (event) => {
    if (event.target instanceof Element && event.target.closest("[data-theme-toggle]")) next();
  });
  apply();
})();

"use strict";
// Light and dark, and one floating line of text for the whole page.
const selftask = (window.selftask = { onTheme: [] });

(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem("selftask-theme");
    } catch {
      return null; // storage may be off for pages from disk
    }
  };
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const changed = () => selftask.onTheme.forEach((tell) => tell());
  if (stored()) root.dataset.theme = stored();
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("selftask-theme", root.dataset.theme);
    } catch {} // the choice then lasts as long as the page
    changed();
  });
  system.addEventListener("change", changed);

  const tip = document.getElementById("tip");
  // Show a text near a point of the window; without a text, hide it.
  selftask.tip = (text, x, y) => {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(x + 12, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, y - tip.offsetHeight - 12)}px`;
  };
})();

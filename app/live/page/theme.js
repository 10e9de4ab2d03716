// Light and dark: as the system has it, until the button says otherwise.

import { byId, s } from "./dom.js";

const KEY = "troupe.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
};

function show(button) {
  button.setAttribute("aria-pressed", String(isDark()));
}

export function startTheme() {
  const button = byId("theme-button");
  const chosen = localStorage.getItem(KEY);
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  button.append(
    s(
      "svg",
      { viewBox: "0 0 20 20", "aria-hidden": "true" },
      s("circle", { cx: 10, cy: 10, r: 7, fill: "none", stroke: "currentColor", "stroke-width": 1.6 }),
      s("path", { d: "M10 3a7 7 0 0 1 0 14z", fill: "currentColor" }),
    ),
  );
  show(button);
  system.addEventListener("change", () => show(button));
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem(KEY, next);
    show(button);
  });
}

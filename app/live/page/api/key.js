// The API key: asked for when the server requires one, kept for this tab only.

import { byId, h } from "../dom.js";

const NAME = "troupe.key";

/** The event of the document when there is a key: clients that gave up may retry. */
export const GIVEN = "keygiven";

let asking = null;
let declined = 0;

export const readKey = () => sessionStorage.getItem(NAME) ?? "";

/** Forget a key that did not fit, unless another one took its place meanwhile. */
export function forgetKey(key) {
  if (readKey() === key) sessionStorage.removeItem(NAME);
  showButton();
}

function showButton() {
  byId("key-button").hidden = !readKey();
  byId("docs-link").hidden = Boolean(readKey()); // a link cannot carry the key
}

/** How often the user declined: a request sent before the last time does not ask again. */
export const timesDeclined = () => declined;

/** Ask for the key. All callers share one question; false if the user has none. */
export function askKey(trouble) {
  asking ??= ask(trouble).finally(() => (asking = null));
  return asking;
}

function ask(trouble) {
  const dialog = byId("key-dialog");
  return new Promise((resolve) => {
    const field = h("input", {
      id: "key-field",
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      required: true,
    });
    const form = h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          if (!field.value.trim()) return;
          sessionStorage.setItem(NAME, field.value.trim());
          dialog.close("given");
          document.dispatchEvent(new Event(GIVEN));
        },
      },
      h("h2", { id: "key-title" }, "This server requires a key"),
      h("p", {}, "It stays in this tab and is sent to this server only."),
      trouble ? h("p", { class: "trouble", role: "alert" }, trouble) : null,
      h("label", { for: "key-field" }, "API key"),
      field,
      h(
        "div",
        { class: "row" },
        h("button", { class: "plain", type: "button", onclick: () => dialog.close("") }, "Not now"),
        h("button", { class: "send", type: "submit" }, "Use this key"),
      ),
    );
    dialog.replaceChildren(form);
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        showButton();
        const given = dialog.returnValue === "given";
        if (!given) declined += 1;
        resolve(given);
      },
      { once: true },
    );
    dialog.showModal();
    field.focus();
  });
}

/** The button that forgets the key. */
export function startKey() {
  showButton();
  byId("key-button").addEventListener("click", () => {
    sessionStorage.removeItem(NAME);
    location.reload();
  });
}

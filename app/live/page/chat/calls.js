// A tool call as a card: its name, its arguments, and a field for what the tool would answer.

import { h } from "../dom.js";

function value(argument) {
  return typeof argument === "string" ? argument : JSON.stringify(argument, null, 1);
}

/** `call`: {name, arguments} or arguments null while they cannot be read; `source`: what the model wrote. */
export function callCard(call, source, open, onResult) {
  const known = call.arguments && typeof call.arguments === "object";
  const rows = known ? Object.entries(call.arguments) : [];
  return h(
    "section",
    { class: "call", "aria-label": `Tool call ${call.name}` },
    h("header", {}, h("span", { class: "kind" }, open ? "calling" : "calls"), h("b", {}, call.name || "a tool")),
    known
      ? h(
          "dl",
          {},
          rows.map(([name, given]) => h("div", {}, h("dt", {}, name), h("dd", {}, value(given)))),
        )
      : h("pre", {}, h("code", {}, source.trim())),
    onResult && !open ? answerForm(onResult) : null,
  );
}

function answerForm(onResult) {
  const field = h("input", { type: "text", "aria-label": "The tool's answer", placeholder: '{"temperature": 4}' });
  return h(
    "form",
    {
      class: "result",
      onsubmit: (event) => {
        event.preventDefault();
        if (field.value.trim()) onResult(field.value.trim());
      },
    },
    field,
    h("button", { class: "plain", type: "submit" }, "Answer as the tool"),
  );
}

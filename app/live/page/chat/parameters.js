// What a request may carry beside its messages. An empty field leaves the choice to the server.

import { get } from "../api/client.js";
import { byId, h } from "../dom.js";

const NAME = "troupe.parameters";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0 always takes the most probable token"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, "samples from the most probable tokens up to this sum"],
  ["top_k", "Top k", { min: 1, max: 1000, step: 1 }, "samples from this many tokens"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "drops tokens below this share of the most probable"],
  ["max_tokens", "Longest answer", { min: 1, max: 1000000, step: 1 }, "tokens"],
  ["seed", "Seed", { min: 0, max: 9007199254740991, step: 1 }, "the same seed, the same answer"],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }, "against repeating often"],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }, "against repeating at all"],
];

export class Parameters {
  constructor(container) {
    this.container = container;
    this.fields = {};
    let kept = {};
    try {
      kept = JSON.parse(sessionStorage.getItem(NAME) ?? "{}") ?? {};
    } catch {
      // Start from nothing.
    }
    this.trouble = h("p", { class: "trouble", role: "alert", hidden: true });
    const numbers = NUMBERS.map(([name, label, bounds, hint]) =>
      this.field(name, label, h("input", { type: "number", inputmode: "decimal", ...bounds, value: kept[name] }), hint),
    );
    container.append(
      this.field("system", "System prompt", h("textarea", { rows: 2 }, kept.system ?? ""), "", "wide"),
      h("div", { class: "grid" }, numbers),
      this.field("stop", "Stop at", h("input", { type: "text", value: kept.stop, spellcheck: "false" }), "", "wide"),
      this.field(
        "tools",
        "Tools",
        h("textarea", { rows: 3, spellcheck: "false", class: "source" }, kept.tools ?? ""),
        "a JSON list of functions the model may call",
        "wide",
      ),
      h(
        "label",
        { class: "check" },
        (this.fields.think = h("input", { type: "checkbox", checked: kept.think === "true" })),
        h("span", {}, "Think before answering"),
        h("small", {}, "where the model's template knows enable_thinking"),
      ),
      this.trouble,
    );
    container.addEventListener("input", () => this.keep());
    this.startButton();
  }

  field(name, label, input, hint, kind = "") {
    input.id = `parameter-${name}`;
    this.fields[name] = input;
    return h(
      "div",
      { class: `parameter ${kind}` },
      h("label", { for: input.id }, label),
      input,
      hint ? h("small", {}, hint) : null,
    );
  }

  startButton() {
    const button = byId("parameters-button");
    button.addEventListener("click", () => this.open(this.container.hidden));
  }

  open(opened) {
    this.container.hidden = !opened;
    byId("parameters-button").setAttribute("aria-expanded", String(opened));
  }

  keep() {
    const values = Object.entries(this.fields).map(([name, field]) => [
      name,
      field.type === "checkbox" ? String(field.checked) : field.value,
    ]);
    sessionStorage.setItem(NAME, JSON.stringify(Object.fromEntries(values.filter(([, value]) => value !== ""))));
    this.trouble.hidden = true;
  }

  /** Set some fields, as an example does. */
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (name === "think") this.fields.think.checked = value;
      else this.fields[name].value = value;
    }
    this.keep();
  }

  get system() {
    return this.fields.system.value.trim();
  }

  /** The body's fields. Opens itself and raises when one of them cannot be read. */
  body() {
    const body = {};
    try {
      for (const [name, label] of NUMBERS) {
        const field = this.fields[name];
        if (!field.validity.valid) throw new Error(`${label}: ${field.validationMessage}`);
        if (field.value !== "") body[name] = Number(field.value);
      }
      if (this.fields.stop.value) body.stop = [this.fields.stop.value];
      const tools = this.fields.tools.value.trim();
      if (tools) body.tools = readTools(tools);
      if (this.fields.think.checked) body.chat_template_kwargs = { enable_thinking: true };
    } catch (error) {
      this.open(true);
      this.trouble.textContent = error.message;
      this.trouble.hidden = false;
      throw error;
    }
    return body;
  }

  /** Show what the server does where a field is empty. */
  async showDefaults() {
    const info = await get("model_info");
    for (const [name] of NUMBERS) {
      const value = info.sampling_defaults?.[name];
      this.fields[name].placeholder = value === undefined || value === null ? "default" : String(value);
    }
  }
}

function readTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: not JSON: ${error.message}`);
  }
  const list = Array.isArray(tools) ? tools : [tools];
  return list.map((tool) => (tool.type ? tool : { type: "function", function: tool }));
}

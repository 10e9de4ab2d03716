// One request, hop by hop: where its time went.

import { get } from "../api/client.js";
import { byId, copy, h } from "../dom.js";
import { duration } from "../numbers.js";

const USUAL = { choices: 1, priority: 0, preemptions: 0 }; // not worth a word
const SECONDS = /seconds$|^(wait|render|queued)$/; // attributes that are times
const AGAIN = 700; // milliseconds between two looks at a request that lives

/** Show a request by its handle or its id. */
export function openWaterfall(name) {
  const dialog = byId("waterfall");
  let timer = 0;
  const close = h("button", { class: "quiet close", type: "button", onclick: () => dialog.close() }, "Close");
  const content = h("div", { class: "content" }, h("h2", { id: "waterfall-title" }, "Request"), h("p", {}, "…"));
  dialog.replaceChildren(close, content);
  dialog.addEventListener("close", () => clearTimeout(timer), { once: true });
  dialog.onclick = (event) => event.target === dialog && dialog.close();
  if (!dialog.open) dialog.showModal();

  async function look() {
    try {
      const data = await get(`stage/requests/${encodeURIComponent(name)}`);
      content.replaceChildren(...picture(data));
      if (data.duration === null && dialog.open) timer = setTimeout(look, AGAIN);
    } catch (error) {
      content.replaceChildren(
        h("h2", { id: "waterfall-title" }, "Request"),
        h("p", { class: "trouble" }, error.message),
      );
    }
  }
  look();
}

function picture(data) {
  return [
    h("h2", { id: "waterfall-title" }, `Request ${data.handle}`),
    h("p", { class: "lead" }, summary(data)),
    h(
      "ol",
      { class: "hops" },
      data.hops.map((hop) => row(hop, data)),
    ),
    marks(data),
    h("dl", { class: "facts" }, facts(data)),
  ].filter(Boolean);
}

function summary(data) {
  const words = [data.duration === null ? `so far ${duration(data.elapsed)}` : duration(data.duration)];
  words.push(`${data.prompt_tokens} tokens in${data.cached_tokens ? `, ${data.cached_tokens} of them found` : ""}`);
  if (data.output_tokens) words.push(`${data.output_tokens} out`);
  if (data.error) words.push(data.error);
  else if (data.finish_reasons.length) words.push(data.finish_reasons.join(", "));
  return words.join(" · ");
}

function row(hop, data) {
  const whole = data.elapsed || 1e-9;
  const end = hop.end ?? data.elapsed;
  const left = (100 * hop.start) / whole;
  const width = Math.max(0.3, (100 * (end - hop.start)) / whole);
  const choice = hop.choice ? ` ${hop.choice + 1}` : "";
  const facts = Object.entries(hop.attributes)
    .filter(([name, value]) => !(name in USUAL && USUAL[name] === value))
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value, name)}`);
  return h(
    "li",
    {},
    h("span", { class: "name" }, hop.name + choice),
    h(
      "span",
      { class: "bar" },
      h("i", {
        "data-phase": hop.name,
        class: hop.end === null ? "open" : "",
        style: { left: `${left}%`, width: `${width}%` },
      }),
    ),
    h("span", { class: "time" }, duration(Math.max(0, end - hop.start))),
    facts.length ? h("span", { class: "more" }, facts.join(" · ")) : null,
  );
}

function marks(data) {
  if (!data.marks.length) return null;
  return h(
    "p",
    { class: "marks" },
    data.marks.map((mark) => h("span", {}, h("b", {}, mark.name.replaceAll("_", " ")), ` after ${duration(mark.at)}`)),
  );
}

function facts(data) {
  const rows = [
    ["Operation", data.operation],
    ["Model", data.model],
    ["Arrived", new Date(data.started_unix * 1000).toLocaleTimeString("en-GB")],
    ...Object.entries(data.request).map(([name, value]) => [
      name.replace(/^gen_ai\.request\./, ""),
      number(value, name),
    ]),
  ];
  const made = rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  if (data.trace_id) {
    const button = h("button", { class: "quiet", type: "button", onclick: () => copy(data.trace_id, button) }, "Copy");
    made.push(h("div", { class: "trace" }, h("dt", {}, "Trace"), h("dd", {}, h("code", {}, data.trace_id), button)));
  }
  return made;
}

function number(value, name) {
  if (typeof value === "number" && SECONDS.test(name)) return duration(value);
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(4)));
  if (typeof value === "boolean") return value ? "yes" : "no";
  return String(value);
}

// The server's API: one place that knows the key and what an error looks like.

import { askKey, forgetKey, readKey, timesDeclined } from "./key.js";
import { events } from "./sse.js";

// This file is at ROOT/page/api/client.js, wherever a proxy shows the server.
const ROOT = new URL("../../", import.meta.url);

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function toError(response) {
  let detail = null;
  try {
    detail = (await response.json()).error;
  } catch {
    // A proxy's page, not ours.
  }
  return new ApiError(detail?.message ?? `The server answered ${response.status}.`, response.status, detail?.code);
}

/** A response that is fine. Asks for a key when the server requires one, and raises ApiError otherwise. */
export async function call(path, options = {}) {
  for (;;) {
    const key = readKey();
    const before = timesDeclined();
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(new URL(path, ROOT), { ...options, headers, credentials: "same-origin" });
    if (response.ok) return response;
    const error = await toError(response);
    if (error.status !== 401) throw error;
    if (key) forgetKey(key);
    if (readKey()) continue; // another request was given a key while this one was refused
    if (timesDeclined() > before || !(await askKey(key ? error.message : ""))) throw error;
  }
}

export const get = async (path, options) => (await call(path, options)).json();

/** The data of each event of a stream, parsed; an error event is raised. */
export async function* stream(path, options) {
  const response = await call(path, options);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new ApiError(value.error.message, response.status, value.error.code);
    yield { value, response };
  }
}

// The feed of the stage: frames over one connection that is reopened when it breaks, and closed while the page is hidden.

import { stream } from "../api/client.js";
import { GIVEN } from "../api/key.js";

const SOON = 500;
const LATE = 10_000;

/** Calls `onFrame(frame)` for each frame and `onTrouble(text)` when there is none ("" when it is over). */
export function startFeed(onFrame, onTrouble) {
  let control = null;
  let pause = SOON;
  let timer = 0;
  let locked = false; // the reader had no key

  async function run() {
    const mine = (control = new AbortController());
    try {
      for await (const { value } of stream("stage", { signal: mine.signal })) {
        pause = SOON;
        onTrouble("");
        onFrame(value);
      }
      onTrouble("The server ended the feed. Trying again.");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error.status === 401) {
        locked = true;
        return onTrouble("The stage needs the key. It is asked for when you send a message or load the page again.");
      }
      onTrouble(error.status ? error.message : "The server does not answer. Trying again.");
    }
    if (mine.signal.aborted) return;
    timer = setTimeout(run, pause);
    pause = Math.min(LATE, pause * 2);
  }

  function look() {
    clearTimeout(timer);
    control?.abort();
    if (!document.hidden) run();
  }

  document.addEventListener("visibilitychange", look);
  document.addEventListener(GIVEN, () => {
    if (locked) look();
    locked = false;
  });
  look();
}

// The stage: what each frame of the feed changes on it.

import { get } from "../api/client.js";
import { byId, say } from "../dom.js";
import { startFeed } from "./feed.js";
import { Figures } from "./figures.js";
import { drawBilling, Graph } from "./graph.js";
import { History } from "./history.js";
import { Timeline } from "./timeline.js";
import { openWaterfall } from "./waterfall.js";

/** Starts the feed; gives what the chat may ask of the stage. */
export function startStage() {
  const figures = new Figures(byId("figures"));
  const graph = new Graph(byId("graph"));
  const timeline = new Timeline(byId("timeline"), openWaterfall);
  const history = new History();
  const notice = byId("stage-notice");

  startFeed(
    (frame) => {
      history.add(frame);
      drawBilling(frame);
      figures.draw(frame, history);
      graph.draw(frame, history);
      timeline.draw(frame);
      document.body.dataset.frame = frame.number;
    },
    (trouble) => {
      notice.hidden = !trouble;
      say(notice, trouble);
      if (trouble) {
        byId("state-dot").dataset.state = "lost";
        say(byId("model-facts"), "not connected");
      }
    },
  );

  return {
    showRequest: openWaterfall,
    async ownRequest(id) {
      try {
        timeline.mark((await get(`stage/requests/${encodeURIComponent(id)}`)).handle);
      } catch {
        // The stage forgot it already; nothing to mark.
      }
    },
  };
}

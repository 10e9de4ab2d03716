// The live page: a chat beside the stage on which its requests are played.

import { startKey } from "./api/key.js";
import { startChat } from "./chat/playground.js";
import { startStage } from "./stage/stage.js";
import { startTheme } from "./theme.js";
import { startViews } from "./views.js";

startTheme();
startViews();
startKey();
const stage = startStage();
startChat({ showRequest: stage.showRequest, ownRequest: stage.ownRequest });

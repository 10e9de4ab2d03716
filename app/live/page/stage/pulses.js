// Lights that travel along the ways while messages do. Many messages share one light, so that the eye can follow.

import { s, still } from "../dom.js";

const TRAVEL = 900; // milliseconds from one box to the next
const MAX_PER_WAY = 5;

export class Pulses {
  constructor() {
    this.ways = [];
    this.handle = 0;
  }

  /** Begin on a new picture. */
  stand(layer, ways) {
    this.ways = ways.map((way) => ({
      way,
      length: way.path.getTotalLength(),
      last: -Infinity,
      lights: Array.from({ length: MAX_PER_WAY }, () => {
        const circle = s("circle", { r: 3.4, visibility: "hidden" });
        layer.append(circle);
        return { circle, start: -Infinity };
      }),
    }));
  }

  run() {
    if (still() || this.handle || !this.ways.some(({ way }) => way.speed > 0.04)) return;
    const step = (now) => {
      this.handle = this.step(now) && !still() ? requestAnimationFrame(step) : 0;
      if (!this.handle) this.hide();
    };
    this.handle = requestAnimationFrame(step);
  }

  /** Move every light; false when all have arrived. */
  step(now) {
    let alive = false;
    for (const one of this.ways) {
      const speed = one.way.speed ?? 0;
      const gap = TRAVEL / Math.max(0.2, Math.min(MAX_PER_WAY, 0.8 + 1.4 * Math.log10(1 + speed)));
      if (speed > 0.04) {
        alive = true;
        if (now - one.last > gap) this.light(one, now);
      }
      for (const light of one.lights) alive = this.move(one, light, now) || alive;
    }
    return alive;
  }

  light(one, now) {
    const free = one.lights.find((light) => now - light.start > TRAVEL);
    if (!free) return;
    one.last = now;
    free.start = now;
    free.circle.setAttribute("visibility", "visible");
  }

  move(one, light, now) {
    const part = (now - light.start) / TRAVEL;
    if (part > 1) {
      if (light.start > 0) light.circle.setAttribute("visibility", "hidden");
      light.start = -Infinity;
      return false;
    }
    const point = one.way.path.getPointAtLength(one.length * ease(Math.max(0, part)));
    light.circle.setAttribute("cx", point.x);
    light.circle.setAttribute("cy", point.y);
    light.circle.style.opacity = String(Math.min(1, 6 * Math.min(part, 1 - part)));
    return true;
  }

  hide() {
    for (const one of this.ways) for (const { circle } of one.lights) circle.setAttribute("visibility", "hidden");
  }
}

const ease = (part) => part * part * (3 - 2 * part);

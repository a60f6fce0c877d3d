"use strict";
// The page is whole without this script; it only moves a cursor over the timeline and says what is there.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const svg = document.getElementById("timeline");
  const cursor = document.getElementById("cursor");
  const readout = document.getElementById("readout");
  if (!data.buckets.length) return;
  let at = data.peak;

  const show = (index) => {
    at = Math.max(0, Math.min(data.buckets.length - 1, index));
    const bucket = data.buckets[at];
    cursor.setAttribute("x", bucket.x);
    cursor.setAttribute("width", Math.max(bucket.width, 1.5));
    const alive = bucket.largest.map((id) => "\n    " + data.values[id]);
    readout.textContent = bucket.text + "\nLargest besides what is there all along:" + alive.join("");
  };

  const find = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const after = data.buckets.findIndex((bucket) => x < bucket.x + bucket.width);
    return after < 0 ? data.buckets.length - 1 : after;
  };

  const keys = {
    ArrowLeft: () => at - 1,
    ArrowRight: () => at + 1,
    PageUp: () => at - 20,
    PageDown: () => at + 20,
    Home: () => 0,
    End: () => data.buckets.length - 1,
    p: () => data.peak,
  };
  svg.addEventListener("pointermove", (event) => show(find(event)));
  svg.addEventListener("pointerdown", (event) => show(find(event)));
  svg.addEventListener("pointerleave", () => show(data.peak));
  svg.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    show(keys[event.key]());
  });
  show(at);
})();

// The timeline under a reader's hand: a cursor that tells what is there, zoom, and another schedule to look at.
class Timeline {
  constructor(data) {
    this.data = data;
    this.frame = data.frame;
    this.svg = find("timeline");
    this.cursor = find("cursor");
    this.readout = find("readout");
    this.views = data.views.map((raw) => () => new View(data, raw));
    this.chosen = null;
    this.look(0);
    this.listen();
    this.drawn = true; // the page comes with the picture of the whole step
    this.show(this.view.peak, false);
  }

  look(index) {
    if (typeof this.views[index] === "function") this.views[index] = this.views[index]();
    this.view = this.views[index];
    this.number = index;
    this.from = 0;
    this.to = this.view.length;
    this.svg.setAttribute("role", "slider");
    this.svg.setAttribute("aria-valuemin", 0);
    this.svg.setAttribute("aria-valuemax", this.view.length - 1);
    this.buckets = this.view.buckets(this.from, this.to, 500);
    this.at = this.view.peak;
  }

  x(step) {
    const { left, right, width } = this.frame;
    return left + ((width - left - right) * (step - this.from)) / Math.max(this.to - this.from, 1);
  }

  y(size) {
    const { top, bottom, height, bytes } = this.frame;
    return height - bottom - ((height - top - bottom) * size) / Math.max(bytes, 1);
  }

  bucket(step) {
    const found = this.buckets.findIndex((bucket) => step < bucket.end);
    return found < 0 ? this.buckets.length - 1 : found;
  }

  // Move the cursor to a step, and tell what is there.
  show(step, said = true) {
    if (!this.view.length) return;
    this.at = Math.max(0, Math.min(this.view.length - 1, step));
    if (this.at < this.from || this.at >= this.to) this.window(this.at - (this.to - this.from) / 2, this.to - this.from);
    const bucket = this.buckets[this.bucket(this.at)];
    this.cursor.setAttribute("x", this.x(bucket.start).toFixed(1));
    this.cursor.setAttribute("width", Math.max(this.x(bucket.end) - this.x(bucket.start), 1.5).toFixed(2));
    this.tell(bucket);
    this.svg.setAttribute("aria-valuenow", this.at);
    if (said) this.svg.setAttribute("aria-valuetext", this.readout.innerText);
  }

  tell(bucket) {
    const told = this.view.step(this.at);
    const many = bucket.end - bucket.start > 1 && this.at === bucket.step;
    const of = many ? `, the largest of steps ${bucket.start} to ${bucket.end - 1}` : "";
    const head = make("p", { class: "moment" });
    head.append(make("b", {}, formatBytes(this.view.resident(this.at))), ` at step ${this.at} (${told.phase}${of})`);
    const facts = [["Op", told.does], ["Module", told.module], ["Source", told.source]];
    if (told.seconds) facts.push(["Takes", formatSeconds(told.seconds)]);
    const list = make("dl", { class: "facts" });
    for (const [name, text] of facts) if (text) list.append(make("dt", {}, name), make("dd", {}, text));
    this.readout.replaceChildren(make("div", {}, head, list), this.alive());
  }

  alive() {
    const found = this.view.largest(this.at, 6);
    const most = Math.max(...found.map((index) => this.view.bytes[index]), 1);
    const list = make("ul", { class: "alive" });
    for (const index of found) {
      const { where, what } = this.view.name(index);
      const bar = make("i", { class: this.view.bands[this.view.band[index]].shade });
      bar.style.width = `${Math.max((60 * this.view.bytes[index]) / most, 2)}px`;
      list.append(make("li", {}, make("span", { class: "size" }, formatBytes(this.view.bytes[index])),
        make("span", { class: "bar" }, bar), make("span", {}, `${where} `, make("small", {}, what))));
    }
    return make("div", {}, make("p", {}, "Largest, besides what is there all along"), list);
  }

  // Show a number of steps from a step on.
  window(from, count) {
    count = Math.round(Math.max(Math.min(count, this.view.length), Math.min(12, this.view.length)));
    this.from = Math.round(Math.max(0, Math.min(from, this.view.length - count)));
    this.to = this.from + count;
    this.buckets = this.view.buckets(this.from, this.to, 500);
    this.draw();
  }

  zoom(factor) {
    const count = Math.round((this.to - this.from) / factor);
    this.window(this.at - count * ((this.at - this.from) / Math.max(this.to - this.from, 1)), count);
    this.show(this.at);
  }

  draw() {
    const parts = [...this.grid(), ...this.stack(), ...this.lines(), ...this.labels(), ...this.crosses()];
    this.svg.replaceChildren(...parts, this.cursor);
  }

  element(tag, attributes, text = "") {
    const element = document.createElementNS(this.svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    return element;
  }

  edge(heights) {
    const corners = heights.map((size, index) => {
      const { start, end } = this.buckets[index];
      const y = this.y(size).toFixed(1);
      return [`${this.x(start).toFixed(1)},${y}`, `${this.x(end).toFixed(1)},${y}`];
    });
    return corners.flat();
  }

  *grid() {
    const { left, right, width, height, bottom, ticks } = this.frame;
    for (const [size, label] of ticks) {
      const y = this.y(size).toFixed(1);
      yield this.element("path", { class: "grid", d: `M${left},${y}H${width - right}` });
      yield this.element("text", { x: left - 8, y, dy: "0.35em", "text-anchor": "end" }, label);
    }
    const count = this.to - this.from;
    const gap = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5, 6].map((power) => digit * 10 ** power))
      .sort((one, other) => one - other).find((found) => count / found <= 10) ?? count;
    for (let step = Math.ceil(this.from / gap) * gap; step < this.to; step += gap) {
      yield this.element("text", { x: this.x(step).toFixed(1), y: height - bottom + 16, "text-anchor": "middle" }, String(step));
    }
  }

  *stack() {
    let floor = this.buckets.map(() => 0);
    for (const [band, { name, shade }] of this.view.bands.entries()) {
      const top = this.buckets.map((bucket) => this.view.tops[band][bucket.step]);
      const path = this.element("path", { class: shade, d: `M${this.edge(top).join("L")}L${this.edge(floor).reverse().join("L")}Z` });
      path.append(this.element("title", {}, name));
      yield path;
      floor = top;
    }
  }

  *lines() {
    if (this.number) return; // other lines are laid on the steps of the plan
    const changes = this.data.uncapped;
    if (changes.length) yield this.element("path", { class: "uncapped", d: `M${this.edge(this.highest(changes)).join("L")}` });
    if (this.data.reserved.length) yield this.reserved(...this.data.reserved);
    if (this.chosen) yield this.overlay(this.chosen);
  }

  // The band between what is allocated at the peak and what is reserved for it.
  reserved(allocated, reserved) {
    const { left, right, width } = this.frame;
    const [low, top] = [allocated, reserved].map((size) => this.y(size).toFixed(1));
    const path = this.element("path", { class: "reserved", d: `M${left},${top}H${width - right}V${low}H${left}Z` });
    path.append(this.element("title", {}, `reserved ${formatBytes(reserved)}, of which ${formatBytes(allocated)} are allocated at the peak`));
    return path;
  }

  // Another plan's line, told as a fixed number of runs of steps.
  overlay(line) {
    const edge = (index) => this.x(Math.floor((this.view.length * index) / line.length));
    const { left, right, width } = this.frame;
    const inside = (x) => Math.max(left, Math.min(width - right, x)).toFixed(1);
    const corners = line.map((size, index) => `${inside(edge(index))},${this.y(size).toFixed(1)}L${inside(edge(index + 1))},${this.y(size).toFixed(1)}`);
    const seen = corners.filter((_, index) => edge(index + 1) >= left && edge(index) <= width - right);
    return this.element("path", { class: "chosen", d: `M${seen.join("L")}` });
  }

  // A line that is told by its changes, at its highest in each bucket.
  highest(changes) {
    let at = 0;
    return this.buckets.map(({ start, end }) => {
      while (at + 1 < changes.length && changes[at + 1][0] <= start) at += 1;
      let most = changes[at][1];
      for (let next = at + 1; next < changes.length && changes[next][0] < end; next += 1) most = Math.max(most, changes[next][1]);
      return most;
    });
  }

  *labels() {
    const { left, right, top, width, height, bottom } = this.frame;
    const boundary = this.view.boundary;
    if (boundary >= this.from && boundary <= this.to) {
      const x = this.x(boundary);
      yield this.element("path", { class: "boundary", d: `M${x.toFixed(1)},${top - 18}V${height - bottom}` });
      if (x > left + 60) yield this.element("text", { class: "phase", x: x - 7, y: top - 9, "text-anchor": "end" }, "forward");
      if (x < width - right - 60) yield this.element("text", { class: "phase", x: x + 7, y: top - 9 }, "backward");
    } else {
      yield this.element("text", { class: "phase", x: left, y: top - 9 }, boundary > this.to ? "forward" : "backward");
    }
    const budget = this.data.budget;
    if (budget === null || budget > this.frame.bytes) return;
    const y = this.y(budget);
    yield this.element("path", { class: "budget", d: `M${left},${y.toFixed(1)}H${width - right}` });
    yield this.element("text", { class: "budget-label", x: width - right - 4, y: y - 5, "text-anchor": "end" }, `budget ${formatBytes(budget)}`);
  }

  *crosses() {
    if (!this.number && this.data.points.length) yield this.element("path", { class: "seen", d: this.seen() });
    for (const [step, size, says] of this.data.marks) {
      if (this.number || step < this.from || step >= this.to) continue;
      const [x, y] = [this.x(step + 0.5), this.y(size)];
      const mark = this.element("path", { class: "measured", d: `M${x - 5},${y - 5}l10,10M${x - 5},${y + 5}l10,-10` });
      mark.append(this.element("title", {}, says));
      yield mark;
    }
  }

  // What was measured after each run, the largest of each bucket.
  seen() {
    const most = new Map();
    for (const [step, size] of this.data.points) {
      if (step < this.from || step >= this.to) continue;
      const index = this.bucket(step);
      most.set(index, Math.max(size, most.get(index) ?? 0));
    }
    const place = ([index, size]) => [this.x((this.buckets[index].start + this.buckets[index].end) / 2), this.y(size)];
    return [...most].map(place).map(([x, y]) => `M${x.toFixed(1)},${y.toFixed(1)}h0`).join("");
  }

  // The bucket under the pointer.
  under(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / Math.max(box.width, 1)) * this.frame.width;
    const { left, right, width } = this.frame;
    const share = (x - left) / (width - left - right);
    const step = Math.floor(this.from + share * (this.to - this.from));
    return this.buckets[this.bucket(Math.max(this.from, Math.min(this.to - 1, step)))];
  }

  listen() {
    this.svg.addEventListener("pointerdown", (event) => {
      this.dragged = this.under(event);
      if (this.dragged) this.show(this.dragged.step);
    });
    this.svg.addEventListener("pointermove", (event) => {
      const bucket = this.under(event);
      if (bucket) this.show(bucket.step, false);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const [from, to] = [this.dragged, this.under(event)];
      this.dragged = null;
      if (!from || !to || Math.abs(this.x(from.start) - this.x(to.start)) < 12) return;
      const [first, last] = from.start < to.start ? [from, to] : [to, from];
      this.window(first.start, last.end - first.start);
      this.show(to.step);
    });
    this.svg.addEventListener("pointerleave", () => (this.dragged = null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    find("tools").hidden = false;
    find("in").addEventListener("click", () => this.zoom(2));
    find("out").addEventListener("click", () => this.zoom(0.5));
    find("whole").addEventListener("click", () => this.zoom(1 / this.view.length));
    for (const radio of document.getElementsByName("view")) {
      radio.addEventListener("change", () => {
        this.look(Number(radio.value));
        this.draw();
        this.show(this.at);
      });
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.view.length) return;
    const index = this.bucket(this.at);
    const move = (by) => this.buckets[Math.max(0, Math.min(this.buckets.length - 1, index + by))].step;
    const past = (by) => {
      const step = move(by);
      return step === this.at ? this.at + Math.sign(by) : step; // beyond the window's edge
    };
    const keys = {
      ArrowLeft: () => past(-1), ArrowDown: () => past(-1), ArrowRight: () => past(1), ArrowUp: () => past(1),
      PageUp: () => move(-20), PageDown: () => move(20),
      Home: () => 0, End: () => this.view.length - 1, p: () => this.view.peak,
    };
    const zooms = { "+": 2, "=": 2, "-": 0.5, 0: 1 / this.view.length };
    if (event.key in keys) this.show(keys[event.key]());
    else if (event.key in zooms) this.zoom(zooms[event.key]);
    else return;
    event.preventDefault();
  }

  // Lay another plan's line over the timeline; without one, take it away.
  choose(line, name) {
    this.chosen = line;
    find("chosen-key").hidden = !line;
    find("chosen-key").lastElementChild.textContent = name;
    this.draw();
  }
}

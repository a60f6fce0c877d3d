// A schedule to look at: the columns of the data unpacked, and the bytes of each band at each step.
const running = (gaps) => {
  let sum = 0;
  return Int32Array.from(gaps, (gap) => (sum += gap));
};

class View {
  constructor(data, raw) {
    this.data = data;
    this.steps = raw.steps;
    this.boundary = raw.boundary;
    this.peak = raw.peak;
    this.again = new Set(running(raw.again));
    this.bands = raw.bands.map(([name, shade]) => ({ name: data.texts[name], shade }));
    const { start, length, bytes, band, of, what } = raw.stays;
    this.start = running(start);
    this.end = this.start.map((at, index) => at + length[index]);
    this.of = of;
    this.band = band;
    this.what = what.map((number) => data.texts[number]);
    this.bytes = bytes.map((size, index) => (size < 0 ? data.values.bytes[of[index]] : size));
  }

  get length() {
    return this.steps.length;
  }

  // Heights of the stack: tops[b][s] are the bytes of bands 0..b at step s. Worked out at the first zoom.
  get tops() {
    if (!this.known) {
      const change = this.bands.map(() => new Float64Array(this.length + 1));
      this.bytes.forEach((size, index) => {
        change[this.band[index]][this.start[index]] += size;
        change[this.band[index]][this.end[index]] -= size;
      });
      change.forEach((line, band) => {
        for (let step = 1; step < this.length; step += 1) line[step] += line[step - 1];
        if (band) for (let step = 0; step < this.length; step += 1) line[step] += change[band - 1][step];
      });
      this.known = change;
    }
    return this.known;
  }

  resident(step) {
    return this.tops.length ? this.tops[this.tops.length - 1][step] : 0;
  }

  // Runs of neighbouring steps, each shown by its largest one, so that no peak is lost.
  buckets(from, to, most) {
    const count = Math.min(most, to - from);
    const edge = (index) => from + Math.floor(((to - from) * index) / count);
    return Array.from({ length: count }, (_, index) => {
      let step = edge(index);
      for (let other = step + 1; other < edge(index + 1); other += 1) {
        if (this.resident(other) > this.resident(step)) step = other;
      }
      return { start: edge(index), end: edge(index + 1), step };
    });
  }

  // The largest stays at a step, besides what is there during the whole step.
  largest(step, most) {
    const found = [];
    for (let index = 0; index < this.start.length && this.start[index] <= step; index += 1) {
      if (step >= this.end[index] || this.end[index] - this.start[index] === this.length) continue;
      if (found.length === most && this.bytes[index] <= this.bytes[found[most - 1]]) continue;
      found.push(index);
      found.sort((one, other) => this.bytes[other] - this.bytes[one]);
      found.length = Math.min(found.length, most);
    }
    return found;
  }

  // A stay in words: where it comes from, what it is, its own name.
  name(index) {
    const { texts, values, ops } = this.data;
    const of = this.of[index];
    const what = this.what[index];
    if (what === "fixed") return { where: texts[of], what };
    if (what === "value" || what === "copy") {
      const name = texts[values.name[of]];
      const where = texts[values.path[of]];
      const made = texts[values.what[of]] + (what === "copy" ? ", a second copy" : "");
      return { where, what: name === where ? made : `${made}, ${name}` };
    }
    return { where: texts[ops.module[of]] || texts[ops.name[of]], what: `${what} of ${texts[ops.name[of]]}` };
  }

  // A step in words.
  step(step) {
    const { texts, values, ops } = this.data;
    const phase = step < this.boundary ? "forward" : "backward";
    let ran = step; // a drop is told with the run that it stands after
    while (ran >= 0 && this.steps[ran] < 0) ran -= 1;
    const drops = ran < step ? texts[values.name[-1 - this.steps[step]]] : "";
    if (ran < 0) return { phase, does: `drops ${drops}` };
    const op = this.steps[ran];
    const name = texts[ops.name[op]];
    return {
      phase,
      does: drops ? `drops ${drops}, after ${name}` : `${this.again.has(ran) ? "recomputes" : "runs"} ${name}`,
      module: texts[ops.module[op]],
      source: texts[ops.source[op]],
      seconds: drops ? 0 : ops.seconds[op],
    };
  }
}

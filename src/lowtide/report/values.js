// The table of values: all rows of the data, sorted and filtered as the reader likes, members on demand.
class Values {
  constructor(data) {
    this.body = find("spent").tBodies[0];
    this.data = data;
    this.rows = data.groups.map((group) => this.row(group));
    this.by = 5;
    this.down = true;
    this.most = 40;
    this.listen();
    this.draw();
  }

  // Cells as shown, keys to sort by, and the text that the filter looks at.
  row([where, what, decided, sort, source, bytes, share, average, members]) {
    const { texts } = this.data;
    const count = members === 1 ? 1 : members.length;
    return {
      keys: [texts[where], texts[what], count, bytes, share, average, texts[decided], texts[source]],
      sort: texts[sort],
      members: count > 1 ? members : [],
      text: [where, what, decided, source].map((text) => texts[text]).join(" ").toLowerCase(),
    };
  }

  cells(keys) {
    const [where, what, count, bytes, share, average, decided, source] = keys;
    const shown = [where, what, count > 1 ? `×${count}` : "", formatBytes(bytes), formatShare(share), formatBytes(average), decided, source];
    return shown.map((text, index) => make("td", index > 1 && index < 6 ? { class: "number" } : {}, text));
  }

  line(row) {
    const line = make("tr", {}, ...this.cells(row.keys));
    if (row.members.length) {
      const button = make("button", { class: "fold", "aria-expanded": "false" }, row.keys[0]);
      button.addEventListener("click", () => this.unfold(row, line, button));
      line.firstChild.replaceChildren(button);
    }
    return line;
  }

  // The members of a row below it, or away again.
  unfold(row, line, button) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) {
      while (line.nextSibling?.classList.contains("member")) line.nextSibling.remove();
      return;
    }
    const { texts, values } = this.data;
    const lines = row.members.slice(0, 200).map((value) => {
      const [bytes, share] = [values.bytes[value], values.share[value]];
      const keys = [texts[values.path[value]], texts[values.name[value]], 1, bytes, share, bytes * share, row.keys[6], row.keys[7]];
      return make("tr", { class: "member" }, ...this.cells(keys));
    });
    if (row.members.length > lines.length) {
      lines.push(make("tr", { class: "member" }, make("td", { colspan: 8 }, `and ${row.members.length - lines.length} more`)));
    }
    line.after(...lines);
  }

  found() {
    const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const sort = find("sort-of").selectedIndex ? find("sort-of").value : "";
    const rows = this.rows.filter((row) => (!sort || row.sort === sort) && words.every((word) => row.text.includes(word)));
    const order = (one, other) => (typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true }));
    return rows.sort((one, other) => (this.down ? -1 : 1) * order(one.keys[this.by], other.keys[this.by]));
  }

  draw() {
    const rows = this.found();
    this.body.replaceChildren(...rows.slice(0, this.most).map((row) => this.line(row)));
    const average = rows.reduce((sum, row) => sum + row.keys[5], 0);
    find("matches").textContent = `${rows.length} of ${this.rows.length} rows, ${formatBytes(average)} on average`;
    find("more").hidden = rows.length <= this.most;
    for (const [index, head] of this.heads.entries()) {
      head.setAttribute("aria-sort", index !== this.by ? "none" : this.down ? "descending" : "ascending");
    }
  }

  sort(index) {
    this.down = index === this.by ? !this.down : index > 1 && index < 6;
    this.by = index;
    this.draw();
  }

  listen() {
    this.heads = [...find("spent").tHead.rows[0].cells];
    for (const [index, head] of this.heads.entries()) {
      const button = make("button", { class: "sort" }, head.textContent);
      button.addEventListener("click", () => this.sort(index));
      head.replaceChildren(button);
    }
    find("filters").hidden = false;
    for (const name of ["filter", "sort-of"]) {
      find(name).addEventListener("input", () => {
        this.most = 40;
        this.draw();
      });
    }
    find("more").addEventListener("click", () => {
      this.most += 200;
      this.draw();
    });
  }
}

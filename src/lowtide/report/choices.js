// The plans to choose from: choosing one draws its line over the timeline and lists what it decides otherwise.
class Choices {
  constructor(data, timeline) {
    this.data = data;
    this.timeline = timeline;
    this.panel = find("changes");
    this.radios = [...document.getElementsByName("choice")];
    this.points = [...document.querySelectorAll("[data-choice]")];
    for (const radio of this.radios) radio.addEventListener("change", () => this.choose(Number(radio.value)));
    for (const point of this.points) {
      point.addEventListener("click", () => {
        const radio = this.radios[Number(point.dataset.choice)];
        radio.checked = true;
        this.choose(Number(radio.value));
      });
    }
  }

  choose(index) {
    const choice = this.data.choices[index];
    const cells = [...this.radios[index].closest("tr").cells].map((cell) => cell.textContent.trim());
    for (const point of this.points) point.classList.toggle("picked", Number(point.dataset.choice) === index);
    this.timeline.choose(choice.line ?? null, `the chosen plan, ${cells[1]}`);
    this.panel.hidden = Boolean(choice.this);
    if (choice.this) return;
    const title = make("h3", {}, `What the plan of ${cells[1]} would change`);
    const says = make("p", {}, `${cells[0]}: ${cells[2]} of the uncapped peak, extra time ${cells[3]}, ${cells[4]} recomputations. Its line is in the timeline above.`);
    this.panel.replaceChildren(title, says, this.changes(choice.changes));
  }

  changes(rows) {
    if (!rows.length) return make("p", {}, "It decides the same for every value, in another order.");
    const { texts } = this.data;
    const head = make("tr", {}, ...["Where", "Bytes", "Now", "Then"].map((name) => make("th", { scope: "col" }, name)));
    const body = make("tbody");
    for (const [where, what, count, bytes, before, after] of rows) {
      const many = count > 1 ? ` ×${count}` : "";
      body.append(make("tr", {}, make("td", {}, texts[where], " ", make("small", {}, texts[what] + many)),
        make("td", { class: "number" }, formatBytes(bytes)), make("td", {}, texts[before]), make("td", {}, texts[after])));
    }
    return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body));
  }
}

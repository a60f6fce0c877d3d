// Bytes and times as people read them, and elements whose text is never read as HTML.
const formatBytes = (size) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(size) >= 1024 && power < units.length - 1) {
    size /= 1024;
    power += 1;
  }
  return `${size.toFixed(power ? 2 : 0)} ${units[power]}`;
};

const formatSeconds = (seconds) => {
  const found = [[1, "s"], [1e3, "ms"], [1e6, "us"]].find(([factor]) => seconds * factor >= 1) ?? [1e6, "us"];
  return `${Number((seconds * found[0]).toPrecision(3))} ${found[1]}`;
};

const formatShare = (share) => `${(100 * share).toFixed(1)}%`;

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

const find = (id) => document.getElementById(id);

// Hide the rows of a table after the first ones until a reader asks for them; paper has them all.
const foldRows = (table, button, most) => {
  const rest = [...table.tBodies[0].rows].slice(most);
  if (rest.length < 2) return;
  for (const row of rest) row.classList.add("rest");
  button.hidden = false;
  button.textContent = `Show ${rest.length} more`;
  button.addEventListener("click", () => {
    for (const row of rest) row.classList.remove("rest");
    button.hidden = true;
  });
};

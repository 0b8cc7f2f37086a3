// Tables that follow their data. Nodes are kept from one snapshot to the next, so that focus and selection stay; names
// come from clients and operators, and go into the page as text only.

/** Set text, touching the page only where it differs. */
export function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function make(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}

/** Bring `place`'s children in line with `items`: made by `create(item)` when new, then brought up to date by `fill`. */
export function follow(place, items, keyOf, create, fill) {
  const known = new Map([...place.children].map((child) => [child.dataset.key, child]));
  const times = new Map();
  items.forEach((item, at) => {
    const name = String(keyOf(item));
    times.set(name, (times.get(name) ?? 0) + 1);
    const key = `${times.get(name)} ${name}`;
    let child = known.get(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    known.delete(key);
    if (place.children[at] !== child) place.insertBefore(child, place.children[at] ?? null);
    fill(child, item);
  });
  for (const child of known.values()) child.remove();
}

/**
 * A table. A column is {label, kind, fill}: `fill(cell, item)` brings a cell up to date; the first column heads its row.
 * `none` is said where there are no rows.
 */
export function table(node, columns, items, keyOf, none) {
  const heads = columns.map((column) => column.label).join("\n");
  if (node.dataset.heads !== heads) {
    node.dataset.heads = heads;
    const head = make("tr");
    for (const { label, kind = "" } of columns) head.append(Object.assign(make("th", kind, label), { scope: "col" }));
    node.tHead.replaceChildren(head);
    node.tBodies[0].replaceChildren();
  }
  const create = (item) => {
    const row = make("tr");
    if (item === null) {
      row.append(Object.assign(make("td", "none", none), { colSpan: columns.length }));
      return row;
    }
    columns.forEach(({ label, kind = "" }, nth) => {
      const cell = make(nth ? "td" : "th", kind);
      if (nth) cell.dataset.label = label;
      else cell.scope = "row";
      row.append(cell);
    });
    return row;
  };
  const fill = (row, item) => item !== null && columns.forEach((column, nth) => column.fill(row.children[nth], item));
  follow(node.tBodies[0], items.length ? items : [null], (item) => (item === null ? "" : keyOf(item)), create, fill);
}

/** A column of text made by `say(item)`. */
export const column = (label, say, kind = "") => ({ label, kind, fill: (cell, item) => set(cell, say(item)) });

/** Parts of a bar, each {name, share, title}: shares of the whole, from 0 to 1. Decoration: the numbers stand beside it. */
export function bar(cell, text, parts) {
  if (!cell.firstElementChild) {
    cell.append(make("span"), make("div", "bar"));
    cell.lastElementChild.ariaHidden = "true";
  }
  set(cell.firstElementChild, text);
  follow(cell.lastElementChild, parts, (part) => part.name, () => make("i"), (piece, part) => {
    piece.className = part.name;
    piece.style.width = `${Math.min(100, part.share * 100)}%`;
    if (part.title !== undefined && piece.title !== part.title) piece.title = part.title;
  });
}

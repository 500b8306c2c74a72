// Small helpers. Text from the server only ever becomes text nodes and attributes.
const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Sets the text of an element without children. Nothing is written if it is the same. */
export function setText(node, text) {
  const value = String(text ?? "");
  const only = node.firstChild;
  if (only === null ? value === "" : only === node.lastChild && only.nodeType === Node.TEXT_NODE && only.data === value) return;
  node.textContent = value;
}

export function setAttribute(node, name, value) {
  const text = String(value ?? "");
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

const rowsOf = new WeakMap();

/**
 * Makes the children of `parent` those of `items`, in order. A child that stays is updated, not rebuilt.
 * `parent` has no other children. Keys that repeat are numbered.
 */
export function reconcile(parent, items, keyOf, create, update) {
  const before = rowsOf.get(parent) ?? new Map();
  const now = new Map();
  for (const item of items) {
    let key = String(keyOf(item));
    for (let number = 2; now.has(key); number += 1) key = `${keyOf(item)}#${number}`;
    now.set(key, item);
  }
  const focused = document.activeElement;
  for (const [key, node] of before) {
    if (!now.has(key)) node.remove();
  }
  let place = parent.firstElementChild;
  for (const [key, item] of now) {
    const node = before.get(key) ?? create(item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
    update(node, item);
    now.set(key, node);
  }
  rowsOf.set(parent, now);
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

/** A row of a table: a `th` and then one `td` for each further column; "n" is a number's class. */
export function makeRow(classes) {
  const cells = classes.map((name, column) =>
    column === 0 ? make("th", { scope: "row" }) : make("td", name ? { class: name } : {}),
  );
  return make("tr", {}, ...cells);
}

export function fillRow(row, texts) {
  texts.forEach((text, column) => setText(row.cells[column], text));
}

/** Rows of plain text: `textsOf` gives the texts of an item, `mark` sets attributes. */
export function fillTable(body, items, keyOf, classes, textsOf, mark = () => {}) {
  reconcile(body, items, keyOf, () => makeRow(classes), (row, item) => {
    fillRow(row, textsOf(item));
    mark(row, item);
  });
}

export function fillList(list, texts) {
  reconcile(list, texts, (text) => text, () => make("li"), (node, text) => setText(node, text));
}

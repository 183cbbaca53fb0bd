"use strict";

/* Renders Markdown as DOM elements. markdown-it parses; this file creates every element, and parses no text as HTML. */

const MAX_NESTING = 32, MAX_LABEL_CHARACTERS = 40;
const LINK_PROTOCOLS = ["http:", "https:", "mailto:"];
// A view waits at least MIN_PAUSE_MS after an update, and PAUSE_RATIO times as long as the update took.
const MIN_PAUSE_MS = 16, PAUSE_RATIO = 4;

/** Tags of the tokens that have children. Headings continue the page's outline: h1 is the page, h2 a turn. */
const TAGS = {
  paragraph_open: "p", blockquote_open: "blockquote", bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li",
  em_open: "em", strong_open: "strong", s_open: "s", link_open: "a",
  table_open: "table", thead_open: "thead", tbody_open: "tbody", tr_open: "tr", th_open: "th", td_open: "td",
};

const markdown = makeParser();

function makeParser() {
  const parser = markdownit({ html: false, maxNesting: MAX_NESTING });
  // An image would need a request to another server, so the page shows a link.
  parser.disable("image");
  // The Markdown source of an invalid link stays text.
  parser.validateLink = (url) => URL.canParse(url) && LINK_PROTOCOLS.includes(new URL(url).protocol);
  const tokenize = parser.block.tokenize.bind(parser.block);
  parser.block.tokenize = (state, startLine, endLine) => {
    if (state.level < MAX_NESTING) tokenize(state, startLine, endLine);
    // The library would drop blocks that are nested too deeply.
    else pushAsParagraph(state, startLine, endLine);
  };
  return parser;
}

/** Adds the lines of the current block to a parser's tokens, as one paragraph. */
function pushAsParagraph(state, startLine, endLine) {
  let line = startLine;
  while (line < endLine && (state.isEmpty(line) || state.sCount[line] >= state.blkIndent)) line++;
  state.push("paragraph_open", "p", 1);
  const text = state.push("inline", "", 0);
  text.content = state.getLines(startLine, line, state.blkIndent, false).trim();
  text.children = [];
  state.push("paragraph_close", "p", -1);
  state.line = line;
}

function makeElement(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Returns a fragment with the elements of markdown-it's tokens. */
function buildNodes(tokens) {
  const fragment = document.createDocumentFragment();
  const parents = [fragment];
  for (const token of tokens) {
    const parent = parents.at(-1);
    if (token.nesting === -1) parents.pop();
    // A paragraph of a tight list has no element.
    else if (token.hidden) parents.push(parent);
    else if (token.nesting === 1) parents.push(appendElement(parent, token));
    else parent.append(buildLeaf(token));
  }
  return fragment;
}

/** Appends the element of an opening token. Returns the element that takes the children. */
function appendElement(parent, token) {
  const isHeading = token.type === "heading_open";
  const element = makeElement(isHeading ? `h${Math.min(Number(token.tag[1]) + 2, 6)}` : TAGS[token.type] ?? "span");
  if (token.type === "link_open") {
    element.href = token.attrGet("href");
    if (token.attrGet("title")) element.title = token.attrGet("title");
    element.target = "_blank";
    element.rel = "noopener noreferrer";
  }
  if (token.attrGet("start") !== null) element.start = token.attrGet("start");
  if (token.type === "th_open") element.scope = "col";
  const alignment = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (alignment) element.className = alignment[1];
  if (token.type === "table_open") {
    const box = makeScrollBox("div", "table", "Table");
    box.append(element);
    parent.append(box);
  } else parent.append(element);
  return element;
}

function buildLeaf(token) {
  switch (token.type) {
    case "inline": return buildNodes(token.children);
    case "softbreak": return document.createTextNode("\n");
    case "hardbreak": return makeElement("br");
    case "hr": return makeElement("hr");
    case "code_inline": return makeElement("code", "", token.content);
    case "fence": case "code_block": return buildCodeBlock(token.info.trim().split(/\s+/, 1)[0], token.content);
    default: return document.createTextNode(token.content);
  }
}

function buildCodeBlock(language, text) {
  const label = language.slice(0, MAX_LABEL_CHARACTERS);
  const button = makeElement("button", "copy-code", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label ? `Copy code, ${label}` : "Copy code");
  const head = makeElement("div", "code-head");
  head.append(makeElement("span", "language", label), button);
  const code = makeScrollBox("pre", "", label ? `Code, ${label}` : "Code");
  code.append(makeElement("code", "", text));
  const box = makeElement("div", "code-block");
  box.append(head, code);
  return box;
}

/** Returns an element that the keyboard can scroll. */
function makeScrollBox(tag, className, label) {
  const box = makeElement(tag, className);
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
  return box;
}

/** Makes the children of `target`, from index `first` on, equal to the children of `source`. Unchanged nodes stay, so
 *  that the focus and the selection in these nodes stay too. */
function updateChildren(target, source, first = 0) {
  const oldNodes = [...target.childNodes].slice(first), newNodes = [...source.childNodes];
  let numKept = 0;
  while (numKept < oldNodes.length && numKept < newNodes.length && oldNodes[numKept].isEqualNode(newNodes[numKept])) numKept++;
  const oldNode = oldNodes[numKept], newNode = newNodes[numKept];
  if (oldNode && newNode && oldNode.cloneNode(false).isEqualNode(newNode.cloneNode(false))) {
    updateChildren(oldNode, newNode);
    numKept++;
  }
  for (const node of oldNodes.slice(numKept)) node.remove();
  target.append(...newNodes.slice(numKept));
}

/** Markdown that arrives in pieces. An update renders only `tail`, the text after the finished blocks. */
class MarkdownView {
  /** runUpdate: calls its argument, a function that changes the element. */
  constructor(element, runUpdate) {
    this.element = element;
    this.runUpdate = runUpdate;
    this.tail = "";
    this.numFinishedNodes = 0;
    this.numParsedCharacters = 0;
    // Link definitions in finished blocks, to which links in later blocks may refer.
    this.references = Object.create(null);
    /** A block of code whose end has not arrived: {end: RegExp, code: element, partialLine: Text}; or null. */
    this.openCode = null;
    this.timer = null;
    this.pauseMs = MIN_PAUSE_MS;
  }

  append(text) {
    this.tail += text.replaceAll("\r", "");
    this.timer ??= setTimeout(() => this.update(), this.pauseMs);
  }

  /** Renders all text that has arrived. */
  update() {
    clearTimeout(this.timer);
    this.timer = null;
    const startTime = performance.now();
    this.runUpdate(() => {
      if (this.openCode) this.extendCode();
      if (!this.openCode) this.updateTail();
    });
    this.pauseMs = Math.max(MIN_PAUSE_MS, PAUSE_RATIO * (performance.now() - startTime));
  }

  parse(text) {
    this.numParsedCharacters += text.length;
    return markdown.parse(text, { references: Object.create(this.references) });
  }

  updateTail() {
    const numComplete = this.tail.lastIndexOf("\n") + 1;
    const completeText = this.tail.slice(0, numComplete);
    const tokens = this.parse(completeText);
    const starts = tokens.flatMap((token, index) => (token.level === 0 && token.nesting !== -1 ? [index] : []));
    // A block is finished when a complete line begins another block. An incomplete line may still join the block.
    const lastStart = starts.at(-1) ?? 0;
    const fragment = buildNodes(tokens.slice(0, lastStart));
    const numFinished = fragment.childNodes.length;
    const lastToken = tokens[lastStart];
    if (lastToken) this.finishBlocks(findLine(completeText, lastToken.map[0]));
    const fenceEnd = lastToken?.type === "fence" ? findFenceEnd(this.tail) : null;
    if (fenceEnd) fragment.append(buildNodes([lastToken]));
    else fragment.append(buildNodes(this.parse(this.tail)));
    updateChildren(this.element, fragment, this.numFinishedNodes);
    this.numFinishedNodes += numFinished;
    if (fenceEnd) this.openCodeBlock(fenceEnd);
  }

  /** Drops the finished blocks, which are the first `length` characters, from the tail. */
  finishBlocks(length) {
    const text = this.tail.slice(0, length);
    if (text.includes("]:")) {
      this.numParsedCharacters += text.length;
      markdown.parse(text, { references: this.references });
    }
    this.tail = this.tail.slice(length);
  }

  openCodeBlock(end) {
    const code = this.element.lastElementChild.querySelector("code");
    this.openCode = { end, code, partialLine: code.appendChild(document.createTextNode("")) };
    this.numFinishedNodes++;
    this.tail = this.tail.slice(this.tail.lastIndexOf("\n") + 1);
    this.extendCode();
  }

  /** Adds lines to the open code block, without parsing them as Markdown. */
  extendCode() {
    const { end, code, partialLine } = this.openCode;
    const lines = this.tail.split("\n");
    const endLine = lines.findIndex((line, index) => index < lines.length - 1 && end.test(line));
    const numLines = endLine === -1 ? lines.length - 1 : endLine;
    const text = lines.slice(0, numLines).map((line) => `${line}\n`).join("");
    if (text) partialLine.before(text);
    if (endLine === -1) {
      this.tail = lines.at(-1);
      // Hide the line while it may become the end of the block.
      partialLine.data = /^ {0,3}[`~]*\s*$/.test(this.tail) ? "" : this.tail;
    } else {
      this.tail = lines.slice(endLine + 1).join("\n");
      partialLine.remove();
      code.normalize();
      this.openCode = null;
    }
  }
}

/** Returns the offset of the line with the number `line`, counted from 0. */
function findLine(text, line) {
  let offset = 0;
  for (; line > 0; line--) offset = text.indexOf("\n", offset) + 1;
  return offset;
}

/** Returns the pattern of the line that ends the fenced code at the start of `text`, or null if the code has ended. For
 *  an indented fence, also returns null: the parser must read its lines, because they lose their indentation. */
function findFenceEnd(text) {
  const [, fence] = /^(`{3,}|~{3,})/.exec(text) ?? [];
  if (!fence) return null;
  const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
  const lines = text.split("\n").slice(1, -1);
  return lines.some((line) => end.test(line)) ? null : end;
}

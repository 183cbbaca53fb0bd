import json

import pytest
from page_actions import read_texts, send_message, wait_for_answers

# The first test that runs may have to fetch the browser.
pytestmark = pytest.mark.timeout(180)

RENDER = """(text, pieceSize, updateEvery) => {
  const view = new MarkdownView(document.createElement('div'), (update) => update());
  for (let start = 0, piece = 0; start < text.length; start += pieceSize, piece++) {
    view.append(text.slice(start, start + pieceSize));
    if (piece % updateEvery === updateEvery - 1) view.update();
  }
  view.update();
  return view;
}"""

DOCUMENT = """# Title

Some *emphasis*, **strong `code`** and ~~struck~~ text,
in two lines.

## Section with a [link](https://example.com/a?b=c "Title")

- one
- two
  1. nested
  2. list

     ```python
     def f():
         return "<b>"
     ```
- three

3. starts at three

> A quote
> > in a quote

| name | size |
|:-----|-----:|
| a    | 1    |
| b\\|c | **2** |

```rust
fn main() {}

    indented
```

Setext
---
    indented code

[reference]: https://example.com/reference

See [reference], <https://example.com> and <mail@example.com>.

***
~~~
a fence
that does not end"""

TEXTS_HARD_TO_SPLIT = [
    "para\n#no heading",
    "a | b\n---|---\nc | d",
    "a | b\n---|---x\n",
    "first\na | b\n--|--x\nlast",
    "- a\n\n\n  b\n- c\n\nd\n",
    "```py\ncode\n``\n```\nafter",
    "````\n```\ncode\n````\n\n```\n",
    "\n\n  ```\n  a\n ```\nb",
    "> ```\n> a\n\nb",
    "```\r\na\r\n```\r\nb\r\n",
    "[a]\n\n[a]: http://b.c/d\n\n[a] [A]\n\n[a]: http://b.c/other\n[a]",
    "a\n===\nb\n-\nc",
    "* a\n* b\n+ c\n1. d\n2) e",
    "~~~x y\n```\n~~~~ \ntext",
]


async def render(tab, text, piece_size=1_000_000, update_every=1):
    return await tab.evaluate(f"({RENDER})({json.dumps(text)}, {piece_size}, {update_every}).element.innerHTML")


async def test_document_becomes_elements(tab):
    await tab.evaluate(f"$('log').append(({RENDER})({json.dumps(DOCUMENT)}, 1e6, 1).element)")
    texts = {
        "h3": ["Title"],
        "h4": ["Section with a link", "Setext"],
        "em": ["emphasis"],
        "strong": ["strong code", "2"],
        "p code": ["code"],
        "s": ["struck"],
        "ul > li > ol > li:first-child": ["nested"],
        "li pre": ['def f():\n    return "<b>"\n'],
        "blockquote blockquote": ["in a quote"],
        "th": ["name", "size"],
        "td": ["a", "1", "b|c", "2"],
        "td.right": ["1", "2"],
        ".language": ["python", "rust", "", ""],
        ".copy-code": ["Copy"] * 4,
    }
    assert {selector: await read_texts(tab, f"#log {selector}") for selector in texts} == texts
    assert (await read_texts(tab, "#log .code-block code"))[1:] == [
        "fn main() {}\n\n    indented\n",
        "indented code\n",
        "a fence\nthat does not end",
    ]
    assert await tab.evaluate("document.querySelector('#log > div > ol').start") == 3
    links = "[...document.querySelectorAll('#log a')].map((link) => [link.href, link.rel, link.target])"
    assert await tab.evaluate(links) == [
        [address, "noopener noreferrer", "_blank"]
        for address in (
            "https://example.com/a?b=c",
            "https://example.com/reference",
            "https://example.com/",
            "mailto:mail@example.com",
        )
    ]


async def test_result_does_not_depend_on_how_text_arrives(tab):
    for text in [DOCUMENT, *TEXTS_HARD_TO_SPLIT]:
        whole = await render(tab, text)
        for piece_size in (1, 2, 7):
            assert await render(tab, text, piece_size) == whole, text


async def test_finished_blocks_keep_their_elements(tab):
    keeps_elements = f"""(() => {{
      const view = ({RENDER})('one\\n\\n- two\\n- three', 1e6, 1);
      const [paragraph, list] = view.element.children;
      const item = list.firstChild;
      view.append(' and\\n- four\\n\\n```\\na\\n');
      view.update();
      const code = view.element.querySelector('code').firstChild;
      view.append('b\\n```\\n\\nfive');
      view.update();
      return [paragraph, list, item, code].map((node) => view.element.contains(node));
    }})()"""
    assert await tab.evaluate(keeps_elements) == [True] * 4


BLOCKS = [
    "Some *text* with `code` and a [link](https://a.b).\n\n",
    "## Heading\n\n- item\n- item\n\n| a | b |\n|---|---|\n| c | d |\n\n",
    "```py\n" + "x = 1\n" * 50 + "```\n\n",
]


async def test_work_for_an_answer_grows_linearly_with_its_length(tab):
    for block in BLOCKS:
        counts = []
        for length in (10_000, 100_000):
            text = (block * (length // len(block) + 1))[:length]
            counts.append(await tab.evaluate(f"({RENDER})({json.dumps(text)}, 4, 10).numParsedCharacters"))
        assert 9 < counts[1] / counts[0] < 11, block
        assert counts[1] < 100_000 * 10, block


async def test_lines_of_an_open_code_block_are_not_parsed(tab):
    count_expression = f"({RENDER})('```\\n' + 'some line of code\\n'.repeat(6000), 4, 5).numParsedCharacters"
    assert await tab.evaluate(count_expression) < 200


async def test_updates_leave_most_of_the_time_to_the_browser(tab):
    """The long list is one block, so each update takes long."""
    share = """(async () => {
      let duration = 0, numUpdates = 0;
      const view = new MarkdownView(document.createElement('div'), (update) => {
        const start = performance.now();
        update();
        duration += performance.now() - start;
        numUpdates++;
      });
      view.append('- an *item* of a list\\n'.repeat(1500));
      view.update();
      const start = performance.now();
      duration = numUpdates = 0;
      while (numUpdates < 3) {
        view.append('- more\\n');
        await new Promise((resolve) => setTimeout(resolve, 1));
      }
      return duration / (performance.now() - start);
    })()"""
    assert await tab.evaluate(share) < 0.5


HOSTILE_TEXTS = {
    "html": "<script>document.title='owned'</script>\n\n<img src=x onerror=\"document.title='owned'\">"
    "\n\n<svg/onload=alert(1)>",
    "fence": "```<img src=x onerror=alert(1)>\n<script>\n```",
    "attribute": '[a](https://x.y"onmouseover="alert(1)) `<b onclick=alert(1)>`',
}
REFUSED_LINKS = [
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](data:text/html,x)",
    "[a](vbscript:x)",
    "[a](file:///etc/passwd)",
    "[a](//evil.example)",
    "[a](relative)",
    "![a](javascript:x)",
    "<javascript:alert(1)>",
    "[a]: javascript:alert(1)",
]


async def test_hostile_html_is_shown_as_text(tab, engine):
    for number, text in enumerate(HOSTILE_TEXTS.values(), 1):
        engine.reply = [*text.encode()]
        await send_message(tab, "hi")
        await wait_for_answers(tab, number)
    assert await tab.evaluate("document.querySelectorAll('.turn :is(img, script, svg, iframe, b)').length") == 0
    names = "[...document.querySelectorAll('.turn *')].flatMap((element) => element.getAttributeNames())"
    assert not {name for name in await tab.evaluate(names) if name.startswith(("on", "src", "style"))}
    assert (await read_texts(tab, ".assistant .text"))[0] == HOSTILE_TEXTS["html"].replace("\n\n", "")
    assert await read_texts(tab, ".assistant pre") == ["<script>\n"]
    assert await tab.evaluate("document.title") == "nanovllm"


async def test_links_of_other_schemes_stay_text(tab):
    for link in REFUSED_LINKS:
        html = await render(tab, link)
        assert html == f"<p>{link.replace('<', '&lt;').replace('>', '&gt;')}</p>"
    assert "<a" not in await render(tab, "[a](&#106;avascript:alert(1)) [b](java\tscript:x)")


async def test_remote_image_is_only_a_link(tab):
    html = await render(tab, "![x](https://example.com/x.png)")
    assert html.startswith('<p>!<a href="https://example.com/x.png"')


# (Markdown that is repeated 10,000 times, Markdown after the repetitions, text that the page must show)
REPETITIONS = [
    # A line of asterisks is a rule. A line of backticks opens a code block.
    ("*", "", ""),
    ("`", "", ""),
    ("*", "a", "*" * 10_000 + "a"),
    ("a*", "end", "end"),
    ("**a ", "", "**a " * 9_000),
    ("`", "a`", "`" * 10_000 + "a`"),
    ("[", "", "[" * 10_000),
    ("[a](", "", "[a](" * 9_000),
    ("<", "", "<" * 10_000),
    ("<!--", "", "<!--" * 10_000),
    ("&", "", "&" * 10_000),
    ("> ", "end", "> " * 9_000 + "end"),
    (">", "end", ">" * 9_000 + "end"),
    ("- ", "end", "- " * 9_000 + "end"),
    ("1. ", "end", "1. " * 9_000 + "end"),
    ("> - ", "end", "> - " * 9_000 + "end"),
    ("~~a", "", "a" * 100),
    ("|", "\n|-|", "|" * 10_000),
    ("a\n", "=", "a\n" * 9_000 + "a"),
    ("```\n", "", ""),
]


async def read_page_cpu_s(tab) -> float:
    metrics = await tab.send_command("Performance.getMetrics")
    return next(metric["value"] for metric in metrics["metrics"] if metric["name"] == "TaskDuration")


async def test_hostile_repetitions_are_shown_as_text_quickly(tab):
    await tab.send_command("Performance.enable", timeDomain="threadTicks")
    for repeated, end, shown in REPETITIONS:
        render_expression = f"""(() => {{
          const text = {json.dumps(repeated)}.repeat(10000) + {json.dumps(end)};
          return ({RENDER})(text, text.length, 1).element.textContent;
        }})()"""
        begin_s = await read_page_cpu_s(tab)
        text = await tab.evaluate(render_expression)
        cpu_s = await read_page_cpu_s(tab) - begin_s
        # Quadratic work would take minutes.
        assert 0 < cpu_s < 5, repeated
        assert shown in text, repeated


async def test_deep_nesting_has_a_limit(tab):
    for text in ("> " * 10_000 + "end", "".join(f"{'  ' * depth}- a\n" for depth in range(300)), "*a **b " * 1000):
        depth = f"""(() => {{
          let depth = 0;
          for (const element of ({RENDER})({json.dumps(text)}, 1e6, 1).element.querySelectorAll('*')) {{
            let level = 0;
            for (let parent = element; parent; parent = parent.parentElement) level++;
            depth = Math.max(depth, level);
          }}
          return depth;
        }})()"""
        assert await tab.evaluate(depth) < 50
    nested = await render(tab, "".join(f"{'  ' * depth}- item{depth}\n" for depth in range(300)))
    assert all(f"item{depth}" in nested for depth in range(300))

"""The documentation: links lead somewhere, code blocks use what exists, the reference and the navigation are whole."""

from __future__ import annotations

import ast
import json
import posixpath
import re
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest
import yaml

from reigen.config import VARIABLES, WITHOUT_EFFECT
from reigen.migrate.public_names import attribute_names, call_parameters, definition, find_module
from tests.docs.blocks import FENCE, blocks, blocks_of, parse, written_pages
from tests.docs.programs import ELSEWHERE, PROGRAMS
from tools.docs import code_pages
from tools.docs.__main__ import ROOT, let_names_break, read_pages
from tools.docs.links import find_links, lead_to_source_pages, repository_path
from tools.docs.parsers import command_parsers

_HEADING = re.compile(r"^#{1,6} (.+?)(?: \{ ?#([\w.-]+) ?\})?$", re.MULTILINE)


@cache
def pages() -> dict[str, str]:
    return read_pages()


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them; GitHub's are the same for our headings."""
    found: set[str] = set()
    for text, given in _HEADING.findall(FENCE.sub("", markdown)):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
        slug = re.sub(r"[\s-]+", "-", words.strip().lower())
        found.add(given or slug)
    return found | set(re.findall(r"(?:id|name)=\"([\w.-]+)\"", markdown))


def broken_links(page: str, markdown: str, texts: dict[str, str]) -> Iterator[str]:
    """Links of a page that lead to no file, or to no heading; paths are those of the repository."""
    for target in find_links(markdown):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        where = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        is_there = where in texts or (ROOT / where).exists()
        if not is_there or (anchor and where in texts and anchor not in anchors(texts[where])):
            yield target


def test_broken_links_are_found() -> None:
    texts = {"docs/a.md": "# A b\n\n## `C_d`: e\n", "docs/b.md": ""}
    good = "[x](a.md)\n![x](a.md#a-b) [x](a.md#c_d-e) [x](../README.md) [x](https://x.y/z#q)\n\n```\n[x](no.md)\n```\n"
    assert list(broken_links("docs/b.md", good, texts)) == []
    assert list(broken_links("docs/b.md", "[x](c.md) [y](a.md#q) [z](#z)", texts)) == ["c.md", "a.md#q", "#z"]


def test_links_and_anchors_lead_somewhere() -> None:
    made = {f"docs/{name}": text for name, text in code_pages.make_pages().items()}
    texts = written_pages() | made
    assert {page: found for page, text in texts.items() if (found := list(broken_links(page, text, texts)))} == {}


def test_links_out_of_the_docs_get_pages_that_show_the_files() -> None:
    assert repository_path("a/b.md", "../../examples/x.py") == "examples/x.py"
    assert repository_path("a.md", "b.md#c") is None
    text = lead_to_source_pages(ROOT, "a/b.md", "[x](../../Makefile) [y](../../SECURITY.md#z) [z](c.md)")
    assert text == "[x](../source/Makefile.md) [y](../project/security.md#z) [z](c.md)"
    for page, text in pages().items():
        for target in find_links(lead_to_source_pages(ROOT, page, text)):
            if not re.match(r"[a-z]+:|#", target) and target.partition("#")[0].endswith(".md"):
                where = posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))
                assert where in pages(), (page, target)


def test_long_names_in_tables_may_be_broken_behind_underscores() -> None:
    row = "| reigen_steps_total | counter | a_b | [x](c_d_e_f_g_h_i_j.md) |"
    assert let_names_break(f"{row}\n| `a_long_name_of` | b |\n| a_b | c |\n") == (
        f"{row.replace('reigen_steps_total', 'reigen_<wbr>steps_<wbr>total')}\n| `a_long_name_of` | b |\n| a_b | c |\n"
    )


def navigation(entries: object) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, list | dict):
        for each in entries.values() if isinstance(entries, dict) else entries:
            yield from navigation(each)


def test_the_navigation_has_pages_that_exist_once_and_all_that_are_made() -> None:
    listed = list(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(pages())
    assert set(listed) >= set(code_pages.make_pages())


def test_the_reference_has_every_knob_and_command() -> None:
    knobs = pages()["reference/knobs.md"]
    for names in VARIABLES.values():
        assert all(f"`{name}`" in knobs for name in names)
    assert set(code_pages.knob_descriptions()) == {*VARIABLES, "origins"}
    described = code_pages.knob_descriptions().items()
    assert {knob: text for knob, text in described if re.search(r"\bNone\b", text) or not text[0].isalpha()} == {}
    assert all(f"| `{name}` | " in knobs for name in WITHOUT_EFFECT)
    for command, parser in command_parsers().items():
        text = pages()[f"reference/commands/{command.split()[0]}.md"]
        shown = [action for _, actions in code_pages.actions_of(parser) for action in actions]
        assert all(f"`{option}`" in text for action in shown for option in action.option_strings), command


def test_the_reference_has_every_public_name() -> None:
    """Of functions and classes the docstring is shown: there has to be one, or a comment, or a line of ours."""
    for module in [*code_pages.MODULES, code_pages.COMMON]:
        text = pages()[code_pages.module_page(module)]
        assert code_pages.names_of(module), module
        for name in code_pages.names_of(module):
            is_described = name in code_pages.VALUES or f"{module}.{name}" in code_pages.VALUES
            assert f"::: {module}.{name}\n" in text or is_described or find_module(f"{module}.{name}"), (module, name)


# ---------------------------------------------------------------- code blocks


def test_blocks_of_data_can_be_read() -> None:
    """What reads them is in the tests of Kubernetes' manifests, of launchers, and of the documentation's commands."""
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}
    for language, read in readers.items():
        assert blocks(language)
        for block in blocks(language):
            assert read(block.text), str(block)


def test_languages_are_those_that_a_test_looks_at() -> None:
    pages_of_today = [text for page, text in written_pages().items() if page != "CHANGELOG.md"]
    found = {match[2] for text in pages_of_today for match in FENCE.finditer(text)}
    assert found == {"bash", "console", "json", "python", "text", "toml", "yaml"}


def indented_code(markdown: str) -> list[str]:
    """First lines of code blocks that have no fence: no test would see what is in them."""
    return re.findall(r"(?m)^[ \t]*\n((?: {4}|\t)[ \t]*\S.*)$", FENCE.sub("", f"\n{markdown}"))


def test_all_code_blocks_have_fences() -> None:
    assert indented_code("a\n\n    code\n    more\n\n- a list,\n    goes on\n\n  ```bash\n\n      in it\n  ```\n") == [
        "    code"
    ]
    assert indented_code("\tcode\n") == ["\tcode"]
    assert {page: found for page, text in written_pages().items() if (found := indented_code(text))} == {}


def test_a_reason_ends_with_its_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<!-- not run: no GPU -->\n```python\na\n```\n<!-- a note -->\n```python\nb\n```\n"
    monkeypatch.setattr("tests.docs.blocks.written_pages", lambda: {"a.md": page})
    assert [block.not_run for block in blocks_of("a.md", "python")] == ["no GPU", None]


def test_python_blocks_compile() -> None:
    failed = {}
    for block in blocks("python", "py"):
        try:
            parse(block)
        except SyntaxError as error:
            failed[str(block)] = str(error)
    assert failed == {}


def aliases(tree: ast.AST) -> dict[str, str]:
    """Names in a program that stand for modules of Reigen's."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "reigen":
                    found[each.asname or "reigen"] = each.name if each.asname else "reigen"
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "reigen":
            for each in node.names:
                if find_module(f"{node.module}.{each.name}"):
                    found[each.asname or each.name] = f"{node.module}.{each.name}"
    return found


def unknown_names(tree: ast.AST, known: dict[str, str]) -> Iterator[str]:
    """What a program imports of Reigen, or uses as an attribute of its modules or in a call, and is not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "reigen":
            module = str(node.module)
            missing = [each.name for each in node.names if each.name != "*" and not has_name(module, each.name)]
            yield from (f"{module}.{name}" for name in missing)
        elif isinstance(node, ast.Import):
            named = [each.name for each in node.names if each.name.partition(".")[0] == "reigen"]
            yield from (name for name in named if find_module(name) is None)
        elif isinstance(node, ast.Attribute) and (module := module_of(node.value, known)) is not None:
            if not has_name(module, node.attr):
                yield f"{module}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = module_of(node.func.value, known)
            parameters = call_parameters(source_of(module), node.func.attr) if module else None
            if parameters is not None and not parameters.takes_any:
                given = {each.arg for each in node.keywords if each.arg}
                yield from (f"{module}.{node.func.attr}({name}=)" for name in given - parameters.names)


def source_of(module: str) -> str:
    return "reigen.numpy_ops" if module == "reigen" else module


def has_name(module: str, name: str) -> bool:
    names = attribute_names(source_of(module)) | (attribute_names("reigen") if module == "reigen" else frozenset())
    return name in names or name.startswith("__") or bool(find_module(f"{module}.{name}"))


def module_of(node: ast.AST, known: dict[str, str]) -> str | None:
    """The module of Reigen's that an expression stands for."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (outer := module_of(node.value, known)) is not None:
        module = f"{outer}.{node.attr}"
        return module if find_module(module) else None
    return None


def test_unknown_names_are_found() -> None:
    text = (
        "import reigen.torch as hvd\nfrom reigen.kv import create, make\nhvd.allreduce(t, nmae=1)\nhvd.elastic.no()\n"
    )
    tree = ast.parse(text)
    found = sorted(unknown_names(tree, aliases(tree)))
    assert found == ["reigen.kv.make", "reigen.torch.allreduce(nmae=)", "reigen.torch.elastic.no"]
    assert definition("reigen.torch", "allreduce") is not None


def test_python_blocks_use_names_that_exist() -> None:
    failed = {}
    known: dict[str, dict[str, str]] = {}
    for block in blocks("python", "py"):
        tree = parse(block)
        known[block.page] = known.get(block.page, {}) | aliases(tree)  # what an earlier block of the page has imported
        if found := sorted(unknown_names(tree, known[block.page])):
            failed[str(block)] = found
    assert failed == {}


def test_every_python_block_is_run_by_a_test_or_its_page_says_why_not() -> None:
    run = {(each.page, number) for programs in PROGRAMS.values() for each in programs for number in each.blocks}
    there = {(block.page, block.number): block for block in blocks("python", "py")}
    named = {place for place, block in there.items() if block.not_run}
    assert run | set(ELSEWHERE) <= set(there)
    assert set(there) - run - set(ELSEWHERE) == named
    assert not named & (run | set(ELSEWHERE))
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
    assert {page for page, _ in named} == {"docs/sagemaker.md"}

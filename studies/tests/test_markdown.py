"""Markdown shows what files say, and takes nothing of it for markup; nor do pages and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave_studies.markdown import markdown_table, markdown_words

EVIL = "<script>alert(1)</script> a|b [x](javascript:1) ![y](http://z) `c` \\| &lt; <!-- <b/>"
TAG = re.compile(r"<(script|b/|!--)")


def test_nothing_in_a_cell_is_markup() -> None:
    table = markdown_table(("what", "time"), "lr", [(EVIL, "1"), ("m < 256, A & B, a_b", "2")])
    head, rule, evil, plain = table.splitlines()
    assert (head, rule) == ("| what | time |", "|---|---:|") and plain == "| m < 256, A & B, a_b | 2 |"
    assert not TAG.search(evil) and "](" not in evil.replace("\\](", "")
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", evil)) == 3  # its own borders
    assert "\n" not in markdown_words("a\n\n# b")


RUN = ",LLaMA {evil},8 A100,8,1,1,1,,,1,8,2048,{evil},MFU,40,{evil}\n"


def test_pages_of_a_file_of_runs_have_none_of_its_tags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "<script>alert(1)</script>"
    head = "source,model,chips,tp,pp,cp,dp,vp,ep,mbs,gbs,seq,config,metric,value,second\n"
    cases, page = tmp_path / "cases.csv", tmp_path / "page.md"
    cases.write_text(head + evil + RUN.format(evil=evil) + evil + RUN.format(evil="7B"))
    assert run_app(["reproduce", "published", "--cases", str(cases), "--report", str(page)]) == 0
    assert "script" in page.read_text() and not TAG.search(page.read_text())
    assert not TAG.search(capsys.readouterr().out)


def test_pages_and_pictures_of_programs_have_none_of_their_tags(tmp_path: Path) -> None:
    evil = "</title></text><script>alert(1)</script>"
    program = tmp_path / "program.txt"
    program.write_text(
        f'''program("{evil}")
tp = mesh((2,), ("x",))
A = tensor((8, 8), "float32")
a = input(A, tp[S(0)])
b = scratch((4, 8), "float32", on=tp)
row = lane()
with tp:
    copy(b, a, lane=row, name="{evil}")
'''
    )
    args = ["simulate", str(program), "--cluster", "tpu-v4-pod"]
    for option, name in (("--svg", "x.svg"), ("--report", "x.html")):
        assert run_app([*args, option, str(tmp_path / name)]) == 0
        assert "<script>alert" not in (tmp_path / name).read_text()

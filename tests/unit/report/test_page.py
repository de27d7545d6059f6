"""The HTML page: complete, safe, and in an order that suits a reader."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from morecl.records import Record
from morecl.report.page import html
from synthetic import make_record, with_aca

RECORDS = [make_record(name, seed=seed, tasks=3) for name in ("icarl", "more") for seed in (0, 1)]


def test_page_is_self_contained_and_well_formed() -> None:
    page = html([*RECORDS, make_record('<b>&"', tasks=3)])
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "@import" not in page
    assert "url(" not in re.sub(r"url\(#", "", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'<a href="#([^"]+)"', page)) <= set(ids)
    alternatives = re.findall(r'<div class="drawing [a-z]+" role="img" aria-label="([^"]+)"><svg', page)
    images = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(images) == len(alternatives) == 6 * 2 + 3  # six figures for two widths, a matrix for each method
    assert all(len(text) > 30 for text in alternatives)
    for image in images:
        ElementTree.fromstring(image)
        assert set(re.findall(r"(?:href=\"|url\()#([^\")]+)", image)) <= set(ids)
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page


def test_names_from_records_are_escaped_everywhere() -> None:
    bad = "<script>alert(1)</script>"
    record = make_record(bad, f"folder:{bad}", tasks=2, config={"note": bad}, backbone=bad)
    data = record.data.model_copy(update={"classes": [bad] * 4})
    record = record.model_copy(update={"data": data, "class_order_name": bad})
    for records in ([record], [record, make_record("more", f"folder:{bad}", tasks=2, config={"note": "b"})]):
        assert "<script" not in html(records)


def test_page_shows_the_numbers() -> None:
    records = [with_aca(70.0, "icarl", "cifar10-5t")]
    records += [with_aca(80.0 + 2 * seed, "more", "cifar10-5t", seed) for seed in range(2)]
    page = html(records)
    assert '<b>81.00</b><span class="std"> ± 1.41</span>' in page
    assert '<span class="paper">[89.16 ± 0.96†]</span>' in page
    assert "3 runs of 2 methods on 1 benchmark" in page
    assert "4 runs of 3 methods on 1 benchmark" in html([*records, make_record("ncm", "cifar10-5t", tasks=1)])


def test_the_time_of_all_runs_is_told_only_if_each_was_alone() -> None:
    alone = make_record("icarl", seconds={"train": 90.0})
    assert "backbone vit_mini_patch4_32; 1.5 minutes of computing." in html([alone])
    shared = make_record("more", seconds={"train": 90.0}, shared=True)
    assert "backbone vit_mini_patch4_32." in html([alone, shared])


def test_joint_training_stands_on_the_card_if_it_is_better() -> None:
    records = [with_aca(70.0, "icarl"), with_aca(80.0, "more")]
    cards = re.findall(r'<div class="card">.*?</div>', html([*records, with_aca(85.0, "joint")]), flags=re.DOTALL)
    assert "MORE" in cards[0] and "best accuracy after the last task (ACA; Joint 85.0" in cards[0]
    assert "Joint" not in "".join(re.findall(r'<div class="card">.*?</div>', html([*records, with_aca(75.0, "joint")])))


def outline(page: str) -> list[str]:
    """Ids of sections, ``table`` and titles of figures, from top to bottom."""
    found = re.findall(r'<section id="(\w+)"|<(table)[ >]|<figcaption>(.*?)</figcaption>', page)
    return [section or table or figure for section, table, figure in found]


def test_a_number_that_never_varies_has_no_deviation() -> None:
    records = [
        make_record(method, seed=seed, seconds={"train": 40.0 + seed})
        for method in ("icarl", "more")
        for seed in (0, 1)
    ]
    page = html(records)
    cost = page[page.index('aria-label="Table: Time and memory"') :]
    cost = cost[: cost.index("</table>")]
    assert cost.count('40.5<span class="std"> ± 0.7</span>') == 2
    assert "<td>6.12</td>" in cost and "± 0.00" not in page
    assert "over 2 runs each. Without ±: the same in all runs." in page
    assert "over n runs. Without ±: one run, or the same in all." in html([*records, make_record("hat")])
    varying = [record.model_copy(update={"entries": {"heads": 10**6 * (1 + record.seed)}}) for record in records]
    assert '1.50<span class="std"> ± 0.71</span>' in html(varying)


def test_each_topic_has_its_tables_and_then_its_figures() -> None:
    assert outline(html(RECORDS)) == [
        "accuracy", "table", "Accuracy after each task",
        "unknown", "table", "table", "Detection of unknown classes (ROC)",
        "forgetting", "table", "Performance reduction rate", "iCaRL", "MORE",
        "errors", "table", "Direction of task errors",
        "cost", "table", "Seconds of a run, by stage", "Numbers stored, by part",
        "notes",
    ]  # fmt: skip


def test_a_single_row_has_one_summary_instead_of_many_tables() -> None:
    for records in ([make_record()], [make_record(seed=seed) for seed in range(3)]):
        page = html(records)
        assert outline(page)[:3] == ["summary", "table", "accuracy"]
        assert outline(page).count("table") == 1
        for label in ("ACA", "IAUC", "FPR95", "TIL", "Reduction", "to earlier", "Seconds", "With buffer"):
            assert f'<th scope="row">{label}</th>' in page
        assert "best accuracy" not in page  # there is nothing to compare with
    assert f'<td>{make_record().metrics.aca:.2f}</td><td class="words">accuracy on all classes' in html([make_record()])


def test_a_single_task_without_detection_still_makes_a_page() -> None:
    assert "Detection" not in html([with_aca(70.0, "ncm", "digits-5t", tasks=1, auc_per_step=[])])


def with_classes(record: Record, names: list[str]) -> Record:
    return record.model_copy(update={"data": record.data.model_copy(update={"classes": names})})


def test_classes_are_named_by_task_in_the_order_of_learning() -> None:
    order = [3, 1, 0, 2]
    record = make_record("more", "folder:birds", tasks=2, class_order=order)
    page = html([with_classes(record, ["wren", "robin", "tit", "owl"])])
    assert re.findall(r"<li>(.*?)</li>", page.split('id="classes"')[1].split("</section>")[0]) == [
        "owl, robin",
        "wren, tit",
    ]
    assert 'id="classes"' not in html([record])
    assert 'id="classes"' not in html([with_classes(record, ["wren"])])  # names that do not cover the labels


def test_what_could_be_misread_stands_at_the_top() -> None:
    page = html([make_record(), make_record(level=70.0)])
    assert "averaged and count as one" in page.split("<nav")[0]
    assert "± 0.00" not in page
    assert 'class="caveats"' not in html(RECORDS)


def test_many_notes_on_labels_are_folded_away() -> None:
    names = ("back_update_batch_size", "distillation_temperature", "label_smoothing", "memory_batch_size", "momentum")
    rows = [make_record(config=dict.fromkeys(names, n), seed=n) for n in range(6)]
    assert "<summary>6 notes on the labels</summary>" in html(rows)
    assert "notes on the labels" not in html(RECORDS)

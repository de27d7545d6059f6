"""What the notes say, and when they are silent."""

from __future__ import annotations

from morecl import presets
from morecl.records import Record
from morecl.report import page
from morecl.report.grid import arrange
from morecl.report.notes import caveats, notes
from morecl.report.paper import declared_weights
from synthetic import aca_cells, held_out, main_table, make_record, with_aca


def test_notes_say_what_differs_from_the_paper() -> None:
    config = {"image_size": 160, "memory_size": 200, "bottleneck": 64, "lr": 0.1}
    found = notes([make_record("more", "cifar10-5t", config=config), make_record("more", "digits-5t")])
    assert "Backbone: vit_mini_patch4_32 (paper: DeiT-S/16 pre-trained on 611 ImageNet classes)." in found
    assert "Epochs: 5 (paper: 20)." in found
    assert "Image size: 160 (paper: 224)." in found
    assert "Learning rate (the paper's is that of MORE): 0.1 (paper: 0.005)." in found
    assert "Training images: 1,000 (paper: 50,000)." in found
    assert "Runs per number: 1 (paper: 5)." in found
    assert "Not in the paper: Digits-5T." in found
    assert not any(note.startswith(("Memory size", "Bottleneck")) for note in found)  # the paper's


def test_the_papers_own_backbone_is_no_difference() -> None:
    theirs, other = (make_record("gd", "cifar10-5t", backbone=n) for n in ("deit_small_patch16_224", "vit_tiny"))
    start, paper = theirs.backbone.sha256[:8], "(paper: DeiT-S/16 pre-trained on 611 ImageNet classes)."

    def told(*records: Record) -> list[str]:
        return [note for note in notes(records) if note.startswith("Backbone: ")]

    assert told(theirs) == [f"Backbone: deit_small_patch16_224 {paper}"]
    for classes in (611, 200):
        with declared_weights([f"{start}={classes}"], [theirs]):
            assert told(theirs) == []
            assert told(theirs, other) == [f"Backbone: vit_tiny {paper}"]


def test_a_note_says_which_row_has_the_papers_value() -> None:
    records = [make_record("more", "cifar10-5t", seed=n, config={"lr": lr}) for n, lr in enumerate((0.005, 0.1))]
    assert list(aca_cells(records)) == ["MORE", "MORE (lr 0.1)"]
    told = "those that do not name it have the paper's value"
    assert any(told in note for note in notes(records))
    assert not any(told in note for note in notes(records[:1]) + notes(records[1:]))


def test_notes_say_whose_back_update_has_the_papers_numbers_beside_it() -> None:
    ours = make_record("more", "cifar10-5t", config=dict(presets.MORE_DEFAULT))
    theirs = make_record("more", "cifar10-5t", config=dict(presets.MORE["paper"]))
    start = "MORE with a back-update that is not the paper's"
    [note] = [note for note in notes([ours]) if note.startswith(start)]
    assert note.endswith("run it with preset=paper to compare them.")
    [note] = [note for note in notes([ours, theirs]) if note.startswith(start)]
    assert note.endswith("they are beside MORE (paper), and in no column whose only MORE is such a one.")
    assert not any(note.startswith(start) for note in notes([theirs]))
    elsewhere = make_record("more", "digits-5t", config=dict(presets.MORE_DEFAULT))
    assert not any(note.startswith(start) for note in notes([elsewhere]))


def test_a_seed_that_was_run_twice_is_noted() -> None:
    records = [make_record("more"), make_record("more", level=70.0), make_record("more", seed=1)]
    expected = (
        "Runs with the same seed and class order are averaged and count as one: MORE on Digits-5T (3 runs, n = 2)."
    )
    assert expected in notes(records)
    assert caveats(arrange(records)) == [expected]
    assert caveats(arrange(records[1:])) == []


def test_scores_on_held_out_images_say_so_and_are_not_ranked_with_the_others() -> None:
    """As after a search: its trials differ from the run in other ways, too."""
    trials = [held_out(with_aca(90.0 + lr, config={"lr": lr})) for lr in (0.1, 0.2)]
    records = [*trials, with_aca(70.0, config={"lr": 0.1}), with_aca(60.0, "icarl")]
    best = {row.label: cells[0].best for row, cells in main_table(records).rows.items() if cells[0]}
    assert best == {
        "iCaRL": False,
        "MORE (lr 0.1)": True,
        "MORE (lr 0.1, held-out images)": False,
        "MORE (lr 0.2, held-out images)": False,
    }
    [note] = [note for note in notes(records) if "held-out" in note]
    assert note.startswith("Rows labelled held-out images are scored not on the test set but on training images")
    assert "<strong>70.0<i>" in page.html(records) and "<strong>90" not in page.html(records)


def test_rows_with_unlike_numbers_of_images_are_not_comparable() -> None:
    few = make_record("icarl")
    few = few.model_copy(update={"data": few.data.model_copy(update={"train_images": 400})})
    records = [make_record("more"), make_record("more", seed=1), few]
    images = few.data.test_images
    expected = (
        f"Not on the same images, so not comparable: Digits-5T (iCaRL: 400 to train, {images:,} to test; "
        f"MORE: 1,000 to train, {images:,} to test)."
    )
    assert caveats(arrange(records)) == [expected]
    assert expected in notes(records)
    many = [few, *(make_record("more", config={"lr": lr}) for lr in (0.1, 0.2, 0.3, 0.4, 0.5))]
    [note] = caveats(arrange(many))
    assert "MORE (lr 0.1), MORE (lr 0.2), MORE (lr 0.3) and 2 more: 1,000 to train" in note
    assert caveats(arrange([records[0], make_record("icarl")])) == []
    assert caveats(arrange([records[0], make_record("icarl", "cifar10-5t")])) == []


def test_rows_with_other_images_are_not_comparable() -> None:
    """As many, but others; those of a folder differ with the size of the backbone's input."""
    more, other = make_record("more"), make_record("icarl")
    other = other.model_copy(update={"data": other.data.model_copy(update={"fingerprint": "1" * 64})})
    images = f"1,000 to train, {other.data.test_images:,} to test"
    [note] = caveats(arrange([more, other]))
    assert note.endswith(f"Digits-5T (iCaRL: {images}, data 11111111; MORE: {images}, data 00000000).")
    larger = other.model_copy(update={"backbone": other.backbone.model_copy(update={"image_size": 224})})
    assert caveats(arrange([more, larger])) == []
    assert caveats(arrange([held_out(more), held_out(other)])) == caveats(arrange([held_out(more)]))


def test_where_all_scores_are_on_held_out_images_they_are_ranked_and_a_note_says_so() -> None:
    records = [held_out(with_aca(70.0)), held_out(with_aca(60.0, "icarl"))]
    best = {row.label: cells[0].best for row, cells in main_table(records).rows.items() if cells[0]}
    assert best == {"iCaRL": False, "MORE": True}
    assert "Scored on held-out training images, not on the test set: Digits-5T." in notes(records)
    assert not any("held-out" in note for note in notes([with_aca(70.0)]))


def test_all_classes_at_once_is_an_experiment_of_the_paper() -> None:
    one = make_record("ncm", "cifar10-5t", tasks=1)
    assert not any(note.startswith("Tasks") for note in notes([one]))
    assert "Tasks: 4 (paper: 5)." in notes([make_record("ncm", "cifar10-5t", tasks=4)])


def test_the_size_of_the_images_is_the_backbones_if_no_other_was_set() -> None:
    record = make_record("ncm", "cifar10-5t")
    assert not any(note.startswith("Image size") for note in notes([record]))  # an older record
    backbone = record.backbone.model_copy(update={"image_size": 32})
    assert "Image size: 32 (paper: 224)." in notes([record.model_copy(update={"backbone": backbone})])

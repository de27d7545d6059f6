"""What can be chosen by name: the methods and the shipped backbone. Needs no torch, so listings and reports are fast.

To add a method, write ``methods/NAME.py`` and add a line here; every contract test then runs on it.
"""

from __future__ import annotations

from dataclasses import dataclass

SHIPPED = "vit_mini_patch4_32"  # the backbone in assets/


@dataclass(frozen=True)
class MethodInfo:
    """A method as listings and tables show it."""

    name: str
    title: str  # in print
    location: str  # module.Class within morecl.methods
    group: str  # a key of GROUPS
    summary: str
    trains: bool = True  # False: trains nothing while the backbone is frozen
    useful: bool = True  # False: a reference for experiments that nobody would want as a model of one's own


GROUPS = {
    "paper": "MORE and the methods its paper compares with",
    "later": "methods published elsewhere, most of them after MORE",
    "ours": "ours",
    "frozen": "the frozen backbone alone",
    "bound": "bounds and reference",
}

# In the order of the rows of a table.
_METHODS = (
    MethodInfo(
        "finetune", "Fine-tuning", "finetune.Finetune", "bound", "naive fine-tuning: the lower bound", useful=False
    ),
    MethodInfo("owm", "OWM", "owm.Owm", "paper", "orthogonal weights modification (Nature Machine Intelligence 2019)"),
    MethodInfo("icarl", "iCaRL", "icarl.Icarl", "paper", "incremental classifier and representation (CVPR 2017)"),
    MethodInfo("agem", "A-GEM", "agem.Agem", "paper", "averaged gradient episodic memory (ICLR 2019)"),
    MethodInfo("eeil", "EEIL", "eeil.Eeil", "paper", "end-to-end incremental learning (ECCV 2018)"),
    MethodInfo("gd", "GD", "gd.Gd", "paper", "global distillation without the unlabelled stream (ICCV 2019)"),
    MethodInfo("derpp", "DER++", "derpp.Derpp", "paper", "dark experience replay (NeurIPS 2020)"),
    MethodInfo("hal", "HAL", "hal.Hal", "paper", "hindsight anchors (AAAI 2021)"),
    MethodInfo("pass", "PASS", "pass_.Pass", "paper", "prototype augmentation and self-supervision (CVPR 2021)"),
    MethodInfo("hat", "HAT", "hat.Hat", "paper", "hard attention to the task (ICML 2018)"),
    MethodInfo("ncm", "NCM", "ncm.Ncm", "frozen", "nearest class mean", trains=False),
    MethodInfo("csc", "CSC", "csc.Csc", "frozen", "cosine similarity classifier", trains=False),
    MethodInfo("more", "MORE", "more.More", "paper", "multi-head model with out-of-distribution replay (CoLLAs 2022)"),
    MethodInfo("slda", "SLDA", "slda.Slda", "later", "streaming linear discriminant analysis (2020)", trains=False),
    MethodInfo("row", "ROW", "row.Row", "later", "replay, OOD and within-task heads (ICML 2023)"),
    MethodInfo("tpl", "TPL", "tpl.Tpl", "later", "task prediction by likelihood ratio (ICLR 2024)"),
    MethodInfo(
        "ranpac", "RanPAC", "ranpac.Ranpac", "later", "random projections and a ridge classifier (NeurIPS 2023)"
    ),
    MethodInfo("morerp", "MORE-RP", "morerp.Morerp", "ours", "MORE and a ridge classifier over all classes"),
    MethodInfo("joint", "Joint", "joint.Joint", "bound", "joint training on all data: the upper bound"),
    MethodInfo(
        "single",
        "Single",
        "single.Single",
        "bound",
        "one model per task: the reference for forward transfer",
        useful=False,
    ),
)
METHODS = {method.name: method for method in _METHODS}

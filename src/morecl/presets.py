"""Named groups of settings, ``--set preset=NAME``. Needs no torch: reports tell from them whose settings a run had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Preset = Mapping[str, Any]

# MORE's back-update, all of its settings. `docs/methods/more.md` has the table and the reasons.
MORE: Mapping[str, Preset] = {
    "paper": {  # Eq. 3, Algorithm 1 and Section 4.3
        "back_update_epochs": 10,
        "back_update_lr": 0.01,
        "back_update_rate": "absolute",
        "back_update_momentum": 0.9,
        "back_update_batch_size": 16,
        "back_update_own_share": None,
        "back_update_draw": "random",
        "back_update_start": "last",
        "back_update_features": "own",
    },
    "authors": {  # train_clf.py of the published code
        "back_update_epochs": 10,
        "back_update_lr": 0.01,
        "back_update_rate": "absolute",
        "back_update_momentum": 0.0,  # 0.9 there, but with a new optimiser for every batch
        "back_update_batch_size": 16,
        "back_update_own_share": None,
        "back_update_draw": "balanced",
        "back_update_start": "trained",
        "back_update_features": "first",
    },
}
MORE_DEFAULT: Preset = {  # no preset: ours
    "back_update_epochs": 10,
    "back_update_lr": 0.001,
    "back_update_rate": "relative",
    "back_update_momentum": 0.0,
    "back_update_batch_size": 16,
    "back_update_own_share": 0.65,
    "back_update_draw": "random",
    "back_update_start": "last",
    "back_update_features": "own",
}

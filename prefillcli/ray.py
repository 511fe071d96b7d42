"""Scoring as a stage of a Ray Data pipeline: `prefillcli.Scorer` in actors. Importing this module needs no Ray.

    dataset.map_batches(
        prefillcli.ray.Scorer,
        fn_constructor_kwargs={"model": "models/judge", "labels": "Yes,No"},
        batch_format="pyarrow",
        batch_size=4096,
        concurrency=2,
    )

Every actor loads the models once. The rows of a batch are planned together, so a prefix is computed once for all rows
of a batch, not of two. In an actor, packs are sized by its share of the machine's memory.
"""

from __future__ import annotations

from prefillcli.library.session import Scorer

__all__ = ["Scorer"]

"""Images in a walk, against transformers' whole forward."""

from __future__ import annotations

import io
from contextlib import closing
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig

from prefillcli.images.image import FIRST_FEATURE, PlacedImage, RowImage
from prefillcli.models.image_processing import ImageProcessing
from prefillcli.models.multimodal import load_text_part
from prefillcli.models.vision import VisionTower
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.walk.features import PackFeatures, runs_of_features, uncut
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.models.image_families import EACH_FAMILY, eager_logits, make_family

SIZES = [(56, 40), (64, 64), (30, 90)]
SYSTEM = {"role": "system", "content": "You look at photos."}


def picture(number: int) -> Image.Image:
    rng = np.random.default_rng(number)
    width, height = SIZES[number]
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def row_image(number: int) -> RowImage:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return RowImage(file.getvalue(), bytes([number]), *SIZES[number])


def user(*parts: int | str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in parts]
    return [SYSTEM, {"role": "user", "content": content}]


#: Chats, with the numbers of their images: none, one that several share, three with text between.
CHATS: list[tuple[int | str, ...]] = [
    ("Is it a shoe?",),
    (0, "Is it a shoe?"),
    (0, "Is it a hat? Say yes or no."),
    (0, "front", 1, "back", 2, "Is it a shoe?"),
    (1, "Is it a shoe?"),
    (0, "front", 1, "back", 1, "Is it a shoe?"),
]


class Case(NamedTuple):
    """A family's model, its prompts with features, and the last logits of transformers' forward over each."""

    text: torch.nn.Module
    tower: VisionTower
    processing: ImageProcessing
    prompts: list[np.ndarray]
    positions: list[np.ndarray | None]
    images: list[tuple[PlacedImage, ...]]
    wanted: Tensor


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(family: str) -> Case:
        folder = make_family(family, tmp_path_factory.mktemp(family))
        return _case(folder)

    return made


def _case(folder: Path) -> Case:
    register()
    config = AutoConfig.from_pretrained(folder)
    processing = ImageProcessing.open(folder, config)
    tower = VisionTower.load(folder, config, processing, dtype=torch.float32, device=torch.device("cpu"))
    text, _ = load_text_part(folder, torch.float32, ATTENTION)
    firsts = {number: FIRST_FEATURE + 10_000 * number for number in range(len(SIZES))}
    prompts, positions, images, wanted = [], [], [], []
    for chat in CHATS:
        numbers = [each for each in chat if isinstance(each, int)]
        ids, logits = eager_logits(folder, user(*chat), [picture(number) for number in numbers])
        tokens, several = ids.numpy().astype(np.int32), len(numbers) > 1
        own = [processing.layout(*SIZES[number], several) for number in numbers]
        places = np.flatnonzero(tokens == processing.traits.feature)
        assert len(places) == sum(each.features for each in own)
        base, at = np.arange(len(tokens), dtype=np.int32), 0
        placed = []
        for number, layout in zip(numbers, own, strict=True):
            run = places[at : at + layout.features]
            # Of several images another resolution may be read: these are others.
            first = firsts[number] + (5_000 if several else 0)
            tokens[run] = first + np.arange(layout.features)
            placed.append(PlacedImage(first, layout.features, row_image(number), several))
            at += layout.features
            if layout.offsets is not None:
                base[run] = base[run[0]]
                base[run[-1] + 1 :] += layout.advance - layout.features
        prompts.append(tokens)
        positions.append(base if processing.traits.axes > 1 else None)
        images.append(tuple(placed))
        wanted.append(logits[-1])
    return Case(text.eval(), tower, processing, prompts, positions, images, torch.stack(wanted))


def plan_of(case: Case, limits: Limits) -> Plan:
    return make_plan(case.prompts, limits, positions=case.positions, images=case.images)


def walked(case: Case, plan: Plan, chunk: int) -> Tensor:
    found: dict[int, Tensor] = {}
    with closing(LayerWalk(case.text, chunk_tokens=chunk)) as walk:
        walk.features = lambda pack: PackFeatures(
            case.tower.traits, pack.images, lambda image: _layout(case, image).offsets, case.tower.features
        )
        for pack in plan.packs:
            logits = torch.cat(list(walk.read_logits(pack)))
            for row, (_, prompts) in zip(logits, pack.reads, strict=True):
                found |= dict.fromkeys(prompts, row)
    return torch.stack([found[number] for number in range(len(case.prompts))])


def _layout(case: Case, image: PlacedImage) -> Any:
    return case.processing.layout(image.image.width, image.image.height, image.several)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_prompts_with_images_have_the_logits_of_the_whole_model(family: str, case_of: Any) -> None:
    case = case_of(family)
    plan = plan_of(case, Limits(1 << 20, 1 << 20))
    assert plan.unique_tokens < sum(map(len, case.prompts)), "equal images are computed once"
    torch.testing.assert_close(walked(case, plan, 1 << 14), case.wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_packs_and_chunks_may_end_inside_an_image(family: str, case_of: Any) -> None:
    case = case_of(family)
    longest = max(map(len, case.prompts))
    plan = plan_of(case, Limits(longest, 1 << 20, held_tokens=longest))
    assert len(plan.packs) > 1
    assert any(pack.held for pack in plan.packs)
    torch.testing.assert_close(walked(case, plan, 16), case.wanted, atol=1e-5, rtol=1e-4)


def test_no_run_is_cut() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        edges = np.unique(rng.integers(0, 200, 12)).tolist()
        runs = list(zip(edges[::2], edges[1::2], strict=False))
        cuts = [0, *np.unique(rng.integers(1, 200, 6)).tolist(), 200]
        parts = uncut(list(pairwise(cuts)), runs)
        assert [parts[0][0], *(end for _, end in parts)] == sorted({0, *(end for _, end in parts)})
        assert parts[-1][1] == 200
        inside = {place for start, end in runs for place in range(start + 1, end)}
        assert inside.isdisjoint(end for _, end in parts)


def test_images_that_follow_one_another_see_only_themselves() -> None:
    first, second = (FIRST_FEATURE + number + np.arange(3) for number in (0, 50))
    tokens = np.concatenate([[1, 2], first, second, [3], first])
    assert runs_of_features(tokens) == [(2, 5), (5, 8), (9, 12)]
    assert runs_of_features(np.array([1, 2])) == []


@pytest.mark.parametrize("whole", [False, True])
def test_no_held_block_ends_inside_an_image_whose_features_see_one_another(whole: bool) -> None:
    seen = np.concatenate([np.arange(10), FIRST_FEATURE + np.arange(100)]).astype(np.int32)
    prompts = [np.append(seen, np.int32(end)) for end in range(4)]
    limits = Limits(1 << 20, 1 << 20, held_tokens=1 << 20, whole_images=whole)
    plan = make_plan(prompts, limits, block_tokens=64)
    inside = [end for end, _ in plan.carried if 10 < end < 110]
    assert bool(inside) != whole
